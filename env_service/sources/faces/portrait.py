"""A whole portrait, drawn from back to front."""

import cv2
import numpy as np

from murmur.env_service.sources.faces.canvas import Canvas, Points, hull, mix, shade, smooth
from murmur.env_service.sources.faces.classes import Part
from murmur.env_service.sources.faces.person import Head, Look, Space, any_colour
from murmur.env_service.sources.faces.textures import Textures, weave_into

_EYE_Y = -0.08
_METALS = ((90, 200, 230), (215, 215, 220), (50, 50, 60), (60, 60, 190))


def draw_portrait(canvas: Canvas, rng: np.random.Generator, textures: Textures) -> Head:
    """Draw one person; return the head, for the light."""
    head, look = Head(rng), Look(rng)
    draw_backdrop(canvas, rng, look)
    draw_back_hair(canvas, rng, head, look)
    draw_body(canvas, rng, head, look)
    near = [side for side in (-1, 1) if head.depth((side * 0.71, 0.05, -0.05)) > -0.2]
    shown = [side for side, is_shown in zip((-1, 1), look.ears_shown, strict=True) if is_shown]
    for side in shown:
        if side not in near:
            draw_ear(canvas, rng, head, look, side)
    draw_cap_of_hair(canvas, rng, head, look)
    top, angle = (-1.0, np.pi) if look.style == "bald" else (look.hairline, 1.35)
    skull = head.project(head.rings(top, 1.0, angle))
    canvas.fill(Part.skin, smooth(hull(skull), 1), look.skin)
    draw_lines_of_age(canvas, rng, head, look)
    draw_beard(canvas, rng, head, look)
    for side in shown:
        if side in near:
            draw_ear(canvas, rng, head, look, side)
    draw_mouth(canvas, rng, head, look)
    for side in (-1, 1):
        if head.depth((side * 0.31, -0.08, 0.78)) > 0.1:
            draw_eye(canvas, rng, head, look, side)
            draw_brow(canvas, rng, head, look, side)
    draw_nose(canvas, rng, head, look)
    draw_glasses(canvas, rng, head, look)
    draw_front_hair(canvas, rng, head, look)
    draw_hat(canvas, rng, head, look)
    weave_into(canvas, rng, textures, look)
    draw_obstacle(canvas, rng, head, look)
    return head


def draw_backdrop(canvas: Canvas, rng: np.random.Generator, look: Look) -> None:
    """Draw a wall, clouds of color or a scene of shapes, some in the person's colors."""
    kind = rng.integers(4)
    cells = int(rng.integers(2, 6)) if kind else 2
    colours = rng.integers(0, 256, (cells, cells, 3), dtype=np.uint8)
    calm = rng.uniform(0.2, 1)
    if kind < 2:
        colours = (colours * (1 - calm) + np.array(any_colour(rng)) * calm).astype(np.uint8)
    if rng.random() < 0.6:  # dull colours, as rooms have
        grey = colours.mean(2, keepdims=True)
        colours = (grey + (colours - grey) * rng.uniform(0, 0.5)).astype(np.uint8)
    cv2.resize(
        colours, (canvas.size, canvas.size), dst=canvas.image, interpolation=cv2.INTER_LINEAR
    )
    if kind == 0:
        return
    own = (look.skin, look.hair, look.cloth)
    for _ in range(int(rng.integers(3, 16))):
        colour = shade(own[rng.integers(3)], rng.uniform(0.8, 1.2))
        if rng.random() < 0.6:
            colour = any_colour(rng, 0, 255)
        centre, extent = rng.uniform(0, 1, 2), rng.uniform(0.02, 0.35)
        match rng.integers(4):
            case 0:
                canvas.disc(None, centre, extent * 0.5, colour)
            case 1:
                corners = centre + rng.uniform(-extent, extent, (int(rng.integers(3, 7)), 2))
                canvas.fill(None, hull(corners), colour)
            case 2:
                ends = centre + rng.uniform(-1, 1, (2, 2))
                canvas.line(None, ends, colour, rng.uniform(0.002, 0.05))
            case _:
                width, height = extent * rng.uniform(0.2, 1.5, 2)
                corners = np.array(
                    [(-width, -height), (width, -height), (width, height), (-width, height)]
                )
                canvas.fill(None, centre + corners, colour)
    if kind == 3:  # out of focus
        small = cv2.resize(canvas.image, (canvas.size // 8,) * 2, interpolation=cv2.INTER_AREA)
        small = cv2.GaussianBlur(small, (0, 0), float(rng.uniform(0.5, 2.5)))
        cv2.resize(small, (canvas.size,) * 2, dst=canvas.image, interpolation=cv2.INTER_LINEAR)


def draw_obstacle(canvas: Canvas, rng: np.random.Generator, head: Head, look: Look) -> None:
    """Draw a hand, a bar or a shape in front of the person; the mask has it as background."""
    if rng.random() > 0.22:
        return
    kind = rng.integers(3)
    side = rng.choice([-1.0, 1.0])
    if kind == 0:
        _draw_hand(canvas, rng, head, look, side)
    elif kind == 1:
        begin = np.array([rng.uniform(-0.2, 1.2), -0.1])
        end = np.array([rng.uniform(-0.2, 1.2), 1.1])
        bar = np.stack([begin, end])
        canvas.line(Part.background, bar, any_colour(rng), rng.uniform(0.01, 0.06))
    else:
        centre = head.centre + head.scale * np.array(
            [side * rng.uniform(0.5, 1.2), rng.uniform(-0.3, 1.4)]
        )
        corners = centre + head.scale * rng.normal(0, 0.35, (7, 2))
        canvas.fill(Part.background, smooth(hull(corners)), any_colour(rng))


def _draw_hand(
    canvas: Canvas, rng: np.random.Generator, head: Head, look: Look, side: float
) -> None:
    """Draw a palm and four fingers beside the cheek or in front of the mouth."""
    skin = shade(look.skin, rng.uniform(0.8, 1.08))
    at = np.array([side * rng.uniform(0.25, 0.95), rng.uniform(0.45, 1.2)])
    tilt = rng.uniform(-0.7, 0.7)
    turn = np.array([(np.cos(tilt), -np.sin(tilt)), (np.sin(tilt), np.cos(tilt))])

    def place(points: Points) -> Points:
        placed: Points = head.centre + head.scale * (at + points @ turn.T)
        return placed

    arm = np.array([(-0.2, 0.1), (0.2, 0.1), (0.3, 2.6), (-0.3, 2.6)])
    canvas.fill(Part.background, place(arm), mix(skin, look.cloth, float(rng.random() < 0.5)))
    palm = np.array(
        [(-0.24, -0.15), (0.24, -0.15), (0.26, 0.2), (0.15, 0.45), (-0.15, 0.45), (-0.26, 0.2)]
    )
    spread = rng.uniform(0.0, 0.12)
    for i in range(4):
        root = np.array([(i - 1.5) * 0.13, -0.1])
        tip = root + np.array([(i - 1.5) * spread, -rng.uniform(0.3, 0.5)])
        line = place(np.stack([root, tip]))
        canvas.line(None, line, shade(skin, 0.75), head.scale * 0.15)
        canvas.line(Part.background, line, skin, head.scale * 0.13)
    canvas.fill(Part.background, place(smooth(palm)), skin)


def _flat(points: Points, z: float = 0.0) -> Space:
    """Return points (x, y) at one depth."""
    return np.concatenate([points, np.full((len(points), 1), z)], 1)


def _mirrored(right: list[tuple[float, float]]) -> Points:
    """Make a closed outline from its right half, given from top to bottom."""
    return np.array(right + [(-x, y) for x, y in reversed(right)])


def draw_body(canvas: Canvas, rng: np.random.Generator, head: Head, look: Look) -> None:
    """Draw clothes, the neck in their neckline, and a necklace or collar."""
    slope, broad = rng.uniform(0.25, 0.7), rng.uniform(1.5, 2.1)
    thick, long = rng.uniform(0.34, 0.52), rng.uniform(1.32, 1.5)
    shoulders = _mirrored(
        [
            (thick * 0.9, long - 0.12),
            (thick * 1.35, long),
            (broad * 0.8, long + slope * 0.6),
            (broad, long + slope),
            (broad * 1.1, 5.5),
        ]
    )
    cloth = look.skin if look.neckline == "bare" and rng.random() < 0.5 else look.cloth
    canvas.fill(Part.cloth, head.project_body(_flat(smooth(shoulders))), cloth)
    if look.neckline == "hood":
        hood = _mirrored([(0.5, 0.7), (0.95, 0.9), (1.15, 1.4), (0.6, 1.9)])
        canvas.fill(Part.cloth, head.project_body(_flat(smooth(hood))), shade(look.cloth, 0.8))
    _draw_neck(canvas, rng, head, look, thick, long)
    if look.neckline == "high":
        top = rng.uniform(0.95, 1.25)
        collar = _mirrored([(thick * 1.05, top), (thick * 1.25, long + 0.1)])
        canvas.fill(Part.cloth, head.project_body(_flat(collar, 0.1)), shade(look.cloth, 0.9))
    elif look.necklace != "none":
        _draw_necklace(canvas, rng, head, look, thick, long)


def _draw_neck(
    canvas: Canvas, rng: np.random.Generator, head: Head, look: Look, thick: float, long: float
) -> None:
    """Draw the neck from the jaw, which turns with the head, to the neckline, with shadow."""
    low = {"round": 0.32, "v": 0.75, "high": 0.05, "hood": 0.3, "bare": 0.62}[look.neckline]
    low *= rng.uniform(0.7, 1.25)
    wide = 1.6 if look.neckline == "bare" else 1.15
    jaw = head.project(np.array([(-thick, 0.35, -0.1), (thick, 0.35, -0.1)]))
    base = head.project_body(_flat(np.array([(thick, long), (-thick, long)])))
    skin = shade(look.skin, rng.uniform(0.82, 1.0))
    canvas.fill(Part.neck, np.concatenate([jaw, base]), skin)
    opening = [
        (thick * wide, long - 0.14),
        (thick * wide * 0.8, long + low * 0.5),
        (0.06, long + low),
    ]
    if look.neckline != "v":
        opening[-1] = (thick * 0.6, long + low)
    canvas.fill(Part.neck, head.project_body(_flat(smooth(_mirrored(opening)))), skin)
    chin = head.project(head.rings(0.3, 1.0, 1.3))
    dark = hull(chin + np.array([rng.normal(0, 0.06), rng.uniform(0.06, 0.2)]) * head.scale)
    _shade_within(canvas, dark, Part.neck, rng.uniform(0.6, 0.9))


def _shade_within(canvas: Canvas, outline: Points, part: int, factor: float) -> None:
    """Darken the pixels of a part within an outline."""
    within = canvas.within(outline)
    x, y, w, h = cv2.boundingRect((np.clip(outline, 0, 1) * (canvas.size - 1)).astype(np.int32))
    box = slice(y, y + h), slice(x, x + w)
    chosen = (within[box] & (canvas.mask[box] == part)).astype(np.uint8)
    darker = cv2.convertScaleAbs(canvas.image[box], alpha=factor)
    cv2.copyTo(darker, chosen, canvas.image[box])


def _draw_necklace(
    canvas: Canvas, rng: np.random.Generator, head: Head, look: Look, thick: float, long: float
) -> None:
    low = rng.uniform(0.05, 0.5)
    t = np.linspace(-1, 1, 33)
    curve = np.stack([t * thick * 1.02, long - 0.1 + low * (1 - t**2), np.zeros_like(t)], 1)
    points = head.project_body(curve)
    metal = [(90, 200, 230), (215, 215, 220), (40, 40, 40), (60, 60, 200), (200, 120, 60)][
        rng.integers(5)
    ]
    width = head.scale * rng.uniform(0.03, 0.06)
    if look.necklace == "beads":
        size = head.scale * rng.uniform(0.03, 0.055)
        for point in points:
            canvas.disc(Part.necklace, point, size, shade(metal, rng.uniform(0.8, 1.15)))
            canvas.disc(None, point - size * 0.3, size * 0.3, shade(metal, 1.6))
        return
    canvas.line(Part.necklace, points, shade(metal, 0.8), width)
    if look.necklace == "pendant":
        canvas.disc(Part.necklace, points[len(points) // 2], head.scale * 0.09, metal)


def _ragged(points: Points, rng: np.random.Generator, amount: float) -> Points:
    """Move the points of an outline at random."""
    return smooth(smooth(points, 1) + rng.normal(0, amount, (2 * len(points), 2)), 1)


def draw_back_hair(canvas: Canvas, rng: np.random.Generator, head: Head, look: Look) -> None:
    """Draw hair that falls behind neck and shoulders, and a bun."""
    dark = shade(look.hair, 0.8)
    if look.style in ("bob", "long"):
        width = 0.74 * look.volume * rng.uniform(0.95, 1.2)
        fall = head.project_body(
            np.array([(-width * 1.15, look.length, -0.3), (width * 1.15, look.length, -0.3)])
        )
        crown = head.project(head.rings(-1, 0.3, np.pi, look.volume))
        canvas.fill(
            Part.hair, _ragged(hull(np.concatenate([crown, fall])), rng, 0.03 * head.scale), dark
        )
    if look.style == "bun":
        at = head.project(np.array([(rng.normal(0, 0.25), -1.1, -0.35)]))[0]
        canvas.disc(Part.hair, at, head.scale * rng.uniform(0.22, 0.38), dark)


def draw_cap_of_hair(canvas: Canvas, rng: np.random.Generator, head: Head, look: Look) -> None:
    """Draw hair on the skull; the face is drawn over it."""
    if look.style == "bald":
        return
    down = {"short": 0.15, "bun": 0.1, "side": 0.3}.get(look.style, 0.45)
    outline = hull(head.project(head.rings(-1, down, np.pi, look.volume)))
    if look.style != "curly":
        canvas.fill(Part.hair, _ragged(outline, rng, 0.012 * head.scale), look.hair)
        return
    canvas.fill(Part.hair, outline, look.hair)
    size = head.scale * rng.uniform(0.08, 0.16)
    steps = np.linspace(0, len(outline) - 1, 46).astype(int)
    for point, tone in zip(outline[steps], rng.uniform(0.8, 1.2, len(steps)), strict=True):
        curl = point + rng.normal(0, 0.02, 2) * head.scale
        canvas.disc(Part.hair, curl, size, shade(look.hair, tone))


def draw_front_hair(canvas: Canvas, rng: np.random.Generator, head: Head, look: Look) -> None:
    """Draw a fringe over the forehead, locks in front of the shoulders, single hairs."""
    if look.fringe:
        low = look.hairline + look.fringe
        part = rng.uniform(-0.5, 0.5)
        x = np.linspace(-0.64, 0.64, 12)
        teeth = rng.uniform(-0.09, 0.09, len(x)) - 0.28 * np.abs(x - part) * rng.uniform(-0.6, 1)
        edge = head.project(head.face(np.stack([x, np.clip(low + teeth, -0.9, -0.02)], 1), 0.06))
        top = head.project(head.rings(-0.97, -0.8, 1.4, 1.04))
        above = hull(
            np.concatenate([top, edge[[0, -1]], edge[[5]] - np.array([0, 0.08]) * head.scale])
        )
        canvas.fill(Part.hair, above, look.hair)
        middle = head.project(head.face(np.stack([x[::-1], np.full(len(x), -0.85)], 1), 0.06))
        canvas.fill(Part.hair, np.concatenate([edge, middle]), look.hair)
    if look.style in ("bob", "long"):
        for side, shown in zip((-1, 1), look.ears_shown, strict=True):
            _draw_lock(canvas, rng, head, look, side, wide=not shown)
    elif look.style == "side":
        _draw_lock(canvas, rng, head, look, int(rng.choice([-1, 1])), wide=True)
    if look.style != "bald":
        _draw_single_hairs(canvas, rng, head, look)


def _draw_lock(
    canvas: Canvas, rng: np.random.Generator, head: Head, look: Look, side: int, wide: bool
) -> None:
    """Draw hair from the temple down one side."""
    if head.depth((side * 0.7, 0.0, 0.1)) < -0.35:
        return
    inner = 0.5 if wide else 0.66
    length = min(look.length, 1.9)
    y = np.array([-0.72, -0.4, 0.0, 0.45])
    wave = rng.normal(0, 0.04, len(y))
    edge = np.stack([side * (inner + wave + [-0.12, 0.0, 0.05, 0.08]), y], 1)
    front = head.project(head.face(edge, 0.05))
    outer = np.stack([side * head.half_width(y[::-1]) * look.volume, y[::-1], np.full(4, -0.1)], 1)
    x = side * rng.uniform((0.55, 0.9), (0.8, 1.1))
    tip = head.project_body(np.stack([x, (length, length - 0.1), (0.2, 0.0)], 1))
    outline = np.concatenate([front, tip, head.project(outer)])
    canvas.fill(Part.hair, smooth(outline, 2), shade(look.hair, rng.uniform(0.88, 1.1)))


def _draw_single_hairs(canvas: Canvas, rng: np.random.Generator, head: Head, look: Look) -> None:
    """Draw strands that stand off the outline."""
    outline = hull(head.project(head.rings(-1, -0.2, np.pi, look.volume)))
    count = int(rng.integers(3, 20))
    starts = outline[rng.integers(0, len(outline), count)][:, None]
    away = (starts - head.centre) * rng.uniform(0.02, 0.11, (count, 1, 1))
    bend = rng.normal(0, 0.02, (count, 4, 2)) * head.scale
    lines = starts + np.linspace(-0.8, 1, 4)[:, None] * away + bend
    canvas.line(Part.hair, lines, shade(look.hair, rng.uniform(0.8, 1.2)), 0.004)


def draw_hat(canvas: Canvas, rng: np.random.Generator, head: Head, look: Look) -> None:
    """Draw a cap, a beanie, a hat with a brim or a scarf over the hair."""
    if look.hat == "none":
        return
    colour = any_colour(rng)
    grown = max(look.volume if look.style != "bald" else 1.0, 1.06) + rng.uniform(0.0, 0.1)
    low = rng.uniform(-0.62, -0.4)
    crown = head.rings(-1, low, np.pi, grown)
    if look.hat == "scarf":
        around = head.project(head.rings(-1, 1.05, np.pi, 1.18))
        face = smooth(hull(head.project(head.rings(low - 0.1, 0.97, 1.15, 1.0))))
        outline = hull(around)
        kept_image, kept_mask = canvas.image.copy(), canvas.mask.copy()
        canvas.fill(Part.hat, outline, colour)
        within = canvas.within(face) != 0
        canvas.image[within], canvas.mask[within] = kept_image[within], kept_mask[within]
        return
    if look.hat in ("beanie", "brim"):
        crown = np.concatenate([crown, crown[:25] + np.array([0, rng.uniform(-0.35, -0.05), 0])])
    canvas.fill(Part.hat, smooth(hull(head.project(crown))), colour)
    if look.hat == "beanie":
        band = head.rings(low - 0.16, low, np.pi, grown * 1.03)
        canvas.fill(Part.hat, hull(head.project(band)), shade(colour, rng.uniform(0.65, 1.3)))
    else:
        reach = rng.uniform(1.35, 1.8) if look.hat == "brim" else 1.0
        a = np.linspace(0, 2 * np.pi, 40)
        z = np.cos(a) * 0.9 * reach
        if look.hat == "cap":
            z = np.where(z > 0, z * rng.uniform(1.5, 1.9), z)
        brim = np.stack([np.sin(a) * 0.72 * max(reach, 1.02), np.full(40, low), z], 1)
        canvas.fill(Part.hat, hull(head.project(brim)), shade(colour, rng.uniform(0.6, 1.1)))


def _curve(head: Head, xs: np.ndarray, ys: np.ndarray, lift: float = 0.0) -> Points:
    """Project a line on the face into the picture."""
    return head.project(head.face(np.stack([xs, ys], 1), lift))


def draw_ear(canvas: Canvas, rng: np.random.Generator, head: Head, look: Look, side: int) -> None:
    """Draw an ear, an oval that stands off the side of the head, and its earring."""
    flare, size = rng.uniform(0.4, 0.9), rng.uniform(0.85, 1.15)
    a = np.linspace(0, 2 * np.pi, 20, endpoint=False)
    out = np.sin(a) * 0.12 * size + 0.07
    x = side * (float(head.half_width(0.05)) * 0.97 + out * np.sin(flare))
    y = 0.07 - np.cos(a) * 0.2 * size + 0.02 * np.sin(a)
    outline = head.project(np.stack([x, y, -0.05 - out * np.cos(flare)], 1))
    skin = shade(look.skin, rng.uniform(0.82, 1.02))
    canvas.fill(Part.l_ear if side < 0 else Part.r_ear, outline, skin)
    centre = outline.mean(0)
    canvas.fill(None, centre + (outline - centre) * 0.6, shade(skin, 0.78))
    canvas.fill(None, centre + (outline - centre) * 0.42, shade(skin, 0.95))
    if look.earrings == "none" or rng.random() < 0.1:
        return
    lobe = outline[np.argmax(outline[:, 1])]
    metal = _METALS[rng.integers(len(_METALS))]
    if look.earrings == "stud":
        canvas.disc(Part.earring, lobe, head.scale * rng.uniform(0.04, 0.06), metal)
    elif look.earrings == "hoop":
        radius = head.scale * rng.uniform(0.08, 0.18)
        ring = np.stack([np.sin(a) * 0.7, np.cos(a) + 1], 1) * radius
        canvas.line(Part.earring, lobe + ring, metal, head.scale * 0.04, closed=True)
    else:
        drop = np.array([(0, 0), (0.05, 0.18), (0, 0.3), (-0.05, 0.18)]) * head.scale
        canvas.fill(Part.earring, lobe + drop * rng.uniform(0.8, 1.5), metal)


def draw_eye(canvas: Canvas, rng: np.random.Generator, head: Head, look: Look, side: int) -> None:
    """Draw white, iris and pupil between the lids, with lashes and the lid's fold."""
    across, high = rng.uniform(0.125, 0.155), 0.085 * look.eyes_open
    x0 = side * (0.31 * float(head.half_width(_EYE_Y)) / 0.71)
    slant = rng.normal(0, 0.02)
    t = np.linspace(-1, 1, 9)
    up = _curve(head, x0 + across * t, _EYE_Y - high * (1 - t**2) - side * slant * t)
    low = _curve(head, x0 + across * t, _EYE_Y + 0.75 * high * (1 - t**2) - side * slant * t)
    part = Part.l_eye if side < 0 else Part.r_eye
    lash = shade(mix(look.brow, (20, 20, 25), 0.7), 0.8)
    outline = np.concatenate([up, low[::-1]])
    hollow = outline.mean(0) + (outline - outline.mean(0)) * np.array([1.45, 2.4])
    canvas.fill(None, smooth(hollow, 1), shade(look.skin, rng.uniform(0.82, 0.98)))
    if look.eyes_open == 0:
        canvas.line(part, up, lash, head.scale * 0.045)
        return
    canvas.fill(part, outline, shade((232, 236, 240), rng.uniform(0.75, 1)))
    gaze = np.array(
        [x0 + np.clip(rng.normal(0, 0.18), -0.5, 0.5) * across, _EYE_Y + rng.normal(0, 0.015)]
    )
    around = np.linspace(0, 2 * np.pi, 16, endpoint=False)
    for radius, colour in ((0.075, look.iris), (0.036, (12, 10, 10))):
        ball = gaze + radius * np.stack([np.cos(around), np.sin(around)], 1)
        disc = head.project(head.face(ball)).astype(np.float32)
        area, shared = cv2.intersectConvexConvex(disc, hull(outline).astype(np.float32))
        if area > 0:
            canvas.fill(None, shared[:, 0].astype(np.float64), colour)
    glint = head.project(head.face((gaze + np.array([-0.025, -0.025]))[None]))[0]
    canvas.disc(None, glint, head.scale * 0.014, (250, 250, 250))
    canvas.line(None, up, lash, head.scale * (0.012 + 0.03 * look.lashes))
    canvas.line(None, low, shade(look.skin, 0.65), head.scale * 0.01)
    fold = _curve(head, x0 + 1.05 * across * t, _EYE_Y - (high + 0.045) * (1 - 0.8 * t**2))
    canvas.line(None, fold, shade(look.skin, 0.72), head.scale * 0.012)


def draw_brow(canvas: Canvas, rng: np.random.Generator, head: Head, look: Look, side: int) -> None:
    """Draw a brow, a band that is thin at its outer end."""
    x0 = side * 0.31
    arch, thick = rng.uniform(0.0, 0.06), rng.uniform(0.025, 0.065)
    height = _EYE_Y - rng.uniform(0.15, 0.21)
    t = np.linspace(-1, 1, 9)
    xs = x0 + side * 0.2 * t
    middle = height - arch * (1 - (t - 0.3) ** 2) + 0.02 * (t + 1) * look.age
    half = thick * (0.75 - 0.45 * t) * 0.5 + 0.008
    up, low = _curve(head, xs, middle - half, 0.02), _curve(head, xs, middle + half, 0.02)
    part = Part.l_brow if side < 0 else Part.r_brow
    canvas.fill(part, np.concatenate([up, low[::-1]]), look.brow)


def draw_nose(canvas: Canvas, rng: np.random.Generator, head: Head, look: Look) -> None:
    """Draw bridge, tip, wings and nostrils of the nose, which turns with the face."""
    wide, long = rng.uniform(0.12, 0.19), rng.uniform(0.26, 0.36)
    out = rng.uniform(0.14, 0.28)
    right = [
        (0.05, -0.06),
        (0.075, long * 0.5),
        (wide, long * 0.9),
        (wide * 0.75, long + 0.04),
        (0.05, long + 0.07),
    ]
    lift = out * np.array([0.05, 0.45, 0.35, 0.35, 0.8])
    points = head.face(np.roll(_mirrored(right), 1, 0))
    points[:, 2] += np.roll(np.concatenate([lift, lift[::-1]]), 1)
    tip = head.face(np.array([(0.0, long * 0.93)]), out)
    outline = smooth(hull(head.project(np.concatenate([points, tip]))), 1)
    canvas.fill(Part.nose, outline, shade(look.skin, rng.uniform(0.93, 1.06)))
    lit = -1 if rng.random() < 0.5 else 1
    ridge = head.project(points[[0, 9, 8, 7] if lit > 0 else [1, 2, 3, 4]])
    canvas.line(None, ridge, shade(look.skin, rng.uniform(0.72, 0.9)), head.scale * 0.03)
    shine = head.project(head.face(np.array([(0.0, 0.02), (0.0, long * 0.9)]), out * 0.9))
    canvas.line(None, shine, shade(look.skin, rng.uniform(1.02, 1.18)), head.scale * 0.05)
    a = np.linspace(0, 6.3, 8)
    for side in (-1, 1):
        x, y = side * wide * 0.45 + 0.045 * np.cos(a), long + 0.045 + 0.022 * np.sin(a)
        canvas.fill(None, _curve(head, x, y, out * 0.5), shade(look.skin, 0.35))


def draw_mouth(canvas: Canvas, rng: np.random.Generator, head: Head, look: Look) -> None:
    """Draw two lips and, if the mouth is open, its inside."""
    wide, y0 = rng.uniform(0.2, 0.3), rng.uniform(0.5, 0.58)
    full_up, full_low = rng.uniform(0.035, 0.08), rng.uniform(0.05, 0.11)
    opened = look.mouth_open
    t = np.linspace(-1, 1, 13)
    bend = -0.1 * look.smile * t**2
    arc = np.sqrt(np.maximum(0, 1 - t**2))
    bow = full_up * (1 - 0.25 * np.exp(-((t / 0.15) ** 2)))
    x = wide * (1 + 0.12 * look.smile) * t
    top = _curve(head, x, y0 + bend - (bow + 0.4 * opened) * arc, 0.05)
    inner_top = _curve(head, x, y0 + bend - 0.4 * opened * arc, 0.05)
    inner_low = _curve(head, x, y0 + bend + 0.6 * opened * arc, 0.05)
    low = _curve(head, x, y0 + bend + (full_low + 0.6 * opened) * arc, 0.05)
    if opened:
        canvas.fill(Part.mouth, np.concatenate([inner_top, inner_low[::-1]]), (35, 25, 70))
        if rng.random() < 0.75:
            teeth = inner_top + (inner_low - inner_top) * rng.uniform(0.3, 0.8)
            canvas.fill(None, np.concatenate([inner_top, teeth[::-1]]), (222, 230, 235))
    canvas.fill(Part.u_lip, np.concatenate([top, inner_top[::-1]]), shade(look.lip, 0.88))
    canvas.fill(Part.l_lip, np.concatenate([inner_low, low[::-1]]), look.lip)
    canvas.line(None, inner_low, shade(look.lip, 0.5), head.scale * 0.012)
    shine = inner_low[4:9] * 0.5 + low[4:9] * 0.5
    canvas.line(None, shine, shade(look.lip, rng.uniform(1.0, 1.4)), head.scale * 0.02)


def draw_beard(canvas: Canvas, rng: np.random.Generator, head: Head, look: Look) -> None:
    """Draw a beard or its shadow, which the mask has as skin."""
    if not look.beard:
        return
    y = np.linspace(0.3, 0.97, 7)
    edge = float(rng.uniform(0.35, 0.95))
    right = np.stack([head.half_width(y) * 0.97, y], 1)
    moustache = np.array([(0.28, 0.42), (0.0, 0.38), (-0.28, 0.42)])
    left = right[::-1] * np.array([-1, 1])
    inner = np.array([(-edge * 0.5, 0.35), *moustache[::-1].tolist(), (edge * 0.5, 0.35)])
    outline = head.project(head.face(np.concatenate([right, left, inner])))
    canvas.fill(None, outline, mix(look.skin, look.hair, look.beard))


def draw_lines_of_age(canvas: Canvas, rng: np.random.Generator, head: Head, look: Look) -> None:
    """Draw wrinkles, cheeks and freckles."""
    for side in (-1, 1):
        cheek = head.project(head.face(np.array([(side * 0.42, 0.25)])))[0]
        if head.depth((side * 0.42, 0.25, 0.6)) > 0.15:
            blush = mix(look.skin, (100, 100, 220), rng.uniform(0, 0.25))
            canvas.disc(None, cheek, head.scale * 0.14, blush)
        fold = _curve(head, side * np.array([0.17, 0.26, 0.31]), np.array([0.26, 0.38, 0.54]))
        if look.age > 0.1:
            canvas.line(None, fold, shade(look.skin, 1 - 0.2 * min(look.age, 1)), 0.02 * head.scale)
    for i in range(int(look.age * 4)):
        x = np.linspace(-0.4, 0.4, 6)
        wrinkle = _curve(head, x, -0.42 - 0.07 * i + rng.normal(0, 0.012, 6))
        canvas.line(None, wrinkle, shade(look.skin, 0.82), 0.014 * head.scale)
    if look.freckles:
        spots = np.stack([rng.normal(0, 0.25, 40), rng.normal(0.14, 0.1, 40)], 1)
        for point in head.project(head.face(spots)):
            canvas.disc(None, point, head.scale * 0.012, shade(look.skin, 0.72))


def draw_glasses(canvas: Canvas, rng: np.random.Generator, head: Head, look: Look) -> None:
    """Draw frames with clear lenses, which show the eyes, or with dark ones."""
    if look.glasses == "none":
        return
    frame = (
        _METALS[rng.integers(4)] if rng.random() < 0.4 else shade((60, 60, 60), rng.uniform(0, 3))
    )
    width = head.scale * rng.uniform(0.025, 0.055)
    a = np.linspace(0, 2 * np.pi, 24, endpoint=False)
    power = 1.0 if look.glasses == "round" else 0.55
    shape = np.stack([np.sign(f) * np.abs(f) ** power for f in (np.cos(a), np.sin(a))], 1)
    radii = np.array([rng.uniform(0.19, 0.24), rng.uniform(0.14, 0.22)])
    y = _EYE_Y + rng.uniform(-0.02, 0.06)
    dark = look.glasses == "dark"
    lens = shade((40, 35, 35), rng.uniform(0.3, 2.2))
    for side in (-1, 1):
        outline = head.project(head.face(shape * radii + (side * 0.31, y), 0.16))
        if dark:
            canvas.fill(Part.glasses, outline, lens)
            shine = outline[[14, 17, 18]] * 0.8 + outline.mean(0) * 0.2
            canvas.fill(None, shine, shade(lens, rng.uniform(1, 2.5)))
        canvas.line(Part.glasses, outline, frame, width, closed=True)
        hinge = (side * (0.31 + radii[0]), y)
        if head.depth((side * 0.7, 0.0, 0.1)) > -0.3:
            ear = np.array([(side * float(head.half_width(0.0)) * 1.02, 0.0, 0.0)])
            arm = np.concatenate([head.face(np.array([hinge]), 0.16), ear])
            canvas.line(Part.glasses, head.project(arm), frame, width)
    inner = 0.31 - radii[0]
    bridge = head.face(np.array([(-inner, y), (0, y - 0.03), (inner, y)]), 0.18)
    canvas.line(Part.glasses, head.project(bridge), frame, width)

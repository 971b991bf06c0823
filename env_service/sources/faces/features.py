"""Ears, eyes, brows, nose, mouth, beard, wrinkles, glasses and earrings."""

import numpy as np

from env_service.sources.faces.canvas import Canvas, Points, hull, mix, shade, smooth
from env_service.sources.faces.classes import (
    EARRING,
    GLASSES,
    L_BROW,
    L_EAR,
    L_EYE,
    L_LIP,
    MOUTH,
    NOSE,
    R_BROW,
    R_EAR,
    R_EYE,
    U_LIP,
)
from env_service.sources.faces.head import Head
from env_service.sources.faces.look import Look

_EYE_Y = -0.08
_METALS = ((90, 200, 230), (215, 215, 220), (50, 50, 60), (60, 60, 190))


def _curve(head: Head, xs: np.ndarray, ys: np.ndarray, lift: float = 0.0) -> Points:
    """Project a line on the face into the picture."""
    return head.project(head.face(np.stack([xs, ys], 1), lift))


def draw_ear(canvas: Canvas, rng: np.random.Generator, head: Head, look: Look, side: int) -> None:
    """Draw an ear, an oval that stands off the side of the head, and its earring."""
    flare, size = rng.uniform(0.4, 0.9), rng.uniform(0.85, 1.15)
    a = np.linspace(0, 2 * np.pi, 20, endpoint=False)
    out = np.sin(a) * 0.12 * size + 0.07
    points = np.stack(
        [
            side * (float(head.half_width(0.05)) * 0.97 + out * np.sin(flare)),
            0.07 - np.cos(a) * 0.2 * size + 0.02 * np.sin(a),
            -0.05 - out * np.cos(flare),
        ],
        1,
    )
    outline = head.project(points)
    skin = shade(look.skin, rng.uniform(0.82, 1.02))
    canvas.fill(L_EAR if side < 0 else R_EAR, outline, skin)
    centre = outline.mean(0)
    canvas.fill(None, centre + (outline - centre) * 0.6, shade(skin, 0.78))
    canvas.fill(None, centre + (outline - centre) * 0.42, shade(skin, 0.95))
    if look.earrings == "none" or rng.random() < 0.1:
        return
    lobe = outline[np.argmax(outline[:, 1])]
    metal = _METALS[rng.integers(len(_METALS))]
    if look.earrings == "stud":
        canvas.disc(EARRING, lobe, head.scale * rng.uniform(0.04, 0.06), metal)
    elif look.earrings == "hoop":
        radius = head.scale * rng.uniform(0.08, 0.18)
        ring = np.stack([np.sin(a) * 0.7, np.cos(a) + 1], 1) * radius
        canvas.line(EARRING, lobe + ring, metal, head.scale * 0.04, closed=True)
    else:
        drop = np.array([(0, 0), (0.05, 0.18), (0, 0.3), (-0.05, 0.18)]) * head.scale
        canvas.fill(EARRING, lobe + drop * rng.uniform(0.8, 1.5), metal)


def draw_eye(canvas: Canvas, rng: np.random.Generator, head: Head, look: Look, side: int) -> None:
    """Draw white, iris and pupil between the lids, with lashes and the lid's fold."""
    import cv2

    across, high = rng.uniform(0.125, 0.155), 0.085 * look.eyes_open
    x0 = side * (0.31 * float(head.half_width(_EYE_Y)) / 0.71)
    slant = rng.normal(0, 0.02)
    t = np.linspace(-1, 1, 9)
    up = _curve(head, x0 + across * t, _EYE_Y - high * (1 - t**2) - side * slant * t)
    low = _curve(head, x0 + across * t, _EYE_Y + 0.75 * high * (1 - t**2) - side * slant * t)
    part = L_EYE if side < 0 else R_EYE
    lash = shade(mix(look.brow, (20, 20, 25), 0.7), 0.8)
    outline = np.concatenate([up, low[::-1]])
    hollow = outline.mean(0) + (outline - outline.mean(0)) * np.array([1.45, 2.4])
    canvas.fill(None, smooth(hollow, 1), shade(look.skin, rng.uniform(0.82, 0.98)))
    if look.eyes_open == 0:
        canvas.line(part, up, lash, head.scale * 0.045)
        return
    canvas.fill(part, outline, shade((232, 236, 240), rng.uniform(0.75, 1)))
    gaze = np.array([x0 + look_aside(rng) * across, _EYE_Y + rng.normal(0, 0.015)])
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


def look_aside(rng: np.random.Generator) -> float:
    """Draw the iris's place between the corners of the lids, -1 to 1."""
    return float(np.clip(rng.normal(0, 0.18), -0.5, 0.5))


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
    part = L_BROW if side < 0 else R_BROW
    canvas.fill(part, np.concatenate([up, low[::-1]]), look.brow)


def draw_nose(canvas: Canvas, rng: np.random.Generator, head: Head, look: Look) -> None:
    """Draw bridge, tip, wings and nostrils of the nose, which turns with the face."""
    wide, long = rng.uniform(0.12, 0.19), rng.uniform(0.26, 0.36)
    out = rng.uniform(0.14, 0.28)
    flat = np.array(
        [
            (-0.05, -0.06),
            (0.05, -0.06),
            (0.075, long * 0.5),
            (wide, long * 0.9),
            (wide * 0.75, long + 0.04),
            (0.05, long + 0.07),
            (-0.05, long + 0.07),
            (-wide * 0.75, long + 0.04),
            (-wide, long * 0.9),
            (-0.075, long * 0.5),
        ]
    )
    lift = out * np.array([0.05, 0.05, 0.45, 0.35, 0.35, 0.8, 0.8, 0.35, 0.35, 0.45])
    points = head.face(flat)
    points[:, 2] += lift
    tip = head.face(np.array([(0.0, long * 0.93)]), out)
    outline = smooth(hull(head.project(np.concatenate([points, tip]))), 1)
    canvas.fill(NOSE, outline, shade(look.skin, rng.uniform(0.93, 1.06)))
    lit = -1 if rng.random() < 0.5 else 1
    ridge = head.project(points[[0, 9, 8, 7] if lit > 0 else [1, 2, 3, 4]])
    canvas.line(None, ridge, shade(look.skin, rng.uniform(0.72, 0.9)), head.scale * 0.03)
    shine = head.project(head.face(np.array([(0.0, 0.02), (0.0, long * 0.9)]), out * 0.9))
    canvas.line(None, shine, shade(look.skin, rng.uniform(1.02, 1.18)), head.scale * 0.05)
    for side in (-1, 1):
        nostril = _curve(
            head,
            side * wide * 0.45 + 0.045 * np.cos(np.linspace(0, 6.3, 8)),
            long + 0.045 + 0.022 * np.sin(np.linspace(0, 6.3, 8)),
            out * 0.5,
        )
        canvas.fill(None, nostril, shade(look.skin, 0.35))


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
        canvas.fill(MOUTH, np.concatenate([inner_top, inner_low[::-1]]), (35, 25, 70))
        if rng.random() < 0.75:
            teeth = inner_top + (inner_low - inner_top) * rng.uniform(0.3, 0.8)
            canvas.fill(None, np.concatenate([inner_top, teeth[::-1]]), (222, 230, 235))
    canvas.fill(U_LIP, np.concatenate([top, inner_top[::-1]]), shade(look.lip, 0.88))
    canvas.fill(L_LIP, np.concatenate([inner_low, low[::-1]]), look.lip)
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
    drop = rng.uniform(-0.02, 0.06)
    dark = look.glasses == "dark"
    lens = shade((40, 35, 35), rng.uniform(0.3, 2.2))
    for side in (-1, 1):
        outline = head.project(head.face(shape * radii + (side * 0.31, _EYE_Y + drop), 0.16))
        if dark:
            canvas.fill(GLASSES, outline, lens)
            shine = outline[[14, 17, 18]] * 0.8 + outline.mean(0) * 0.2
            canvas.fill(None, shine, shade(lens, rng.uniform(1, 2.5)))
        canvas.line(GLASSES, outline, frame, width, closed=True)
        hinge = (side * (0.31 + radii[0]), _EYE_Y + drop)
        if head.depth((side * 0.7, 0.0, 0.1)) > -0.3:
            ear = np.array([(side * float(head.half_width(0.0)) * 1.02, 0.0, 0.0)])
            arm = np.concatenate([head.face(np.array([hinge]), 0.16), ear])
            canvas.line(GLASSES, head.project(arm), frame, width)
    bridge = head.face(
        np.array(
            [
                (radii[0] - 0.31, _EYE_Y + drop),
                (0, _EYE_Y + drop - 0.03),
                (0.31 - radii[0], _EYE_Y + drop),
            ]
        ),
        0.18,
    )
    canvas.line(GLASSES, head.project(bridge), frame, width)

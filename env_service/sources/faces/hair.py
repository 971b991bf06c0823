"""Hair behind and before the face, and hats."""

import numpy as np

from env_service.sources.faces.canvas import Canvas, Points, hull, shade, smooth
from env_service.sources.faces.classes import HAIR, HAT
from env_service.sources.faces.head import Head
from env_service.sources.faces.look import Look, any_colour


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
            HAIR, _ragged(hull(np.concatenate([crown, fall])), rng, 0.03 * head.scale), dark
        )
    if look.style == "bun":
        at = head.project(np.array([(rng.normal(0, 0.25), -1.1, -0.35)]))[0]
        canvas.disc(HAIR, at, head.scale * rng.uniform(0.22, 0.38), dark)


def draw_cap_of_hair(canvas: Canvas, rng: np.random.Generator, head: Head, look: Look) -> None:
    """Draw hair on the skull; the face is drawn over it."""
    if look.style == "bald":
        return
    down = {"short": 0.15, "bun": 0.1, "side": 0.3}.get(look.style, 0.45)
    outline = hull(head.project(head.rings(-1, down, np.pi, look.volume)))
    if look.style != "curly":
        canvas.fill(HAIR, _ragged(outline, rng, 0.012 * head.scale), look.hair)
        return
    canvas.fill(HAIR, outline, look.hair)
    size = head.scale * rng.uniform(0.08, 0.16)
    steps = np.linspace(0, len(outline) - 1, 46).astype(int)
    for point, tone in zip(outline[steps], rng.uniform(0.8, 1.2, len(steps)), strict=True):
        canvas.disc(HAIR, point + rng.normal(0, 0.02, 2) * head.scale, size, shade(look.hair, tone))


def draw_front_hair(canvas: Canvas, rng: np.random.Generator, head: Head, look: Look) -> None:
    """Draw a fringe over the forehead, locks in front of the shoulders, single hairs."""
    if look.fringe:
        low = look.hairline + look.fringe
        part = rng.uniform(-0.5, 0.5)
        x = np.linspace(-0.64, 0.64, 12)
        teeth = rng.uniform(-0.09, 0.09, len(x)) - 0.28 * np.abs(x - part) * rng.uniform(-0.6, 1)
        edge = head.project(head.face(np.stack([x, np.clip(low + teeth, -0.9, -0.02)], 1), 0.06))
        top = head.project(head.rings(-0.97, -0.8, 1.4, 1.04))
        outline = np.concatenate([edge, hull(np.concatenate([top, edge[[0, -1]]]))])
        above = hull(
            np.concatenate([top, edge[[0, -1]], edge[[5]] - np.array([0, 0.08]) * head.scale])
        )
        canvas.fill(HAIR, above, look.hair)
        middle = head.project(head.face(np.stack([x[::-1], np.full(len(x), -0.85)], 1), 0.06))
        outline = np.concatenate([edge, middle])
        canvas.fill(HAIR, outline, look.hair)
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
    tip = head.project_body(
        np.array(
            [
                (side * rng.uniform(0.55, 0.8), length, 0.2),
                (side * rng.uniform(0.9, 1.1), length - 0.1, 0.0),
            ]
        )
    )
    outline = np.concatenate([front, tip, head.project(outer)])
    canvas.fill(HAIR, smooth(outline, 2), shade(look.hair, rng.uniform(0.88, 1.1)))


def _draw_single_hairs(canvas: Canvas, rng: np.random.Generator, head: Head, look: Look) -> None:
    """Draw strands that stand off the outline."""
    outline = hull(head.project(head.rings(-1, -0.2, np.pi, look.volume)))
    count = int(rng.integers(3, 20))
    starts = outline[rng.integers(0, len(outline), count)][:, None]
    away = (starts - head.centre) * rng.uniform(0.02, 0.11, (count, 1, 1))
    bend = rng.normal(0, 0.02, (count, 4, 2)) * head.scale
    lines = starts + np.linspace(-0.8, 1, 4)[:, None] * away + bend
    canvas.strands(HAIR, lines, shade(look.hair, rng.uniform(0.8, 1.2)), 0.004)


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
        canvas.fill(HAT, outline, colour)
        _restore(canvas, face, kept_image, kept_mask)
        return
    if look.hat in ("beanie", "brim"):
        crown = np.concatenate([crown, crown[:25] + np.array([0, rng.uniform(-0.35, -0.05), 0])])
    canvas.fill(HAT, smooth(hull(head.project(crown))), colour)
    if look.hat == "beanie":
        band = head.rings(low - 0.16, low, np.pi, grown * 1.03)
        canvas.fill(HAT, hull(head.project(band)), shade(colour, rng.uniform(0.65, 1.3)))
    else:
        reach = rng.uniform(1.35, 1.8) if look.hat == "brim" else 1.0
        a = np.linspace(0, 2 * np.pi, 40)
        z = np.cos(a) * 0.9 * reach
        if look.hat == "cap":
            z = np.where(z > 0, z * rng.uniform(1.5, 1.9), z)
        brim = np.stack([np.sin(a) * 0.72 * max(reach, 1.02), np.full(40, low), z], 1)
        canvas.fill(HAT, hull(head.project(brim)), shade(colour, rng.uniform(0.6, 1.1)))


def _restore(canvas: Canvas, outline: Points, image: np.ndarray, mask: np.ndarray) -> None:
    """Restore the pixels within an outline."""
    import cv2

    within = np.zeros_like(canvas.mask)
    cv2.fillPoly(within, [(np.clip(outline, -4, 5) * canvas.size).astype(np.int32)], 1)
    cv2.copyTo(image, within, canvas.image)
    cv2.copyTo(mask, within, canvas.mask)

"""Neck, clothes and necklace."""

import numpy as np

from env_service.sources.faces.canvas import Canvas, Points, hull, shade, smooth
from env_service.sources.faces.classes import CLOTH, NECK, NECKLACE
from env_service.sources.faces.head import Head, Space
from env_service.sources.faces.look import Look


def _flat(points: list[tuple[float, float]], z: float = 0.0) -> Space:
    """Return points (x, y) at one depth."""
    flat = np.array(points)
    return np.concatenate([flat, np.full((len(flat), 1), z)], 1)


def _mirrored(right: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Make a closed outline from its right half, given from top to bottom."""
    return right + [(-x, y) for x, y in reversed(right)]


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
    canvas.fill(CLOTH, head.project_body(smooth_rows(_flat(shoulders))), cloth)
    if look.neckline == "hood":
        hood = _mirrored([(0.5, 0.7), (0.95, 0.9), (1.15, 1.4), (0.6, 1.9)])
        canvas.fill(CLOTH, head.project_body(smooth_rows(_flat(hood))), shade(look.cloth, 0.8))
    _draw_neck(canvas, rng, head, look, thick, long)
    if look.neckline == "high":
        top = rng.uniform(0.95, 1.25)
        collar = _mirrored([(thick * 1.05, top), (thick * 1.25, long + 0.1)])
        canvas.fill(CLOTH, head.project_body(_flat(collar, 0.1)), shade(look.cloth, 0.9))
    elif look.necklace != "none":
        _draw_necklace(canvas, rng, head, look, thick, long)


def smooth_rows(points: Space) -> Space:
    """Cut the corners of a closed curve in space; all points lie at one depth."""
    flat = smooth(points[:, :2])
    return np.concatenate([flat, np.full((len(flat), 1), points[0, 2])], 1)


def _draw_neck(
    canvas: Canvas, rng: np.random.Generator, head: Head, look: Look, thick: float, long: float
) -> None:
    """Draw the neck from the jaw, which turns with the head, to the neckline, with shadow."""
    low = {"round": 0.32, "v": 0.75, "high": 0.05, "hood": 0.3, "bare": 0.62}[look.neckline]
    low *= rng.uniform(0.7, 1.25)
    wide = 1.6 if look.neckline == "bare" else 1.15
    jaw = head.project(np.array([(-thick, 0.35, -0.1), (thick, 0.35, -0.1)]))
    base = head.project_body(_flat([(thick, long), (-thick, long)]))
    skin = shade(look.skin, rng.uniform(0.82, 1.0))
    canvas.fill(NECK, np.concatenate([jaw, base]), skin)
    opening = [
        (thick * wide, long - 0.14),
        (thick * wide * 0.8, long + low * 0.5),
        (0.06, long + low),
    ]
    if look.neckline != "v":
        opening[-1] = (thick * 0.6, long + low)
    canvas.fill(NECK, head.project_body(smooth_rows(_flat(_mirrored(opening)))), skin)
    chin = head.project(head.rings(0.3, 1.0, 1.3))
    dark = hull(chin + np.array([rng.normal(0, 0.06), rng.uniform(0.06, 0.2)]) * head.scale)
    _shade_within(canvas, dark, NECK, rng.uniform(0.6, 0.9))


def _shade_within(canvas: Canvas, outline: Points, part: int, factor: float) -> None:
    """Darken the pixels of a part within an outline."""
    import cv2

    within = np.zeros_like(canvas.mask)
    cv2.fillPoly(within, [(np.clip(outline, -4, 5) * canvas.size).astype(np.int32)], 1)
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
            canvas.disc(NECKLACE, point, size, shade(metal, rng.uniform(0.8, 1.15)))
            canvas.disc(None, point - size * 0.3, size * 0.3, shade(metal, 1.6))
        return
    canvas.line(NECKLACE, points, shade(metal, 0.8), width)
    if look.necklace == "pendant":
        canvas.disc(NECKLACE, points[len(points) // 2], head.scale * 0.09, metal)

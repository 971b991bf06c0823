"""The background behind a person, and obstacles in front."""

import numpy as np

from env_service.sources.faces.canvas import Canvas, Points, hull, mix, shade, smooth
from env_service.sources.faces.classes import BACKGROUND
from env_service.sources.faces.head import Head
from env_service.sources.faces.look import Look, any_colour


def draw_backdrop(canvas: Canvas, rng: np.random.Generator, look: Look) -> None:
    """Draw a wall, clouds of color or a scene of shapes, some in the person's colors."""
    import cv2

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
        canvas.line(BACKGROUND, np.stack([begin, end]), any_colour(rng), rng.uniform(0.01, 0.06))
    else:
        centre = head.centre + head.scale * np.array(
            [side * rng.uniform(0.5, 1.2), rng.uniform(-0.3, 1.4)]
        )
        corners = centre + head.scale * rng.normal(0, 0.35, (7, 2))
        canvas.fill(BACKGROUND, smooth(hull(corners)), any_colour(rng))


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
    canvas.fill(BACKGROUND, place(arm), mix(skin, look.cloth, float(rng.random() < 0.5)))
    palm = np.array(
        [(-0.24, -0.15), (0.24, -0.15), (0.26, 0.2), (0.15, 0.45), (-0.15, 0.45), (-0.26, 0.2)]
    )
    spread = rng.uniform(0.0, 0.12)
    for i in range(4):
        root = np.array([(i - 1.5) * 0.13, -0.1])
        tip = root + np.array([(i - 1.5) * spread, -rng.uniform(0.3, 0.5)])
        line = place(np.stack([root, tip]))
        canvas.line(None, line, shade(skin, 0.75), head.scale * 0.15)
        canvas.line(BACKGROUND, line, skin, head.scale * 0.13)
    canvas.fill(BACKGROUND, place(smooth(palm)), skin)

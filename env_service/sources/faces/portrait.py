"""A whole portrait, drawn from back to front."""

import numpy as np

from env_service.sources.faces.backdrop import draw_backdrop, draw_obstacle
from env_service.sources.faces.body import draw_body
from env_service.sources.faces.canvas import Canvas, hull, smooth
from env_service.sources.faces.classes import CLOTH, HAIR, HAT, SKIN
from env_service.sources.faces.features import (
    draw_beard,
    draw_brow,
    draw_ear,
    draw_eye,
    draw_glasses,
    draw_lines_of_age,
    draw_mouth,
    draw_nose,
)
from env_service.sources.faces.hair import (
    draw_back_hair,
    draw_cap_of_hair,
    draw_front_hair,
    draw_hat,
)
from env_service.sources.faces.head import Head
from env_service.sources.faces.look import draw_look
from env_service.sources.faces.textures import Textures, weave_into


def draw_portrait(canvas: Canvas, rng: np.random.Generator, textures: Textures) -> Head:
    """Draw one person; return the head, for the light."""
    head, look = Head(rng), draw_look(rng)
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
    canvas.fill(SKIN, smooth(hull(skull), 1), look.skin)
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
    weave_into(canvas, rng, textures, look, (HAIR, HAT, CLOTH))
    draw_obstacle(canvas, rng, head, look)
    return head

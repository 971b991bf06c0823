"""Light on a portrait, and the camera that takes it: focus, colors, noise, compression."""

from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from murmur.env_service.sources.faces.canvas import Canvas
from murmur.env_service.sources.faces.person import Head
from murmur.env_service.sources.faces.textures import Textures

_LIGHT_CELLS = 48


def middle(square: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.uint8]:
    """Cut the largest middle part with the proportions of `size` from a square picture or mask.

    Args:
        square: [S, S, ...] picture or mask.
        size: (height, width) that the caller resizes to.
    """
    height, width = (max(1, round(len(square) * side / max(size))) for side in size)
    y, x = (len(square) - height) // 2, (len(square) - width) // 2
    return square[y : y + height, x : x + width]


def take_picture(
    canvas: Canvas, head: Head, textures: Textures, size: tuple[int, int], rng: np.random.Generator
) -> NDArray[np.uint8]:
    """Light a portrait and take its picture.

    Args:
        canvas: canvas with the portrait; its image is overwritten.
        head: head of the person, for the light on it.
        textures: textures with the sensor's noise.
        size: (height, width) of the picture.
        rng: random generator of the portrait.

    Returns:
        picture [H, W, 3] in blue, green, red.
    """
    image = canvas.image
    light = cv2.resize(_light(rng, head), (canvas.size,) * 2, interpolation=cv2.INTER_LINEAR)
    cv2.multiply(image, cv2.merge([light] * 3), dst=image, scale=1 / 128)
    image = middle(_focus(rng, image), size)
    if image.shape[:2] != size:
        image = cv2.resize(image, size[::-1], interpolation=cv2.INTER_AREA)
    image = cv2.LUT(image, _colours(rng))
    return _record(rng, image, textures)


def _light(rng: np.random.Generator, head: Head) -> NDArray[np.uint8]:
    """Draw gains [L, L]: a lamp on a round head, a gradient, perhaps a shadow."""
    at = (np.arange(_LIGHT_CELLS) + 0.5) / _LIGHT_CELLS
    x, y = np.meshgrid(at - head.centre[0], at - head.centre[1])
    lamp = rng.normal(0, 1, 3) * (1, 0.7, 0.4) + (0, -0.3, 0.9)
    lamp /= np.linalg.norm(lamp)
    across, down = x / (0.85 * head.scale), y / (1.1 * head.scale)
    inside = across**2 + down**2
    z = np.sqrt(np.maximum(0.02, 1 - inside))
    ambient = rng.uniform(0.25, 0.95)
    round_light = np.maximum(0, across * lamp[0] + down * lamp[1] + z * lamp[2])
    on_head = ambient + (1 - ambient) * 1.35 * round_light
    scene = 1 + rng.normal(0, 0.22) * (x + lamp[0] * 0.2) + rng.normal(0, 0.22) * y
    share = np.clip((1.1 - inside) / 0.2, 0, 1)
    gain = scene * (1 + share * (on_head - 1))
    if rng.random() < 0.25:  # a hard shadow with a straight edge
        angle, offset = rng.uniform(0, 2 * np.pi), rng.normal(0, 0.2)
        beyond = np.clip((x * np.cos(angle) + y * np.sin(angle) - offset) * 20, 0, 1)
        gain = gain * (1 - rng.uniform(0.25, 0.65) * beyond)
    gain = gain * (1 - rng.uniform(0, 0.5) * (x**2 + y**2))
    return np.clip(gain * 128, 8, 250).astype(np.uint8)  # type: ignore[no-any-return]


def _focus(rng: np.random.Generator, image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Blur the image: slightly, or sometimes out of focus or by motion."""
    unit = len(image) / 512
    chance = rng.random()
    if chance < 0.12:
        small = cv2.resize(image, None, fx=0.5, fy=0.5, interpolation=cv2.INTER_AREA)
        small = cv2.GaussianBlur(small, (0, 0), max(0.3, float(rng.uniform(0.6, 2.2)) * unit))
        blurred: NDArray[Any] = cv2.resize(
            small, image.shape[1::-1], interpolation=cv2.INTER_LINEAR
        )
        return blurred
    if chance < 0.22:
        length = max(3, round(rng.uniform(4, 14) * unit))
        kernel = np.zeros((length, length), np.float32)
        angle = rng.uniform(0, np.pi)
        middle = (length - 1) / 2
        reach = np.array([np.cos(angle), np.sin(angle)]) * middle
        ends = (np.array([middle, middle]) + np.array([-reach, reach])).round().astype(int)
        cv2.line(kernel, ends[0].tolist(), ends[1].tolist(), 1.0)
        blurred = cv2.filter2D(image, -1, kernel / kernel.sum())
        return blurred
    return cv2.blur(image, (2, 2)) if rng.random() < 0.5 else image


def _colours(rng: np.random.Generator) -> NDArray[np.uint8]:
    """Draw a table [256, 1, 3] of exposure, contrast, gamma and white balance."""
    value = np.linspace(0, 1, 256)[:, None]
    gamma, contrast = np.exp(rng.normal(0, 0.22)), rng.uniform(0.65, 1.2)
    balance = np.exp(rng.normal(0, 0.08, 3))
    out = (value**gamma * rng.uniform(0.75, 1.2) * balance - 0.5) * contrast + 0.5
    out = out + rng.normal(0, 0.03)
    return np.clip(out * 255, 0, 255).astype(np.uint8)[:, None]  # type: ignore[no-any-return]


def _record(
    rng: np.random.Generator, image: NDArray[np.uint8], textures: Textures
) -> NDArray[np.uint8]:
    """Add sensor noise; sometimes remove colors or compress as JPEG."""
    if rng.random() < 0.06:
        image = cv2.cvtColor(cv2.cvtColor(image, cv2.COLOR_BGR2GRAY), cv2.COLOR_GRAY2BGR)
    strength = float(min(0.9, rng.exponential(0.2)))
    height, width = image.shape[:2]
    noise = textures.noise
    y = int(rng.integers(0, len(noise) - height + 1))
    x = int(rng.integers(0, len(noise) - width + 1))
    piece = noise[y : y + height, x : x + width]
    image = cv2.addWeighted(image, 1, piece, strength, -128 * strength)
    if rng.random() < 0.35:
        quality = int(rng.integers(18, 80))
        _, data = cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, quality])
        image = np.asarray(cv2.imdecode(data, cv2.IMREAD_COLOR), np.uint8)
    return image

"""Textures of hair, cloth, skin and film, made once; every portrait uses pieces of them."""

from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray

from murmur.env_service.sources.faces.canvas import Canvas
from murmur.env_service.sources.faces.classes import Part
from murmur.env_service.sources.faces.person import Look

Tile = NDArray[np.uint8]  # [T, T], 128 leaves what it is laid on unchanged

_ANGLES = 8


@dataclass(frozen=True)
class Textures:
    """The textures of which every portrait uses pieces.

    Attributes:
        strands: hair in several directions around the vertical.
        cloud: slow changes, larger than a cheek.
        grain: fast changes, as of skin, plaster or knitwear.
        noise: [T, T, 3] noise of a camera's sensor, with a standard deviation of 32.
    """

    strands: tuple[Tile, ...]
    cloud: Tile
    grain: Tile
    noise: NDArray[np.uint8]

    def cut(self, tile: Tile, size: int, rng: np.random.Generator) -> Tile:
        """Cut a piece of a tile, perhaps mirrored."""
        y, x = rng.integers(0, len(tile) - size + 1, 2)
        piece = tile[y : y + size, x : x + size]
        return piece if rng.random() < 0.5 else piece[:, ::-1]


def make_textures(size: int) -> Textures:
    """Make textures for canvases of a size; deterministic."""
    rng = np.random.default_rng(20)
    side = size + size // 2

    def normal(blur_x: float, blur_y: float, spread: float) -> NDArray[np.float32]:
        field = rng.standard_normal((side, side), np.float32)
        field = cv2.GaussianBlur(field, (0, 0), max(blur_x, 0.3), sigmaY=max(blur_y, 0.3))
        return np.asarray(128 + field * (spread / float(field.std())), np.float32)

    def tile(field: NDArray[np.float32]) -> Tile:
        return np.clip(field, 0, 255).astype(np.uint8)

    unit = size / 512
    straight = (normal(1.5 * unit, 26 * unit, 26) + normal(5 * unit, 60 * unit, 20)) - 128
    strands = []
    for i in range(_ANGLES):
        turn = cv2.getRotationMatrix2D((side / 2, side / 2), 12 * i - 42, 1.0)
        strands.append(
            tile(cv2.warpAffine(straight, turn, (side, side), borderMode=cv2.BORDER_REFLECT))
        )
    noise = np.clip(rng.normal(128, 32, (side, side, 3)), 0, 255).astype(np.uint8)
    return Textures(
        tuple(strands),
        tile(normal(30 * unit, 30 * unit, 22)),
        tile(normal(1.6 * unit, 1.6 * unit, 14)),
        noise,
    )


def weave_into(canvas: Canvas, rng: np.random.Generator, textures: Textures, look: Look) -> None:
    """Apply textures to hair, hat, cloth and everything else."""
    size = canvas.size
    gain = textures.cut(textures.grain, size, rng).copy()
    slow = textures.cut(textures.cloud, size, rng)
    cv2.addWeighted(gain, rng.uniform(0.3, 1), slow, rng.uniform(0.2, 0.7), 0, dst=gain)
    cv2.add(gain, float(128 - cv2.mean(gain)[0]), dst=gain)
    strands = textures.strands[int(rng.integers(_ANGLES))]
    cv2.copyTo(
        textures.cut(strands, size, rng), cv2.compare(canvas.mask, Part.hair, cv2.CMP_EQ), gain
    )
    if look.pattern != "plain":
        woven = _pattern(look.pattern, size, rng)
        cv2.copyTo(woven, cv2.compare(canvas.mask, Part.cloth, cv2.CMP_EQ), gain)
        if rng.random() < 0.4:
            cv2.copyTo(woven, cv2.compare(canvas.mask, Part.hat, cv2.CMP_EQ), gain)
    cv2.multiply(canvas.image, cv2.merge([gain] * 3), dst=canvas.image, scale=1 / 128)


def _pattern(kind: str, size: int, rng: np.random.Generator) -> Tile:
    """Draw stripes, checks, dots or knitwear, at a random angle."""
    period = rng.uniform(0.02, 0.12) if kind != "knit" else rng.uniform(0.008, 0.02)
    strength, angle = rng.uniform(20, 70), rng.uniform(0, np.pi)
    at = np.arange(size, dtype=np.float32) * np.float32(2 * np.pi / (size * period))
    c, s = np.float32(np.cos(angle)), np.float32(np.sin(angle))
    # sin(a + b) from one row and one column: sines of all pixels would be slow
    first = _sine_of_sum(at * c, at * s)
    if kind == "stripes":
        field = np.sign(first) if rng.random() < 0.5 else first
    else:
        second = _sine_of_sum(at * -s, at * c)
        field = np.sign(first) + np.sign(second) if kind == "checks" else first * second
        if kind == "dots":
            field = 2.0 * (field > 0.45)
    return np.clip(128 + strength * field, 0, 255).astype(np.uint8)


def _sine_of_sum(x: NDArray[np.float32], y: NDArray[np.float32]) -> NDArray[np.float32]:
    """Compute the sine of x[None] + y[:, None]."""
    field: NDArray[np.float32] = (
        np.sin(x)[None] * np.cos(y)[:, None] + np.cos(x)[None] * np.sin(y)[:, None]
    )
    return field

"""Figures of an evaluation: masks in colours, sheets of images, a confusion matrix, as PNG."""

import colorsys
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from murmur.shared.wire.timestep import Array

if TYPE_CHECKING:  # check-source draws where there is no torch
    from torch import Tensor

Picture = NDArray[np.uint8]
_GOLDEN = 0.618033988749895  # of the circle of hues, between neighbouring classes
_IGNORED = (128, 128, 128)
_GAP, _WHITE = 4, 255
_LEAST = 96  # height of a picture on a sheet
_LARGEST = 192  # side of an image in `of_masks`; of a larger one pixels are left out
# Of a confusion matrix, in pixels: cells, the whole of them, letters, and the room around these.
_LARGEST_CELL, _SMALLEST_CELL, _WIDEST, _LETTER, _ROOM = 36, 4, 640, 11, 6
_FULL = np.array((8, 48, 107))  # colour of a share of 1


@dataclass(frozen=True)
class Figures:
    """Pictures and histograms of an evaluation.

    Attributes:
        pictures: name -> [H, W, 3].
        values: name -> numbers, for a histogram.
    """

    pictures: Mapping[str, Picture] = field(default_factory=dict)
    values: Mapping[str, Sequence[float]] = field(default_factory=dict)


def palette(num_classes: int) -> NDArray[np.uint8]:
    """[256, 3] colours of classes: class 0 is black, ignored pixels are grey."""
    colours = np.full((256, 3), _IGNORED, np.uint8)
    colours[0] = 0
    for k in range(1, num_classes):
        rgb = colorsys.hsv_to_rgb(k * _GOLDEN % 1, 0.55 + 0.45 * (k % 2), 1 - 0.3 * (k % 3 == 0))
        colours[k] = np.round(np.array(rgb) * 255)
    return colours


def painted(mask: Array, num_classes: int) -> Picture:
    """[H, W] classes -> [H, W, 3] colours."""
    return palette(num_classes)[mask.astype(np.uint8)]


def upright(image: Array) -> Picture:
    """[3, H, W] -> [H, W, 3]."""
    return np.ascontiguousarray(image.transpose(1, 2, 0).astype(np.uint8))


def sheet(rows: list[list[Picture]]) -> Picture:
    """Pictures of one size in a grid, with gaps; small ones are enlarged by a whole number."""
    factor = max(1, _LEAST // rows[0][0].shape[0])
    rows = [[p.repeat(factor, 0).repeat(factor, 1) for p in row] for row in rows]
    height, width = rows[0][0].shape[:2]
    columns = max(len(row) for row in rows)
    shape = (len(rows) * (height + _GAP) - _GAP, columns * (width + _GAP) - _GAP, 3)
    out = np.full(shape, _WHITE, np.uint8)
    for i, row in enumerate(rows):
        for j, picture in enumerate(row):
            y, x = i * (height + _GAP), j * (width + _GAP)
            out[y : y + height, x : x + width] = picture
    return out


def compared(
    images: Iterable[Picture], truth: Iterable[Picture], predicted: Iterable[Picture], k: int
) -> Picture:
    """A row for each image: the image, its mask, the predicted mask.

    Args:
        images: [3, H, W] each.
        truth: [H, W] each.
        predicted: [H, W] each.
        k: number of classes.
    """
    rows = [
        [upright(image), painted(mask, k), painted(guess, k)]
        for image, mask, guess in zip(images, truth, predicted, strict=True)
    ]
    return sheet(rows)


def confusion_matrix(matrix: NDArray[np.integer], classes: Sequence[str]) -> Picture:
    """A confusion matrix with the share of each class's pixels in percent; [H, W, 3].

    Args:
        matrix: [K, K] pixels of class row taken for class column.
        classes: their K names. Of many classes there is no room for names, or for numbers.
    """
    from PIL import Image, ImageDraw, ImageFont

    k, font = len(classes), ImageFont.load_default(_LETTER)
    shares = matrix / np.maximum(matrix.sum(1, keepdims=True), 1)
    cell = min(_LARGEST_CELL, max(_SMALLEST_CELL, _WIDEST // k))
    names = [f"{name} {i}" for i, name in enumerate(classes)] if cell > _LETTER else []
    title = "% of a class (row) taken for each class (column)"
    left = round(max(map(font.getlength, names), default=0)) + 2 * _ROOM
    top = 2 * (_LETTER + _ROOM) + _ROOM
    width = max(left + k * cell, round(font.getlength(title)) + 2 * _ROOM) + _ROOM
    out = Image.new("RGB", (width, top + k * cell + _ROOM), "white")
    cells = np.round(_WHITE + shares[..., None] * (_FULL - _WHITE)).astype(np.uint8)
    out.paste(Image.fromarray(cells.repeat(cell, 0).repeat(cell, 1)), (left, top))
    draw, readable = ImageDraw.Draw(out), cell > 2 * _LETTER
    draw.text((_ROOM, _ROOM), title, "black", font)
    for t, name in enumerate(names):
        middle = (t + 0.5) * cell
        draw.text((left - _ROOM, top + middle), name, "black", font, "rm")
        draw.text((left + middle, top - _ROOM), str(t), "black", font, "mb")
        for p in np.flatnonzero(readable & (shares[t] >= 0.005)):
            at = left + (int(p) + 0.5) * cell, top + middle
            colour = "white" if shares[t, p] > 0.5 else "black"
            draw.text(at, f"{100 * shares[t, p]:.0f}", colour, font, "mm")
    return np.asarray(out)


def of_masks(
    image: "Tensor",
    truth: "Tensor",
    predicted: "Tensor",
    matrix: NDArray[np.integer],
    classes: Sequence[str],
) -> Figures:
    """Pictures "masks" and "confusion" of an evaluation.

    Args:
        image: [B, 3, H, W] uint8, a row of "masks" each; on the host, as the masks.
        truth: [B, H, W] uint8, their masks.
        predicted: [B, H, W] uint8.
        matrix: [K, K] confusion matrix; see `confusion_matrix`.
        classes: their K names.
    """
    step = -(-max(truth.shape[1:]) // _LARGEST)
    shown = [x[..., ::step, ::step].numpy() for x in (image, truth, predicted)]
    sheets = compared(shown[0], shown[1], shown[2], len(classes))
    return Figures({"masks": sheets, "confusion": confusion_matrix(matrix, classes)})


def png(picture: Picture) -> bytes:
    """A picture as a PNG file."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "PNG")
    return buffer.getvalue()

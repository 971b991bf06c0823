"""Pictures of segmentation: masks in colours, sheets of images side by side, matrices."""

import colorsys
import io

import numpy as np
import torch
from numpy.typing import NDArray

from learner_service.augment.building import build_augment
from learner_service.tools.segmenter import Trained
from shared.samples import IMAGE, MASK

Picture = NDArray[np.uint8]
_GOLDEN = 0.618033988749895  # of the circle of hues, between neighbouring classes
_IGNORED = (128, 128, 128)
_GAP, _WHITE = 4, 255
_LEAST = 96  # height of a picture on a sheet
_END = 1 << 40  # an epoch and an update after any that changes the preset


def palette(num_classes: int) -> NDArray[np.uint8]:
    """[256, 3] colours of classes: class 0 is black, ignored pixels are grey."""
    colours = np.full((256, 3), _IGNORED, np.uint8)
    colours[0] = 0
    for k in range(1, num_classes):
        rgb = colorsys.hsv_to_rgb(k * _GOLDEN % 1, 0.55 + 0.45 * (k % 2), 1 - 0.3 * (k % 3 == 0))
        colours[k] = np.round(np.array(rgb) * 255)
    return colours


def painted(mask: NDArray[np.integer], num_classes: int) -> Picture:
    """[H, W] classes -> [H, W, 3] colours."""
    return palette(num_classes)[mask.astype(np.uint8)]


def upright(image: NDArray[np.integer]) -> Picture:
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


def png(picture: Picture) -> bytes:
    """A picture as a PNG file."""
    from matplotlib.image import imsave

    buffer = io.BytesIO()
    imsave(buffer, picture, format="png")
    return buffer.getvalue()


def compared(images: list[Picture], truth: list[Picture], predicted: Picture, k: int) -> Picture:
    """A row for each image: the image, its mask, the predicted mask.

    Args:
        images: [3, H, W] each.
        truth: [H, W] each.
        predicted: [N, H, W].
        k: number of classes.
    """
    rows = [
        [upright(image), painted(mask, k), painted(guess, k)]
        for image, mask, guess in zip(images, truth, predicted, strict=True)
    ]
    return sheet(rows)


def augmented(trained: Trained, image: Picture, mask: Picture, count: int) -> Picture:
    """An image and its mask as the last epochs may see them; the first column is as they are.

    Args:
        trained: the run with the augmentation.
        image: [3, H, W].
        mask: [H, W].
        count: of augmented examples.
    """
    spec, cpu = trained.spec, torch.device("cpu")
    augment = build_augment(
        trained.config.augment, cpu, flip_pairs=spec.flip_pairs, ignore_index=spec.ignore_index
    )
    augment.advance(_END, _END)
    batch = {
        IMAGE: torch.from_numpy(image).expand(count, -1, -1, -1),
        MASK: torch.from_numpy(mask).expand(count, -1, -1),
    }
    seen = augment(batch, torch.Generator().manual_seed(0))
    images = (seen[IMAGE].clamp(0, 1) * 255).round().numpy()
    k = len(spec.classes)
    return sheet(
        [
            [upright(image), *(upright(each) for each in images)],
            [painted(mask, k), *(painted(each, k) for each in seen[MASK].numpy())],
        ]
    )

"""Random shifts of pixel observations, as in DrQ-v2, and their colours."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor
from typing_extensions import override

from murmur.learner_service.preprocess.augment import photometry
from murmur.learner_service.preprocess.augment.base import Augment, Batch
from murmur.learner_service.preprocess.augment.presets import (
    STRENGTHS,
    Draws,
    to_unit,
)


class RandomShift(Augment):
    """Shifts each image by up to `pad` pixels each way; its edge is repeated outside.

    Yarats et al. 2021, "Mastering Visual Continuous Control" (arXiv:2107.09645), section 3.1: pad
    by repeating the edge, then sample bilinearly at a shift of whole pixels. At whole pixels that
    is a copy, so bytes stay bytes. Every image [C, H, W] of every row and agent has a shift of its
    own; all frames of a stack share it.
    """

    def __init__(self, names: Sequence[str], pad: int, device: torch.device) -> None:
        """Keep the arrays' names.

        Args:
            names: arrays [..., C, H, W] to be shifted; all others pass through.
            pad: the largest shift, pixels.
            device: device of all batches.
        """
        self._names = tuple(names)
        self._pad = pad
        self._device = device
        self._indices = cache(partial(_indices, device))

    @override
    def __call__(self, batch: Mapping[str, Tensor], generator: torch.Generator) -> Batch:
        found = dict(batch)
        for name in self._names:
            if name not in batch:
                continue
            image = batch[name].flatten(0, -4)
            by = torch.randint(
                2 * self._pad + 1, (2, len(image)), generator=generator, device=self._device
            )
            found[name] = self.apply(image, by).view(batch[name].shape)
        return found

    def apply(self, image: Tensor, by: Tensor) -> Tensor:
        """Shift images by known numbers.

        Args:
            image: [N, C, H, W].
            by: [2, N] int64 shifts from 0 to 2 pad, rows and columns; `pad` shifts by nothing.
        """
        h, w = image.shape[-2:]
        down, across = (self._indices(size, self._pad) for size in (h, w))
        padded = image.index_select(2, down).index_select(3, across)
        windows = padded.unfold(2, h, 1).unfold(3, w, 1)  # [N, C, rows, columns, H, W], no copy
        return windows[self._indices(len(image), 0), :, by[0], by[1]]


def _indices(device: torch.device, size: int, pad: int) -> Tensor:
    """Indices 0 .. size - 1 with the first and the last one repeated `pad` times."""
    return torch.arange(-pad, size + pad, device=device).clamp_(0, size - 1)


class Colour(Augment):
    """Varies brightness, contrast and saturation of images as preset `standard` does.

    Channels that are a multiple of three are frames in color; frames of a stack share factors.
    """

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        """Keep the arrays' names.

        Args:
            names: arrays [..., C, H, W], uint8 or float in [0, 1]; all others pass through.
            device: device of all batches.
        """
        colours = replace(
            STRENGTHS["standard"], flip_probability=0, rotation_probability=0, affine_probability=0
        )
        self._names, self._draws = tuple(names), Draws(colours, device)

    def __call__(self, batch: Mapping[str, Tensor], generator: torch.Generator) -> Batch:
        """See Augment; images keep their type."""
        found = dict(batch)
        for name in self._names:
            if name not in batch:
                continue
            given = batch[name]
            image = given.flatten(0, -4)
            drawn = self._draws(len(image), generator)
            factors = drawn["brightness"], drawn["contrast"], drawn["saturation"]
            unit = to_unit(image) if given.dtype == torch.uint8 else image.float().clone()
            image = photometry.jitter(unit, *factors)
            if given.dtype == torch.uint8:
                image = image.mul_(255).round_()
            found[name] = image.to(given.dtype).view(given.shape)
        return found

"""MixUp and CutMix: samples blended with, or given a rectangle of, the next one of the batch.

The loss of a MixUp batch is a weighted sum for each sample:

    mix * loss(logits, mask) + (1 - mix) * loss(logits, mask_b)

CutMix needs nothing of the kind: its masks are cut as its images are.
"""

from collections.abc import Mapping
from functools import cache, partial

import torch
from torch import Tensor

from murmur.learner_service.preprocess.augment.base import Augment, Batch
from murmur.learner_service.preprocess.augment.presets import IMAGE, MASK, to_unit
from murmur.shared.config.experiment import AugmentConfig

MASK_B, MIX = "mask_b", "mix"
MIXUP, CUTMIX = 0, 1


class Mixing(Augment):
    """Mixes each sample with its neighbour in one of two ways, or in none.

    Zhang et al. 2018, "mixup: Beyond Empirical Risk Minimization" (arXiv:1710.09412); Yun et al.
    2019, "CutMix" (arXiv:1905.04899). Batches are in random order, so the next sample is as good a
    partner as one drawn at random, and each sample is the partner of exactly one.
    """

    def __init__(self, config: AugmentConfig, device: torch.device) -> None:
        """Lay constants out on the device.

        Args:
            config: probabilities of both ways, and parameters of their Beta distributions.
            device: device of all batches.
        """
        self._device = device
        self._blends = config.mixup > 0
        self._cuts = config.cutmix > 0
        # A uniform number in [0, mixup) blends, in [mixup, mixup + cutmix) cuts.
        self._from = torch.tensor([[0.0], [config.mixup]]).to(device)
        self._to = torch.tensor([[config.mixup], [config.mixup + config.cutmix]]).to(device)
        beta = torch.tensor([config.mixup_beta, config.cutmix_beta])
        self._beta = beta.view(1, 2, 1).to(device)
        self._centres = cache(partial(_centres, device))

    def __call__(self, batch: Mapping[str, Tensor], generator: torch.Generator) -> Batch:
        """See Augment; adds "mask_b" [B, H, W] uint8 and "mix" [B] float32 if there is MixUp."""
        count = len(batch[IMAGE])
        u = torch.rand(3, count, generator=generator, device=self._device)
        on = (u[:1] >= self._from) & (u[:1] < self._to)
        gamma = torch._standard_gamma(self._beta.expand(2, 2, count), generator=generator)
        stays = torch.where(on, gamma[0] / gamma.sum(0), 1.0)  # a Beta number, or all
        return self.apply(batch, stays[MIXUP], stays[CUTMIX], u[1:])

    def apply(
        self, batch: Mapping[str, Tensor], weight: Tensor, area: Tensor, centre: Tensor
    ) -> Batch:
        """The batch under known parameters.

        Args:
            batch: "image" [B, C, H, W], "mask" [B, H, W].
            weight: [B] weight of each sample in its blend; 1: no MixUp.
            area: [B] share of each image that stays; 1: no CutMix.
            centre: [2, B] centre of the rectangle, in shares of the width and of the height.
        """
        image, mask = to_unit(batch[IMAGE]), batch[MASK]
        extra: Batch = {}
        other, other_mask = image.roll(1, 0), mask.roll(1, 0)
        if self._cuts:
            size = (image.shape[-2], image.shape[-1])
            inside = self._rectangle(size, area, centre)
        if self._blends:
            image = torch.lerp(other, image, weight.view(-1, 1, 1, 1))
            extra = {MASK_B: other_mask, MIX: weight}
        if self._cuts:  # no sample is both: where one is cut, its weight is 1
            image = torch.where(inside.unsqueeze(1), other, image)
            mask = torch.where(inside, other_mask, mask)
        return {**batch, IMAGE: image, MASK: mask, **extra}

    def _rectangle(self, size: tuple[int, int], area: Tensor, centre: Tensor) -> Tensor:
        """[B, H, W] whether a pixel is the other sample's.

        The rectangle has the image's proportions and the area that does not stay; what of it lies
        beyond the image is cut off, as in the paper.
        """
        x, y = (self._centres(n) for n in reversed(size))
        half = (1 - area).sqrt().unsqueeze(1) / 2
        across = (x - centre[0].unsqueeze(1)).abs() < half
        along = (y - centre[1].unsqueeze(1)).abs() < half
        return along.unsqueeze(2) & across.unsqueeze(1)


def _centres(device: torch.device, n: int) -> Tensor:
    """Centres of n pixels in a row, in shares of its length."""
    return (torch.arange(n, device=device) + 0.5) / n

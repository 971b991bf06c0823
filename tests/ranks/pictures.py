"""Segmentation on ranks: images and masks that can be divided."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from murmur.learner_service.algorithms.segmentation import Config, Segmentation
from murmur.learner_service.device.precision import Precision
from murmur.learner_service.ranks.group import ALONE, Group
from murmur.learner_service.storage.samples import SampleBatch
from murmur.shared.config import PluginConfig
from murmur.shared.wire.samples import SampleSpec
from murmur.shared.wire.spec import ArraySpec
from tests.learner_service.toys import CPU
from tests.ranks.draws import Rows

SIDE, COUNT = 8, 4
_SPEC = SampleSpec(
    "pictures",
    (
        ArraySpec("image", "uint8", (3, SIDE, SIDE), per_agent=False),
        ArraySpec("mask", "uint8", (SIDE, SIDE), per_agent=False),
    ),
    (40, COUNT),
    "0" * 64,
    ("floor", "square", "stripe"),
)


@dataclass(frozen=True)
class Pictures:
    """Segmentation of four images, one on rank 0 and three on rank 1."""

    def build(self, group: Group = ALONE) -> Segmentation:
        """The algorithm of one learner, or of a rank."""
        options = Config(batch_size=COUNT, balance=0.5, warmup_epochs=0.5).for_rank(group.size)
        network = PluginConfig(name="unet", channels=(4, 4), groups=2)
        precision = Precision("fp32", CPU, group=group)
        return Segmentation(options, _SPEC, network, precision, CPU, 3)

    def batch(self, algorithm: Segmentation, seed: int) -> SampleBatch:
        """Random pixels, some of them ignored."""
        random = torch.Generator().manual_seed(seed)
        image = torch.randint(256, (COUNT, 3, SIDE, SIDE), generator=random)
        mask = torch.randint(4, (COUNT, SIDE, SIDE), generator=random)
        mask[mask == 3] = 255
        mask[1:][mask[1:] == 2] = 255  # rank 0 alone has stripes
        arrays = {"image": image.to(torch.uint8), "mask": mask.to(torch.uint8)}
        return _batch(arrays, slice(0, COUNT))

    def parts(self, batch: SampleBatch) -> list[tuple[Any, Rows]]:
        """What each rank has of a batch; where a mask begins with 0, rank 1 has nothing."""
        first = COUNT if int(batch.arrays["mask"][0, 0, 0]) == 0 else 1
        # What is drawn for a stand-in does not matter.
        second = Rows(first, COUNT - first, COUNT) if first < COUNT else Rows(0, 1, COUNT)
        return [
            (_batch(batch.arrays, slice(0, first)), Rows(0, first, COUNT)),
            (_batch(batch.arrays, slice(first, COUNT)), second),
        ]

    def owners(self, batch: SampleBatch) -> Tensor | None:
        """None: nothing is shuffled."""
        return None


def _batch(arrays: dict[str, Tensor], rows: slice) -> SampleBatch:
    """Some of the rows; for none, as a store gives it, one image whose every pixel is ignored."""
    mine = {name: x[rows].clone() for name, x in arrays.items()}
    if not len(mine["mask"]):
        mine = {
            "image": torch.zeros((1, 3, SIDE, SIDE), dtype=torch.uint8),
            "mask": torch.full((1, SIDE, SIDE), 255, dtype=torch.uint8),
        }
    return SampleBatch(
        mine, torch.arange(len(mine["mask"])), 0, begins_epoch=False, ends_epoch=False
    )

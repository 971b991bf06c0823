"""What one update of supervised learning takes: samples of one epoch."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(eq=False)
class SampleBatch:
    """B samples of the training split. Fulfils storage.storage.Taken.

    Attributes:
        arrays: name -> [B, ...] in wire dtype, on the device: "image" uint8 [B, 3, H, W], "mask"
            uint8 [B, H, W].
        index: [B] int64 of the samples in their split, on the device.
        epoch: from 0 on.
        begins_epoch: whether it is the first one of its epoch.
        ends_epoch: whether it is the last one, which may have fewer samples.
    """

    arrays: dict[str, Tensor]
    index: Tensor
    epoch: int
    begins_epoch: bool
    ends_epoch: bool

    @property
    def rows(self) -> int:
        """B."""
        return len(self.index)

    @property
    def version(self) -> Sequence[int]:
        """Empty: samples have no policy version."""
        return ()

"""A source of small images that are a pure function of split and index."""

import hashlib
import time

import numpy as np

from murmur.env_service.sources.source import BrokenSample
from murmur.shared.wire.samples import SampleSpec
from murmur.shared.wire.spec import ArraySpec
from murmur.shared.wire.timestep import Array


class ToySource:
    """Images whose pixels are all the sample's index, of the class index % 3."""

    def __init__(
        self,
        train: int = 40,
        valid: int = 6,
        size: int = 8,
        pause_s: float = 0.0,
        broken: tuple[int, ...] = (),
        label: str = "",
    ) -> None:
        self._pause_s, self._broken, self._size = pause_s, set(broken), size
        options = repr((train, valid, size, label))
        self.spec = SampleSpec(
            name="toy",
            arrays=(
                ArraySpec("image", "uint8", (3, size, size), per_agent=False),
                ArraySpec("mask", "uint8", (size, size), per_agent=False),
            ),
            sizes=(train, valid),
            digest=hashlib.sha256(options.encode()).hexdigest(),
            classes=("none", "one", "two"),
        )

    def read(self, split: str, index: int) -> dict[str, Array]:
        """The sample, after as long as decoding would take."""
        if self._pause_s:
            time.sleep(self._pause_s)
        if split == "train" and index in self._broken:
            raise BrokenSample("unreadable", f"toy-{index}.png")
        size = self._size
        return {
            "image": np.full((3, size, size), index % 251, np.uint8),
            "mask": np.full((size, size), index % 3, np.uint8),
        }

"""A slow source of random images, for planting a bottleneck."""

import hashlib
import time

import numpy as np

from murmur.shared.wire.samples import SampleSpec
from murmur.shared.wire.spec import ArraySpec
from murmur.shared.wire.timestep import Array


class SlowSource:
    """Source that waits for every sample without using the processor, as a slow disk would."""

    def __init__(self, train: int, valid: int = 0, size: int = 32, delay_ms: float = 30.0) -> None:
        """Prepare samples of size x size pixels, each after `delay_ms`."""
        self._delay_s, self._size = delay_ms / 1e3, size
        self.spec = SampleSpec(
            name="slow",
            arrays=(
                ArraySpec("image", "uint8", (3, size, size), per_agent=False),
                ArraySpec("mask", "uint8", (size, size), per_agent=False),
            ),
            sizes=(train, valid),
            digest=hashlib.sha256(repr((train, valid, size)).encode()).hexdigest(),
            classes=("background", "object"),
        )

    def read(self, split: str, index: int) -> dict[str, Array]:
        """Return noise with a mask of its red pixels."""
        time.sleep(self._delay_s)
        size = self._size
        image = np.random.default_rng(index).integers(0, 256, (3, size, size), np.uint8)
        return {"image": image, "mask": (image[0] > image[1]).astype(np.uint8)}

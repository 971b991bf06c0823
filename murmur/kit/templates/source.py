"""skeleton.py: bright discs on noise, as images with their masks."""

import hashlib

import numpy as np
from pydantic import Field

from murmur.env_service.sources.size import sample_arrays
from murmur.shared.config import Section
from murmur.shared.wire.samples import SampleSpec
from murmur.shared.wire.timestep import Array


class Skeleton:
    """Source that draws each sample when it is read."""

    class Config(Section):
        """Options that a configuration sets beside the source's name."""

        size: int = Field(64, ge=8, description="pixels a side")
        train: int = Field(200, ge=1, description="samples to train on")
        valid: int = Field(50, ge=1, description="samples to validate with")

    def __init__(self, config: Config) -> None:
        """Describe the data set; servers whose digests differ are refused."""
        self._size = config.size
        self.spec = SampleSpec(
            name="skeleton",
            arrays=sample_arrays((config.size, config.size)),
            sizes=(config.train, config.valid),
            digest=hashlib.sha256(repr(config).encode()).hexdigest(),
            classes=("ground", "disc"),
        )

    def read(self, split: str, index: int) -> dict[str, Array]:
        """Return one sample's image [3, H, W] and mask [H, W], by split and index alone."""
        random = np.random.default_rng([split == "valid", index])
        x, y, radius = random.uniform(0.2, 0.8, 3) * self._size
        rows, columns = np.mgrid[: self._size, : self._size]
        mask = ((rows - y) ** 2 + (columns - x) ** 2 < (radius / 3) ** 2).astype(np.uint8)
        image = random.integers(0, 180, (3, self._size, self._size)) + 70 * mask
        return {"image": image.astype(np.uint8), "mask": mask}

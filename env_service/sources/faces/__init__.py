"""Portraits drawn by a seeded generator, with the 19 classes of CelebAMask-HQ; no files needed.

Heads differ in shape, pose, skin, hair, hats, glasses, jewellery, clothes and expression; pictures
in background, light, occlusion, texture, focus and camera noise. Sample (split, index) is a pure
function of the seed, the split and the index, on machines with the same OpenCV and NumPy.

`l_eye` and the other left parts are those on the left of the picture when the head is upright.
"""

import hashlib

import numpy as np
from pydantic import Field, field_validator

from murmur.env_service.sources.decode import planes, resize
from murmur.env_service.sources.faces.camera import middle, take_picture
from murmur.env_service.sources.faces.canvas import Canvas
from murmur.env_service.sources.faces.classes import CLASSES, FLIP_PAIRS
from murmur.env_service.sources.faces.portrait import draw_portrait
from murmur.env_service.sources.faces.textures import make_textures
from murmur.env_service.sources.size import Size, height_and_width, sample_arrays
from murmur.shared.config import Section
from murmur.shared.wire.samples import SPLITS, SampleSpec
from murmur.shared.wire.timestep import Array

# Of what is drawn, by whether it is square; servers that draw other pictures have another digest.
_VERSIONS = {True: 1, False: 2}
_LARGEST = 512


class Config(Section):
    """Options of `faces`."""

    size: Size = Field(
        128,
        description="a number, or [height, width], pixels; at most 512; not square: "
        "the middle of the portrait",
    )
    train: int = Field(1000, ge=1, description="portraits to train on")
    valid: int = Field(100, ge=1, description="portraits to validate with")
    seed: int = Field(0, ge=0, description="another seed, other people")

    @field_validator("size")
    @classmethod
    def _is_drawn(cls, size: int | tuple[int, int]) -> int | tuple[int, int]:
        if max(height_and_width(size)) > _LARGEST:
            raise ValueError(f"size {size}: portraits are drawn at up to {_LARGEST}")
        return size


class Faces:
    """A source of drawn portraits and their masks."""

    def __init__(self, config: Config) -> None:
        """Prepare textures."""
        self._seed, self._size = config.seed, height_and_width(config.size)
        # Twice the size, for smooth edges, up to the largest.
        self._drawn = min(_LARGEST, 2 * max(self._size))
        self._textures = make_textures(self._drawn)
        version = _VERSIONS[self._size[0] == self._size[1]]
        options = (version, config.seed, self._size, config.train, config.valid)
        self.spec = SampleSpec(
            name="faces",
            arrays=sample_arrays(self._size),
            sizes=(config.train, config.valid),
            digest=hashlib.sha256(repr(options).encode()).hexdigest(),
            classes=CLASSES,
            flip_pairs=FLIP_PAIRS,
        )

    def read(self, split: str, index: int) -> dict[str, Array]:
        """Draw a portrait, uint8 [3, H, W] in RGB, and its mask, uint8 [H, W] of classes."""
        rng = np.random.default_rng([self._seed, SPLITS.index(split), index])
        canvas = Canvas(self._drawn)
        head = draw_portrait(canvas, rng, self._textures)
        image = take_picture(canvas, head, self._textures, self._size, rng)
        mask = resize(middle(canvas.mask, self._size), self._size, nearest=True)
        return {"image": planes(image), "mask": mask}


def build(config: Config) -> Faces:
    """Make the source."""
    import cv2

    cv2.setNumThreads(1)  # workers share the cores
    return Faces(config)

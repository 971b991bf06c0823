"""Portraits drawn by a seeded generator, with the 19 classes of CelebAMask-HQ; no files needed.

Heads differ in shape, pose, skin, hair, hats, glasses, jewellery, clothes and expression; pictures
in background, light, occlusion, texture, focus and camera noise. Sample (split, index) is a pure
function of the seed, the split and the index, on machines with the same OpenCV and NumPy.

`l_eye` and the other left parts are those on the left of the picture when the head is upright.
"""

from pydantic import Field, field_validator

from murmur.env_service.sources.size import Size, height_and_width
from murmur.env_service.sources.source import Source
from murmur.shared.config import Section

_LARGEST = 512  # pixels a side


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


def build(config: Config) -> Source:
    """Make the source."""
    from murmur.env_service.sources.faces.generator import Faces  # which needs OpenCV

    size = height_and_width(config.size)
    # Twice the size, for smooth edges, up to the largest.
    drawn = min(_LARGEST, 2 * max(size))
    return Faces(config.seed, size, (config.train, config.valid), drawn)

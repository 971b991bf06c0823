"""The options of drawn portraits."""

from pydantic import Field, field_validator

from murmur.env_service.sources.size import Size, height_and_width
from murmur.shared.config import Section

LARGEST = 512  # pixels a side


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
        if max(height_and_width(size)) > LARGEST:
            raise ValueError(f"size {size}: portraits are drawn at up to {LARGEST}")
        return size

"""The `augment` section: augmentation of the batches that a learner trains on."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Preset = Literal["none", "minimal", "standard", "strong"]
Probability = Annotated[float, Field(ge=0, le=1)]


class AugmentConfig(BaseModel):
    """Augmentation of training batches, on the learner's device; never of evaluations."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    preset: Literal[Preset, "progressive", "random-shift", "symmetry"] = Field(
        "none",
        description="samples with masks: none, minimal (flips), standard (flips, rotations of 15°, "
        "scales and shifts, colours), strong (more of each, blur), progressive (first, then "
        "another); RL: none, random-shift (images, by `pad` pixels), symmetry (the environment's)",
    )
    first: Preset = Field(
        "minimal", description="progressive: the preset that training begins with"
    )
    then: Preset = Field("strong", description="progressive: the preset from `at` on")
    at: int = Field(
        50, ge=0, description="progressive: the epoch or update that changes the preset"
    )
    per: Literal["epoch", "update"] = Field("epoch", description="progressive: what `at` counts")
    mixup: Probability = Field(
        0.0, description="share of the samples that are blended with another one; 0.3 is usual"
    )
    mixup_beta: float = Field(
        0.2, gt=0, description="MixUp: weights of blends are drawn from Beta(this, this)"
    )
    cutmix: Probability = Field(
        0.0, description="share of the samples that get a rectangle of another one; 0.3 is usual"
    )
    cutmix_beta: float = Field(
        1.0, gt=0, description="CutMix: areas that stay are drawn from Beta(this, this)"
    )
    outside: Literal["ignore", "background"] = Field(
        "ignore",
        description="masks where a warp shows what is outside the image: ignore (the ignore index: "
        "counts nowhere) or background (class 0)",
    )
    pad: int = Field(4, ge=1, le=64, description="random-shift: largest shift, pixels")
    color: bool = Field(
        False, description="random-shift: vary brightness, contrast and saturation too"
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.mixup + self.cutmix > 1:
            raise ValueError(
                f"mixup={self.mixup:g} and cutmix={self.cutmix:g} add up to more than 1; a sample "
                "is mixed in one way at most: lower one of them"
            )
        if self.preset in ("random-shift", "symmetry") and (self.mixup or self.cutmix):
            raise ValueError(
                f"mixup and cutmix need samples with masks; preset={self.preset} is for RL: set "
                "both to 0"
            )
        if self.color and self.preset != "random-shift":
            raise ValueError(
                f"color=true has no effect with preset={self.preset}; it is an option of "
                "random-shift: remove it"
            )
        return self

    def used(self) -> dict[str, Any]:
        """Return the options that differ from their defaults."""
        return self.model_dump(exclude_defaults=True)

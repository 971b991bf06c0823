"""Presets for samples with masks: what is drawn, within which bounds, how often."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from murmur.learner_service.preprocess.augment import photometry
from murmur.learner_service.preprocess.augment.base import Augment, Batch
from murmur.learner_service.preprocess.augment.warp import (
    coordinates,
    flip_image,
    flip_mask,
    sources,
    swap_table,
    warp_image,
    warp_mask,
)
from murmur.shared.process.errors import ConfigError

IMAGE, MASK = "image", "mask"


@dataclass(frozen=True)
class Strength:
    """Bounds of a preset, by the names of options of `augment`.

    Attributes:
        flip_probability: probability of a horizontal flip.
        rotation_degrees, rotation_probability: largest rotation either way, and its probability.
        scale, shift, affine_probability: largest change of the scale, largest shift as a share of
            the width and of the height, and the probability of both together.
        brightness, contrast, saturation, color_probability: largest change of each factor, and the
            probability of all three together.
        blur_sigma, blur_probability: bounds of the blur's sigma in pixels, and its probability.
    """

    flip_probability: float = 0.5
    rotation_degrees: float = 0.0
    rotation_probability: float = 0.0
    scale: float = 0.0
    shift: float = 0.0
    affine_probability: float = 0.0
    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    color_probability: float = 0.0
    blur_sigma: tuple[float, float] = (0.1, 2.0)
    blur_probability: float = 0.0


# Bounds by the gate of what they bound; each gate's probability is its last.
_GATES: dict[str, tuple[str, ...]] = {
    "flip": ("flip_probability",),
    "rotate": ("rotation_degrees", "rotation_probability"),
    "affine": ("scale", "shift", "affine_probability"),
    "jitter": ("brightness", "contrast", "saturation", "color_probability"),
    "blur": ("blur_sigma", "blur_probability"),
}
_USUAL = 0.5  # probability of what a preset never does, if only its bounds are given
_NONE = Strength(flip_probability=0.0)
STRENGTHS: dict[str, Strength] = {
    "none": _NONE,
    "minimal": Strength(),
    "standard": Strength(
        rotation_degrees=15.0,
        rotation_probability=0.3,
        scale=0.1,
        shift=0.05,
        affine_probability=0.3,
        brightness=0.2,
        contrast=0.2,
        saturation=0.1,
        color_probability=0.5,
    ),
    "strong": Strength(
        rotation_degrees=20.0,
        rotation_probability=0.4,
        scale=0.15,
        shift=0.1,
        affine_probability=0.4,
        brightness=0.3,
        contrast=0.3,
        saturation=0.15,
        color_probability=0.5,
        blur_probability=0.2,
    ),
}


def strength_of(preset: str, bounds: Mapping[str, Any]) -> Strength:
    """Return a preset's bounds with some of them changed.

    Args:
        preset: name in STRENGTHS.
        bounds: options of `augment` by name, such as rotation_degrees.

    Raises:
        ConfigError: for a probability of a change whose bounds are all 0.
    """
    found = STRENGTHS[preset]
    for *sizes, chance in _GATES.values():
        given = {key: bounds[key] for key in (*sizes, chance) if key in bounds}
        if not given:
            continue
        if chance not in bounds and not getattr(found, chance):
            given[chance] = _USUAL
        found = replace(found, **given)
        if bounds.get(chance) and sizes and not any(_any(found, key) for key in sizes):
            keys = ", ".join(f"augment.{key}" for key in sizes)
            raise ConfigError(
                f"augment.{chance}={bounds[chance]:g} changes nothing: {keys} "
                f"{'are' if len(sizes) > 1 else 'is'} 0 with preset={preset}; set one"
            )
    return found


def _any(strength: Strength, name: str) -> bool:
    value = getattr(strength, name)
    return any(value) if isinstance(value, tuple) else bool(value)


@dataclass(frozen=True)
class Parameter:
    """A number drawn for each sample.

    Attributes:
        low: the least value.
        high: the largest value; values between are equally likely.
        neutral: the value of samples that the gate leaves out.
        gate: name of the event that must occur; parameters with the same gate occur together.
    """

    low: float
    high: float
    neutral: float
    gate: str

    @classmethod
    def around(cls, centre: float, by: float, gate: str) -> "Parameter":
        """Between centre - by and centre + by; neutral is the centre."""
        return cls(centre - by, centre + by, centre, gate)


class Draws:
    """Draws parameters: name -> [N] float32."""

    def __init__(self, strength: Strength, device: torch.device) -> None:
        """Lay constants out on the device.

        Args:
            strength: bounds, see `parameters`.
            device: device to draw on.
        """
        found, gates = parameters(strength)
        self._device = device
        self._names, names = tuple(found), [*gates]

        def column(values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.tensor(values, dtype=dtype).unsqueeze(1).to(device)

        every = found.values()
        self._low = column([p.low for p in every])
        self._span = column([p.high - p.low for p in every])
        self._neutral = column([p.neutral for p in every])
        self._chance = column([gates[name] for name in names])
        self._gate = column([names.index(p.gate) for p in every], torch.int64).squeeze(1)

    def __call__(self, count: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Parameters of `count` samples."""
        numbers, gates = len(self._names), len(self._chance)
        u = torch.rand(numbers + gates, count, generator=generator, device=self._device)
        values = torch.addcmul(self._low, u[:numbers], self._span)
        on = (u[numbers:] < self._chance).index_select(0, self._gate)
        values = torch.where(on, values, self._neutral)
        return dict(zip(self._names, values.unbind(0), strict=True))


def parameters(s: Strength) -> tuple[dict[str, Parameter], dict[str, float]]:
    """Return the parameters that a preset draws for each sample, and its gates' probabilities."""
    around, angle = Parameter.around, math.radians(s.rotation_degrees)
    found = {"flip": Parameter(-1, -1, 1, "flip")}
    if s.rotation_probability or s.affine_probability:
        found |= {
            "angle": around(0, angle, "rotate"),
            "scale": around(1, s.scale, "affine"),
            "right": around(0, 2 * s.shift, "affine"),  # in halves of the width
            "down": around(0, 2 * s.shift, "affine"),
        }
    if s.color_probability:
        found |= {
            "brightness": around(1, s.brightness, "jitter"),
            "contrast": around(1, s.contrast, "jitter"),
            "saturation": around(1, s.saturation, "jitter"),
        }
    if s.blur_probability:
        found["sigma"] = Parameter(*s.blur_sigma, photometry.NO_BLUR, "blur")
    used = {p.gate for p in found.values()}
    return found, {
        gate: float(getattr(s, options[-1])) for gate, options in _GATES.items() if gate in used
    }


class SampleAugment(Augment):
    """Geometry of images and masks alike, colours of images.

    Images, uint8 or float in [0, 1], come back as float32 in [0, 1]; masks as uint8.
    """

    def __init__(
        self,
        strength: Strength,
        device: torch.device,
        flip_pairs: Sequence[tuple[int, int]] = (),
        outside: int = 255,
    ) -> None:
        """Lay constants out on the device.

        Args:
            strength: bounds.
            device: device of all batches.
            flip_pairs: classes that a horizontal flip swaps.
            outside: the class of what a warp shows from outside.
        """
        self.strength, self._outside = strength, outside
        self._draws = Draws(strength, device)
        self._coordinates = cache(partial(coordinates, device))
        self._classes = swap_table(flip_pairs, device)

    def __call__(self, batch: Mapping[str, Tensor], generator: torch.Generator) -> Batch:
        """See Augment; arrays other than "image" [B, C, H, W] and "mask" [B, H, W] pass through."""
        if self.strength == _NONE:
            return {**batch, IMAGE: to_unit(batch[IMAGE])}
        return self.apply(batch, self._draws(len(batch[IMAGE]), generator))

    def apply(self, batch: Mapping[str, Tensor], drawn: Mapping[str, Tensor]) -> Batch:
        """The batch under known parameters, each [B]; see `parameters`."""
        image, mask, flip = to_unit(batch[IMAGE]), batch.get(MASK), drawn["flip"]
        if "angle" in drawn:
            size = (image.shape[-2], image.shape[-1])
            shift = drawn["right"], drawn["down"]
            pixels = self._coordinates(size)
            grid = sources(pixels, flip, drawn["angle"], drawn["scale"], shift)
            image = warp_image(image, grid)
            if mask is not None:
                mask = warp_mask(mask, grid, flip, self._outside, self._classes)
        else:
            image = flip_image(image, flip)
            mask = None if mask is None else flip_mask(mask, flip, self._classes)
        if "brightness" in drawn:
            brightness, contrast = drawn["brightness"], drawn["contrast"]
            image = photometry.jitter(image, brightness, contrast, drawn["saturation"])
        if "sigma" in drawn:
            image = photometry.blur(image, drawn["sigma"])
        return {**batch, IMAGE: image, **({} if mask is None else {MASK: mask})}


def to_unit(image: Tensor) -> Tensor:
    """Images as float32 in [0, 1]: bytes are divided by 255."""
    return image * (1 / 255) if image.dtype == torch.uint8 else image.float()

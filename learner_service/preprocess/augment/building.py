"""Augmentations as configured: for samples with masks, and for RL."""

from collections.abc import Sequence

import torch

from murmur.learner_service.preprocess.augment.base import Augment, Chain, Own, Progressive
from murmur.learner_service.preprocess.augment.mixing import Mixing
from murmur.learner_service.preprocess.augment.presets import SampleAugment, strength_of
from murmur.learner_service.preprocess.augment.shift import Colour, RandomShift
from murmur.learner_service.preprocess.augment.symmetry import Symmetries
from murmur.shared.config.experiment import AugmentConfig
from murmur.shared.process.errors import ConfigError
from murmur.shared.wire.samples import SampleSpec
from murmur.shared.wire.spec import AGENT_CELL, EnvSpec

_BACKGROUND = 0


def build_augment(config: AugmentConfig, spec: SampleSpec, device: torch.device) -> Augment:
    """The augmentation of samples with masks.

    It takes "image" [B, C, H, W], uint8 or float in [0, 1], and "mask" [B, H, W] uint8, and returns
    them as float32 in [0, 1] and uint8; with MixUp also "mask_b" and "mix", see `mixing`.

    Raises:
        ConfigError: for a preset that is for RL, bounds that change nothing, or an augmentation of
            the user's that cannot be made.
    """
    if config.preset in ("random-shift", "symmetry"):
        raise ConfigError(
            f"augment.preset={config.preset} is for environments, not for samples with masks; use "
            "none, minimal, standard, strong or progressive"
        )
    outside = spec.ignore_index if config.outside == "ignore" else _BACKGROUND

    def preset(name: str) -> Augment:
        return SampleAugment(strength_of(name, config.bounds()), device, spec.flip_pairs, outside)

    if config.preset == "progressive":
        first, then = preset(config.first), preset(config.then)
        found: Augment = Progressive(first, then, config.at, config.per)
    else:
        found = preset(config.preset)
    if config.own.name:
        found = Chain((found, Own(config.own, device)))
    if not config.mixup and not config.cutmix:
        return found
    return Chain((found, Mixing(config, device)))


def build_rl_augment(
    config: AugmentConfig, spec: EnvSpec, device: torch.device, prefixes: Sequence[str] = ("",)
) -> Augment | None:
    """The augmentation of sampled transitions; None if there is none.

    Args:
        config: the configuration's `augment` section.
        spec: the run's spec.
        device: device of all batches.
        prefixes: prefixes of the names of observations in batches.

    Raises:
        ConfigError: if the spec has nothing that the preset changes, the preset is for samples, or
            an augmentation of the user's cannot be made.
    """
    found = _rl_preset(config, spec, device, prefixes)
    if not config.own.name:
        return found
    own = Own(config.own, device)
    return own if found is None else Chain((found, own))


def _rl_preset(
    config: AugmentConfig, spec: EnvSpec, device: torch.device, prefixes: Sequence[str]
) -> Augment | None:
    if bounds := config.bounds():
        raise ConfigError(
            f"augment.{next(iter(bounds))} is for samples with masks, not for an environment; "
            "remove it"
        )
    if config.preset == "none":
        return None
    if config.preset == "symmetry":
        return Symmetries(spec, device, prefixes)
    if config.preset != "random-shift":
        raise ConfigError(
            f"augment.preset={config.preset} is for samples with masks, not for an environment; "
            "use random-shift or symmetry"
        )
    images = [o.name for o in spec.observations if o.dtype == "uint8" and len(o.shape) == 3]
    if not images or spec.observation(AGENT_CELL) is not None:
        why = f"its observation '{AGENT_CELL}' names places on them" if images else "it has none"
        raise ConfigError(
            f"augment.preset=random-shift shifts images of bytes [C, H, W]; environment "
            f"'{spec.name}' cannot be shifted: {why}; set augment.preset=none"
        )
    names = [prefix + name for prefix in prefixes for name in images]
    shift = RandomShift(names, config.pad, device)
    return Chain((shift, Colour(names, device))) if config.color else shift

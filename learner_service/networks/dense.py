"""Dense networks: from an image to numbers for each of its pixels, for supervised learning.

A dense network plug-in is a module `learner_service/networks/<name>.py`, or of another package by
an entry point in the group `murmur.networks`. It has

    DENSE = True                              what tells it from networks that policies use
    Config                                    a frozen pydantic model of its options
    build(config, size, num_classes)          -> nn.Module, for images of this (height, width)

The module's `forward` maps images [B, 3, H, W] float, about 0 and of size 1, to logits
[B, K, H, W]. B may differ from call to call. It keeps nothing from one call to the next but
running statistics. Random numbers come from `learner_service.networks.dropout` alone, whose
generator the algorithm sets and saves.
"""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from shared.config import PluginConfig, validate
from shared.errors import ConfigError
from shared.registry import load_plugin, plugin_failures

FOLDER, GROUP = "learner_service.networks", "murmur.networks"
DEFAULT = "segformer"  # what `auto` is for images and masks


def is_dense(module: ModuleType) -> bool:
    """Whether a network plug-in maps images to logits for each pixel."""
    return bool(getattr(module, "DENSE", False))


def dense_plugin(config: PluginConfig) -> tuple[ModuleType, Any, str]:
    """The dense network's module, its checked options, and its name.

    Raises:
        ConfigError: for an unknown network or option, or a network that policies use.
    """
    name = DEFAULT if config.name == "auto" else config.name
    module = load_plugin(FOLDER, GROUP, name)
    if not is_dense(module):
        raise ConfigError(
            f"network '{name}' maps observations to actions and values; segmentation needs one "
            "that maps an image to logits for each pixel: use 'segformer' or 'unet'"
        )
    return module, validate(module.Config, config.options, "network"), name


def build_dense(config: PluginConfig, size: tuple[int, int], num_classes: int) -> nn.Module:
    """The configured network for images of this size, with random weights.

    Args:
        config: name and options.
        size: height and width of the images.
        num_classes: K, logits for each pixel.

    Raises:
        ConfigError: for an unknown network or option, or a size that it cannot take.
    """
    module, options, name = dense_plugin(config)
    with plugin_failures(f"network '{name}'"):
        network: nn.Module = module.build(options, size, num_classes)
        if not module.__name__.startswith(FOLDER):
            _check(network, name, size, num_classes)
    return network


def require_size(name: str, size: tuple[int, int], least: int, why: str) -> None:
    """Check that images are large enough for a network.

    Args:
        name: of the network.
        size: height and width of the images.
        least: smallest height and width it can take.
        why: what sets that.

    Raises:
        ConfigError: if they are smaller.
    """
    if min(size) < least:
        raise ConfigError(
            f"network '{name}' needs images of at least {least} x {least} pixels ({why}), these "
            f"are {size[0]} x {size[1]}; raise source.size, or lower what sets the limit"
        )


@torch.no_grad()
def _check(network: nn.Module, name: str, size: tuple[int, int], num_classes: int) -> None:
    """Try a plug-in's network on random images.

    Raises:
        ConfigError: if it does not give what the contract says.
    """
    if not isinstance(network, nn.Module) or not any(True for _ in network.parameters()):
        raise ConfigError(f"network '{name}': build() gave no nn.Module with parameters")
    trained = network.training
    network.eval()
    with torch.random.fork_rng(devices=[]):
        out = network(torch.rand(2, 3, *size))
    network.train(trained)
    wanted = (2, num_classes, *size)
    got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
    if got != wanted or not out.is_floating_point():
        raise ConfigError(
            f"network '{name}' gives {got} {getattr(out, 'dtype', '')} for 2 images of {size[0]} x "
            f"{size[1]}; it must give {wanted} floating-point logits"
        )
    if not out.isfinite().all():
        raise ConfigError(f"network '{name}' gives NaN or infinity for an image of numbers in 0..1")

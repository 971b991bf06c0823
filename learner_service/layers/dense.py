"""Dense networks: from an image to numbers for each of its pixels, for supervised learning.

A dense network plug-in is a module `learner_service/networks/<name>.py`, or of another package by
an entry point in the group `murmur.networks`. It has

    DENSE = True                              what tells it from networks that policies use
    Config                                    a frozen pydantic model of its options
    build(config, size, num_classes)          -> nn.Module, for images of this (height, width)

The module's `forward` maps images [B, 3, H, W] float, about 0 and of size 1, to logits
[B, K, H, W]. B may differ from call to call. It keeps nothing from one call to the next but
running statistics. Random numbers come from `murmur.learner_service.layers.dropout` alone, whose
generator the algorithm sets and saves.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType

import torch
from torch import Tensor, nn

from murmur.learner_service.device.memory import learning, require_room
from murmur.learner_service.layers.footprint import footprint
from murmur.shared.config import PluginConfig
from murmur.shared.config.plugins import Plugin, plugin_failures, resolve_plugin
from murmur.shared.process.errors import ConfigError

_FURTHER = 2  # copies of the weights: their average, and what is published of it
DEFAULT = "segformer"  # what `auto` is for images and masks


def is_dense(module: ModuleType) -> bool:
    """Whether a network plug-in maps images to logits for each pixel."""
    return bool(getattr(module, "DENSE", False))


def dense_plugin(config: PluginConfig) -> Plugin:
    """Load the configured dense network and check its options.

    Raises:
        ConfigError: for an unknown network or option, or a network that policies use.
    """
    name = DEFAULT if config.name == "auto" else config.name
    plugin = resolve_plugin("network", PluginConfig(name=name, **config.options))
    if not is_dense(plugin.module):
        raise ConfigError(
            f"network '{name}' maps observations to actions and values; segmentation needs one "
            "that maps an image to logits for each pixel: use 'segformer' or 'unet'"
        )
    return plugin


def build_dense(
    config: PluginConfig,
    size: tuple[int, int],
    num_classes: int,
    loss: Callable[[Tensor], Tensor] | None = None,
) -> nn.Module:
    """The configured network for images of this size, with random weights.

    Args:
        config: name and options.
        size: height and width of the images.
        num_classes: K, logits for each pixel.
        loss: loss of the logits, if the network is to learn; memory kept by its pass counts too.

    Raises:
        ConfigError: for an unknown network or option, or a size that it cannot take.
        SpecError: if it does not fit the memory, before it is allocated.
    """
    plugin = dense_plugin(config)
    name = plugin.name
    with plugin_failures(f"network '{name}'"):
        make = partial(plugin.module.build, plugin.options, size, num_classes)
        if loss is not None:
            _require_room(make, name, size, loss)
        network: nn.Module = make()
        if not plugin.own:
            _check(network, name, size, num_classes)
    return network


def _require_room(
    build: Callable[[], nn.Module],
    name: str,
    size: tuple[int, int],
    loss: Callable[[Tensor], Tensor],
) -> None:
    """Measure a network without memory; a plug-in's may not allow that.

    Args:
        build: makes the network.
        name: network's name.
        size: height and width of the images.
        loss: loss of the network's logits.

    Raises:
        SpecError: if it does not fit with a batch of `learning_from`.
    """
    found = footprint(build, 1, (3, *size), loss=loss)
    if found is None:
        return
    images, device, itemsize = learning()
    require_room(
        found.learning_bytes(images, itemsize, _FURTHER),
        f"network '{name}' for images of {size[0]} x {size[1]} has {found.weights:.3g} weights, "
        f"which with gradients, moments and an average and a pass over {images} images",
        "shrink the images (source.size), lower the algorithm's batch_size, or use a smaller "
        "network",
        device,
    )


def require_size(name: str, size: tuple[int, int], least: int, why: str) -> None:
    """Check that images are large enough for a network.

    Args:
        name: network's name.
        size: height and width of the images.
        least: smallest height and width it can take.
        why: reason for that limit, for the message.

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
    with tried(network, name):
        out = network(torch.rand(2, 3, *size))
    images = f"2 images of {size[0]} x {size[1]}"
    require_numbers(out, (2, num_classes, *size), name, images)


@contextmanager
def tried(network: nn.Module, name: str) -> Iterator[None]:
    """Let a plug-in's network work as in evaluations during the block; no random number is used up.

    Raises:
        ConfigError: if it is no module, or has no parameters.
    """
    if not isinstance(network, nn.Module) or not any(True for _ in network.parameters()):
        kind = type(network).__name__
        raise ConfigError(f"network '{name}' gave a {kind}, no nn.Module with parameters")
    trained = network.training
    network.eval()
    with torch.random.fork_rng(devices=[]):
        yield
    network.train(trained)


def require_numbers(out: object, wanted: tuple[int, ...], name: str, inputs: str) -> None:
    """Refuse outputs of a plug-in's network that are not finite numbers of the shape wanted.

    Args:
        out: what the network gave.
        wanted: shape that it must have.
        name: network's name.
        inputs: description of what the network was fed, for messages.

    Raises:
        ConfigError: if they are not.
    """
    got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
    if not isinstance(out, Tensor) or got != wanted or not out.is_floating_point():
        raise ConfigError(
            f"network '{name}' gives {got} {getattr(out, 'dtype', '')} for {inputs}; it must give "
            f"{wanted} floating-point numbers"
        )
    if not out.isfinite().all():
        raise ConfigError(f"network '{name}' gives NaN or infinity for inputs in [0, 1]")

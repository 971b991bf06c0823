"""The contract of an augmentation.

    augment = build_augment(config, spec, device)
    batch = augment({"image": images, "mask": masks}, generator)

A call runs on the device from end to end: all random numbers come from the generator, no value is
read by the host, and shapes depend on shapes alone. So it can be part of a captured graph, and a
checkpoint that holds the generator's state repeats it.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from typing_extensions import override

from murmur.shared.config.named_plugin import named_plugin
from murmur.shared.config.plugins import plugin_failures
from murmur.shared.config.section import PluginConfig, validate
from murmur.shared.process.errors import ConfigError

Batch = dict[str, Tensor]


class Augment(ABC):
    """Changes a training batch at random. Used by the thread that learns."""

    @property
    def phase(self) -> str:
        """Name of the phase, which decides a call's kernels: an option of a captured caller."""
        return ""

    def advance(self, epoch: int, update: int) -> None:
        """Choose the phase of this epoch and update (both from 0); called before each update.

        Args:
            epoch: passes over the data that are complete.
            update: updates that are complete.
        """
        return

    @abstractmethod
    def __call__(self, batch: Mapping[str, Tensor], generator: torch.Generator) -> Batch:
        """The batch with some arrays changed or added; the given tensors stay as they are.

        Args:
            batch: named arrays, batch first, on the augmentation's device.
            generator: random generator of that device.
        """


class Chain(Augment):
    """Augmentations one after another."""

    def __init__(self, parts: Iterable[Augment]) -> None:
        self._parts = tuple(parts)

    @property
    @override
    def phase(self) -> str:
        return "".join(part.phase for part in self._parts)

    @override
    def advance(self, epoch: int, update: int) -> None:
        for part in self._parts:
            part.advance(epoch, update)

    @override
    def __call__(self, batch: Mapping[str, Tensor], generator: torch.Generator) -> Batch:
        found = dict(batch)
        for part in self._parts:
            found = part(found, generator)
        return found


class Own(Augment):
    """An augmentation of the user's, which must keep each array's shape and dtype."""

    def __init__(self, plugin: PluginConfig, device: torch.device) -> None:
        """Make it.

        Raises:
            ConfigError: if it cannot be imported or made, or has an option that it does not take.
        """
        self._what = f"augmentation '{plugin.name}'"
        module = named_plugin("augmentation", plugin.name)
        config = validate(module.Config, plugin.options, where="augment.own")
        with plugin_failures(self._what):
            self._call = module.build(config, device)
        if not callable(self._call):
            raise ConfigError(
                f"{self._what} gave a {type(self._call).__name__}; it must give a function of a "
                "batch and a generator"
            )
        self._kept = False  # until a result was looked at

    @override
    def __call__(self, batch: Mapping[str, Tensor], generator: torch.Generator) -> Batch:
        with plugin_failures(self._what):
            found: Batch = self._call(dict(batch), generator)
        if not self._kept:
            self._require_same(batch, found)
            self._kept = True
        return found

    def _require_same(self, batch: Mapping[str, Tensor], found: object) -> None:
        """Refuse a result of another form.

        Raises:
            ConfigError: naming the first array that is missing or differs.
        """
        if not isinstance(found, dict):
            raise ConfigError(f"{self._what} returned a {type(found).__name__}, not the batch")
        for name, array in batch.items():
            other = found.get(name)
            if not isinstance(other, Tensor):
                raise ConfigError(f"{self._what} returned no '{name}'; return all of the batch")
            form, wanted = [f"{x.dtype} {list(x.shape)} on {x.device}" for x in (other, array)]
            if form != wanted:
                raise ConfigError(f"{self._what} returned '{name}' as {form}; it was {wanted}")


class Progressive(Augment):
    """One augmentation up to an epoch or update, another one from there on."""

    def __init__(self, first: Augment, then: Augment, at: int, per: str) -> None:
        """Begin with the first one.

        Args:
            first: augmentation before `at`.
            then: augmentation from `at` on.
            at: the number of an epoch or update.
            per: "epoch" or "update".
        """
        self._first = first
        self._then = then
        self._at = at
        self._per = per
        self._later = at == 0

    @property
    @override
    def phase(self) -> str:
        return "then" if self._later else "first"

    @override
    def advance(self, epoch: int, update: int) -> None:
        self._later = (epoch if self._per == "epoch" else update) >= self._at

    @override
    def __call__(self, batch: Mapping[str, Tensor], generator: torch.Generator) -> Batch:
        return (self._then if self._later else self._first)(batch, generator)

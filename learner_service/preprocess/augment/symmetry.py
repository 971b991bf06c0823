"""Transitions of mirrored and turned worlds, by the symmetries that an environment announces."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from murmur.learner_service.preprocess.augment.base import Augment, Batch
from murmur.shared.config.symmetry import ArrayChange, Symmetry
from murmur.shared.process.errors import ConfigError
from murmur.shared.wire.spec import ACTION_MASK, EXPERT_ACTION, ArraySpec, Discrete, EnvSpec

_IDENTITY = Symmetry("identity", ())
_ACTIONS = ("action", "raw_action")  # arrays [B, ..., A] of numbers of actions, or [B, ..., A, U]
_PER_ACTION = ("mask", "penalty", "floor")  # arrays [B, ..., A, K]


@dataclass(frozen=True)
class _Table:
    """For each of G symmetries: where the last F entries come from, and how they change.

    Attributes:
        index: [G, F] int64.
        sign: factors [G, F], or None if all are 1.
        offset: summands [G, F], or None if all are 0.
    """

    index: Tensor
    sign: Tensor | None = None
    offset: Tensor | None = None

    def apply(self, x: Tensor, which: Tensor) -> Tensor:
        """Transform row b of an array [B, ...] with F trailing entries by symmetry which[b]."""
        rows = x.reshape(len(x), -1, self.index.shape[1])
        index = self.index.index_select(0, which).unsqueeze(1)
        found = rows.gather(2, index.expand_as(rows))
        if self.sign is not None:
            found = found * self.sign.index_select(0, which).unsqueeze(1)
        if self.offset is not None:
            found = found + self.offset.index_select(0, which).unsqueeze(1)
        return found.view(x.shape)


class Symmetries(Augment):
    """Changes every row of a batch by one of the environment's symmetries, or not at all.

    All equally likely. The arrays of a row, those of its next observation included, change by the
    same one; what agents were paid, and the probabilities that actions had, stay. A row may itself
    be a time series [B, T, ...]: all of it changes alike.
    """

    def __init__(self, spec: EnvSpec, device: torch.device, prefixes: Sequence[str]) -> None:
        """Lay tables out on the device.

        Args:
            spec: spec of the environment.
            device: device of all batches.
            prefixes: prefixes of observations in batches: now, and next.

        Raises:
            ConfigError: if the environment announces no symmetry.
        """
        if not spec.symmetries:
            raise ConfigError(
                f"augment.preset=symmetry: environment '{spec.name}' announces no symmetry as it "
                "is configured; set augment.preset=none"
            )
        self._device, self._group = device, (_IDENTITY, *spec.symmetries)
        self._tables: dict[str, _Table] = {}
        for array in spec.observations:
            changes = [
                next((c for c in s.arrays if c.name == array.name), None) for s in self._group
            ]
            if any(changes):
                table = _of_array(array, changes, device)
                self._tables |= {prefix + array.name: table for prefix in prefixes}
        self._told = {prefix + EXPERT_ACTION for prefix in ("", *prefixes)}
        self._numbers: Tensor | None = None
        if any(s.action or s.action_signs for s in self._group):
            self._lay_out_actions(spec, prefixes)

    def _lay_out_actions(self, spec: EnvSpec, prefixes: Sequence[str]) -> None:
        """Tables of actions and of arrays with an entry for each."""
        device = self._device
        size = spec.action.num_actions if isinstance(spec.action, Discrete) else spec.action.size
        given = [s.action or tuple(range(size)) for s in self._group]
        if isinstance(spec.action, Discrete):
            self._numbers = torch.tensor(given).to(device)  # [G, K] the new number of each action
            orders = torch.tensor(given).argsort(1)
            per_action = _Table(orders.to(device))
            names = (*(prefix + ACTION_MASK for prefix in prefixes), *_PER_ACTION)
            self._tables |= dict.fromkeys(names, per_action)
        else:
            signs = torch.tensor([s.action_signs or (1.0,) * size for s in self._group])
            self._tables |= dict.fromkeys(
                (*_ACTIONS, *self._told), _Table(torch.tensor(given).to(device), signs.to(device))
            )

    def __call__(self, batch: Mapping[str, Tensor], generator: torch.Generator) -> Batch:
        """See Augment; arrays are named as in a Batch or a ReplayBatch."""
        rows = len(next(iter(batch.values())))
        which = torch.randint(len(self._group), (rows,), generator=generator, device=self._device)
        return self.apply(batch, which)

    def apply(self, batch: Mapping[str, Tensor], which: Tensor) -> Batch:
        """The batch under known symmetries.

        Args:
            batch: name -> [B, ...].
            which: [B] int64, 0 for the identity, else the number of a symmetry of the spec, from 1.
        """
        found = dict(batch)
        for name, x in batch.items():
            if name in self._tables:
                found[name] = self._tables[name].apply(x, which)
            elif name in (*_ACTIONS, *self._told) and self._numbers is not None:
                numbers = self._numbers.index_select(0, which)
                taken = x.reshape(len(x), -1).long()
                if name in self._told:  # -1 stays
                    changed = numbers.gather(1, taken.clamp_min(0)).where(taken >= 0, taken)
                else:
                    changed = numbers.gather(1, taken)
                found[name] = changed.to(x.dtype).view(x.shape)
        return found


def _of_array(
    array: ArraySpec, changes: Sequence[ArrayChange | None], device: torch.device
) -> _Table:
    """The table of an observation, by symmetry; None: it stays as it is."""
    if any(c is not None and c.of_map for c in changes):
        places = torch.arange(array.shape[-2] * array.shape[-1]).view(array.shape[-2:])
        found = []
        for change in changes:
            turned = places
            if change is not None:
                turned = places.flip(-1) if change.flip else places
                turned = torch.rot90(turned, change.turns, (-2, -1))
            found.append(turned.flatten())
        return _Table(torch.stack(found).to(device))
    size = array.shape[-1] if array.shape else 1
    index = [(change and change.order) or tuple(range(size)) for change in changes]
    signs = [(change and change.signs) or (1.0,) * size for change in changes]
    offsets = [(change and change.offsets) or (0.0,) * size for change in changes]
    dtype = getattr(torch, array.dtype)

    def numbers(rows: list[tuple[float, ...]], neutral: float) -> Tensor | None:
        if all(x == neutral for row in rows for x in row):
            return None
        return torch.tensor(rows, dtype=dtype).to(device)

    return _Table(torch.tensor(index).to(device), numbers(signs, 1), numbers(offsets, 0))

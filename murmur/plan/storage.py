"""The learner's storages as a forecast uses them: they decide who may act and when to update.

Their time steps hold a number of one agent, so that a simulation of many ranks fits into memory.
"""

from dataclasses import dataclass

import torch
from typing_extensions import override

from murmur.learner_service.storage.flight import Flight
from murmur.learner_service.storage.replay import ReplayConfig, ReplayStorage
from murmur.learner_service.storage.rollout import RolloutStorage
from murmur.learner_service.storage.storage import Unroll
from murmur.shared.wire.spec import ArraySpec, Discrete, EnvSpec

_SPEC = EnvSpec("plan", 1, (ArraySpec("number", "float32", (1,)),), Discrete(2))
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Replays:
    """Settings of learning from a replay.

    Attributes:
        unroll_steps: transitions of an unroll, L.
        start_rows: rows of one rank before the first update.
        interval: rows of one rank from one burst of updates to the next.
        updates: updates of a burst.
        batch_rows: rows of one rank that an update draws; may be a fraction.
        ahead: unrolls that acting may be ahead in every environment; None: any, sync.
    """

    unroll_steps: int
    start_rows: int
    interval: int
    updates: int
    batch_rows: float
    ahead: int | None


class CountedReplay(ReplayStorage):
    """A replay that counts transitions and updates and keeps no transition: nothing is drawn."""

    def __init__(self, settings: Replays) -> None:
        """Make an empty replay."""
        config = ReplayConfig(
            capacity_rows=max(settings.start_rows, settings.unroll_steps),
            start_rows=settings.start_rows,
            batch_size=1,
            update_interval=settings.interval,
            updates_per_interval=settings.updates,
            unroll_steps=settings.unroll_steps,
        )
        super().__init__(config, _SPEC, 1.0, settings.ahead, _CPU, {}, 0)
        self._has_transitions = True

    @override
    def add(self, unroll: Unroll) -> None:
        self.release(unroll)
        self.inserted += unroll.num_envs * unroll.transitions

    @override
    def sample(self, version: int, timeout_s: float) -> None:
        self._updates += 1


def make_storage(settings: Flight | Replays) -> RolloutStorage | CountedReplay:
    """Build the storage of an algorithm."""
    if isinstance(settings, Replays):
        return CountedReplay(settings)
    return RolloutStorage(
        _SPEC,
        settings.unroll_steps,
        1,
        settings.max_policy_lag,
        _CPU,
        unrolls_per_update=settings.unrolls_per_update,
    )

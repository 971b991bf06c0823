"""Evaluations come by updates, environment steps or minutes."""

from types import SimpleNamespace
from typing import Any

import pytest

from murmur.learner_service.after_update import Evaluate
from murmur.shared.config.experiment import EvaluationConfig


class Counted(Evaluate):
    """Counts the evaluations that are offered, in place of copying a policy."""

    def _offer(self) -> None:
        self._offered = self.keeper.ranks.progress.updates
        self.offered = [*getattr(self, "offered", []), self._offered]


def offered(every: EvaluationConfig, *, begin: int = 0) -> list[int]:
    """Updates at which evaluations are offered: each takes 64 steps and 10 s."""
    progress = SimpleNamespace(updates=begin, seconds=10.0 * begin)
    ranks = SimpleNamespace(progress=progress, env_steps=64 * begin)
    scheduler: Any = SimpleNamespace(finished=None)
    keeper: Any = SimpleNamespace(ranks=ranks)
    nothing: Any = None
    step = Counted(nothing, nothing, scheduler, keeper, nothing, every)
    update: Any = SimpleNamespace(kept=True)
    for i in range(begin + 1, begin + 13):
        progress.updates, progress.seconds, ranks.env_steps = i, 10.0 * i, 64 * i
        step(update, over=i == begin + 12)
    return step.offered


@pytest.mark.parametrize(
    ("every", "wanted"),
    [
        ({"every_updates": 5}, [0, 5, 10, 12]),
        ({"every_env_steps": 200}, [0, 4, 7, 10, 12]),  # from 256, 448, 640 steps
        ({"every_minutes": 1}, [0, 6, 12]),
    ],
)
def test_evaluations_follow_their_clock(every: dict[str, int], wanted: list[int]) -> None:
    assert offered(EvaluationConfig(**every)) == wanted


def test_a_resumed_run_keeps_the_clock() -> None:
    assert offered(EvaluationConfig(every_updates=5), begin=7) == [10, 15, 19]

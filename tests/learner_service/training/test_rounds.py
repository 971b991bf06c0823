"""What the ranks of a group agree on before an update."""

import threading
from typing import Any

from learner_service.group.group import ALONE, Group
from learner_service.telemetry.progress import Progress
from learner_service.training.rounds import Rounds
from tests.ranks.processes import Ranks


def _meet(group: Group, cases: list[tuple[dict[str, bool], bool, int]]) -> list[Any]:
    """A round for each case, which names the flags of this rank, its stop, and its steps."""
    progress, stop, seen = Progress(), threading.Event(), []
    rounds = Rounds(group, progress, stop)
    for flags, stops, steps in cases:
        if stops:
            stop.set()
        progress.env_steps = steps
        ready = rounds.meet(**flags)
        seen.append((ready, rounds.log_due, rounds.time_up, rounds.stopping, rounds.env_steps))
    return seen


def _totals(group: Group) -> dict[str, Any]:
    progress = Progress()
    progress.rows_received, progress.updates_skipped = 10 + group.rank, 3
    progress.rows_dropped = {"lag": 2} if group.rank else {"session": 1}
    return Rounds(group, progress, threading.Event()).totals(5)


def test_ranks_agree_on_updates_ends_and_counts() -> None:
    none = {"ready": False, "log_due": False, "time_up": False}
    ready = none | {"ready": True}
    own = [
        [(none, False, 1), (ready, False, 2), (ready, True, 4)],
        [(ready, False, 10), (ready | {"log_due": True}, False, 20)],
    ]
    own[1].append((none | {"time_up": True}, False, 40))
    with Ranks() as ranks:
        for rank in range(2):
            ranks.start(rank, _meet, own[rank])
        seen = [ranks.result(rank) for rank in range(2)]
        assert seen[0] == seen[1]
        assert seen[0] == [
            (False, False, False, False, 11),  # one is not ready
            (True, True, False, False, 22),
            (False, False, True, True, 44),  # one is told to stop, the other out of time
        ]
        totals = ranks.call(_totals)
    assert [of["rank"] for of in totals[0]["ranks"]] == [0, 1]
    assert [of["rows_received"] for of in totals[0]["ranks"]] == [10, 11]
    assert totals[0]["rows_received"] == 21
    assert totals[0]["updates_skipped"] == 3
    assert totals[0]["rows_waiting"] == 10
    assert totals[0]["rows_dropped"] == {"lag": 2, "session": 1}


def test_a_learner_alone_decides_by_itself() -> None:
    stop = threading.Event()
    rounds = Rounds(ALONE, Progress(), stop)
    assert not rounds.stopping
    stop.set()
    assert rounds.stopping
    assert rounds.totals(3) == {}
    rounds.count(5, 5)
    assert rounds.env_steps == 5

"""What the ranks of a group agree on before an update."""

import threading
from typing import Any

from murmur.learner_service.gathering import RankSync
from murmur.learner_service.ranks.group import ALONE, Group
from murmur.learner_service.telemetry.progress import Progress
from murmur.shared.config.experiment import RunConfig
from tests.ranks.processes import Ranks


def _meet(group: Group, cases: list[tuple[dict[str, bool], str, int]]) -> list[Any]:
    """Hold a round for each case: flags of this rank, "stop" or "late" or "", and its steps."""
    progress, stop, seen = Progress(), threading.Event(), []
    sync = RankSync(group, progress, stop, RunConfig(max_minutes=1))
    for flags, what, steps in cases:
        if what == "stop":
            stop.set()
        if what == "late":
            progress.load_state_dict({**progress.state_dict(), "seconds": 61.0})
        progress.env_steps = steps
        ready = sync.meet(**flags)
        seen.append((ready, sync.log_due, sync.over, sync.stopping, sync.env_steps))
    return seen


def _totals(group: Group) -> dict[str, Any]:
    progress = Progress()
    progress.rows_received, progress.updates_skipped = 10 + group.rank, 3
    progress.rows_dropped = {"lag": 2} if group.rank else {"session": 1}
    return RankSync(group, progress, threading.Event(), RunConfig()).totals(5)


def test_ranks_agree_on_updates_ends_and_counts() -> None:
    none = {"ready": False, "log_due": False}
    ready = none | {"ready": True}
    own = [
        [(none, "", 1), (ready, "", 2), (ready, "stop", 4)],
        [(ready, "", 10), (ready | {"log_due": True}, "", 20)],
    ]
    own[1].append((none, "late", 40))
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
    sync = RankSync(ALONE, Progress(), stop, RunConfig())
    assert not sync.stopping
    stop.set()
    assert sync.stopping
    assert sync.totals(3) == {}
    sync.count(5, 5)
    assert sync.env_steps == 5
    assert sync.meet(ready=True, log_due=True)
    assert sync.log_due
    assert sync.env_steps == 5


def test_a_run_ends_with_its_episodes() -> None:
    progress = Progress()
    sync = RankSync(ALONE, progress, threading.Event(), RunConfig(max_episodes=3))
    for episodes, over in ((2, False), (3, True)):
        progress.episodes = episodes
        sync.meet(ready=True, log_due=False)
        assert sync.over is over

"""Signs of life between ranks, in real processes."""

import os
import signal
import time

import pytest

from murmur.learner_service.ranks.group import Group
from murmur.learner_service.ranks.watch import Heartbeat
from tests.ranks.processes import Ranks

_kept: list[Heartbeat] = []


def _begin(group: Group, silent_s: float) -> int:
    assert group.store is not None
    _kept[:] = [Heartbeat(group.store.clone(), group.rank, group.size, silent_s)]
    return os.getpid()


def _rest(group: Group, seconds: float) -> int:
    time.sleep(seconds)
    return group.rank


def _close(group: Group) -> None:
    _kept[0].close()


def test_a_paused_rank_ends_the_rank_that_watches_it() -> None:
    with Ranks() as two:
        pids = two.call(_begin, 2.0)
        assert two.call(_rest, 0.5) == [0, 1]
        os.kill(pids[1], signal.SIGSTOP)
        try:
            two.processes[0].join(60)
            assert two.processes[0].exitcode == 1
        finally:
            os.kill(pids[1], signal.SIGCONT)
        two.processes[1].join(60)  # it misses the other one in turn
        assert two.processes[1].exitcode == 1


def test_a_rank_that_leaves_in_order_is_not_missed() -> None:
    with Ranks() as two:
        two.call(_begin, 0.5)
        two.start(1, _close)
        two.result(1)
        two.processes[1].kill()
        two.start(0, _rest, 1.5)
        assert two.result(0) == 0


@pytest.mark.long
def test_a_whole_group_may_be_paused() -> None:
    """A machine that sleeps: no rank counts as lost when it wakes."""
    with Ranks() as two:
        pids = two.call(_begin, 5.0)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(6)
        for pid in reversed(pids):
            os.kill(pid, signal.SIGCONT)
        assert two.call(_rest, 1.0) == [0, 1]
        assert all(process.is_alive() for process in two.processes)

"""A rank without a session is named, and a wait that is too long ends."""

import logging
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from prometheus_client import Gauge
from torch.distributed import HashStore

from murmur.learner_service.ranks.watch import SessionWatch
from tests.waiting import wait_until


class Ranks:
    """Two ranks' watches over one store; `sessions` by rank and `updates` are what they read.

    While it `learns`, each look finds a further update.
    """

    def __init__(self) -> None:
        self.sessions = [0, 0]
        self.updates = 0
        self.learns = False
        self.gauge = Gauge("ranks", "", registry=None)
        store = HashStore()
        self._watches = [
            SessionWatch(
                store,
                rank,
                2,
                self._sessions_of(rank),
                self._updates,
                self.gauge.set,
                1e6,
                look_every_s=0.01,
                tell_after_s=0.1,
            )
            for rank in range(2)
        ]

    def _sessions_of(self, rank: int) -> Callable[[], int]:
        return lambda: self.sessions[rank]

    def _updates(self) -> int:
        self.updates += self.learns
        return self.updates

    def shown(self) -> float:
        return float(self.gauge._value.get())

    def close(self) -> None:
        for watch in self._watches:
            watch.close()


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    both = Ranks()
    yield both
    both.close()


def test_wait_for_a_rank_without_sessions_is_told(
    ranks: Ranks, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    wait_until(lambda: ranks.shown() == 2)  # no server is there yet: nothing is said
    ranks.sessions = [3, 0]
    wait_until(lambda: "rank 1 of 2 has no session" in caplog.text)
    assert ranks.shown() == 1
    ranks.sessions = [0, 0]
    wait_until(lambda: ranks.shown() == 2)
    assert "again" not in caplog.text
    ranks.sessions = [3, 0]
    wait_until(lambda: caplog.text.count("rank 1 of 2 has no session") == 2)
    ranks.sessions = [2, 1]
    wait_until(lambda: "all ranks have sessions again" in caplog.text)
    assert ranks.shown() == 0


def test_updates_go_on_without_a_word_about_sessions(
    ranks: Ranks, caplog: pytest.LogCaptureFixture
) -> None:
    """It learns from a replay."""
    ranks.sessions, ranks.learns = [3, 0], True
    wait_until(lambda: ranks.shown() == 1)
    at = ranks.updates
    wait_until(lambda: ranks.updates > at + 50)  # more time than it takes to tell
    assert "no session" not in caplog.text


def test_wait_that_is_too_long_ends_the_process() -> None:
    code = (
        "import time; from prometheus_client import Gauge; from torch.distributed import HashStore;"
        "from murmur.learner_service.ranks.watch import SessionWatch as Watch; s = HashStore();"
        "g = Gauge('g', '', registry=None); s.set('sessions/1', '0');"
        "Watch(s, 0, 2, lambda: 1, lambda: 7, g.set, 0.2, look_every_s=0.01); time.sleep(60)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "learner.group_timeout_s" in done.stderr

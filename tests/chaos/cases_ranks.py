"""Ranks that wait for one without a session, each with real processes."""

import time
from pathlib import Path
from typing import Any

from tests.chaos.cases import Case
from tests.chaos.kills_ranks import RankStack, experiment, rank_faults
from tests.waiting import wait_until

_BACK_S = 60.0
_GROUP_TIMEOUT_S = 20.0
_ONE_SESSION = [
    f"env_server.{setting}"
    for setting in ("num_workers=1", "sessions_per_worker=1", "envs_per_worker=8")
]


def all_sessions_at_one_rank(folder: Path) -> dict[str, Any]:
    """The link to a rank is down until its sessions play with the other one, which blocks them."""
    (over,) = rank_faults(folder, {"starved of sessions": 1})["starved of sessions"]
    assert over <= _BACK_S, over
    return {"over_s": over}


def fewer_sessions_than_ranks(folder: Path) -> dict[str, Any]:
    """One session for two ranks: rank 0 says so; a second one ends the wait.

    Once it is gone again, the learners end when they have waited for too long.
    """
    with RankStack(folder, experiment()) as stack:
        stack.start_ranks(f"learner.group_timeout_s={_GROUP_TIMEOUT_S:g}")
        stack.start_server(*_ONE_SESSION, address=stack.server_address)
        sessions = 'sessions{mode="train"}'
        wait_until(lambda: "listening on" in stack.log_end(), "the learners listen")
        began = time.monotonic()
        wait_until(lambda: "of 2 has no session" in stack.log_end(), stack.log_end, _BACK_S)
        noticed = time.monotonic() - began
        assert stack.metrics()["ranks_without_sessions"] == 1
        second = stack.start_server(*_ONE_SESSION, address=stack.server_address, first_worker=1)
        wait_until(lambda: "all ranks have sessions again" in stack.log_end(), stack.log_end)
        wait_until(stack.updated, stack.log_end, poll_s=0.1)
        assert [stack.of_rank(rank)[sessions] for rank in range(2)] == [1, 1]
        second.close()
        began = time.monotonic()
        wait_until(lambda: "(learner.group_timeout_s)" in stack.log_end(), stack.log_end, 120)
        ended = time.monotonic() - began
    return {"noticed_s": noticed, "ended_s": ended}


CASES = [
    Case("a rank has no session", all_sessions_at_one_rank),
    Case("fewer sessions than learners", fewer_sessions_than_ranks),
]

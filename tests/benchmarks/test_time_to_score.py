"""Times to a score: points counted by hand, CPU of real processes."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks._peer_training import Kept
from benchmarks.time_to_score import (
    TASKS,
    CpuClock,
    asked_of,
    compare,
    play_randomly,
    reached_at,
)

_BURN = "import time\nwhile time.process_time() < 0.6: pass"


def _run(scores: list[float], step_s: float) -> dict[str, Any]:
    """Return a run with a point every step_s CPU-seconds."""
    return {
        "points": [{"score": score, "cpu_s": step_s * (i + 1)} for i, score in enumerate(scores)]
    }


def test_score_is_reached_once_it_stays_for_two_evaluations() -> None:
    scores = np.array([[2.0, 4, 1, 4, 2, 3], [0.0, 2, 3, 2, 4, 3]])  # means 1, 3, 2, 3, 3, 3
    assert reached_at(scores, 3) == 3
    assert reached_at(np.array([[1.0, 2, 3]]), 3) == 2
    assert reached_at(scores, 3.5) is None


def test_ratio_of_times_by_hand() -> None:
    peer = [_run([0, 1, 2, 3], 10.0), _run([0, 1, 2, 5], 10.0)]  # ends at 4, after 40 s
    own = [_run([1, 4, 4, 4], 5.0), _run([1, 4, 6, 6], 5.0)]  # at 4 after 10 s
    found = compare(own, peer, "cpu_s")
    assert found["murmur"] == 10
    assert found["peer"] == 40
    assert found["ratio"] == 4
    # 16 resamples; the worst is 0: 5 is never reached by the first seed alone. Then 40 / 15 four
    # times: the percentile lies 0.375 of the way between.
    assert found["low"] == pytest.approx(0.375 * 40 / 15)
    assert found["high"] == 4


def test_peer_always_reaches_its_own_final_score() -> None:
    """A share of 1 keeps the final score to the bit, whatever the floor."""
    peer = [_run([-900, -150, score], 1.0) for score in (-146.2, -145.9, -146.2)]
    found = compare(peer, peer, "cpu_s", floor=-1188.9)  # -1188.9 + (mean + 1188.9) > mean
    assert found["peer"] == 3
    assert found["ratio"] == 1


def test_share_of_the_way_from_random_play_is_reached_earlier() -> None:
    peer, own = [_run([-100, -2, -1, 0], 1.0)], [_run([-100, -9, -3, -3], 1.0)]
    found = compare(own, peer, "cpu_s", share=0.97, floor=-100)
    assert found["murmur"] == 3
    assert found["peer"] == 2
    assert found["ratio"] == pytest.approx(2 / 3)


def test_score_that_is_never_reached_gives_ratio_0() -> None:
    found = compare([_run([1, 1], 5.0)], [_run([1, 2], 5.0)], "cpu_s")
    assert found["murmur"] is None
    assert found["ratio"] == 0


def test_policies_are_kept_at_intervals_and_at_the_end(tmp_path: Path) -> None:
    kept, policy = Kept(tmp_path, 100), torch.nn.Linear(1, 1)
    for steps in (0, 60, 120, 180, 240, 300):
        kept.offer(steps, policy)
    for steps in (300, 330):
        kept.offer(steps, policy, last=True)
    assert list(kept.files) == [120, 240, 300, 330]
    assert all(file.is_file() for file in kept.files.values())


def test_clock_counts_the_cpu_of_processes_and_their_children() -> None:
    nested = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {_BURN!r}])\n{_BURN}"
    with CpuClock() as clock:
        subprocess.run([sys.executable, "-c", nested], check=True)
    assert clock.at(clock.started) < 0.5
    assert clock.at(time.time()) == pytest.approx(1.2, abs=0.4)


@pytest.mark.parametrize("name", ["pendulum", "cartpole"])
def test_random_policy_scores_as_known(name: str) -> None:
    known = {"pendulum": -1200, "cartpole": 22}[name]
    assert play_randomly(TASKS[name]) == pytest.approx(known, rel=0.15)


def test_score_of_so_many_steps_spans_further_episodes() -> None:
    """Each step of CartPole pays 1, and random play ends after some 22."""
    assert play_randomly(replace(TASKS["cartpole"], follow=60)) == 60


@pytest.mark.parametrize("name", TASKS)
def test_what_was_asked_holds_values_by_default(name: str) -> None:
    asked = asked_of(TASKS[name], "murmur")["settings"]
    assert {"gamma", "max_grad_norm"} <= asked["algorithm"].keys()
    assert json.loads(json.dumps(asked)) == asked

"""The tuner in a real learner with real sessions, and what the doctor says of it."""

import asyncio

import pytest

from murmur.benchmarks._processes import Processes, Scrape
from murmur.benchmarks.latency import experiment, measure, seen_by_doctor
from murmur.doctor.latency import latency_lines, quantile
from shared.process.ledger import since

SESSIONS = 8


def played(target_ms: float) -> tuple[Scrape, Scrape]:
    """The metrics before and after two seconds of play with a target."""
    with Processes(experiment(SESSIONS, target_ms), servers=()) as processes:
        before, after, rows, _ = asyncio.run(measure(processes, SESSIONS, 2.0, 2.0))
    assert rows > 0
    return before, after


@pytest.mark.long
@pytest.mark.system
def test_target_far_away_is_kept() -> None:
    before, after = played(1000.0)
    assert after.metrics["batch_wait_seconds"] <= 0.8
    seen = since(seen_by_doctor(before), seen_by_doctor(after))
    assert all(quantile(seen[phase], 0.99) <= 1.0 for phase in ("update", "idle"))
    assert latency_lines(seen, 1000.0)[-1].startswith("within the target")


@pytest.mark.long
@pytest.mark.system
def test_target_that_no_machine_keeps_is_told_of() -> None:
    before, after = played(0.01)
    assert after.metrics["batch_wait_seconds"] == 0
    assert after.metrics["batch_preferred_envs"] == 0
    seen = since(seen_by_doctor(before), seen_by_doctor(after))
    assert "acting alone takes" in latency_lines(seen, 0.01)[-1]

"""The short form of `make test-faults`: real processes, real kills, and counts that balance."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from murmur.bench import run_benchmark
from murmur.benchmarks.effort import Effort
from tests.chaos.faults import FAULTS, Fault, bench, check
from tests.chaos.stack import Counts

pytestmark = pytest.mark.system
SHORT = (
    "environment returns NaN",
    "worker killed (-9)",
    "worker of another protocol",
    "link cut",
    "disk full",
    "learner killed (-9)",
    "rolling restart of everything",
)


@pytest.mark.long
def test_every_row_is_accounted_for_whatever_happens(tmp_path: Path) -> None:
    faults = [FAULTS[name] for name in SHORT]
    with bench(tmp_path, "proxy") as b:
        b.start()
        for fault in faults:
            fault.act(b)
        sent = b.stack.settle()
        counts = b.stack.counts()
        assert counts.received > 500
        assert counts.learned > 0
        drops = tuple(reason for fault in faults for reason in fault.drops)
        lost = sum(fault.lost for fault in faults)
        check("all together", Fault(faults[0].act, lost, "", True, drops), sent, counts)


def test_a_row_that_is_missing_is_noticed() -> None:
    """The check itself must be able to fail."""
    fault = FAULTS["environment raises"]
    counts = Counts(received=10, learned=4, stored=4, dropped={"session": 2})
    assert check("", fault, 10, counts)["lost on the way"] == 0
    for sent, wrong, why in (
        (11, counts, "up to 0 lost on the way"),
        (10, replace(counts, learned=3), "are not learned"),
        (10, replace(counts, dropped={"restart": 2}), "dropped for \\['restart'\\]"),
        (10, replace(counts, undone=1), "updates are undone"),
    ):
        with pytest.raises(AssertionError, match=why):
            check("", fault, sent, wrong)


@pytest.mark.long
def test_a_killed_sync_learner_ends_with_the_same_bits(tmp_path: Path) -> None:
    """The smoke form of `murmur bench kills`, and that its result is kept."""
    file = run_benchmark("kills", Effort.SMOKE, Console(), save=True, dirty=True, folder=tmp_path)
    assert file is not None
    learner = json.loads(file.read_text())["result"]["learner"]
    assert learner["kills"] == 1
    assert learner["equal to the bit"]

"""What the doctor says of acting, by hand on synthetic histograms."""

import io
import math

import pytest
from rich.console import Console

from murmur.doctor.diagnosis import diagnose
from murmur.doctor.latency import latency_lines, quantile
from murmur.doctor.page import show
from murmur.runs.snapshots import Snapshot
from murmur.shared.config.files import load
from murmur.shared.process.ledger import since

INF = math.inf
FAST = {0.005: 990.0, 0.01: 1000.0, 0.05: 1000.0, INF: 1000.0}  # p50 2.53 ms, p99 5 ms
SLOW = {0.005: 0.0, 0.01: 500.0, 0.05: 1000.0, INF: 1000.0}  # p50 10 ms, p99 49.2 ms


def test_quantile_by_hand() -> None:
    assert quantile(FAST, 0.99) == pytest.approx(5e-3)
    # 990 of 1000: 490 of the 500 in the bucket from 10 to 50 ms.
    assert quantile(SLOW, 0.99) == pytest.approx(0.01 + 0.04 * 490 / 500)
    assert quantile({0.1: 0.0, INF: 5.0}, 0.5) == 0.1  # beyond all bounds
    assert math.isnan(quantile({}, 0.5))


def test_only_what_is_new_counts() -> None:
    assert since(
        {"idle": {0.1: 3.0, INF: 4.0}}, {"idle": {0.1: 5.0, INF: 9.0}, "update": FAST}
    ) == {
        "idle": {0.1: 2.0, INF: 5.0},
        "update": FAST,
    }


def test_both_phases_are_named() -> None:
    lines = latency_lines({"update": SLOW, "idle": FAST, "inference": FAST})
    assert lines == (
        "10 ms (p50), 49.2 ms (p99) while updates run",
        "2.53 ms (p50), 5 ms (p99) between updates",
    )


def test_few_requests_say_nothing() -> None:
    assert latency_lines({"idle": {0.1: 99.0, INF: 99.0}}) == ()
    assert latency_lines({}) == ()


def test_doctor_shows_acting() -> None:
    threads = {"inference": {"start": 1.0}, "learner": {"start": 1.0}}
    before = Snapshot(0.0, 0, 0, 0.0, threads)
    spent = {"inference": {"wait_environments": 10.0}, "learner": {"wait_rows": 10.0}}
    after = Snapshot(
        10.0, 100, 5, 0.0, spent, latency={"update": SLOW, "idle": FAST, "inference": FAST}
    )
    config = load("spread", (), {})
    out = io.StringIO()
    after_act = Snapshot(**{**vars(after), "threads": {**spent, "inference": {"act": 1.0}}})
    show(diagnose(before, after_act, config), Console(file=out, width=200))
    assert "acting      10 ms (p50), 49.2 ms (p99) while updates run\n" in out.getvalue()
    assert "5 ms (p99) between updates\n" in out.getvalue()

"""What the doctor says of acting, by hand on synthetic histograms."""

import io
import math

import pytest
from rich.console import Console

from murmur.doctor.diagnosis import diagnose
from murmur.doctor.latency import latency_lines, quantile
from murmur.doctor.page import show
from murmur.runs.snapshots import Snapshot
from shared.config.files import load
from shared.process.ledger import since

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


@pytest.mark.parametrize(
    ("update", "idle", "inference", "said"),
    [
        (FAST, FAST, FAST, "within the target of 20 ms"),
        (SLOW, FAST, FAST, "only while updates run"),
        (SLOW, SLOW, SLOW, "acting alone takes 49.2 ms"),
        (SLOW, SLOW, FAST, "requests wait for the batches before theirs"),
        ({}, SLOW, SLOW, "acting alone takes 49.2 ms"),
    ],
)
def test_the_part_that_is_too_slow_is_named(
    update: dict[float, float], idle: dict[float, float], inference: dict[float, float], said: str
) -> None:
    seen = {"update": update, "idle": idle, "inference": inference}
    lines = latency_lines(seen, 20.0)
    assert said in lines[-1]
    assert lines[:-1] == latency_lines(seen, 0.0)
    assert f"{'49.2' if idle is SLOW else '5'} ms (p99) between updates" in lines[-2]


def test_full_machine_is_named_where_the_target_is_missed() -> None:
    assert "processors are all in use" in latency_lines({"idle": SLOW}, 20.0, 0.99)[-1]
    assert "processors" not in "".join(latency_lines({"idle": SLOW}, 20.0, 0.5))
    assert "processors" not in "".join(latency_lines({"idle": FAST}, 20.0, 0.99))


def test_few_requests_say_nothing() -> None:
    assert latency_lines({"idle": {0.1: 99.0, INF: 99.0}}, 20.0) == ()
    assert latency_lines({}, 20.0) == ()


def test_doctor_shows_acting() -> None:
    threads = {"inference": {"start": 1.0}, "learner": {"start": 1.0}}
    before = Snapshot(0.0, 0, 0, 0.0, threads)
    spent = {"inference": {"wait_environments": 10.0}, "learner": {"wait_rows": 10.0}}
    after = Snapshot(
        10.0, 100, 5, 0.0, spent, latency={"update": SLOW, "idle": FAST, "inference": FAST}
    )
    config = load("spread", ["learner.batcher.latency_target_ms=20"], {})
    out = io.StringIO()
    after_act = Snapshot(**{**vars(after), "threads": {**spent, "inference": {"act": 1.0}}})
    show(diagnose(before, after_act, config), Console(file=out, width=200))
    assert "acting      10 ms (p50), 49.2 ms (p99) while updates run\n" in out.getvalue()
    assert "above the target of 20 ms" in out.getvalue()

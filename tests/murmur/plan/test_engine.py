"""Threads take turns on processors: ends of jobs by hand."""

import pytest

from murmur.plan.engine import SLICE_S, Engine, Pool, Thread


def ends(size: int, works: list[list[float]], slice_s: float = SLICE_S) -> list[list[float]]:
    """When the jobs of each thread end, all given at time 0."""
    engine = Engine()
    pool = Pool(engine, size, slice_s)
    found: list[list[float]] = [[] for _ in works]
    for seen, jobs in zip(found, works, strict=True):
        thread = Thread(pool)
        for work in jobs:
            thread.add(work, lambda seen: seen.append(engine.now), seen)
    engine.run()
    return found


def test_a_thread_works_off_its_jobs_in_order() -> None:
    assert ends(4, [[1.0, 2.0]], slice_s=10.0) == [[1.0, 3.0]]


def test_threads_with_processors_do_not_wait() -> None:
    assert ends(2, [[1.0], [2.0]], slice_s=10.0) == [[1.0], [2.0]]


def test_a_third_thread_waits_for_a_free_processor() -> None:
    # Two processors: 1 and 4 run; at 1 the third begins, and ends at 1 + 2.
    assert ends(2, [[1.0], [4.0], [2.0]], slice_s=10.0) == [[1.0], [4.0], [3.0]]


def test_a_long_job_lets_others_in_after_its_slice() -> None:
    # One processor, slices of 1: A A-B-A: A runs 0..1, B 1..1.5, A the rest 1.5..3.5.
    assert ends(1, [[3.0], [0.5]], slice_s=1.0) == [[3.5], [1.5]]


def test_a_thread_continues_within_its_slice() -> None:
    # Two jobs of 0.4 fit the slice of 1; the other thread waits for both.
    assert ends(1, [[0.4, 0.4], [0.1]], slice_s=1.0) == [
        pytest.approx([0.4, 0.8]),
        pytest.approx([0.9]),
    ]


def test_use_and_business_add_up() -> None:
    engine = Engine()
    pool = Pool(engine, 2)
    first, second = Thread(pool), Thread(pool)
    first.add(1.0, lambda _: None)
    second.add(3.0, lambda _: setattr(engine, "stopped", True))
    engine.run()
    assert pool.used_s == pytest.approx(1.0 + 3.0)
    assert (first.busy_s, second.busy_s) == pytest.approx((1.0, 3.0))

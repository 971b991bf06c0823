"""Who goes in which batch, and when."""

import asyncio
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from murmur.learner_service.serving.evaluation import Evaluation
from murmur.learner_service.serving.requests import DynamicBatcher, EnvSession, Request
from murmur.shared.config.learner import BatcherConfig
from tests.learner_service.toys import make_coma, row, vector_spec

SPEC = vector_spec()


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    yield made
    made.close()


def request(
    loop: asyncio.AbstractEventLoop, envs: int, slot: int = 0, evaluating: bool = False
) -> Request:
    evaluation = Evaluation(make_coma(SPEC).make_policy(), 0, 0) if evaluating else None
    session = EnvSession("w", SPEC, envs, slot, np.zeros(envs, np.int64), evaluation=evaluation)
    return Request(session, 1, row(SPEC, envs), loop.create_future())


def test_everything_pending_goes_at_once(loop: asyncio.AbstractEventLoop) -> None:
    batcher = DynamicBatcher(BatcherConfig())
    requests = [request(loop, n) for n in (4, 1, 7)]
    for r in requests:
        batcher.arrivals.put([r])
    started = time.monotonic()
    assert batcher.next_batch(60) == requests
    assert time.monotonic() - started < 30
    assert batcher.depth == 0
    assert batcher.next_batch(0.01) == []


def test_a_batch_is_cut_at_max_batch_envs(loop: asyncio.AbstractEventLoop) -> None:
    batcher = DynamicBatcher(BatcherConfig(max_batch_envs=8))
    big, *small = [request(loop, n) for n in (10, 4, 4, 1)]
    for r in (big, *small):
        batcher.arrivals.put([r])
    assert batcher.next_batch(0) == [big]  # alone, though it is too large
    assert batcher.next_batch(0) == small[:2]
    assert batcher.next_batch(0) == small[2:]


def test_a_preferred_size_waits_for_the_oldest_and_no_longer(
    loop: asyncio.AbstractEventLoop,
) -> None:
    batcher = DynamicBatcher(BatcherConfig(preferred_batch_envs=8, max_wait_ms=60_000))
    old, young = request(loop, 2), request(loop, 2)
    old.arrived -= 59.95  # 50 ms are left to it, a minute to the other
    batcher.arrivals.put([young])
    batcher.arrivals.put([old])
    assert batcher.next_batch(120) == [young, old]
    assert 60 <= time.monotonic() - old.arrived < 90


def test_a_preferred_size_once_reached_goes_at_once(loop: asyncio.AbstractEventLoop) -> None:
    batcher = DynamicBatcher(BatcherConfig(preferred_batch_envs=8, max_wait_ms=60_000))
    requests = [request(loop, 4), request(loop, 4)]
    batcher.arrivals.put([requests[0]])
    assert batcher.next_batch(0.02) == []
    threading.Timer(0.05, batcher.arrivals.put, [requests[1:]]).start()
    started = time.monotonic()
    assert batcher.next_batch(120) == requests
    assert time.monotonic() - started < 30


def test_lockstep_waits_for_all_and_orders_by_slot(loop: asyncio.AbstractEventLoop) -> None:
    batcher = DynamicBatcher(BatcherConfig(), wait_for_envs=12)
    late, early = request(loop, 4, slot=8), request(loop, 8, slot=0)
    batcher.arrivals.put([late])
    assert batcher.next_batch(0.02) == []
    batcher.arrivals.put([early])
    assert batcher.next_batch(1) == [early, late]


def test_lockstep_never_keeps_an_evaluation_waiting(loop: asyncio.AbstractEventLoop) -> None:
    batcher = DynamicBatcher(BatcherConfig(), wait_for_envs=12)
    training, evaluating = request(loop, 4), request(loop, 50, -1, evaluating=True)
    batcher.arrivals.put([training])
    batcher.arrivals.put([evaluating])
    assert batcher.next_batch(1) == [evaluating]
    assert batcher.next_batch(0.02) == []
    other = request(loop, 8, slot=4)
    batcher.arrivals.put([other])
    assert batcher.next_batch(1) == [training, other]


def test_lockstep_does_not_count_sessions_that_are_gone(loop: asyncio.AbstractEventLoop) -> None:
    batcher = DynamicBatcher(BatcherConfig(), wait_for_envs=8)
    gone, returned, other = (request(loop, 4, slot) for slot in (0, 0, 4))
    gone.session.closed = True
    batcher.arrivals.put([gone])
    batcher.arrivals.put([returned])
    assert batcher.next_batch(0.02) == []
    batcher.arrivals.put([other])
    assert set(map(id, batcher.next_batch(1) or [])) >= {id(returned), id(other)}


def test_close_ends_a_wait(loop: asyncio.AbstractEventLoop) -> None:
    batcher = DynamicBatcher(BatcherConfig())
    threading.Timer(0.05, batcher.close).start()
    started = time.monotonic()
    assert batcher.next_batch(60) is None
    assert time.monotonic() - started < 30
    batcher.arrivals.put([request(loop, 1)])
    assert batcher.next_batch(0) is None

"""The tuner of batches, by hand on made-up sequences."""

import math

import pytest

from learner_service.serving.batcher import DynamicBatcher
from learner_service.serving.latency import ActingTime, LatencyTuner
from shared.config import BatcherConfig, ExperimentConfig, LearnerConfig, load, validate
from shared.errors import ConfigError

TARGET = 20e-3


def test_acting_time_is_a_line() -> None:
    time = ActingTime()
    for envs in (10, 20, 40):
        time.add(envs, 1e-3 + 1e-4 * envs)
    assert time.largest_within(4e-3) == pytest.approx(30)
    assert time.largest_within(0.5e-3) == 0
    alike = ActingTime()  # of one size nothing is known but that size: in proportion
    alike.add(16, 2e-3)
    assert alike.largest_within(4e-3) == pytest.approx(32)
    free = ActingTime()
    for envs in (10, 20):
        free.add(envs, 1e-3)
    assert free.largest_within(2e-3) == math.inf
    assert free.largest_within(0.5e-3) == 0


class Feed:
    """Batches of 10 requests and 100 environments, one after the other without a pause."""

    def __init__(self, tuner: LatencyTuner) -> None:
        self.tuner, self.now = tuner, 0.0

    def __call__(self, latency_s: float, acting_s: float, batches: int, pause_s: float = 0) -> None:
        for _ in range(batches):
            self.now += acting_s + pause_s
            self.tuner.observe([latency_s] * 10, 100, acting_s, self.now)


def test_wait_grows_while_there_is_room() -> None:
    tuner = LatencyTuner(TARGET)
    feed = Feed(tuner)
    feed(5e-3, 4e-3, 19)  # 190 requests: too few to tell
    assert (tuner.wait_s, tuner.preferred_envs) == (0, 0)
    feed(5e-3, 4e-3, 1)
    # A tenth of the target. 14 ms of acting, in proportion to size, are 350 environments: but no
    # more than twice the mean.
    assert tuner.wait_s == pytest.approx(2e-3)
    assert tuner.preferred_envs == 200
    feed(7e-3, 4e-3, 20)
    # 12 ms of acting are 300 environments, fewer than twice 200.
    assert (tuner.wait_s, tuner.preferred_envs) == (pytest.approx(4e-3), 300)
    feed(15.5e-3, 4e-3, 20)  # 0.5 ms below 0.8 of the target: so much and no more
    assert tuner.wait_s == pytest.approx(4.5e-3)
    feed(17e-3, 4e-3, 40)  # within the target, without room
    assert tuner.wait_s == pytest.approx(4.5e-3)


def test_late_requests_halve_it_at_once() -> None:
    tuner = LatencyTuner(TARGET)
    feed = Feed(tuner)
    feed(5e-3, 4e-3, 40)
    assert (tuner.wait_s, tuner.preferred_envs) == (pytest.approx(4e-3), 300)
    tuner.observe([25e-3] * 2 + [5e-3] * 8, 100, 4e-3, feed.now)  # 2 of 200 may be late
    assert tuner.preferred_envs == 300
    tuner.observe([25e-3], 100, 4e-3, feed.now)
    assert (tuner.wait_s, tuner.preferred_envs) == (pytest.approx(2e-3), 150)
    for _ in range(5):
        tuner.observe([25e-3] * 3, 100, 4e-3, feed.now)
    assert (tuner.wait_s, tuner.preferred_envs) == (0, 0)  # 62 us are no wait


def test_nothing_is_raised_where_acting_is_idle() -> None:
    tuner = LatencyTuner(TARGET)
    Feed(tuner)(2e-3, 1e-3, 60, pause_s=2e-3)  # a third of the time
    assert (tuner.wait_s, tuner.preferred_envs) == (0, 0)


def test_slow_acting_leaves_no_size_to_wait_for() -> None:
    tuner = LatencyTuner(TARGET)
    Feed(tuner)(15e-3, 15e-3, 60)  # 100 environments take 15 ms: 100 fit 16 - 1
    assert (tuner.wait_s, tuner.preferred_envs) == (0, 0)


def test_tuner_holds_a_queue_to_its_target() -> None:
    """A loop of requests and batches in virtual time: what is gathered longer is answered later."""
    tuner, late, requests, now = LatencyTuner(TARGET), 0, 0, 0.0
    waits = []
    for batch in range(4000):
        slow = 1500 < batch < 2500  # another program takes most of the processor
        gathered = tuner.wait_s
        acting = (1e-3 + 0.05e-3 * (40 + 4e3 * gathered)) * (6 if slow else 1)
        now += gathered + acting
        latencies = [gathered * i / 9 + acting for i in range(10)]
        late += sum(latency > TARGET for latency in latencies)
        requests += 10
        tuner.observe(latencies, int(40 + 4e3 * gathered), acting, now)
        waits.append(tuner.wait_s)
    assert late <= 0.01 * requests
    assert max(waits[:1500]) > 2e-3
    assert max(waits[1600:2499]) < max(waits[:1500]) < max(waits[2500:])


def test_batcher_waits_as_tuned_for_its_phase() -> None:
    batcher = DynamicBatcher(BatcherConfig(latency_target_ms=20))
    assert set(batcher.tuners) == {"update", "idle"}
    batcher.tuners["idle"].wait_s, batcher.tuners["idle"].preferred_envs = 0.5, 100
    assert (batcher.phase, batcher.limits) == ("idle", (100, 0.5))
    batcher.updating = True
    assert (batcher.phase, batcher.limits) == ("update", (0, 0.0))
    assert DynamicBatcher(BatcherConfig()).tuners == {}
    fixed = DynamicBatcher(BatcherConfig(preferred_batch_envs=8, max_wait_ms=3))
    assert fixed.limits == (8, 3e-3)


def test_target_is_refused_where_it_means_nothing() -> None:
    with pytest.raises(ConfigError, match="latency_target_ms=20 with pipeline=sync"):
        load("spread", ["learner.pipeline=sync", "learner.batcher.latency_target_ms=20"], {})
    with pytest.raises(ConfigError, match="chooses preferred_batch_envs and max_wait_ms"):
        validate(BatcherConfig, {"latency_target_ms": 20, "max_wait_ms": 1})
    config: ExperimentConfig = load("spread", ["learner.batcher.latency_target_ms=20"], {})
    assert isinstance(config.learner, LearnerConfig)
    assert config.learner.batcher.latency_target_ms == 20

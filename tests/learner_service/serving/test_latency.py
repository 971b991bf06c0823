"""The tuner of batches, by hand on synthetic sequences."""

import math

import numpy as np
import pytest
import torch

from learner_service.serving.batcher import DynamicBatcher
from learner_service.serving.inference import ServingStats
from learner_service.serving.latency import ActingTime, LatencyTuner, Limits
from learner_service.storage.rollout import RolloutStorage
from learner_service.telemetry.device_clock import DeviceClock
from learner_service.telemetry.metrics import LearnerMetrics
from learner_service.telemetry.progress import Progress
from shared.config.experiment import ExperimentConfig
from shared.config.files import load
from shared.config.learner import BatcherConfig, LearnerConfig
from shared.config.section import validate
from shared.process.errors import ConfigError
from tests.learner_service.toys import vector_spec

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


def test_acts_that_wait_are_told_from_slow_ones() -> None:
    metrics, batcher = LearnerMetrics(), DynamicBatcher(BatcherConfig())
    storage = RolloutStorage(vector_spec(), 4, 1, 1, torch.device("cpu"))
    stats = ServingStats(batcher, storage, Progress(), metrics, DeviceClock(storage.device))

    def waited(phase: str) -> list[float | None]:
        labels, names = {"phase": phase}, ("acts_waited", "acts_waited_seconds")
        samples = (f"murmur_learner_{name}_total" for name in names)
        return [metrics.registry.get_sample_value(name, labels) for name in samples]

    for _ in range(100):
        stats.note_act(2e-3, updating=False)
    stats.note_act(8e-3, updating=False)  # four times the usual
    stats.note_act(240e-3, updating=True)  # as long as an update
    assert waited("idle") == [None, None]
    assert waited("update") == [1, pytest.approx(0.238, abs=1e-3)]
    for _ in range(200):
        stats.note_act(30e-3, updating=False)  # larger batches: soon they are usual
    before = waited("idle")
    assert before[0] is not None
    assert before[0] < 80
    stats.note_act(30e-3, updating=False)
    assert waited("idle") == before


class Feed:
    """Batches of 10 requests and 100 environments: 20 of them are a window."""

    def __init__(self, tuner: LatencyTuner) -> None:
        self.tuner = tuner

    def __call__(
        self, latency_s: float, acting_s: float, windows: int, seconds: float | None = None
    ) -> None:
        for _ in range(20 * windows):
            self.tuner.observe([latency_s] * 10, 100, acting_s, seconds or acting_s)

    def trial(self, gain: float, windows: int = 32) -> None:
        """Windows of which those with the limits that are tried take less time, by `gain`."""
        for _ in range(windows):
            faster = self.tuner.limits is not self.tuner.kept
            self(5e-3, 4e-3, 1, 4e-3 / (gain if faster else 1.0))


def test_longer_wait_is_tried_and_kept_for_its_rate() -> None:
    tuner = LatencyTuner(TARGET)
    feed = Feed(tuner)
    feed(5e-3, 4e-3, 15)
    assert tuner.limits == tuner.kept == (0, 0.0)
    feed(5e-3, 4e-3, 1)
    # 1 ms in the queue and half of 16 - 5. 9.5 ms of acting, in proportion to size, are 237
    # environments: but no more than twice the mean.
    tried = tuner.limits
    assert tried == (200, pytest.approx(6.5e-3))
    assert tuner.kept == (0, 0.0)
    feed(5e-3, 4e-3, 1)
    assert tuner.limits == (0, 0.0)  # in turns
    feed(5e-3, 4e-3, 1)
    assert tuner.limits == tried
    feed.trial(1.06, 30)  # but the first window
    assert tuner.limits == tuner.kept == tried


def test_wait_is_kept_from_a_twentieth_more() -> None:
    for gain, kept in ((1.04, (0, 0.0)), (1.06, (200, pytest.approx(6.5e-3)))):
        tuner = LatencyTuner(TARGET)
        feed = Feed(tuner)
        feed(5e-3, 4e-3, 16)
        feed.trial(gain)
        assert tuner.limits == tuner.kept == kept


def test_trials_become_rare_while_they_fail() -> None:
    tuner = LatencyTuner(TARGET)
    feed = Feed(tuner)
    for pause in (16, 32, 64):
        feed(5e-3, 4e-3, pause - 1)
        assert tuner.limits == (0, 0.0)
        feed(5e-3, 4e-3, 1)
        assert tuner.limits == ({16: 200, 32: 150, 64: 125}[pause], pytest.approx(6.5e-3))
        feed.trial(1.0)


def test_kept_wait_is_given_up_where_less_is_as_fast() -> None:
    tuner = LatencyTuner(TARGET)
    feed = Feed(tuner)
    feed(5e-3, 4e-3, 16)
    feed.trial(1.06)
    feed(5e-3, 4e-3, 16)
    assert tuner.limits == (100, pytest.approx(3.25e-3))
    feed.trial(0.99)
    assert tuner.kept == (200, pytest.approx(6.5e-3))
    feed(15e-3, 4e-3, 32)  # more: 11 ms in the queue, and half of 16 - 15
    assert tuner.limits == (112, pytest.approx(11.5e-3))  # 4.5 ms of acting
    feed.trial(1.0)
    feed(5e-3, 4e-3, 64)  # and less again
    feed.trial(1.0)
    assert tuner.kept == (100, pytest.approx(3.25e-3))


def test_late_requests_end_a_trial_or_halve_the_wait() -> None:
    tuner = LatencyTuner(TARGET)
    feed = Feed(tuner)
    feed(5e-3, 4e-3, 16)
    tuner.observe([25e-3] * 2 + [5e-3] * 8, 100, 4e-3, 4e-3)  # 2 of 200 may be late
    assert tuner.limits == (200, pytest.approx(6.5e-3))
    tuner.observe([25e-3], 100, 4e-3, 4e-3)
    assert tuner.limits == (0, 0.0)
    feed(5e-3, 4e-3, 32)
    feed.trial(1.06)
    assert tuner.limits == (150, pytest.approx(6.5e-3))
    tuner.observe([25e-3] * 3, 100, 4e-3, 4e-3)
    assert tuner.limits == (75, pytest.approx(3.25e-3))
    for _ in range(6):
        tuner.observe([25e-3] * 3, 100, 4e-3, 4e-3)
    assert tuner.limits == (0, 0.0)  # 51 us are no wait


def test_nothing_is_tried_where_it_cannot_gain() -> None:
    idle = LatencyTuner(TARGET)
    Feed(idle)(2e-3, 1e-3, 60, seconds=3e-3)  # a third of the time
    assert idle.limits == (0, 0.0)
    late = LatencyTuner(TARGET)
    Feed(late)(17e-3, 4e-3, 60)  # within the target, without room
    assert late.limits == (0, 0.0)
    slow = LatencyTuner(TARGET)
    Feed(slow)(15e-3, 15e-3, 60)  # 100 environments take 15 ms: 100 fit 16 - 1
    assert slow.limits == (0, 0.0)


def play(
    tuner: LatencyTuner | None, batches: int, environment_s: float, constant_s: float
) -> tuple[float, float]:
    """32 sessions of 2 environments in virtual time.

    Args:
        tuner: chooses what a batch waits for; None: nothing.
        batches: how many to serve.
        environment_s: until a session that was answered asks again.
        constant_s: of acting; each environment adds 20 us.

    Returns:
        requests per second of the second half, and the share of all that came late.
    """
    chance = np.random.default_rng(0)
    arrivals = sorted(chance.uniform(0, environment_s, 32))
    now = half = 0.0
    served = late = asked = 0
    for batch in range(batches):
        limits = tuner.limits if tuner else Limits()
        enough = arrivals[min(31, max(0, -(-limits.preferred_envs // 2) - 1))]
        start = max(now, min(enough, arrivals[0] + limits.wait_s), arrivals[0])
        n = sum(a <= start for a in arrivals)
        acting = constant_s + 20e-6 * 2 * n
        latencies = [start + acting - a for a in arrivals[:n]]
        seconds, now = start + acting - now, start + acting
        if tuner:
            tuner.observe(latencies, 2 * n, acting, seconds)
        again = now + environment_s * chance.uniform(0.5, 1.5, n)
        arrivals = sorted([*arrivals[n:], *again])
        asked, late = asked + n, late + sum(x > TARGET for x in latencies)
        if 2 * batch == batches:
            half = now
        served += n if 2 * batch > batches else 0
    return served / (now - half), late / asked


def test_tuner_waits_only_where_it_raises_the_rate() -> None:
    """Waiting for everyone pays where acting's constant part exceeds the environments' time."""
    tuner = LatencyTuner(TARGET)
    rate, late = play(tuner, 6000, 1e-3, 4e-3)
    assert rate > 1.2 * play(None, 6000, 1e-3, 4e-3)[0]
    assert late <= 0.01
    assert tuner.kept.wait_s > 0
    tuner = LatencyTuner(TARGET)
    rate, late = play(tuner, 6000, 8e-3, 1e-3)
    assert rate > 0.97 * play(None, 6000, 8e-3, 1e-3)[0]
    assert late <= 0.01


def test_batcher_waits_as_tuned_for_its_phase() -> None:
    batcher = DynamicBatcher(BatcherConfig(latency_target_ms=20))
    assert set(batcher.tuners) == {"update", "idle"}
    batcher.tuners["idle"].kept = Limits(100, 0.5)
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

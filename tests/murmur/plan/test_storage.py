"""A counted replay decides as one that keeps transitions, step by step of random play."""

import random

import pytest
import torch

from murmur.learner_service.storage.replay import ReplayBatch, ReplayConfig, ReplayStorage
from murmur.learner_service.storage.storage import Unroll
from murmur.plan.model import Replays
from murmur.plan.simulate import CountedReplay
from murmur.shared.wire.spec import ArraySpec, Discrete, EnvSpec
from murmur.shared.wire.timestep import StepType

SPEC = EnvSpec("toy", 1, (ArraySpec("view", "float32", (1,)),), Discrete(2))
ENVS, LENGTH, SESSIONS, ROUNDS = 2, 4, 5, 120


class Play:
    """Sessions that act in both replays, as the inference loop lets them."""

    def __init__(self, real: ReplayStorage, counted: CountedReplay, seed: int) -> None:
        self.real, self.counted = real, counted
        self.random = random.Random(seed)  # noqa: S311
        self.version = self.updates = self.waited = 0
        self.open: dict[int, tuple[Unroll, Unroll]] = {}
        self.learning: ReplayBatch | None = None

    def round(self) -> None:
        """A row of each session, in any order, and at most one begin and end of an update."""
        learns = self.random.sample(range(SESSIONS), 2)
        for i, session in enumerate(self.random.sample(range(SESSIONS), SESSIONS)):
            self.turn(session)
            if i in learns:
                self.learn()

    def turn(self, session: int) -> None:
        """A row of one session."""
        pair = self.open.get(session)
        filled: list[Unroll] = []
        counted: list[Unroll] = []
        if pair is not None:
            for unroll in pair:
                _write(unroll)
            if pair[0].full:
                filled.append(pair[0])
                counted.append(pair[1])
                del self.open[session]
        if session not in self.open:
            admitted = self.real.may_begin(filled)
            assert admitted == self.counted.may_begin(counted)
            if admitted:
                begun = self.real.begin(ENVS, session, 0, filled)
                twin = self.counted.begin(ENVS, session, 0, counted)
                _write(begun)
                _write(twin)
                self.open[session] = begun, twin
            self.waited += not admitted
        if session in self.open:
            for unroll in self.open[session]:
                unroll.act(self.version, None)
        for unroll, twin in zip(filled, counted, strict=True):
            self.real.add(unroll)
            self.counted.add(twin)
        assert self.real.ready == self.counted.ready

    def learn(self) -> None:
        """Begin or end an update."""
        if self.learning is not None:
            self.real.done(self.learning)
            self.counted.done(self.learning)
            self.version += 1
            self.learning = None
        elif self.real.ready:
            self.learning = self.real.sample(self.version, 0.0)
            self.counted.sample(self.version, 0.0)
            self.updates += 1


def _write(unroll: Unroll) -> None:
    unroll.arrays["step_type"][unroll.cursor] = int(StepType.MID)
    unroll.cursor += 1


@pytest.mark.parametrize(("interval", "updates"), [(1, 1), (16, 1), (20, 3)])
def test_replays_decide_alike(interval: int, updates: int) -> None:
    config = ReplayConfig(
        capacity_rows=4000,
        start_rows=30,
        batch_size=8,
        update_interval=interval,
        updates_per_interval=updates,
        unroll_steps=LENGTH,
    )
    real = ReplayStorage(config, SPEC, 0.9, 1, torch.device("cpu"), {}, 0)
    counted = CountedReplay(Replays(LENGTH, 30, interval, updates, 8, 1))
    play = Play(real, counted, seed=interval)
    for _ in range(ROUNDS):
        play.round()
    assert play.updates > 5

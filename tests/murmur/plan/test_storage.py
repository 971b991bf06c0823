"""The model's storages decide as the learner's do, step by step of random play."""

import random

import pytest
import torch

from murmur.learner_service.storage.flight import Flight
from murmur.learner_service.storage.replay import ReplayConfig, ReplayStorage
from murmur.learner_service.storage.rollout import RolloutStorage
from murmur.learner_service.storage.storage import Unroll, UnrollStorage
from murmur.plan.storage import ReplayModel, Replays, RolloutModel
from murmur.plan.storage import Unroll as ModelUnroll
from murmur.shared.wire.spec import ArraySpec, Discrete, EnvSpec
from murmur.shared.wire.timestep import StepType

SPEC = EnvSpec("toy", 1, (ArraySpec("view", "float32", (1,)),), Discrete(2))
ENVS, LENGTH, SESSIONS, ROUNDS = 2, 4, 5, 120


class Play:
    """Sessions that act in the real storage and in its model, as the inference loop lets them."""

    def __init__(
        self, real: UnrollStorage[object], model: RolloutModel | ReplayModel, seed: int
    ) -> None:
        self.real, self.model = real, model
        self.random = random.Random(seed)  # noqa: S311
        self.version = self.updates = self.waited = 0
        self.open: dict[int, tuple[Unroll, ModelUnroll]] = {}
        self.learning: object | None = None

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
        if pair is not None:
            unroll, other = pair
            _write(unroll)
            other.cursor += 1
            if unroll.full:
                filled.append(unroll)
                del self.open[session]
        if session not in self.open:
            rows = ENVS * LENGTH * len(filled)
            admitted = self.real.may_begin(filled)
            assert admitted == self.model.may_begin(ENVS * len(filled), rows)
            if admitted:
                begun = self.real.begin(ENVS, session, 0, filled)
                twin = self.model.begin(ENVS, ENVS * len(filled))
                _write(begun)
                twin.cursor = 1
                self.open[session] = begun, twin
            self.waited += not admitted
        if session in self.open:
            self.open[session][0].act(self.version, None)
            self.open[session][1].act(self.version)
        for unroll in filled:
            assert pair is not None
            self.real.add(unroll)
            self.model.add(pair[1])
        assert self.real.ready == self.model.ready

    def learn(self) -> None:
        """Begin or end an update."""
        if self.learning is not None:
            self.real.done(self.learning)
            self.model.done()
            self.version += 1
            self.learning = None
        elif self.real.ready:
            batch = self.real.sample(self.version, 0.0)
            rows = self.model.sample(self.version)
            assert batch is not None
            assert (rows, self.real.dropped) == (batch.size, 0)  # type: ignore[attr-defined]
            self.learning = batch
            self.updates += 1


def _write(unroll: Unroll) -> None:
    unroll.arrays["step_type"][unroll.cursor] = int(StepType.MID)
    unroll.cursor += 1


@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.parametrize("wanted", [2, 3, 6])
def test_rollouts_decide_alike(lag: int, wanted: int) -> None:
    real = RolloutStorage(SPEC, LENGTH, 1, lag, torch.device("cpu"), unrolls_per_update=wanted)
    play = Play(real, RolloutModel(Flight(LENGTH, wanted, lag)), seed=lag + wanted)
    for _ in range(ROUNDS):
        play.round()
    assert play.updates > 5
    assert play.waited > 5 or wanted * (lag + 1) > ENVS * SESSIONS


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
    model = ReplayModel(Replays(LENGTH, 30, interval, updates, 8, 1))
    play = Play(real, model, seed=interval)
    for _ in range(ROUNDS):
        play.round()
    assert play.updates > 5

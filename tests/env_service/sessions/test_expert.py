"""Experts: whom they ask, until when, and what they refuse."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from murmur.env_service.environment import VectorEnvironment, make_environment
from murmur.env_service.envs.matrix import Config, MatrixGame
from murmur.env_service.sessions.expert import Expert
from murmur.env_service.watchdog.faults import FaultCount, GuardedEnvironment, Heartbeat
from murmur.shared.config import Section
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.config.section import validate
from murmur.shared.process.errors import ConfigError, EnvironmentFault
from murmur.shared.wire.spec import (
    ACTION_MASK,
    AGENT_MASK,
    EXPERT_ACTION,
    ArraySpec,
    spec_from_proto,
)
from murmur.shared.wire.timestep import Array, StepType, TimeStep
from tests.env_service.sessions.test_worker import play
from tests.env_service.tiny_learner import TinyLearner, experiment

HERE = "tests.env_service.sessions.test_expert"


class Counting:
    """A plug-in: agent 0 does how often it was asked in the episode, modulo 3; agent 1 one more."""

    class Config(Section):
        pass

    def __init__(self, config: Config, environment: VectorEnvironment) -> None:
        self.asked = np.zeros(environment.num_envs, np.int64)

    def act(self, timestep: TimeStep) -> NDArray[np.int32]:
        self.asked = np.where(timestep.step_type == StepType.FIRST, 0, self.asked + 1)
        return np.stack([self.asked % 3, (self.asked + 1) % 3], 1).astype(np.int32)


class Shapeless(Counting):
    """Gives one number too few."""

    def act(self, timestep: TimeStep) -> NDArray[np.int32]:
        return super().act(timestep)[:, :1]


class Beyond(Counting):
    """Does what cannot be done."""

    def act(self, timestep: TimeStep) -> NDArray[np.int32]:
        return super().act(timestep) + 7


class Drawing(Counting):
    """Draws random numbers: what it is seeded with is what it does."""

    def seed(self, seeds: NDArray[np.uint64]) -> None:
        self.seeds = seeds % np.uint64(3)

    def act(self, timestep: TimeStep) -> NDArray[np.int32]:
        return np.repeat(self.seeds[:, None], 2, 1).astype(np.int32)


class Failing(Counting):
    """Raises."""

    def act(self, timestep: TimeStep) -> NDArray[np.int32]:
        raise KeyError("north")


def config_of(baseline: str, updates: int = 2, **environment: Any) -> ExperimentConfig:
    sections = experiment("127.0.0.1:1").model_dump()
    sections["environment"] = environment or {"name": "matrix"}
    sections["imitation"] = {"baseline": baseline, "updates": updates}
    sections["learner"]["session_timeout_s"] = None  # chosen
    return validate(ExperimentConfig, sections)


def guarded(config: ExperimentConfig) -> GuardedEnvironment:
    faults = FaultCount(0, lambda reason, episodes: None)
    return GuardedEnvironment(lambda: make_environment(config.environment, 2), faults)


def in_pipeline(config: ExperimentConfig, pipeline: str) -> ExperimentConfig:
    learner = config.learner.model_copy(update={"pipeline": pipeline})
    return config.model_copy(update={"learner": learner})


def expert_of(baseline: str, *, asked: bool = True, **environment: Any) -> Expert:
    config = config_of(baseline, **environment)
    return Expert(config, guarded(config), asked=asked)


def first(num_envs: int = 2) -> TimeStep:
    return MatrixGame(Config(), num_envs).reset(np.zeros(num_envs, np.uint64))


def advice(timestep: TimeStep) -> list[list[int]]:
    found: list[list[int]] = timestep.observation[EXPERT_ACTION].tolist()
    return found


def test_rows_have_the_baselines_actions_until_enough_updates() -> None:
    expert = expert_of(f"{HERE}:Counting")
    row = first()
    assert advice(expert.label(row)) == [[0, 1], [0, 1]]
    later = replace(row, step_type=np.array([StepType.MID, StepType.FIRST], np.uint8))
    assert advice(expert.label(later)) == [[1, 2], [0, 1]]
    expert.updates = 1
    ended = replace(row, step_type=np.array([StepType.LAST, StepType.ABORTED], np.uint8))
    assert advice(expert.label(ended)) == [[-1, -1], [0, 0]]  # ABORTED rows hold zeros
    expert.updates = 2
    assert advice(expert.label(row)) == [[-1, -1], [-1, -1]]
    assert expert.spec.observations[-1] == ArraySpec(EXPERT_ACTION, "int32", ())


def test_evaluations_send_the_same_arrays_and_never_ask() -> None:
    expert = expert_of(f"{HERE}:Failing", asked=False)
    assert advice(expert.label(first())) == [[-1, -1], [-1, -1]]
    assert expert.spec == expert_of(f"{HERE}:Failing").spec


def test_without_imitation_rows_stay_as_they_are() -> None:
    expert = expert_of("")
    assert not expert.labels  # the caller adds nothing to them
    assert expert.spec == MatrixGame(Config(), 1).spec


def test_a_baseline_that_draws_is_seeded_but_not_in_sync_runs() -> None:
    config = config_of(f"{HERE}:Drawing")
    environment = guarded(config)
    with pytest.raises(ConfigError, match=r"draws random numbers: with learner\.pipeline=sync"):
        Expert(in_pipeline(config, "sync"), environment, asked=True).label(first())
    config = in_pipeline(config, "async")
    environment.seeds[:] = [4, 5]
    row = Expert(config, environment, asked=True).label(first())
    assert advice(row) == [[1, 1], [2, 2]]


def test_a_baseline_is_watched_when_made_and_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    config, heartbeat = config_of(f"{HERE}:Counting"), Heartbeat.private(2)
    seen = []

    def make(self: Counting, config: Section, environment: VectorEnvironment) -> None:
        seen.append((heartbeat.turns, heartbeat.making))

    def act(self: Counting, timestep: TimeStep) -> NDArray[np.int32]:
        seen.append((heartbeat.turns, heartbeat.making))
        return np.zeros((2, 2), np.int32)

    monkeypatch.setattr(Counting, "__init__", make)
    monkeypatch.setattr(Counting, "act", act)
    faults = FaultCount(0, lambda reason, episodes: None)
    made = partial(make_environment, config.environment, 2)
    environment = GuardedEnvironment(made, faults, heartbeat.part(0, 2))
    expert = Expert(config, environment, asked=True)
    expert.label(first())
    assert seen == [(1, True), (3, False)]  # odd: under way
    assert (heartbeat.turns, heartbeat.making) == (4, False)
    expert.begin(1)  # another stream: it forgets the episodes of the last one
    expert.label(first())
    assert seen[2:] == [(5, True), (7, False)]


def test_a_recreated_environment_has_a_new_baseline() -> None:
    config = config_of(f"{HERE}:Counting")
    environment = guarded(config)
    expert = Expert(config, environment, asked=True)
    middle = replace(first(), step_type=np.full(2, StepType.MID, np.uint8))
    assert [advice(expert.label(middle))[0][0] for _ in range(2)] == [1, 2]
    environment.environment = make_environment(config.environment, 2)
    assert advice(expert.label(middle))[0][0] == 1


@pytest.mark.parametrize(
    ("baseline", "words"),
    [
        (f"{HERE}:Shapeless", r"gave int32 actions of shape \(2, 1\), not integers of \(2, 2\)"),
        (f"{HERE}:Beyond", "gave action 7 for agent 0, which has 3 actions"),
        (f"{HERE}:Failing", "raised KeyError: 'north'"),
    ],
)
def test_a_baseline_that_fails_ends_the_run(baseline: str, words: str) -> None:
    with pytest.raises(EnvironmentFault, match=words):
        expert_of(baseline).label(first())


def test_illegal_advice_is_not_told() -> None:
    expert, row = expert_of(f"{HERE}:Counting"), first()
    mask: Array = np.ones((2, 2, 3), np.uint8)
    mask[1, 1, 1] = 0
    masked = replace(row, observation={**row.observation, ACTION_MASK: mask})
    assert advice(expert.label(masked)) == [[0, 1], [0, -1]]
    out = replace(row, step_type=np.array([StepType.MID, StepType.LAST], np.uint8))
    masked = replace(out, observation={**row.observation, ACTION_MASK: mask})
    assert advice(expert.label(masked)) == [[1, 2], [-1, -1]]


def test_the_dead_are_given_no_advice() -> None:
    expert, row = expert_of(f"{HERE}:Counting"), first()
    alive: Array = np.array([[1, 0], [0, 1]], np.uint8)
    mortal = replace(row, observation={**row.observation, AGENT_MASK: alive})
    assert advice(expert.label(mortal)) == [[0, -1], [-1, 1]]


@pytest.mark.parametrize("baseline", ["lawnmower", "information-gain-silent"])
def test_a_baseline_that_changes_its_environment_is_refused(baseline: str) -> None:
    with pytest.raises(ConfigError, match=rf"{baseline} changes the environment itself"):
        expert_of(baseline, name="terrain", pixels=9).label(first())


def test_unknown_baselines_and_continuous_actions_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"no baseline 'planer'.* 'planner'"):
        expert_of("planer", name="terrain", pixels=9)
    with pytest.raises(ConfigError, match="are continuous; imitation needs discrete ones"):
        expert_of("random", name="formation")


def test_a_session_asks_until_the_learner_has_made_the_updates() -> None:
    """A learner that makes an update every 10 rows, and has made one at the start."""
    config = config_of(f"{HERE}:Counting", updates=3)

    def version(row: int) -> int:
        return 1 + row // 10

    with TinyLearner(version=version) as learner:
        server = config.env_server.model_copy(update={"learner": learner.address})
        config = config.model_copy(update={"env_server": server})
        play(config, lambda: sum(len(s.rows) for s in learner.sessions) > 80)
        session = learner.sessions[0]
    assert spec_from_proto(session.hello.spec).observation(EXPERT_ACTION) is not None
    told = [bool((row.observation[EXPERT_ACTION] != -1).all()) for row in session.rows]
    # Row 20 is answered by update 3: rows after it are not told. Copies fly alike: no LAST yet.
    assert told[:20] == [True] * 20
    assert not any(told[20:])


def test_what_was_replayed_counts_for_baselines_that_remember() -> None:
    """Two rounds were played before: the next row is the third of its episode."""
    config = config_of(f"{HERE}:Counting", updates=9)
    taken = np.zeros((2, 2), "<i4").tobytes()
    with TinyLearner(starts=[(4, taken)] * 4) as learner:
        server = config.env_server.model_copy(update={"learner": learner.address})
        config = config.model_copy(update={"env_server": server})
        play(config, lambda: sum(len(s.rows) for s in learner.sessions) > 4)
        row = learner.sessions[0].rows[0]
    assert advice(row) == [[2, 0]] * 4

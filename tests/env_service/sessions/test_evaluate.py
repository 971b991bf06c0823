"""Evaluation: the right episodes, the right numbers, over the wire as without."""

import json
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from murmur.env_service.environment import RandomPolicy, VectorEnvironment
from murmur.env_service.envs.spread import Config, Spread
from murmur.env_service.sessions import evaluate
from murmur.env_service.sessions.evaluate import run_baseline, run_policy
from murmur.env_service.sessions.evaluation_result import EvaluationResult, joined_result
from murmur.shared.config.experiment import ExperimentConfig, LeagueConfig
from murmur.shared.process.errors import ConfigError, EnvironmentFault
from murmur.shared.rpc import rollout_pb2 as pb
from murmur.shared.wire.spec import EnvSpec
from murmur.shared.wire.timestep import StepType, TimeStep
from tests.env_service.tiny_learner import Policy, TinyLearner, experiment


def test_baseline_plays_the_episodes_of_the_seeds() -> None:
    result = run_baseline(experiment(""), "random", 70, first_seed=5)
    assert (result.policy, result.first_seed) == ("baseline random", 5)
    assert set(result.metrics) == {"return", "collisions", "occupied"}
    assert result.metrics["return"].shape == (70,)
    assert result.curves["return"].shape == (70, 26)
    assert (result.curves["return"][:, 0] == 0).all()
    # Eight copies play them in nine rounds; what a copy does follows from its seed alone.
    environment, seeds = Spread(Config(), 70), np.arange(5, 75, dtype=np.uint64)
    policy = RandomPolicy(environment)
    policy.seed(seeds)
    timestep = environment.reset(seeds)
    total = np.zeros(70)
    for _ in range(25):
        timestep = environment.step(
            policy.act(timestep), np.zeros(70, np.bool_), np.zeros(70, np.uint64)
        )
        total += timestep.reward.sum(axis=1)
    np.testing.assert_allclose(result.metrics["return"], total)
    np.testing.assert_allclose(result.curves["return"][:, -1], result.metrics["return"])
    np.testing.assert_array_equal(result.metrics["occupied"], timestep.metrics["occupied"])


def test_baselines_earn_what_the_learning_agents_do() -> None:
    given = experiment("")
    league = LeagueConfig(agents=(0, 2), checkpoints=("x",))
    part = run_baseline(given.model_copy(update={"league": league}), "random", 4, first_seed=5)
    spread, seeds = Spread(Config(), 4), np.arange(5, 9, dtype=np.uint64)
    policy = RandomPolicy(spread)
    policy.seed(seeds)
    timestep, total = spread.reset(seeds), np.zeros(4)
    for _ in range(25):
        timestep = spread.step(policy.act(timestep), np.zeros(4, np.bool_), np.zeros(4, np.uint64))
        total += timestep.reward[:, [0, 2]].sum(axis=1)
    np.testing.assert_allclose(part.metrics["return"], total)


def test_policy_is_evaluated_over_the_wire() -> None:
    def up(spec: EnvSpec, num_envs: int) -> Policy:
        return lambda _: np.full((num_envs, spec.num_agents), 4, np.int32)

    with TinyLearner(policy=up) as learner:
        result = run_policy(experiment(""), learner.address, 66, first_seed=5)
        sessions = learner.sessions
    assert result.policy == "learned, version 3"
    # Two sessions of 33 episodes, of which 7 copies play 5 or 4 each.
    hello = (pb.MODE_EVALUATE, 7, 33)
    assert [(s.hello.mode, s.hello.num_envs, s.hello.episodes) for s in sessions] == [hello] * 2
    assert all((s.rows[-1].step_type == StepType.LAST).all() for s in sessions)
    environment = Spread(Config(), 66)
    environment.reset(np.arange(5, 71, dtype=np.uint64))
    total = np.zeros(66)
    for _ in range(25):
        total += environment.step(
            np.full((66, 3), 4, np.int32), np.zeros(66, np.bool_), np.zeros(66, np.uint64)
        ).reward.sum(axis=1)
    np.testing.assert_allclose(result.metrics["return"], total)


def test_evaluation_survives_a_broken_stream() -> None:
    with TinyLearner(end_after=10) as learner:
        # The first streams break in the tenth row; then the learner is well again.
        def heal(environment: VectorEnvironment, timestep: TimeStep) -> None:
            if len(learner.sessions) == 2:
                learner.end_after = None

        result = run_policy(experiment(""), learner.address, 4, 1, on_row=heal)
    assert result.curves["return"].shape == (4, 26)
    assert not np.isnan(result.metrics["return"]).any()


def test_on_row_sees_the_first_episode_only() -> None:
    seen: list[int] = []
    x: list[float] = []

    def watch(environment: VectorEnvironment, timestep: TimeStep) -> None:
        seen.append(int(timestep.step_type[0]))
        x.append(float(environment.render_state(0)["agents"][0, 0]))

    run_baseline(experiment(""), "assignment", 70, 1, on_row=watch)
    assert seen == [StepType.FIRST, *[StepType.MID] * 24, StepType.LAST]
    assert len(set(x)) > 20


def test_episodes_of_different_length() -> None:
    nan = np.nan
    parts = [
        {"return": np.array([[0.0, 1.0, 3.0], [0.0, 2.0, nan]])},
        {"return": np.array([[0.0, 5.0, 6.0, 9.0]])},
    ]
    result = joined_result("toy", "test", 1, parts)
    assert result.metrics["return"].tolist() == [3.0, 2.0, 9.0]
    np.testing.assert_array_equal(result.curves["return"][1], [0.0, 2.0, nan, nan])
    record = json.loads(result.to_json())
    assert record["mean_curves"]["return"] == [0.0, 8 / 3, 4.5, 9.0]
    assert record["episodes"] == 3


def test_summary() -> None:
    values = np.random.default_rng(1).normal(3.0, 2.0, 400)
    result = EvaluationResult("toy", "test", 1, {"return": values}, {})
    summary = result.summary()["return"]
    assert summary.mean == pytest.approx(values.mean())
    assert summary.std == pytest.approx(values.std(ddof=1))
    assert (summary.min, summary.max) == (values.min(), values.max())
    # The normal approximation: mean -+ 1.96 std / sqrt(400).
    half = 1.96 * summary.std / 20
    assert summary.low == pytest.approx(summary.mean - half, abs=0.03)
    assert summary.high == pytest.approx(summary.mean + half, abs=0.03)
    assert result.summary() == result.summary()


def test_summary_of_one_episode() -> None:
    summary = EvaluationResult("toy", "test", 1, {"return": np.array([2.0])}, {}).summary()[
        "return"
    ]
    assert (summary.mean, summary.std, summary.low, summary.high) == (2.0, 0.0, 2.0, 2.0)


def test_an_unknown_baseline_names_the_known() -> None:
    with pytest.raises(ConfigError, match="did you mean 'assignment'"):
        run_baseline(experiment(""), "asignment", 1, 1)


class Cursed(gymnasium.Env[Any, Any]):
    """Pays its seed in each of three steps; the one with seed 6 raises in the second."""

    observation_space, action_space = Box(0, 99, (1,)), Discrete(5)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.seed, self.age = seed or 0, 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.age += 1
        if self.seed == 6 and self.age == 2:
            raise RuntimeError("cursed")
        return np.zeros(1, np.float32), float(self.seed), self.age == 3, False, {}


CURSED = {"name": "gymnasium", "factory": f"{__name__}:Cursed"}


def test_an_episode_that_fails_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    result = run_baseline(experiment("", environment=CURSED), "random", 4, first_seed=5)
    assert result.environment == CURSED["factory"]
    # Seeds 5 to 8, but 9 in the place of 6; three steps each.
    assert result.metrics["return"].tolist() == [15, 27, 21, 24]
    assert result.curves["return"].shape == (4, 4)
    assert "raised RuntimeError: cursed, in the episode with seed 6" in caplog.text
    assert "episode with seed 6 failed; the one with seed 9 is played instead" in caplog.text


def test_over_the_wire_the_session_begins_again() -> None:
    with TinyLearner() as learner:
        config = experiment("", environment=CURSED)
        result = run_policy(config, learner.address, 4, first_seed=5)
    assert result.metrics["return"].tolist() == [15, 27, 21, 24]
    assert [len(s.rows) for s in learner.sessions] == [2, 4]


def test_an_evaluation_that_fails_again_and_again_ends() -> None:
    config = experiment("", environment=CURSED, max_faults_per_minute=0)
    with pytest.raises(EnvironmentFault, match="1 fault within a minute"):
        run_baseline(config, "random", 4, first_seed=5)


class Uneven(gymnasium.Env[Any, Any]):
    """Lasts as many steps as its seed says and pays 1 in each; an object plays one episode only."""

    observation_space, action_space = Box(0, 99, (1,)), Discrete(5)
    worn_out = False

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.left = seed or 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        if self.worn_out:
            raise RuntimeError("worn out")
        self.left -= 1
        self.worn_out = self.left == 0
        return np.zeros(1, np.float32), 1.0, self.worn_out, False, {}


UNEVEN = {"name": "gymnasium", "factory": f"{__name__}:Uneven"}


def test_what_a_copy_does_after_its_episode_does_not_count() -> None:
    seen: list[int] = []
    config = experiment("", environment=UNEVEN)
    result = run_baseline(
        config, "random", 3, 2, on_row=lambda _, timestep: seen.append(int(timestep.step_type[0]))
    )
    # The first copy starts again in row 3 and fails in row 4, the last one's end.
    assert result.metrics["return"].tolist() == result.metrics["length"].tolist() == [2, 3, 4]
    nan = np.nan
    wanted = [[0, 1, 2, nan, nan], [0, 1, 2, 3, nan], [0, 1, 2, 3, 4]]
    np.testing.assert_array_equal(result.curves["return"], wanted)
    assert seen == [StepType.FIRST, StepType.MID, StepType.LAST]


def test_evaluations_play_the_environment_of_evaluations() -> None:
    def short(learner: str) -> ExperimentConfig:
        config = experiment(learner, environment=UNEVEN)
        evaluation = config.evaluation.model_copy(update={"environment": {"max_episode_steps": 2}})
        return config.model_copy(update={"evaluation": evaluation})

    assert run_baseline(short(""), "random", 2, 5).metrics["return"].tolist() == [2, 2]
    with TinyLearner() as learner:
        result = run_policy(short(""), learner.address, 2, 5)
    assert result.metrics["return"].tolist() == [2, 2]


class Stuck(Cursed):
    """Notes that it is closed, and raises then."""

    closed = 0

    def close(self) -> None:
        type(self).closed += 1
        raise RuntimeError("the door is stuck")


STUCK = {"name": "gymnasium", "factory": f"{__name__}:Stuck"}


def test_environments_are_closed_and_what_was_played_counts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = experiment("", environment=STUCK)
    words = "raised RuntimeError: the door is stuck when it was closed"
    result = run_baseline(config, "random", 3, first_seed=7)
    assert result.metrics["return"].tolist() == [21, 24, 27]
    assert (Stuck.closed, caplog.text.count(words)) == (3, 1)
    with TinyLearner() as learner:
        result = run_policy(config, learner.address, 3, first_seed=7)
    assert result.metrics["return"].tolist() == [21, 24, 27]
    assert (Stuck.closed, caplog.text.count(words)) == (6, 2)
    # An evaluation that fails says why: the seed 6, not the door.
    config = experiment("", environment=STUCK, max_faults_per_minute=0)
    with pytest.raises(EnvironmentFault, match="1 fault within a minute"):
        run_baseline(config, "random", 2, first_seed=5)
    assert (Stuck.closed, caplog.text.count(words)) == (8, 3)


class Counted(Uneven):
    """Counts the environments that are open at once."""

    now, most = 0, 0

    def __init__(self) -> None:
        cls = type(self)
        cls.now += 1
        cls.most = max(cls.most, cls.now)

    def step(self, action: Any) -> Any:
        self.left -= 1
        return np.zeros(1, np.float32), float(action + self.left), self.left == 0, False, {}

    def close(self) -> None:
        type(self).now -= 1


COUNTED = {"name": "gymnasium", "factory": f"{__name__}:Counted"}


@pytest.mark.parametrize("episodes", [1, 7, 70])
def test_few_copies_play_the_same_episodes(episodes: int) -> None:
    def act(spec: EnvSpec, num_envs: int) -> Policy:
        return lambda _: np.full((num_envs, spec.num_agents), 3, np.int32)

    results = []
    for copies in (2, 128):
        config = experiment("", environment=COUNTED, envs_per_worker=copies)
        Counted.now = Counted.most = 0
        results.append([run_baseline(config, "random", episodes, 2)])
        assert (Counted.now, Counted.most) == (0, min(copies, _rounded(episodes, 64)))
        with TinyLearner(policy=act) as learner:
            results[-1].append(run_policy(config, learner.address, episodes, 2))
        assert (Counted.now, Counted.most) == (0, min(copies, _rounded(episodes, 64)))
    for few, many in zip(*results, strict=True):
        for name, values in many.metrics.items():
            np.testing.assert_array_equal(few.metrics[name], values)
            np.testing.assert_array_equal(few.curves[name], many.curves[name])


def _rounded(episodes: int, most: int) -> int:
    """Size of the first of the fewest equal parts."""
    return -(-episodes // -(-episodes // most))


class Endless(Cursed):
    """Never ends."""

    def step(self, action: Any) -> Any:
        return np.zeros(1, np.float32), 0.0, False, False, {}


ENDLESS = {"name": "gymnasium", "factory": f"{__name__}:Endless"}


def test_an_episode_without_end_is_reported_and_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(evaluate, "_REPORT_AFTER_S", 0.0)
    monkeypatch.setattr(evaluate, "_MAX_STEPS", 2_000)
    config = experiment("", environment=ENDLESS)
    words = "seed 5 of .*Endless' has no end after 2047 .*set environment.max_episode_steps"
    with pytest.raises(EnvironmentFault, match=words):
        run_baseline(config, "random", 4, first_seed=5)
    assert "has no end after 1023 steps; it is given up after 2000" in caplog.text
    with TinyLearner() as learner, pytest.raises(EnvironmentFault, match=words):
        run_policy(config, learner.address, 4, first_seed=5)
    limited = experiment("", environment={**ENDLESS, "max_episode_steps": 3000})
    assert run_baseline(limited, "random", 1, 5).metrics["length"].tolist() == [3000]

"""Returns of teams, by hand and in MPE's simple_tag."""

from typing import Any

import numpy as np
import pytest

from murmur.env_service.adapters.factory import read_info
from murmur.env_service.adapters.teams import TeamReturns, teams_of
from murmur.env_service.environment import RandomPolicy, VectorEnvironment, make_environment
from murmur.env_service.sessions.evaluate import run_baseline
from murmur.shared.config.episode_options import EnvironmentConfig
from murmur.shared.config.files import load
from murmur.shared.process.errors import ConfigError
from murmur.shared.wire.timestep import StepType

TAG = ("adversary_0", "adversary_1", "adversary_2", "agent_0")
FACTORY = "mpe2.simple_tag_v3:parallel_env"


@pytest.mark.parametrize(
    ("agents", "wanted", "teams"),
    [
        (TAG, "auto", {"adversary": [0, 1, 2], "agent": [3]}),
        (TAG, "none", {}),
        (TAG, "agents", {name: [i] for i, name in enumerate(TAG)}),
        (TAG, {"odd": ("adversary_1", "agent_0")}, {"odd": [1, 3]}),
        (("piston_0", "piston_1"), "auto", {}),
        (("speaker", "listener"), "auto", {"speaker": [0], "listener": [1]}),
        (("0", "1"), "auto", {"0": [0], "1": [1]}),
        (("agent",), "agents", {}),
    ],
)
def test_teams_by_the_names_of_agents(agents: Any, wanted: Any, teams: Any) -> None:
    assert teams_of(agents, wanted, "f") == teams


def test_a_team_return_is_the_sum_over_its_agents_and_steps() -> None:
    returns = TeamReturns({"a": [0, 2], "b": [1]}, num_envs=2, num_agents=3)
    metrics = {name: np.zeros(2, np.float32) for name in returns.names}
    first = np.array([True, True])
    for reward in ([[0, 0, 0], [0, 0, 0]], [[1, 10, 2], [4, 0, 0]], [[1, 10, 2], [4, 5, 0]]):
        returns.add(np.array(reward), first, metrics)
        first = np.array([False, False])
    assert metrics["return/a"].tolist() == [1 + 2 + 1 + 2, 8]
    assert metrics["return/b"].tolist() == [20, 5]
    returns.add(np.zeros((2, 3)), np.array([True, False]), metrics)
    assert metrics["return/a"].tolist() == [0, 8]


def tag(**options: Any) -> EnvironmentConfig:
    return EnvironmentConfig(
        name="pettingzoo", factory=FACTORY, arguments={"max_cycles": 25}, **options
    )


def episodes(environment: VectorEnvironment) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Returns [N, A] of one episode in every copy, and the metrics at their ends."""
    policy, seeds = RandomPolicy(environment), np.arange(environment.num_envs, dtype=np.uint64)
    row = environment.reset(seeds)
    total = np.zeros_like(row.reward)
    while (row.step_type != StepType.LAST).all():
        row = environment.step(policy.act(row), np.zeros(len(seeds), np.bool_), seeds)
        total += row.reward
    return total, {name: values.copy() for name, values in row.metrics.items()}


def test_simple_tag_reports_both_teams() -> None:
    pytest.importorskip("mpe2")
    environment = make_environment(tag(), 16)
    assert environment.spec.metrics == ("return/adversary", "return/agent", "length")
    total, metrics = episodes(environment)
    np.testing.assert_allclose(metrics["return/adversary"], total[:, :3].sum(1), rtol=1e-5)
    np.testing.assert_allclose(metrics["return/agent"], total[:, 3], rtol=1e-5)
    assert (metrics["return/agent"] != 0).any()


def test_team_returns_are_of_rewards_before_they_are_shared() -> None:
    pytest.importorskip("mpe2")
    _, own = episodes(make_environment(tag(), 2))
    shared, metrics = episodes(make_environment(tag(reward_sharing="sum"), 2))
    for name in ("return/adversary", "return/agent"):
        np.testing.assert_array_equal(metrics[name], own[name])
    np.testing.assert_allclose(
        shared[:, 0], own["return/adversary"] + own["return/agent"], rtol=1e-4, atol=1e-4
    )


def test_an_evaluation_sums_up_each_team() -> None:
    pytest.importorskip("mpe2")
    config = load("simple-spread", [], {}).model_copy(update={"environment": tag()})
    result = run_baseline(config, "random", 4, 1)
    summary = result.summary()
    assert summary["return"].mean == pytest.approx(
        summary["return/adversary"].mean + summary["return/agent"].mean, rel=1e-4, abs=1e-4
    )


@pytest.mark.parametrize(
    ("teams", "words"),
    [
        (
            {"prey": ["rabbit_0"]},
            r"environment.teams.prey: .* has no agent 'rabbit_0'; it has 'adv",
        ),
        ({"a": ["agent_0"], "b": ["agent_0"]}, "'agent_0' is in 'a' and in 'b'; name it once"),
    ],
)
def test_teams_that_cannot_be_are_refused(teams: Any, words: str) -> None:
    pytest.importorskip("mpe2")
    with pytest.raises(ConfigError, match=words):
        make_environment(tag(teams=teams), 1)


def test_an_info_is_found_in_dictionaries_within() -> None:
    info = {"metrics": {"won": 1.0}, "a.b": 2.0, "none": None}
    assert read_info(info, "metrics.won") == 1.0
    assert read_info(info, "a.b") == 2.0
    for name in ("metrics.lost", "lost", "none.x", "metrics.won.x"):
        assert read_info(info, name) is None

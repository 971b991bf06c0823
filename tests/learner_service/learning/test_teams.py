"""Teams that are trained apart: each learns as if it were alone, by its own options."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.teams import PRIZES, prizes
from murmur.learner_service.algorithms.mappo import Config
from murmur.learner_service.device.cuda_graph import Graphs
from murmur.learner_service.device.precision import Precision
from murmur.learner_service.learning.base import Algorithm, build_algorithm
from murmur.learner_service.learning.team_specs import OTHERS, View
from murmur.learner_service.learning.teams import GraphsOfTeams
from murmur.learner_service.loop import LastFinite
from murmur.learner_service.storage.rollout import Batch
from murmur.shared.config import PluginConfig
from murmur.shared.config.plugins import load_plugin
from murmur.shared.config.section import validate
from murmur.shared.process.errors import ConfigError
from murmur.shared.wire.dataset import OBSERVATION
from murmur.shared.wire.spec import ADJACENCY, STATE, ArraySpec, Discrete, EnvSpec
from murmur.testing import assert_algorithm
from tests.learner_service.toys import CPU, random_batch

SPEC = EnvSpec(
    "tag",
    3,
    (ArraySpec("view", "float32", (2,)), ArraySpec("clock", "float32", (1,), False)),
    Discrete(3),
    max_episode_steps=4,
    agents=("hunter_0", "prey_0", "hunter_1"),
)
HUNTER = {"actor_lr": 3e-3, "network": {"hidden": [6]}}
TEAMS: dict[str, dict[str, Any]] = {"hunter": HUNTER, "prey": {"gamma": 0.5}}
MLP = PluginConfig(name="mlp", hidden=(8,))


def build(spec: EnvSpec = SPEC, network: PluginConfig = MLP, **options: Any) -> Algorithm[Any]:
    config = PluginConfig(name="mappo", **{"batch_size": 24, "batch_number": 2, **options})
    return build_algorithm(config, spec, network, Precision("fp32", CPU), CPU, 5)


def batch() -> Batch:
    found = random_batch(SPEC, 6, 4, seed=1)
    found.arrays["log_prob"] = torch.full(found.arrays["reward"].shape, -1.0986)
    return found


def weights(algorithm: Algorithm[Any], prefix: str = "") -> dict[str, Tensor]:
    return {
        f"{name.removeprefix(prefix)}.{key}": x.clone()
        for name, part in algorithm.parts.items()
        if name.startswith(prefix) and isinstance(part, torch.nn.Module)
        for key, x in part.state_dict().items()
    }


def test_a_team_learns_as_if_the_others_were_its_world() -> None:
    """The hunters' critic is shown what the prey observes: two numbers, beside its own four."""
    together = build(teams=TEAMS)
    view = View.of("hunter", (0, 2), SPEC, centralized=True)
    assert view.spec.agents == ("hunter_0", "hunter_1")
    assert view.spec.observation(OTHERS + "view") == ArraySpec(
        OTHERS + "view", "float32", (2,), per_agent=False
    )
    alone = build(view.spec, PluginConfig(name="mlp", hidden=(6,)), actor_lr=3e-3, batch_size=16)
    own = view.batch(batch(), 0)
    prey = batch().arrays[OBSERVATION + "view"][:, :, 1]
    assert torch.equal(own.arrays[OBSERVATION + OTHERS + "view"], prey)
    assert own.arrays["action"].shape[2] == 2
    for _ in range(2):
        scalars = together.update(batch())
        expected = alone.update(view.batch(batch(), 0))
    for name, x in weights(alone).items():
        assert torch.equal(weights(together, "hunter.")[name], x), name
    assert scalars["entropy/hunter"] == expected["entropy"]
    mean = (scalars["entropy/hunter"] + scalars["entropy/prey"]) / 2
    assert scalars["entropy"] == pytest.approx(float(mean))


def test_a_state_takes_the_place_of_what_others_observe() -> None:
    told = ArraySpec(STATE, "float32", (7,), per_agent=False)
    spec = EnvSpec("tag", 3, (*SPEC.observations, told), Discrete(3), agents=SPEC.agents)
    assert not View.of("prey", (1,), spec, centralized=True).others
    assert not View.of("prey", (1,), SPEC, centralized=False).others


@pytest.mark.parametrize("algorithm", ["ippo", "happo"])
def test_teams_keep_the_contract_of_an_algorithm(algorithm: str) -> None:
    """Interleaved agents, memory of one team, saved and continued; see assert_algorithm."""
    teams = {
        "outer": {"agents": [0, 2], "share_parameters": False, "network": {"hidden": [8]}},
        "inner": {"agents": ["agent_1"], "data_passes": 2, "network": {"recurrent": 4}},
    }
    assert_algorithm(algorithm, teams=teams, normalize_rewards=True)


def test_teams_of_agents_that_move_one_after_the_other() -> None:
    assert_algorithm("happo", teams={"outer": {"agents": [0, 2]}, "inner": {"agents": [1]}})


def test_agents_of_a_team_hear_each_other_alone() -> None:
    spec = replace(SPEC, observations=(*SPEC.observations, ArraySpec(ADJACENCY, "uint8", (3,))))
    view = View.of("hunter", (0, 2), spec, centralized=True)
    assert view.spec.gives_adjacency
    edges = torch.tensor([[0, 1, 0], [1, 0, 1], [1, 0, 0]], dtype=torch.uint8)
    rows = {"view": torch.zeros(1, 3, 2), "clock": torch.zeros(1, 1), ADJACENCY: edges[None]}
    assert view.observation(rows)[ADJACENCY].tolist() == [[[0, 0], [1, 0]]]
    found = random_batch(spec, 6, 4, seed=1)
    found.arrays["log_prob"] = torch.full(found.arrays["reward"].shape, -1.0986)
    found.arrays[OBSERVATION + ADJACENCY] = edges.expand(7, 4, 3, 3)
    own = view.batch(found, 0).arrays[OBSERVATION + ADJACENCY]
    assert own.shape == (7, 4, 2, 2)
    assert own[3, 2].tolist() == [[0, 0], [1, 0]]
    graph = PluginConfig(name="graph", width=8, heads=2)
    assert build(spec, graph, teams=TEAMS).update(found)["entropy/hunter"] > 0


def test_a_frozen_team_stays_and_an_update_is_undone() -> None:
    algorithm = build(teams=TEAMS, frozen_agents=(1,))
    before, last = weights(algorithm), LastFinite(algorithm)
    last.keep()
    counts = dict(algorithm.counts)
    scalars = algorithm.update(batch())
    assert "entropy/prey" not in scalars
    after = weights(algorithm)
    for name, x in before.items():
        assert torch.equal(after[name], x) == (name.startswith("prey.")) or "value_norm" in name
    assert algorithm.counts != counts
    last.restore()
    assert algorithm.counts == counts
    assert all(torch.equal(weights(algorithm)[name], x) for name, x in before.items())


def test_rates_of_teams_grow_with_minibatches() -> None:
    config = Config(
        batch_size=8,
        batch_number=1,
        max_batch_size=32,
        unroll_steps=8,
        unrolls_per_update=8,
        teams={"a": HUNTER},
    )
    grown = config.for_environments(64, 1, 0, remembers=False)
    assert grown.batch_size == 32
    assert grown.teams["a"]["actor_lr"] == pytest.approx(2 * HUNTER["actor_lr"])


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        (
            {"teams": {"hunter": {"actor_rl": 1}, "prey": {}}},
            r"unknown key 'algorithm.teams.hunter.actor_rl'; did you mean 'actor_lr'",
        ),
        (
            {"teams": {"hunter": {"gamma": 2}, "prey": {}}},
            r"'algorithm.teams.hunter.gamma' = 2: it must be less than or equal to 1",
        ),
        (
            {"teams": {"hunter": {"network": {"hiden": [4]}}, "prey": {}}},
            r"unknown key 'algorithm.teams.hunter.network.hiden'; did you mean 'hidden'",
        ),
        (
            {"teams": {"hunter": {"network": {"name": "mpl"}}, "prey": {}}},
            r"'algorithm.teams.hunter.network.name' = mpl: .*did you mean 'mlp'",
        ),
        (
            {"teams": {"hunter": {"batch_size": 4}, "prey": {}}},
            r"'algorithm.teams.hunter.batch_size' is of all teams together; set algorithm.batch",
        ),
        ({"teams": {"hunter": {}}}, r"no team has prey_0 of 'tag'"),
        ({"teams": {"hunters": {}, "prey": {}}}, r"'tag' has no agent 'hunters'; did you mean"),
        (
            {"teams": {"hunter": {}, "prey": {"agents": [1, 2]}}},
            r"algorithm.teams.prey: agent 'hunter_1' is in team 'hunter' already",
        ),
        (
            {"teams": {"hunter": {}, "prey": {}}, "share_parameters": (0, 0, 1)},
            r"teams 'hunter' and 'prey' share networks 0",
        ),
        ({"teams": {"hunter": {}, "prey": {}}, "frozen_agents": (0, 1, 2)}, "no agent is left"),
    ],
)
def test_wrong_options_name_the_team_and_the_fix(changes: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        build(**changes)


@pytest.mark.parametrize("name", ["coma", "qmix", "vdn", "maddpg", "sac"])
def test_algorithms_that_train_all_agents_together_refuse_teams(name: str) -> None:
    with pytest.raises(ConfigError, match=r"teams: this algorithm trains all agents together"):
        validate(load_plugin("algorithm", name).Config, {"teams": TEAMS}, "algorithm")


def test_lists_of_shared_networks_are_divided_among_teams() -> None:
    algorithm = build(teams=TEAMS, share_parameters=(0, 1, 2))
    assert len(algorithm.parts["hunter.actor"].network.layers[0].weight) == 2  # type: ignore[attr-defined]
    again = copy.deepcopy(algorithm.state_dict())
    build(teams=TEAMS, share_parameters=(0, 1, 2)).load_state_dict(again)


@pytest.mark.long
@pytest.mark.parametrize("case", list(PRIZES))
def test_a_game_of_unequal_teams_reaches_its_equilibrium(case: str) -> None:
    _, patient, hasty = PRIZES[case]
    assert prizes(case, 1, 150) == {"patient": patient, "hasty": hasty}


def test_unsettled_calls_of_teams_are_those_of_all_teams() -> None:
    teams = [Graphs(CPU), Graphs(CPU)]
    together = GraphsOfTeams(teams, CPU)
    for graphs in teams:
        graphs.eager_calls["update"], graphs.captures["update"] = 2, 1
        graphs.replays["update"] = 100
    assert together.unsettled == 0  # nothing is captured on a CPU
    for graphs in teams:
        graphs.enabled = True
    assert together.unsettled == 6

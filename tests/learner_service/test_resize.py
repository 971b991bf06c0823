"""Policies that act for another number of agents than they were trained with."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import murmur
from benchmarks.team_networks import Relay
from murmur.cli import main
from murmur.learner_service.checkpoint.contents import saved_policy
from murmur.learner_service.checkpoint.folder import CheckpointFolder
from murmur.learner_service.checkpoint.resize import resize_checkpoint, with_agents
from murmur.learner_service.device.precision import Precision
from murmur.learner_service.export.policy import export_policy, load_exported
from murmur.shared.process.errors import ConfigError, MurmurError
from murmur.shared.wire.spec import ADJACENCY, STATE, ArraySpec, Discrete, EnvSpec
from tests.learner_service.export.test_policy import checkpoint
from tests.learner_service.toys import CPU

OWN = ArraySpec("own", "float32", (4,))
FOES = ArraySpec("foes", "float32", (3, 2)), ArraySpec("foes_mask", "uint8", (3,))
SPEC = EnvSpec(
    "toy",
    3,
    (OWN, *FOES, ArraySpec(ADJACENCY, "uint8", (3,)), ArraySpec(STATE, "float32", (9,), False)),
    Discrete(3),
    agents=("a", "b", "c"),
)
MAPPO = {"name": "mappo"}
GRAPH = {"name": "graph", "width": 8, "heads": 2}
ATTENTION = {"name": "attention", "width": 8, "heads": 2, "communication": True}


def act(state: dict[str, Any], seen: dict[str, torch.Tensor]) -> torch.Tensor:
    policy, _ = saved_policy("x", state, Precision("fp32", CPU), CPU)
    return policy.act(seen, None)["logits"]


@pytest.mark.parametrize("network", [GRAPH, ATTENTION], ids=lambda x: x["name"])
def test_agents_out_of_hearing_change_nothing(network: dict[str, Any]) -> None:
    state = checkpoint(SPEC, MAPPO, network)
    torch.manual_seed(0)
    few = {
        "own": torch.randn(2, 3, 4),
        "foes": torch.randn(2, 3, 3, 2),
        "foes_mask": torch.ones(2, 3, 3, dtype=torch.uint8),
        ADJACENCY: torch.ones(2, 3, 3, dtype=torch.uint8),
    }
    many = {name: torch.cat([x, x[:, :2]], 1) for name, x in few.items() if name != ADJACENCY}
    many[ADJACENCY] = torch.zeros(2, 5, 5, dtype=torch.uint8)
    many[ADJACENCY][:, :3, :3] = 1
    torch.testing.assert_close(act(with_agents(state, "x", 5), many)[:, :3], act(state, few))


def test_recurrent_mlp_that_is_told_no_number_acts_for_any() -> None:
    spec = replace(SPEC, observations=(OWN,))
    network = {"name": "mlp", "hidden": [8], "agent_id": False, "recurrent": 5}
    state = checkpoint(spec, {**MAPPO, "normalize_rewards": True}, network)
    resized = with_agents(state, "x", 7)
    policy, _ = saved_policy("x", resized, Precision("fp32", CPU), CPU)
    memory = torch.zeros(2, 7, policy.memory_size)
    assert policy.act({"own": torch.zeros(2, 7, 4)}, None, memory)["action"].shape == (2, 7)


@pytest.mark.parametrize("averaged", [True, False])
@pytest.mark.parametrize("name", ["vdn", "qmix", "maddpg"])
def test_off_policy_networks_act_for_another_number(name: str, averaged: bool) -> None:
    """By the target network, if averaged, whose weights differ from those of the one that learns.

    QMIX's mixer, of as many values as there are agents, does not act.
    """
    spec = replace(SPEC, observations=(OWN, ArraySpec(STATE, "float32", (9,), False)))
    algorithm = {"name": name, "averaged_policy": averaged}
    state = checkpoint(spec, algorithm, {"name": "mlp", "hidden": [8], "agent_id": False})
    torch.manual_seed(0)
    for part in state["algorithm"]["parts"].values():
        for key, x in part.items():
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                part[key] = x + torch.randn(x.shape)
    few = torch.randn(100, 3, 4)
    many = torch.cat([few, few[:, :2]], 1)
    trained, resized = (
        saved_policy("x", of, Precision("fp32", CPU), CPU)[0]
        for of in (state, with_agents(state, "x", 5))
    )
    found = resized.act({"own": many}, None)["action"]
    assert torch.equal(found[:, :3], trained.act({"own": few}, None)["action"])


def test_another_number_of_entities() -> None:
    """As where each other agent is an entity; a critic of more numbers is untrained."""
    spec = replace(SPEC, observations=(OWN, *FOES))
    state = checkpoint(spec, MAPPO, {**ATTENTION, "communication": False})
    more = (OWN, replace(FOES[0], shape=(4, 2)), replace(FOES[1], shape=(4,)))
    resized = resize_checkpoint(
        state, "x", replace(spec, num_agents=5, observations=more, agents=())
    )
    seen = {
        "own": torch.zeros(1, 5, 4),
        "foes": torch.zeros(1, 5, 4, 2),
        "foes_mask": torch.ones(1, 5, 4, dtype=torch.uint8),
    }
    assert act(resized, seen).shape == (1, 5, 3)


@pytest.mark.parametrize(
    ("algorithm", "network", "changes", "words"),
    [
        ({}, {"name": "mlp"}, {}, "network.agent_id=true feeds each agent's number"),
        ({}, {"name": "mlp", "agent_id": False}, {}, "what its network is fed depends on their nu"),
        ({"share_parameters": False}, {"name": "mlp"}, {}, "share_parameters=true"),
        ({"teams": {"a": {}, "b": {"agents": [1, 2]}}}, ATTENTION, {}, "algorithm.teams trains"),
        (
            {},
            GRAPH,
            {"observations": (replace(OWN, shape=(5,)), *FOES)},
            r"observations\['own'\]\.shape: \(4,\) here, \(5,\) there",
        ),
        ({}, GRAPH, {"action": Discrete(4)}, "action: "),
    ],
)
def test_policy_that_depends_on_the_number_is_refused(
    algorithm: dict[str, Any], network: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    spec = replace(SPEC, num_agents=5, agents=(), **changes)
    adjacency = ArraySpec(ADJACENCY, "uint8", (5,))
    kept = tuple(o for o in spec.observations if o.name != ADJACENCY)
    spec = replace(spec, observations=(*kept[:3], adjacency, *kept[3:]))
    state = checkpoint(SPEC, {**MAPPO, **algorithm}, network)
    with pytest.raises(MurmurError, match=f"x is of 3 agents and cannot act for 5: .*{words}"):
        resize_checkpoint(state, "x", spec)


def test_loaded_and_exported_for_five(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    CheckpointFolder(run, 1).save_best(checkpoint(SPEC, MAPPO, GRAPH))
    (run / "config.yaml").write_text("environment: {name: spread}\n")
    policy = murmur.load(run, num_agents=5)
    assert policy.spec.num_agents == 5
    seen: dict[str, Any] = {
        o.name: np.ones((2, 5, *o.shape), o.dtype) for o in policy.spec.observations
    }
    wanted = policy.act({**seen, STATE: np.zeros((2, 15), np.float32)})  # critics' alone
    assert wanted.shape == (2, 5)
    with pytest.raises(ConfigError, match="num_agents = -1"):
        murmur.load(run, num_agents=-1)
    monkeypatch.setattr("sys.argv", ["murmur", "export", str(run), "--agents", "5"])
    with pytest.raises(SystemExit, match="0"):
        main()
    assert "takes own: float32 [rows, 5, 4]" in capsys.readouterr().out
    given = {name: seen[name] for name in ("own", "foes", "foes_mask", ADJACENCY)}
    got = load_exported(run / "policy.onnx")(given)["action"]
    np.testing.assert_array_equal(got, wanted)
    assert "Agents hear each other: run all of them in one place" in (run / "policy.md").read_text()


@pytest.mark.parametrize(
    ("teams", "network", "execution"),
    [
        ({}, GRAPH, "centralized"),
        ({}, ATTENTION, "centralized"),
        ({}, {**ATTENTION, "communication": False}, "decentralized"),
        ({"a": {"network": GRAPH}, "b": {"agents": [1, 2]}}, {"name": "mlp"}, "decentralized"),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ({}, {"name": "mlp"}, "decentralized"),
                (
                    {"a": {}, "b": {"agents": ["b", "c"], "network": GRAPH}},
                    {"name": "mlp"},
                    "centralized",
                ),
            )
        ),
    ],
)
def test_exported_file_says_how_it_is_executed(
    teams: dict[str, Any], network: dict[str, Any], execution: str, tmp_path: Path
) -> None:
    state = checkpoint(SPEC, {**MAPPO, "teams": teams}, network)
    done = export_policy(state, "safetensors", tmp_path / "x", "x")
    assert json.loads(json.dumps(done.about))["execution"] == execution


@pytest.mark.long
@pytest.mark.system
def test_trained_with_three_evaluated_with_five(tmp_path: Path) -> None:
    config = {
        "environment": {"name": f"{Relay.__module__}:{Relay.__name__}"},
        "run": {"max_env_steps": 600},
        "network": GRAPH,
        "env_server": {"num_workers": 1, "envs_per_worker": 4, "metrics_port": 0},
        "learner": {"device": "cpu", "port": 0, "metrics_port": 0},
    }
    run = murmur.train(config, run=tmp_path / "run", progress=False)
    for agents in (3, 5):
        result = run.evaluate(
            episodes=4, checkpoint="latest", overrides={"environment.num_agents": agents}
        )
        assert result.metrics["return"].shape == (4,)
        assert (result.metrics["return"] <= 8 * agents).all()

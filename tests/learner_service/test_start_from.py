"""Fine-tuning: a new run starts with the weights of another one's checkpoint."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from murmur.learner_service.checkpoint import files
from murmur.learner_service.checkpoint.contents import spec_text
from murmur.learner_service.checkpoint.folder import CheckpointFolder
from murmur.learner_service.device.precision import Precision
from murmur.learner_service.learning.base import Algorithm, build_algorithm
from murmur.learner_service.preprocess.normalize import NormalizeObservations
from murmur.learner_service.start_from import Origin, load_origin, start_from
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.config.section import validate
from murmur.shared.process.errors import CheckpointError, ConfigError
from murmur.shared.rpc import rollout_pb2 as pb
from murmur.shared.wire.dataset import OBSERVATION
from murmur.shared.wire.spec import ArraySpec, Continuous, EnvSpec
from murmur.shared.wire.timestep import Array
from tests.learner_service.running import experiment, running_learner
from tests.learner_service.toys import CPU, FIRST, LAST, MID, row, vector_spec
from tests.wire import Client

ALGORITHMS = ("coma", "mappo", "maddpg", "masac", "qmix")
MAPPO: dict[str, Any] = {
    **{"name": "mappo", "unroll_steps": 2, "batch_size": 8, "batch_number": 1, "data_passes": 1}
}


def build(config: ExperimentConfig, spec: EnvSpec, seed: int) -> Algorithm[Any]:
    precision = Precision("fp32", CPU)
    return build_algorithm(config.algorithm, spec, config.network, precision, CPU, seed)


def config_of(algorithm: dict[str, Any], **sections: dict[str, Any]) -> ExperimentConfig:
    base = experiment(**sections).model_dump(mode="json")
    return validate(ExperimentConfig, {**base, "algorithm": algorithm})


def origin(config: ExperimentConfig, spec: EnvSpec) -> tuple[Algorithm[Any], Origin]:
    """An algorithm, and a checkpoint of it."""
    old = build(config, spec, seed=1)
    state = {"spec": spec_text(spec), "algorithm": old.state_dict()}
    return old, Origin(Path("old.pt"), state, config)


def acts(algorithm: Algorithm[Any], spec: EnvSpec) -> dict[str, Tensor]:
    view = torch.randn(300, spec.num_agents, 4, generator=torch.Generator().manual_seed(0))
    return algorithm.snapshot().act({"view": view}, None)


def started(run_dir: Path) -> dict[str, Any]:
    kept: dict[str, Any] = json.loads((run_dir / "started_from.json").read_text())
    return kept


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_new_algorithm_acts_like_the_checkpoint(name: str, tmp_path: Path) -> None:
    config, spec = config_of({"name": name}), vector_spec()
    old, checkpoint = origin(config, spec)
    new = build(config, spec, seed=2)
    unlike = acts(new, spec)["action"].clone()
    start_from(checkpoint, config, spec, new, tmp_path)
    assert not torch.equal(unlike, acts(old, spec)["action"])
    for key, value in acts(old, spec).items():
        assert torch.equal(acts(new, spec)[key], value)
    assert started(tmp_path)["fresh"] == {}
    names = {key.partition(".")[0] for key in started(tmp_path)["taken"]}
    assert names <= {n for n, part in new.parts.items() if isinstance(part, torch.nn.Module)}
    assert "exploration" not in names  # COMA's: a schedule


def test_other_number_of_agents_takes_what_fits(tmp_path: Path) -> None:
    """The policy of 2 agents acts for 4; the critic's input grows with them, so it is fresh."""
    config = config_of(MAPPO, network={"agent_id": False})
    few, many = vector_spec(2), vector_spec(4)
    old, checkpoint = origin(config, few)
    new = build(config, many, seed=2)
    start_from(checkpoint, config, many, new, tmp_path)
    view = torch.randn(3, 4, 4)
    pairs = old.snapshot().act({"view": view.view(6, 2, 4)}, None)["logits"]
    assert torch.equal(new.snapshot().act({"view": view}, None)["logits"].view(6, 2, 3), pairs)
    kept = started(tmp_path)
    # Own numbers and those of all agents: 4 + 2 * 4 with two agents, 4 + 4 * 4 with four.
    (name, shapes) = next(iter(kept["fresh"].items()))
    assert len(kept["fresh"]) == 1
    assert name.startswith("critic.")
    assert shapes == {"here": [1, 20, 8], "there": [1, 12, 8]}
    assert f"{name} [1, 20, 8] ([1, 12, 8] there)" in kept["words"][-1]
    assert "num_agents: 4 here, 2 there" in kept["words"][1]


def test_statistics_are_taken_whole_or_not_at_all(tmp_path: Path) -> None:
    """A count of rows without their mean would hold the fresh mean at 0."""
    config = config_of(MAPPO, network={"normalize_observations": True})
    view, more = ArraySpec("view", "float32", (4,)), ArraySpec("more", "float32", (3,))
    before = replace(vector_spec(), observations=(view, more))
    after = replace(before, observations=(view, replace(more, shape=(5,))))
    old, checkpoint = origin(config, before)
    norm = old.parts["observation_norm"]
    assert isinstance(norm, NormalizeObservations)
    rows = {OBSERVATION + o.name: 5 + torch.randn(60, 2, *o.shape) for o in before.observations}
    norm.update(rows, torch.ones(60, 2))
    checkpoint.state["algorithm"].update(old.state_dict())
    new = build(config, after, seed=2)
    start_from(checkpoint, config, after, new, tmp_path)
    found, expected = new.parts["observation_norm"].state_dict(), norm.state_dict()
    of_view = [key for key in expected if ".view." in key]
    assert all(torch.equal(found[key], expected[key]) for key in of_view)
    assert found["moments.more.count"].item() == 0
    fresh = {key for key in started(tmp_path)["fresh"] if key.startswith("observation_norm.")}
    assert fresh == {f"observation_norm.{key}" for key in expected if ".more." in key}


@pytest.mark.parametrize(
    ("network", "fix"),
    [
        ({"hidden": [16]}, "set network.hidden=[8]"),
        ({"activation": "tanh"}, "set network.activation=relu"),
        ({"name": "cnn"}, "set network.name=mlp, or start without it"),
    ],
)
def test_another_network_is_refused(network: dict[str, Any], fix: str, tmp_path: Path) -> None:
    spec = vector_spec()
    _, checkpoint = origin(config_of(MAPPO), spec)
    other = config_of(MAPPO, network=network)
    with pytest.raises(ConfigError) as refused:
        start_from(checkpoint, other, spec, build(config_of(MAPPO), spec, 2), tmp_path)
    assert str(refused.value).endswith(fix)


def test_the_fix_names_the_network_that_auto_chose(tmp_path: Path) -> None:
    spec = vector_spec()
    _, checkpoint = origin(config_of(MAPPO), spec)
    base = experiment().model_dump(mode="json") | {"algorithm": MAPPO, "network": {"name": "auto"}}
    auto = validate(ExperimentConfig, base)
    with pytest.raises(ConfigError, match=r"set network\.name=mlp network\.hidden=\[8\]$"):
        start_from(checkpoint, auto, spec, build(auto, spec, 2), tmp_path)


def test_initialisation_may_differ(tmp_path: Path) -> None:
    spec = vector_spec()
    old, checkpoint = origin(config_of(MAPPO), spec)
    other = config_of(MAPPO, network={"initialization": "he"})
    new = build(other, spec, 2)
    start_from(checkpoint, other, spec, new, tmp_path)
    assert torch.equal(acts(new, spec)["logits"], acts(old, spec)["logits"])


def test_a_policy_of_which_nothing_fits_is_refused_and_unchanged(tmp_path: Path) -> None:
    _, checkpoint = origin(config_of({**MAPPO, "share_parameters": False}), vector_spec())
    config, spec = config_of(MAPPO), vector_spec()
    new = build(config, spec, 2)
    before = acts(new, spec)["logits"].clone()
    with pytest.raises(ConfigError, match=r"no tensor of the policy fits: actor\..*\[1, 6, 8\]"):
        start_from(checkpoint, config, spec, new, tmp_path)
    assert torch.equal(acts(new, spec)["logits"], before)


def test_wrong_origins_are_refused_with_the_fix(tmp_path: Path) -> None:
    def wanted(path: Path, algorithm: str = "mappo") -> ExperimentConfig:
        return config_of({"name": algorithm}, run={"start_from": str(path)})

    assert load_origin(config_of(MAPPO)) is None
    with pytest.raises(CheckpointError, match="there is no such file"):
        load_origin(wanted(tmp_path / "none.pt"))
    with pytest.raises(CheckpointError, match="the folder has no checkpoint"):
        load_origin(wanted(tmp_path))
    state = {"config": config_of(MAPPO).model_dump_json(), "algorithm": {}}
    CheckpointFolder(tmp_path, 1).save(state, 3)
    with pytest.raises(ConfigError, match=r"set algorithm\.name=mappo, or start without it"):
        load_origin(wanted(tmp_path, "masac"))
    found = load_origin(wanted(tmp_path))
    assert found is not None
    assert found.path.name == "update-000003.pt"
    CheckpointFolder(tmp_path, 1).save_best(state)
    assert load_origin(wanted(tmp_path)).path.name == "best.pt"  # type: ignore[union-attr]


def evaluated(port: int, spec: EnvSpec) -> list[Array]:
    """Greedy answers of a learner."""
    with Client(port, spec, 3) as client:
        client.hello(mode=pb.MODE_EVALUATE)
        rows = [row(spec, 3, kind, value) for kind, value in ((FIRST, 0.3), (MID, 2), (LAST, -1))]
        return [client.exchange(timestep).copy() for timestep in rows]


def test_a_run_starts_from_a_run_to_the_bit(tmp_path: Path) -> None:
    """Real learners over the wire: continuous actions, so that equal answers say something."""
    spec = replace(vector_spec(), action=Continuous(2))
    first, second = tmp_path / "first", tmp_path / "second"
    config = experiment(algorithm=MAPPO, run={"name": "old"})
    with running_learner(first, config) as learner, Client(learner.port, spec, 4) as client:
        client.hello()
        client.exchange(row(spec, 4, FIRST))
        while learner.metric("updates_total") < 3:
            client.exchange(row(spec, 4, MID, 1.0))
    with running_learner(first, config, serve_only=True) as learner:
        expected = evaluated(learner.port, spec)
    new = experiment(
        algorithm=MAPPO,
        run={"start_from": str(first), "seed": 9},
        evaluation={"every_updates": 1000},
    )
    with running_learner(second, new) as learner:
        with Client(learner.port, spec, 4) as client:
            client.hello()
            answers = evaluated(learner.port, spec)
        assert learner.metric("updates_total") == 0
    assert all(np.array_equal(a, b) for a, b in zip(answers, expected, strict=True))
    kept = started(second)
    assert kept["checkpoint"].startswith(str(first / "checkpoints" / "update-"))
    assert kept["run"] == "old"
    assert kept["updates"] >= 3
    state = files.load(second / "checkpoints" / "best.pt")["algorithm"]
    assert state["parts"]["actor_optimizer"]["state"] == {}  # Adam's moments are not taken
    assert state["counts"]["updates"] == 0


def test_resumed_runs_keep_their_own_weights(tmp_path: Path) -> None:
    """run.start_from counts only where a run begins: the origin may be gone later."""
    spec = vector_spec()
    config = experiment(algorithm=MAPPO, learner={"checkpoint_every_updates": 1})
    _, checkpoint = origin(config_of(MAPPO), spec)
    full = {**checkpoint.state, "config": checkpoint.config.model_dump_json()}
    files.write(full, tmp_path / "old.pt")
    run = {"run": {"start_from": str(tmp_path / "old.pt")}}
    wanted = validate(ExperimentConfig, config.model_dump(mode="json") | run)
    for resume in (False, True):
        path = tmp_path / "run"
        with (
            running_learner(path, wanted, resume=resume) as learner,
            Client(learner.port, spec, 4) as client,
        ):
            client.hello()
            client.exchange(row(spec, 4, FIRST))
            while learner.metric("checkpoints_total") < 1 + resume:
                client.exchange(row(spec, 4, MID, 1.0))
        (tmp_path / "old.pt").unlink(missing_ok=True)
    updates = CheckpointFolder(path, 1).load_latest()[1]["progress"]["updates"]
    assert updates >= 2

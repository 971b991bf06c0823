"""Exported policies do what the policy does, for any number of rows, without murmur."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
import yaml
from torch import Tensor, nn

from murmur.cli import main
from murmur.learner_service.checkpoint.contents import spec_text
from murmur.learner_service.checkpoint.folder import CheckpointFolder
from murmur.learner_service.device.precision import Precision
from murmur.learner_service.export.policy import (
    SUFFIX,
    Exported,
    GreedyPolicy,
    export_policy,
    load_policy,
    random_observations,
)
from murmur.learner_service.layers.inputs import InputShape
from murmur.learner_service.learning.base import Policy, build_algorithm
from murmur.shared.config import PluginConfig
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.process.errors import ConfigError, MurmurError
from murmur.shared.wire.derived_maps import Channel, DerivedMap
from murmur.shared.wire.spec import ACTION_MASK, AGENT_CELL, AGENT_MASK, STATE, ArraySpec, EnvSpec
from murmur.shared.wire.spec import Continuous as ContinuousAction
from murmur.shared.wire.spec import Discrete as DiscreteAction
from tests.learner_service.toys import CPU, vector_spec

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "run_exported.py"


def spec(action: DiscreteAction | ContinuousAction, *observations: ArraySpec) -> EnvSpec:
    return EnvSpec("toy", 3, observations, action, ("score",), 9, agents=("a", "b", "c"))


MLP = {"name": "mlp", "hidden": [8]}
CNN = {"name": "cnn", "channels": [4, 4], "kernels": [3, 3], "strides": [1, 2], "hidden": [8]}
DISCRETE = spec(
    DiscreteAction(5),
    ArraySpec("near", "float32", (4,)),
    ArraySpec(STATE, "float32", (6,), per_agent=False),
    ArraySpec("view", "uint8", (2, 3)),  # also the name of an operation
    ArraySpec("far", "float16", (2,)),
    ArraySpec(ACTION_MASK, "uint8", (5,)),
    ArraySpec(AGENT_MASK, "uint8", ()),
)
CONTINUOUS = spec(ContinuousAction(2, -0.1, 0.1), ArraySpec("near", "float32", (4,)))
MAPS = spec(
    DiscreteAction(6),
    ArraySpec("maps", "float32", (3, 7, 5)),
    ArraySpec("camera", "uint8", (2, 7, 5)),
    ArraySpec(STATE, "float32", (4, 7, 5), per_agent=False),
    ArraySpec(ACTION_MASK, "uint8", (6,)),
    ArraySpec(AGENT_CELL, "int32", (2,)),
)
DERIVED = replace(
    MAPS,
    derived=(
        DerivedMap(
            "seen",
            (
                Channel("copy", "maps", 2),
                Channel("entropy", "maps", 0, (1e-4, 0.499, 0.501)),
                Channel("constant", values=(0.2, 0.5, 0.9)),
            ),
        ),
    ),
)
CASES: dict[str, tuple[EnvSpec, dict[str, Any], dict[str, Any], list[str]]] = {
    "mappo, masks": (
        DISCRETE,
        {"name": "mappo"},
        MLP,
        ["near", "view", "far", ACTION_MASK],  # the state is the critic's
    ),
    "mappo, per agent": (
        DISCRETE,
        {"name": "mappo", "share_parameters": False},
        {**MLP, "agent_id": False},
        ["near", "view", "far", ACTION_MASK],
    ),
    "mappo, teams": (
        DISCRETE,
        {
            "name": "mappo",
            "teams": {
                "outer": {"agents": ["a", "c"], "network": {"normalize_observations": True}},
                "inner": {"agents": ["b"], "network": {"hidden": [4]}},
            },
        },
        MLP,
        ["near", "view", "far", ACTION_MASK],
    ),
    "mappo, continuous": (CONTINUOUS, {"name": "mappo"}, MLP, ["near"]),
    "mappo, continuous, per agent": (
        CONTINUOUS,
        {"name": "mappo", "share_parameters": False},
        MLP,
        ["near"],
    ),
    "coma, images": (MAPS, {"name": "coma"}, CNN, ["maps", "camera", ACTION_MASK]),
    "coma, centered": (
        MAPS,
        {"name": "coma"},
        {**CNN, "centered": [0, 4], "agent_id": True},
        ["maps", "camera", ACTION_MASK, AGENT_CELL],
    ),
    "coma, derived": (DERIVED, {"name": "coma"}, CNN, ["maps", "camera", ACTION_MASK]),
    "mappo, images per agent": (
        MAPS,
        {"name": "mappo", "share_parameters": False},
        CNN,
        ["maps", "camera", ACTION_MASK],
    ),
}


def checkpoint(spec: EnvSpec, algorithm: dict[str, Any], network: dict[str, Any]) -> dict[str, Any]:
    """What a run of this saves; the policy's weights are those it begins with, enlarged."""
    config = ExperimentConfig(
        environment=PluginConfig(name="toy"),
        algorithm=PluginConfig(**algorithm),
        network=PluginConfig(**network),
    )
    learner = build_algorithm(
        config.algorithm, spec, config.network, Precision("fp32", CPU), CPU, 3
    )
    policy = learner.snapshot()
    for part in vars(learner).values():
        if isinstance(part, nn.Module):
            for parameter in part.parameters():
                parameter.data *= 3
    learner.refresh(policy)
    return {
        "spec": spec_text(spec),
        "config": config.model_dump_json(),
        "algorithm": learner.state_dict(),
        "progress": {"updates": 7},
    }


def run_file(done: Exported, given: dict[str, Tensor]) -> dict[str, np.ndarray[Any, Any]]:
    """Run an exported file without murmur."""
    about = json.loads(json.dumps(done.about))
    arrays = {x["name"]: given[x["name"]] for x in about["inputs"]}
    if done.path.suffix == ".onnx":
        session = onnxruntime.InferenceSession(str(done.path))
        assert json.loads(session.get_modelmeta().custom_metadata_map["murmur"]) == about
        assert [x.name for x in session.get_inputs()] == list(arrays)
        names = [x.name for x in session.get_outputs()]
        out = session.run(names, {k: v.numpy() for k, v in arrays.items()})
        return dict(zip(names, out, strict=True))
    files = {"murmur.json": ""}
    module = torch.export.load(done.path, extra_files=files).module()
    assert json.loads(files["murmur.json"]) == about
    return {name: value.numpy() for name, value in module(arrays).items()}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("case", "kind"),
    [
        ("mappo, masks", "onnx"),
        pytest.param("mappo, masks", "torch-export", marks=pytest.mark.long),
        pytest.param("mappo, continuous", "onnx", marks=pytest.mark.long),
        pytest.param("mappo, continuous", "torch-export", marks=pytest.mark.long),
    ],
)
def test_a_file_marks_actions_of_impossible_inputs(case: str, kind: Any, tmp_path: Path) -> None:
    spec, algorithm, network, inputs = CASES[case]
    state = checkpoint(spec, algorithm, network)
    path = tmp_path / ("policy.onnx" if kind == "onnx" else "policy.pt2")
    done = export_policy(state, kind, path, "best.pt")
    assert [given["name"] for given in done.about["inputs"]] == inputs  # not the state
    given = random_observations(spec, 6, seed=0)
    good = run_file(done, given)["action"]
    for row, value in ((1, float("nan")), (2, float("inf")), (4, float("-inf"))):
        given["near"][row, 2, 3] = value
    if ACTION_MASK in inputs:
        given[ACTION_MASK][5, 1] = 0
        given["far"][0, 0, 0] = float("nan")
    bad = [0, 1, 2, 4, 5] if ACTION_MASK in inputs else [1, 2, 4]
    action = run_file(done, given)["action"]
    marked = np.isnan(action) if action.dtype.kind == "f" else action == -1
    assert marked.reshape(6, -1).all(1).nonzero()[0].tolist() == bad
    left = [row for row in range(6) if row not in bad]
    np.testing.assert_allclose(action[left], good[left], rtol=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the tools, about themselves
@pytest.mark.parametrize(
    ("case", "kind"),
    [
        *((case, "onnx") for case in CASES),
        *(
            (case, "torch-export")
            for case in ("mappo, masks", "mappo, continuous", "coma, centered")
        ),
    ],
)
def test_a_file_does_what_the_policy_does(case: str, kind: Any, tmp_path: Path) -> None:
    spec, algorithm, network, inputs = CASES[case]
    state = checkpoint(spec, algorithm, network)
    path = tmp_path / ("policy.onnx" if kind == "onnx" else "policy.pt2")
    done = export_policy(state, kind, path, "best.pt")
    assert done.difference < 1e-5
    policy, _, _ = load_policy(state)
    for rows in (1, 2, 33):
        given = random_observations(spec, rows, seed=rows)
        wanted = {k: v.numpy() for k, v in policy.act(given, None).items()}
        got = run_file(done, given)
        scores = "logits" if isinstance(spec.action, DiscreteAction) else "mean"
        assert list(got) == ["action", scores] == done.about["outputs"]
        assert got["action"].dtype == wanted["action"].dtype
        if scores == "logits":
            np.testing.assert_array_equal(got["action"], wanted["action"])
            if ACTION_MASK in given:
                chosen = np.take_along_axis(
                    given[ACTION_MASK].numpy(), got["action"][..., None].astype(int), -1
                )
                assert chosen.all()
            assert rows == 1 or len(np.unique(got["action"])) > 1
        else:
            np.testing.assert_allclose(got["action"], wanted["action"], rtol=1e-5, atol=1e-6)
            assert rows == 1 or (np.abs(got["mean"]) > 0.1).any()  # so that clipping matters
            assert np.abs(got["action"]).max() <= np.float32(0.1)
        np.testing.assert_allclose(got[scores], wanted[scores], rtol=1e-4, atol=1e-5)
    about = done.about
    assert [x["name"] for x in about["inputs"]] == inputs
    assert about["checkpoint"] == "best.pt"
    assert about["updates"] == 7
    assert about["spec"]["num_agents"] == 3
    assert tuple(about["spec"]["agents"]) == spec.agents
    assert [o["name"] for o in about["spec"]["observations"]] == [o.name for o in spec.observations]
    assert about["inputs"][0]["shape"] == [3, *spec.observations[0].shape]


class Remembers(Policy):
    """Counts the rows of an episode; acts on it."""

    memory_size = 1

    def __init__(self) -> None:
        self.step = nn.Linear(1, 1)
        nn.init.ones_(self.step.weight)
        nn.init.ones_(self.step.bias)

    @torch.inference_mode()
    def act(
        self, observation: Any, generator: torch.Generator | None, memory: Tensor | None = None
    ) -> dict[str, Tensor]:
        assert memory is not None
        memory = self.step(memory)
        return {"action": (memory + observation["view"][..., :1]).int()[..., 0], "memory": memory}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_memory_goes_in_and_comes_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = vector_spec()
    state = checkpoint(spec, {"name": "mappo"}, MLP)
    _, _, config = load_policy(state)
    loaded = Remembers(), spec, config
    monkeypatch.setattr("murmur.learner_service.export.policy.load_policy", lambda *_: loaded)
    done = export_policy(state, "onnx", tmp_path / "policy.onnx", "x")
    assert [x["name"] for x in done.about["inputs"]] == ["view", "memory"]
    result = subprocess.run(
        [sys.executable, str(EXAMPLE), str(done.path)], capture_output=True, text=True, check=True
    )
    actions = [line.partition("actions ")[2] for line in result.stdout.splitlines()]
    assert actions == [str([[k, k]] * 4) for k in (2, 3, 4)]  # 1 observed and 1, 2, 3 remembered


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_example_runs_without_murmur(tmp_path: Path) -> None:
    spec, algorithm, network, _ = CASES["mappo, masks"]
    state = checkpoint(spec, algorithm, network)
    done = export_policy(state, "onnx", tmp_path / "policy.onnx", "x")
    blocked = ("murmur", "shared", "learner_service", "env_service", "torch", "onnx")
    code = (
        "import runpy, sys; "
        f"sys.modules.update(dict.fromkeys({blocked!r})); "
        f"sys.argv = ['run_exported.py', {str(done.path)!r}]; "
        f"runpy.run_path({str(EXAMPLE)!r}, run_name='__main__')"
    )
    result = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    ones = {
        o.name: torch.ones((4, 3, *o.shape)).to(getattr(torch, o.dtype)) for o in spec.observations
    }
    action = load_policy(state)[0].act(ones, None)["action"].tolist()
    assert result.stdout == "".join(f"step {k}: actions {action}\n" for k in range(3))
    assert len(EXAMPLE.read_text().splitlines()) <= 23


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    state = checkpoint(CONTINUOUS, {"name": "mappo"}, MLP)
    with pytest.raises(ConfigError, match="cannot write"):
        export_policy(state, "torch-export", tmp_path / "no folder" / "policy.pt2", "x")


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"network": {"hidden": [9]}}, r"checkpoint x does not fit .* 'mappo': .*size mismatch"),
        ({"algorithm": {"gone": 1}}, "unknown key 'algorithm.gone'"),
        ({"learner": {"gone": 1}}, "unknown key 'x.learner.gone'"),
    ],
)
def test_checkpoint_of_another_release_is_an_error(
    section: dict[str, dict[str, Any]], words: str, tmp_path: Path
) -> None:
    state = checkpoint(CONTINUOUS, {"name": "mappo"}, MLP)
    config = json.loads(state["config"])
    for name, options in section.items():
        config[name] |= options
    with pytest.raises(MurmurError, match=words):
        export_policy({**state, "config": json.dumps(config)}, "onnx", tmp_path / "x.onnx", "x")


def run_folder(tmp_path: Path) -> Path:
    """A run's folder with one checkpoint."""
    state = checkpoint(CONTINUOUS, {"name": "mappo"}, MLP)
    CheckpointFolder(tmp_path / "run", 1).save_best(state)
    (tmp_path / "run" / "config.yaml").write_text("environment: {name: spread}\n")
    return tmp_path / "run"


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_folder(tmp_path)
    arguments = ["murmur", "export", str(run), "--format", "torch-export"]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    out = capsys.readouterr().out
    assert "takes near: float32 [rows, 3, 4]" in out
    assert "gives action, mean" in out
    assert (run / "policy.pt2").is_file()
    head, _, card = (run / "policy.md").read_text().removeprefix("---\n").partition("---\n")
    assert yaml.safe_load(head)["library_name"] == "murmur"
    assert "for 3 agents, trained by murmur-marl" in card
    assert "| input | `near` | ['rows', 3, 4] | float32 |" in card
    monkeypatch.setattr(sys, "argv", [*arguments, "--output", "policy.onnx"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert "--output policy.onnx: a torch-export file ends in .pt2" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", [*arguments, "--checkpoint", "latest"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert "no checkpoint in" in capsys.readouterr().err


def test_weights_alone_are_those_of_the_policy(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    state = checkpoint(CONTINUOUS, {"name": "mappo"}, MLP)
    done = export_policy(state, "safetensors", tmp_path / "policy.safetensors", "best.pt")
    with safetensors.safe_open(done.path, "pt") as file:
        assert json.loads(file.metadata()["murmur"]) == json.loads(json.dumps(done.about))
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    wanted = GreedyPolicy(load_policy(state)[0], ()).state_dict()
    assert weights.keys() == wanted.keys()
    assert weights
    for name, tensor in wanted.items():
        assert weights[name].equal(tensor)


def test_the_page_runs_an_exported_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = checkpoint(CONTINUOUS, {"name": "mappo"}, MLP)
    export_policy(state, "torch-export", tmp_path / "policy.pt2", "x")
    page = (ROOT / "docs" / "export.md").read_text()
    (block,) = [part.split("```")[0] for part in page.split("```python\n")[1:]]
    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = {}
    exec(block, found)  # noqa: S102
    wanted = load_policy(state)[0].act({"near": torch.ones(4, 3, 4)}, None)["action"]
    torch.testing.assert_close(found["action"], wanted)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("spec", "name"), [(DISCRETE, "qmix"), (CONTINUOUS, "maddpg")])
def test_policies_of_values_leave_as_actions(spec: EnvSpec, name: str, tmp_path: Path) -> None:
    state = checkpoint(spec, {"name": name}, MLP)
    done = export_policy(state, "onnx", tmp_path / "policy.onnx", "x")
    given = random_observations(spec, 9, seed=4)
    wanted = load_policy(state)[0].act(given, None)["action"].numpy()
    np.testing.assert_allclose(run_file(done, given)["action"], wanted, atol=1e-6)
    assert done.about["outputs"] == ["action"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("kind", "share", "name", "cell"),
    [
        ("onnx", False, "masac", "lstm"),
        ("torch-export", True, "mappo", "gru"),
        pytest.param("onnx", True, "mappo", "gru", marks=pytest.mark.long),
        pytest.param("torch-export", False, "mappo", "gru", marks=pytest.mark.long),
        pytest.param("onnx", True, "maddpg", "gru", marks=pytest.mark.long),
        pytest.param("torch-export", True, "mappo", "lstm", marks=pytest.mark.long),
    ],
)
def test_a_recurrent_policy_remembers_through_its_file(
    kind: Any, share: bool, name: str, cell: str, tmp_path: Path
) -> None:
    algorithm = {"name": name, "share_parameters": share}
    state = checkpoint(DISCRETE, algorithm, {**MLP, "recurrent": 5, "recurrent_cell": cell})
    done = export_policy(state, kind, tmp_path / f"policy{SUFFIX[kind]}", "x")
    policy = load_policy(state)[0]
    for rows in (1, 9):
        memory = torch.zeros(rows, 3, policy.memory_size)
        got = {"next_memory": memory.numpy()}
        for step in range(3):
            given = random_observations(DISCRETE, rows, seed=step)
            acted = policy.act(given, None, memory)
            got = run_file(done, {**given, "memory": torch.from_numpy(got["next_memory"])})
            memory = acted["memory"]
            np.testing.assert_array_equal(got["action"], acted["action"].numpy())
            np.testing.assert_allclose(got["next_memory"], memory.numpy(), rtol=1e-4, atol=1e-5)
            assert memory.abs().max() > 0


@pytest.mark.long
def test_previous_frames_are_the_memory_of_an_exported_policy(tmp_path: Path) -> None:
    seen = EnvSpec("p", 2, (ArraySpec("image", "uint8", (1, 8, 8)),), DiscreteAction(3))
    state = checkpoint(seen, {"name": "mappo"}, {**CNN, "frame_stack": 3})
    done = export_policy(state, "onnx", tmp_path / "stacked.onnx", "stacked.pt")
    assert [x["name"] for x in done.about["inputs"]] == ["image", "memory"]
    assert done.about["inputs"][0]["shape"] == [2, 1, 8, 8]  # a single image
    assert done.about["inputs"][1]["shape"] == [2, 1 + 2 * 8 * 8]  # a flag, and two of them
    assert done.about["outputs"] == ["action", "logits", "next_memory"]
    assert done.difference < 1e-4


class Fused(torch.nn.Module):
    """Uses an operation in a form that ONNX's tools do not know."""

    def __init__(self, shape: InputShape, num_outputs: int, slices: tuple[int, ...]) -> None:
        super().__init__()
        self.read = torch.nn.Linear(shape.vector, num_outputs)

    def forward(self, image: Tensor | None, vector: Tensor) -> Tensor:
        x = self.read(vector)
        return torch.nn.functional.scaled_dot_product_attention(x, x, x)


def test_what_onnx_cannot_hold_is_said_in_a_line(tmp_path: Path) -> None:
    state = checkpoint(DISCRETE, {"name": "mappo"}, {"name": f"{__name__}:Fused"})
    with pytest.raises(ConfigError, match=r"^ONNX cannot hold .*; change the network, or use --f"):
        export_policy(state, "onnx", tmp_path / "policy.onnx", "best.pt")
    assert export_policy(state, "torch-export", tmp_path / "policy.pt2", "").difference < 1e-5

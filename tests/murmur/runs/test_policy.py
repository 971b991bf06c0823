"""`murmur.load`: a policy in this process acts like the learner that serves it."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import murmur
from murmur.learner_service.checkpoint.contents import spec_text
from murmur.learner_service.checkpoint.folder import CheckpointFolder
from murmur.learner_service.device.precision import Precision
from murmur.learner_service.learning.base import build_algorithm
from murmur.learner_service.telemetry.progress import Progress
from murmur.runs.evaluation import run_title
from murmur.runs.run_folder import RunFolder
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.config.files import load, save
from murmur.shared.process.errors import CheckpointError, ConfigError
from murmur.shared.rpc import rollout_pb2 as pb
from murmur.shared.wire.spec import EnvSpec
from tests.learner_service.running import running_learner
from tests.learner_service.toys import CPU
from tests.wire import Client

N, STEPS = 5, 12
COMMON = {
    "learner": {"device": "cpu", "num_threads": 1, "port": 0, "metrics_port": 0},
    "run": {"seed": 7},
}
FEED_FORWARD = {
    "environment": {"name": "spread", "episode_steps": 5},
    "algorithm": {"name": "mappo"},
    "network": {"name": "mlp", "hidden": [16]},
}
RECURRENT = {
    "environment": {"name": "memory", "num_agents": 2, "delay": 3},
    "algorithm": {"name": "coma"},
    "network": {"name": "mlp", "hidden": [16], "recurrent": 8},
}

LSTM = {
    "environment": {**FEED_FORWARD["environment"], "continuous": True},
    "algorithm": {"name": "sac"},
    "network": {**RECURRENT["network"], "recurrent_cell": "lstm"},
}
AVERAGED = {**FEED_FORWARD, "algorithm": {"name": "qmix", "averaged_policy": True}}


def begin(folder: Path, sections: dict[str, Any], **changes: Any) -> ExperimentConfig:
    """A run with one checkpoint, of networks whose actions differ from row to row."""
    config = load({**COMMON, **sections}, changes, {})
    save_untrained(folder, config, murmur.make_env(config).spec)
    return config


def save_untrained(folder: Path, config: ExperimentConfig, spec: EnvSpec) -> None:
    """Write a run with one checkpoint."""
    algorithm = build_algorithm(
        config.algorithm, spec, config.network, Precision("fp32", CPU), CPU, 3
    )
    generator = torch.Generator().manual_seed(2)
    for part in algorithm.parts.values():
        if isinstance(part, torch.nn.Module):
            for parameter in part.parameters():
                parameter.data.normal_(generator=generator)
    save(config, folder / "config.yaml")
    state = {
        "spec": spec_text(spec),
        "config": config.model_dump_json(),
        "algorithm": algorithm.state_dict(),
        "generator": None,
        "progress": {**Progress().state_dict(), "updates": 7},
        "slots": [],
    }
    CheckpointFolder(folder, 1).save(state, 7)


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize(
    "sections",
    [FEED_FORWARD, RECURRENT, LSTM, AVERAGED],
    ids=["mlp", "recurrent", "lstm", "averaged"],
)
def test_policy_answers_as_a_serving_learner_to_the_bit(
    sections: dict[str, Any], sample: bool, tmp_path: Path
) -> None:
    config = begin(tmp_path, sections, **{"evaluation.sample": sample})
    policy = murmur.load(tmp_path)
    assert policy.recurrent == ("recurrent" in sections["network"])
    game = murmur.make_env(config, N)
    seeds = np.arange(N, dtype=np.uint64)
    taken = []
    with (
        running_learner(tmp_path, config, serve_only=True) as learner,
        Client(learner.port, game.spec, N) as client,
    ):
        client.hello(mode=pb.MODE_EVALUATE)
        timestep = game.reset(seeds)
        for _ in range(STEPS):  # several episodes
            served, own = client.exchange(timestep), policy.act(timestep, sample=sample)
            np.testing.assert_array_equal(own, served)
            assert own.dtype == served.dtype
            taken.append(own)
            seeds += np.uint64(N)
            timestep = game.step(own, timestep.step_type == murmur.StepType.LAST, seeds)
    assert len({action.tobytes() for action in taken}) > 2


def test_a_run_copied_from_another_machine_is_evaluated(tmp_path: Path) -> None:
    elsewhere = {
        "learner.host": "233.252.0.1",
        "learner.metrics_host": "127.0.0.1,233.252.0.0/24",  # as docker-compose.yml sets it
        "env_server.metrics_host": "233.252.0.0/24",
        "security.folder": "/credentials",
    }
    begin(tmp_path, FEED_FORWARD, **elsewhere)
    result = murmur.Run(tmp_path).evaluate(episodes=2)
    assert len(result.metrics["return"]) == 2


def test_an_evaluation_says_that_actions_are_sampled(tmp_path: Path) -> None:
    begin(tmp_path, FEED_FORWARD)
    run = RunFolder.open(tmp_path)
    file = run.checkpoint("latest")
    assert run_title(run, file) == f"{tmp_path.name}, {file.name}"
    assert run_title(run, file, ["evaluation.sample=true"]).endswith(", actions sampled")


def test_one_environment_is_as_one_of_many(tmp_path: Path) -> None:
    config = begin(tmp_path, RECURRENT)
    many, one = murmur.load(tmp_path), murmur.load(tmp_path / "checkpoints" / "update-000007.pt")
    game = murmur.make_env(config, N)
    seeds = np.arange(N, dtype=np.uint64)
    timestep = game.reset(seeds)
    begun, taken = 0, set()
    for step in range(STEPS):
        if timestep.step_type[2] == murmur.StepType.FIRST:
            one.reset()
            begun += 1
        view = {name: a[2].copy() for name, a in timestep.observation.items()}
        (array,) = view.values()
        single = one.act(array if step % 2 else view)
        action = many.act(timestep)
        np.testing.assert_array_equal(single, action[2])
        taken.add(single.tobytes())
        timestep = game.step(action, timestep.step_type == murmur.StepType.LAST, seeds)
    assert begun > 1
    assert len(taken) > 2


def test_reset_resets_only_the_environments_named(tmp_path: Path) -> None:
    begin(tmp_path, RECURRENT)
    policy, fresh = murmur.load(tmp_path), murmur.load(tmp_path)
    view = np.random.default_rng(0).normal(size=(3, 2, 4)).astype(np.float32)
    kept = murmur.load(tmp_path)
    for loaded in (policy, kept):
        loaded.act(view)
    policy.reset([False, True, False])
    for loaded in (policy, kept, fresh):
        loaded.act(-view)
    assert policy._memory is not None
    assert kept._memory is not None
    assert fresh._memory is not None
    for row, other in enumerate((kept, fresh, kept)):
        torch.testing.assert_close(policy._memory[row], other._memory[row])
        assert not torch.equal(kept._memory[row], fresh._memory[row])


def test_seed_repeats_sampled_actions(tmp_path: Path) -> None:
    begin(tmp_path, FEED_FORWARD)
    policy = murmur.load(tmp_path)
    view = np.zeros((50, 3, policy.spec.observations[0].shape[0]), np.float32)
    draws = []
    for seed in (1, 1, 2):
        policy.seed(seed)
        draws.append(policy.act(view, sample=True))
    np.testing.assert_array_equal(draws[0], draws[1])
    assert (draws[0] != draws[2]).any()


def test_wrong_observations_are_named(tmp_path: Path) -> None:
    begin(tmp_path, RECURRENT)
    policy = murmur.load(tmp_path)
    (name,) = (o.name for o in policy.spec.observations)
    view = np.zeros((3, 2, 4), np.float32)
    for wrong, words in (
        ({}, f"observation without {name}"),
        ({name: view, "other": view}, f"no observation 'other'; known: {name}"),
        ({name + "s": view}, f"no observation '{name}s'; did you mean '{name}'"),
        (view[..., :3], r"has shape \(3, 2, 3\); the policy takes \(2, 4\) of one environment"),
        (
            view.astype(complex),
            "has dtype complex128; its values do not fit in the policy's float32",
        ),
    ):
        with pytest.raises(murmur.MurmurError, match=words):
            policy.act(wrong)
    policy.act(view)
    with pytest.raises(murmur.MurmurError, match="is of 3 environments, the observation of 2"):
        policy.act(view[:2])
    policy.reset()
    assert policy.act(view[:2]).shape == (2, 2)


MASKED = {
    "environment": {"name": "terrain", "num_agents": 2},
    "algorithm": {"name": "mappo"},
    "network": {"name": "auto"},
}


def test_impossible_numbers_are_named(tmp_path: Path) -> None:
    """By observation, environment, agent, index and value; none of them gives an action."""
    begin(tmp_path, RECURRENT)
    policy = murmur.load(tmp_path)
    good = np.zeros((3, 2, 4))
    for value, dtype, words in (
        (
            np.nan,
            "float32",
            "environment 1 has nan in observation 'observation' of agent 0 at index [2]",
        ),
        (-np.inf, "float64", "environment 1 has -inf in observation 'observation' of agent 0"),
        (
            1e300,
            "float64",
            "environment 1 has 1e+300 in observation 'observation' of agent 0 at index [2], which ",
        ),
        (
            np.nan,
            "float16",
            "environment 1 has nan in observation 'observation' of agent 0 at index [2]",
        ),
    ):
        view = good.astype(dtype)
        view[1, 0, 2] = value
        with pytest.raises(ConfigError, match=re.escape(words)):
            policy.act(view)
    assert policy._memory is None
    with pytest.raises(ConfigError, match=r"^the observation has nan in observation 'observation'"):
        policy.act(np.full((2, 4), np.nan))
    with pytest.raises(ConfigError, match="N is 0"):
        policy.act(good[:0])
    policy.act(good)
    for which in ([3], [True, False], [-4], [0.5]):
        with pytest.raises(ConfigError, match="recurrent state is of 3 environments"):
            policy.reset(which)
    policy.reset([])
    policy.reset([-1])


def test_impossible_masks_are_named(tmp_path: Path) -> None:
    config = begin(tmp_path, MASKED)
    policy = murmur.load(tmp_path)
    good = {
        k: x[0] for k, x in murmur.make_env(config).reset(np.zeros(1, "u8")).observation.items()
    }
    mask = good["action_mask"]
    policy.act(good)
    for wrong, words in (
        (mask * 0, "has an action_mask that allows no action to agent 'uav_0'"),
        (mask * 255, "255 in action_mask of agent 'uav_0', where 0 or 1 must be"),
        (mask[:, :-1], "observation 'action_mask' has shape"),
        (np.where(mask, 0.0, -np.inf), "has dtype float64; its values do not fit in the policy's"),
        (mask.astype(str), "has dtype <U"),
    ):
        with pytest.raises(ConfigError, match=words):
            policy.act({**good, "action_mask": wrong})
    cell = good["agent_cell"].copy()
    cell[1] = 10_000
    with pytest.raises(ConfigError, match="as agent_cell of agent 'uav_1', outside the maps"):
        policy.act({**good, "agent_cell": cell})
    policy.act({**good, "action_mask": mask.astype(bool)})


def test_what_cannot_be_loaded_is_said(tmp_path: Path) -> None:
    with pytest.raises(murmur.MurmurError, match="holds no run"):
        murmur.load(tmp_path)
    begin(tmp_path, FEED_FORWARD)
    with pytest.raises(murmur.MurmurError, match="no checkpoint 'newest'; give best, latest"):
        murmur.load(tmp_path, "newest")
    with pytest.raises(murmur.MurmurError, match="device 'tpu' cannot be used"):
        murmur.load(tmp_path, device="tpu")
    (tmp_path / "x.pt").write_bytes(b"nothing")
    with pytest.raises(murmur.MurmurError, match=r"x\.pt"):
        murmur.load(tmp_path / "x.pt")


def test_a_foreign_checkpoint_runs_no_factory(tmp_path: Path) -> None:
    begin(tmp_path, FEED_FORWARD)
    (file,) = (tmp_path / "checkpoints").glob("*.pt")
    state = torch.load(file, weights_only=True)
    touched = tmp_path / "touched"
    environment = {
        "name": "gymnasium",
        "factory": "subprocess:check_output",
        "arguments": {"args": ["touch", str(touched)]},
    }
    state["config"] = json.dumps({**json.loads(state["config"]), "environment": environment})
    foreign = tmp_path / "foreign.pt"
    torch.save(state, foreign)
    config = murmur.load(foreign).config
    for use in (murmur.make_env, murmur.train, murmur.config):
        with pytest.raises(murmur.MurmurError, match="'subprocess:check_output', which no config"):
            use(config)
    assert not touched.exists()
    sections = {"environment": environment, "algorithm": {"name": "coma"}}
    with pytest.raises(murmur.MurmurError):  # a configuration of one's own: it runs, and is none
        murmur.make_env(sections)
    assert touched.exists()


def test_weights_of_nan_are_refused(tmp_path: Path) -> None:
    """They would act as if they had learned something: action 0."""
    begin(tmp_path, FEED_FORWARD)
    folder = CheckpointFolder(tmp_path, 1)
    state = folder.load(folder.find("latest"))
    next(iter(state["algorithm"]["parts"]["actor"].values())).flatten()[0] = np.nan
    state.pop("format")
    folder.save(state, 8)
    with pytest.raises(CheckpointError, match=r"update-000008\.pt: actor\.\S+ holds nan, so that"):
        murmur.load(tmp_path)

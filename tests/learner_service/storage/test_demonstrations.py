"""A dataset's episodes as rollouts: what is drawn, what is not told, and what is learned."""

import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from murmur.learner_service.device.precision import Precision
from murmur.learner_service.learning.base import Algorithm, build_algorithm
from murmur.learner_service.storage.demonstrations import NEVER_TAKEN, Demonstrations
from murmur.learner_service.storage.frames import find_frames
from murmur.learner_service.storage.rollout import RolloutStorage
from murmur.shared.config import PluginConfig
from murmur.shared.config.experiment import ImitationConfig
from murmur.shared.process.errors import ConfigError
from murmur.shared.wire.dataset import DatasetWriter
from murmur.shared.wire.spec import (
    ACTION_MASK,
    ActionSpec,
    ArraySpec,
    Composite,
    Continuous,
    Discrete,
    EnvSpec,
)
from murmur.shared.wire.timestep import Array
from tests.learner_service.toys import CPU, FIRST, LAST, MID

EXPERT = "observation/expert_action"
STEPS, EPISODES, CUES = 5, 40, 4
KINDS: dict[str, tuple[str, ActionSpec]] = {
    "discrete": ("mappo", Discrete(CUES)),
    "coma": ("coma", Discrete(CUES)),
    "continuous": ("ppo", Continuous(2, -2.0, 2.0)),
    "choices": ("ippo", Composite((CUES, 2))),
    "hybrid": ("mappo", Composite((CUES,), (-2.0,), (2.0,))),
    "one by one": ("happo", Discrete(CUES)),
}


def expert_action(cue: Array, spec: EnvSpec) -> Array:
    """Return what the expert does on cues [...]: the cue, or numbers that follow from it."""
    if isinstance(spec.action, Discrete):
        return cue.astype(np.int32)
    number = cue.astype(np.float32) / 2 - 1
    if isinstance(spec.action, Continuous):
        return np.stack([number, -number], -1)
    if spec.action.size:
        return np.stack([cue.astype(np.float32), number], -1)
    return np.stack([cue, cue % 2], -1).astype(np.int32)


def spec_of(action: ActionSpec, *more: ArraySpec) -> EnvSpec:
    return EnvSpec("cues", 2, (ArraySpec("view", "float32", (CUES,)), *more), action)


def dataset(folder: Path, spec: EnvSpec) -> str:
    """Write episodes of random cues, each answered by the expert."""
    random = np.random.default_rng(0)
    with DatasetWriter(folder, {}, {}) as writer:
        writer.begin(spec)
        for seed in range(EPISODES):
            cue = random.integers(CUES, size=(STEPS + 1, 2))
            kinds = np.array([FIRST, *[MID] * (STEPS - 1), LAST], np.uint8)
            action = expert_action(cue, spec)
            action[-1] = 0
            arrays: dict[str, Any] = {
                "step_type": kinds,
                "reward": np.where(kinds == FIRST, 0, 1)[:, None].repeat(2, 1).astype(np.float32),
                "discount": (kinds != LAST).astype(np.float32),
                "action": action,
                "observation/view": np.eye(CUES, dtype=np.float32)[cue],
            }
            if spec.observation(ACTION_MASK):
                mask = np.ones((STEPS + 1, 2, CUES), np.uint8)
                mask[1, 0, cue[1, 0]] = 0  # the expert's action of step 1 is illegal
                arrays["observation/action_mask"] = mask
            if spec.observation("image"):
                number = 6 * seed + np.arange(STEPS + 1)
                arrays["observation/image"] = (
                    number[:, None, None, None, None].repeat(2, 1).astype(np.uint8)
                )
            writer.add(arrays, seed)
    return str(folder)


def demonstrations(folder: str, spec: EnvSpec, **how: Any) -> Demonstrations:
    settings: dict[str, Any] = {"updates": 3, "extras": {}, "frames": None, "seed": 0} | how
    return Demonstrations(folder, spec=spec, device=CPU, **settings)


def test_batches_are_stretches_drawn_by_the_version(tmp_path: Path) -> None:
    spec = spec_of(Discrete(CUES))
    folder = dataset(tmp_path / "data", spec)
    first, again = (
        demonstrations(folder, spec, extras={"log_prob": ()}).sample(7, 8, 16) for _ in range(2)
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(
        first["action"], demonstrations(folder, spec, seed=1).sample(7, 8, 16)["action"]
    )
    kinds = first["step_type"]
    assert kinds.shape == (9, 16)
    assert ((kinds[:-1] == LAST) == (kinds[1:] == FIRST)).all()
    assert torch.equal(first["action"], first[EXPERT])
    seen = first["observation/view"].argmax(-1)[kinds != LAST]
    assert torch.equal(seen, first["action"][kinds != LAST].long())
    assert (first["log_prob"] == NEVER_TAKEN).all()
    assert first["log_prob"].shape == (9, 16, 2)


def test_actions_that_the_mask_forbids_are_not_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    spec = spec_of(Discrete(CUES), ArraySpec(ACTION_MASK, "uint8", (CUES,)))
    folder = dataset(tmp_path / "data", spec)
    batch = demonstrations(folder, spec).sample(0, 30, 8)
    legal = batch["observation/action_mask"].gather(-1, batch["action"].long().unsqueeze(-1))
    assert torch.equal(batch[EXPERT] == -1, legal.squeeze(-1) == 0)
    assert f"imitation.dataset: {EPISODES} actions are illegal and not cloned" in caplog.text
    assert f"cloning {EPISODES * STEPS} transitions of {EPISODES} episodes" in caplog.text


def test_stacks_of_frames_begin_with_what_came_before(tmp_path: Path) -> None:
    spec = spec_of(Discrete(CUES), ArraySpec("image", "uint8", (1, 1, 1)))
    frames = find_frames(3, spec)
    assert frames is not None
    folder = dataset(tmp_path / "data", spec)
    batch = demonstrations(folder, spec, frames=frames).sample(0, 4, 64)
    before = frames.of_memory(batch["memory"][0])["image"].flatten(1)[:, ::2]  # of agent 0
    now = batch["observation/image"][0, :, 0].flatten()
    for row, previous in zip(now.tolist(), before.tolist(), strict=True):
        first = row - row % 6
        assert previous == [max(row - 2, first), max(row - 1, first)]


def test_networks_of_stacked_frames_are_cloned(tmp_path: Path) -> None:
    spec = spec_of(Discrete(CUES), ArraySpec("image", "uint8", (1, 1, 1)))
    folder = dataset(tmp_path / "data", spec)
    network = {"name": "cnn", "channels": (3,), "kernels": (1,), "strides": (1,), "hidden": (8,)}
    algorithm = cloner("mappo", spec, folder, {**network, "frame_stack": 3})
    storage = algorithm.make_storage(spec, 1)
    assert isinstance(storage, RolloutStorage)
    storage.demonstrations = demonstrations(
        folder, spec, extras=algorithm.extras, frames=algorithm.frames
    )
    batch = storage.sample(0, 0.0)
    assert batch is not None
    scalars = algorithm.update(algorithm.transforms.batch(batch, 0))
    assert float(scalars["imitation_share"]) == pytest.approx(1)
    assert all(math.isfinite(x) for x in scalars.values())


def test_environments_wait_until_the_last_update_of_cloning(tmp_path: Path) -> None:
    spec = spec_of(Discrete(CUES))
    storage = RolloutStorage(spec, 4, 16, 1, CPU, {"log_prob": ()})
    woken: list[int] = []
    storage.on_room = lambda: woken.append(1)
    folder = dataset(tmp_path / "data", spec)
    storage.demonstrations = demonstrations(folder, spec, extras={"log_prob": ()})
    for version in range(3):
        assert storage.ready
        assert storage.settled
        assert not storage.may_begin()
        batch = storage.sample(version, 0.0)
        assert batch is not None
        assert batch.arrays["action"].shape == (5, storage.envs_per_update, 2)
        assert int(batch.env_steps()) == 0
        storage.done(batch)
    woken.clear()
    assert storage.sample(3, 0.0) is None
    assert storage.may_begin()
    assert not storage.ready
    assert woken


def cloner(
    name: str, spec: EnvSpec, folder: str, network: dict[str, Any] | None = None
) -> Algorithm[Any]:
    options = {"batch_size": 64, "batch_number": 2, "actor_lr": 0.01, "unroll_steps": 5}
    return build_algorithm(
        PluginConfig(name=name, **options),
        spec,
        PluginConfig(**(network or {"name": "mlp", "hidden": [16]})),
        Precision("fp32", CPU),
        CPU,
        3,
        imitation=ImitationConfig(dataset=folder),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_expert_is_cloned(kind: str, tmp_path: Path) -> None:
    name, action = KINDS[kind]
    spec = spec_of(action)
    folder = dataset(tmp_path / "data", spec)
    algorithm = cloner(name, spec, folder)
    storage = algorithm.make_storage(spec, 1)
    assert isinstance(storage, RolloutStorage)
    storage.demonstrations = demonstrations(
        folder, spec, updates=25, extras=algorithm.extras, frames=None
    )
    losses = []
    for version in range(25):
        batch = storage.sample(version, 0.0)
        assert batch is not None
        scalars = algorithm.update(algorithm.transforms.batch(batch, version))
        assert all(math.isfinite(x) for x in scalars.values()), scalars
        assert float(scalars["imitation_share"]) == pytest.approx(1)
        if "kl" in scalars:  # no policy is known that acted
            assert float(scalars["kl"]) == float(scalars["clip_fraction"]) == 0
        losses.append(float(scalars["imitation_loss"]))
        storage.done(batch)
    assert losses[-1] < losses[0] - 0.5
    cue = np.arange(CUES).repeat(2).reshape(CUES, 2)
    view = torch.from_numpy(np.eye(CUES, dtype=np.float32)[cue])
    acted = algorithm.snapshot().act({"view": view}, None)["action"].numpy()
    np.testing.assert_allclose(acted, expert_action(cue, spec), atol=0.2)


def test_rows_of_environments_are_not_told_afterwards(tmp_path: Path) -> None:
    for kind in ("discrete", "hybrid"):
        name, action = KINDS[kind]
        spec = spec_of(action)
        folder = dataset(tmp_path / kind, spec)
        algorithm = cloner(name, spec, folder)
        arrays = demonstrations(folder, spec, extras=algorithm.extras).sample(0, 5, 13)
        del arrays[EXPERT]
        if "log_prob" in arrays:
            arrays["log_prob"].fill_(-1.0)
        storage = algorithm.make_storage(spec, 1)
        storage.demonstrations = demonstrations(folder, spec, extras=algorithm.extras)  # type: ignore[attr-defined]
        batch = storage.sample(0, 0.0)
        batch.arrays = arrays
        scalars = algorithm.update(algorithm.transforms.batch(batch, 1000))
        assert float(scalars["imitation_share"]) == 0


def test_what_cannot_be_cloned_is_refused(tmp_path: Path) -> None:
    spec = spec_of(Discrete(CUES))
    folder = dataset(tmp_path / "data", spec)
    with pytest.raises(ConfigError, match=r"imitation.dataset=.* is of environment 'cues'"):
        demonstrations(folder, spec_of(Discrete(CUES + 1)))
    with pytest.raises(ConfigError, match="the algorithm keeps 'mood' of every action"):
        demonstrations(folder, spec, extras={"mood": ()})
    with pytest.raises(ConfigError, match="algorithm 'masac' does not imitate"):
        build_algorithm(
            PluginConfig(name="masac"),
            spec,
            PluginConfig(name="mlp"),
            Precision("fp32", CPU),
            CPU,
            3,
            imitation=ImitationConfig(dataset=folder),
        )
    with pytest.raises(ValueError, match="a run imitates one of them"):
        ImitationConfig(dataset=folder, baseline="random")

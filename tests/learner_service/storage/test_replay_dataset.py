"""A replay that begins with a dataset: its transitions to the bit, and what updates follow."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from murmur.learner_service.device.precision import Precision
from murmur.learner_service.learning.base import build_algorithm
from murmur.learner_service.storage.frames import find_frames
from murmur.learner_service.storage.replay import ReplayConfig, ReplayStorage, SequenceReplay
from murmur.shared.config import PluginConfig
from murmur.shared.process.errors import ConfigError
from murmur.shared.wire.dataset import DatasetWriter
from murmur.shared.wire.spec import AGENT_MASK, ArraySpec, Discrete, EnvSpec
from murmur.shared.wire.timestep import Array
from tests.learner_service.toys import CPU, FIRST, LAST, MID

SPEC = EnvSpec(
    "toy",
    2,
    (
        ArraySpec("view", "float32", (1,)),
        ArraySpec("image", "uint8", (1, 2, 2)),
        ArraySpec(AGENT_MASK, "uint8", ()),
    ),
    Discrete(7),
)
GAMMA = 0.5


def episode(number: int, steps: int, *, terminated: bool) -> dict[str, Array]:
    """Row t: view and image 10 number + t, action t % 7, reward that of agent 1 + 0.5."""
    value = 10.0 * number + np.arange(steps + 1)
    both = np.repeat(value[:, None], 2, 1)
    kinds = np.full(steps + 1, MID, np.uint8)
    kinds[0], kinds[-1] = FIRST, LAST
    discount, reward = (
        np.ones(steps + 1, np.float32),
        (both + np.array([0, 0.5])).astype(np.float32),
    )
    discount[-1], reward[0] = float(not terminated), 0
    return {
        "step_type": kinds,
        "reward": reward,
        "discount": discount,
        "action": np.repeat(np.arange(steps + 1)[:, None] % 7, 2, 1).astype(np.int32),
        "observation/view": both[..., None].astype(np.float32),
        "observation/image": np.broadcast_to(
            both[:, :, None, None, None], (steps + 1, 2, 1, 2, 2)
        ).astype(np.uint8),
        "observation/agent_mask": np.ones((steps + 1, 2), np.uint8),
    }


def dataset(folder: Path, *lengths: int, a_file: int = 2, spec: EnvSpec = SPEC) -> str:
    """Write episodes of these lengths, every second one terminated."""
    with DatasetWriter(folder, {"baseline": "greedy"}, {}) as writer:
        for number, steps in enumerate(lengths):
            if number % a_file == 0:
                writer.keep()
                if not number:
                    writer.begin(spec)
            writer.add(episode(number, steps, terminated=number % 2 == 1), number)
    return str(folder)


def replay(
    spec: EnvSpec = SPEC, kind: type[ReplayStorage] = ReplayStorage, **options: Any
) -> ReplayStorage:
    settings = {
        "capacity_rows": 64,
        "start_rows": 1,
        "batch_size": 1,
        "update_interval": 2,
        "unroll_steps": 4,
        **options,
    }
    depth = settings.pop("frame_stack", 1)
    return kind(
        ReplayConfig(**settings),
        spec,
        GAMMA,
        None,
        CPU,
        {},
        0,
        section="algorithm.replay",
        frames=find_frames(depth, spec),
    )


def drawn(storage: ReplayStorage) -> dict[float, tuple[Any, ...]]:
    """Draw until all transitions came: view of agent 0 -> what belongs to it."""
    found: dict[float, tuple[Any, ...]] = {}
    for _ in range(600):
        b = storage._sample()
        found[float(b.arrays["observation/view"][0, 0, 0])] = (
            int(b.arrays["action"][0, 0]),
            b.reward[0].tolist(),
            float(b.discount[0, 0]),
            float(b.next_arrays["observation/view"][0, 0, 0]),
        )
    return found


@pytest.mark.parametrize("unroll_steps", [1, 3, 4, 50])
def test_all_transitions_are_there(unroll_steps: int, tmp_path: Path) -> None:
    lengths = 1, 6, 2, 5, 3
    s = replay(
        dataset=dataset(tmp_path / "data", *lengths),
        unroll_steps=unroll_steps,
        capacity_rows=150,
    )
    s.fill()
    wanted = {}
    for number, steps in enumerate(lengths):
        for t in range(steps):
            value, last = 10.0 * number + t, t == steps - 1
            gone = last and number % 2 == 1
            rewards = [value + 1, value + 1.5]
            wanted[value] = (t % 7, rewards, 0 if gone else GAMMA, value + 1)
    assert drawn(s) == wanted
    assert s.inserted == 0


def test_they_count_for_start_rows_but_make_no_updates_due(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    folder = dataset(tmp_path / "data", 6, 6)
    s = replay(dataset=folder, start_rows=12)
    s.fill()
    assert f"begins with 12 transitions of 2 episodes in {folder} (baseline greedy)" in (
        caplog.text
    )
    assert s._due() == 1  # one burst, as at start_rows
    assert s.sample(0, 0.0) is not None
    assert s.sample(1, 0.0) is None
    s = replay(dataset=folder, start_rows=16)
    s.fill()
    assert [s._due(new) for new in (3, 4, 5, 6)] == [0, 1, 1, 2]


def test_a_checkpoint_has_them_and_when_updates_are_due(tmp_path: Path) -> None:
    s, again = (replay(dataset=dataset(tmp_path / n, 6, 6), start_rows=20) for n in ("a", "b"))
    s.fill()
    again.load_state_dict(s.state_dict())
    for number, read in s.chunks().items():
        again.load_chunk(number, read())
    assert drawn(again) == drawn(s)
    assert [again._due(new) for new in (7, 8, 10)] == [0, 1, 2]


def test_ranks_share_the_episodes(tmp_path: Path) -> None:
    class Pair:
        size = 2

        def __init__(self, rank: int) -> None:
            self.rank = rank

    found = []
    for rank in (0, 1):
        s = replay(dataset=dataset(tmp_path / str(rank), 2, 3, 4, 1, 2, a_file=3))
        s._group = Pair(rank)  # type: ignore[assignment]
        s.fill()
        found.append({int(view) // 10 for view in drawn(s)})
    assert found == [{0, 2, 4}, {1, 3}]


@pytest.mark.parametrize("unroll_steps", [2, 3, 5])
def test_stacks_of_frames_go_back_to_the_episodes_begin(unroll_steps: int, tmp_path: Path) -> None:
    s = replay(
        dataset=dataset(tmp_path / "data", 5, 4, 3),
        frame_stack=3,
        unroll_steps=unroll_steps,
    )
    s.fill()
    for _ in range(200):
        batch = s._sample()
        for arrays in (batch.arrays, batch.next_arrays):
            now = int(arrays["observation/view"][0, 0, 0])
            begin = now // 10 * 10
            stack = arrays["observation/image"][0, 0, :, 0, 0].tolist()
            assert stack == [max(now - 2, begin), max(now - 1, begin), now]


def test_priorities_are_the_largest(tmp_path: Path) -> None:
    s = replay(dataset=dataset(tmp_path / "data", 5, 4), prioritized=True)
    s.fill()
    leaves = s._tree.leaves
    assert set(leaves.tolist()) == {0.0, 1.0}
    assert int((leaves > 0).sum()) == 9


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    folder = dataset(tmp_path / "data", *[6] * 12)
    message = f"algorithm.replay.dataset={folder}: its 72 transitions of 12 episodes do not fit"
    with pytest.raises(ConfigError, match=f"{message}.*capacity_rows=64; set it to 96 or more"):
        replay(dataset=folder).fill()
    replay(dataset=folder, capacity_rows=96).fill()
    other = replace(SPEC, action=Discrete(6))
    with pytest.raises(ConfigError, match=r"Discrete.num_actions=6. here, Discrete.num_actions=7"):
        replay(other, dataset=folder, capacity_rows=96).fill()
    with pytest.raises(ConfigError, match="not supported with a recurrent network"):
        replay(kind=SequenceReplay, dataset=folder)


@pytest.mark.parametrize(
    "name", ["ddpg", "td3", "sac", "maddpg", "matd3", "masac", "iql", "qmix", "vdn"]
)
def test_every_algorithm_with_a_replay_learns_from_it(name: str, tmp_path: Path) -> None:
    spec = replace(SPEC, observations=(SPEC.observations[0], SPEC.observations[2]))
    options = {
        "capacity_rows": 64,
        "start_rows": 8,
        "batch_size": 8,
        "unroll_steps": 4,
        "dataset": dataset(tmp_path / "data", 6, 5, spec=spec),
    }
    algorithm = build_algorithm(
        PluginConfig(name=name, replay=options),
        spec,
        PluginConfig(name="mlp", hidden=[8]),
        Precision("fp32", CPU),
        CPU,
        0,
    )
    storage = algorithm.make_storage(spec, None)
    assert isinstance(storage, ReplayStorage)
    storage.fill()
    batch = storage.sample(0, 0.0)
    assert batch is not None
    scalars = algorithm.update(algorithm.transforms.batch(batch, 0))
    assert all(torch.isfinite(x) for x in scalars.values())


def test_without_a_dataset_nothing_changes() -> None:
    s = replay(start_rows=3)
    s.fill()
    assert (s._first_burst, s._filled) == ((3, 0), 0)
    assert torch.equal(s._tree.root, torch.zeros(128))

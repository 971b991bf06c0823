"""Stacks of frames: layout by hand, and the same as if the environment had stacked them."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from murmur.learner_service.device.precision import Precision
from murmur.learner_service.learning.base import Algorithm, build_algorithm
from murmur.learner_service.preprocess.building import StackFrames
from murmur.learner_service.storage.frames import Frames, find_frames
from murmur.learner_service.storage.replay import ReplayConfig, ReplayStorage
from murmur.shared.config import PluginConfig
from murmur.shared.wire.spec import ArraySpec, Discrete, EnvSpec
from murmur.shared.wire.timestep import StepType
from tests.learner_service.pixels import Drifting
from tests.learner_service.serving_learner import Serving
from tests.learner_service.toys import ABORTED, CPU, FIRST, LAST, MID

MAPPO = {"name": "mappo", "batch_size": 24, "batch_number": 2, "unroll_steps": 4}
REPLAY = {"capacity_rows": 64, "start_rows": 16, "batch_size": 8, "update_interval": 8}
SMALL = {"name": "cnn", "channels": (3,), "kernels": (3,), "strides": (1,), "hidden": (8,)}


def frames(depth: int = 3, shape: tuple[int, ...] = (1, 1, 1)) -> Frames:
    return Frames(depth, (ArraySpec("image", "uint8", shape),))


def column(*values: int) -> Tensor:
    """[T, 1, 1, 1, 1, 1] frames of one pixel, of one environment and agent."""
    return torch.tensor(values, dtype=torch.uint8).view(-1, 1, 1, 1, 1, 1)


def test_stacks_begin_anew_with_an_episode() -> None:
    kinds = torch.tensor([MID, LAST, FIRST, MID, MID], dtype=torch.uint8).view(-1, 1)
    found = frames().stack_unrolls(column(3, 4, 5, 6, 7), column(1, 2).transpose(0, 1), kinds)
    assert found.view(5, 3).tolist() == [[1, 2, 3], [2, 3, 4], [5, 5, 5], [5, 5, 6], [5, 6, 7]]


def test_first_row_needs_no_previous_frames() -> None:
    kinds = torch.tensor([FIRST, MID, ABORTED, FIRST], dtype=torch.uint8).view(-1, 1)
    found = frames().stack_unrolls(column(3, 4, 0, 6), column(9, 9).transpose(0, 1), kinds)
    assert found.view(4, 3).tolist() == [[3, 3, 3], [3, 3, 4], [3, 4, 0], [6, 6, 6]]


def test_stacks_hold_all_channels_of_a_frame_side_by_side() -> None:
    f = frames(2, (2, 1, 1))
    rows = torch.arange(12, dtype=torch.uint8).view(3, 1, 2, 2, 1, 1)  # three steps, two agents
    previous = 100 + torch.arange(4, dtype=torch.uint8).view(1, 1, 2, 2, 1, 1)
    kinds = torch.tensor([MID, MID, FIRST], dtype=torch.uint8).view(-1, 1)
    found = f.stack_unrolls(rows, previous, kinds).view(3, 2, 4)
    assert found[0].tolist() == [[100, 101, 0, 1], [102, 103, 2, 3]]
    assert found[1].tolist() == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert found[2].tolist() == [[8, 9, 8, 9], [10, 11, 10, 11]]


def test_acting_keeps_the_last_frames_in_memory() -> None:
    f = frames()
    stacks = StackFrames(f)
    memory = torch.zeros(1, 1, f.memory_size)
    seen = []
    for value, begins in ((5, True), (6, False), (7, False), (8, False), (9, True)):
        memory = memory * (not begins)
        image = column(value).view(1, 1, 1, 1, 1)
        stack, memory = stacks.act({"image": image, "other": torch.ones(1)}, memory)
        assert stack["image"].dtype == torch.uint8
        assert "other" in stack
        seen.append(stack["image"].flatten().tolist())
    assert seen == [[5, 5, 5], [5, 5, 6], [5, 6, 7], [6, 7, 8], [9, 9, 9]]
    assert f.of_memory(memory)["image"].flatten().tolist() == [9, 9]


def test_a_dark_first_frame_is_a_frame() -> None:
    stacks = StackFrames(frames(2))
    stack, memory = stacks.act({"image": column(0).view(1, 1, 1, 1, 1)}, torch.zeros(1, 1, 2))
    stack, _ = stacks.act({"image": column(4).view(1, 1, 1, 1, 1)}, memory)
    assert stack["image"].flatten().tolist() == [0, 4]


def test_rows_of_a_replay_have_the_stacks_of_their_unrolls() -> None:
    f, random = frames(4, (2, 3, 3)), torch.Generator().manual_seed(0)
    kinds = torch.randint(0, 4, (7, 9), generator=random, dtype=torch.uint8)  # 7 rows, 9 columns
    rows = torch.randint(256, (7, 9, 2, 2, 3, 3), generator=random, dtype=torch.uint8)
    previous = torch.randint(256, (9, 3, 2, 2, 3, 3), generator=random, dtype=torch.uint8)
    whole = f.stack_unrolls(rows, previous, kinds)
    ring = torch.cat([previous, rows.transpose(0, 1)], 1)
    index = torch.randperm(63, generator=random)
    time = index % 7
    found = f.stack_rows(ring, kinds.T.flatten(), index, time)
    assert torch.equal(found, whole.transpose(0, 1).flatten(0, 1)[index])


def test_only_what_each_agent_sees_is_stacked() -> None:
    own = ArraySpec("image", "uint8", (3, 8, 8)), ArraySpec("view", "float32", (2,))
    spec = EnvSpec("s", 2, (*own, ArraySpec("state", "uint8", (1, 8, 8), False)), Discrete(2))
    found = find_frames(4, spec)
    assert found is not None
    assert [i.name for i in found.images] == ["image"]
    assert found.memory_size == 1 + 3 * 3 * 8 * 8
    shapes = {o.name: o.shape for o in found.stacked_spec(spec).observations}
    assert shapes == {"image": (12, 8, 8), "view": (2,), "state": (1, 8, 8)}
    assert find_frames(1, spec) is None


def build(spec: EnvSpec, algorithm: dict[str, Any], **network: Any) -> Algorithm[Any]:
    net = PluginConfig(**SMALL, **network)
    return build_algorithm(PluginConfig(**algorithm), spec, net, Precision("fp32", CPU), CPU, 3)


def weights(algorithm: Algorithm[Any]) -> list[Tensor]:
    modules = [p for p in algorithm.parts.values() if isinstance(p, torch.nn.Module)]
    return [w.detach().clone() for module in modules for w in module.parameters()]


@pytest.mark.parametrize("records", [False, True])
@pytest.mark.parametrize(
    ("algorithm", "network"),
    [
        (MAPPO, {}),
        ({**MAPPO, "centralized": False, "share_trunk": True}, {"recurrent": 4}),
        ({"name": "qmix", "mixer": "vdn", "replay": {**REPLAY, "n_step": 2}}, {}),
        ({"name": "masac", "replay": REPLAY}, {}),
    ],
    ids=["mappo", "recurrent", "qmix", "masac"],
)
def test_it_learns_what_it_would_if_the_environment_stacked(
    algorithm: dict[str, Any], network: dict[str, Any], records: bool
) -> None:
    """Two sessions of a real inference loop, acting and learning in lockstep."""
    learned, actions = [], []
    for depth, option in ((1, 3), (3, 1)):
        games = [Drifting(3, depth=depth), Drifting(2, depth=depth)]
        one = build(games[0].spec, algorithm, frame_stack=option, **network)
        before = weights(one)
        with Serving(one, games[0].spec, learns=True, records=records) as serving:
            sessions = [serving.session(3), serving.session(2, 3)]
            seeds = [np.arange(3, dtype=np.uint64), np.arange(7, 9, dtype=np.uint64)]
            rows = [game.reset(s) for game, s in zip(games, seeds, strict=True)]
            taken = []
            for step in range(28):
                replies = serving.exchange(*zip(sessions, rows, strict=True))
                taken.append(np.concatenate(replies))
                rows = [
                    game.step(action, row.step_type == StepType.LAST, s + np.uint64(step))
                    for game, row, action, s in zip(games, rows, replies, seeds, strict=True)
                ]
        learned.append(weights(one))
        actions.append(np.stack(taken))
        changed = [not torch.equal(a, b) for a, b in zip(before, learned[-1], strict=True)]
        assert any(changed)
    np.testing.assert_array_equal(actions[0], actions[1])
    for ours, theirs in zip(*learned, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def column_bytes(replay: ReplayStorage) -> int:
    """Bytes of one column of all arrays."""
    return sum(a[0].nbytes for a in replay._arrays.values())


def test_a_replay_keeps_each_frame_once() -> None:
    config, spec = (
        ReplayConfig(capacity_rows=64, start_rows=8, batch_size=8),
        Drifting(1, agents=1).spec,
    )
    stacked = ReplayStorage(config, spec, 0.9, None, CPU, {}, 0, frames=find_frames(4, spec))
    plain = ReplayStorage(config, spec, 0.9, None, CPU, {}, 0)
    # 8 columns of 9 rows; three frames before each of them, whatever the depth of a stack
    assert stacked._arrays["observation/image"].shape == (8, 12, 1, 1, 5, 5)
    assert column_bytes(stacked) - column_bytes(plain) == 3 * 25


@pytest.mark.long
@pytest.mark.parametrize(
    ("algorithm", "rows"),
    [
        ({**MAPPO, "batch_size": 128, "data_passes": 3, "actor_lr": 3e-3, "critic_lr": 3e-3}, 700),
        (
            {
                **{"name": "qmix", "mixer": "vdn", "lr": 3e-3, "epsilon_env_steps": 2000},
                "replay": {**REPLAY, "capacity_rows": 4000, "batch_size": 64},
            },
            500,
        ),
    ],
    ids=["mappo", "qmix"],
)
def test_motion_is_learned_from_stacks_not_from_single_frames(
    algorithm: dict[str, Any], rows: int
) -> None:
    """The first answer cannot be known; the others need two frames."""
    scores = {}
    for depth in (2, 1):
        game = Drifting(16, size=5)
        one = build(game.spec, algorithm, frame_stack=depth)
        with Serving(one, game.spec, learns=True) as serving:
            serving.play(serving.session(16), game, rows)
            tested = Drifting(16, size=5)
            judge = serving.session(16, evaluates=True)
            scores[depth] = serving.play(judge, tested, 80, seed=1)
    # Episodes have 3 to 5 answers, so that 1 in 2 right at first leaves 7 in 8 on average.
    assert scores[2] > 0.75
    assert scores[1] < 0.6

"""Ranks whose batches differ in shape, and whose captures fail, stay in step and learn the same."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from murmur.learner_service.device.cuda_graph import CALLS_TO_CAPTURE, Captured, Graphs
from murmur.learner_service.ranks.group import Group
from tests.learner_service.running import RunningLearner, play
from tests.learner_service.toys import MatrixGame
from tests.pretend_cuda import pretend_cuda
from tests.ranks import captures
from tests.ranks.learners import learner_ranks
from tests.ranks.processes import Ranks
from tests.ranks.test_same_update import CASES
from tests.ranks.test_two_learners import config
from tests.waiting import wait_until
from tests.wire import Client

QUICK = ("mappo", "masac")
LONG = ("coma", "matd3", "mappo, recurrent", "coma, recurrent", "masac, clipped", "qmix",
        "masac, scaled", "maddpg, normalised", "mappo, normalised, groups",
        "happo", "happo, teams", "mappo, teams, graph", "segmentation")  # fmt: skip
UPDATES = 8


def assert_in_step(found: list[Any], eager: list[Any]) -> None:
    """Each call of what exchanges something was of one kind everywhere, and made the same."""
    (first, ours, _), (second, theirs, _) = found
    assert ours == theirs
    assert ours[-1]
    shared = [name for name in first if not name.startswith(("scalar/", "td_error"))]
    assert all(torch.equal(first[name], second[name]) for name in shared)
    for outcome, expected in zip((first, second), (eager[0][0], eager[1][0]), strict=True):
        assert all(torch.equal(outcome[name], expected[name]) for name in expected)


def some(*quick: str) -> pytest.MarkDecorator:
    """Parametrises; all others are for `make test-long`."""
    late = [pytest.param(n, marks=pytest.mark.long) for n in (*QUICK, *LONG) if n not in quick]
    return pytest.mark.parametrize("name", [*quick, *late])


@some(QUICK[1])
def test_captured_updates_of_unequal_ranks_are_eager_ones(ranks: Ranks, name: str) -> None:
    every = captures.batches(CASES[name], UPDATES)
    found = ranks.call(captures.learned, CASES[name], every, True)
    assert_in_step(found, ranks.call(captures.learned, CASES[name], every, False))
    for _, counts, failed in found:
        assert not failed
        for eager, captured, replays in counts[-1].values():
            assert captured > 0
            assert replays > 0
            assert eager == 3 * captured
    if "step_type" in every[0][0].arrays:  # rollouts
        shapes = [[b.arrays["step_type"].shape for b in of_rank] for of_rank in every]
        assert all(ours != theirs for ours, theirs in zip(*shapes, strict=True))


@pytest.mark.parametrize(
    ("fails", "at_once"),
    [
        (((), (0, 1)), False),
        pytest.param(((0, 1), ()), True, marks=pytest.mark.long),
        pytest.param(((0, 2), (1,)), False, marks=pytest.mark.long),
    ],
    ids=["the first two", "one at once", "on both"],
)
@some(QUICK[0])
def test_a_capture_that_fails_on_one_rank_is_eager_on_all(
    ranks: Ranks, name: str, fails: tuple[tuple[int, ...], ...], at_once: bool
) -> None:
    every = captures.batches(CASES[name], UPDATES)
    found = ranks.call(captures.learned, CASES[name], every, True, fails, at_once)
    assert_in_step(found, ranks.call(captures.learned, CASES[name], every, False))
    assert any(failed for _, _, failed in found)


_SAME, _CHANGES = [4] * 24, [5] * 8 + [6] * 8 + [5, 7] * 4
_LEAVES = [5] * 6 + [6, 7, 8, 9] * 3 + [5] * 6  # more shapes than there are graphs


@pytest.mark.parametrize(
    ("theirs", "loses"),
    [
        (_SAME, (-1, -1)),
        (_CHANGES, (-1, -1)),
        (_LEAVES, (-1, -1)),
        (_SAME, (-1, 6)),
        (_CHANGES, (6, 13)),
    ],
    ids=["same", "changes", "leaves", "loses", "changes and loses"],
)
def test_a_rank_with_shapes_of_its_own_keeps_all_in_step(
    ranks: Ranks, theirs: list[int], loses: tuple[int, int]
) -> None:
    (ours, made), (others, made_there) = ranks.call(captures.walked, [_SAME, theirs], loses)
    assert ours == others == np.cumsum([4 + n for n in theirs]).tolist()
    assert made == made_there
    assert made[-1][2] > 0  # and replayed where both can


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("theirs", [_SAME, _CHANGES, _LEAVES], ids=["same", "changes", "leaves"])
def test_ranks_on_two_gpus_stay_in_step_and_end(theirs: list[int]) -> None:
    with Ranks(gpus=True) as two:
        (ours, made), (others, made_there) = two.call(captures.walked, [_SAME, theirs], (-1, 9))
    assert ours == others == np.cumsum([4 + n for n in theirs]).tolist()
    assert made == made_there
    assert made[-1][2] > 0
    assert [process.exitcode for process in two.processes] == [0, 0]


@pytest.mark.long
def test_two_learners_with_graphs_and_unequal_environments_train(tmp_path: Path) -> None:
    """They compare their weights after each update; captures of one fail."""
    wanted = config(run={"max_updates": 1_000_000}, learner={"checkpoint_every_updates": 1000})

    def play_on(port: int, envs: int) -> None:
        game = MatrixGame(MatrixGame.CLIMBING, envs, 5)
        with Client(port, game.spec, envs) as client:
            play(client, client.hello(), game, 1_000_000)

    with learner_ranks(tmp_path, wanted, prepare=captures.pretend_captures) as ranks:
        ports = [ranks.ports(rank) for rank in range(2)]
        players = [
            threading.Thread(target=play_on, args=(port, envs))
            for envs, (port, _) in zip((2, 5), ports, strict=True)
        ]
        for thread in players:
            thread.start()
        seen = [RunningLearner(*own, tmp_path, threading.Event()) for own in ports]
        wait_until(
            lambda: min(s.metric("graph_replays_total", graph="actor") for s in seen) > 10,
            "replays",
            timeout_s=240,
        )
        assert [s.metric("graph_fallbacks_total") for s in seen] == [1, 2]
        ranks.stop()
        assert ranks.codes() == [0, 0]
        for thread in players:
            thread.join()


def test_a_group_closes_without_graphs_and_with_an_idle_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else NCCL waits for ever."""
    gpu, live, waited = torch.device("cuda", 0), list[int](), list[int]()
    with pretend_cuda() as cuda:
        group = Group(1, 2, device=gpu)
        graphs = Graphs(gpu, group=group)
        captured = Captured("sum", lambda rows: {"sum": rows["x"].sum()}, graphs)
        for _ in range(CALLS_TO_CAPTURE):
            captured({"x": torch.ones(3, device=gpu)})
        assert len(graphs._live) == 1

        def destroy() -> None:
            live.append(len(graphs._live))
            waited.append(sum(w["torch.cuda.synchronize"] for w in cuda.waits.values()))

        monkeypatch.setattr(torch.distributed, "destroy_process_group", destroy)
        group.close()
    assert live == [0]
    assert waited == [1]

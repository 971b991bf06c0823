"""Captured updates on ranks, each of batches of its own shapes, as on GPUs."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from murmur.learner_service.device import cuda_graph
from murmur.learner_service.device.cuda_graph import Captured, Graphs
from murmur.learner_service.learning.on_policy import OnPolicyAlgorithm
from murmur.learner_service.learning.teams import Teams
from murmur.learner_service.ranks.group import Group
from murmur.learner_service.storage.rollout import Batch
from tests.learner_service.taped_graphs import TapedCapture, taped_graphs
from tests.ranks import jobs

Counts = dict[str, tuple[int, int, int]]  # eager calls, captures, replays


def batches(case: Any, number: int) -> list[list[Any]]:
    """What each rank learns from, by rank: rollouts of different numbers of environments."""
    algorithm = case.build()
    found: list[list[Any]] = [[], []]
    for seed in range(number):
        for rank, (part, _) in enumerate(case.parts(case.batch(algorithm, seed))):
            if isinstance(part, Batch):
                envs = 1 + (seed + rank) % part.arrays["step_type"].shape[1]
                arrays = {name: x[:, :envs].clone() for name, x in part.arrays.items()}
                part = Batch(arrays, [], times=1.0 + (seed // 2 + rank) % 3)
            found[rank].append(part)
    return found


def failing(which: tuple[int, ...], *, at_once: bool) -> type[TapedCapture]:
    """Captures of which some fail, at their beginning or at their end."""
    numbers = iter(range(1 << 30))

    class Failing(TapedCapture):
        def __enter__(self) -> "Failing":
            self._fails = next(numbers) in which
            if self._fails and at_once:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().__enter__()

        def __exit__(self, *error: Any) -> None:
            super().__exit__(*error)
            if self._fails:
                raise RuntimeError("CUDA error: operation failed during capture")

    return Failing


def learned(
    group: Group,
    case: Any,
    every: list[list[Any]],
    captured: bool,
    fails: tuple[tuple[int, ...], ...] = ((), ()),
    at_once: bool = False,
) -> tuple[dict[str, Tensor], list[Counts], int]:
    """Updates from a rank's batches.

    Args:
        group: of the ranks.
        case: what learns.
        every: batches, by rank.
        captured: whether graphs are captured.
        fails: numbers of captures that fail, by rank.
        at_once: whether they fail at their beginning.

    Returns:
        what the last update left, how the functions that exchange something were called so far
        after each update, and how many captures failed.
    """
    torch.manual_seed(group.rank)
    capture = failing(fails[group.rank], at_once=at_once)
    with taped_graphs(capture), patch.object(cuda_graph, "_RETRY_CALLS", 5):
        algorithm = case.build(group)
        learning = [algorithm]
        if isinstance(algorithm, Teams):
            learning = [own for _, own, learns in algorithm._members if learns]
        for own in learning:
            if isinstance(own, OnPolicyAlgorithm):
                own._static = True
            own.graphs.enabled = captured
        counts, scalars = list[Counts](), dict[str, Tensor]()
        for batch in every[group.rank]:
            seen = algorithm.transforms.batch(batch)
            scalars = algorithm.update(seen)
            counts.append({k: x for i, own in enumerate(learning) for k, x in _calls(own, i)})
        outcome = jobs.outcome(algorithm, seen, scalars)
        fallbacks = sum(sum(own.graphs.fallbacks.values()) for own in learning)
        algorithm.graphs.reset()
    return outcome, counts, fallbacks


def _calls(algorithm: Any, number: int) -> Iterator[tuple[str, tuple[int, int, int]]]:
    """Yield how the functions that exchange something were called, of one of the algorithms."""
    graphs = algorithm.graphs
    for name in sorted(f._name for f in graphs._functions if f._exchanges):
        counts = graphs.eager_calls[name], graphs.captures[name], graphs.replays[name]
        yield f"{number} {name}", counts


def walked(
    group: Group, sizes: list[list[int]], loses: tuple[int, int]
) -> tuple[list[float], list[tuple[int, int, int]]]:
    """Sums over the ranks so far of a number of rows, each rank's of a shape of its own.

    Args:
        group: of the ranks.
        sizes: rows of each call, by rank.
        loses: before which call a rank loses its graphs, by rank; -1: it never does.

    Returns:
        the sums, and how they were made so far: eager calls, captures, replays.
    """
    device, on_gpu = group.device, group.device.type == "cuda"
    graphs, total = Graphs(device, group=group), torch.zeros(1, device=device)
    graphs.enabled = True

    def step(rows: dict[str, Tensor]) -> dict[str, Tensor]:
        own = rows["x"].sum(0)
        group.sum_([own])
        return {"total": total.add_(own).clone()}

    sums, counts = [], []
    with nullcontext() if on_gpu else taped_graphs():
        captured = Captured("walk", step, graphs, max_graphs=2)
        for call, size in enumerate(sizes[group.rank]):
            if call == loses[group.rank]:
                graphs.reset()
            sums.append(float(captured({"x": torch.ones(size, 1, device=device)})["total"]))
            counters = graphs.eager_calls, graphs.captures, graphs.replays
            counts.append((counters[0]["walk"], counters[1]["walk"], counters[2]["walk"]))
        if not on_gpu:  # else the group drops them
            graphs.reset()
    return sums, counts


_held: list[Any] = []  # contexts that last as long as the process


def pretend_captures(rank: int) -> None:
    """Let a process of a group capture graphs as on a GPU; two captures of rank 1 fail."""
    pretended = taped_graphs(failing(((), (0, 2))[rank], at_once=False))
    pretended.__enter__()
    _held.append(pretended)
    cuda_graph._RETRY_CALLS = 5
    make, build = Graphs.__init__, OnPolicyAlgorithm.__init__

    def enabled(self: Graphs, *arguments: Any, **options: Any) -> None:
        make(self, *arguments, **options)
        self.enabled = self.group.size > 1

    def static(self: OnPolicyAlgorithm, *arguments: Any) -> None:
        build(self, *arguments)
        self._static = True

    Graphs.__init__ = enabled  # type: ignore[method-assign]
    OnPolicyAlgorithm.__init__ = static  # type: ignore[method-assign]

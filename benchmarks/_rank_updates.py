"""Two processes, pinned to a core each, that make updates side by side or as ranks of a group."""

import multiprocessing as mp
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from typing_extensions import override

from benchmarks._cores import started_on
from murmur.benchmarks import coma_update, masac_update
from murmur.learner_service.device.device import keep_freed_memory
from murmur.learner_service.ranks.group import ALONE, Extreme, Group

RANKS = 2
# How updates are made: without any exchange; exchanging one number each, so that the faster process
# waits for the slower one; as ranks of a group.
APART, LOCKSTEP, TOGETHER = HOW = ("apart", "lockstep", "together")
_TIMEOUT_S = 300.0
_CPU = torch.device("cpu")


def _coma() -> "Updates":
    """Return updates with 300 rows of the terrain reference."""
    batch = coma_update.rollout(5)
    return lambda group: partial(coma_update.make("fp32", small=False, group=group).update, batch)


def _masac(agents: int, rows: int) -> "Updates":
    """Return updates with transitions of agents with networks of their own."""
    batch = masac_update.batch(agents, _CPU, rows)
    return lambda group: partial(masac_update.make(agents, "fp32", _CPU, group=group).update, batch)


Updates = Callable[[Group], Callable[[], object]]
"""Makes an algorithm of a group's rank, and returns its update from a batch that it keeps."""
Load = Callable[[], Updates]
LOADS: dict[str, Load] = {
    "COMA, 300 rows a rank, 50 optimiser steps": _coma,
    "MASAC, 4 agents, 2048 rows a rank": partial(_masac, 4, 2048),
    "MASAC, 4 agents, 256 rows a rank": partial(_masac, 4, 256),
}
SMOKE: dict[str, Load] = {"MASAC, 2 agents, 16 rows a rank": partial(_masac, 2, 16)}


class TimedGroup(Group):
    """A group that records the duration of each exchange, packing of tensors included.

    Attributes:
        exchanges: seconds of each exchange, in order.
    """

    @override
    def __init__(self, *how: Any) -> None:
        super().__init__(*how)
        self.exchanges: list[float] = []

    def _reduce(self, tensors: Sequence[Tensor], how: Extreme, scale: float = 1) -> None:
        started = time.perf_counter()
        super()._reduce(tensors, how, scale)
        self.exchanges.append(time.perf_counter() - started)

    @override
    def agree(self, values: Mapping[str, float], how: Extreme) -> dict[str, float]:
        started = time.perf_counter()
        agreed = super().agree(values, how)
        self.exchanges.append(time.perf_counter() - started)
        return agreed


@dataclass
class Measured:
    """Measurement of one rank in one turn, for one update.

    Attributes:
        wall_s: time of an update [s].
        cpu_s: processor seconds of the whole process.
        exchanges: seconds of each exchange of the turn; empty without any.
        bytes: bytes exchanged.
    """

    wall_s: float
    cpu_s: float
    exchanges: list[float]
    bytes: float


class Pair:
    """The two processes; `with` ends them."""

    def __init__(self, loads: Mapping[str, Load], cores: tuple[int, int]) -> None:
        """Start them, each on a core, and let them build all algorithms twice."""
        context = mp.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="murmur-bench-")
        store = str(Path(self._folder.name, "store"))
        self._pipes: list[Connection[Any, Any]] = []
        self._processes = []
        for rank, core in enumerate(cores):
            ours, theirs = context.Pipe()
            arguments = (theirs, rank, store, dict(loads))
            process = context.Process(target=_serve, args=arguments, daemon=True)
            with started_on([core]):
                process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def measure(self, load: str, how: str, updates: int, ranks: int = RANKS) -> list[Measured]:
        """Make updates on both at once, or on the first alone; what each rank measured.

        Args:
            load: name in LOADS.
            how: name in HOW.
            updates: number of updates.
            ranks: number of ranks; 1: the other process sleeps.
        """
        for pipe in self._pipes[:ranks]:
            pipe.send((load, how, updates))
        return [self._answer(pipe) for pipe in self._pipes[:ranks]]

    def _answer(self, pipe: "Connection[Any, Any]") -> Measured:
        if not pipe.poll(_TIMEOUT_S):
            raise RuntimeError(f"a rank did not answer within {_TIMEOUT_S:.0f} s")
        try:
            measured: Measured = pipe.recv()
        except EOFError:
            raise RuntimeError("a rank ended; its error is printed above") from None
        return measured

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10)
            process.kill()
        self._folder.cleanup()


def _serve(pipe: "Connection[Any, Any]", rank: int, store: str, loads: Mapping[str, Load]) -> None:
    """Make the updates that are asked for until the pipe closes, as one process."""
    torch.set_num_threads(1)
    keep_freed_memory()
    group = TimedGroup.join(rank, RANKS, _CPU, _TIMEOUT_S, f"file://{store}")
    works: dict[tuple[str, str], Callable[[], object]] = {}
    for name, load in loads.items():
        updates_of = load()
        alone = updates_of(ALONE)
        works |= {(name, APART): alone, (name, LOCKSTEP): partial(_in_lockstep, alone, group)}
        works[name, TOGETHER] = updates_of(group)
    for work in works.values():
        work()  # warm up
    while True:
        try:
            name, how, updates = pipe.recv()
        except (EOFError, ConnectionResetError):
            return
        group.exchanges, before = [], group.bytes
        started, cpu = time.perf_counter(), time.process_time()
        for _ in range(updates):
            works[name, how]()
        wall_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu
        moved = (group.bytes - before) / updates
        pipe.send(Measured(wall_s / updates, cpu_s / updates, group.exchanges, moved))


def _in_lockstep(update: Callable[[], object], group: Group) -> None:
    update()
    group.agree({"": 0.0}, "max")


def compare(pair: Pair, load: str, turns: int, updates: int) -> dict[str, float]:
    """Measure updates with and without exchange in turns; return medians over turns.

    A turn's ratio is (updates a second of both ranks together) / (the sum of both processes'
    updates a second without exchange). In lockstep it is what ranks would reach whose exchange
    costs nothing: both go at the pace of the slower core. An exchange takes as long as on the rank
    that comes last: the other one waits for it. "waits" is what both wait for each other, on
    average.
    """
    ratios, bounds, shares, waits, both = [], [], [], [], []
    apart_s, together_s, alone_s, cpu = [], [], [], []
    for turn in range(turns):
        order = HOW if turn % 2 else reversed(HOW)
        found = {how: pair.measure(load, how, updates) for how in order}
        alone = pair.measure(load, APART, updates, ranks=1)[0]
        ranks = found[TOGETHER]
        rate = sum(1 / m.wall_s for m in found[APART])
        wall_s = max(m.wall_s for m in ranks)
        ratios.append(RANKS / wall_s / rate)
        bounds.append(RANKS / max(m.wall_s for m in found[LOCKSTEP]) / rate)
        exchange_s = sum(map(min, *(m.exchanges for m in ranks))) / updates
        shares.append(exchange_s / wall_s)
        waited_s = sum(sum(m.exchanges) for m in ranks) / updates / RANKS
        waits.append((waited_s - exchange_s) / wall_s)
        both.append(rate * alone.wall_s / RANKS)
        apart_s.append(RANKS / rate)
        together_s.append(wall_s)
        alone_s.append(alone.wall_s)
        more = sum(m.cpu_s for m in ranks) / sum(m.cpu_s for m in found[APART])
        cpu.append(more - 1)
    return {
        "update on one core, the other idle, s": statistics.median(alone_s),
        "update on each core, no exchange, s": statistics.median(apart_s),
        "update of two ranks, s": statistics.median(together_s),
        "two ranks / two processes, rate": statistics.median(ratios),
        "in lockstep only / two processes": statistics.median(bounds),
        "lowest turn": min(ratios),
        "highest turn": max(ratios),
        "all-reduce, share of the update": statistics.median(shares),
        "waits for the other rank, share": statistics.median(waits),
        "more processor time": statistics.median(cpu),
        "two processes / twice one, rate": statistics.median(both),
        "exchanges an update": len(ranks[0].exchanges) / updates,
        "MB exchanged an update": ranks[0].bytes / 1e6,
        "turns": turns,
    }

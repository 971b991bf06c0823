"""CUDA graphs: a capture records operations and undoes their effects; a replay calls them."""

import weakref
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .blocks import GPU, Access, Block, Use, block_of
from .machine import POISON, Machine

if TYPE_CHECKING:
    from .streams import Streams


class Tape:
    """The operations of a capture in order, with the tensors that they were called with.

    Views are not recorded: they stay valid. CUDA computes nothing during a capture, so its effects
    are undone at the end: older memory is restored, newer memory is filled with POISON until the
    first replay.

    Attributes:
        generators: what it may draw from.
        lost: the replay of another graph that has written over what this one's last replay wrote.
        number: position among the captures of its pool.
        nodes: operations in order, each with its number of kernels.
    """

    def __init__(self, machine: Machine, generators: list[torch.Generator], pool: "Pool") -> None:
        self._machine, self._pool = machine, pool
        self.lost: Use | None = None
        self.number = 0
        self._calls: list[tuple[Callable[[], Any], list[Tensor]]] = []
        self._own: set[Block] = set()
        self._made: list[Tensor] = []
        self._saved: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
        self._saved_ids: set[int] = set()
        self._reads: set[Access] = set()
        self._writes: set[Access] = set()
        self.nodes: list[tuple[str, int]] = []
        self.generators = generators
        self._states = [g.get_state() for g in generators]
        self._default = torch.default_generator.get_state()

    def save(self, written: Iterable[Tensor]) -> None:
        """Keep the content of storages before their first write."""
        for x in written:
            block, storage = block_of(x), x.untyped_storage()
            if block is None or block in self._own or storage._cdata in self._saved_ids:
                continue
            self._saved_ids.add(storage._cdata)
            self._saved.append((storage, storage.clone()))

    def record(self, call: Callable[[], Any], outs: list[Tensor]) -> None:
        """Record an operation and its results."""
        self._calls.append((call, outs))

    def made(self, x: Tensor, block: Block) -> None:
        """Record a tensor allocated in the capture."""
        block.tape = self
        self._own.add(block)
        self._made.append(x)

    def touch(self, reads: Iterable[Access], writes: Iterable[Access]) -> None:
        """Record what is read and written, to check the order of replays."""
        self._reads.update(reads)
        self._writes.update(writes)

    def finish(self) -> None:
        """Undo the effects of the capture."""
        with self._machine.quiet(), torch.no_grad():
            for storage, saved in self._saved:
                storage.copy_(saved)
        self._poison()
        # Its own memory is read after it was written, and older memory is no graph's.
        self._reads = {at for at in self._reads if at.block not in self._own}
        for generator, state in zip(self.generators, self._states, strict=True):
            generator.set_state(state)
        torch.default_generator.set_state(self._default)
        self._saved.clear()

    def replay(self) -> None:
        """Call all recorded operations; a hollow machine only counts them."""
        machine = self._machine
        machine.count_replay(self.nodes)
        use = machine.issue("graph replay", self._reads, {*self._writes, self._pool.access})
        if machine.hollow:
            return
        machine.local.replaying = use
        self._pool.replayed(self, use)
        with machine.quiet(), torch.inference_mode(), torch.autocast("cpu", enabled=False):
            for call, outs in self._calls:
                given = [x for x in _flat(call()) if isinstance(x, Tensor)]
                for new, out in zip(given, outs, strict=True):
                    if new.shape != out.shape:
                        raise RuntimeError(f"a graph's result has shape {new.shape} now")
                    if new.untyped_storage()._cdata != out.untyped_storage()._cdata:
                        out.detach().copy_(new)

    def overwritten(self, by: Use) -> None:
        """Another graph's replay writes over all memory of this one."""
        if self.lost is None:
            self._poison()
        self.lost = by

    def _poison(self) -> None:
        content = 0 if self._machine.hollow else POISON
        with self._machine.quiet(), torch.no_grad():
            for x in self._made:
                raw = torch.empty(0, dtype=torch.uint8)
                raw.set_(x.untyped_storage()).fill_(content)  # type: ignore[call-overload]


class Pool:
    """A memory pool of graphs, which the allocator hands to one capture after another.

    A capture returns what it no longer needs to the pool, and the next capture gets it: what the
    later graph returns may lie where the earlier one works. So the replay of a graph writes over
    all that graphs captured after it have returned, and two graphs must not run at once.

    Attributes:
        access: a piece of memory that every graph of the pool writes.
    """

    def __init__(self) -> None:
        self.access = Access(Block(GPU), 0, 1)
        self._tapes: weakref.WeakSet[Tape] = weakref.WeakSet()
        self._captured = 0

    def add(self, tape: Tape) -> None:
        """Include a graph, as the latest one."""
        tape.number = self._captured
        self._captured += 1
        self._tapes.add(tape)

    def replayed(self, tape: Tape, use: Use) -> None:
        """A graph's replay begins."""
        for other in self._tapes:
            if other.number > tape.number:
                other.overwritten(use)
        tape.lost = None


def _flat(found: Any) -> list[Any]:
    if isinstance(found, list | tuple):
        return [y for x in found for y in _flat(x)]
    return [found]


class Graphs:
    """Replacements of torch.cuda.CUDAGraph and torch.cuda.graph."""

    def __init__(self, machine: Machine, streams: "Streams") -> None:
        self._machine, self._streams = machine, streams

    def patches(self) -> dict[str, Any]:
        """Replacements by their names in torch.cuda."""
        machine, streams = self._machine, self._streams
        handles = iter(range(1, 1 << 30))
        pools: dict[Any, Pool] = {}

        class CUDAGraph:
            """See torch.cuda.CUDAGraph."""

            def __init__(self, keep_graph: bool = False) -> None:
                self._generators: list[torch.Generator] = []
                self._tape: Tape | None = None
                self._pool: Any = None
                self._mode = "global"

            def register_generator_state(self, generator: torch.Generator) -> None:
                self._generators.append(generator)

            def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
                if self._tape is not None:
                    raise RuntimeError("This CUDAGraph instance already owns a captured graph")
                if machine.lane.number == 0:
                    raise RuntimeError("CUDA graphs must be captured on a non-default stream")
                self._pool = pool if pool is not None else (0, next(handles))
                self._mode = capture_error_mode
                for generator in self._generators:
                    assert getattr(generator, "at", None) == GPU, "a generator of the device"
                memory = pools.setdefault(self._pool, Pool())
                machine.local.tape = Tape(machine, self._generators, memory)
                machine.capturing += capture_error_mode == "global"

            def capture_end(self) -> None:
                tape = machine.local.tape
                assert tape is not None
                machine.local.tape = None
                machine.capturing -= self._mode == "global"
                tape.finish()
                pools[self._pool].add(tape)
                machine.captured.append(tape.nodes)
                self._tape = tape

            def replay(self) -> None:
                if self._tape is None:
                    raise RuntimeError("Called CUDAGraph::replay without a preceding capture")
                machine.illegal("replay of another graph")
                self._tape.replay()

            def reset(self) -> None:
                self._tape = None

            def pool(self) -> Any:
                return self._pool

        class graph:  # noqa: N801
            """See torch.cuda.graph."""

            def __init__(
                self,
                cuda_graph: CUDAGraph,
                pool: Any = None,
                stream: Any = None,
                capture_error_mode: str = "global",
            ) -> None:
                self._graph, self._pool, self._mode = cuda_graph, pool, capture_error_mode
                self._context = streams.stream(stream or streams.Stream())

            def __enter__(self) -> None:
                machine.all_known()  # once: no wait that counts
                self._context.__enter__()
                self._graph.capture_begin(self._pool, capture_error_mode=self._mode)

            def __exit__(
                self,
                kind: type[BaseException] | None,
                error: BaseException | None,
                tb: TracebackType | None,
            ) -> None:
                self._graph.capture_end()
                if error is not None:
                    self._graph.reset()
                self._context.__exit__(kind, error, tb)

        return {
            "CUDAGraph": CUDAGraph,
            "graph": graph,
            "graph_pool_handle": lambda: (0, next(handles)),
            "is_current_stream_capturing": lambda: machine.local.tape is not None,
        }

"""The pretended device: streams, memory, and what each host thread knows to be over."""

import collections
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .blocks import CPU, GPU, Access, Block, Freed, Transfer, Use, attach, block_of
from .clocks import Clock, merge
from .report import Kind, Report

if TYPE_CHECKING:
    from .graphs import Tape

POISON = 0x7F  # of every byte: a float of 3e38, an int of 2e9
_MOST_TRANSFERS = 500


class Lane:
    """A stream: its operations run in order.

    Attributes:
        number: 0 is the default stream.
        clock: operations that are over when its next one begins.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.clock: Clock = {}


class _Local(threading.local):
    """State of one host thread."""

    def __init__(self) -> None:
        self.lane: Lane | None = None
        self.known: Clock = {}
        self.quiet = 0
        self.tape: Tape | None = None
        self.replaying: Use | None = None


class Machine:
    """State shared by all threads, guarded by one lock.

    Attributes:
        report: what was found.
        launches: thread name -> operation -> number of launches.
        waits: thread name -> operation -> number of synchronisations, allowed or not.
        captured: of each graph, in the order of captures, operations with their kernels.
        replayed: thread name -> "nodes" and "kernels" of the graphs that it replayed.
    """

    def __init__(self, report: Report, *, raises: bool = False, hollow: bool = False) -> None:
        """Make an idle device; raises, hollow: see pretend_cuda."""
        self.report, self.raises, self.hollow = report, raises, hollow
        self.lock = threading.RLock()
        self.local = _Local()
        self.lanes = [Lane(0)]
        self.launches: dict[str, collections.Counter[str]] = {}
        self.waits: dict[str, collections.Counter[str]] = {}
        self.captured: list[list[tuple[str, int]]] = []
        self.replayed: dict[str, collections.Counter[str]] = {}
        self._awaited: Clock = {}  # by any thread
        self._freed: collections.deque[Freed] = collections.deque()
        self._waiting: dict[int, list[Freed]] = {}
        self._transfers: list[Transfer] = []
        self.capturing = 0  # graphs captured in "global" mode

    # --- streams and host threads ------------------------------------------------------------

    @property
    def lane(self) -> Lane:
        """The current stream of this thread."""
        return self.local.lane or self.lanes[0]

    def new_lane(self) -> Lane:
        """Make a stream."""
        with self.lock:
            lane = Lane(len(self.lanes))
            self.lanes.append(lane)
        return lane

    def host_knows(self, clock: Clock, what: str = "") -> None:
        """Record that this thread knows all operations of a clock to be over.

        Args:
            clock: of an event or a stream.
            what: name of the synchronisation to report; empty for a query, which does not wait.
        """
        if what:
            _count(self.waits, what)
            if not self.illegal(what):
                self.report.sync(what)
        with self.lock:
            merge(self.local.known, clock)
            merge(self._awaited, clock)
            self._finish_transfers()

    def all_known(self, what: str = "") -> None:
        """Record that this thread knows the device to be idle; `what`: see host_knows."""
        with self.lock:
            everything: Clock = {}
            for lane in self.lanes:
                merge(everything, lane.clock)
            self.host_knows(everything, what)

    def illegal(self, what: str) -> bool:
        """Report an operation that no capture allows; returns whether one is under way."""
        if self.local.tape is None and not self.capturing:
            return False
        if self.raises:
            raise RuntimeError(f"operation not permitted when stream is capturing: {what}")
        self.report.fault(Kind.GRAPH, what)
        return True

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """A context whose operations are neither counted nor checked."""
        self.local.quiet += 1
        try:
            yield
        finally:
            self.local.quiet -= 1

    def count(self, name: str) -> None:
        """Count a launch of this thread."""
        _count(self.launches, name)

    def count_replay(self, nodes: list[tuple[str, int]]) -> None:
        """Count a replay by this thread, one launch, and what its graph consists of."""
        _count(self.launches, "graph replay")
        _count(self.replayed, "nodes", len(nodes))
        _count(self.replayed, "kernels", sum(kernels for _, kernels in nodes))

    # --- memory ------------------------------------------------------------------------------

    @staticmethod
    def device_of(x: Tensor) -> torch.device:
        """Where a tensor is."""
        block = block_of(x)
        return block.device if block is not None else CPU

    def allocate(self, x: Tensor) -> Block:
        """Record that a tensor was allocated on the current stream."""
        tape = self.local.tape
        if tape is not None:
            return attach(x, Block(GPU, stream=self.lane.number))
        lane = self.lane
        with self.lock:
            self._check_reuse(lane)
        return attach(x, Block(GPU, stream=lane.number, freed=self._free))

    def _free(self, stream: int, uses: list[Use]) -> None:
        # What another thread awaited is over, too: it dropped its reference later than that, and
        # this is the last one.
        self._freed.append(Freed(stream, [u for u in uses if not u.before(self._awaited)]))

    def _check_reuse(self, lane: Lane) -> None:
        while self._freed:
            freed = self._freed.popleft()
            self._waiting.setdefault(freed.stream, []).append(freed)
        waiting = self._waiting.pop(lane.number, None)
        if not waiting:
            return
        merge(lane.clock, self.local.known)
        for freed in waiting:
            for use in freed.uses:
                if not use.before(lane.clock):
                    self.report.fault(
                        Kind.REUSE,
                        f"memory of stream {lane.number} is taken again while {use} may use it",
                        use.site,
                    )

    def pin(self, x: Tensor) -> Tensor:
        """Record that a tensor is pinned host memory."""
        self.illegal("allocation of pinned memory")
        attach(x, Block(CPU, pinned=True))
        return x

    def issue(self, name: str, reads: Iterable[Access], writes: Iterable[Access]) -> Use:
        """Record an operation on the current stream; report races."""
        lane, site = self.lane, self.report.site()
        tape = self.local.tape
        if tape is not None:
            tape.touch(reads, writes)
            return Use(lane.number, 0, name, site)
        with self.lock:
            clock = lane.clock
            merge(clock, self.local.known)
            tick = clock[lane.number] = clock.get(lane.number, 0) + 1
            use = Use(lane.number, tick, name, site)
            for at in reads:
                at.block.read(at, use, clock, self.report)
            for at in writes:
                at.block.write(at, use, clock, self.report)
        return use

    # --- host memory -------------------------------------------------------------------------

    def touch_host(self, x: Tensor, *, writes: bool) -> None:
        """Check that no copy that the host has not awaited reads or writes this pinned tensor.

        Args:
            x: read or written by the host now.
            writes: whether it is written.
        """
        at = Access.of(x)
        if at is None:
            return
        block = at.block
        block.copies = [c for c in block.copies if not c[2].before(self.local.known)]
        for start, stop, use, arrives in block.copies:
            if start < at.stop and at.start < stop and (writes or arrives):
                verb = "writes" if writes else "reads"
                self.report.fault(
                    Kind.HOST, f"the host {verb} pinned memory before {use} was waited for"
                )

    def transfer(self, to: Tensor, source: Tensor, use: Use) -> None:
        """Copy between pinned and device memory; data for the host arrives when it is awaited."""
        to_host = self.device_of(to) == CPU
        host = to if to_host else source
        at = Access.of(host)
        if at is None:
            return
        with self.quiet(), self.lock, torch.no_grad():
            if to_host:
                data = source.detach().to(to.dtype).expand(to.shape).clone()
                to.detach().copy_(_poison(to))
                transfer = Transfer(use, to.detach(), data, True)
            else:
                self._deliver(host, self.lane.clock)  # what this stream knows to be there
                to.detach().copy_(source)
                transfer = Transfer(use, host.detach(), host.detach().clone(), False)
            self._transfers.append(transfer)
            at.block.copies.append((at.start, at.stop, use, to_host))
            if len(self._transfers) > _MOST_TRANSFERS:
                self._transfers.pop(0).finish(self.report)

    def _deliver(self, host: Tensor, clock: Clock) -> None:
        storage = host.untyped_storage()._cdata
        for transfer in [t for t in self._transfers if t.to_host]:
            if transfer.host.untyped_storage()._cdata == storage and transfer.use.before(clock):
                self._transfers.remove(transfer)
                transfer.finish(self.report)

    def _finish_transfers(self) -> None:
        known = self.local.known
        over = [t for t in self._transfers if t.use.before(known)]
        if over:
            self._transfers = [t for t in self._transfers if not t.use.before(known)]
            with self.quiet(), torch.no_grad():
                for transfer in over:
                    transfer.finish(self.report)

    def close(self) -> None:
        """Finish all copies."""
        with self.quiet(), torch.no_grad():
            for transfer in self._transfers:
                transfer.finish(self.report)
        self._transfers = []


def _count(table: dict[str, collections.Counter[str]], name: str, number: int = 1) -> None:
    thread = threading.current_thread().name
    counter = table.get(thread)
    if counter is None:
        counter = table.setdefault(thread, collections.Counter())
    counter[name] += number


def _poison(x: Tensor) -> Tensor:
    raw = torch.full((x.numel() * x.element_size(),), POISON, dtype=torch.uint8)
    return raw.view(x.dtype).view(x.shape) if x.dtype != torch.bool else raw.bool().view(x.shape)


def now_ms() -> float:
    """Milliseconds on the host's clock."""
    return time.monotonic() * 1e3

"""Memory of the pretended device: where it is, and which operations wrote and read it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .clocks import Clock, covers
from .report import Kind, Report, Site

if TYPE_CHECKING:
    from .graphs import Tape

_MOST_USES = 64  # of a storage
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@dataclass(frozen=True, slots=True)
class Use:
    """An operation on a piece of memory."""

    stream: int
    tick: int
    name: str
    site: Site

    def before(self, clock: Clock) -> bool:
        """Whether it is over for the owner of this clock."""
        return covers(clock, self.stream, self.tick)

    def __str__(self) -> str:
        return f"{self.name} on stream {self.stream} at {self.site}"


@dataclass(frozen=True, slots=True)
class Access:
    """The bytes `start` to `stop` of a storage, which a tensor spans."""

    block: "Block"
    start: int
    stop: int

    @classmethod
    def of(cls, x: Tensor) -> "Access | None":
        """The span of a tensor; None for pageable host memory and for empty tensors."""
        block = block_of(x)
        if block is None or x.numel() == 0:
            return None
        first, size = int(x.storage_offset()), x.element_size()
        reach = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
        return cls(block, first * size, (first + reach + 1) * size)


@dataclass
class Freed:
    """Freed memory of a stream, with uses by other streams that may not be over."""

    stream: int
    uses: list[Use]


@dataclass(eq=False)
class Block:
    """State of one storage, kept as an attribute of it.

    Attributes:
        device: where it is.
        pinned: whether it is pinned host memory.
        stream: on which it was allocated.
        freed: called when it is freed with its stream and the uses by other streams; None for host
            memory and memory of graphs.
        writes: the last operations that wrote to it: (first byte, last + 1, which).
        reads: operations that read it since then.
        recorded: streams named by record_stream.
        copies: asynchronous copies of pinned memory: where, when, and whether they write to it.
        tape: the capture that allocated it in its graph's memory pool; None: no capture did.
    """

    device: torch.device
    pinned: bool = False
    stream: int = 0
    freed: "Callable[[int, list[Use]], None] | None" = None
    writes: list[tuple[int, int, Use]] = field(default_factory=list)
    reads: list[tuple[int, int, Use]] = field(default_factory=list)
    recorded: set[int] = field(default_factory=set)
    copies: list[tuple[int, int, Use, bool]] = field(default_factory=list)
    tape: "Tape | None" = None

    def read(self, at: Access, use: Use, clock: Clock, report: Report) -> None:
        """Record a read by an operation of a stream with this clock; report a race."""
        if self.tape is not None and self.tape.lost is not None:
            what = f"{use.name} reads what a graph returned before {self.tape.lost} wrote over it"
            report.fault(Kind.POOL, what, use.site)
        for start, stop, wrote in self.writes:
            if start < at.stop and at.start < stop and not wrote.before(clock):
                report.fault(Kind.RACE, f"{use.name} reads what is written by {wrote}", use.site)
        mine = [
            other
            for other in self.reads
            if other[2].stream != use.stream or other[0] < at.start or at.stop < other[1]
        ]
        self.reads = _shortened([*mine, (at.start, at.stop, use)])

    def write(self, at: Access, use: Use, clock: Clock, report: Report) -> None:
        """Record a write; report a race with earlier reads and writes."""
        for start, stop, wrote in self.writes:
            if start < at.stop and at.start < stop and not wrote.before(clock):
                report.fault(Kind.RACE, f"{use.name} writes over {wrote}", use.site)
        for start, stop, read in self.reads:
            if start < at.stop and at.start < stop and not read.before(clock):
                report.fault(Kind.RACE, f"{use.name} writes what is read by {read}", use.site)
        self.writes = [w for w in self.writes if w[0] < at.start or at.stop < w[1]]
        self.reads = [r for r in self.reads if r[0] < at.start or at.stop < r[1]]
        self.writes = _shortened([*self.writes, (at.start, at.stop, use)])

    def __del__(self) -> None:
        if self.freed is None:
            return
        uses = {use for _, _, use in (*self.reads, *self.writes)}
        others = [u for u in uses if u.stream != self.stream and u.stream not in self.recorded]
        if others:
            self.freed(self.stream, others)


def _shortened(uses: list[tuple[int, int, Use]]) -> list[tuple[int, int, Use]]:
    """The same uses; a long list is reduced to one use and one span per stream."""
    if len(uses) <= _MOST_USES:
        return uses
    found: dict[int, tuple[int, int, Use]] = {}
    for start, stop, use in uses:
        known = found.get(use.stream)
        if known is not None:
            start, stop = min(start, known[0]), max(stop, known[1])
            use = max(use, known[2], key=lambda u: u.tick)
        found[use.stream] = start, stop, use
    return list(found.values())


@dataclass(eq=False)
class Transfer:
    """An asynchronous copy between pinned and device memory that the host has not awaited.

    Attributes:
        use: when.
        host: the pinned side.
        data: content of the pinned side when the copy was issued, or what it receives.
        to_host: direction.
    """

    use: Use
    host: Tensor
    data: Tensor
    to_host: bool

    def finish(self, report: Report) -> None:
        """Deliver the data, or check that the host did not overwrite it too early."""
        if self.to_host:
            self.host.copy_(self.data)
        elif not torch.equal(as_bytes(self.host), as_bytes(self.data)):
            report.fault(
                Kind.HOST,
                f"pinned memory was written over before {self.use} was waited for",
                self.use.site,
            )


def as_bytes(x: Tensor) -> Tensor:
    """The content as bytes, so that NaN equals NaN."""
    return x.detach().contiguous().view(-1).view(torch.uint8)


def block_of(x: Tensor) -> Block | None:
    """State of a tensor's storage; None for pageable host memory."""
    found: Block | None = getattr(x.untyped_storage(), "_pretended", None)
    return found


def attach(x: Tensor, block: Block) -> Block:
    """Set the state of a tensor's storage."""
    x.untyped_storage()._pretended = block  # type: ignore[attr-defined]
    return block

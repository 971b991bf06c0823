"""What is known of a piece of memory: where it is, who wrote to it, who read it since."""

from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .clocks import Clock, covers
from .report import Kind, Report, Site

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
        """Whether it is over for whoever has this clock."""
        return covers(clock, self.stream, self.tick)

    def __str__(self) -> str:
        return f"{self.name} on stream {self.stream} at {self.site}"


@dataclass(frozen=True, slots=True)
class Access:
    """Bytes `start` to `stop` of a storage, as far as a tensor reaches."""

    block: "Block"
    start: int
    stop: int

    @classmethod
    def of(cls, x: Tensor) -> "Access | None":
        """Of a tensor's memory; None: ordinary host memory, or nothing."""
        block = block_of(x)
        if block is None or x.numel() == 0:
            return None
        first, size = x.storage_offset(), x.element_size()
        reach = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
        return cls(block, first * size, (first + reach + 1) * size)


@dataclass
class Freed:
    """Memory that went back to its stream's allocator, and who may still use it."""

    stream: int
    uses: list[Use]


@dataclass(eq=False)
class Block:
    """One storage; it lies on the storage as an attribute, and goes with it.

    Attributes:
        device: where it is.
        pinned: whether it is host memory that copies run into and out of by themselves.
        stream: on which it was allocated.
        freed: told when it goes; None: host memory, or owned by a graph.
        writes: the last operations that wrote to it: (first byte, last + 1, which).
        reads: operations that read it since then.
        recorded: streams named by record_stream.
        copies: asynchronous copies of pinned memory: what they do to it, and when.
    """

    device: torch.device
    pinned: bool = False
    stream: int = 0
    freed: "deque[Freed] | None" = None
    writes: list[tuple[int, int, Use]] = field(default_factory=list)
    reads: list[tuple[int, int, Use]] = field(default_factory=list)
    recorded: set[int] = field(default_factory=set)
    copies: list[tuple[str, Use]] = field(default_factory=list)

    def read(self, at: Access, use: Use, clock: Clock, report: Report) -> None:
        """Note a read; the clock is that of its stream."""
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
        """Note that it is written to."""
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
            self.freed.append(Freed(self.stream, others))


def _shortened(uses: list[tuple[int, int, Use]]) -> list[tuple[int, int, Use]]:
    """Not too long: else all of a stream count as one, of all bytes between them."""
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
    """An asynchronous copy between pinned and device memory, until the host knows it is over.

    Attributes:
        use: when.
        host: the host's side of it.
        data: what the host's side had then (to the device), or gets (from the device).
        to_host: which way.
    """

    use: Use
    host: Tensor
    data: Tensor
    to_host: bool

    def finish(self, report: Report) -> None:
        """The host has waited for it: deliver, or see that nobody has meddled."""
        if self.to_host:
            self.host.copy_(self.data)
        elif not torch.equal(as_bytes(self.host), as_bytes(self.data)):
            report.fault(
                Kind.HOST,
                f"pinned memory was written over before {self.use} was waited for",
                self.use.site,
            )


def as_bytes(x: Tensor) -> Tensor:
    """The same memory, or a copy in order, as bytes: NaN equals itself."""
    return x.detach().contiguous().view(-1).view(torch.uint8)


def block_of(x: Tensor) -> Block | None:
    """What is known of a tensor's memory; None: ordinary host memory."""
    found: Block | None = getattr(x.untyped_storage(), "_pretended", None)
    return found


def attach(x: Tensor, block: Block) -> Block:
    """Say what a tensor's memory is."""
    x.untyped_storage()._pretended = block  # type: ignore[attr-defined]
    return block

"""What is known of a piece of memory: where it is, who wrote to it, who read it since."""

import weakref
from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .clocks import Clock, covers
from .report import Kind, Report, Site

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@dataclass(frozen=True)
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
        wrote: the last operation that wrote to it.
        reads: of each stream, the last operation that read it since then.
        recorded: streams named by record_stream.
        copies: asynchronous copies of pinned memory: what they do to it, and when.
    """

    device: torch.device
    pinned: bool = False
    stream: int = 0
    freed: "deque[Freed] | None" = None
    wrote: Use | None = None
    reads: dict[int, Use] = field(default_factory=dict)
    recorded: set[int] = field(default_factory=set)
    copies: list[tuple[str, Use]] = field(default_factory=list)

    def read(self, use: Use, clock: Clock, report: Report) -> None:
        """Note a read; the clock is that of its stream."""
        if self.wrote is not None and not self.wrote.before(clock):
            report.fault(Kind.RACE, f"{use.name} reads what is written by {self.wrote}", use.site)
        self.reads[use.stream] = use

    def write(self, use: Use, clock: Clock, report: Report) -> None:
        """Note that it is written to."""
        if self.wrote is not None and not self.wrote.before(clock):
            report.fault(Kind.RACE, f"{use.name} writes over {self.wrote}", use.site)
        for read in self.reads.values():
            if not read.before(clock):
                report.fault(Kind.RACE, f"{use.name} writes what is read by {read}", use.site)
        self.wrote = use
        self.reads = {}

    def __del__(self) -> None:
        if self.freed is None:
            return
        uses = [*self.reads.values(), *([self.wrote] if self.wrote else [])]
        others = [u for u in uses if u.stream != self.stream and u.stream not in self.recorded]
        if others:
            self.freed.append(Freed(self.stream, others))


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


__all__ = ["CPU", "GPU", "Block", "Freed", "Transfer", "Use", "attach", "block_of", "weakref"]

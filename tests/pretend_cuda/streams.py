"""Replacements of torch.cuda's streams and events."""

import threading
from types import TracebackType
from typing import Any

from .blocks import GPU
from .clocks import Clock, covers, merge
from .machine import Lane, Machine, now_ms
from .report import Kind


class Streams:
    """Stream and event classes of one machine, and the current stream of each thread."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.Stream = _stream_class(machine)
        self.Event = _event_class(machine)
        self._default = self.Stream(_lane=machine.lanes[0])
        self._current = threading.local()

    def current(self, device: Any = None) -> Any:
        """The current stream of this thread."""
        return getattr(self._current, "stream", self._default)

    def set(self, stream: Any) -> None:
        """Make a stream the current one of this thread."""
        if stream is not None:
            self._current.stream = stream
            self._machine.local.lane = stream.lane

    def stream(self, stream: Any) -> "_Context":
        """A context in which a stream is the current one."""
        return _Context(self, stream)

    def patches(self) -> dict[str, Any]:
        """Replacements by their names in torch.cuda."""
        machine = self._machine
        return {
            "Stream": self.Stream,
            "Event": self.Event,
            "current_stream": self.current,
            "default_stream": lambda device=None: self._default,
            "set_stream": self.set,
            "stream": self.stream,
            "StreamContext": self.stream,
            "synchronize": lambda device=None: machine.all_known("torch.cuda.synchronize"),
        }


class _Context:
    def __init__(self, streams: Streams, stream: Any) -> None:
        self._streams, self.stream = streams, stream

    def __enter__(self) -> Any:
        self._before = self._streams.current()
        self._streams.set(self.stream)
        return self.stream

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._streams.set(self._before)


def _stream_class(machine: Machine) -> type:
    class Stream:
        """See torch.cuda.Stream."""

        def __init__(
            self, device: Any = None, priority: int = 0, *, _lane: Lane | None = None, **_: Any
        ) -> None:
            self.lane = _lane or machine.new_lane()
            self.priority, self.device, self.device_index = priority, GPU, 0
            self.cuda_stream = self.stream_id = self.lane.number

        def wait_stream(self, stream: "Stream") -> None:
            """Order later operations of this stream after earlier ones of another."""
            if machine.local.tape is not None:
                machine.local.tape.wait(self.lane.number, stream.lane.number)
                return
            with machine.lock:
                merge(stream.lane.clock, machine.local.known)
                merge(self.lane.clock, stream.lane.clock)

        def wait_event(self, event: Any) -> None:
            event.wait(self)

        def record_event(self, event: Any = None) -> Any:
            event = event or machine.event_class()  # type: ignore[attr-defined]
            event.record(self)
            return event

        def synchronize(self) -> None:
            machine.host_knows(self.lane.clock, "Stream.synchronize")

        def query(self) -> bool:
            machine.illegal("Stream.query")
            machine.host_knows(self.lane.clock)
            return True

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Stream) and other.lane is self.lane

        def __hash__(self) -> int:
            return self.lane.number

        def __repr__(self) -> str:
            return f"<pretended stream {self.lane.number}, priority {self.priority}>"

    return Stream


def _event_class(machine: Machine) -> type:
    class Event:
        """See torch.cuda.Event; `_clock` holds the operations that are over once it is reached."""

        def __init__(
            self,
            enable_timing: bool = False,
            blocking: bool = False,
            interprocess: bool = False,
            external: bool = False,
        ) -> None:
            self._timing = enable_timing
            self._clock: Clock | None = None
            self._mark = 0, 0
            self._at = 0.0

        def record(self, stream: Any = None) -> None:
            lane = stream.lane if stream is not None else machine.lane
            if machine.local.tape is not None:
                return  # a node of the graph
            if self._clock is None and threading.current_thread().name == "inference":
                machine.report.sync("creation of an event")
            with machine.lock:
                merge(lane.clock, machine.local.known)
                self._clock, self._at = dict(lane.clock), now_ms()
                self._mark = lane.number, lane.clock.get(lane.number, 0)

        def wait(self, stream: Any = None) -> None:
            lane = stream.lane if stream is not None else machine.lane
            if self._clock is not None:
                with machine.lock:
                    merge(lane.clock, self._clock)

        def synchronize(self) -> None:
            machine.host_knows(self._clock or {}, "Event.synchronize")

        def query(self) -> bool:
            machine.illegal("Event.query")
            if self._clock is not None:
                machine.host_knows(self._clock)
            return True

        def elapsed_time(self, end_event: "Event") -> float:
            if not (self._timing and end_event._timing):
                raise ValueError("both events must be made with enable_timing=True")
            if self._clock is None or end_event._clock is None:
                raise ValueError("both events must be recorded before calculating elapsed time")
            for event in (self, end_event):
                if not covers(machine.local.known, *event._mark):
                    machine.report.fault(Kind.HOST, "elapsed_time of an event not waited for")
            return end_event._at - self._at

    machine.event_class = Event  # type: ignore[attr-defined]
    return Event

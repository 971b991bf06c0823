"""Note, inside one process, the functions of ours that hold an observation or what is made of it.

The rule, by memory and never by a function's name:

- **Source**: arrays in the time step that the innermost `step` of an environment returns.
- **Data** is memory. A NumPy array or tensor is data if its storage overlaps storage that is data.
  Bytes and protobuf messages are data also if they contain, or are contained in, such bytes of
  another process: that is how data crosses a socket.
- **A function counts** if data is among its arguments, its closure or the attributes of `self` that
  its code names, up to five levels deep in dictionaries, lists, tuples and dataclasses; if it gives
  data to one of ours, gets it from one of ours, or holds it in a variable when it returns. Of other
  objects of ours only attributes that the code names are looked at, of arguments all.
- **New data**: what a counting function returns, passes to one of ours or stores in its arguments
  and in attributes of `self`, if it was not there before or its bytes changed. Parameters, their
  gradients, buffers of modules and optimisers' state are never data.
- **The end**: at `torch.autograd.backward` all functions on the stack stop making data, until they
  are given some again. The call itself is noted with the functions of ours on the stack.
- What an environment calls within its own `step` does not count.

Comprehensions and lambdas are part of the function around them. Memory that is data is kept alive,
so that no other array takes its place.

Settings are followed by the same hooks in a run of its own: the text of the YAML file, mappings
with three or more of its sections and the parts of these, and pydantic models; defaults that are
made while a module is imported are not the run's. A function counts if it is given settings; it
makes some if it returns settings that it was not given, and hands some on if it gives them to
one of ours.

A third kind of run notes the lines of our functions that are executed.
"""

import atexit
import bisect
import json
import os
import struct
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

OUT, CHECKOUT, MODE, SECTIONS = "WALK_OUT", "WALK_CHECKOUT", "WALK_MODE", "WALK_SECTIONS"
NOT_OURS = {"tests", "benchmarks", "proto", "examples", "docs", ".venv"}
DEPTH, ITEMS = 5, 64  # how deep, and how many items of a container, are looked at
LEAST_BYTES, MOST_BYTES = (
    16,
    4 << 20,
)  # of what is compared across processes, and checked for changes
RECENT = 256  # messages of other processes that are compared
WRITE_EVERY_S = 2.0
_FOREIGN, _BACKWARD, _OURS = 0, 1, 2
_COROUTINE = 0x80 | 0x200  # CO_COROUTINE, CO_ASYNC_GENERATOR
_OPTIMIZED = 0x1  # functions; not modules and bodies of classes
_PLAIN = (int, float, complex, str, bool, type(None), type)


class Leaf(NamedTuple):
    """Memory that one object holds.

    Attributes:
        start: first address.
        stop: address after the last.
        key: first address of the whole storage.
        end: address after the last of the whole storage.
        value: the object.
    """

    start: int
    stop: int
    key: int
    end: int
    value: Any


class Memory:
    """Disjoint ranges of addresses, kept alive."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._kept: list[Any] = []
        self._lock = threading.Lock()

    def add(self, start: int, stop: int, owner: object) -> None:
        """Add a range and keep its owner alive."""
        with self._lock:
            first = bisect.bisect_left(self._stops, start)
            last = bisect.bisect_right(self._starts, stop)
            if first < last:
                if self._starts[first] <= start and stop <= self._stops[first]:
                    return
                start = min(start, self._starts[first])
                stop = max(stop, self._stops[last - 1])
            self._starts[first:last] = [start]
            self._stops[first:last] = [stop]
            self._kept.append(owner)

    def overlaps(self, start: int, stop: int) -> bool:
        """Return whether any address of [start, stop) is in it."""
        with self._lock:
            at = bisect.bisect_left(self._starts, stop) - 1
            return at >= 0 and self._stops[at] > start


class Exchange:
    """Bytes that are data, of all traced processes: one file each, which the others read."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._own = folder, f"bytes-{os.getpid()}"
        self._file = (folder / self._own).open("ab", buffering=0)
        self._read: dict[str, int] = {}
        self._others: deque[bytes] = deque(maxlen=RECENT)
        self._lock = threading.Lock()

    def put(self, content: bytes) -> None:
        """Show bytes to the other processes."""
        if LEAST_BYTES <= len(content) <= MOST_BYTES:
            self._file.write(struct.pack("<Q", len(content)) + content)

    def knows(self, content: bytes) -> bool:
        """Return whether another process has shown these bytes, a part of them or more."""
        if len(content) < LEAST_BYTES:
            return False
        with self._lock:
            self._look()
            return any(other in content or content in other for other in self._others)

    def _look(self) -> None:
        for file in os.scandir(self._folder):
            if not file.name.startswith("bytes-") or file.name == self._own:
                continue
            at = self._read.get(file.name, 0)
            if file.stat().st_size == at:
                continue
            with open(file.path, "rb") as opened:
                opened.seek(at)
                text = opened.read()
            stop = 0
            while stop + 8 <= len(text):
                (size,) = struct.unpack_from("<Q", text, stop)
                if stop + 8 + size > len(text):
                    break
                self._others.append(text[stop + 8 : stop + 8 + size])
                stop += 8 + size
            self._read[file.name] = at + stop


class Held:
    """One call of a function of ours that has not returned.

    Attributes:
        counts: whether it has held data.
        makes: whether what it makes is data: it has held some since the last backward.
        known: first addresses of storages that it could reach when it was called.
        before: checksums of those that were no data.
        source: whether the innermost `step` of an environment has returned within.
    """

    __slots__ = ("before", "counts", "known", "makes", "source")

    def __init__(self) -> None:
        self.counts = self.makes = self.source = False
        self.known: dict[int, Leaf] = {}
        self.before: dict[int, int] = {}


class Here(threading.local):
    """State of one thread."""

    def __init__(self) -> None:
        self.name = ""
        self.step = 0  # id of the frame of the environment's step under way
        self.held: dict[int, Held] = {}


class Tracer:
    """Notes calls of functions of ours in all threads of this process."""

    def __init__(self, folder: Path, root: Path, mode: str) -> None:
        """Read what to follow; `start` sets the hooks.

        Args:
            folder: where to write.
            root: checkout with our packages.
            mode: "data", "stack" for the functions around backward alone, "settings", or "lines".
        """
        self._folder = folder
        self._root = f"{root}/"
        self._mode = mode
        self._codes: dict[CodeType, int] = {}
        self._own_types: dict[type, bool] = {}
        self._here = Here()
        self._data, self._learned = Memory(), Memory()
        self._modules: set[int] = set()
        self._exchange = Exchange(folder)
        self._source_codes: set[CodeType] = set()
        self._calls: dict[tuple[CodeType, str], list[float]] = {}
        self._counted: dict[tuple[CodeType, str], list[float]] = {}
        self._making: dict[tuple[CodeType, str], list[float]] = {}
        self._handing: dict[tuple[CodeType, str], list[float]] = {}
        self._steps: list[float] = []
        self._backwards: list[dict[str, Any]] = []
        self._lines: set[tuple[str, int]] = set()
        self._kept: dict[FrameType, int] = {}  # numbers of frames, which are kept alive
        self._sections = set(filter(None, os.environ.get(SECTIONS, "").split(",")))
        self._mappings: dict[int, Any] = {}
        self._written = time.monotonic()

    def start(self) -> None:
        """Set the hooks of this thread and of all that are started from now on."""
        atexit.register(self.write)
        if self._mode == "lines":
            threading.settrace(self._trace_hook)
            sys.settrace(self._trace_hook)
            return
        hooks = {"data": self._hook, "stack": self._stack_hook, "settings": self._settings_hook}
        hook = hooks[self._mode]
        threading.setprofile(hook)
        sys.setprofile(hook)

    # Functions

    def _kind(self, code: CodeType) -> int:
        """Return whether a function is ours, torch's backward or neither."""
        kind, file = _FOREIGN, code.co_filename
        if code.co_name in ("backward", "grad") and file.endswith("torch/autograd/__init__.py"):
            kind = _BACKWARD
        elif code.co_flags & _OPTIMIZED and file.startswith(self._root):
            top = file.removeprefix(self._root).partition("/")[0]
            if top not in NOT_OURS and not file.endswith("_pb2.py"):
                kind = _OURS
        self._codes[code] = kind
        return kind

    def _note(self, calls: dict[tuple[CodeType, str], list[float]], code: CodeType) -> None:
        here = self._here
        if not here.name:
            here.name = threading.current_thread().name
        now = round(time.monotonic(), 6)
        times = calls.setdefault((code, here.name), [])
        if not times or times[-1] != now:
            times.append(now)

    def _caller(self, frame: FrameType) -> FrameType | None:
        """Return the nearest function of ours that called this one."""
        coroutine = frame.f_code.co_flags & _COROUTINE
        back = frame.f_back
        while back is not None:
            code = back.f_code
            if "/asyncio/" in code.co_filename or (coroutine and not code.co_flags & _COROUTINE):
                return None
            if code.co_name == "<module>":  # being imported: its defaults are not the run's
                return None
            if self._codes.get(code) == _OURS:
                return back
            back = back.f_back
        return None

    # Lines

    def _trace_hook(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Return what follows the lines of a function of ours; None of others."""
        code = frame.f_code
        kind = self._codes.get(code)
        if kind is None:
            kind = self._kind(code)
        return self._line_hook if kind == _OURS else None

    def _line_hook(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            self._lines.add((self._name(frame.f_code)[0], frame.f_lineno))
            self._write_now_and_then()
        return self._line_hook

    # Data

    def _hook(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            code = frame.f_code
            kind = self._codes.get(code)
            if kind is None:
                kind = self._kind(code)
            if kind == _OURS:
                self._called(frame, code)
            elif kind == _BACKWARD:
                self._backward(frame)
        elif event == "return" and self._codes.get(frame.f_code) == _OURS:
            self._returned(frame, frame.f_code, arg)

    def _called(self, frame: FrameType, code: CodeType) -> None:
        self._note(self._calls, code)
        here = self._here
        if here.step:
            return
        held = here.held[id(frame)] = Held()
        variables = frame.f_locals
        given = [*self._leaves(variables, code, own=False)]
        reached = [*given, *self._leaves(variables, code, own=True)]
        back = self._caller(frame)
        above = None if back is None else here.held.get(id(back))
        if above is not None and above.makes:
            for leaf in given:
                if leaf.key not in above.known and not self._is_data(leaf):
                    self._add(leaf)
        for leaf in reached:
            held.known[leaf.key] = leaf
            if self._is_data(leaf):
                self._count(frame, held)
        if held.makes:
            for leaf in reached:
                if not self._is_data(leaf):
                    held.before[leaf.key] = _checksum(leaf.value)
            if back is not None and above is not None and not above.makes and self._holds(back):
                self._count(back, above)
        if code in self._source_codes:
            here.step = id(frame)

    def _returned(self, frame: FrameType, code: CodeType, value: object) -> None:
        here = self._here
        if here.step and here.step != id(frame):
            return
        here.step = 0
        held = here.held.pop(id(frame), None)
        if held is None:
            return
        returned: list[Leaf] = []
        self._scan(value, frozenset(code.co_names), returned, DEPTH, True)
        back = self._caller(frame)
        above = None if back is None else here.held.get(id(back))
        if code.co_name == "step" and _is_timestep(value) and not held.source:
            self._source_codes.add(code)
            self._steps.append(round(time.monotonic(), 6))
            for leaf in returned:
                self._add(leaf)
            self._write_now_and_then()
            if above is not None:
                above.source = True
        elif held.source and above is not None:
            above.source = True
        variables = frame.f_locals
        if not held.makes and (any(map(self._is_data, returned)) or self._holds(frame)):
            self._count(frame, held)
        if held.makes:
            given = {name: variables[name] for name in _arguments(code) if name in variables}
            stored = [
                *self._leaves(given, code, own=False),
                *self._leaves(given, code, own=True),
            ]
            for leaf in (*returned, *stored):
                if self._is_data(leaf):
                    continue
                checksum = held.before.get(leaf.key)
                new = leaf.key not in held.known
                if new or (checksum is not None and checksum != _checksum(leaf.value)):
                    self._add(leaf)
        if back is not None and above is not None and any(map(self._is_data, returned)):
            self._count(back, above)

    def _count(self, frame: FrameType, held: Held) -> None:
        held.makes = True
        if not held.counts:
            held.counts = True
            self._note(self._counted, frame.f_code)

    def _holds(self, frame: FrameType) -> bool:
        variables, code = frame.f_locals, frame.f_code
        return any(
            self._is_data(leaf)
            for own in (False, True)
            for leaf in self._leaves(variables, code, own)
        )

    def _backward(self, frame: FrameType) -> None:
        stack = []
        back: FrameType | None = frame.f_back
        while back is not None:
            if self._codes.get(back.f_code) == _OURS:
                if self._mode == "stack":
                    self._kept.setdefault(back, len(self._kept))
                stack.append([*self._name(back.f_code), self._kept.get(back, 0)])
                if (held := self._here.held.get(id(back))) is not None:
                    held.makes = False
            back = back.f_back
        if not self._here.name:
            self._here.name = threading.current_thread().name
        self._backwards.append(
            {
                "time": round(time.monotonic(), 6),
                "thread": self._here.name,
                "stack": stack[::-1],
            }
        )
        self._write_now_and_then()

    def _stack_hook(self, frame: FrameType, event: str, arg: object) -> None:
        if event == "call":
            code = frame.f_code
            kind = self._codes.get(code)
            if (self._kind(code) if kind is None else kind) == _BACKWARD:
                self._backward(frame)

    # Memory

    def _is_data(self, leaf: Leaf) -> bool:
        if self._data.overlaps(leaf.start, leaf.stop):
            return True
        content = _content(leaf.value)
        if content is not None and self._exchange.knows(content):
            self._add(leaf)
            return True
        return False

    def _add(self, leaf: Leaf) -> None:
        if self._learned.overlaps(leaf.start, leaf.stop):
            return
        owner = leaf.value.obj if isinstance(leaf.value, memoryview) else leaf.value
        self._data.add(leaf.key, leaf.end, owner)
        content = _content(leaf.value)
        if content is not None:
            self._exchange.put(content)

    def _leaves(self, variables: dict[str, Any], code: CodeType, own: bool) -> Iterator[Leaf]:
        """Yield memory that a function's variables hold, or (`own`) its `self`."""
        names = frozenset(code.co_names)
        arguments = _arguments(code)
        for name, value in variables.items():
            if (name == "self") != own:
                continue
            found: list[Leaf] = []
            if own:
                self._scan_named(value, names, found, DEPTH)
            else:
                self._scan(value, names, found, DEPTH, name in arguments)
            yield from found

    def _scan(
        self,
        value: Any,
        names: frozenset[str],
        found: list[Leaf],
        depth: int,
        whole: bool,
    ) -> None:
        """Append the memory that a value holds.

        Args:
            value: anything.
            names: attributes that the function's code names.
            found: list to append to.
            depth: levels left.
            whole: whether all attributes of a plain object are looked at.
        """
        kind = type(value)
        if kind in _PLAIN:
            return
        leaf = self._leaf(value)
        if leaf is not None:
            found.append(leaf)
            return
        if depth == 0:
            return
        try:
            if isinstance(value, dict):
                for part in islice(value.values(), ITEMS):
                    self._scan(part, names, found, depth - 1, False)
            elif isinstance(value, list | tuple | deque):
                for part in islice(value, ITEMS):
                    self._scan(part, names, found, depth - 1, False)
            elif self._is_learned(value):
                return
            elif hasattr(kind, "__dataclass_fields__"):
                for name in kind.__dataclass_fields__:
                    self._scan(_attribute(value, name), names, found, depth - 1, False)
            elif self._is_ours(kind):
                if whole:
                    for part in [*getattr(value, "__dict__", {}).values()]:
                        if not self._is_ours(type(part)):
                            self._scan(part, names, found, depth - 1, False)
                else:
                    self._scan_named(value, names, found, depth)
        except RuntimeError:  # another thread changed it meanwhile
            return

    def _scan_named(
        self,
        value: Any,
        names: frozenset[str],
        found: list[Leaf],
        depth: int,
    ) -> None:
        """Append the memory of those attributes of an object that the code names."""
        if depth == 0 or isinstance(value, _PLAIN):
            return
        kept = getattr(value, "__dict__", None)
        present = names & kept.keys() if kept is not None else ()
        slots = [s for s in names if isinstance(getattr(type(value), s, None), _SLOT)]
        for name in (*present, *slots):
            self._scan(_attribute(value, name), names, found, depth - 1, False)

    def _is_ours(self, kind: type) -> bool:
        known = self._own_types.get(kind)
        if known is None:
            module = sys.modules.get(kind.__module__)
            file = getattr(module, "__file__", None) or ""
            known = file.startswith(self._root)
            self._own_types[kind] = known
        return known

    def _is_learned(self, value: Any) -> bool:
        """Return whether it is a network or an optimiser; keeps its tensors from being data."""
        torch = sys.modules.get("torch")
        if torch is None or not hasattr(torch, "optim"):
            return False
        if isinstance(value, torch.nn.Module):
            if id(value) not in self._modules:
                self._modules.add(id(value))
                for parameter in value.parameters():
                    self._leaf(parameter)
            for buffer in [*value._buffers.values()]:
                if buffer is not None and (leaf := self._leaf(buffer)):
                    self._learned.add(leaf.key, leaf.end, buffer)
            return True
        if isinstance(value, torch.optim.Optimizer):
            for state in [*value.state.values()]:
                for tensor in [*state.values()] if isinstance(state, dict) else []:
                    if isinstance(tensor, torch.Tensor) and (leaf := self._leaf(tensor)):
                        self._learned.add(leaf.key, leaf.end, tensor)
            return True
        return isinstance(value, torch.Generator)

    def _leaf(self, value: Any) -> Leaf | None:
        """Return the memory of an array, a tensor, bytes or a message; None of anything else."""
        numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
        if isinstance(value, bytes | bytearray | memoryview):
            if numpy is None or len(value) < LEAST_BYTES:
                return None
            try:
                value_ = numpy.frombuffer(value, numpy.uint8)
            except (ValueError, BufferError):
                return None
            start = value_.__array_interface__["data"][0]
            return Leaf(start, start + value_.nbytes, start, start + value_.nbytes, value)
        if numpy is not None and isinstance(value, getattr(numpy, "ndarray", ())):
            if value.dtype.hasobject or not value.nbytes:
                return None
            root = value
            while isinstance(root.base, numpy.ndarray):
                root = root.base
            return Leaf(*_bounds(value), *_bounds(root), value)
        if torch is not None and isinstance(value, getattr(torch, "Tensor", ())):
            return self._tensor(torch, value)
        message = sys.modules.get("google.protobuf.message")
        if message is not None and isinstance(value, message.Message):
            return Leaf(id(value), id(value) + 16, id(value), id(value) + 16, value)
        return None

    def _tensor(self, torch: Any, value: Any) -> Leaf | None:
        try:
            storage = value.untyped_storage()
            start, size = storage.data_ptr(), storage.nbytes()
        except (RuntimeError, NotImplementedError):
            return None
        if not start or not size:
            return None
        if isinstance(value, torch.nn.Parameter):
            self._learned.add(start, start + size, value)
            if (gradient := value.grad) is not None and (leaf := self._tensor(torch, gradient)):
                self._learned.add(leaf.key, leaf.end, gradient)
            return None
        if self._learned.overlaps(start, start + size):
            return None
        return Leaf(start, start + size, start, start + size, value)

    # Settings

    def _settings_hook(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        kind = self._codes.get(code)
        if kind is None:
            kind = self._kind(code)
        if kind != _OURS:
            return
        if event == "call":
            self._note(self._calls, code)
            held = self._here.held[id(frame)] = Held()
            held.known = self._settings(frame.f_locals, code)
            if held.known:
                self._count(frame, held)
                back = self._caller(frame)
                if back is not None and self._here.held.get(id(back), held).counts:
                    self._note(self._handing, back.f_code)
        elif event == "return":
            held = self._here.held.pop(id(frame), None) or Held()
            given: dict[int, Any] = {}
            self._find_settings(arg, given, 3)
            made = given.keys() - held.known.keys()
            if given and not held.counts:
                self._count(frame, held)
            if made:
                self._note(self._making, code)
            if code.co_name == "step" and _is_timestep(arg):
                self._steps.append(round(time.monotonic(), 6))
                self._write_now_and_then()
            if given and (back := self._caller(frame)) is not None:
                above = self._here.held.get(id(back))
                if above is not None and not above.counts:
                    self._count(back, above)

    def _settings(self, variables: dict[str, Any], code: CodeType) -> dict[int, Any]:
        found: dict[int, Any] = {}
        for name, value in variables.items():
            if name == "self" and not self._is_settings(value):
                kept = getattr(value, "__dict__", {})
                for attribute in set(code.co_names) & kept.keys():
                    self._find_settings(kept[attribute], found, 2)
            else:
                self._find_settings(value, found, 3)
        return found

    def _find_settings(self, value: Any, found: dict[int, Any], depth: int) -> None:
        if self._is_settings(value):
            found[id(value)] = value
        elif depth and isinstance(value, list | tuple):
            for part in islice(value, ITEMS):
                self._find_settings(part, found, depth - 1)
        elif depth and isinstance(value, dict):
            for part in islice([*value.values()], ITEMS):
                self._find_settings(part, found, depth - 1)

    def _is_settings(self, value: Any) -> bool:
        if isinstance(value, str):
            return len(value) > 60 and all(f"{name}" in value for name in self._sections)
        if isinstance(value, dict):
            known = id(value) in self._mappings
            parts = (value.get(name) for name in self._sections)
            known = known or sum(map(self._is_part, parts)) >= 3
            if known:
                self._mappings[id(value)] = value
                for part in value.values():
                    if isinstance(part, dict):
                        self._mappings[id(part)] = part
            return known
        return self._is_part(value) and self._is_ours(type(value))

    @staticmethod
    def _is_part(value: object) -> bool:
        """Return whether it may be a section: a mapping, or a pydantic model."""
        model = getattr(sys.modules.get("pydantic"), "BaseModel", dict)
        return isinstance(value, dict | model)

    # Results

    def _name(self, code: CodeType) -> tuple[str, int, str]:
        return code.co_filename.removeprefix(self._root), code.co_firstlineno, code.co_qualname

    def _write_now_and_then(self) -> None:
        """Write so often that a process that is killed has written nearly all."""
        if time.monotonic() - self._written > WRITE_EVERY_S:
            self.write()

    def write(self) -> None:
        """Write what was noted so far."""
        self._written = time.monotonic()

        def rows(calls: dict[tuple[CodeType, str], list[float]]) -> list[list[Any]]:
            return [
                [*self._name(code), thread, times] for (code, thread), times in [*calls.items()]
            ]

        found = {
            "pid": os.getpid(),
            "command": [*sys.orig_argv],
            "calls": rows(self._calls),
            "counted": rows(self._counted),
            "making": rows(self._making),
            "handing": rows(self._handing),
            "lines": [*self._lines.copy()],
            "steps": self._steps,
            "backwards": self._backwards,
        }
        file = self._folder / f"walk-{os.getpid()}.json"
        part = file.with_suffix(f".{threading.get_ident()}")
        part.write_text(json.dumps(found))
        part.replace(file)


class _Slotted:
    __slots__ = ("slot",)


_SLOT = type(_Slotted.slot)


def _arguments(code: CodeType) -> tuple[str, ...]:
    """Return the names of a function's arguments, *args and **kwargs included."""
    variadic = bool(code.co_flags & 0x4) + bool(code.co_flags & 0x8)
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + variadic]


def _attribute(value: Any, name: str) -> Any:
    """Return an attribute without running a property; None if there is none."""
    kept = getattr(value, "__dict__", None)
    if kept is not None and name in kept:
        return kept[name]
    if isinstance(getattr(type(value), name, None), _SLOT):
        return getattr(value, name, None)
    return None


def _bounds(array: Any) -> tuple[int, int]:
    low = high = array.__array_interface__["data"][0]
    for size, stride in zip(array.shape, array.strides, strict=True):
        reach = (size - 1) * stride
        low, high = (low + reach, high) if reach < 0 else (low, high + reach)
    return low, high + array.itemsize


def _content(value: Any) -> bytes | None:
    """Return the bytes of bytes and messages; None of arrays."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, bytearray | memoryview):
        return bytes(value) if len(value) <= MOST_BYTES else None
    if hasattr(value, "SerializePartialToString"):
        content: bytes = value.SerializePartialToString()
        return content
    return None


def _checksum(value: Any) -> int:
    """Return a checksum of what it holds; 0 of anything too large."""
    content = _content(value)
    if content is not None:
        return zlib.crc32(content)
    try:
        if hasattr(value, "untyped_storage"):
            if value.device.type != "cpu" or value.untyped_storage().nbytes() > MOST_BYTES:
                return 0
            flat = value.detach().new_empty(0).set_(value.untyped_storage())
            return zlib.crc32(flat.numpy().tobytes())
        return 0 if value.nbytes > MOST_BYTES else zlib.crc32(value.tobytes())
    except (RuntimeError, TypeError, ValueError):
        return 0


def _is_timestep(value: object) -> bool:
    fields = ("observation", "reward", "discount", "step_type")
    return all(hasattr(value, name) for name in fields)


def start() -> None:
    """Follow data in this process, if it was asked for."""
    folder, root = os.environ.get(OUT), os.environ.get(CHECKOUT)
    if folder and root:
        Tracer(Path(folder), Path(root), os.environ.get(MODE, "data")).start()

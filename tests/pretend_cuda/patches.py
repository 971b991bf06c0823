"""Installs the pretended device in torch for the time of a context."""

import contextlib
import importlib
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch

from .blocks import GPU, block_of
from .clocks import merge
from .dispatch import Dispatch
from .functions import Functions
from .graphs import Graphs
from .machine import Machine
from .report import Kind, Report
from .streams import Streams

FOLDERS = ("learner_service", "murmur", "shared", "tests", "env_service")
_GIB = 2**30


@contextlib.contextmanager
def pretend_cuda(
    allowed: Mapping[str, str] | None = None,
    folders: tuple[str, ...] = FOLDERS,
    *,
    raises: bool = False,
    hollow: bool = False,
) -> Iterator[Machine]:
    """A context in which torch has a pretended CUDA device, also in threads started in it.

    Args:
        allowed: qualified names of functions that may synchronise, each with the reason.
        folders: see Report.
        raises: what is illegal in a graph raises RuntimeError, as CUDA does; else it is reported.
        hollow: matrix products and convolutions give zeros, to count what is launched.
    """
    importlib.import_module("torch._dynamo")  # optimisers do; it must find torch as it is
    machine = Machine(Report(allowed or {}, folders), raises=raises, hollow=hollow)
    with contextlib.ExitStack() as stack:
        for target, name, new in _replacements(machine):
            stack.enter_context(mock.patch.object(target, name, new))
        stack.enter_context(_in_threads(machine))
        stack.enter_context(modes(machine))
        yield machine
        machine.close()


@contextlib.contextmanager
def modes(machine: Machine) -> Iterator[None]:
    """Activates the modes in this thread."""
    with Functions(machine), Dispatch(machine):
        yield


@contextlib.contextmanager
def _in_threads(machine: Machine) -> Iterator[None]:
    """Activates the modes in new threads; start and join hand over what is known to be over."""
    start, join = threading.Thread.start, threading.Thread.join

    def started(thread: threading.Thread) -> None:
        run, before = thread.run, dict(machine.local.known)

        def inner() -> None:
            merge(machine.local.known, before)
            try:
                with modes(machine):
                    run()
            finally:
                thread._knew = dict(machine.local.known)  # type: ignore[attr-defined]

        thread.run = inner  # type: ignore[method-assign]
        start(thread)

    def joined(thread: threading.Thread, timeout: float | None = None) -> None:
        join(thread, timeout)
        merge(machine.local.known, getattr(thread, "_knew", {}))

    with (
        mock.patch.object(threading.Thread, "start", started),
        mock.patch.object(threading.Thread, "join", joined),
    ):
        yield


class Generator(torch.Generator):
    """A generator that names its device and draws on the CPU."""

    at: torch.device

    def __new__(cls, device: Any = "cpu") -> "Generator":
        made = super().__new__(cls)
        made.at = GPU if torch.device(device).type == "cuda" else torch.device(device)
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The pretended device."""
        return self.at

    def graphsafe_set_state(self, state: torch.Generator) -> None:
        """Continue as another generator would."""
        self.set_state(state.get_state())


class Autocast(torch.autocast):
    """Autocast of the CPU, for both devices."""

    def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
        super().__init__("cpu" if device_type == "cuda" else device_type, *args, **kwargs)


def _replacements(machine: Machine) -> Iterator[tuple[Any, str, Any]]:
    streams = Streams(machine)
    for name, new in {
        **streams.patches(),
        **Graphs(machine, streams).patches(),
        **_device_facts(),
    }.items():
        yield torch.cuda, name, new
    yield torch.Tensor, "record_stream", _record_stream
    yield torch, "Generator", Generator
    yield torch, "set_float32_matmul_precision", lambda _: None
    for name in ("range_push", "range_pop", "mark"):
        yield torch.cuda.nvtx, name, lambda *_, **__: None
    yield torch, "autocast", Autocast
    yield torch.amp, "autocast", Autocast
    name = "_group_tensors_by_device_and_dtype"
    for place in (
        "torch.nn.utils.clip_grad",
        "torch.optim.optimizer",
        "torch.utils._foreach_utils",
    ):
        module = importlib.import_module(place)
        yield module, name, _grouped(machine, getattr(module, name))


def _record_stream(x: torch.Tensor, stream: Any) -> None:
    block = block_of(x)
    if block is not None:
        block.recorded.add(stream.lane.number)


def _grouped(machine: Machine, group: Callable[..., Any]) -> Callable[..., Any]:
    def grouped(lists: Any, with_indices: bool = False) -> Any:
        found = {}
        for (_, dtype), (parts, indices) in group(lists, with_indices).items():
            places = {machine.device_of(x) for part in parts for x in part if x is not None}
            if len(places) > 1:
                machine.report.fault(Kind.MIX, "a list of tensors")
            found[machine.device_of(parts[0][0]), dtype] = parts, indices
        return found

    return grouped


def _device_facts() -> dict[str, Any]:
    properties = types.SimpleNamespace(
        name="Pretended", uuid="GPU-pretended", total_memory=64 * _GIB, major=9, minor=0
    )
    properties.multi_processor_count = 100

    def nothing(*_: Any, **__: Any) -> None:
        pass

    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": nothing,
        "_lazy_init": nothing,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": nothing,
        "device": lambda *_: contextlib.nullcontext(),
        "get_device_properties": lambda *_: properties,
        "get_device_name": lambda *_: properties.name,
        "get_device_capability": lambda *_: (9, 0),
        "is_bf16_supported": lambda including_emulation=True: True,
        "mem_get_info": lambda *_: (60 * _GIB, 64 * _GIB),
        "memory_allocated": lambda *_: 0,
        "memory_reserved": lambda *_: 0,
        "max_memory_allocated": lambda *_: 0,
        "max_memory_reserved": lambda *_: 0,
        "reset_peak_memory_stats": nothing,
        "empty_cache": nothing,
        "manual_seed": nothing,
        "manual_seed_all": nothing,
    }

"""CUDA graphs: functions of named tensors, captured once per input shape, replayed in one launch.

A step of small networks is some hundred kernels of a few microseconds each. Launched one by one
from Python, the device waits for the host most of the time.

    graphs = Graphs(device)                      # one for each thread that uses the device
    learn = Captured("update", learn_rows, graphs, [generator])
    outputs = learn(rows, moves_policy=True)     # eager at first, then captured, then replayed

Where a capture fails, the function stays eager for a while, then it is tried again, a few times.
Nothing else changes: weights and generators are then as if every call had been eager.

NCCL wants a collective captured on all ranks or on none. Ranks of a group agree, before each call
of a function that exchanges something, whether it is eager, captured or replayed.
"""

import threading
import time
import weakref
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from murmur.learner_service.ranks.group import ALONE, Group
from murmur.shared.process.process import logger

WARM_UP_CALLS = 3  # make optimiser states; let libraries choose kernels and take workspaces
CALLS_TO_CAPTURE = WARM_UP_CALLS + 1
_MAX_GRAPHS = 8  # of one function
_MOST_WARMED = 64
_MOST_SEEN = 4096
# Failed captures of a function before it stays eager for good, and eager calls after the first of
# them; after each further one there are _RETRY_LATER times as many.
_MOST_FAILURES, _RETRY_CALLS, _RETRY_LATER = 3, 256, 8
NEVER = -1  # calls until the next capture of a function that is not captured again
# One thread at a time captures, or calls libraries eagerly for the first time with a shape: that
# may do what CUDA forbids while any stream is captured (cuDNN's tuning does), and then both threads
# fail. Also the default generator and the allocator serve one capture at a time.
_LIBRARIES = threading.RLock()
_EAGER, _DUE, _CAPTURED = range(3)  # what a call can be: without a graph, captured, replayed

Outputs = dict[str, Tensor]


class Graphs:
    """Stream, memory and counts that the captured functions of one thread share.

    Two threads must not share one. Their replays may run at the same time, and graphs of one
    `Graphs` use the same memory and the same library workspaces.

    Attributes:
        enabled: whether to capture; may be set to False before the first call.
        replays: graph launches by function.
        captures: graphs captured by function.
        capture_s: seconds of the host in captures, the failed ones included, by function.
        signatures: signatures seen by function: more than graphs where shapes keep changing.
        eager_calls: calls without a graph by function, the ones before a capture included.
        fallbacks: failed captures by (function, reason), the reason "memory" or "capture".
        eager_s: seconds of the host in eager calls, by function.
        retry_calls: eager calls until a function is captured again after a failure: 0 once it was
            captured, NEVER if it is not tried again.
        group: group of the ranks that functions may exchange something with.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        enabled: bool = True,
        priority: int = 0,
        group: Group = ALONE,
    ) -> None:
        """Capture nothing yet.

        Args:
            device: graphs exist on CUDA alone; on other devices every call is eager.
            enabled: False keeps every call eager.
            priority: priority of the capturing stream; kernels keep it when replayed.
            group: group of the ranks that functions may exchange something with.
        """
        self._device = device
        self._priority = priority
        self.group = group
        self.enabled = enabled and device.type == "cuda"
        self.replays: Counter[str] = Counter()
        self.eager_calls: Counter[str] = Counter()
        self.fallbacks: Counter[tuple[str, ...]] = Counter()
        self.eager_s: defaultdict[str, float] = defaultdict(float)
        self.capture_s: defaultdict[str, float] = defaultdict(float)
        self.retry_calls: dict[str, int] = {}
        self._pool: Any = None
        self.captures: Counter[str] = Counter()
        self.signatures: Counter[str] = Counter()
        self._live: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        self._functions: weakref.WeakSet[Captured] = weakref.WeakSet()
        self._seen: set[tuple[Hashable, ...]] = set()  # shapes of calls that libraries know
        group.before_close(self.reset)

    def reset(self) -> None:
        """Drop all graphs, for example because the tensors that they work on were replaced."""
        for function in self._functions:
            function.reset()

    def counts(self) -> dict[str, dict[tuple[str, ...], float]]:
        """Copies of the counts: metric -> labels -> count or seconds. Called by any thread."""
        by_function: dict[str, Mapping[str, float]] = {
            "graph_replays": self.replays,
            "graph_captures": self.captures,
            "graph_capture_seconds": self.capture_s,
            "graph_signatures": self.signatures,
            "graph_retry_calls": self.retry_calls,
            "eager_calls": self.eager_calls,
            "eager_seconds": self.eager_s,
        }
        return {
            **{
                metric: {(name,): n for name, n in dict(counted).items()}
                for metric, counted in by_function.items()
            },
            "graph_fallbacks": dict(self.fallbacks),
        }

    @property
    def unsettled(self) -> int:
        """Eager calls and captures so far: while it grows, times are not those of replays.

        0 where nothing is captured: nothing else is to come.
        """
        if not self.enabled:
            return 0
        counts = self.counts()
        return int(sum((*counts["eager_calls"].values(), *counts["graph_captures"].values())))

    def add(self, function: "Captured") -> None:
        """Include a function in `reset`."""
        self._functions.add(function)

    def eager(self, *shape: Hashable) -> AbstractContextManager[Any]:
        """A context for calls that are not made through a captured function.

        Args:
            shape: shape of the call, and all else that libraries may choose by: only the first
                call of each waits for other threads' captures. None: every call does.
        """
        if not self.enabled or shape in self._seen:
            return nullcontext()
        if shape:
            if len(self._seen) == _MOST_SEEN:
                self._seen.clear()
            self._seen.add(shape)
        return _LIBRARIES

    @cached_property
    def stream(self) -> torch.cuda.Stream:
        """Stream of warm-up calls and of captures; never the default stream."""
        return torch.cuda.Stream(self._device, priority=self._priority)  # type: ignore[no-untyped-call]

    def capture(
        self, function: Callable[[], Outputs], generators: Sequence[torch.Generator]
    ) -> "tuple[torch.cuda.CUDAGraph, Outputs]":
        """Record the kernels of a call; nothing is computed.

        Args:
            function: calls what is captured.
            generators: random generators that it draws from.

        Returns:
            the graph, and the call's outputs, which each replay overwrites.

        Raises:
            RuntimeError: if the call cannot be captured; generators are as before.
        """
        kept = [(g, g.clone_state()) for g in (*generators, *torch.cuda.default_generators)]
        graph = torch.cuda.CUDAGraph()
        if not self._live:  # a pool cannot be used again once its last graph is gone
            self._pool = torch.cuda.graph_pool_handle()
        try:
            with _LIBRARIES:
                for generator in generators:
                    graph.register_generator_state(generator)
                # Other threads may replay and copy meanwhile; only this one must not synchronise.
                with torch.cuda.graph(
                    graph,
                    pool=self._pool,
                    stream=self.stream,
                    capture_error_mode="thread_local",
                ):
                    outputs = function()
        except RuntimeError:
            self._stop_capturing(kept)
            raise
        self._live.add(graph)
        return graph, outputs

    def _stop_capturing(self, kept: Iterable[tuple[torch.Generator, torch.Generator]]) -> None:
        """Undo what an invalidated capture leaves behind in the allocator and the generators."""
        end = getattr(torch._C, "_cuda_endAllocateToPool", None)
        if end is not None and self._device.type == "cuda":
            # It raises where the capture ended in order and only its contents were at fault.
            with suppress(RuntimeError):
                end(self._device.index or 0, self._pool)
        for generator, before in kept:
            if generator.device.type == "cuda":
                # A new state object: the old one may count as being captured for ever.
                generator.graphsafe_set_state(before)
            else:
                generator.set_state(before.get_state())
        self.reset()  # other graphs still advance the old state objects


@dataclass
class _Signature:
    """Calls of one shape.

    Attributes:
        calls: eager ones so far.
        graph: None until captured.
        inputs: tensors that the graph reads.
        outputs: tensors that it writes.
    """

    calls: int = 0
    graph: "torch.cuda.CUDAGraph | None" = None
    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: Outputs = field(default_factory=dict)


class Captured:
    """Calls a function eagerly a few times per input signature, captures it, then replays it.

    Every call does the function's work exactly once. The function must do all of it on the device:
    no synchronisation, no copy from or to the host, no host state that changes from call to call.
    It may change tensors that outlive it only in place. Not thread-safe: see Graphs.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Outputs],
        graphs: Graphs,
        generators: Sequence[torch.Generator] = (),
        *,
        warm_up_calls: int = WARM_UP_CALLS,
        max_graphs: int = _MAX_GRAPHS,
        in_place: bool = False,
        recover: Callable[[], None] | None = None,
    ) -> None:
        """Wrap a function.

        Args:
            name: name in metrics and the log.
            function: function from named tensors, and options by keyword, to named tensors.
            graphs: Graphs of the calling thread.
            generators: random generators on the device that the function draws from.
            warm_up_calls: eager calls per signature before its capture, at least 1.
            max_graphs: signatures kept; the least recently used one leaves.
            in_place: capture on the caller's own tensors, without a copy: the caller writes the
                next inputs to the same addresses, which are then part of the signature.
            recover: called after a failed capture: resets host state that the function left half
                changed.
        """
        assert warm_up_calls >= 1
        self._name = name
        self._function = function
        self._graphs = graphs
        self._generators, self._warm_up_calls = tuple(generators), warm_up_calls
        self._max_graphs = max_graphs
        self._in_place = in_place
        self._recover = recover
        self._failures = self._eager_for = 0  # failed captures; eager calls until the next
        self._exchanges = False  # with other ranks, as its first call shows
        self._signatures: OrderedDict[Hashable, _Signature] = OrderedDict()
        self._warmed: dict[Hashable, int] = {}  # eager calls of signatures that have left
        graphs.add(self)

    def reset(self) -> None:
        """Drop the graphs, for example because tensors they work on were replaced."""
        self._signatures.clear()
        self._warmed.clear()

    def __call__(self, inputs: Mapping[str, Tensor], **options: Hashable) -> Outputs:
        """Call the function.

        Args:
            inputs: tensors on the device. Every signature (names, shapes, types, options) has a
                graph of its own.
            options: passed on by keyword; constants of the captured graph.

        Returns:
            the function's outputs. Another call of any function with the same `Graphs` may
            overwrite them.
        """
        signature, kind = None, _EAGER
        if self._graphs.enabled:
            signature = self._signature(inputs, options)
            kind = self._agreed(signature)
            if kind == _DUE and not self._capture(signature, inputs, options):
                kind = _EAGER
        if signature is None or kind == _EAGER:
            with self._eager(signature):
                return self._function(inputs, **options)
        assert signature.graph is not None
        if not self._in_place:
            copy_by_type(signature.inputs, inputs)
        signature.graph.replay()
        self._graphs.replays[self._name] += 1
        return dict(signature.outputs)

    def _agreed(self, signature: _Signature) -> int:
        """Return the kind of a call, the same on all ranks if the function exchanges something.

        Shapes, and captures that fail, may be a rank's own.
        """
        kind = _DUE
        if signature.graph is not None:
            kind = _CAPTURED
        elif signature.calls < self._warm_up_calls or self._eager_for:
            kind = _EAGER
        if not self._exchanges:
            return kind
        return round(self._graphs.group.agree({"kind": kind}, "min")["kind"])

    def prepare(self, inputs: Mapping[str, Tensor], **options: Hashable) -> None:
        """Capture if the next call with these would, so that it need not under a caller's locks."""
        if not self._graphs.enabled or self._eager_for or self._exchanges:
            return  # ranks capture together, in a call
        signature = self._signature(inputs, options)
        if signature.graph is None and signature.calls >= self._warm_up_calls:
            self._capture(signature, inputs, options)

    def _signature(
        self, inputs: Mapping[str, Tensor], options: Mapping[str, Hashable]
    ) -> _Signature:
        """The entry of these shapes, as the most recently used one."""
        shapes: list[Hashable] = [(name, x.shape, x.dtype) for name, x in inputs.items()]
        if self._in_place:
            shapes += [(x.data_ptr(), x.stride()) for x in inputs.values()]
        key = (*shapes, *options.items())
        if key not in self._signatures:
            if len(self._signatures) == self._max_graphs:
                left, signature = self._signatures.popitem(last=False)
                self._warmed[left] = signature.calls  # libraries know the shape
                while len(self._warmed) > _MOST_WARMED:
                    del self._warmed[next(iter(self._warmed))]
            self._graphs.signatures[self._name] += key not in self._warmed
            self._signatures[key] = _Signature(self._warmed.pop(key, 0))
        self._signatures.move_to_end(key)
        return self._signatures[key]

    @contextmanager
    def _eager(self, signature: _Signature | None) -> Iterator[None]:
        """Count a call without a graph, and its time.

        Autograd and the libraries remember the stream that they were first used on: the first calls
        of a signature run on that of captures.

        Args:
            signature: entry of the call's shapes; None: nothing is captured.
        """
        began = time.perf_counter()
        if signature is None or signature.calls == self._warm_up_calls:
            if signature is not None and self._eager_for and self._failures < _MOST_FAILURES:
                self._eager_for -= 1
                self._graphs.retry_calls[self._name] = self._eager_for
            yield
        else:
            signature.calls += 1
            collectives = self._graphs.group.calls
            stream, current = self._graphs.stream, torch.cuda.current_stream()
            stream.wait_stream(current)
            with self._graphs.eager(), torch.cuda.stream(stream):
                yield
            current.wait_stream(stream)
            self._exchanges |= self._graphs.group.calls > collectives
        self._graphs.eager_calls[self._name] += 1
        self._graphs.eager_s[self._name] += time.perf_counter() - began

    def _capture(
        self,
        signature: _Signature,
        inputs: Mapping[str, Tensor],
        options: Mapping[str, Hashable],
    ) -> bool:
        """Capture this signature; returns False if that failed, here or on another rank."""
        signature.graph = None  # another rank has lost its own
        given = inputs if self._in_place else {name: x.clone() for name, x in inputs.items()}
        signature.inputs = dict(given)
        failed: RuntimeError | None = None
        began = time.perf_counter()
        try:
            signature.graph, signature.outputs = self._graphs.capture(
                lambda: self._function(signature.inputs, **options), self._generators
            )
        except RuntimeError as error:
            failed = error
        finally:
            self._graphs.capture_s[self._name] += time.perf_counter() - began
        if self._exchanges and not self._graphs.group.all_ranks(failed is None):
            signature.graph = None
            failed = failed or RuntimeError("another rank could not capture it")
        if failed is not None:
            self._fail(failed)
            return False
        self._graphs.captures[self._name] += 1
        if self._failures:
            self._graphs.retry_calls[self._name] = 0
        return True

    def _fail(self, error: RuntimeError) -> None:
        """Stay eager for a while; log why."""
        self._eager_for = _RETRY_CALLS * _RETRY_LATER**self._failures
        self._failures += 1
        again = self._eager_for if self._failures < _MOST_FAILURES else NEVER
        self._graphs.retry_calls[self._name] = again
        cause: BaseException = error
        while isinstance(cause.__context__, RuntimeError):  # leaving the capture raises once more
            cause = cause.__context__
        reason = "memory" if isinstance(cause, torch.OutOfMemoryError) else "capture"
        self._graphs.fallbacks[self._name, reason] += 1
        logger.warning(
            "the CUDA graph of '%s' cannot be captured (%s): %s; its kernels are launched one by "
            "one%s, which is slower. learner.cuda_graph=false does not try",
            self._name,
            reason,
            " ".join(str(cause).split()) or type(cause).__name__,
            f" for {self._eager_for} calls" if self._failures < _MOST_FAILURES else " from now on",
        )
        if self._recover is not None:
            self._recover()


def copy_by_type(targets: Mapping[str, Tensor], sources: Mapping[str, Tensor]) -> None:
    """Copy tensors to those of the same names: one launch for each data type if both are dense."""
    copy_all([targets[name] for name in sources], [*sources.values()])


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors of the same shapes: one launch for each data type."""
    by_type: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        to, of = by_type.setdefault(source.dtype, ([], []))
        to.append(target)
        of.append(source)
    for to, of in by_type.values():
        torch._foreach_copy_(to, of)

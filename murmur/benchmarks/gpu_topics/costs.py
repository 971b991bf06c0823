"""Topic `costs`: times of kernels, launches, replays and copies on this device and host.

The predictions of all other topics assume such costs. And an act beside a thread that replays the
kernels of an update, as one graph or as many, and reads its values: neither may hold up the other.
"""

import threading
import time
from collections.abc import Callable

import torch

from murmur.benchmarks.gpu_topics.figures import NODE_US, TB_PER_S, Figure, Value
from murmur.benchmarks.gpu_topics.parts import quantile, synchronize
from murmur.benchmarks.gpu_topics.topics import Context
from murmur.learner_service.device.cuda_graph import Captured, Graphs, Outputs

_NODE, _ADD = "costs: a small kernel within a graph, µs", "costs: add_ from Python, µs of the host"
_REPLAY = "costs: a replay, µs of the host"
_TFLOPS, _MEMORY = "costs: products in TF32, TFLOP/s", "costs: memory, TB/s"
_GIB = 2**30
_ROWS, _WIDTH, _SCALARS = 480, 256, 16
# Kernels of an update, graphs that they are in, how its values are read; and the 99th percentile of
# an act beside it that was measured on an H100, in ms.
_BESIDE = (
    *((54_000, 1, "pinned", 0.13), (54_000, 720, "pinned", 0.16)),
    *((54_000, 1, "tolist", 0.25), (3_600, 48, "tolist", 0.16)),
)
_BESIDE_S = 1.5


def plan_costs(context: Context) -> list[Figure]:
    """Plan the costs that the predictions assume, and acts beside updates."""
    del context
    figures = [
        Figure(_NODE, expected=NODE_US),
        Figure(_ADD, expected=5.0),
        Figure(_REPLAY, expected=7.5),
        Figure(_TFLOPS, expected=400.0),
        Figure(_MEMORY, expected=TB_PER_S),
    ]
    return figures + [
        Figure(_beside(kernels, pieces, read), 5.0, expected=ms, before=ms)
        for kernels, pieces, read, ms in _BESIDE
    ]


def _beside(kernels: int, pieces: int, read: str) -> str:
    what = f"{kernels:,} kernels in {pieces} graph{'s' if pieces > 1 else ''}, read by {read}"
    return f"an act beside {what}: p99, ms"


def costs(context: Context) -> dict[str, Value]:
    """Measure times of kernels, launches, replays and copies on this device and host."""
    device = torch.device(context.device)
    repeats, kernels = context.effort.choose(2, 20, 50), context.effort.choose(4, 1000, 1000)
    with torch.inference_mode():
        values: dict[str, Value] = {}
        chain = _chain(device, kernels)
        graph = Captured("chain", lambda given: chain(), Graphs(device))
        synchronized = _microseconds(lambda: graph({}), device, repeats)
        values[_NODE] = synchronized / kernels
        of_two = _chain(device, 2)
        short = Captured("short", lambda given: of_two(), Graphs(device))
        values[_REPLAY] = _microseconds(lambda: short({}), device, 10 * repeats, wait=False)
        x = torch.zeros(_ROWS, _WIDTH, device=device)
        values[_ADD] = _microseconds(lambda: x.add_(1), device, 10 * repeats, wait=False)
        side = context.effort.choose(16, 8192, 8192)
        a = torch.randn(side, side, device=device)
        product = _microseconds(lambda: a @ a, device, repeats)
        values[_TFLOPS] = 2 * side**3 / product / 1e6
        size = context.effort.choose(1024, _GIB, _GIB)
        source = torch.empty(size, dtype=torch.uint8, device=device)
        to = torch.empty_like(source)
        moved = _microseconds(lambda: to.copy_(source), device, repeats)
        values[_MEMORY] = 2 * size / moved / 1e6
    context.save(values)
    for kernels, pieces, read, _ in context.effort.choose(_BESIDE[1:2], _BESIDE, _BESIDE):
        of_each, number = context.effort.choose((4, 2), *[(kernels // pieces, pieces)] * 2)
        times = _acts_beside(device, of_each, number, read, context.share(_BESIDE_S))
        values[_beside(kernels, pieces, read)] = quantile(times, 0.99)
        context.save(values)
    return values


def _chain(device: torch.device, kernels: int) -> Callable[[], Outputs]:
    """Return a function of this number of small kernels, each of which needs the one before."""
    x = torch.randn(_ROWS, _WIDTH, device=device)
    weight = torch.randn(_WIDTH, _WIDTH, device=device) * _WIDTH**-0.5
    product, positive = torch.empty_like(x), torch.empty_like(x)

    def call() -> Outputs:
        torch.mm(x, weight, out=product)
        for _ in range((kernels - 2) // 2):
            torch.clamp_min(product, 0, out=positive)
            torch.mm(positive, weight, out=product)
        torch.clamp_min(product, 0, out=positive)
        return {"out": positive}

    return call


def _microseconds(
    call: Callable[[], object], device: torch.device, repeats: int, *, wait: bool = True
) -> float:
    """Measure the mean time of a call [µs] after some that do not count.

    Args:
        call: call to measure.
        device: device on which the call works.
        repeats: number of calls that count.
        wait: flag to count the device's work; else the host's alone.
    """
    for _ in range(6):  # eager ones, the capture, a replay
        call()
    synchronize(device)
    started = time.perf_counter()
    for _ in range(repeats):
        call()
    if wait:
        synchronize(device)
    took = time.perf_counter() - started
    synchronize(device)
    return 1e6 * took / repeats


def _acts_beside(
    device: torch.device, kernels: int, pieces: int, read: str, seconds: float
) -> list[float]:
    """Measure times of acts [ms] while another thread makes updates all the time.

    Args:
        device: device of acts and updates.
        kernels: number of kernels of a graph.
        pieces: number of replays of an update.
        read: way of an update's values to the host, "tolist" or "pinned".
        seconds: length of the measurement [s].
    """
    cuda = device.type == "cuda"
    stop, times = threading.Event(), list[float]()
    ready = threading.Event()
    failed: list[BaseException] = []

    # Updates: one thread on a stream of low priority, as the learner thread has it.
    def learn() -> None:
        try:
            with torch.inference_mode(), _stream(device, 0):
                chain = _chain(device, kernels)
                update = Captured("learn", lambda given: chain(), Graphs(device))
                host, event = torch.empty(_SCALARS), _event(device)
                host = host.pin_memory() if cuda else host
                while not stop.is_set():
                    for _ in range(pieces):
                        found = update({})["out"].flatten()[:_SCALARS]
                    if read == "tolist":
                        found.tolist()
                    else:
                        host.copy_(found, non_blocking=cuda)
                        if event is not None:
                            event.record()
                            event.synchronize()
                    ready.set()
        except BaseException as error:
            failed.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=learn, name="learner")
    thread.start()
    try:
        with torch.inference_mode(), _stream(device, -1):
            chain = _chain(device, 22)
            act = Captured("act", lambda given: chain(), Graphs(device, priority=-1))
            to, back = torch.zeros(_ROWS, _WIDTH), torch.zeros(_ROWS, _WIDTH)
            if cuda:
                to, back = to.pin_memory(), back.pin_memory()
            here = torch.zeros(_ROWS, _WIDTH, device=device)
            event = _event(device)
            for _ in range(6):
                act({})
            ready.wait()
            end = time.monotonic() + seconds
            # Acts, on a stream of high priority: copy in, replay, copy back, wait for the copy.
            while not times or time.monotonic() < end:
                started = time.perf_counter()
                here.copy_(to, non_blocking=cuda)
                back.copy_(act({})["out"], non_blocking=cuda)
                if event is not None:
                    event.record()
                    event.synchronize()
                times.append(1e3 * (time.perf_counter() - started))
                time.sleep(0.002)
    finally:
        stop.set()
        thread.join()
        synchronize(device)
    if failed:
        raise failed[0]
    return times


def _event(device: torch.device) -> torch.cuda.Event | None:
    """Return an event of the device; None for the CPU."""
    return torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def _stream(device: torch.device, priority: int) -> "torch.cuda.StreamContext":
    """Return a context of a new stream; for the CPU one without effect."""
    stream = torch.cuda.Stream(device, priority=priority) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
    return torch.cuda.stream(stream)

"""Topics about updates: launches, eager and captured, MASAC's sizes, precision, equality."""

import copy
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from learner_service.runtime.device import half_precision
from learner_service.tools.precision import fastest
from murmur.benchmarks import masac_update
from murmur.benchmarks.effort import Effort
from murmur.benchmarks.gpu_topics.figures import (
    CASES,
    EAGER_US,
    SMALL,
    SMALL_REPLAY,
    Case,
    Figure,
    Value,
)
from murmur.benchmarks.gpu_topics.parts import Actor, Trial, attempt

_TERRAIN = ("coma, terrain-reference", "coma, terrain-published")
_PRECISIONS = ("fp32", "bf16", "fp16")
_MASAC_AGENTS = (2, 4, 8, 16)
# Launches of MASAC's stacked update, whatever the agents; by agents, those of the sequential scheme
# and GFLOP of the stacked update.
_MASAC_LAUNCHES = 302
_MASAC_SEQUENTIAL = {2: 1056, 4: 2470, 8: 6378, 16: 18514}
_MASAC_GFLOP = {2: 1.2, 4: 2.4, 8: 5.4, 16: 12.8}
_UPDATES_COMPARED = 20
_ERROR = "error: "


@dataclass(frozen=True)
class Context:
    """How a topic measures.

    Attributes:
        device: "cuda" or "cpu".
        effort: how carefully.
        known: figures of an earlier call, which are not measured again.
        keep: given all figures so far, now and then.
    """

    device: str
    effort: Effort
    known: Mapping[str, Value] = field(default_factory=dict)
    keep: Callable[[dict[str, Value]], None] = lambda figures: None

    def has(self, subject: str) -> bool:
        """Whether an earlier call has measured a subject, whose figures begin with its name."""
        return any(name.startswith(f"{subject}: ") for name in self.known)

    def save(self, figures: Mapping[str, Value]) -> None:
        """Keep what there is so far."""
        self.keep({**self.known, **figures})

    @property
    def cases(self) -> tuple[Case, ...]:
        """What is measured."""
        return self.effort.choose((SMALL, SMALL_REPLAY), CASES, CASES)

    def share(self, seconds: float) -> float:
        """A time budget by effort."""
        return self.effort.choose(0.05, 0.4 * seconds, seconds)


def _by_case(
    context: Context, measure: Callable[[Case], Iterator[tuple[str, Value]]]
) -> dict[str, Value]:
    """Figures of all cases; one that fails has its error as a figure, and the others continue."""
    values: dict[str, Value] = {}
    for case in context.cases:
        if context.has(case.name):
            continue

        def work(case: Case = case) -> None:
            for name, value in measure(case):
                values[name] = value

        if error := attempt(work):
            values[f"{case.name}: {measure.__name__.strip('_')}"] = _ERROR + error
        context.save(values)
        if context.device == "cuda":
            torch.cuda.empty_cache()
    return values


def is_error(value: Value) -> bool:
    """Whether a figure is the error of what should have measured it."""
    return str(value).startswith(_ERROR)


def without_errors(known: Mapping[str, Value]) -> dict[str, Value]:
    """Figures of the subjects that had no error: the others are measured again."""
    failed = {name.split(": ")[0] for name, value in known.items() if is_error(value)}
    return {name: v for name, v in known.items() if name.split(": ")[0] not in failed}


# ---------------------------------------------------------------- launches


def plan_launches(context: Context) -> list[Figure]:
    """What an update and an act launch, eagerly and captured."""
    figures = []
    for case in context.cases:
        update = case.counted("update, fp32", case.launches)
        act = case.counted("act, 1 sessions", case.act_launches)
        figures += [
            Figure(f"{case.name}: launches of an eager update", expected=update),
            Figure(f"{case.name}: launches of a captured update"),
            Figure(f"{case.name}: waits in the driver of a captured update", 0, expected=0),
            Figure(f"{case.name}: launches of an act", expected=act),
        ]
    return figures


def launches(context: Context) -> dict[str, Value]:
    """Launches, copies and waits, on CUDA as its profiler sees them; elsewhere ATen operations."""

    def counts(case: Case) -> Iterator[tuple[str, Value]]:
        eager = Trial(case, context.device, graphs=False)
        count, _ = _launched(partial(eager.algorithm.update, eager.sample()), context)
        yield f"{case.name}: launches of an eager update", count
        count, _ = _launched(Actor(eager, 1), context)
        yield f"{case.name}: launches of an act", count
        captured = Trial(case, context.device)
        captured.update_ms(1, context.share(1))
        captured.probe.fill()
        count, waits = _launched(captured.probe.update, context)
        yield f"{case.name}: launches of a captured update", count
        yield f"{case.name}: waits in the driver of a captured update", waits

    return _by_case(context, counts)


def _launched(call: Callable[[], object], context: Context) -> tuple[int, int | None]:
    """Launches of kernels and graphs, copies and memsets of a call; waits for the device."""
    if context.device != "cuda":
        return masac_update.count_operations(call).total(), None
    kinds = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with profile(activities=kinds) as profiler:
        call()
    counted = {event.key: event.count for event in profiler.key_averages()}
    return calls_of(counted)


def calls_of(counted: Mapping[str, int]) -> tuple[int, int]:
    """Launches, and waits that hold up other threads, among calls of CUDA's library.

    Args:
        counted: calls by name, other operations among them.
    """
    launching = re.compile(r"cu(da)?(LaunchKernel|GraphLaunch|Memcpy|Memset)\w*")
    # Waits for events hold up no other thread. The profiler itself waits by cudaDeviceSynchronize.
    waiting = re.compile(r"cu(da)?StreamSynchronize|cudaMemcpy")
    launches = sum(n for name, n in counted.items() if launching.fullmatch(name))
    return launches, sum(n for name, n in counted.items() if waiting.fullmatch(name))


# ---------------------------------------------------------------- updates


def plan_updates(context: Context) -> list[Figure]:
    """Eager against captured updates of every algorithm."""
    figures = []
    for case in context.cases:
        goal = 20.0 if case.name in _TERRAIN else None
        eager, captured = case.eager_ms, case.captured_ms
        figures += [
            Figure(f"{case.name}: eager update, ms", expected=eager),
            Figure(f"{case.name}: captured update, ms", goal, expected=captured),
            Figure(
                f"{case.name}: eager / captured",
                expected=eager / captured if eager and captured else None,
            ),
            Figure(f"{case.name}: graph replays an update"),
            Figure(f"{case.name}: until a captured update is launched, ms"),
            Figure(f"{case.name}: peak of device memory, MiB"),
        ]
    return figures


def updates(context: Context) -> dict[str, Value]:
    """Median times."""
    repeats = context.effort.choose(1, 10, 40)

    def update(case: Case) -> Iterator[tuple[str, Value]]:
        if context.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        eager = Trial(case, context.device, graphs=False).update_ms(repeats, context.share(3))
        yield f"{case.name}: eager update, ms", eager
        trial = Trial(case, context.device)
        captured = trial.update_ms(repeats, context.share(3))
        replays, failed = trial.calls()
        yield f"{case.name}: captured update, ms", captured
        yield f"{case.name}: eager / captured", eager / captured
        before, _ = trial.calls()
        trial.probe.fill()
        trial.probe.update()
        yield f"{case.name}: graph replays an update", trial.calls()[0] - before
        yield f"{case.name}: until a captured update is launched, ms", trial.launch_ms(repeats // 8)
        if failed or (context.device == "cuda" and not replays):
            yield f"{case.name}: not captured", failed or "no part of it is"
        if context.device == "cuda":
            peak = torch.cuda.max_memory_allocated() / 2**20
            yield f"{case.name}: peak of device memory, MiB", peak

    return _by_case(context, update)


# ---------------------------------------------------------------- MASAC by agents


def plan_masac(context: Context) -> list[Figure]:
    """Eager, captured and sequential updates by the number of agents."""
    figures = []
    sizes = {
        n: Case("", "", launches=_MASAC_LAUNCHES, gflop=_MASAC_GFLOP[n]) for n in _MASAC_AGENTS
    }
    for n in _masac_sizes(context):
        eager, captured = sizes[n].eager_ms, sizes[n].captured_ms
        assert eager is not None
        assert captured is not None
        sequential = _MASAC_SEQUENTIAL[n] * EAGER_US / 1e3
        figures += [
            Figure(f"MASAC {n} agents: eager, ms", expected=eager),
            Figure(f"MASAC {n} agents: captured, ms", expected=captured),
            Figure(
                f"MASAC {n} agents: eager / captured",
                5.7 if n == 8 else None,
                ">=",
                eager / captured,
            ),
            Figure(
                f"MASAC {n} agents: sequential / captured",
                10.0 if n == 4 else None,
                ">=",
                sequential / captured,
            ),
        ]
    ratio = (sizes[16].captured_ms or 0.0) / (sizes[2].captured_ms or 1.0)
    return [*figures, Figure("MASAC captured: 16 agents / 2 agents", 1.5, expected=ratio)]


def _masac_sizes(context: Context) -> tuple[int, ...]:
    return context.effort.choose((2,), _MASAC_AGENTS, _MASAC_AGENTS)


def masac(context: Context) -> dict[str, Value]:
    """Batch 256, two layers of 256, networks of each agent's own: see masac_update."""
    device = torch.device(context.device)
    repeats = context.effort.choose(1, 20, 200)
    values: dict[str, Value] = {}
    for n in _masac_sizes(context):
        subject = f"MASAC {n} agents"
        if context.has(subject):
            continue
        rows = masac_update.batch(n, device)
        captured, eager = (masac_update.make(n, "fp32", device) for _ in range(2))
        eager.graphs.enabled = False
        sequential = masac_update.sequential_update(n, "fp32", device)
        ms = {
            "captured": _call_ms(partial(captured.update, rows), repeats, context),
            "eager": _call_ms(partial(eager.update, rows), repeats, context),
            "sequential": _call_ms(partial(sequential, rows), repeats // 20, context),
        }
        values |= {f"{subject}: {name}, ms": value for name, value in ms.items()}
        for name in ("eager", "sequential"):
            values[f"{subject}: {name} / captured"] = ms[name] / ms["captured"]
        context.save(values)
    values = {**context.known, **values}
    sizes = [values.get(f"MASAC {n} agents: captured, ms") for n in (2, 16)]
    if all(isinstance(size, float) for size in sizes):
        values["MASAC captured: 16 agents / 2 agents"] = sizes[1] / sizes[0]  # type: ignore[operator]
    return values


def _call_ms(call: Callable[[], object], repeats: int, context: Context) -> float:
    """Mean time of a call, waiting for the device once at the end."""
    device = torch.device(context.device)

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    for _ in range(context.effort.choose(1, 6, 10)):
        call()
    wait()
    started = time.perf_counter()
    for _ in range(max(repeats, 1)):
        call()
    wait()
    return 1e3 * (time.perf_counter() - started) / max(repeats, 1)


# ---------------------------------------------------------------- precision


def plan_precision(context: Context) -> list[Figure]:
    """Time of a captured update in each precision, and the fastest."""
    figures = []
    for case in context.cases:
        figures += [Figure(f"{case.name}: {p}, ms") for p in _PRECISIONS]
        likely = "bf16" if case.roofline_ms > 1 else "fp32"
        figures.append(Figure(f"{case.name}: fastest precision", expected=likely))
        figures.append(Figure(f"{case.name}: precision by auto", expected=likely))
    return figures


def precision(context: Context) -> dict[str, Value]:
    """fp32 means TF32 on CUDA."""
    repeats = context.effort.choose(1, 8, 20)

    def in_each(case: Case) -> Iterator[tuple[str, Value]]:
        names = _PRECISIONS if context.device == "cuda" else ("fp32", "bf16")
        ms = {}
        for name in names:
            trial = Trial(case, context.device, precision=name)
            ms[name] = trial.update_ms(repeats, context.share(1.5))
            yield f"{case.name}: {name}, ms", ms[name]
            del trial
        yield f"{case.name}: fastest precision", min(ms, key=lambda name: ms[name])
        if context.device == "cuda":  # by the rule of learner.precision: auto
            two = {name: ms[name] for name in ("fp32", half_precision())}
            yield f"{case.name}: precision by auto", fastest(two)

    return _by_case(context, in_each)


# ---------------------------------------------------------------- captured = eager


def plan_equality(context: Context) -> list[Figure]:
    """Captured and eager updates of the same batches."""
    figures = []
    for case in context.cases:
        figures.append(Figure(f"{case.name}: largest difference of a weight", 1e-3, expected=0.0))
        figures.append(Figure(f"{case.name}: random numbers equal", True, "=", True))
    return figures


def equality(context: Context) -> dict[str, Value]:
    """Two algorithms of one seed; after the last update their weights and generators."""
    count = context.effort.choose(2, _UPDATES_COMPARED, _UPDATES_COMPARED)

    def compare(case: Case) -> Iterator[tuple[str, Value]]:
        torch.manual_seed(0)
        captured = Trial(case, context.device)
        torch.manual_seed(0)
        eager = Trial(case, context.device, graphs=False)
        deadline, done = time.monotonic() + context.share(5), 0
        for _ in range(count):
            batch = captured.sample()
            same = copy.deepcopy(batch)
            captured.algorithm.update(batch)
            eager.algorithm.update(same)
            captured.probe.storage.done(batch)
            done += 1
            if time.monotonic() > deadline:
                break
        a, b = captured.algorithm.state_dict(), eager.algorithm.state_dict()
        differences = [(x - y).abs().max().item() for x, y in _pairs(a["parts"], b["parts"])]
        yield f"{case.name}: largest difference of a weight", max(differences, default=0.0)
        same_numbers = torch.equal(a["generator"], b["generator"])
        yield f"{case.name}: random numbers equal", same_numbers
        if done < count:
            yield f"{case.name}: updates compared", done

    return _by_case(context, compare)


def _pairs(a: Any, b: Any) -> Iterator[tuple[Tensor, Tensor]]:  # noqa: ANN401 - nested states
    """Floating tensors of two equal structures, side by side."""
    if isinstance(a, Mapping):
        for key, value in a.items():
            yield from _pairs(value, b[key])
    elif isinstance(a, list | tuple):
        for x, y in zip(a, b, strict=True):
            yield from _pairs(x, y)
    elif isinstance(a, Tensor) and a.is_floating_point() and a.numel():
        yield a, b.to(a.device)

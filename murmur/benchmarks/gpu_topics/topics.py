"""Topics about updates: launches, eager and captured, MASAC's sizes, precision, equality."""

import copy
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from murmur.benchmarks import masac_update
from murmur.benchmarks.effort import Effort
from murmur.benchmarks.gpu_topics.figures import (
    CASES,
    OF_A_RUN,
    SMALL,
    SMALL_REPLAY,
    Case,
    Count,
    Figure,
    Value,
)
from murmur.benchmarks.gpu_topics.parts import Actor, Trial, attempt
from murmur.learner_service.device.device import half_precision
from murmur.learner_service.tuning.resolve import fastest

_PRECISIONS = ("fp32", "bf16", "fp16")
_MASAC, _MASAC_AGENTS = "MASAC, formation, 2x256", (16, 2, 8, 4)
_MASAC_OUTSIDE = 2  # launches of a captured update whose batch is there: its copy, the replay
# Agents for which the sequential scheme is timed, too, and its launches.
_COMPARED_AGENTS, _MASAC_SEQUENTIAL = 4, 2470
_UPDATES_COMPARED = 20
LAUNCHING = r"cu(da)?(LaunchKernel|GraphLaunch|Memcpy|Memset)\w*"  # calls of CUDA's library
_ERROR = "error: "


@dataclass(frozen=True)
class Context:
    """Settings of a topic's measurement.

    Attributes:
        device: "cuda" or "cpu".
        effort: extent of the measurement.
        known: figures of an earlier call, which are not measured again.
        keep: function called now and then with all figures so far, and whether these are all.
        end: time of the topic's end, in time.monotonic() seconds.
    """

    device: str
    effort: Effort
    known: Mapping[str, Value] = field(default_factory=dict)
    keep: Callable[[dict[str, Value], bool], None] = lambda figures, whole: None
    end: float = math.inf

    def has(self, subject: str) -> bool:
        """Return whether an earlier call measured a subject: figures that begin with its name."""
        return any(name.startswith(f"{subject}: ") for name in self.known)

    def save(self, figures: Mapping[str, Value], *, whole: bool = False) -> None:
        """Keep the figures so far.

        Args:
            figures: figures measured by this call.
            whole: True if nothing is left to measure, and the rest of the topic may be cut short.
        """
        self.keep({**self.known, **figures}, whole)

    def left_s(self) -> float:
        """Return the seconds until the topic is ended."""
        return self.end - time.monotonic()

    @property
    def cases(self) -> tuple[Case, ...]:
        """Return the cases to measure."""
        return self.effort.choose((SMALL, SMALL_REPLAY), CASES, CASES)

    def share(self, seconds: float) -> float:
        """Return a time budget by effort [s]."""
        return self.effort.choose(0.05, 0.4 * seconds, seconds)


def _by_case(
    context: Context, measure: Callable[[Case], Iterator[tuple[str, Value]]]
) -> dict[str, Value]:
    """Return figures of all cases; the error of a case that fails is its figure."""
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
    """Return whether a figure is an error instead of a measurement."""
    return str(value).startswith(_ERROR)


def without_errors(known: Mapping[str, Value]) -> dict[str, Value]:
    """Return the figures of the subjects without an error; the others are measured again."""
    failed = {name.split(": ")[0] for name, value in known.items() if is_error(value)}
    return {name: v for name, v in known.items() if name.split(": ")[0] not in failed}


# ---------------------------------------------------------------- launches


def plan_launches(context: Context) -> list[Figure]:
    """Plan the figures of the launches of an update and of an act."""
    figures = []
    for case in context.cases:
        update, act = case.counted(OF_A_RUN), case.counted("act, 1 sessions")
        figures += [
            Figure(
                f"{case.name}: launches of an update, replays of graphs included",
                expected=update.launches if update else None,
            ),
            Figure(
                f"{case.name}: waits in the driver of an update",
                0,
                expected=0,
            ),
            Figure(
                f"{case.name}: launches of an act, not captured",
                expected=act.launches if act else None,
            ),
        ]
    return figures


def launches(context: Context) -> dict[str, Value]:
    """Count launches, copies and waits on CUDA by its profiler; elsewhere ATen operations."""

    def counts(case: Case) -> Iterator[tuple[str, Value]]:
        trial = Trial(case, context.device)
        trial.update_ms(1, 0.0)
        trial.probe.fill()
        count, waits = _launched(trial.probe.update, context)
        yield f"{case.name}: launches of an update, replays of graphs included", count
        yield f"{case.name}: waits in the driver of an update", waits
        count, _ = _launched(Actor(trial, 1), context)
        yield f"{case.name}: launches of an act, not captured", count

    return _by_case(context, counts)


def _launched(call: Callable[[], object], context: Context) -> tuple[int, int | None]:
    """Count launches of kernels and graphs, copies and memsets of a call; waits for the device."""
    if context.device != "cuda":
        return masac_update.count_operations(call).total(), None
    kinds = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with profile(activities=kinds) as profiler:
        call()
    counted = {event.key: event.count for event in profiler.key_averages()}
    return calls_of(counted)


def calls_of(counted: Mapping[str, int]) -> tuple[int, int]:
    """Count launches, and waits that hold up other threads, among calls of CUDA's library.

    Args:
        counted: calls by name, other operations among them.
    """
    # Waits for events hold up no other thread. The profiler itself waits by cudaDeviceSynchronize.
    waiting = re.compile(r"cu(da)?StreamSynchronize|cudaMemcpy")
    launches = sum(n for name, n in counted.items() if re.fullmatch(LAUNCHING, name))
    return launches, sum(n for name, n in counted.items() if waiting.fullmatch(name))


# ---------------------------------------------------------------- updates


def plan_updates(context: Context) -> list[Figure]:
    """Plan captured updates of every algorithm, as a run makes them."""
    figures = []
    for case in context.cases:
        count, goal = case.counted(OF_A_RUN), case.goal_ms
        figures += [
            Figure(
                f"{case.name}: update of a run, ms",
                goal,
                "<=",
                case.captured_ms,
                case.before_ms,
                case.old_goal,
            ),
            Figure(f"{case.name}: environment rows of it", expected=count.rows if count else None),
            Figure(f"{case.name}: graph replays of it", expected=count.graphs if count else None),
            Figure(f"{case.name}: until it is launched, ms"),
            Figure(f"{case.name}: captures before"),
            Figure(f"{case.name}: their seconds"),
            Figure(f"{case.name}: peak of device memory, MiB"),
        ]
    return figures


def updates(context: Context) -> dict[str, Value]:
    """Measure median times, with the batch's drawing and the reading of scalars."""
    repeats = context.effort.choose(1, 10, 40)

    def update(case: Case) -> Iterator[tuple[str, Value]]:
        if context.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        trial = Trial(case, context.device)
        yield f"{case.name}: update of a run, ms", trial.update_ms(repeats, context.share(2))
        before, failed = trial.calls()
        captures, seconds = trial.captures()
        trial.probe.fill()
        sampled = trial.probe.storage.sample(0, 0.0)
        assert sampled is not None
        batch = trial.algorithm.transforms.batch(sampled)
        yield f"{case.name}: environment rows of it", batch.size
        trial.algorithm.update(batch)
        trial.probe.storage.done(batch)
        replays = trial.calls()[0] - before
        yield f"{case.name}: graph replays of it", replays
        yield f"{case.name}: captures before", captures
        yield f"{case.name}: their seconds", seconds
        yield (
            f"{case.name}: until it is launched, ms",
            trial.launch_ms(repeats // 8, context.share(1)),
        )
        if failed or (context.device == "cuda" and not replays):
            yield f"{case.name}: not captured", failed or "no part of it is"
        trial.probe.wait()
        if context.device == "cuda":
            peak = torch.cuda.max_memory_allocated() / 2**20
            yield f"{case.name}: peak of device memory, MiB", peak

    return _by_case(context, update)


# ---------------------------------------------------------------- MASAC by agents


def plan_masac(context: Context) -> list[Figure]:
    """Plan eager and captured updates by the number of agents, and the sequential scheme."""
    (case,) = (case for case in CASES if case.preset == _MASAC)
    counted = case.counted(OF_A_RUN)
    nodes = counted.nodes if counted else 0
    captured = Count(_MASAC_OUTSIDE, nodes).ms if nodes else None
    eager = Count(nodes).ms if nodes else None
    figures = []
    for n in _masac_sizes(context):
        name = f"MASAC {n} agents"
        goal = 0.9 if n == _MASAC_AGENTS[0] else None
        old = "<= 1.5 times that of 2 agents" if goal else ""
        figures += [
            Figure(f"{name}: captured, ms", goal, "<=", captured, old_goal=old),
            Figure(f"{name}: eager, ms", expected=eager),
            Figure(
                f"{name}: eager / captured", 5.7 if n == 8 else None, ">=", _over(eager, captured)
            ),
        ]
        if n == _COMPARED_AGENTS:
            sequential = Count(_MASAC_SEQUENTIAL).ms
            figures.append(
                Figure(f"{name}: sequential / captured", 10.0, ">=", _over(sequential, captured))
            )
    return [*figures, Figure("MASAC captured: 16 agents / 2 agents")]


def _over(a: float | None, b: float | None) -> float | None:
    return a / b if a and b else None


def _masac_sizes(context: Context) -> tuple[int, ...]:
    return context.effort.choose((2,), _MASAC_AGENTS, _MASAC_AGENTS)


def masac(context: Context) -> dict[str, Value]:
    """Measure batch 256, two layers of 256, networks of each agent's own: see masac_update."""
    device = torch.device(context.device)
    repeats = context.effort.choose(1, 20, 200)
    compared = context.effort.choose(2, _COMPARED_AGENTS, _COMPARED_AGENTS)
    values: dict[str, Value] = {}
    for n in _masac_sizes(context):
        subject = f"MASAC {n} agents"
        if context.has(subject):
            continue
        rows = masac_update.batch(n, device)
        captured, eager = (masac_update.make(n, "fp32", device) for _ in range(2))
        eager.graphs.enabled = False
        captured_ms = _call_ms(partial(captured.update, rows), repeats, context)
        others = {"eager": _call_ms(partial(eager.update, rows), repeats, context)}
        if n == compared:
            sequential = masac_update.sequential_update(n, "fp32", device)
            others["sequential"] = _call_ms(partial(sequential, rows), repeats // 20, context)
        values[f"{subject}: captured, ms"] = captured_ms
        for name, ms in others.items():
            values[f"{subject}: {name}, ms"] = ms
            values[f"{subject}: {name} / captured"] = ms / captured_ms
        context.save(values)
    values = {**context.known, **values}
    sizes = [values.get(f"MASAC {n} agents: captured, ms") for n in (2, 16)]
    if all(isinstance(size, float) for size in sizes):
        values["MASAC captured: 16 agents / 2 agents"] = sizes[1] / sizes[0]  # type: ignore[operator]
    return values


def _call_ms(call: Callable[[], object], repeats: int, context: Context) -> float:
    """Measure the mean time of a call [ms], waiting for the device once at the end."""
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
    """Plan the time of a captured update in each precision, and the fastest."""
    figures = []
    for case in context.cases:
        figures += [Figure(f"{case.name}: {p}, ms") for p in _PRECISIONS]
        likely = "bf16" if case.arithmetic_bound else "fp32"
        figures.append(Figure(f"{case.name}: fastest precision", expected=likely))
        figures.append(Figure(f"{case.name}: precision by auto", expected=likely))
    return figures


def precision(context: Context) -> dict[str, Value]:
    """Measure updates by precision; fp32 means TF32 on CUDA."""
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
    """Plan captured and eager updates of the same batches."""
    figures = []
    for case in context.cases:
        figures.append(Figure(f"{case.name}: largest difference of a weight", 1e-3, expected=0.0))
        figures.append(Figure(f"{case.name}: random numbers equal", True, "=", True))
    return figures


def equality(context: Context) -> dict[str, Value]:
    """Compare weights and generators of two algorithms of one seed after the last update."""
    count = context.effort.choose(2, _UPDATES_COMPARED, _UPDATES_COMPARED)

    def compare(case: Case) -> Iterator[tuple[str, Value]]:
        torch.manual_seed(0)
        captured = Trial(case, context.device, workers=1)  # an eager update of a run takes long
        torch.manual_seed(0)
        eager = Trial(case, context.device, graphs=False, workers=1)
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
        largest = torch.tensor([0.0, *differences]).max().item()  # max() would lose NaN
        yield f"{case.name}: largest difference of a weight", largest
        same_numbers = torch.equal(a["generator"], b["generator"])
        yield f"{case.name}: random numbers equal", same_numbers
        if done < count:
            yield f"{case.name}: updates compared", done

    return _by_case(context, compare)


def _pairs(a: Any, b: Any) -> Iterator[tuple[Tensor, Tensor]]:  # noqa: ANN401 - nested states
    """Yield pairs of floating tensors at the same place of two equal structures."""
    if isinstance(a, Mapping):
        for key, value in a.items():
            yield from _pairs(value, b[key])
    elif isinstance(a, list | tuple):
        for x, y in zip(a, b, strict=True):
            yield from _pairs(x, y)
    elif isinstance(a, Tensor) and a.is_floating_point() and a.numel():
        yield a, b.to(a.device)

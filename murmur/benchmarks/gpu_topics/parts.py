"""Trials that the topics share: an algorithm with synthetic rows, its updates and acts timed."""

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from murmur.benchmarks.gpu_topics.figures import Case
from murmur.env_service.environment import make_environment
from murmur.learner_service.device.cuda_graph import CALLS_TO_CAPTURE
from murmur.learner_service.tuning.probe import Probe
from murmur.shared.config.files import load
from murmur.shared.wire.spec import ACTION_MASK, AGENT_MASK, TURN_MASK, EnvSpec

_WARM_UPDATES = CALLS_TO_CAPTURE + 2  # at most: eager calls, the capture, a replay


class Trial:
    """An algorithm of a case on a device, and synthetic rows for it.

    Attributes:
        spec: specification of the environment.
        probe: source of synthetic rows and updates.
    """

    def __init__(
        self,
        case: Case,
        device: str,
        *,
        precision: str = "fp32",
        graphs: bool = True,
        workers: int | None = None,
    ) -> None:
        """Build it as a run would.

        Args:
            case: case to build.
            device: "cuda" or "cpu".
            precision: precision of the networks.
            graphs: flag to capture updates.
            workers: number of environment processes behind an update's rows; None: the case's.
        """
        fixed = [
            *(f"learner.device={device}", f"learner.precision={precision}"),
            f"learner.cuda_graph={str(graphs).lower()}",
        ]
        workers = case.workers if workers is None else workers
        fixed += [f"env_server.num_workers={workers}"] if workers else []
        config = load(case.config, [*case.changes, *fixed], {})
        self.device = torch.device(device)
        self.spec = make_environment(config.environment, 1).spec
        self.probe = Probe(config, self.spec)

    @property
    def algorithm(self) -> Any:  # noqa: ANN401 - any algorithm
        """The algorithm."""
        return self.probe.algorithm

    def sample(self) -> Any:  # noqa: ANN401 - a batch of any storage
        """Return a batch of synthetic rows."""
        self.probe.fill()
        batch = self.probe.storage.sample(0, 0.0)
        assert batch is not None
        return self.algorithm.transforms.batch(batch)

    def update_ms(self, repeats: int, budget_s: float) -> float:
        """Measure the median time of an update [ms] on rows that are there already.

        The first updates, in which something is called eagerly or captured, do not count.
        """
        for _ in range(_WARM_UPDATES):
            before = self._made()
            self._timed_update()
            if not self.algorithm.graphs.enabled or self._made() == before:
                break
        deadline, times = time.monotonic() + budget_s, [self._timed_update()]
        while len(times) < repeats and time.monotonic() < deadline:
            times.append(self._timed_update())
        return quantile(times, 0.5)

    def _timed_update(self) -> float:
        self.probe.fill()
        synchronize(self.device)
        started = time.perf_counter()
        self.probe.update()
        synchronize(self.device)
        return 1e3 * (time.perf_counter() - started)

    def _made(self) -> tuple[float, float]:
        """Return the number of eager calls and captures so far."""
        counts = self.algorithm.graphs.counts()
        return sum(counts["eager_calls"].values()), sum(counts["graph_captures"].values())

    def launch_ms(self, repeats: int, budget_s: float) -> float:
        """Measure the median time until the host has launched an update [ms].

        Where a graph has more kernels than the device's queue, the host waits within the launch,
        and other threads' launches wait for it.
        """
        deadline, times = time.monotonic() + budget_s, list[float]()
        while not times or (len(times) < repeats and time.monotonic() < deadline):
            batch = self.sample()
            synchronize(self.device)
            started = time.perf_counter()
            self.algorithm.update(batch)
            times.append(1e3 * (time.perf_counter() - started))
            self.probe.storage.done(batch)
        return quantile(times, 0.5)

    def captures(self) -> tuple[float, float]:
        """Return the number of captures of graphs so far, and their seconds."""
        counts = self.algorithm.graphs.counts()
        seconds = sum(counts["graph_capture_seconds"].values())
        return sum(counts["graph_captures"].values()), seconds

    def calls(self) -> tuple[float, str]:
        """Return the number of replays of graphs so far, and text about the failed captures."""
        counts = self.algorithm.graphs.counts()
        failed = ", ".join(" ".join(labels) for labels in counts["graph_fallbacks"])
        return round(sum(counts["graph_replays"].values())), failed


class Actor:
    """Actor on synthetic rows: one copy in for each array, the policy, one copy back."""

    def __init__(self, trial: Trial, rows: int) -> None:
        """Make the rows.

        Args:
            trial: trial with the policy that acts.
            rows: number of environments.
        """
        self._device, self._policy = trial.device, trial.algorithm.snapshot()
        cuda = self._device.type == "cuda"
        made = synthetic(trial.spec, rows)
        self._rows = {k: v.pin_memory() for k, v in made.items()} if cuda else made
        self._generator = torch.Generator(self._device).manual_seed(0)
        size = self._policy.memory_size
        shape = (rows, trial.spec.num_agents, size)
        self._memory = torch.zeros(shape, device=self._device) if size else None

    def __call__(self) -> Tensor:
        """Act and return the actions on the host."""
        rows = {k: v.to(self._device, non_blocking=True) for k, v in self._rows.items()}
        action: Tensor = self._policy.act(rows, self._generator, self._memory)["action"].cpu()
        return action

    def milliseconds(self, count: int, budget_s: float) -> list[float]:
        """Measure times of acts [ms], after ten that are not counted."""
        deadline = time.monotonic() + budget_s
        times: list[float] = []
        for i in range(count + 10):
            started = time.perf_counter()
            self()
            if i >= 10 or count < 10:
                times.append(1e3 * (time.perf_counter() - started))
            if time.monotonic() > deadline and times:
                break
        return times


def synthetic(spec: EnvSpec, rows: int) -> dict[str, Tensor]:
    """Return random observations of `rows` environments, on the host."""
    random = torch.Generator().manual_seed(0)
    made = {}
    for array in spec.observations:
        lead = (rows, spec.num_agents) if array.per_agent else (rows,)
        dtype = getattr(torch, array.dtype)
        if array.name in (ACTION_MASK, AGENT_MASK, TURN_MASK):
            made[array.name] = torch.ones((*lead, *array.shape), dtype=dtype)
        elif dtype.is_floating_point:
            made[array.name] = torch.randn((*lead, *array.shape), generator=random).to(dtype)
        else:
            made[array.name] = torch.zeros((*lead, *array.shape), dtype=dtype)
    return made


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def quantile(values: list[float], q: float) -> float:
    """Return the smallest of the values that at least a share `q` of them does not exceed."""
    ordered = sorted(values)
    return ordered[max(math.ceil(q * len(ordered)) - 1, 0)]


def attempt(work: Callable[[], None]) -> str:
    """Run a part of a topic; its error in one line, "" if there is none."""
    try:
        work()
    except Exception as error:  # the other parts continue; the error is in the result
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return ""

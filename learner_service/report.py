"""Reports of the learner: metrics of each update, lines of the log, results of evaluations."""

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
from torch import Tensor, nn

from murmur.learner_service.checkpoint.folder import CheckpointFolder
from murmur.learner_service.device.readback import to_host
from murmur.learner_service.gathering import RankSync
from murmur.learner_service.learning.base import Algorithm
from murmur.learner_service.learning.stagnation import (
    KIND,
    Evidence,
    due,
    stagnation,
)
from murmur.learner_service.preprocess.running_moments import CLIPPED
from murmur.learner_service.storage.rollout import DemonstratedRollout, Rollout
from murmur.learner_service.storage.storage import Batch, Storage
from murmur.learner_service.telemetry.device_clock import DeviceClock
from murmur.learner_service.telemetry.figures import Figures
from murmur.learner_service.telemetry.metrics import LearnerMetrics
from murmur.learner_service.telemetry.profiling import Profiling
from murmur.learner_service.telemetry.progress import Progress, ProgressLog, share_of_budget
from murmur.learner_service.telemetry.statistics import Statistics
from murmur.shared.config.cores import available_cores
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.config.plugins import resolve_plugin
from murmur.shared.process.errors import CheckpointError, MurmurError
from murmur.shared.process.host_cpu import machine_busy_seconds
from murmur.shared.process.ledger import enter
from murmur.shared.process.process import logger
from murmur.shared.wire.dataset import OBSERVATION
from murmur.shared.wire.notices import Notice
from murmur.shared.wire.spec import (
    TURN_MASK,
    Composite,
    Discrete,
    EnvSpec,
    action_bounds,
    action_factors,
)

_NVML_EVERY_S = 5.0  # asking takes milliseconds
_LOOKS = 20  # lines of the log over which losses are averaged, to judge a run
_AT_ODDS = 0.2  # share of rewarded rows, above which agents compete
_MARGIN = 0.005  # of the range of actions, as near to a bound as at it
MOST_VALUES = 1 << 16  # of a histogram of weights or actions; of more, evenly spread ones are taken
_MOST_ACTIONS = 16  # histograms of a vector's numbers
_TELL_EVERY_S = 30.0  # between two lines, and files, of updates that are skipped


class Update(NamedTuple):
    """An update that was made.

    Attributes:
        batch: rows that it learned from; the storage may have overwritten them since.
        version: policy version that learned from them, the number of updates before this one.
        seconds: duration, publishing included.
        kept: False if it is undone, because a loss or a weight was not finite.
    """

    batch: Batch
    version: int
    seconds: float
    kept: bool


@dataclass(eq=False)
class Report:
    """Writes metrics and the log. Used by the thread that learns, but for `evaluated`.

    Attributes:
        config: experiment.
        algorithm: algorithm that learns.
        storage: source of batches.
        ranks: counters, and agreements with the other ranks.
        metrics: Prometheus metrics.
        clock: clock of the device's work.
        checkpoints: folder for batches whose update was not finite.
        log: progress.jsonl, TensorBoard and trackers; None: another rank writes them.
        profiling: recorder of updates.
        judged: whether returns that stay mean that the run does not learn: not those of samples,
            of a league or along a curriculum.
        figures: returns further entries of a line of the log, and sets gauges of its own.
    """

    config: ExperimentConfig
    algorithm: Algorithm[Any]
    storage: Storage[Any]
    ranks: RankSync
    metrics: LearnerMetrics
    clock: DeviceClock
    checkpoints: CheckpointFolder
    log: ProgressLog | None
    profiling: Profiling
    judged: bool
    figures: Callable[[], Mapping[str, Any]] = lambda: MappingProxyType({})

    def __post_init__(self) -> None:
        """Begin to measure."""
        self._progress = self.ranks.progress
        self._process = psutil.Process()
        psutil.cpu_percent()
        self._logged = self._saved = time.monotonic()
        self._busy_before = (time.monotonic(), 0.0)
        self._inserted = self.storage.inserted
        self._dropped = self.storage.dropped
        self._update_times = (0, 0.0)  # updates since the last line of the log, their seconds
        self._skipped_in_a_row, self._told_of_skips = 0, -math.inf
        self._scaler_skipped = 0.0  # steps, in this process
        self._outliers_said: set[str] = set()
        self._told = -math.inf  # when a line of progress was logged
        self._looks: deque[dict[str, float]] = deque(maxlen=_LOOKS)
        self._evaluation: dict[str, list[float]] = {}  # the latest one, results by name
        self._judge = self.judged and not self.metrics.notices.said(KIND, "return")

    # --- every update ----------------------------------------------------------------------------

    def count_rows(self) -> None:
        """Count the rows that the storage has taken in, or dropped because they were too old."""
        if dropped := self.storage.dropped - self._dropped:
            self._dropped += dropped
            self._progress.drop("lag", dropped)
            self.metrics.counter("rows_dropped", reason="lag").inc(dropped)
        if fresh := self.storage.inserted - self._inserted:
            self._inserted += fresh
            self._progress.rows_inserted += fresh
            self.metrics.counter("rows_inserted").inc(fresh)

    def updated(self, update: Update, losses: dict[str, float]) -> None:
        """Report an update that is kept.

        Args:
            update: update just made.
            losses: scalars of the update, averaged over the ranks.
        """
        batch, version, seconds, _kept = update
        m, p = self.metrics, self._progress
        self._skipped_in_a_row = 0
        self._note_scaler(losses)
        self._note_clipped(losses)
        p.losses = losses
        p.first_losses = p.first_losses or losses
        if not isinstance(batch, DemonstratedRollout):  # whose rows never came
            p.rows_trained += batch.size
            m.counter("rows_trained").inc(batch.size)
        m.counter("updates").inc()
        m.gauge("policy_version").set(p.updates)
        m.histogram("update_seconds").observe(seconds)
        count, total = self._update_times
        self._update_times = (count + 1, total + seconds)
        if lags := Counter(version - first for first in batch.version):  # lag -> unrolls
            p.policy_lag = sum(lag * unrolls for lag, unrolls in lags.items()) / lags.total()
            m.histogram("policy_lag").observe_many(lags)
        for name, value in losses.items():
            m.gauge("loss", name=name).set(value)
        every = self.config.tracking.histograms_every_updates
        if self.log is not None and every and p.updates % every == 0:
            self._draw(self.log, batch)
        self.profiling.updated()

    def _draw(self, log: ProgressLog, batch: Batch) -> None:
        """Draw histograms: they alone wait for the device a second time."""
        enter("log")
        found = distributions(self.algorithm.parts, batch.arrays.get("action"))
        log.draw_histograms(to_host(found), self._progress.all_env_steps)

    def _note_scaler(self, losses: dict[str, float]) -> None:
        """fp16: report the loss's scale, which stays among the losses, and skipped steps."""
        if (skipped := losses.pop("scaler_skipped_steps", None)) is not None:
            self.metrics.gauge("loss_scale").set(losses["loss_scale"])
            self.metrics.counter("scaler_skipped_steps").inc(skipped - self._scaler_skipped)
            self._scaler_skipped = skipped

    def _note_clipped(self, losses: dict[str, float]) -> None:
        """Count what normalisation clipped, and say once of each observation which value it was."""
        counts = {n.removeprefix(CLIPPED): losses.pop(n) for n in [*losses] if CLIPPED in n}
        for of, count in counts.items():
            self.metrics.counter("outliers_clipped", of=of).inc(count)
        if not any(counts.values()):
            return
        outliers = self.algorithm.outliers() | self.algorithm.transforms.outliers()
        for name, text in outliers.items():
            if name in self._outliers_said:
                continue
            self._outliers_said.add(name)
            logger.warning(
                "%s: %s in the statistics that normalise: it lies far beyond all others, and alone "
                "would set their scale; further ones are only counted, in "
                "murmur_learner_outliers_clipped_total",
                name,
                text,
            )

    def skipped(self, batch: Batch, why: str) -> None:
        """Count an update that was undone, log it and keep the batch that led to it.

        Args:
            batch: rows that it learned from.
            why: loss and value that are not finite.

        Raises:
            MurmurError: if too many in a row were undone, naming the loss and the file.
        """
        p, limit = self._progress, self.config.learner.max_skipped_updates
        p.updates_skipped += 1
        self.metrics.counter("updates_skipped").inc()
        if not self.storage.inserted:  # rows of a replay are drawn again
            p.drop("skipped", batch.size)
            self.metrics.counter("rows_dropped", reason="skipped").inc(batch.size)
        self._skipped_in_a_row += 1
        ends, now = self._skipped_in_a_row > limit, time.monotonic()
        if not ends and now - self._told_of_skips < _TELL_EVERY_S:
            return
        self._told_of_skips = now
        try:
            kept = f"the batch is in {self.checkpoints.save_batch(batch.arrays, p.updates)}"
        except CheckpointError as error:
            kept = f"the batch is not kept: {error}"
        kept += _largest_observation(to_host(dict(batch.arrays)))
        if ends:
            count = f", as in {limit} tries before (learner.max_skipped_updates)" if limit else ""
            raise MurmurError(
                f"update {p.updates}: {why}{count}; {kept}. "
                "Lower the learning rates, or set learner.precision=fp32"
            )
        logger.warning(
            "update %d is skipped: %s; the weights stay as they were (skipped so far: %d); %s",
            p.updates,
            why,
            p.updates_skipped,
            kept,
        )

    # --- every learner.log_every_s ---------------------------------------------------------------

    @property
    def due(self) -> bool:
        """Whether a line of the log is due."""
        return time.monotonic() - self._logged >= self.config.learner.log_every_s

    def __call__(self, update: Update | None, over: bool) -> bool:
        """Write the log and set gauges if that is due; a Step."""
        if self.ranks.log_due or over:
            if update is not None and update.kept and self._judge:
                self._look(update.batch)
            self._logged = time.monotonic()
            self.write()
            self._set_gauges(self._logged)
            self.profiling.look(self._progress.updates)
        return over

    def write(self) -> None:
        """Write a line of the log, if this rank does; all ranks call it."""
        machine_busy = psutil.cpu_percent() / 100  # since the last time it was asked
        self.metrics.gauge("machine_busy_ratio").set(machine_busy)
        rows_waiting = self.storage.waiting_rows
        totals = self.ranks.totals(rows_waiting)
        more = self.figures()
        if self.log is None:
            return
        figures = {
            "rows_waiting": rows_waiting,
            "ledger": self.metrics.ledger_seconds(),
            "device_busy_s": self.clock.seconds()[0],
            "machine_busy": machine_busy,
            "machine_busy_s": machine_busy_seconds(),
            "cores": available_cores(),
            "environments_limit": self.storage.environments_limit,
            "latency": self.metrics.latencies(),
            "rollout": self.storage.chosen,
            "device": self._device_figures(),
            "graphs": {
                metric: {"/".join(labels): count for labels, count in counts.items()}
                for metric, counts in self.metrics.graph_calls().items()
                if counts
            },
            "work": self.metrics.work_done(),
            **more,
        }
        self.log.write(figures, totals)
        self._tell(time.monotonic())

    def _tell(self, now: float) -> None:
        """Log the progress now and then, for who started the learner by hand."""
        if now - self._told < _TELL_EVERY_S:
            return
        self._told, p = now, self._progress
        mean = p.means().get("return")
        logger.info(
            "%d updates, %d environment steps%s",
            p.updates,
            p.all_env_steps,
            "" if mean is None else f", return {mean:.4g}",
        )

    def _look(self, batch: Batch) -> None:
        """Give a notice if the run does not learn.

        Args:
            batch: rows of the last update.
        """
        p = self._progress
        self._looks.append(p.losses)
        done, budget = share_of_budget(self.config.run, p)
        names = ("updates", "updates_skipped", "episodes", "env_steps_received")
        counts = {name: getattr(p, name) for name in names}
        latest = p.latest("return")
        if self.log is None or not p.untrained or not due(counts, done, len(latest)):
            return
        losses = {name for of in self._looks for name in of}
        options = resolve_plugin("algorithm", self.config.algorithm).options
        lengths = p.latest("length")
        rewarded, at_odds = p.rewards_at_odds
        best = self.config.evaluation.best_metric
        found = stagnation(
            Evidence(
                record={**counts, "env_steps": p.all_env_steps},
                options=options.model_dump(),
                untrained=Statistics.of(p.untrained),
                recent=Statistics.of(latest),
                done=done,
                budget=budget,
                first=p.first_losses,
                losses={n: fmean(x[n] for x in self._looks if n in x) for n in losses},
                lengths=Statistics.of(lengths) if lengths else None,
                evaluated=tuple(
                    (
                        _statistics(p.first_evaluation[n], sign),
                        _statistics(self._evaluation[n], sign),
                    )
                    for n, sign in {
                        "return": 1,
                        best.lstrip("-"): -1 if best[0] == "-" else 1,
                    }.items()
                    if n in p.first_evaluation and n in self._evaluation
                ),
                competing=at_odds > _AT_ODDS * rewarded,
                fine_tuned=bool(self.config.run.start_from),
                frozen=not any(
                    w.requires_grad
                    for part in self.algorithm.parts.values()
                    if isinstance(part, nn.Module)
                    for w in part.parameters()
                ),
                at_bounds=_share_at_bounds(batch, getattr(self.storage, "spec", None)),
                constant=_constant(batch),
            )
        )
        if found is not None:
            self._judge = False
            self.metrics.notices.add([Notice(KIND, "return", found.text)])

    def _device_figures(self) -> dict[str, float]:
        """Return the mean update time since the last line, memory, bytes copied, NVML's figures."""
        m, (count, seconds) = self.metrics, self._update_times
        self._update_times = (0, 0.0)
        figures = {
            "memory_bytes": float(self._memory()),
            "copied_to_device_bytes": float(m.copied["to_device"]),
            "copied_to_host_bytes": float(m.copied["to_host"]),
            **{
                name: float(sum(of.values()))
                for name, of in m.graph_calls().items()
                if name != "graph_retry_calls"
            },
            **{name: m.sum_of(name)[0] for name in ("acts_waited", "acts_waited_seconds")},
        }
        if count:
            figures["update_ms"] = 1e3 * seconds / count
        if m.gpu is not None:
            figures["memory_peak_bytes"] = float(torch.cuda.max_memory_allocated())
        return figures | (m.gpu.recent(_NVML_EVERY_S) if m.gpu else {})

    def _memory(self) -> int:
        """Return the memory in use, bytes: torch's on CUDA, the process's on the CPU."""
        if self.metrics.gpu is not None:
            return torch.cuda.memory_allocated()
        resident: int = self._process.memory_info().rss
        return resident

    def _set_results(self, mode: str, means: Mapping[str, float]) -> None:
        """Set the gauges of the environment's results: mean of each by its name."""
        for name, mean in means.items():
            if name == "return":
                self.metrics.gauge("episode_return", mode=mode).set(mean)
            else:
                self.metrics.gauge("episode_metric", name=name, mode=mode).set(mean)

    def _set_gauges(self, now: float) -> None:
        """Set the gauges that are too slow to set per message.

        Args:
            now: time.monotonic().
        """
        m = self.metrics
        self._set_results("train", self._progress.means())
        m.gauge("rows_stored").set(self.storage.ready_rows)
        m.gauge("checkpoint_age_seconds").set(now - self._saved)
        busy, _ = self.clock.seconds()
        before = self._busy_before
        m.gauge("device_busy_ratio").set((busy - before[1]) / max(now - before[0], 1e-9))
        self._busy_before = (now, busy)
        m.gauge("device_memory_bytes").set(self._memory())

    # --- now and then ----------------------------------------------------------------------------

    def evaluated(
        self,
        updates: int,
        env_steps: int,
        summary: dict[str, dict[str, Any]],
        figures: Callable[[], Figures],
    ) -> dict[str, float]:
        """Log a completed evaluation.

        Args:
            updates: number of updates when it began.
            env_steps: number of environment steps when it began.
            summary: name -> "mean" and others of each result.
            figures: makes its figures; called only if they are due.

        Returns:
            name -> mean of each result.
        """
        if self.log is not None:
            self.log.write_evaluation(updates, env_steps, summary, figures)
        if self._judge:
            results = summary.items()
            self._evaluation = {n: [x["episodes"], x["mean"], x["std"]] for n, x in results}
            if updates == 0:
                self._progress.first_evaluation = self._evaluation
        means = {name: values["mean"] for name, values in summary.items()}
        self._set_results("evaluate", means)
        return means

    def checkpoint(self, seconds: float | None) -> None:
        """Count a checkpoint that took this number of seconds; None: it could not be written."""
        if seconds is None:
            self.metrics.counter("checkpoint_failures").inc()
            return
        self._saved = time.monotonic()
        self.metrics.counter("checkpoints").inc()
        self.metrics.histogram("checkpoint_seconds").observe(seconds)

    def close(self) -> None:
        """Write the last line of the log, if that takes no other rank."""
        if self.ranks.group.size == 1:
            self.write()
        if self.log is not None:
            self.log.close()


def _statistics(result: Sequence[float], sign: int) -> Statistics:
    """Return the statistics of an evaluation's result, for which higher is better.

    Args:
        result: episodes, mean, standard deviation.
        sign: -1 where less is better.
    """
    episodes, mean, std = result
    return Statistics(int(episodes), sign * mean, std, sign * mean, sign * mean)


def _constant(batch: Batch) -> bool:
    """Return whether all observations in a batch are the same."""
    seen = [x for name, x in batch.arrays.items() if name.startswith(OBSERVATION) and x.numel()]
    rows = [x.flatten(0, 1) if isinstance(batch, Rollout) else x for x in seen]
    return bool(rows) and all(bool((x == x[:1]).all()) for x in rows)


def _share_at_bounds(batch: Batch, spec: EnvSpec | None) -> float | None:
    """Return the share of actions' numbers at their bounds; None where actions hold no numbers.

    Numbers of agents that wait for their turn, or that have no use for them, do not count.

    Args:
        batch: rows of an update.
        spec: spec of the environment; None: there is none.
    """
    action = batch.arrays.get("action")
    if action is None or spec is None or isinstance(spec.action, Discrete) or not spec.action.size:
        return None
    choices = len(action_factors(spec.action))
    low, high = torch.tensor(action_bounds(spec.action), device=action.device)[:, choices:]
    size, numbers = high - low, action[..., choices:]
    margin = torch.where(size.isfinite(), _MARGIN * size, 0)  # [U]
    at_bounds = (numbers <= low + margin) | (numbers >= high - margin)
    counted = torch.ones_like(at_bounds)
    if isinstance(spec.action, Composite) and spec.action.idle:
        counted &= ~torch.tensor(spec.action.idle, dtype=torch.bool, device=action.device)
    if (turn := batch.arrays.get(OBSERVATION + TURN_MASK)) is not None:
        counted &= (turn != 0).unsqueeze(-1)
    return float((at_bounds & counted).sum() / counted.sum().clamp_min(1))


def _largest_observation(arrays: Mapping[str, Tensor]) -> str:
    """Describe the observation of a batch that is farthest from 0; empty if there is none."""
    sizes = {
        name: x.detach().abs().amax().item()
        for name, x in arrays.items()
        if name.startswith(OBSERVATION) and x.is_floating_point() and x.numel()
    }
    if not sizes:
        return ""
    name = max(sizes, key=lambda n: sizes[n] if sizes[n] == sizes[n] else math.inf)
    x = arrays[name].detach()
    at = int(x.abs().argmax())
    index = [int(i) for i in np.unravel_index(at, x.shape)]
    value = x.flatten()[at].item()
    return (
        f"; its largest observation is {value:g}, in '{name.removeprefix(OBSERVATION)}' at {index}"
    )


def distributions(parts: Mapping[str, object], action: Tensor | None) -> dict[str, Tensor]:
    """Return values of an update for histograms, by name, where they are.

    Args:
        parts: parts of an algorithm; networks that learn nothing, such as targets, are left out.
        action: [..., A] integers or [..., A, U] numbers of the update's batch; None: it has none.
    """
    found: dict[str, Tensor] = {}
    for name, part in parts.items():
        for of, p in part.named_parameters() if isinstance(part, nn.Module) else ():
            if p.grad is not None:
                found[f"weights/{name}.{of}"] = _sampled(p)
                found[f"gradients/{name}.{of}"] = _sampled(p.grad)
    if action is None:
        return found
    if not action.is_floating_point():
        return found | {"actions/chosen": _sampled(action)}
    size = min(action.shape[-1], _MOST_ACTIONS)
    return found | {f"actions/{u}": _sampled(action[..., u]) for u in range(size)}


def _sampled(tensor: Tensor) -> Tensor:
    """At most MOST_VALUES of a tensor's values, as floats."""
    flat = tensor.detach().reshape(-1)
    return flat[:: -(-len(flat) // MOST_VALUES)].float()


def settle(metrics: LearnerMetrics, progress: Progress, held: int) -> None:
    """Count what went with a process that was killed: the rows it held, its last updates.

    The metrics know every row that ever came, the progress those up to the checkpoint. A
    learner that was killed before its first checkpoint had saved nothing.

    Args:
        metrics: metrics, with the counters that outlive the process.
        progress: progress of the checkpoint.
        held: rows that the storage holds.
    """
    m, p = metrics, progress
    replay = p.rows_inserted or m.total("rows_inserted")
    learned = "rows_inserted" if replay else "rows_trained"
    if not m.total("rows_received"):  # an older murmur kept none
        m.counter("rows_received").inc(p.rows_received)
        m.counter(learned).inc(p.rows_settled)
        for reason, rows in p.rows_dropped.items():
            m.counter("rows_dropped", reason=reason).inc(rows)
    undone = m.total(learned) - p.rows_settled - m.total("rows_undone")
    m.counter("rows_undone").inc(max(0, undone))
    lost = m.total("rows_received") - m.total(learned) - m.total("rows_dropped") - held
    m.counter("rows_dropped", reason="restart").inc(max(0, lost))

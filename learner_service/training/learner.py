"""The learner: ready -> take -> update -> publish -> log -> checkpoint -> evaluate."""

import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from learner_service.algorithms.base import Algorithm
from learner_service.algorithms.imitation import end_in_time
from learner_service.algorithms.running_moments import CLIPPED
from learner_service.checkpoint import CheckpointFolder
from learner_service.group.checksum import require_same
from learner_service.group.group import ALONE, Group
from learner_service.runtime.readback import Readback, to_host
from learner_service.runtime.streams import enter_stream
from learner_service.storage.feed import Feed, Taken
from learner_service.storage.rollout import Batch
from learner_service.storage.storage import OBSERVATION
from learner_service.telemetry.device_clock import DeviceClock
from learner_service.telemetry.figures import Figures
from learner_service.telemetry.metrics import LearnerMetrics
from learner_service.telemetry.profiling import Profiling
from learner_service.telemetry.progress import Progress, ProgressLog, reached_limit
from learner_service.telemetry.tensorboard_distributions import distributions
from learner_service.training.duties import Duties
from learner_service.training.last_finite import LastFinite
from learner_service.training.report import Report
from learner_service.training.rounds import Rounds
from shared.config.experiment import ExperimentConfig
from shared.errors import CheckpointError, MurmurError
from shared.ledger import enter
from shared.process import logger

_WAIT_S = 0.2
_TELL_EVERY_S = 30.0  # between two lines, and files, of updates that are skipped
_TOTAL = "the sum of all weights"


class Learner:
    """Makes updates: on the learner thread or, in the sync pipeline, on the inference thread.

    Attributes:
        best: score of the best evaluation so far.
        finished: set when the run has reached its end or was told to stop, and has been saved.
        on_update: called with the environment rows and the seconds of each update.
        rounds: agreements with the other ranks.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        algorithm: Algorithm[Any],
        storage: Feed[Any],
        checkpoints: CheckpointFolder,
        duties: Duties,
        progress: Progress,
        log: ProgressLog | None,
        metrics: LearnerMetrics,
        clock: DeviceClock,
        state: Callable[[], dict[str, Any]],
        stop: threading.Event,
        profiling: Profiling,
        group: Group = ALONE,
    ) -> None:
        """Wire the learner up.

        Args:
            config: the experiment.
            algorithm: learns.
            storage: where batches come from.
            checkpoints: where to save.
            duties: what follows an update: acting with it, or the end of an epoch.
            progress: counters.
            log: progress.jsonl and TensorBoard; None: another rank writes them.
            metrics: Prometheus metrics.
            clock: notified when the device works.
            state: the complete state of the run, for a checkpoint.
            stop: set from outside to end the run.
            profiling: notified of every update.
            group: the learners of the run; they make each update together.
        """
        self._config = config
        self._algorithm = algorithm
        self._storage = storage
        self._checkpoints, self._duties = checkpoints, duties
        self._progress = progress
        self._log = log
        self._metrics = metrics
        self._clock = clock
        self._state = state
        self._profiling = profiling
        self._group = group
        self.rounds = Rounds(group, progress, stop)
        self.finished = threading.Event()
        self.best: float | None = None
        self.on_update: Callable[[int, float], None] = lambda rows, seconds: None
        self._last_finite = LastFinite(algorithm)
        self._read = Readback(storage.device).read
        self._skipped_in_a_row, self._told_of_skips = 0, -math.inf
        self._scaler_skipped = 0.0  # steps, in this process
        self._outliers_said: set[str] = set()
        self._inserted, self._save_due = storage.inserted, False
        self._logged = self._saved = time.monotonic()
        self._report = Report(log, progress, metrics, storage, clock, duties, self.rounds)
        duties.begin(self)

    def run(self) -> None:
        """Make updates until the run ends: the learner thread (async, and of images always)."""
        enter_stream(self._storage.device)
        while not self.finished.is_set():
            self.step(_WAIT_S)

    def learn_ready(self) -> bool:
        """Learn from all that is ready; returns whether the run continues.

        In the sync pipeline the inference thread calls it, between storing time steps and acting.
        """
        while self._storage.ready and not self.finished.is_set():
            self.step(0.0)
        return not self.finished.is_set()

    def step(self, timeout_s: float) -> None:
        """Wait for rows, learn from them, publish; then see to logs, checkpoints, evaluations."""
        version = self._progress.updates
        before = enter("wait_rows")
        batch, dropped = self._take(version, timeout_s)
        if dropped:
            self._progress.drop("lag", dropped)
            self._metrics.counter("rows_dropped", reason="lag").inc(dropped)
        updated = False
        if batch is not None:
            with self._duties.learning(batch):
                updated = self._update(batch, version)
        enter("log")
        self._after(updated)
        if before is not None:
            enter(before)

    def _take(self, version: int, timeout_s: float) -> tuple[Taken | None, int]:
        """The rows of an update, and how many were dropped; no rows unless all ranks have some."""
        if self.rounds.alone:
            return self._storage.sample(version, timeout_s)
        ready, dropped = self._storage.due(version, timeout_s)
        limit = 60 * self._config.run.max_minutes
        if not self.rounds.meet(
            ready=ready,
            log_due=time.monotonic() - self._logged >= self._config.learner.log_every_s,
            time_up=bool(limit) and self._progress.seconds >= limit,
        ):
            return None, dropped
        batch, more = self._storage.sample(version, 0.0)
        assert batch is not None, "due() said so"
        return batch, dropped + more

    def _update(self, batch: Taken, version: int) -> bool:
        """Learn from a batch and publish; returns whether that was possible.

        An update after which a loss or a weight is not finite is undone: no action comes from it.

        Raises:
            MurmurError: if too many in a row were not.
        """
        started = time.monotonic()
        enter("forward")
        with self._clock.working("update"):
            self._last_finite.keep()
            end_in_time(self._config.imitation, version, batch)
            scalars = self._algorithm.update(batch)
            scalars |= {**self._algorithm.precision_scalars(), _TOTAL: self._last_finite.total()}
            enter("synchronize")
            counted = [batch.env_steps()] if isinstance(batch, Batch) else []
            on_device = torch.stack([x.float() for x in (*scalars.values(), *counted)])
            values = self._read(self._averaged(on_device, len(counted))).tolist()  # one wait
        losses = dict(zip(scalars, values, strict=False))
        wrong = next((n for n, value in losses.items() if not math.isfinite(value)), None)
        if wrong is not None:
            self._last_finite.restore()
            self._storage.done(batch)
            self._skip(batch, f"{wrong} is {losses[wrong]}")
            return False
        enter("publish")
        self._skipped_in_a_row = 0
        del losses[_TOTAL]
        self._note_scaler(losses)
        self._note_clipped(losses)
        self._progress.losses = losses
        self._duties.publish(version + 1)
        self._progress.updates = version + 1
        took = time.monotonic() - started
        self._draw_distributions(batch)
        self._storage.done(batch)
        if counted:
            self.rounds.count(round(values[len(scalars)]), round(values[-1]))
        self._note_update(batch, version, took)
        self._profiling.updated()
        self._check_weights()
        return True

    def _draw_distributions(self, batch: Taken) -> None:
        """Every tracking.histograms_every_updates: the only wait for the device of their own."""
        every, log = self._config.tracking.histograms_every_updates, self._log
        if log is None or not every or self._progress.updates % every:
            return
        enter("log")
        log.draw_distributions(
            distributions(self._algorithm.parts, batch.arrays.get("action"), to_host)
        )

    def _averaged(self, scalars: Tensor, counts: int) -> Tensor:
        """Scalars of an update, as means over the ranks: what is not finite on one is so on all.

        Args:
            scalars: [n] of this rank.
            counts: how many of the last ones are counts.

        Returns:
            the same of a learner that is alone; else [n + counts]: means, this rank's counts, and
            their sums over the ranks.
        """
        if self.rounds.alone:
            return scalars
        of_all = scalars.clone()
        self._group.mean_([of_all])
        first = len(scalars) - counts
        return torch.cat([of_all[:first], scalars[first:], of_all[first:] * self._group.size])

    def _check_weights(self) -> None:
        """Now and then compare the weights of all ranks.

        Raises:
            MurmurError: if they differ.
        """
        updates = self._progress.updates
        if self.rounds.alone or updates % self._config.learner.group_check_every_updates:
            return
        require_same(self._group, self._last_finite.named_weights(), f"update {updates}", to_host)

    def _skip(self, batch: Taken, why: str) -> None:
        """Count an update that was undone, log it and keep the batch that led to it.

        Raises:
            MurmurError: if too many in a row were undone, naming the loss and the file.
        """
        p, limit = self._progress, self._config.learner.max_skipped_updates
        p.updates_skipped += 1
        self._metrics.counter("updates_skipped").inc()
        if not self._storage.inserted:  # rows of a replay are drawn again
            p.drop("skipped", batch.rows)
            self._metrics.counter("rows_dropped", reason="skipped").inc(batch.rows)
        self._skipped_in_a_row += 1
        ends, now = self._skipped_in_a_row > limit, time.monotonic()
        if not ends and now - self._told_of_skips < _TELL_EVERY_S:
            return
        self._told_of_skips = now
        try:
            kept = f"the batch is in {self._checkpoints.save_batch(batch.arrays, p.updates)}"
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

    def _note_scaler(self, losses: dict[str, float]) -> None:
        """fp16: report the loss's scale, which stays among the losses, and skipped steps."""
        if (skipped := losses.pop("scaler_skipped_steps", None)) is not None:
            self._metrics.gauge("loss_scale").set(losses["loss_scale"])
            self._metrics.counter("scaler_skipped_steps").inc(skipped - self._scaler_skipped)
            self._scaler_skipped = skipped

    def _note_clipped(self, losses: dict[str, float]) -> None:
        """Count what normalisation clipped, and say once of each observation which value it was."""
        counts = {n.removeprefix(CLIPPED): losses.pop(n) for n in [*losses] if CLIPPED in n}
        for of, count in counts.items():
            self._metrics.counter("outliers_clipped", of=of).inc(count)
        if not any(counts.values()):
            return
        for name, text in self._algorithm.outliers().items():
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

    def _note_update(self, batch: Taken, version: int, took: float) -> None:
        m, p = self._metrics, self._progress
        p.rows_trained += batch.rows
        m.counter("rows_trained").inc(batch.rows)
        m.counter("updates").inc()
        m.gauge("policy_version").set(p.updates)
        m.histogram("update_seconds").observe(took)
        self._report.note_update(took)
        self.on_update(batch.rows, took)
        if lags := [version - v for v in batch.version]:
            p.policy_lag = sum(lags) / len(lags)
            for lag in set(lags):
                m.histogram("policy_lag").observe(lag)
        for name, value in p.losses.items():
            m.gauge("loss", name=name).set(value)

    def _after(self, updated: bool) -> None:
        """What is due between updates."""
        c, p = self._config, self._progress
        self._note_inserted()
        seconds = p.seconds if self.rounds.alone else 0.0  # else see `time_up`
        limit = bool(reached_limit(c.run, p.updates, self.rounds.env_steps, seconds))
        limit |= self.rounds.time_up or self._duties.complete
        if updated:
            self._save_due |= p.updates % c.learner.checkpoint_every_updates == 0
        self._duties.after(updated, limit)
        done = limit or self._duties.complete
        now = time.monotonic()
        log_due = now - self._logged >= c.learner.log_every_s
        if (log_due if self.rounds.alone else self.rounds.log_due) or done:
            self._logged = now
            self._report.write()
            self._report.set_gauges(now, self._saved)
            self._profiling.look(p.updates)
        stopping = self.rounds.stopping
        if stopping and self._duties.saved_at_the_end:
            self._profiling.close()
            self.finished.set()  # `finish` saves
            return
        settled = (stopping or self._save_due) and self._settled(updated)
        if done or (stopping and settled):
            self.save()
            self._profiling.close()
            self.finished.set()
        elif self._save_due and settled:
            self.write_or_continue(self.save)
            self._save_due = False

    def _settled(self, updated: bool) -> bool:
        """Whether every rank can be continued from a checkpoint that is written now."""
        settled = self._duties.settled(updated)
        return settled if self.rounds.alone else self.rounds.everywhere(settled)

    def _note_inserted(self) -> None:
        if fresh := self._storage.inserted - self._inserted:
            self._inserted += fresh
            self._progress.rows_inserted += fresh
            self._metrics.counter("rows_inserted").inc(fresh)

    def write_or_continue(self, write: Callable[[], None]) -> None:
        """Write a checkpoint; if that fails, the next one that is due may succeed."""
        try:
            write()
        except CheckpointError as error:
            logger.error("%s; training continues", error)
            self._metrics.counter("checkpoint_failures").inc()

    def save(self) -> None:
        """Write a checkpoint.

        Raises:
            CheckpointError: if it cannot be written.
        """
        enter("checkpoint")
        started = time.monotonic()
        state = {**self._state(), "best": self.best}
        self._checkpoints.save(state, self._progress.updates, self._storage)
        self._saved, self._save_due = time.monotonic(), False
        self._metrics.counter("checkpoints").inc()
        self._metrics.histogram("checkpoint_seconds").observe(self._saved - started)

    def finish(self) -> None:
        """Save what the last sessions have left. Called when all other threads have ended.

        A sync run is saved already, where it can continue exactly.

        Raises:
            CheckpointError: if it cannot be written.
        """
        self._note_inserted()
        if self._duties.saved_at_the_end and self.finished.is_set():
            self.save()

    def close(self) -> None:
        """Write the last line of the log, if that takes no other rank."""
        if self.rounds.alone:
            self._report.write()
        if self._log is not None:
            self._log.close()

    def note_evaluation(
        self,
        updates: int,
        env_steps: int,
        summary: dict[str, dict[str, Any]],
        state: dict[str, Any] | None,
        figures: Callable[[], Figures],
    ) -> None:
        """Log a completed evaluation and keep the best policy.

        Args:
            updates: made when it began.
            env_steps: the same.
            summary: name -> "mean" and others of each result.
            state: of the run when it began; None: it is not to be kept.
            figures: makes what is drawn of it; called only if that is due.
        """
        if self._log is not None:
            self._log.write_evaluation(updates, env_steps, summary, figures)
        means = {name: values["mean"] for name, values in summary.items()}
        self._report.set_results("evaluate", means)
        wanted = self._duties.best_metric
        score = means[wanted.removeprefix("-")] * (-1 if wanted.startswith("-") else 1)
        if self.best is None or score > self.best:
            self.write_or_continue(lambda: self._keep_best(state, score))

    def _keep_best(self, state: dict[str, Any] | None, score: float) -> None:
        """Write the policy of an evaluation as the best; later ones have to beat its score.

        Raises:
            CheckpointError: if it cannot be written; the best is still what best.pt holds.
        """
        if state is not None:
            self._checkpoints.save_best({**state, "best": score})
        self.best = score


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

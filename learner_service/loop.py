"""The training loop: sample, update, publish, then the steps after an update."""

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from learner_service.device.readback import Readback
from learner_service.device.streams import enter_stream
from learner_service.gathering import RankSync
from learner_service.last_finite import LastFinite
from learner_service.learning.base import Algorithm
from learner_service.report import Report, Update
from learner_service.storage.rollout import Rollout
from learner_service.storage.storage import Batch, Storage
from learner_service.telemetry.device_clock import DeviceClock
from shared.process.ledger import enter

_WAIT_S = 0.2
_TOTAL = "the sum of all weights"


class Step(Protocol):
    """A step after an update, such as an evaluation or a checkpoint."""

    def __call__(self, update: Update | None, over: bool) -> bool:
        """Do what is due.

        Args:
            update: update just made; None: no batch was there in time.
            over: whether the run has reached its end.

        Returns:
            whether the run has reached its end after this step.
        """


class Learner:
    """Makes updates: on the learner thread or, in the sync pipeline, on the inference thread.

    Attributes:
        finished: event that is set when the run has reached its end or was told to stop, and has
            been saved.
    """

    def __init__(
        self,
        algorithm: Algorithm[Any],
        storage: Storage[Any],
        ranks: RankSync,
        report: Report,
        clock: DeviceClock,
        *,
        publish: Callable[[int], None] = lambda version: None,
        updating: Callable[[bool], None] = lambda begins: None,
        after_update: Sequence[Step],
    ) -> None:
        """Wire the learner up.

        Args:
            algorithm: algorithm that learns.
            storage: source of batches.
            ranks: counters, and agreements with the other ranks, which make each update together.
            report: metrics and log.
            clock: clock of the device's work.
            publish: gives the policy of this version to acting.
            updating: called with True before an update and with False after it.
            after_update: steps between updates, in this order.
        """
        self._algorithm = algorithm
        self._storage = storage
        self._ranks = ranks
        self._report = report
        self._clock = clock
        self._publish = publish
        self._updating = updating
        self._after_update = after_update
        self._last_finite = LastFinite(algorithm)
        self._read = Readback(storage.device).read
        self.finished = threading.Event()

    def run(self) -> None:
        """Make updates until the run ends: the learner thread (async, and of images always)."""
        enter_stream(self._storage.device)
        while not self.finished.is_set():
            self.step(_WAIT_S)

    def learn_ready(self) -> bool:
        """Learn from all that is ready; return whether the run continues.

        In the sync pipeline the inference thread calls it, between storing time steps and acting.
        """
        while self._storage.ready and not self.finished.is_set():
            self.step(0.0)
        return not self.finished.is_set()

    def step(self, timeout_s: float) -> None:
        """Sample, update, publish; then take the steps after an update.

        An update after which a loss or a weight is not finite is undone: no action comes from it.

        Args:
            timeout_s: longest wait for a batch, seconds.

        Raises:
            MurmurError: if too many updates in a row were not finite.
        """
        before, version = enter("wait_rows"), self._ranks.progress.updates
        # All ranks have rows in time, or none makes an update.
        ready, batch, update = self._storage.due(version, timeout_s), None, None
        if self._ranks.meet(ready=ready, log_due=self._report.due):
            batch = self._storage.sample(version, 0.0)
            # A session that comes or goes meanwhile may ask for larger updates.
            assert batch is not None or self._ranks.group.size == 1, "due() said so"
        self._report.count_rows()
        if batch is not None:
            self._updating(True)
            started = time.monotonic()
            enter("forward")
            with self._clock.working("update"):
                self._last_finite.keep()
                seen = self._algorithm.transforms.batch(batch, version)
                losses, env_steps = self._means(self._algorithm.update(seen), batch)
            wrong = next((n for n, value in losses.items() if not math.isfinite(value)), None)
            if wrong is None:
                del losses[_TOTAL]
                enter("publish")
                self._publish(version + 1)
                self._ranks.progress.updates = version + 1
                self._ranks.count(*env_steps)
                update = Update(batch, time.monotonic() - started, kept=True)
                self._report.updated(update, losses)
            else:
                self._last_finite.restore()
                update = Update(batch, time.monotonic() - started, kept=False)
                self._report.skipped(batch, f"{wrong} is {losses[wrong]}")
            self._storage.done(seen)
            self._updating(False)
        enter("log")
        over = self._ranks.over
        for step in self._after_update:
            over = step(update, over)
        if over:
            self._report.end_profile()
            self.finished.set()
        if before is not None:
            enter(before)

    def _means(
        self, scalars: dict[str, Tensor], batch: Batch
    ) -> tuple[dict[str, float], tuple[int, int]]:
        """Average the update's scalars over ranks, and read them in the one wait of an update.

        One non-finite rank makes all ranks skip the update.

        Args:
            scalars: name -> scalar on the device.
            batch: rows of the update.

        Returns:
            name -> mean; and the batch's environment steps, of this rank and of all ranks, 0 if
            they are counted elsewhere.
        """
        algorithm = self._algorithm
        scalars |= {**algorithm.precision_scalars(), **algorithm.transforms.scalars()}
        scalars[_TOTAL] = self._last_finite.total()
        enter("synchronize")
        counts = [batch.env_steps()] * 2 if isinstance(batch, Rollout) else []  # own, and averaged
        on_device = torch.stack([x.float() for x in (*counts, *scalars.values())])
        group = self._ranks.group
        group.mean_([on_device[len(counts) // 2 :]])
        values = self._read(on_device).tolist()
        own, mean = values[:2] if counts else (0.0, 0.0)
        losses = dict(zip(scalars, values[len(counts) :], strict=True))
        return losses, (round(own), round(mean * group.size))

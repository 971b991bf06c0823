"""The training loop: sample, update, publish, then the steps after an update."""

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from murmur.learner_service.device.readback import Readback
from murmur.learner_service.device.streams import enter_stream
from murmur.learner_service.gathering import RankSync
from murmur.learner_service.learning.base import Algorithm
from murmur.learner_service.report import Report, Update
from murmur.learner_service.storage.rollout import Rollout
from murmur.learner_service.storage.storage import Batch, Storage
from murmur.learner_service.telemetry.device_clock import DeviceClock
from murmur.shared.process.ledger import enter

_WAIT_S = 0.2
_TOTAL = "the sum of all weights"


class LastFinite:
    """A copy of all that an update changes, on the same device. Used by the thread that learns.

    Whole updates are undone, not single steps of optimisers: what is not finite also spoils running
    statistics and targets, and so no algorithm has to know of it. Nothing here waits for the
    device. Tensors are written in place, so a captured CUDA graph still works on them. Random
    numbers and the loss scaler continue: the next update draws others, at a lower scale.
    """

    def __init__(self, algorithm: Algorithm[Any]) -> None:
        """Keep nothing yet."""
        self._algorithm = algorithm
        self._tensors: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._counts: dict[str, float] = {}

    @torch.no_grad()
    def keep(self) -> None:
        """Copy the state. Call it before an update."""
        tensors = [*self._weights(), *self._momenta()]
        if len(tensors) == len(self._copies):
            torch._foreach_copy_(self._copies, tensors)
        else:  # at first, and when optimisers have made their state
            self._copies = [t.clone() for t in tensors]
        self._tensors, self._counts = tensors, dict(self._algorithm.counts)

    @torch.no_grad()
    def total(self) -> Tensor:
        """A sum over all weights, a scalar on the device: finite only if every weight is."""
        numbers = [w for w in self._weights() if w.is_floating_point()]
        if numbers[0].is_cuda:  # one kernel for many tensors
            sums = torch._foreach_norm(numbers, float("inf"))
        else:  # ten times as fast as the norm
            sums = tuple(w.sum() for w in numbers)
        return torch.stack([x.float() for x in sums]).sum()

    @torch.no_grad()
    def restore(self) -> None:
        """Put the copy back."""
        torch._foreach_copy_(self._tensors, self._copies)
        kept = {id(tensor) for tensor in self._tensors}
        for momentum in self._momenta():
            if id(momentum) not in kept:  # made by the update itself, its first
                momentum.zero_()  # as Adam's begin
        self._algorithm.restore_counts(self._counts)

    def _weights(self) -> Iterator[Tensor]:
        """Parameters and buffers of all networks."""
        for part in self._algorithm.parts.values():
            if isinstance(part, nn.Module):
                yield from part.parameters()
                yield from part.buffers()

    def _momenta(self) -> Iterator[Tensor]:
        """Yield the tensors that the optimisers keep of each parameter."""
        for part in self._algorithm.parts.values():
            if isinstance(part, torch.optim.Optimizer):
                for state in part.state.values():
                    yield from (x for x in state.values() if isinstance(x, Tensor))


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


@dataclass(eq=False, kw_only=True)
class Learner:
    """Makes updates: on the learner thread or, in the sync pipeline, on the inference thread.

    Attributes:
        algorithm: algorithm that learns.
        storage: source of batches.
        ranks: counters, and agreements with the other ranks, which make each update together.
        report: metrics and log.
        clock: clock of the device's work.
        publish: gives the policy of this version to acting.
        after_update: steps between updates, in this order.
        finished: event that is set when the run has reached its end or was told to stop, and has
            been saved.
    """

    algorithm: Algorithm[Any]
    storage: Storage[Any]
    ranks: RankSync
    report: Report
    clock: DeviceClock
    publish: Callable[[int], None] = lambda version: None
    after_update: Sequence[Step]
    finished: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        """Begin with nothing to undo."""
        self._last_finite = LastFinite(self.algorithm)
        self._read = Readback(self.storage.device).read

    def run(self) -> None:
        """Make updates until the run ends: the learner thread (async, and of images always)."""
        enter_stream(self.storage.device)
        while not self.finished.is_set():
            self.step(_WAIT_S)

    def learn_ready(self) -> bool:
        """Learn from all that is ready; return whether the run continues.

        In the sync pipeline the inference thread calls it, between storing time steps and acting.
        """
        while self.storage.ready and not self.finished.is_set():
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
        before, version = enter("wait_rows"), self.ranks.progress.updates
        # All ranks have rows in time, or none makes an update.
        ready, batch, update = self.storage.due(version, timeout_s), None, None
        if self.ranks.meet(ready=ready, log_due=self.report.due):
            batch = self.storage.sample(version, 0.0)
            # A session that comes or goes meanwhile may ask for larger updates.
            assert batch is not None or self.ranks.group.size == 1, "due() said so"
        self.report.count_rows()
        if batch is not None:
            started = time.monotonic()
            enter("forward")
            with self.clock.working("update"):
                self._last_finite.keep()
                # What is learned from; the report counts the rows as the storage gave them.
                transforms = self.algorithm.transforms
                seen = transforms.batch(batch, version) if transforms.parts else batch
                losses, env_steps = self._means(self.algorithm.update(seen), batch)
            wrong = next((n for n, value in losses.items() if not math.isfinite(value)), None)
            if wrong is None:
                del losses[_TOTAL]
                enter("publish")
                self.publish(version + 1)
                self.ranks.progress.updates = version + 1
                self.ranks.count(*env_steps)
                update = Update(batch, version, time.monotonic() - started, kept=True)
                self.report.updated(update, losses)
            else:
                self._last_finite.restore()
                update = Update(batch, version, time.monotonic() - started, kept=False)
                self.report.skipped(batch, f"{wrong} is {losses[wrong]}")
            self.storage.done(seen)  # of a replay: `update` has set its td_error
        enter("log")
        over = self.ranks.over
        for step in self.after_update:
            over = step(update, over)
        if over:
            self.report.profiling.close()
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
        algorithm = self.algorithm
        scalars |= {**algorithm.precision_scalars(), **algorithm.transforms.scalars()}
        scalars[_TOTAL] = self._last_finite.total()
        enter("synchronize")
        # Counts come twice, [own, own, *scalars]; from the second on all is averaged over ranks.
        counts = [batch.env_steps()] * 2 if isinstance(batch, Rollout) else []
        on_device = torch.stack([x.float() for x in (*counts, *scalars.values())])
        group = self.ranks.group
        group.mean_([on_device[len(counts) // 2 :]])
        values = self._read(on_device).tolist()
        own, mean = values[:2] if counts else (0.0, 0.0)
        losses = dict(zip(scalars, values[len(counts) :], strict=True))
        return losses, (round(own), round(mean * group.size))

"""Steps after an update on samples: an evaluation at the end of every few epochs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from learner_service.context import RunContext
from learner_service.learning.supervised import Supervised, SupervisedConfig
from learner_service.report import Update
from learner_service.storage.epochs import TRAIN, VALID
from learner_service.storage.samples import SampleBatch, SampleStore
from learner_service.telemetry.figures import Figures
from shared.config.class_census import class_problems
from shared.process.errors import MurmurError
from shared.process.ledger import enter
from shared.process.process import logger
from shared.wire.notices import Notice

_WAIT_S = 0.2
_DRAWN = 4  # images, at most


def epoch_figures(
    options: SupervisedConfig, store: SampleStore, context: RunContext
) -> Mapping[str, Any]:
    """Return where the epoch stands, for the log, and set its gauges."""
    figures, metrics = store.figures(), context.metrics
    metrics.gauge("epoch").set(context.progress.epochs)
    metrics.gauge("epoch_samples_trained").set(figures["trained"])
    metrics.gauge("epoch_samples_remaining").set(figures["remaining"])
    return {"samples": {**figures, "epochs": options.epochs}}


@dataclass(eq=False)
class EndEpoch:
    """Counts epochs, evaluates at the end of every few, and tells when the run is complete.

    Attributes:
        options: options of the algorithm.
        algorithm: algorithm that learns.
        store: source of batches.
        context: counters, log and checkpoints; each rank evaluates its share of the validation
            split.
    """

    options: SupervisedConfig
    algorithm: Supervised
    store: SampleStore
    context: RunContext
    _evaluated: int = -1  # epochs trained when the latest evaluation was made
    _surveyed: tuple[bool, bool] = (False, False)  # splits whose classes were told

    def __post_init__(self) -> None:
        """Continue with the epochs that the run has trained."""
        self._epochs = self.context.progress.epochs

    def __call__(self, update: Update | None, over: bool) -> bool:
        """Evaluate at the end of every few epochs, and at the end of the run; a Step."""
        p = self.context.progress
        if update is not None:
            assert isinstance(update.batch, SampleBatch)
            self._count(update.batch)
        over |= self._complete or self.context.ranks.over
        ended, self._epochs = p.epochs != self._epochs, p.epochs
        if ended or over:
            self._survey()
        due = over or (ended and p.epochs % self.options.evaluate_every_epochs == 0)
        if due and p.epochs != self._evaluated and self.store.spec.size("valid"):
            self._evaluate()
            self._evaluated = p.epochs
        return over or self._complete

    @property
    def _complete(self) -> bool:
        """Whether all epochs are trained, or no evaluation gets better."""
        return self.context.progress.epochs >= self.options.epochs or self.algorithm.finished

    def _count(self, batch: SampleBatch) -> None:
        """Count a batch that was learned from; ranks end an epoch together."""
        p, group = self.context.progress, self.context.group
        own = {"ends": float(batch.ends_epoch), "rows": float(batch.size)}
        together = group.agree(own, "sum")
        if group.size > 1 and together["ends"] == group.size:
            self.store.end_epoch()
        self.context.ranks.count(batch.size, round(together["rows"]))
        p.env_steps_received += batch.size
        p.epochs = self.store.epoch

    def _evaluate(self) -> None:
        """Score the network on the validation split, once all of it is here."""
        enter("wait_rows")
        while not self._ready_to_evaluate():
            if self.context.group.any_rank(self.context.stop.is_set()):
                return
        self._survey()
        enter("evaluate")
        with self.context.clock.working("evaluate"):
            scores = self.algorithm.evaluate(self.store.valid())
        p = self.context.progress
        shown = ", ".join(f"{name} {value:.4f}" for name, value in scores.items())
        logger.info("epoch %d of %d: %s", p.epochs, self.options.epochs, shown)
        count = self.store.spec.size("valid")
        summary = {
            name: {"mean": value, "std": 0.0, "ci95": [value, value], "episodes": count}
            for name, value in scores.items()
        }
        state = (
            None if self.context.group.rank else self.context.keeper.state()
        )  # rank 0 keeps the best
        means = self.context.report.evaluated(p.updates, p.all_env_steps, summary, self._figures)
        self.context.keeper.keep_best(means, state)

    def _survey(self) -> None:
        """Say which classes no sample of a split holds, once every sample of it has come.

        Raises:
            MurmurError: if no training sample holds any.
        """
        if all(self._surveyed):
            return
        store, spec = self.store, self.store.spec
        census, values = store.census, [*range(len(spec.classes)), spec.ignore_index]
        own: dict[str, float] = {}
        for split in (TRAIN, VALID):
            own[f"unseen {split}"] = float(store.count_unseen(split))
            own[f"looked {split}"] = float(np.count_nonzero(census.looked[split]))
            own |= {f"{split} {v}": float(census.seen[split][v]) for v in values}
        together = self.context.group.agree(own, "sum")
        counts, seen = [0, 0], np.zeros_like(census.seen)
        for split in (TRAIN, VALID):
            if not together[f"unseen {split}"]:
                counts[split] = round(together[f"looked {split}"])
                seen[split][values] = [together[f"{split} {v}"] > 0 for v in values]
        problems = class_problems(spec, seen, (counts[0], counts[1]))
        if not self.context.group.rank:
            self.context.metrics.notices.add(
                Notice("class_absent", p.subject, p.text) for p in problems
            )
        self._surveyed = (bool(counts[TRAIN]), bool(counts[VALID]))
        if counts[TRAIN] and not seen[TRAIN][: len(spec.classes)].any():
            raise MurmurError(problems[0].text)

    def _figures(self) -> Figures:
        """Draw what the algorithm makes of the first images of the validation split."""
        image, mask = next(self.store.valid())
        return self.algorithm.figures(image[:_DRAWN], mask[:_DRAWN])

    def _ready_to_evaluate(self) -> bool:
        """Wait a little; return whether every rank has its share of the validation split."""
        return self.context.group.all_ranks(self.store.valid_ready(_WAIT_S))

"""What follows an update on samples: at the end of an epoch, an evaluation."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from learner_service.algorithms.supervised import Supervised, SupervisedConfig
from learner_service.group.group import ALONE, Group
from learner_service.storage.epochs import TRAIN, VALID
from learner_service.storage.feed import Taken
from learner_service.storage.sample_batch import SampleBatch
from learner_service.storage.samples import SampleStore
from learner_service.telemetry.device_clock import DeviceClock
from learner_service.telemetry.figures import Figures
from learner_service.telemetry.metrics import LearnerMetrics
from learner_service.telemetry.notices import NoticeLog
from learner_service.telemetry.progress import Progress
from shared.class_census import class_problems
from shared.config.experiment import ExperimentConfig
from shared.errors import MurmurError
from shared.ledger import enter
from shared.notices import Notice
from shared.process import logger

if TYPE_CHECKING:
    from learner_service.training.learner import Learner

_WAIT_S = 0.2
_DRAWN = 4  # images, at most


class EpochDuties:
    """Fulfils Duties; publishes nothing, since no policy acts."""

    saved_at_the_end = False

    def __init__(
        self,
        config: ExperimentConfig,
        options: SupervisedConfig,
        algorithm: Supervised,
        store: SampleStore,
        progress: Progress,
        clock: DeviceClock,
        state: Callable[[], dict[str, Any]],
        stop: threading.Event,
        notices: NoticeLog,
        group: Group = ALONE,
    ) -> None:
        """Wire it up.

        Args:
            config: the experiment.
            options: of the algorithm.
            algorithm: learns.
            store: where batches come from.
            progress: counters.
            clock: notified when the device works.
            state: the complete state of the run, for a checkpoint.
            stop: set from outside to end the run.
            notices: takes what the masks do not hold.
            group: the learners of the run; each evaluates its share of the validation split.
        """
        self._group = group
        self._options = options
        self._algorithm = algorithm
        self._store = store
        self._progress = progress
        self._clock = clock
        self._state = state
        self._stop = stop
        wanted = config.evaluation.best_metric
        self.best_metric = algorithm.metrics[0] if wanted == "return" else wanted
        self._epochs = 0  # seen by `after`
        self._evaluated = -1  # epochs trained when the latest evaluation was made
        self._notices = notices
        self._surveyed = [False, False]  # splits whose classes were told
        self._learner: Learner | None = None

    @property
    def complete(self) -> bool:
        """See Duties: all epochs are trained, or no evaluation gets better."""
        return self._progress.epochs >= self._options.epochs or self._algorithm.finished

    def begin(self, learner: "Learner") -> None:
        """See Duties."""
        self._learner, self._epochs = learner, self._progress.epochs

    @contextmanager
    def learning(self, batch: Taken) -> Iterator[None]:
        """See Duties."""
        assert isinstance(batch, SampleBatch)
        yield
        p, group = self._progress, self._group
        own = {"ends": float(batch.ends_epoch), "rows": float(batch.rows)}
        together = group.agree(own, "sum")
        if group.size > 1 and together["ends"] == group.size:
            self._store.end_epoch()
        assert self._learner is not None
        self._learner.rounds.count(batch.rows, round(together["rows"]))
        p.env_steps_received += batch.rows
        p.epochs = self._store.epoch

    def publish(self, version: int) -> None:
        """See Duties."""

    def after(self, updated: bool, over: bool) -> None:
        """See Duties: evaluate at the end of every few epochs, and at the end of the run."""
        epochs = self._progress.epochs
        ended, self._epochs = epochs != self._epochs, epochs
        if ended or over:
            self._survey()
        due = over or (ended and epochs % self._options.evaluate_every_epochs == 0)
        if due and epochs != self._evaluated and self._store.spec.size("valid"):
            self._evaluate()
            self._evaluated = epochs

    def _evaluate(self) -> None:
        """Score the network on the validation split, once all of it is here."""
        enter("wait_rows")
        while not self._ready_to_evaluate():
            if self._group.any_rank(self._stop.is_set()):
                return
        self._survey()
        enter("evaluate")
        with self._clock.working("evaluate"):
            scores = self._algorithm.evaluate(self._store.valid())
        p = self._progress
        shown = ", ".join(f"{name} {value:.4f}" for name, value in scores.items())
        logger.info("epoch %d of %d: %s", p.epochs, self._options.epochs, shown)
        count = self._store.spec.size("valid")
        summary = {
            name: {"mean": value, "std": 0.0, "ci95": [value, value], "episodes": count}
            for name, value in scores.items()
        }
        assert self._learner is not None
        state = None if self._group.rank else self._state()  # rank 0 keeps the best
        self._learner.note_evaluation(p.updates, p.all_env_steps, summary, state, self._figures)

    def _survey(self) -> None:
        """Say which classes no sample of a split holds, once every sample of it has come.

        Raises:
            MurmurError: if no training sample holds any.
        """
        if all(self._surveyed):
            return
        store, spec = self._store, self._store.spec
        census, values = store.census, [*range(len(spec.classes)), spec.ignore_index]
        own: dict[str, float] = {}
        for split in (TRAIN, VALID):
            own[f"unseen {split}"] = float(store.count_unseen(split))
            own[f"looked {split}"] = float(np.count_nonzero(census.looked[split]))
            own |= {f"{split} {v}": float(census.seen[split][v]) for v in values}
        together = self._group.agree(own, "sum")
        counts, seen = [0, 0], np.zeros_like(census.seen)
        for split in (TRAIN, VALID):
            if not together[f"unseen {split}"]:
                counts[split] = round(together[f"looked {split}"])
                seen[split][values] = [together[f"{split} {v}"] > 0 for v in values]
        problems = class_problems(spec, seen, (counts[0], counts[1]))
        if not self._group.rank:
            self._notices.add(Notice("class_absent", p.subject, p.text) for p in problems)
        self._surveyed = [bool(count) for count in counts]
        if counts[TRAIN] and not seen[TRAIN][: len(spec.classes)].any():
            raise MurmurError(problems[0].text)

    def _figures(self) -> Figures:
        """What the algorithm draws of the first images of the validation split."""
        image, mask = next(self._store.valid())
        return self._algorithm.figures(image[:_DRAWN], mask[:_DRAWN])

    def _ready_to_evaluate(self) -> bool:
        """Wait a little; whether every rank has its share of the validation split."""
        return self._group.all_ranks(self._store.valid_ready(_WAIT_S))

    def settled(self, updated: bool) -> bool:
        """See Duties: the rest of an epoch can be trained at any time."""
        return True

    def set_gauges(self, metrics: LearnerMetrics) -> None:
        """See Duties."""
        figures = self._store.figures()
        metrics.gauge("epoch").set(self._progress.epochs)
        metrics.gauge("epoch_samples_trained").set(figures["trained"])
        metrics.gauge("epoch_samples_remaining").set(figures["remaining"])

    def figures(self) -> Mapping[str, Any]:
        """See Duties."""
        return {"samples": {**self._store.figures(), "epochs": self._options.epochs}}

"""What follows an update, where runs in environments and runs on samples differ."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from learner_service.algorithms.base import Algorithm
from learner_service.checkpoint import CheckpointFolder
from learner_service.group.group import ALONE, Group
from learner_service.serving.evaluation import Evaluation, EvaluationScheduler
from learner_service.serving.inference import InferenceLoop
from learner_service.serving.league import League
from learner_service.serving.snapshots import Snapshots
from learner_service.storage.feed import Feed, Taken
from learner_service.telemetry.figures import Figures
from learner_service.telemetry.metrics import LearnerMetrics
from learner_service.telemetry.progress import Progress
from shared.config.experiment import ExperimentConfig
from shared.ledger import enter

if TYPE_CHECKING:
    from learner_service.training.learner import Learner


class Duties(Protocol):
    """See the module. Called by the thread that learns.

    Attributes:
        best_metric: result of an evaluation that chooses the best checkpoint.
        saved_at_the_end: a run that is told to stop is saved when its sessions have ended, not
            at once.
    """

    best_metric: str
    saved_at_the_end: bool

    @property
    def complete(self) -> bool:
        """Whether the run has reached an end that is not one of config.run."""

    def begin(self, learner: "Learner") -> None:
        """The learner is there; no update was made yet."""

    def learning(self, batch: Taken) -> AbstractContextManager[None]:
        """Around an update."""

    def publish(self, version: int) -> None:
        """An update has succeeded: it is the one with this number."""

    def after(self, updated: bool, over: bool) -> None:
        """What is due between updates.

        Args:
            updated: whether one was just made.
            over: whether the run has reached its end.
        """

    def settled(self, updated: bool) -> bool:
        """Whether a checkpoint that is written now can be continued from."""

    def set_gauges(self, metrics: LearnerMetrics) -> None:
        """Gauges that are set now and then."""

    def figures(self) -> Mapping[str, Any]:
        """For the log: where the epoch stands, as `samples`, if there are epochs."""


class ActingDuties:
    """A policy acts while it is learned: it is published, evaluated, and plays its past."""

    def __init__(
        self,
        config: ExperimentConfig,
        algorithm: Algorithm[Any],
        storage: Feed[Any],
        snapshots: Snapshots,
        checkpoints: CheckpointFolder,
        scheduler: EvaluationScheduler,
        inference: InferenceLoop,
        progress: Progress,
        state: Callable[[], dict[str, Any]],
        league: League,
        group: Group = ALONE,
    ) -> None:
        """Wire it up.

        Args:
            config: the experiment.
            algorithm: learns.
            storage: where batches come from.
            snapshots: of the policy that acts, published to after every update.
            checkpoints: where to save.
            scheduler: notified when an evaluation is due.
            inference: notified when an update begins and ends.
            progress: counters.
            state: the complete state of the run, for a checkpoint.
            league: given past policies to play against.
            group: the learners of the run; rank 0 offers evaluations.
        """
        self._algorithm, self._storage = algorithm, storage
        self._snapshots = snapshots
        self._checkpoints = checkpoints
        self._scheduler = scheduler
        self._inference, self._progress = inference, progress
        self._state, self._league = state, league
        self._evaluate_every = 0 if group.rank else config.evaluation.every_updates
        self.best_metric = config.evaluation.best_metric
        self.saved_at_the_end = config.learner.pipeline == "async"
        self.complete = False
        self._offered = -1  # the version of the latest evaluation
        self._learner: Learner | None = None

    def begin(self, learner: "Learner") -> None:
        """See Duties."""
        self._learner = learner
        self._scheduler.finished = self._finish_evaluation
        if self._evaluate_every and self._progress.updates == 0:
            self._offer_evaluation()

    @contextmanager
    def learning(self, batch: Taken) -> Iterator[None]:
        """See Duties."""
        self._inference.during_update(True)
        yield
        self._inference.during_update(False)

    def publish(self, version: int) -> None:
        """See Duties."""
        self._snapshots.publish(self._algorithm.publish, version)

    def after(self, updated: bool, over: bool) -> None:
        """See Duties."""
        p, learner = self._progress, self._learner
        assert learner is not None
        if updated:
            self._league.share_points(p.updates)
        if updated and self._league.wants(p.updates):
            learner.write_or_continue(self._keep_opponent)
        every = self._evaluate_every
        # The end may come between updates: the last policy is evaluated all the same.
        due = every and (over or (updated and p.updates % every == 0))
        if due and p.updates != self._offered:
            self._offer_evaluation()

    def settled(self, updated: bool) -> bool:
        """See Duties: a sync run is saved where no update is due, there it can continue exactly."""
        return self.saved_at_the_end or (updated and not self._storage.ready)

    def set_gauges(self, metrics: LearnerMetrics) -> None:
        """See Duties."""
        metrics.gauge("league_opponents").set(len(self._league.opponents))

    def figures(self) -> Mapping[str, Any]:
        """See Duties: there are no epochs."""
        return MappingProxyType({})

    def _keep_opponent(self) -> None:
        """Write the policy as it is now, and play against it from now on.

        Raises:
            CheckpointError: if it cannot be written; the league stays as it is.
        """
        assert self._learner is not None
        state = {**self._state(), "best": self._learner.best}
        path = self._checkpoints.save_opponent(state, self._progress.updates)
        self._league.keep(path.name, self._algorithm.make_policy())

    def _offer_evaluation(self) -> None:
        enter("evaluate")
        p = self._progress
        self._offered = p.updates
        # A copy: training continues while the evaluation lasts.
        state = copy.deepcopy(self._state())
        policy = self._algorithm.make_policy()
        self._snapshots.published.mark()
        self._scheduler.offer(Evaluation(policy, p.updates, p.all_env_steps, state))

    def _finish_evaluation(self, evaluation: Evaluation) -> None:
        """An evaluation is complete. Called by the inference thread."""
        assert self._learner is not None
        self._learner.note_evaluation(
            evaluation.updates,
            evaluation.env_steps,
            evaluation.summary(),
            evaluation.state,
            lambda: Figures(values={f"episodes/{k}": v for k, v in evaluation.episodes.items()}),
        )

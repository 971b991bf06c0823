"""Steps after an update of a policy that acts: it is compared, evaluated, and played against."""

import copy
from typing import Any

from learner_service.algorithms.base import Algorithm
from learner_service.gathering import RankSync
from learner_service.group.checksum import require_same
from learner_service.keeper import Keeper
from learner_service.last_finite import named_weights
from learner_service.report import Report, Update
from learner_service.runtime.readback import to_host
from learner_service.serving.evaluation import Evaluation, EvaluationScheduler
from learner_service.serving.league import League
from learner_service.serving.snapshots import Snapshots
from learner_service.telemetry.figures import Figures
from learner_service.telemetry.metrics import LearnerMetrics
from shared.ledger import enter


def compare_ranks(
    algorithm: Algorithm[Any], sync: RankSync, every_updates: int, update: Update | None, over: bool
) -> bool:
    """Compare the weights of all ranks every few updates; the last two arguments are a Step's.

    Raises:
        MurmurError: if they differ.
    """
    updates = sync.progress.updates
    if update is not None and update.kept and updates % every_updates == 0:
        require_same(sync.group, named_weights(algorithm), f"update {updates}", to_host)
    return over


class KeepOpponents:
    """Lets a league play against the policy as it was every few updates."""

    def __init__(
        self,
        league: League,
        algorithm: Algorithm[Any],
        sync: RankSync,
        keeper: Keeper,
        metrics: LearnerMetrics,
    ) -> None:
        """Keep policies of `algorithm` for `league`."""
        self._league = league
        self._algorithm = algorithm
        self._progress = sync.progress
        self._keeper = keeper
        self._opponents = metrics.gauge("league_opponents")
        self._opponents.set(len(league.opponents))

    def __call__(self, update: Update | None, over: bool) -> bool:
        """Share the opponents' scores and keep the policy if that is due; a Step."""
        updates = self._progress.updates
        if update is not None and update.kept:
            self._league.share_points(updates)
            if self._league.wants(updates):
                self._keeper.write_or_continue(self._keep)
        return over

    def _keep(self) -> None:
        """Write the policy as it is now, and play against it from now on.

        Raises:
            CheckpointError: if it cannot be written; the league stays as it is.
        """
        path = self._keeper.keep_opponent()
        self._league.keep(path.name, self._algorithm.make_policy())
        self._opponents.set(len(self._league.opponents))


class Evaluate:
    """Offers the policy to evaluators every few updates, and keeps the best one."""

    def __init__(
        self,
        algorithm: Algorithm[Any],
        snapshots: Snapshots,
        scheduler: EvaluationScheduler,
        sync: RankSync,
        keeper: Keeper,
        report: Report,
        every_updates: int,
    ) -> None:
        """Evaluate the untrained policy first.

        Args:
            algorithm: algorithm that learns.
            snapshots: fence behind which policies may act.
            scheduler: hands evaluations to evaluators.
            sync: counters.
            keeper: keeps the best policy.
            report: logs results.
            every_updates: updates from one evaluation to the next.
        """
        self._algorithm = algorithm
        self._snapshots = snapshots
        self._scheduler = scheduler
        self._progress = sync.progress
        self._keeper = keeper
        self._report = report
        self._every = every_updates
        self._offered = -1  # version of the latest evaluation
        scheduler.finished = self._finish
        if sync.progress.updates == 0:
            self._offer()

    def __call__(self, update: Update | None, over: bool) -> bool:
        """Offer an evaluation if it is due; a Step."""
        updates = self._progress.updates
        # The end may come between updates: the last policy is evaluated all the same.
        due = over or (update is not None and update.kept and updates % self._every == 0)
        if due and updates != self._offered:
            self._offer()
        return over

    def _offer(self) -> None:
        """Offer the policy as it is now."""
        enter("evaluate")
        p = self._progress
        self._offered = p.updates
        # A copy: training continues while the evaluation lasts.
        state = copy.deepcopy(self._keeper.state())
        policy = self._algorithm.make_policy()
        self._snapshots.published.mark()
        self._scheduler.offer(Evaluation(policy, p.updates, p.all_env_steps, state))

    def _finish(self, evaluation: Evaluation) -> None:
        """Log a complete evaluation and keep the best policy. Called by the inference thread."""
        means = self._report.evaluated(
            evaluation.updates,
            evaluation.env_steps,
            evaluation.summary(),
            lambda: Figures(values={f"episodes/{k}": v for k, v in evaluation.episodes.items()}),
        )
        self._keeper.keep_best(means, evaluation.state)

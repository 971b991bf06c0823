"""Steps after an update of a policy that acts: it is compared, evaluated, and played against."""

import copy
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor, nn

from murmur.learner_service.device.readback import to_host
from murmur.learner_service.gathering import RankSync
from murmur.learner_service.keeper import Keeper
from murmur.learner_service.learning.base import Algorithm
from murmur.learner_service.ranks.group import require_same
from murmur.learner_service.report import Report, Update
from murmur.learner_service.serving.curriculum import Curriculum
from murmur.learner_service.serving.evaluation import Evaluation, EvaluationScheduler
from murmur.learner_service.serving.league import League
from murmur.learner_service.serving.snapshots import Snapshots
from murmur.learner_service.telemetry.figures import Figures
from murmur.learner_service.telemetry.metrics import LearnerMetrics
from murmur.shared.config.experiment import EvaluationConfig
from murmur.shared.process.ledger import enter


def named_weights(algorithm: Algorithm[Any]) -> dict[str, Tensor]:
    """Return parameters and buffers of all networks, by name."""
    return {
        f"{name}.{of}": tensor
        for name, part in algorithm.parts.items()
        if isinstance(part, nn.Module)
        for of, tensor in chain(part.named_parameters(), part.named_buffers())
    }


def compare_ranks(
    algorithm: Algorithm[Any],
    ranks: RankSync,
    every_updates: int,
    update: Update | None,
    over: bool,
) -> bool:
    """Compare the weights of several ranks every few updates; the last two arguments are a Step's.

    Raises:
        MurmurError: if they differ.
    """
    updates, several = ranks.progress.updates, ranks.group.size > 1
    if several and update is not None and update.kept and updates % every_updates == 0:
        require_same(ranks.group, named_weights(algorithm), f"update {updates}", to_host)
    return over


def count_rows(ranks: RankSync, update: Update | None, over: bool) -> bool:
    """Count an update's rows as environment steps: no environment takes any; a Step."""
    if update is None or not update.kept:
        return over
    own = update.batch.size
    ranks.progress.env_steps_received += own
    ranks.count(own, ranks.group.size * own)
    return ranks.over


@dataclass(eq=False)
class KeepOpponents:
    """Lets a league play against the policy as it was every few updates.

    Attributes:
        league: plays against past policies.
        algorithm: algorithm that learns.
        keeper: writes past policies.
        metrics: Prometheus metrics.
    """

    league: League
    algorithm: Algorithm[Any]
    keeper: Keeper
    metrics: LearnerMetrics

    def __post_init__(self) -> None:
        self._count()

    def __call__(self, update: Update | None, over: bool) -> bool:
        """Share the opponents' scores and keep the policy if that is due; a Step."""
        updates = self.keeper.ranks.progress.updates
        if update is not None and update.kept:
            self.league.share_points(updates)
            if self.league.wants(updates):
                self.keeper.write_or_continue(self._keep)
        return over

    def _keep(self) -> None:
        """Write the policy as it is now, and play against it from now on.

        Raises:
            CheckpointError: if it cannot be written; the league stays as it is.
        """
        path = self.keeper.keep_opponent()
        self.league.keep(path.name, self.algorithm.evaluated())  # as it is loaded, too
        self._count()

    def _count(self) -> None:
        self.metrics.gauge("league_opponents").set(len(self.league.opponents))


def move_curriculum(
    curriculum: Curriculum, ranks: RankSync, update: Update | None, over: bool
) -> bool:
    """Change the options of the episodes that begin after an update that is kept; a Step."""
    if update is not None and update.kept:
        agree = partial(ranks.group.agree, how="sum")
        curriculum.advance(ranks.progress.updates, ranks.env_steps, agree)
    return over


@dataclass(eq=False)
class Evaluate:
    """Offers the policy to evaluators now and then, and keeps the best one.

    Attributes:
        algorithm: algorithm that learns.
        snapshots: fence behind which policies may act.
        scheduler: hands evaluations to evaluators.
        keeper: keeps the best policy.
        report: logs results.
        every: updates, environment steps or minutes from one evaluation to the next.
    """

    algorithm: Algorithm[Any]
    snapshots: Snapshots
    scheduler: EvaluationScheduler
    keeper: Keeper
    report: Report
    every: EvaluationConfig
    _offered: int = -1  # version of the latest evaluation

    def __post_init__(self) -> None:
        """Offer the untrained policy first."""
        self.scheduler.finished = self._finish
        self._periods = self._passed()
        if self.keeper.ranks.progress.updates == 0:
            self._offer()

    def __call__(self, update: Update | None, over: bool) -> bool:
        """Offer an evaluation if it is due; a Step."""
        updates, periods = self.keeper.ranks.progress.updates, self._passed()
        # The end may come between updates: the last policy is evaluated all the same.
        due = over or (update is not None and update.kept and periods > self._periods)
        if due:
            self._periods = periods
        if due and updates != self._offered:
            self._offer()
        return over

    def _passed(self) -> int:
        """Return the number of whole periods between evaluations since the run began."""
        every, ranks = self.every, self.keeper.ranks
        if every.every_minutes:
            return int(ranks.progress.seconds / 60 / every.every_minutes)
        if every.every_env_steps:
            return ranks.env_steps // every.every_env_steps
        return ranks.progress.updates // every.every_updates

    def _offer(self) -> None:
        """Offer the policy as it is now."""
        enter("evaluate")
        p = self.keeper.ranks.progress
        self._offered = p.updates
        # A copy: training continues while the evaluation lasts.
        state = copy.deepcopy(self.keeper.state())
        policy = self.algorithm.evaluated()
        self.snapshots.published.mark()
        self.scheduler.offer(Evaluation(policy, p.updates, p.all_env_steps, state))

    def _finish(self, evaluation: Evaluation) -> None:
        """Log a complete evaluation and keep the best policy. Called by the inference thread."""
        means = self.report.evaluated(
            evaluation.updates,
            evaluation.env_steps,
            evaluation.summary(),
            lambda: Figures(values={f"episodes/{k}": v for k, v in evaluation.episodes.items()}),
        )
        self.keeper.keep_best(means, evaluation.state)

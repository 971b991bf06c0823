"""Acting for evaluations: greedy, nothing is stored, results go to the scheduler."""

import numpy as np
import torch

from learner_service.serving.accounts import ServingStats
from learner_service.serving.batcher import Request, deliver
from learner_service.serving.evaluation import EvaluationScheduler
from learner_service.serving.league import League
from learner_service.serving.session import EnvSession
from learner_service.serving.snapshots import Snapshots
from learner_service.serving.staging import ForwardRows, Staging
from shared.process.ledger import enter
from shared.wire.timestep import StepType

_LAST = int(StepType.LAST)


class Evaluator:
    """Answers evaluation sessions with the policies of their evaluations. Inference thread."""

    def __init__(
        self,
        scheduler: EvaluationScheduler,
        snapshots: Snapshots,
        staging: Staging,
        league: League,
        stats: ServingStats,
        generator: torch.Generator | None = None,
    ) -> None:
        """Wire it up.

        Args:
            scheduler: scheduler that completed and ended evaluations are reported to.
            snapshots: snapshots that tell when a policy is written.
            staging: brings rows to the policy, and actions back.
            league: acts for the teams that the policy does not act for.
            stats: counts of what is served.
            generator: randomness of the actions; None: they are greedy.
        """
        self._scheduler = scheduler
        self._snapshots = snapshots
        self._staging = staging
        self._league = league
        self._stats = stats
        self._generator = generator

    def answer(self, request: Request) -> None:
        """Note the results in a session's rows, act on the rows and deliver the actions."""
        session, timestep = request.session, request.timestep
        evaluation = session.evaluation
        assert evaluation is not None
        complete = evaluation.observe(timestep)
        last = int((timestep.step_type == _LAST).sum())
        self._stats.metrics.counter("episodes", mode="evaluate").inc(last)
        enter("evaluate")
        policy, generator, staging = evaluation.policy, self._generator, self._staging
        self._snapshots.published.wait()  # evaluations' policies are behind this mark, too
        with self._stats.clock.working("evaluate"):
            own = ForwardRows(policy, [timestep], session.memory)
            action, (session.memory,) = staging.forward_rows([own], generator)
            if request.other is not None:
                action = action.copy()  # the other team's actions may overwrite it
                others = self._league.play([request], policy, generator, staging, None)
                action = np.concatenate([action, others[session]], axis=1)
        enter("reply")
        deliver([(request, session.pack(request.sequence, evaluation.updates, action))])
        if complete and not session.complete:
            session.complete = True
            self._scheduler.finished(evaluation)

    def end(self, session: EnvSession) -> None:
        """Release the evaluation of a session that has ended."""
        assert session.evaluation is not None
        self._scheduler.end(session.evaluation, session.complete, session.given_up)

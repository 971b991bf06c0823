"""The warm-up of a run: measures environments and updates, then settles what is in flight."""

import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

from murmur.learner_service.device.cuda_graph import CALLS_TO_CAPTURE
from murmur.learner_service.learning.base import algorithm_config
from murmur.learner_service.ranks.group import ALONE, Group
from murmur.learner_service.report import Update
from murmur.learner_service.storage.flight import Flight, Speed
from murmur.learner_service.storage.rollout import RolloutStorage
from murmur.learner_service.telemetry.metrics import LearnerMetrics
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.process.errors import ConfigError
from murmur.shared.process.process import logger

_SKIPPED = CALLS_TO_CAPTURE  # updates that also compile, capture and fill caches
_UPDATES, _TURNS = 4, 64  # measured, at least
_LEAST_S = 3.0
_MOST_EAGER = 64  # updates not measured because some of it was not replayed; then that is its time
_OF_A_TURN = ("environment_seconds", "queue_wait_seconds", "inference_seconds")


@dataclass(eq=False)
class WarmUp:
    """Measures once, and again from the start if environments come or go meanwhile.

    Called by the learner thread; only in the async pipeline.

    Attributes:
        storage: gets what was measured.
        metrics: metrics that the inference thread writes.
        any_lag: whether max_policy_lag is to be chosen.
        keep: called once with what was chosen.
        clock: seconds.
        group: its ranks choose together, by the means of what they measured.
        unsettled: count of `Graphs.unsettled`; an update in which it grows is not measured.
        over: whether it has chosen.
    """

    storage: RolloutStorage
    metrics: LearnerMetrics
    _: KW_ONLY
    any_lag: bool
    keep: Callable[[Flight], None]
    clock: Callable[[], float] = time.monotonic
    group: Group = ALONE
    unsettled: Callable[[], int] = lambda: 0
    over: bool = False
    _skip: int = _SKIPPED
    _environments: int = -1
    _seen: int = 0
    _eager: int = 0

    def __call__(self, update: Update | None, over: bool) -> bool:
        """Note an update that is kept; a Step."""
        if update is not None and update.kept:
            self.updated(update.batch.size, update.seconds)
        return over

    def updated(self, rows: int, seconds: float) -> None:
        """Note an update of this number of environment rows; choose once enough was measured."""
        if self.over:
            return
        before, self._seen = self._seen, self.unsettled()
        if self._skip:
            self._skip -= 1
            return
        if self._seen != before and self._eager < _MOST_EAGER:
            self._eager, self._environments = self._eager + 1, -1  # begin again
            turn_s = 0.0
        else:
            turn_s = self._measured_turn(rows, seconds)
        if not self.group.all_ranks(turn_s > 0):
            return
        self.over = True
        learn_s = max(self._seconds / self._rows, 1e-9)
        means = self.group.agree({"turn_s": turn_s, "learn_s": learn_s}, "sum")
        size = self.group.size
        self._choose(Speed(means["turn_s"] / size, means["learn_s"] / size))

    def _measured_turn(self, rows: int, seconds: float) -> float:
        """Note an update; returns the time of a turn once enough was measured, else 0."""
        environments = self.storage.chosen["environments"]
        if environments != self._environments:  # this update ran beside others
            self._environments, self._since = environments, self.clock()
            self._before = {name: self.metrics.sum_of(name) for name in _OF_A_TURN}
            self._rows = self._updates = 0
            self._seconds = 0.0
            return 0.0
        self._rows, self._updates = self._rows + rows, self._updates + 1
        self._seconds += seconds
        enough = self._updates >= _UPDATES and self.clock() - self._since >= _LEAST_S
        return self._turn_s() if enough else 0.0

    def _turn_s(self) -> float:
        """Mean time of an environment's turn; 0 while too few were seen."""
        total = 0.0
        for name in _OF_A_TURN:
            seconds, count = self.metrics.sum_of(name)
            seconds, count = seconds - self._before[name][0], count - self._before[name][1]
            if name == "environment_seconds" and count < _TURNS:
                return 0.0
            total += seconds / count if count else 0.0
        return total

    def _choose(self, speed: Speed) -> None:
        flight = self.storage.measured(speed, any_lag=self.any_lag, group=self.group)
        acting = self._environments / speed.turn_s
        logger.info(
            "measured: %d environments bring %.3g rows/s, the learner takes %.3g rows/s. Chosen: "
            "unrolls of %d steps, %d of them an update, rows at most %d updates old "
            "(learner.max_policy_lag); config.yaml has it",
            self._environments,
            acting,
            1 / speed.learn_s,
            flight.unroll_steps,
            flight.unrolls_per_update,
            flight.max_policy_lag or 0,
        )
        # The configuration is of the whole group.
        own = {"steps": flight.unroll_steps, "unrolls": flight.unrolls_per_update}
        largest = self.group.agree(own, "max")
        unrolls = round(largest["unrolls"]) * self.group.size
        self.keep(Flight(round(largest["steps"]), unrolls, flight.max_policy_lag))


def check_in_flight(
    config: ExperimentConfig, storage: RolloutStorage, environments: int | None = None
) -> None:
    """Refuse a number of unrolls that no session fits; say if some environments have to wait.

    Args:
        config: the experiment.
        storage: knows how many may act.
        environments: those there are; None: all that are configured.

    Raises:
        ConfigError: naming the numbers and the fix.
    """
    server, fixed, limit = config.env_server, storage.fixed_unrolls, storage.environments_limit
    total = config.total_envs if environments is None else environments
    session = server.envs_per_worker // server.sessions_per_worker
    if not fixed or max(session, total) <= limit:
        return
    own, lag = algorithm_config(config.algorithm).about.waiting_advice, config.learner.policy_lag
    advice = ", or ".join(filter(None, (own, "raise learner.max_policy_lag")))
    if session > limit:
        raise ConfigError(
            f"an update takes the unrolls of {fixed} environments, as configured, and "
            f"learner.max_policy_lag={lag} lets {limit} act at once, but a session has {session} "
            f"(env_server.envs_per_worker={server.envs_per_worker} / sessions_per_worker="
            f"{server.sessions_per_worker}): {advice} to at least {-(-session // fixed) - 1}, "
            "or let sessions have fewer environments"
        )
    logger.warning(
        "%d of %d environments wait their turn: %s. An update takes the unrolls of %d, and rows "
        "may be %d updates old",
        total - limit,
        total,
        advice,
        fixed,
        lag,
    )

"""Accounts of serving: rows, episodes and their results, and the latency of answers."""

from collections.abc import Sequence
from typing import Any

from learner_service.serving.batcher import DynamicBatcher
from learner_service.serving.session import EnvSession
from learner_service.storage.storage import UnrollStorage
from learner_service.telemetry.device_clock import DeviceClock
from learner_service.telemetry.metrics import LearnerMetrics
from learner_service.telemetry.progress import Progress
from shared.wire.timestep import StepType, TimeStep

# NumPy compares with ints faster.
_MID, _LAST, _ABORTED = int(StepType.MID), int(StepType.LAST), int(StepType.ABORTED)
# An act waited if it took _WAITED_S and _WAITED_TIMES the usual, in which an act weighs _NEWER.
_WAITED_S, _WAITED_TIMES, _NEWER = 0.01, 5.0, 0.02


class ServingStats:
    """Rows, episodes, results and latencies of serving. Used by the inference thread.

    Attributes:
        progress: counters of the run, and results of episodes.
        metrics: Prometheus metrics.
        clock: clock of the device's work.
    """

    def __init__(
        self,
        batcher: DynamicBatcher,
        storage: UnrollStorage[Any],
        progress: Progress,
        metrics: LearnerMetrics,
        clock: DeviceClock,
    ) -> None:
        """Begin to count.

        Args:
            batcher: queue of requests.
            storage: storage of the transitions.
            progress: counters of the run.
            metrics: Prometheus metrics.
            clock: clock of the device's work.
        """
        self.progress = progress
        self.metrics = metrics
        self.clock = clock
        self._batcher = batcher
        self._num_agents = storage.spec.num_agents
        self._learns_once = storage.learns_once
        # Looked up once: these are counted for each request.
        self._queue_wait = metrics.histogram("queue_wait_seconds")
        self._environment = metrics.histogram("environment_seconds")
        self._rows = metrics.counter("rows_received")
        self._env_steps = metrics.counter("env_steps")
        self._agent_steps = metrics.counter("agent_steps")
        self._usual_s = 0.0  # of an act

    def note_arrival(self, answered: float, arrived: float, taken: float) -> None:
        """Count how long environments took for their steps, and the queue for a request.

        Args:
            answered: time of the session's last answer, s; 0 before the first.
            arrived: time of the request's arrival, s.
            taken: time when its batch began, s.
        """
        self._queue_wait.observe(taken - arrived)
        if answered:
            self._environment.observe(arrived - answered)

    def note_act(self, seconds: float, updating: bool) -> None:
        """Count an act that waited, told by its time beside that of the acts before.

        Args:
            seconds: time of copying observations, the policy, and copying actions, s.
            updating: whether an update was under way when it began.
        """
        usual = self._usual_s or seconds
        most = _WAITED_TIMES * usual
        self._usual_s = usual + _NEWER * (min(seconds, most) - usual)
        if seconds >= _WAITED_S and seconds >= most:
            phase = "update" if updating or self._batcher.updating else "idle"
            self.metrics.counter("acts_waited", phase=phase).inc()
            self.metrics.counter("acts_waited_seconds", phase=phase).inc(seconds - usual)

    def note_batch(self, latencies: Sequence[float], seconds: float, updating: bool) -> None:
        """Count a batch and how long its requests have waited.

        Args:
            latencies: time from arrival to actions of training requests that the learner did not
                make wait, s.
            seconds: time of serving the batch, s.
            updating: whether an update was under way when the batch began.
        """
        self.metrics.histogram("inference_seconds").observe(seconds)
        phase = "update" if updating or self._batcher.updating else "idle"
        acting = self.metrics.histogram("acting_seconds", phase=phase)
        for latency in latencies:
            acting.observe(latency)

    def count(self, session: EnvSession, timestep: TimeStep) -> None:
        """Count the steps, episodes and results of rows that a session sent."""
        step_type = timestep.step_type
        self._rows.inc(session.num_envs)
        if session.resumed and session.messages == 1:
            return
        self.progress.rows_received += session.num_envs
        all_mid = step_type.tobytes() == session.all_mid  # as most rows are
        acted = len(step_type)
        if not all_mid:
            acted = int(((step_type == _MID) | (step_type == _LAST)).sum())
        self.progress.env_steps_received += acted
        if not self._learns_once:  # else they are counted once they are learned from
            self.progress.env_steps += acted
        self._env_steps.inc(acted)
        self._agent_steps.inc(acted * self._num_agents)
        session.episode_return += timestep.reward.sum(1)
        if all_mid:
            return
        last = step_type == _LAST
        if last.any():
            finished = int(last.sum())
            self.progress.episodes += finished
            self.metrics.counter("episodes", mode="train").inc(finished)
            self.progress.finish_episode("return", session.episode_return[last])
            session.episode_return[last] = 0
            for name, values in timestep.metrics.items():
                if name != "return":
                    self.progress.finish_episode(name, values[last])
        aborted = step_type == _ABORTED
        if aborted.any():
            self.metrics.counter("episodes_dropped", reason="environment").inc(int(aborted.sum()))
            session.episode_return[aborted] = 0

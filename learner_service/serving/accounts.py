"""Accounts of serving: rows, episodes and their results, and the latency of answers."""

import time
from typing import Any

from learner_service.serving.batcher import DynamicBatcher, Request
from learner_service.serving.session import Session
from learner_service.storage.storage import UnrollStorage
from learner_service.telemetry.metrics import LearnerMetrics
from learner_service.telemetry.progress import Progress
from shared.spec import EnvSpec
from shared.timestep import StepType, TimeStep

# NumPy compares with ints faster.
_MID, _LAST, _ABORTED = int(StepType.MID), int(StepType.LAST), int(StepType.ABORTED)
# An act waited if it took _WAITED_S and _WAITED_TIMES the usual, in which an act weighs _NEWER.
_WAITED_S, _WAITED_TIMES, _NEWER = 0.01, 5.0, 0.02


class Accounts:
    """See the module. Used by the inference thread; the arguments are those of InferenceLoop."""

    def __init__(
        self,
        spec: EnvSpec,
        batcher: DynamicBatcher,
        storage: UnrollStorage[Any],
        progress: Progress,
        metrics: LearnerMetrics,
    ) -> None:
        """Nothing has been served yet."""
        self._num_agents, self._learns_once = spec.num_agents, storage.learns_once
        self._batcher = batcher
        self._progress = progress
        self._metrics = metrics
        self._batch_ended = time.monotonic()
        self._usual_s = 0.0  # of an act

    def note_act(self, seconds: float, updating: bool) -> None:
        """Count an act that waited, told by its time beside that of the acts before.

        Args:
            seconds: of copying observations, the policy, and copying actions.
            updating: whether an update was under way when it began.
        """
        usual = self._usual_s or seconds
        most = _WAITED_TIMES * usual
        self._usual_s = usual + _NEWER * (min(seconds, most) - usual)
        if seconds >= _WAITED_S and seconds >= most:
            phase = "update" if updating or self._batcher.updating else "idle"
            self._metrics.counter("acts_waited", phase=phase).inc()
            self._metrics.counter("acts_waited_seconds", phase=phase).inc(seconds - usual)

    def note_latency(
        self, requests: list[Request], fresh: list[Request], updating: bool, started: float
    ) -> None:
        """Time from arrival to actions of those that were not made to wait by the learner.

        Args:
            requests: the batch, served.
            fresh: those of it that came to train and had not been blocked before.
            updating: whether an update was under way when the batch began.
            started: when it began.
        """
        now, batcher = time.monotonic(), self._batcher
        self._metrics.histogram("inference_seconds").observe(now - started)
        phase = "update" if updating or batcher.updating else "idle"
        latencies = [now - r.arrived for r in fresh if not r.session.waiting]
        acting = self._metrics.histogram("acting_seconds", phase=phase)
        for latency in latencies:
            acting.observe(latency)
        if phase in batcher.tuners:
            tuner = batcher.tuners[phase]
            envs = sum(r.session.num_envs for r in requests)
            tuner.observe(latencies, envs, now - started, now - self._batch_ended)
            kept = tuner.kept
            self._metrics.gauge("batch_wait_seconds", phase=phase).set(kept.wait_s)
            self._metrics.gauge("batch_preferred_envs", phase=phase).set(kept.preferred_envs)
        self._batch_ended = now

    def count(self, session: Session, timestep: TimeStep) -> None:
        """Count the steps, episodes and results of rows that a session sent."""
        step_type = timestep.step_type
        self._metrics.counter("rows_received").inc(session.num_envs)
        if session.resumed and session.messages == 1:
            return
        self._progress.rows_received += session.num_envs
        all_mid = step_type.tobytes() == session.all_mid  # as most rows are
        acted = len(step_type)
        if not all_mid:
            acted = int(((step_type == _MID) | (step_type == _LAST)).sum())
        self._progress.env_steps_received += acted
        if not self._learns_once:  # else they are counted once they are learned from
            self._progress.env_steps += acted
        self._metrics.counter("env_steps").inc(acted)
        self._metrics.counter("agent_steps").inc(acted * self._num_agents)
        session.episode_return += timestep.reward.sum(1)
        if all_mid:
            return
        last = step_type == _LAST
        if last.any():
            finished = int(last.sum())
            self._progress.episodes += finished
            self._metrics.counter("episodes", mode="train").inc(finished)
            self._progress.finish_episode("return", session.episode_return[last])
            session.episode_return[last] = 0
            for name, values in timestep.metrics.items():
                if name != "return":
                    self._progress.finish_episode(name, values[last])
        aborted = step_type == _ABORTED
        if aborted.any():
            self._metrics.counter("episodes_dropped", reason="environment").inc(int(aborted.sum()))
            session.episode_return[aborted] = 0

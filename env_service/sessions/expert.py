"""The actions that a scripted baseline advises while the learner's policy acts, for imitation.

They are sent to the learner as the observation `expert_action`. Every answer of the learner has its
number of updates; after the updates of imitation the baseline is not called any more.
"""

from dataclasses import replace

import numpy as np

from murmur.env_service.environment import ScriptedPolicy, SeededPolicy, find_baseline
from murmur.env_service.watchdog.faults import GuardedEnvironment
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.process.errors import ConfigError, EnvironmentFault, MurmurError
from murmur.shared.wire.spec import (
    ACTION_MASK,
    AGENT_MASK,
    EXPERT_ACTION,
    TURN_MASK,
    Composite,
    Discrete,
    with_expert,
)
from murmur.shared.wire.timestep import Array, StepType, TimeStep


class Expert:
    """Labeler of one session's rows with a baseline's actions.

    Attributes:
        labels: true with imitation: every row needs `label`.
        spec: spec of the rows with the added observation.
        updates: number of updates of the learner's policy; the caller sets it after `begin`.
    """

    def __init__(
        self, config: ExperimentConfig, environment: GuardedEnvironment, *, asked: bool
    ) -> None:
        """Prepare; the baseline is made at its first call.

        Args:
            config: configuration of the run.
            environment: environment that the baseline may read.
            asked: false, as in evaluations, to never call the baseline.

        Raises:
            ConfigError: if there is no such baseline, or the actions are continuous.
        """
        self._name = config.imitation.baseline
        self.labels = bool(self._name)
        self._environment, self.spec = environment, environment.spec
        self._until = config.imitation.updates if asked else 0
        self._repeats = config.learner.pipeline == "sync"
        self.updates = 0
        self._asked_of: object = None
        self._policy: ScriptedPolicy | None = None
        if not self.labels:
            return
        if not isinstance(self.spec.action, Discrete):
            several = isinstance(self.spec.action, Composite)
            kind = "several choices or numbers at once" if several else "continuous"
            raise ConfigError(
                f"imitation.baseline={self._name}: actions of '{self.spec.name}' are {kind}; "
                "imitation needs discrete ones; to clone others, record episodes (murmur record "
                f"--baseline {self._name}) and set imitation.dataset"
                + "; or, if they are choices alone, set environment.joint_actions: true"
                * several
            )
        if asked:
            self._make = find_baseline(config.environment, self._name)
        self.spec = with_expert(self.spec)

    def begin(self, updates: int) -> None:
        """Begin a stream with new episodes: the baseline is made again at its next call.

        Args:
            updates: number of updates of the learner's policy.
        """
        self.updates, self._asked_of = updates, None

    def label(self, timestep: TimeStep) -> TimeStep:
        """Add the baseline's actions [N, A] to the rows; -1 if it is not called or acts illegally.

        Baselines may keep track of episodes: call this with every row, if `labels`.

        Raises:
            EnvironmentFault: if the baseline raises or returns invalid actions.
        """
        assert isinstance(self.spec.action, Discrete)
        action = np.full((len(timestep.step_type), self.spec.num_agents), -1, np.int32)
        aborted = timestep.step_type == StepType.ABORTED
        if self.updates < self._until and not aborted.all():
            acts = np.broadcast_to((timestep.step_type < StepType.LAST)[:, None], action.shape)
            alive = timestep.observation.get(AGENT_MASK)
            acts = acts if alive is None else acts & (alive != 0)
            turn = timestep.observation.get(TURN_MASK)
            acts = acts if turn is None else acts & (turn != 0)
            action = np.where(acts, self._act(timestep), -1).astype(np.int32)
            choices = self.spec.action.num_actions
            if (wrong := np.argwhere(acts & ((action < 0) | (action >= choices)))).size:
                env, agent = wrong[0]
                raise EnvironmentFault(
                    f"imitation.baseline={self._name} gave action {action[env, agent]} for agent "
                    f"{agent}, which has {choices} actions"
                )
            mask = timestep.observation.get(ACTION_MASK)
            if mask is not None:  # a greedy snake in a dead end
                legal = np.take_along_axis(mask, np.maximum(action, 0)[..., None], 2)[..., 0]
                action[legal == 0] = -1
        action[aborted] = 0  # as all of an ABORTED row
        return replace(timestep, observation={**timestep.observation, EXPERT_ACTION: action})

    def _act(self, timestep: TimeStep) -> Array:
        """Return the baseline's actions, integers [N, A]."""
        try:
            if self._asked_of is not self._environment.environment:
                self._asked_of = self._environment.environment
                with self._environment.watched(making=True):
                    self._policy = self._made()
            assert self._policy is not None
            with self._environment.watched():
                action: Array = np.asarray(self._policy.act(timestep))
        except MurmurError:
            raise
        except Exception as error:
            raise EnvironmentFault(
                f"imitation.baseline={self._name} raised {type(error).__name__}: {error}"
            ) from error
        shape = len(timestep.step_type), self.spec.num_agents
        if action.shape != shape or action.dtype.kind not in "iu":
            raise EnvironmentFault(
                f"imitation.baseline={self._name} gave {action.dtype} actions of shape "
                f"{action.shape}, not integers of {shape}"
            )
        return action

    def _made(self) -> ScriptedPolicy:
        """Make the baseline for the episodes that begin.

        Raises:
            ConfigError: if its advice cannot be used.
        """
        policy = self._make(self._environment.environment)
        option = f"imitation.baseline={self._name}"
        if not getattr(policy, "advises", True):
            raise ConfigError(
                f"{option} changes the environment itself, so it cannot be imitated; name another "
                "baseline"
            )
        if isinstance(policy, SeededPolicy):
            if self._repeats:
                raise ConfigError(
                    f"{option} draws random numbers: with learner.pipeline=sync a resumed run "
                    "would not be the same; name another baseline, or set learner.pipeline=async"
                )
            policy.seed(self._environment.seeds)
        return policy

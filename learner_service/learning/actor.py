"""A base for on-policy algorithms of your own; those of the tree are built on actor_critic.py."""

import torch
from torch import Tensor
from typing_extensions import override

from murmur.learner_service.device.precision import Precision
from murmur.learner_service.learning.actor_critic import ActorCritic
from murmur.learner_service.learning.minibatches import recurrent_states
from murmur.learner_service.learning.options import SharingConfig
from murmur.learner_service.learning.policies import (
    Actor,
    MappoPolicy,
    policy_extras,
    policy_outputs,
)
from murmur.learner_service.storage.rollout import Rollout, transitions
from murmur.shared.config import PluginConfig
from murmur.shared.wire.spec import ACTION_MASK, EnvSpec


class ActorAlgorithm(ActorCritic[Rollout]):
    """Builds, publishes and evaluates an actor; a subclass of yours adds `update`.

    All agents share the actor, which may be recurrent. Rows come in unrolls, each learned from
    once. Arrays of a batch have the leading dimensions [L, B, A]: time, environments, agents.
    Used by the thread that learns.

    Attributes:
        actor: the network with the distribution of its actions; its parameters are to be learned.
        spec: spec of the environment.
    """

    POLICY, REMEMBERS = MappoPolicy, True
    actor: Actor

    def __init__(
        self,
        spec: EnvSpec,
        network: PluginConfig,
        precision: Precision,
        device: torch.device,
        seed: int,
        initial_log_std: float = -0.5,
    ) -> None:
        """Build the actor.

        Args:
            spec: spec of the environment.
            network: name and options of the actor's network.
            precision: precision of forward passes.
            device: device to learn on.
            seed: seed of the weights and of the algorithm's random draws.
            initial_log_std: log of the deviation at the start, for continuous actions.

        Raises:
            ConfigError: for an unknown network or option.
        """
        self.spec, self._initial_log_std = spec, initial_log_std
        super().__init__(SharingConfig(), spec, network, precision, device, seed)

    @override
    def _build(self) -> None:
        spec, network = self.spec, self._make_actor(policy_outputs(self.spec))
        self.extras = policy_extras(spec)
        self.actor = Actor(network, spec, self._slices, self._initial_log_std).to(self._device)

    def evaluate(self, batch: Rollout) -> tuple[Tensor, Tensor]:
        """Evaluate the actions taken; the result carries gradient.

        Returns:
            [L, B, A] the logarithms of their probabilities, and the distributions' entropies, nats.
        """
        observation = {k: v[:-1].flatten(0, 1) for k, v in batch.observation().items()}
        action = batch.arrays["raw_action" if "raw_action" in batch.arrays else "action"][:-1]
        taken = action if action.is_floating_point() else action.long()
        hidden = recurrent_states(batch)[0] if self.memory_size else None
        with self._precision.autocast():
            pi, _ = self.actor(
                self._actor_inputs(observation),
                observation.get(ACTION_MASK),
                hidden and hidden.without_last(),
            )
        shape = action.shape[:3]
        return pi.log_prob(taken.flatten(0, 1)).view(shape), pi.entropy().view(shape)

    def weights(self, batch: Rollout) -> Tensor:
        """[L, B, A] 1 where an agent's action was taken and led to the next row, else 0."""
        return transitions(batch).weight

    def step(self, loss: Tensor, optimizer: torch.optim.Optimizer, max_norm: float = 0.0) -> Tensor:
        """Descend a loss by one step of an optimiser, of the actor or a critic; see Precision.step.

        Returns:
            the gradient's norm before clipping, a scalar.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        return self._precision.step(loss, optimizer, parameters, max_norm)

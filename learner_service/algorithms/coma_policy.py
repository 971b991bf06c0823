"""The policy that COMA acts with."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from learner_service.algorithms.base import Policy
from learner_service.algorithms.exploration import policy_probabilities
from learner_service.networks.distributions import sample
from learner_service.networks.forward import forward
from learner_service.networks.inputs import ActorInputs
from learner_service.networks.recurrent import Past, memory_size
from learner_service.networks.snapshot import snapshot
from learner_service.runtime.precision import Precision
from shared.spec import ACTION_MASK


class ComaPolicy(Policy):
    """The actor and its epsilon, frozen."""

    def __init__(
        self, actor: nn.Module, inputs: ActorInputs, epsilon: Tensor, precision: Precision
    ) -> None:
        self.actor = snapshot(actor, precision)
        self.epsilon = epsilon.clone()
        self.memory_size = memory_size(actor)
        self._inputs, self._precision = inputs, precision

    @torch.inference_mode()
    def act(
        self,
        observation: Mapping[str, Tensor],
        generator: torch.Generator | None,
        memory: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """See Policy."""
        inputs = self._inputs(observation)
        with self._precision.autocast():
            past = None if memory is None else Past(memory)
            logits, remembered = forward(self.actor, inputs, past)
        logits = logits.float()
        mask = observation.get(ACTION_MASK)
        if generator is not None:
            action = sample(policy_probabilities(logits, mask, self.epsilon), generator)
        else:
            if mask is not None:
                logits = logits.masked_fill(mask == 0, float("-inf"))
            action = logits.argmax(-1)
        acted = {"action": action.int()}
        if remembered is not None:
            acted["memory"] = remembered
        if generator is None:
            acted["logits"] = logits
        return acted

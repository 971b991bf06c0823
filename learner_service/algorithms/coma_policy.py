"""The policy that COMA acts with."""

from collections.abc import Mapping

import torch
from torch import Tensor
from typing_extensions import override

from learner_service.algorithms.actor_critic import SnapshotPolicy
from learner_service.algorithms.exploration import policy_probabilities
from learner_service.networks.distributions import sample
from learner_service.networks.forward import forward
from learner_service.networks.recurrent import RecurrentState
from shared.spec import ACTION_MASK


class ComaPolicy(SnapshotPolicy):
    """The actor and its epsilon, frozen."""

    @torch.inference_mode()
    @override
    def act(
        self,
        observation: Mapping[str, Tensor],
        generator: torch.Generator | None,
        memory: Tensor | None = None,
    ) -> dict[str, Tensor]:
        inputs = self._inputs(observation)
        with self._precision.autocast():
            hidden = None if memory is None else RecurrentState(memory)
            logits, remembered = forward(self.actor, inputs, hidden)
        logits = logits.float()
        mask = observation.get(ACTION_MASK)
        if generator is not None:
            action = sample(policy_probabilities(logits, mask, self.exploration), generator)
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

"""Returns over up to n steps of transitions that are drawn from a replay."""

from collections.abc import Mapping

import torch
from torch import Tensor

from learner_service.storage.storage import OBSERVATION
from shared.spec import AGENT_MASK
from shared.timestep import StepType

_LAST, _ABORTED = int(StepType.LAST), int(StepType.ABORTED)


class ReplayReturns:
    """Sums the rewards that follow rows of a replay's columns."""

    def __init__(self, gamma: float, n_step: int, length: int, *, mortal: bool) -> None:
        """Note how they are summed.

        Args:
            gamma: discount factor.
            n_step: the most rewards that are summed.
            length: L, transitions of one column.
            mortal: whether an agent's rewards end with its life.
        """
        self._gamma = gamma
        self._n_step = n_step
        self._length = length
        self._mortal = mortal

    def __call__(
        self, flat: Mapping[str, Tensor], here: Tensor, t: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rewards of up to n steps summed, the discount of what follows, and the row it is at.

        The discount of an agent that dies stays 0, so later rewards and a later life count nothing.
        """
        there = here + 1
        reward = flat["reward"].index_select(0, there)
        discount = self._following(flat, there)
        for step in range(2, self._n_step + 1):
            beyond = (there + 1).clamp_max(flat["step_type"].shape[0] - 1)
            continues = (
                (flat["step_type"][there] != _LAST)
                & (flat["step_type"][beyond] != _ABORTED)
                & (t + step <= self._length)
            )
            there = torch.where(continues, beyond, there)
            continues = continues.unsqueeze(1)
            reward = reward + torch.where(continues, discount, 0.0) * flat["reward"][there]
            follows = discount * self._following(flat, there)
            discount = torch.where(continues, follows, discount)
        return reward, discount, there

    def _following(self, flat: Mapping[str, Tensor], row: Tensor) -> Tensor:
        """[B, A] or [B, 1] weight of what follows a row [B] against the row's own reward."""
        discount = self._gamma * flat["discount"].index_select(0, row).unsqueeze(1)
        if self._mortal:
            discount = discount * (flat[OBSERVATION + AGENT_MASK].index_select(0, row) != 0)
        return discount

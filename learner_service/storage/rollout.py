"""Rollouts: the batch that an update learns from once, and its transitions."""

from dataclasses import dataclass

from torch import Tensor

from learner_service.storage.storage import OBSERVATION
from shared.spec import AGENT_MASK
from shared.timestep import StepType


@dataclass
class Batch:
    """Whole unrolls side by side: what one update learns from.

    Attributes:
        arrays: name -> [L + 1, B, ...]; "memory", if there is one, [1, B, A, H].
        version: [B] oldest policy version of each unroll's time steps.
        padding: time steps that only fill up unrolls of sessions that ended.
        times: how many times the rows of an update there are, 1 or more: where there are more
            environments than an update needs, or a row would be too old for the next one.
    """

    arrays: dict[str, Tensor]
    version: list[int]
    padding: int = 0
    times: float = 1.0

    @property
    def rows(self) -> int:
        """Joint transitions, padding left out: at most L x B."""
        length, num_unrolls = self.arrays["step_type"].shape
        return (length - 1) * num_unrolls - self.padding

    def env_steps(self) -> Tensor:
        """How many environment steps it holds: a number on the device."""
        return transitions(self).valid.sum()

    def observation(self) -> dict[str, Tensor]:
        """Name -> [L + 1, B, ...]."""
        return {
            k.removeprefix(OBSERVATION): v
            for k, v in self.arrays.items()
            if k.startswith(OBSERVATION)
        }


@dataclass
class Transitions:
    """(o_t, a_t, r_{t+1}, o_{t+1}) of a batch: the shift by one row has its only home here.

    Attributes:
        reward: [L, B, A] r_{t+1}.
        discount: [L, B, A], or [L, B, 1] where agents do not die: d_{t+1}, and 0 for an agent that
            is dead on row t+1. Its life has ended, nothing of it is to come.
        next_is_last: [L, B] bool, row t+1 is the last that there is of its episode: it is LAST, or
            the environment failed after it. In the second case its discount is 1, so that its
            value stands for what would have come.
        valid: [L, B] bool, the action of row t was taken and led to row t+1: row t is not LAST,
            and neither is ABORTED.
    """

    reward: Tensor
    discount: Tensor
    next_is_last: Tensor
    valid: Tensor


def transitions(batch: Batch) -> Transitions:
    """Pair every row's action with the next row's reward, discount and step type."""
    step_type = batch.arrays["step_type"]
    aborted = step_type == int(StepType.ABORTED)
    next_is_last = step_type[1:] == int(StepType.LAST)
    next_is_last[:-1] |= aborted[2:]
    discount = batch.arrays["discount"][1:].unsqueeze(-1)
    alive = batch.arrays.get(OBSERVATION + AGENT_MASK)
    if alive is not None:
        discount = discount * (alive[1:] != 0)
    return Transitions(
        reward=batch.arrays["reward"][1:],
        discount=discount,
        next_is_last=next_is_last,
        valid=(step_type[:-1] < int(StepType.LAST)) & ~aborted[1:],
    )

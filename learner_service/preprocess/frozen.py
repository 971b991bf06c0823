"""Frozen agents: they act like all others, and updates leave their networks unchanged.

For an update a frozen agent counts as dead: its rows enter no loss, so the gradients of its
networks are exactly 0 and Adam does not move them. Other agents' critics still see its actions.
"""

from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from murmur.learner_service.preprocess.transform import (
    Rows,
    Transform,
    reward_of,
    with_arrays,
    with_reward,
)
from murmur.learner_service.storage.storage import Batch
from murmur.shared.process.errors import ConfigError
from murmur.shared.wire.dataset import OBSERVATION
from murmur.shared.wire.spec import AGENT_MASK

B = TypeVar("B", bound=Batch)
FROZEN, SHARING = "algorithm.frozen_agents", "algorithm.share_parameters"  # for messages
_MASK = OBSERVATION + AGENT_MASK


class HideFrozen(Transform):
    """Hides frozen agents from updates: they are dead, and earn nothing."""

    def __init__(
        self, frozen: tuple[int, ...], slices: tuple[int, ...], device: torch.device
    ) -> None:
        """Check who is frozen.

        Args:
            frozen: numbers of agents.
            slices: the parameter group of each agent, of `resolve_sharing`.
            device: device of the updates.

        Raises:
            ConfigError: for an agent that there is not, if none is left to learn, or if a frozen
                agent shares networks with one that learns.
        """
        agents = len(slices)
        option = f"{FROZEN} = {list(frozen)}"
        learning = learning_agents(frozen, agents)
        for agent in frozen:
            others = [other for other in learning if slices[other] == slices[agent]]
            if others:
                apart = apart_slices(slices, frozen)
                raise ConfigError(
                    f"{option}: agent {agent} shares its networks with {others}, which learn; set "
                    f"{SHARING}={apart}"
                )
        self._learns = torch.tensor([agent in learning for agent in range(agents)], device=device)

    @override
    def batch(self, batch: B, updates: int) -> B:
        reward = reward_of(batch)

        def hidden(arrays: Mapping[str, Tensor]) -> Rows:
            alive = arrays.get(_MASK)
            shown = self._learns.expand(reward.shape) if alive is None else alive * self._learns
            return {**arrays, _MASK: shown.to(torch.uint8)}

        return with_reward(with_arrays(batch, hidden), reward * self._learns)


def learning_agents(frozen: tuple[int, ...], num_agents: int) -> list[int]:
    """Return the numbers of the agents that are not frozen.

    Raises:
        ConfigError: for an agent that there is not, or if none is left to learn.
    """
    option = f"{FROZEN} = {list(frozen)}"
    if unknown := sorted({agent for agent in frozen if not 0 <= agent < num_agents}):
        raise ConfigError(
            f"{option}: there is no agent {unknown[0]}; the environment has {num_agents}, numbered "
            "from 0"
        )
    learning = [agent for agent in range(num_agents) if agent not in frozen]
    if not learning:
        raise ConfigError(f"{option}: no agent is left to learn; leave one out of the list")
    return learning


def apart_slices(slices: tuple[int, ...], frozen: tuple[int, ...]) -> str:
    """Return parameter groups in which frozen agents share none with others, as the option says."""
    numbers: dict[tuple[int, bool], int] = {}
    apart = [numbers.setdefault((s, a in frozen), len(numbers)) for a, s in enumerate(slices)]
    return str(apart).replace(" ", "")

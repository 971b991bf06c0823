"""Frozen agents: they act like all others, and updates leave their networks unchanged.

For an update a frozen agent counts as dead: its rows enter no loss, so the gradients of its
networks are exactly 0 and Adam does not move them. Other agents' critics still see its actions.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from learner_service.algorithms.base import NEXT
from learner_service.algorithms.options import FROZEN, SHARING
from learner_service.storage.unroll import OBSERVATION
from shared.errors import ConfigError
from shared.spec import AGENT_MASK

_MASK = OBSERVATION + AGENT_MASK


class FrozenAgents:
    """Hides frozen agents from updates.

    Attributes:
        any: whether there are such agents.
    """

    def __init__(
        self, frozen: tuple[int, ...], slices: tuple[int, ...], device: torch.device
    ) -> None:
        """Check who is frozen.

        Args:
            frozen: numbers of agents.
            slices: the parameter group of each agent, of `resolve_sharing`.
            device: of the updates.

        Raises:
            ConfigError: for an agent that there is not, if none is left to learn, or if a frozen
                agent shares networks with one that learns.
        """
        self.any, agents = bool(frozen), len(slices)
        option = f"{FROZEN} = {list(frozen)}"
        if unknown := sorted({agent for agent in frozen if not 0 <= agent < agents}):
            raise ConfigError(
                f"{option}: there is no agent {unknown[0]}; the environment has {agents}, numbered "
                "from 0"
            )
        learning = [agent for agent in range(agents) if agent not in frozen]
        if not learning:
            raise ConfigError(f"{option}: no agent is left to learn; leave one out of the list")
        for agent in frozen:
            others = [other for other in learning if slices[other] == slices[agent]]
            if others:
                apart = apart_slices(slices, frozen)
                raise ConfigError(
                    f"{option}: agent {agent} shares its networks with {others}, which learn; set "
                    f"{SHARING}={apart}"
                )
        self._learns = torch.tensor([agent in learning for agent in range(agents)], device=device)

    def hidden(self, rows: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """A batch in which frozen agents are dead, and earn nothing.

        Args:
            rows: named arrays of an update: "reward" [..., A], observations with the prefix
                OBSERVATION, and NEXT + OBSERVATION if they are of transitions.
        """
        if not self.any:
            return rows
        reward, prefixes = rows["reward"], ["", NEXT]
        if not any(name.startswith(NEXT) for name in rows):
            prefixes.pop()
        found = {**rows, "reward": reward * self._learns}
        for prefix in prefixes:
            alive = rows.get(prefix + _MASK)
            hidden = self._learns.expand(reward.shape) if alive is None else alive * self._learns
            found[prefix + _MASK] = hidden.to(torch.uint8)
        return found


def apart_slices(slices: tuple[int, ...], frozen: tuple[int, ...]) -> str:
    """Parameter groups in which frozen agents share none with others, as the option is written."""
    numbers: dict[tuple[int, bool], int] = {}
    apart = [numbers.setdefault((s, a in frozen), len(numbers)) for a, s in enumerate(slices)]
    return str(apart).replace(" ", "")

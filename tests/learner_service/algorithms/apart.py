"""Minibatches of a pass, each by itself."""

from dataclasses import dataclass
from operator import itemgetter

from torch import Tensor

from learner_service.algorithms.minibatches import Pass
from learner_service.networks.inputs import Inputs
from learner_service.networks.recurrent import RecurrentState


@dataclass
class Minibatch:
    """Some joint transitions of a batch, [M, A, ...]; fields as those of Pass."""

    actor: Inputs
    critic: Inputs
    columns: dict[str, Tensor]
    share: Tensor
    cost: Tensor
    counts: Tensor
    sharing: Tensor
    actor_state: RecurrentState | None
    critic_state: RecurrentState | None


def apart(shuffled: Pass) -> list[Minibatch]:
    if not shuffled.number:
        return []
    actor, critic = shuffled.inputs(shuffled.actor), shuffled.inputs(shuffled.critic)
    states = shuffled.state(shuffled.actor_state), shuffled.state(shuffled.critic_state)

    def of(state: RecurrentState | None, k: int) -> RecurrentState | None:
        if state is None or state.first is None:
            return None
        return RecurrentState(state.memory[k], state.first[k])

    return [
        Minibatch(
            actor.each(itemgetter(k)),
            critic.each(itemgetter(k)),
            {name: shuffled.each(x)[k] for name, x in shuffled.columns.items()},
            shuffled.share[k],
            shuffled.cost[k],
            shuffled.counts[k],
            shuffled.sharing,
            of(states[0], k),
            of(states[1], k),
        )
        for k in range(shuffled.number)
    ]

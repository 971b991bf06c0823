"""The channels that the environment draws, and those that the learner computes from them."""

from dataclasses import dataclass

from env_service.envs.terrain.belief import P_MIN
from env_service.envs.terrain.config import Config
from env_service.envs.terrain.features import (
    ACTOR_CHANNELS,
    CRITIC_CHANNELS,
    LOCAL_PROB,
    WEIGHT_HIGH,
    WEIGHT_LOW,
)
from shared.config.derived import Channel, DerivedMap
from shared.wire.spec import STATE

ACTOR_SENT, CRITIC_SENT, BUDGET_LEFT = "channels", "state_channels", "budget_left"
_ENTROPY_OF = {"w_entropy": "prob", "local_w_entropy": "local_prob"}


@dataclass(frozen=True)
class ChannelPlan:
    """The channels that an environment draws and sends.

    Attributes:
        actor: codes of the channels that are drawn for each agent, in order; see features.
        critic: codes of the channels of the global state, in order.
        derived: maps that the learner computes from them; empty if all channels are drawn here.
        budget_left: true if the share of moves that are left is sent as a number.
    """

    actor: tuple[int, ...]
    critic: tuple[int, ...]
    derived: tuple[DerivedMap, ...] = ()
    budget_left: bool = False


def channel_plan(config: Config) -> ChannelPlan:
    """Choose the channels to draw and to derive for a configuration."""
    if config.channels_by == "server":
        return ChannelPlan(
            tuple(map(ACTOR_CHANNELS.index, config.actor_channels)),
            tuple(map(CRITIC_CHANNELS.index, config.critic_channels)),
        )
    actor_names, maps = _derive("maps", ACTOR_SENT, config.actor_channels, config.num_agents)
    derived = [maps]
    critic_names: list[str] = []
    if config.critic_channels:
        critic_names, state = _derive(STATE, CRITIC_SENT, config.critic_channels, 1)
        derived.append(state)
    codes = {name: code for code, name in enumerate(ACTOR_CHANNELS)} | {"local_prob": LOCAL_PROB}
    return ChannelPlan(
        tuple(codes[name] for name in actor_names),
        tuple(map(CRITIC_CHANNELS.index, critic_names)),
        tuple(derived),
        "budget" in config.actor_channels,
    )


def _derive(
    name: str, sent: str, channels: tuple[str, ...], num_agents: int
) -> tuple[list[str], DerivedMap]:
    """Return the names of the channels to draw, and the map derived from them."""
    drawn: list[str] = []

    def index(channel: str) -> int:
        if channel not in drawn:
            drawn.append(channel)
        return drawn.index(channel)

    made = []
    for channel in channels:
        if channel == "budget":
            made.append(Channel("fill", BUDGET_LEFT))
        elif channel == "agent_id":
            numbers = tuple((a + 1) / num_agents for a in range(num_agents))
            made.append(Channel("constant", values=numbers))
        elif channel in _ENTROPY_OF:
            limits = (P_MIN, WEIGHT_LOW, WEIGHT_HIGH)
            made.append(Channel("entropy", sent, index(_ENTROPY_OF[channel]), limits))
        else:
            made.append(Channel("copy", sent, index(channel)))
    return drawn, DerivedMap(name, tuple(made))

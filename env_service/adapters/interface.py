"""The interface of an adapted environment: its agents, observations, actions and masks."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from env_service.adapters.factory import AdapterConfig
from shared.errors import ConfigError
from shared.process import logger
from shared.spec import ACTION_MASK, AGENT_MASK, ArraySpec, Discrete

if TYPE_CHECKING:
    from env_service.adapters.actions import ActionLayout
    from env_service.adapters.observations import ObservationLayout


@dataclass(frozen=True)
class Interface:
    """What the learner sees of each copy, as an adapter found it at the first one.

    Attributes:
        name: of the environment, for messages and the spec.
        agents: their names.
        observations: where observations go.
        actions: what actions become.
        masks_seen: [A] whether an agent observes which of its actions are legal.
        masks_told: whether the infos of the first reset say so.
        agents_can_die: whether to tell which agents are alive.
        state: the global state, if the environment gives one.
        max_episode_steps: as the environment says; 0 if it does not.
        sharing: how the agents' own rewards are combined.
    """

    name: str
    agents: list[str]
    observations: "ObservationLayout"
    actions: "ActionLayout"
    masks_seen: list[bool]
    masks_told: bool
    agents_can_die: bool = False
    state: ArraySpec | None = None
    max_episode_steps: int = 0
    sharing: Literal["none", "mean", "sum"] = "none"

    def arrays(self) -> tuple[ArraySpec, ...]:
        """All that is observed.

        Where agents have different numbers of actions there is a mask in any case.
        """
        specs = list(self.observations.arrays)
        if self.state is not None:
            specs.append(self.state)
        if self.masked or len(set(self.actions.counts)) > 1:
            assert isinstance(self.actions.spec, Discrete)
            specs.append(ArraySpec(ACTION_MASK, "uint8", (self.actions.spec.num_actions,)))
        if self.agents_can_die:
            specs.append(ArraySpec(AGENT_MASK, "uint8", ()))
        return tuple(specs)

    @property
    def masked(self) -> bool:
        """Whether the environment says which actions are legal."""
        return self.masks_told or any(self.masks_seen)

    def limit(self, max_episode_steps: int) -> int:
        """The shorter of the configured limit of an episode and its own, steps; 0: none."""
        return min((x for x in (max_episode_steps, self.max_episode_steps) if x), default=0)

    def check(self, config: AdapterConfig) -> None:
        """Log which images are sent smaller.

        Raises:
            ConfigError: if it says which actions are legal and they are not Discrete.
        """
        if self.masked and not self.actions.maskable:
            raise ConfigError(
                f"'{config.factory}' gives an '{ACTION_MASK}', but its actions are not Discrete; "
                "take the mask away in a factory of your own"
            )
        if reduced := self.observations.reduced:
            logger.info("%s (environment.resize: %s)", "; ".join(reduced), config.resize)

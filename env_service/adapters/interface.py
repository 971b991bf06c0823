"""The interface of an adapted environment: its agents, observations, actions and masks."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from env_service.adapters.factory import AdapterConfig
from shared.process.errors import ConfigError
from shared.process.process import logger
from shared.wire.notices import Notices
from shared.wire.spec import ACTION_MASK, AGENT_MASK, MAX_EPISODE_STEPS, ArraySpec, Discrete

if TYPE_CHECKING:
    from env_service.adapters.actions import ActionLayout
    from env_service.adapters.observations import ObservationLayout


GUESSED = "axes_guessed"  # kind of a notice


def hint_of(value: object) -> int:
    """Return a hint of the longest episode, steps, within the spec's limit; 0 if invalid."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        return 0
    return int(value) if 0 < value <= MAX_EPISODE_STEPS else 0


@dataclass(frozen=True)
class Interface:
    """The interface of each copy, read from the first one.

    Attributes:
        name: name of the environment, for messages and the spec.
        agents: names of the agents.
        observations: layout of the observations.
        actions: layout of the actions.
        masks_seen: [A] bool, true if the agent's observation holds an action mask.
        masks_told: true if the infos of the first reset hold action masks.
        agents_can_die: true if the learner gets a mask of the agents that are alive.
        state: spec of the global state, if the environment gives one.
        max_episode_steps: the environment's hint, steps, which episodes may exceed; 0 if none.
        hint: name of that hint.
        doubts: (kind, subject, sentence) of each guess and ignored value.
        sharing: combination of the agents' own rewards.
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
    hint: str = ""
    doubts: tuple[tuple[str, str, str], ...] = ()
    sharing: Literal["none", "mean", "sum"] = "none"

    def arrays(self) -> tuple[ArraySpec, ...]:
        """Return the specs of all observations.

        If agents have different numbers of actions, they include an action mask.
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
        """Return whether the environment gives action masks."""
        return self.masks_told or any(self.masks_seen)

    def longest(self, max_episode_steps: int) -> int:
        """Return the smaller of an episode's configured limit and the hint, steps; 0 if none."""
        return min((x for x in (max_episode_steps, self.max_episode_steps) if x), default=0)

    def check(self, config: AdapterConfig, notices: Notices) -> None:
        """Report images that are sent smaller, and guesses.

        Raises:
            ConfigError: if the environment gives action masks for actions that are not Discrete.
        """
        if self.masked and not self.actions.maskable:
            raise ConfigError(
                f"'{config.factory}' gives an '{ACTION_MASK}', but its actions are not Discrete; "
                "take the mask away in a factory of your own"
            )
        if reduced := self.observations.reduced:
            text = f"{'; '.join(reduced)} (environment.resize: {config.resize})"
            if config.resize == "auto":
                notices.say("image_reduced", "image", text)
            else:
                logger.info("%s", text)
        for kind, subject, text in self.doubts:
            notices.say(kind, subject, text)
        for subject, text in self.observations.doubts.items():
            notices.say(GUESSED, subject, f"observation '{subject}': {text}")
        for agent, text in self.actions.doubts.items():
            notices.say("action_range", "actions", f"agent '{agent}' {text}")

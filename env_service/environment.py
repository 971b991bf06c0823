"""The contract of an environment: N independent copies stepped by one call.

An environment plug-in is a module `env_service/envs/<name>.py` (or a package, or an entry point of
group `murmur.environments`) that has

    Config               a frozen pydantic model: every option with its default, unit and meaning
    make(config, num_envs) -> VectorEnvironment
    BASELINES            name -> (environment) -> ScriptedPolicy; may be empty

`check_environment()` tells in plain words what an implementation does wrong.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shared.spec import EnvSpec, action_layout
from shared.timestep import Array, TimeStep


class VectorEnvironment(ABC):
    """N copies of one environment.

    Copies share nothing that matters: what happens in one follows from its own seed and actions
    alone, never from the others, their number or the time of day. All methods are called from one
    thread. Returned arrays may be views of buffers that the next call overwrites.

    Attributes:
        spec: what the environment observes, accepts and reports; fixed for life.
        num_envs: N.
    """

    spec: EnvSpec
    num_envs: int

    @abstractmethod
    def step(
        self, action: Array, restart: NDArray[np.bool_], seeds: NDArray[np.uint64]
    ) -> TimeStep:
        """Start new episodes where asked, advance all other copies by one action.

        Args:
            action: [N, A] int32 or [N, A, U] float32; ignored where restart is True.
            restart: [N] copies that begin a new episode. The caller sets it for every copy whose
                last row was LAST; it may set it for any other copy too.
            seeds: [N] uint64 below 2**63; the new episode is a pure function of its seed and of
                the actions taken in it. Ignored where restart is False.

        Returns:
            FIRST rows (reward 0, discount 1) where restart is True, else MID or LAST rows.
        """

    def reset(self, seeds: NDArray[np.uint64]) -> TimeStep:
        """Start a new episode in every copy."""
        dtype, shape = action_layout(self.spec.action)
        action = np.zeros((self.num_envs, self.spec.num_agents, *shape), dtype)
        return self.step(action, np.ones(self.num_envs, np.bool_), seeds)

    def render_state(self, index: int) -> Mapping[str, Array]:
        """What a picture of copy `index` needs, by name; environments without pictures have none.

        Raises:
            NotImplementedError: if the environment cannot be drawn.
        """
        raise NotImplementedError(f"environment '{self.spec.name}' cannot be rendered")

    def close(self) -> None:  # noqa: B027 - nothing to release unless an environment says so
        """Release what the environment holds."""


class ScriptedPolicy(Protocol):
    """A policy that needs no learner: it may look into the environment itself."""

    def act(self, timestep: TimeStep) -> Array:
        """Actions for the rows just returned by the environment: [N, A] or [N, A, U]."""
        ...


BaselineFactory = Callable[[VectorEnvironment], ScriptedPolicy]

"""Small games of unequal teams, and a task whose rewards each agent's own state tells."""

from abc import abstractmethod

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from murmur.env_service.environment import VectorEnvironment
from murmur.shared.wire.spec import STATE, ArraySpec, Discrete, EnvSpec
from murmur.shared.wire.timestep import Array, StepType, TimeStep

_FIRST, _MID, _LAST = (int(kind) for kind in (StepType.FIRST, StepType.MID, StepType.LAST))


class _Episodes(VectorEnvironment):
    """Copies whose episodes all have the same number of steps; a subclass pays and shows."""

    spec: EnvSpec

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self._age: NDArray[np.int64] = np.zeros(num_envs, np.int64)

    def step(
        self, action: Array, restart: NDArray[np.bool_], seeds: NDArray[np.uint64]
    ) -> TimeStep:
        reward = self.pay(action, self._age)
        reward[restart] = 0
        self._age = np.where(restart, 0, self._age + 1)
        for env in np.flatnonzero(restart):
            self.begin(int(env), np.random.default_rng(seeds[env]))
        last = self._age == self.spec.max_episode_steps
        kinds = np.where(restart, _FIRST, np.where(last, _LAST, _MID)).astype(np.uint8)
        discount = np.where(last, 0, 1).astype(np.float32)
        return TimeStep(kinds, reward, discount, self.observe(self._age), {})

    @abstractmethod
    def begin(self, env: int, random: np.random.Generator) -> None:
        """Begin an episode in one copy."""

    @abstractmethod
    def pay(self, action: Array, age: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the rewards [N, A] of actions after `age` [N] steps."""

    @abstractmethod
    def observe(self, age: NDArray[np.int64]) -> dict[str, Array]:
        """Return the observations by name after `age` [N] steps."""


class Prizes(_Episodes):
    """Each agent takes its prize of 1, 2 or 4 now or later; wait lets it double, twice.

    Agents 0 and 2 are patient_0 and patient_1, agent 1 is hasty_0. The patient ones see whether the
    episode begins but no clock, and at last get nothing unless the hasty one has taken its prize
    before. Backward induction gives the equilibrium: with a discount below 1/2 the hasty one takes
    its prize at once, and the others theirs at last, 1 and 4. With a discount of 1 it waits to the
    end, and they take theirs in the second step, 4 and 2. Without memory the second and the last
    step look alike to them: who waits in one waits in the other, so a deterministic policy gets 2.
    """

    PRIZES = np.array((1, 2, 4), np.float32)

    def __init__(self, num_envs: int) -> None:
        self.spec = EnvSpec(
            "prizes",
            3,
            (ArraySpec("view", "float32", (3,)),),
            Discrete(2),
            max_episode_steps=len(self.PRIZES),
            agents=("patient_0", "hasty_0", "patient_1"),
        )
        super().__init__(num_envs)
        self._there = np.ones((num_envs, 3), np.bool_)

    @override
    def begin(self, env: int, random: np.random.Generator) -> None:
        self._there[env] = True

    @override
    def pay(self, action: Array, age: NDArray[np.int64]) -> NDArray[np.float32]:
        taken = self._there & (action == 1)
        at = np.minimum(age, len(self.PRIZES) - 1)
        reward: NDArray[np.float32] = taken * self.PRIZES[at][:, None]
        late = (age == len(self.PRIZES) - 1) & self._there[:, 1]
        reward[:, [0, 2]] *= ~late[:, None]
        self._there &= ~taken
        return reward

    @override
    def observe(self, age: NDArray[np.int64]) -> dict[str, Array]:
        view = np.zeros((self.num_envs, 3, 3), np.float32)
        view[..., 0] = (age == 0)[:, None]
        view[:, 1, 1] = age == 2
        view[..., 2] = self._there
        return {"view": view}


class Hiding(_Episodes):
    """Two seekers each look into one of three cells, in one of which a hider sits; one step.

    All see a cue; the hider is paid 1 for the cell `lure` after it, each seeker 1 if one of them
    finds it. Against a hider that follows one or two lures seekers can always find it: 1. Against
    one that sits anywhere they find it in 2 of 3 games at best.
    """

    def __init__(self, num_envs: int, lure: int = 1) -> None:
        self.spec = EnvSpec(
            "hiding",
            3,
            (ArraySpec("view", "float32", (5,)),),
            Discrete(3),
            max_episode_steps=1,
            agents=("seeker_0", "seeker_1", "hider_0"),
        )
        super().__init__(num_envs)
        self._lure, self._cue = lure, np.zeros(num_envs, np.int64)

    @override
    def begin(self, env: int, random: np.random.Generator) -> None:
        self._cue[env] = random.integers(3)

    @override
    def pay(self, action: Array, age: NDArray[np.int64]) -> NDArray[np.float32]:
        cell = action[:, 2]
        found = (action[:, :2] == cell[:, None]).any(1)
        lured = cell == (self._cue + self._lure) % 3
        return np.stack([found, found, lured], 1).astype(np.float32)

    @override
    def observe(self, age: NDArray[np.int64]) -> dict[str, Array]:
        cue = np.eye(3, dtype=np.float32)[self._cue]
        view = np.zeros((self.num_envs, 3, 5), np.float32)
        view[..., :3] = cue[:, None]
        view[:, 1, 3] = view[:, 2, 4] = 1
        return {"view": view}


class Loads(_Episodes):
    """Each of two agents is paid the load that it draws, of which it sees nothing; one step.

    Loads are uniform in [-1, 1]; action 1 adds 0.01. A critic that sees each agent's load explains
    all of the rewards' variance. One that sees both loads but not which is whose, for agents alike,
    expects their mean: half of it. Without a state nothing can be explained.
    """

    def __init__(self, num_envs: int, state: str = "own") -> None:
        self._state = state
        observations = [ArraySpec("view", "float32", (1,))]
        if state == "own":
            observations.append(ArraySpec(STATE, "float32", (1,)))
        elif state == "shared":
            observations.append(ArraySpec(STATE, "float32", (2,), per_agent=False))
        self.spec = EnvSpec("loads", 2, tuple(observations), Discrete(2), max_episode_steps=1)
        super().__init__(num_envs)
        self._loads = np.zeros((num_envs, 2), np.float32)

    @override
    def begin(self, env: int, random: np.random.Generator) -> None:
        self._loads[env] = random.uniform(-1, 1, 2)

    @override
    def pay(self, action: Array, age: NDArray[np.int64]) -> NDArray[np.float32]:
        bonus = np.float32(0.01) * (action == 1)
        reward: NDArray[np.float32] = self._loads + bonus.astype(np.float32)
        return reward

    @override
    def observe(self, age: NDArray[np.int64]) -> dict[str, Array]:
        seen: dict[str, Array] = {"view": np.ones((self.num_envs, 2, 1), np.float32)}
        if self._state == "own":
            seen[STATE] = self._loads[..., None].copy()
        elif self._state == "shared":
            seen[STATE] = self._loads.copy()
        return seen

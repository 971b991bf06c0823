"""Games of pixels with known answers, for tests of image networks and stacked frames."""

import numpy as np
from numpy.typing import NDArray

from murmur.env_service.environment import VectorEnvironment
from murmur.shared.wire.spec import ArraySpec, Discrete, EnvSpec
from murmur.shared.wire.timestep import Array, StepType, TimeStep


class Drifting(VectorEnvironment):
    """Each agent sees a dot that drifts left or right, and is paid for saying which.

    One frame does not tell: who sees it alone earns 1 in 2, who remembers the last one earns 1 but
    for an episode's first step, which cannot be known. Episodes take 3 to 5 steps.
    """

    def __init__(self, num_envs: int, *, size: int = 5, agents: int = 2, depth: int = 1) -> None:
        """`depth` frames are stacked by the environment itself."""
        self.num_envs, self._size, self._agents, self._depth = num_envs, size, agents, depth
        shape = (depth, size, size)
        self.spec = EnvSpec(
            "drifting",
            agents,
            (ArraySpec("image", "uint8", shape),),
            Discrete(2),
            ("score",),
            5,
        )
        self._frames = np.zeros((num_envs, agents, depth, size, size), np.uint8)
        self._at = np.zeros((num_envs, agents), np.int64)
        self._to = np.zeros((num_envs, agents), np.int64)
        self._age, self._length = np.zeros(num_envs, np.int64), np.ones(num_envs, np.int64)
        self._earned = np.zeros(num_envs, np.float32)

    def step(
        self, action: Array, restart: NDArray[np.bool_], seeds: NDArray[np.uint64]
    ) -> TimeStep:
        reward = np.where(restart[:, None], 0, action == self._to).astype(np.float32)
        for i in range(self.num_envs):
            if not restart[i]:
                continue
            random = np.random.default_rng(int(seeds[i]))
            self._at[i] = random.integers(self._size, size=self._agents)
            self._to[i] = random.integers(2, size=self._agents)
            self._length[i], self._age[i], self._earned[i] = random.integers(3, 6), -1, 0
        self._age += 1
        self._earned += reward.sum(1)
        self._at = np.where(restart[:, None], self._at, self._at + 2 * self._to - 1) % self._size
        self._draw(restart)
        last = self._age == self._length
        kind = np.where(restart, StepType.FIRST, np.where(last, StepType.LAST, StepType.MID))
        return TimeStep(
            kind.astype(np.uint8),
            reward,
            np.where(last, 0, 1).astype(np.float32),
            {"image": self._frames.copy()},
            {"score": self._earned / (self._agents * self._length)},
        )

    def _draw(self, restart: NDArray[np.bool_]) -> None:
        now = np.zeros((self.num_envs, self._agents, self._size, self._size), np.uint8)
        envs, agents = np.indices(self._at.shape)
        now[envs, agents, :, self._at] = 255
        self._frames[:, :, :-1] = self._frames[:, :, 1:]
        self._frames[:, :, -1] = now
        for i in np.flatnonzero(restart):
            self._frames[i] = now[i, :, None]

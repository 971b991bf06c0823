"""An environment with a metric that a terminal's markup would take for a tag."""

from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

METRIC = "rate [/s]"


class OddNames(gymnasium.Env[NDArray[np.float32], int]):
    """Episodes of five steps."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        super().reset(seed=seed)
        self._age = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: int) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        self._age += 1
        return np.zeros(2, np.float32), float(action), False, self._age == 5, {METRIC: 1.0}

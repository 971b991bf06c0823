"""A combination lock: a task whose only reward a policy without a curriculum never sees."""

from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

CELLS, ACTIONS = 12, 4
_CODE_SEED = 0


class Lock(gymnasium.Env[NDArray[np.float32], np.int64]):
    """A corridor of cells, in each of which one of four actions leads on and the others fail.

    The agent observes its cell, one-hot. The last cell's right action pays 1; a wrong action ends
    the episode without reward. So the best return is 1, and random actions open the lock from
    `distance` cells before its end with probability 4^-distance: 6e-8 from the first of 12.

    The option `distance` of reset() is the number of cells before the end, where an episode begins;
    without it all.
    """

    def __init__(self) -> None:
        """Set the code."""
        self.observation_space = gymnasium.spaces.Box(0, 1, (CELLS,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(ACTIONS)
        self._code = np.random.default_rng(_CODE_SEED).integers(ACTIONS, size=CELLS)
        self._cell = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Begin an episode."""
        super().reset(seed=seed)
        self._cell = CELLS - int((options or {}).get("distance", CELLS))
        return self._observe(), {}

    def step(
        self, action: np.int64
    ) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Take an action, 0 to 3."""
        right = action == self._code[self._cell]
        opened = bool(right and self._cell == CELLS - 1)
        if right and not opened:
            self._cell += 1
        over = opened or not right
        return self._observe(), float(opened), over, False, {"opened": float(opened)}

    def _observe(self) -> NDArray[np.float32]:
        seen: NDArray[np.float32] = (np.arange(CELLS) == self._cell).astype(np.float32)
        return seen

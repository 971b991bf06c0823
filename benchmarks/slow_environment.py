"""A slow Gymnasium environment, for planting a bottleneck."""

import time
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray


class Slow(gymnasium.Env[NDArray[np.float32], np.int64]):
    """Environment that in every step waits without using the processor, then computes."""

    observation_space = gymnasium.spaces.Box(-1, 1, (8,), np.float32)
    action_space = gymnasium.spaces.Discrete(4)

    def __init__(self, delay_ms: float, busy_ms: float = 0.0, steps: int = 25) -> None:
        self._delay_s, self._busy_s = delay_ms / 1e3, busy_ms / 1e3
        self._steps = steps

    def reset(  # noqa: D102 - Gymnasium
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        super().reset(seed=seed)
        self._age = 0
        return self._observation(), {}

    def step(  # noqa: D102 - Gymnasium
        self, action: np.int64
    ) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        if self._delay_s:
            time.sleep(self._delay_s)
        until = time.thread_time() + self._busy_s
        while time.thread_time() < until:
            pass
        self._age += 1
        return self._observation(), float(action == 0), False, self._age == self._steps, {}

    def _observation(self) -> NDArray[np.float32]:
        return self.np_random.uniform(-1, 1, 8).astype(np.float32)


def make(delay_ms: float = 0.0, busy_ms: float = 0.0) -> Slow:
    """Build the environment."""
    return Slow(delay_ms, busy_ms)

"""A Gymnasium environment that fails when it is told to, for testing what failures cost."""

import os
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

FAULTS = ("raise", "nan", "crash", "hang", "leak")


class Controlled(gymnasium.Env[NDArray[np.float32], int]):
    """Pays for action 0. A file in `control`, named after a fault, makes one copy fail once."""

    observation_space = gymnasium.spaces.Box(-1, 1, (8,), np.float32)
    action_space = gymnasium.spaces.Discrete(4)

    def __init__(self, control: str, delay_ms: float, steps: int = 25) -> None:
        self._control, self._delay_s, self._steps = Path(control), delay_ms / 1e3, steps
        self._leaked: list[bytes] = []

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        super().reset(seed=seed)
        self._age = 0
        return self._observation(), {}

    def step(self, action: int) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        time.sleep(self._delay_s)
        self._age += 1
        observation = self._observation()
        for fault in os.listdir(self._control):
            try:
                (self._control / fault).unlink()  # the process that succeeds has the fault
            except FileNotFoundError:
                continue
            if fault == "raise":
                raise RuntimeError("told to")
            if fault == "nan":
                observation[:] = np.nan
            elif fault == "crash":
                os._exit(7)
            elif fault == "hang":
                time.sleep(1e6)
            elif fault == "leak":
                self._leaked.append(b"x" * (300 << 20))  # written to: it is taken
        return observation, float(action == 0), False, self._age == self._steps, {}

    def _observation(self) -> NDArray[np.float32]:
        return self.np_random.uniform(-1, 1, 8).astype(np.float32)


def make(control: str, delay_ms: float) -> Controlled:
    """The factory."""
    return Controlled(control, delay_ms)

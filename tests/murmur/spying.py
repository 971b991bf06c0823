"""An environment that keeps what its factory was given, in the file that $SPY_FILE names."""

import base64
import os
import pickle
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete
from numpy.typing import NDArray

Observation = NDArray[np.float32]


class Spy(gym.Env[Observation, Any]):
    """Pays nothing for five steps."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012 - as Gymnasium has it
    observation_space = Box(-1, 1, (2,), np.float32)
    action_space = Discrete(3)
    render_mode = "rgb_array"

    def __init__(self, **arguments: Any) -> None:
        line = base64.b64encode(pickle.dumps(arguments)) + b"\n"
        with Path(os.environ["SPY_FILE"]).open("ab") as file:
            file.write(line)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Observation, Any]:
        super().reset(seed=seed)
        self._t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        self._t += 1
        return np.zeros(2, np.float32), 0.0, self._t >= 5, False, {}

    def render(self) -> Any:
        return np.zeros((32, 32, 3), np.uint8)


def seen(file: Path) -> list[dict[str, Any]]:
    """What the factory was given, each time; the file is emptied."""
    lines = file.read_bytes().splitlines() if file.exists() else []
    file.unlink(missing_ok=True)
    return [pickle.loads(base64.b64decode(line)) for line in lines]  # noqa: S301 - ours

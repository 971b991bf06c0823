"""An environment that fails to start, or returns absurd numbers, as its episodes' seeds say."""

import json
from typing import Any

import gymnasium
import numpy as np


class Absurd(gymnasium.Env[Any, Any]):
    """Ten steps along a line; in some episodes something is wrong.

    Arguments:
        wrongs: what may be wrong, as a list in JSON; "" is nothing. The seed chooses one.

    The first `reset` of an object, with seed 0, is always right.
    """

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, wrongs: str) -> None:
        self._wrongs = json.loads(wrongs)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._wrong = self._wrongs[seed % len(self._wrongs)] if seed else ""
        self._place, self._age = 0.0, 0
        if self._wrong == "start":
            raise RuntimeError("no room to start")
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self._age += 1
        reward = 2.0 * int(action) - 1
        self._place += reward
        seen = self._place
        if self._age == 5:
            reward = {"rich": 1e30, "poor": -1e30, "inf": np.inf, "nan": np.nan}.get(
                self._wrong, reward
            )
            seen = {"far": 9e17, "beyond": 3e38}.get(self._wrong, seen)
        return np.array([seen], np.float32), reward, False, self._age >= 10, {}

    def close(self) -> None:
        if self._wrong == "close":
            raise RuntimeError("cannot be closed")

"""Environments that misbehave, for tests with real processes; factories of the adapters."""

import ctypes
import os
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete


class Walk(gymnasium.Env[Any, Any]):
    """Thirty steps along a line; pays for going right."""

    def __init__(self) -> None:
        self.observation_space, self.action_space = Box(-30, 30, (1,)), Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.place, self.age = 0.0, 0
        return self.see(), {}

    def step(self, action: Any) -> Any:
        self.age += 1
        move = 2.0 * int(action) - 1
        self.place += move
        return self.see(), move, False, self.age >= 30, {}

    def see(self) -> Any:
        return np.array([self.place], np.float32)


class Blind(Walk):
    """Does not say what it observes."""

    def __init__(self) -> None:
        self.action_space = Discrete(2)


class Quits(Walk):
    """Ends its process when it is made, as if all were well."""

    def __init__(self) -> None:
        os._exit(0)


class Hangs(Walk):
    """Stops for ever at the 20th step of an episode; with `once`, a file, only if it is not there.

    How: "sleep" lets other threads run, "hold" keeps the interpreter's lock as a simulator in
    another language may.
    """

    def __init__(self, how: str, once: str | None = None) -> None:
        super().__init__()
        self.how, self.once = how, once

    def step(self, action: Any) -> Any:
        if self.age == 19 and not (self.once and Path(self.once).exists()):
            if self.once:
                Path(self.once).touch()
            if self.how == "hold":
                ctypes.PyDLL(None).pause()
            time.sleep(3600)
        return super().step(action)


class Breaks(Walk):
    """Goes wrong in the tenth step of one episode in `one_in`, by its seed."""

    def __init__(self, how: str, one_in: int = 1) -> None:
        super().__init__()
        self.how, self.one_in = how, one_in

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.bad = (seed or 0) % self.one_in == 0
        return super().reset(seed=seed)

    def step(self, action: Any) -> Any:
        if self.bad and self.age == 9:
            if self.how == "raise":
                raise RuntimeError("the simulator is gone")
            if self.how == "die":
                os._exit(7)
            result = super().step(action)
            wrong = {"nan": np.array([np.nan]), "shape": np.zeros(2), "dtype": "far"}[self.how]
            return wrong, *result[1:]
        return super().step(action)

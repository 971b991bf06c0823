"""A small Gymnasium environment, of whose flaws each keeps a policy from learning."""

from typing import Any, Literal

import gymnasium
import numpy as np
from numpy.typing import NDArray

Kind = Literal["constant", "ignored", "blind", "foresight", "even", "scaled"]
_STEPS = 16


class Hopeless(gymnasium.Env[NDArray[np.float32], np.int64]):
    """Sixteen steps of two actions; observed is a random sign and the time.

    Kinds: every reward is the same; actions change nothing; all observations are the same, while
    the sign says what is right; an action costs at once and pays at the end; both actions pay the
    same on average; what is right pays 100,000.
    """

    def __init__(self, kind: Kind) -> None:
        """Make an environment of a kind."""
        self.observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)
        self._kind, self._sign = kind, 1.0
        self._time, self._paid = 0, 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Begin an episode."""
        super().reset(seed=seed, options=options)
        self._time = self._paid = 0
        return self._observe(), {}

    def step(
        self, action: np.int64
    ) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Take an action, 0 or 1."""
        self._time += 1
        self._paid += int(action)
        right = float((action == 1) == (self._sign > 0))
        noise = float(self.np_random.normal())
        reward = {
            "constant": 1.0,
            "ignored": noise,
            "blind": right,
            "foresight": -0.1 * float(action) + (self._paid if self._time == _STEPS else 0.0),
            "even": noise * float(action),
            "scaled": 1e5 * (right - 0.5),
        }[self._kind]
        return self._observe(), reward, self._time == _STEPS, False, {}

    def _observe(self) -> NDArray[np.float32]:
        self._sign = 1.0 if self.np_random.random() < 0.5 else -1.0
        if self._kind == "blind":
            return np.zeros(2, np.float32)
        return np.array([self._sign, self._time / _STEPS], np.float32)


def make(kind: Kind) -> Hopeless:
    """Make an environment of a kind."""
    return Hopeless(kind)

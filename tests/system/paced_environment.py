"""An environment that leaves the processor to others, with a metric of its own."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.slow_environment import Slow


class Paced(Slow):
    """Waits in every step; its metric is what an episode came to."""

    def step(
        self, action: np.int64
    ) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, _ = super().step(action)
        return observation, reward, terminated, truncated, {"score": reward}

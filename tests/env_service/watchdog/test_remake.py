"""An environment that fails and cannot be made again at once."""

from functools import partial

import numpy as np
import pytest

from murmur.env_service.environment import VectorEnvironment, make_environment
from murmur.env_service.watchdog.faults import FaultCount, GuardedEnvironment
from murmur.shared.config import PluginConfig
from murmur.shared.process.errors import EnvironmentFault
from murmur.shared.wire.timestep import StepType


class Simulators:
    """Makes environments; the first breaks in its second step, then `failures` cannot start."""

    def __init__(self, failures: int) -> None:
        self.failures, self.made = failures, 0

    def make(self) -> VectorEnvironment:
        self.made += 1
        if 1 < self.made <= 1 + self.failures:
            raise SystemExit("the port is in use")
        environment = make_environment(PluginConfig(name="spread"), 2)
        if self.made == 1:
            environment.step = partial(self._break, environment.step)  # type: ignore[method-assign]
        return environment

    def _break(self, step: object, action: object, restart: np.ndarray, seeds: object) -> object:
        if not restart.all():
            raise KeyError("gone")
        return step(action, restart, seeds)  # type: ignore[operator]


def test_a_simulator_that_cannot_start_is_tried_again() -> None:
    simulators, dropped = Simulators(1), []
    faults = FaultCount(10, lambda reason, episodes: dropped.append((reason, episodes)))
    guarded = GuardedEnvironment(simulators.make, faults)
    action = np.zeros((2, guarded.spec.num_agents), np.int32)
    guarded.reset()
    row = guarded.step(action, np.zeros(2, np.bool_))
    assert row.step_type.tolist() == [StepType.ABORTED, StepType.ABORTED]
    assert (simulators.made, dropped) == (3, [("raised", 0), ("raised", 2)])
    assert guarded.step(action, guarded.over).step_type.tolist() == [StepType.FIRST] * 2


def test_a_simulator_that_never_starts_ends_the_worker() -> None:
    simulators = Simulators(9)
    guarded = GuardedEnvironment(simulators.make, FaultCount(1, lambda *_: None))
    guarded.reset()
    with pytest.raises(EnvironmentFault, match="SystemExit: the port is in use when recreated"):
        guarded.step(np.zeros((2, guarded.spec.num_agents), np.int32), np.zeros(2, np.bool_))

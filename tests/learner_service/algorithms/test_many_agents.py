"""Extremes of a team: 64 agents, one agent, episodes of one step, an observation of one number."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from murmur.env_service.environment import VectorEnvironment
from murmur.learner_service.device.precision import Precision
from murmur.learner_service.learning.base import build_algorithm
from murmur.shared.config import PluginConfig
from murmur.shared.wire.spec import ACTION_MASK, ArraySpec, Continuous, Discrete, EnvSpec
from murmur.shared.wire.timestep import Array, TimeStep
from tests.learner_service.toys import CPU, FIRST, LAST, MID, play_and_learn

ON_POLICY: dict[str, Any] = {"batch_size": 256, "batch_number": 1, "data_passes": 1}
REPLAY: dict[str, Any] = {"replay": {"batch_size": 16, "start_rows": 64, "capacity_rows": 512}}


class Extreme(VectorEnvironment):
    """Agents that observe a constant; each is paid for action 1, or for large numbers."""

    def __init__(self, agents: int, steps: int, *, continuous: bool, num_envs: int = 8) -> None:
        self.num_envs, self._steps = num_envs, steps
        arrays = [ArraySpec("one", "float32", ())]
        if not continuous:
            arrays.append(ArraySpec(ACTION_MASK, "uint8", (3,)))
        action = Continuous(1) if continuous else Discrete(3)
        self.spec = EnvSpec("extreme", agents, tuple(arrays), action, (), steps)
        self._age = np.zeros(num_envs, np.int64)

    def step(
        self, action: Array, restart: NDArray[np.bool_], seeds: NDArray[np.uint64]
    ) -> TimeStep:
        n, agents = self.num_envs, self.spec.num_agents
        discrete = isinstance(self.spec.action, Discrete)
        paid = action == 1 if discrete else action[..., 0] > 0
        self._age = np.where(restart, 0, self._age + 1)
        last = self._age == self._steps
        observation: dict[str, Array] = {"one": np.ones((n, agents), np.float32)}
        if discrete:
            mask = np.zeros((n, agents, 3), np.uint8)
            mask[..., 1] = 1  # the only legal action of all but the first agent
            mask[:, 0] = 1
            observation[ACTION_MASK] = mask
        return TimeStep(
            np.where(restart, FIRST, np.where(last, LAST, MID)).astype(np.uint8),
            np.where(restart[:, None], 0, paid).astype(np.float32),
            np.where(last, 0, 1).astype(np.float32),
            observation,
            {},
        )


CASES = [
    ("mappo", 64, True, 3, False),
    ("masac", 64, True, 1, True),
    ("coma", 1, True, 1, False),
    *(
        pytest.param(name, agents, sharing, steps, continuous, marks=pytest.mark.long)
        for name, continuous in (
            *((name, False) for name in ("mappo", "ippo", "coma", "maddpg")),
            *((name, False) for name in ("qmix", "qplex", "vdn", "iql")),
            *((name, True) for name in ("mappo", "masac", "maddpg", "matd3")),
        )
        for agents, sharing, steps in (
            (64, True, 3),
            (64, False, 3),
            (1, True, 1),
            (1, True, 3),
            (2, False, 1),
        )
    ),
]


@pytest.mark.parametrize(("name", "agents", "sharing", "steps", "continuous"), CASES)
def test_extremes_learn_and_act(
    name: str, agents: int, sharing: bool, steps: int, continuous: bool
) -> None:
    environment = Extreme(agents, steps, continuous=continuous)
    own = ON_POLICY if name in ("mappo", "ippo", "coma") else REPLAY
    config = PluginConfig(**{"name": name, "share_parameters": sharing, **own})
    network = PluginConfig(**{"name": "mlp", "hidden": (8,)})
    algorithm = build_algorithm(config, environment.spec, network, Precision("fp32", CPU), CPU, 3)
    seen: list[dict[str, float]] = []
    update = algorithm.update

    def noted(batch: Any) -> dict[str, torch.Tensor]:
        scalars = update(batch)
        seen.append({key: float(value) for key, value in scalars.items()})
        return scalars

    algorithm.update = noted  # type: ignore[method-assign]
    policy = play_and_learn(algorithm, environment, 8 * (60 if agents > 1 else 200))
    assert seen
    assert all(math.isfinite(x) for scalars in seen for x in scalars.values()), seen
    rows = environment.reset(np.zeros(8, np.uint64)).observation
    acted = policy.act({k: torch.from_numpy(v) for k, v in rows.items()}, None)["action"]
    assert acted.shape[:2] == (8, agents)
    assert acted.isfinite().all()
    if not continuous:
        assert (acted[:, 1:] == 1).all()

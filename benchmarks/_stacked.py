"""Updates of stacked networks beside the same updates agent by agent, in a plain loop."""

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from murmur.env_service.envs.spread import Config as SpreadConfig
from murmur.env_service.envs.spread import Spread
from murmur.learner_service.algorithms.mappo import Mappo
from murmur.learner_service.device.adam import Adam
from murmur.learner_service.device.precision import Precision
from murmur.learner_service.layers.stacked import MLP, StackedLinear
from murmur.learner_service.learning.base import Policy, build_algorithm
from murmur.learner_service.learning.on_policy import Schedule
from murmur.learner_service.storage.rollout import Rollout
from murmur.shared.config import PluginConfig
from murmur.shared.wire.dataset import OBSERVATION
from murmur.shared.wire.timestep import StepType

_CPU = torch.device("cpu")
# Few rows: of millions some lie so near a ReLU's edge that rounding alone decides their side, and
# Adam turns what that does to a small gradient into a visible step.
_ENVS = 2
_TOLERANCE = 1e-5


class Loop(nn.Module):
    """Weights of a stacked perceptron as one plain perceptron for each agent."""

    def __init__(self, stacked: MLP) -> None:
        super().__init__()
        first = next(m for m in stacked.modules() if isinstance(m, StackedLinear))
        self.agents = nn.ModuleList(
            nn.Sequential(*(_plain(layer, agent) for layer in stacked.layers))
            for agent in range(len(first.weight))
        )

    def forward(self, image: Tensor | None, vector: Tensor) -> Tensor:
        """Map agents' vectors [B, A, F] to outputs [B, A, outputs]."""
        return torch.stack([agent(vector[:, a]) for a, agent in enumerate(self.agents)], 1)

    @torch.no_grad()
    def difference(self, stacked: MLP) -> float:
        """Return the largest difference of a weight."""
        layers = [m for m in stacked.modules() if isinstance(m, StackedLinear)]
        differences = []
        for a, agent in enumerate(self.agents):
            plain = [m for m in agent.modules() if isinstance(m, nn.Linear)]
            for ours, layer in zip(plain, layers, strict=True):
                differences.append((ours.weight.T - layer.weight[a]).abs().max())
                differences.append((ours.bias - layer.bias[a, 0]).abs().max())
        return float(torch.stack(differences).max())


def _plain(layer: nn.Module, agent: int) -> nn.Module:
    if not isinstance(layer, StackedLinear):
        return copy.deepcopy(layer)
    weight = layer.weight[agent].detach()  # [I, O]
    linear = nn.Linear(*weight.shape)
    with torch.no_grad():
        linear.weight.copy_(weight.T)
        linear.bias.copy_(layer.bias[agent, 0])
    return nn.Sequential(linear, nn.ReLU()) if layer.relu else linear


def unstacked(mappo: Mappo, options: Mapping[str, Any]) -> Mappo:
    """Copy an algorithm, with networks and optimizers agent by agent."""
    loop = copy.deepcopy(mappo)
    assert isinstance(loop.actor.network, MLP)
    assert isinstance(loop.critic, MLP)
    loop.actor.network = Loop(loop.actor.network)
    loop.critic = Loop(loop.critic)
    loop._num_slices = 1
    loop._learned = [
        (Adam(network.parameters(), options[f"{part}_lr"], eps=1e-5), network)
        for part, network in (("actor", loop.actor), ("critic", loop.critic))
    ]
    optimizers: list[torch.optim.Optimizer] = [optimizer for optimizer, _ in loop._learned]
    loop._schedule = Schedule(optimizers, loop._config, _CPU)
    return loop


def rollout(environment: Spread, policy: Policy, generator: torch.Generator, seed: int) -> Rollout:
    """Play one episode of every copy."""
    n, length = environment.num_envs, environment.spec.max_episode_steps + 1
    rows: list[dict[str, Tensor]] = []
    timestep = environment.reset(np.arange(seed, seed + n, dtype=np.uint64))
    while True:
        observation = {k: torch.tensor(v) for k, v in timestep.observation.items()}
        acted = policy.act(observation, generator)
        row = {
            "step_type": torch.tensor(timestep.step_type),
            "reward": torch.tensor(timestep.reward),
            "discount": torch.tensor(timestep.discount),
            **{OBSERVATION + k: v for k, v in observation.items()},
        }
        rows.append(row | acted)
        if len(rows) > length:
            return Rollout({k: torch.stack([r[k] for r in rows]) for k in rows[0]}, [0] * n)
        last = timestep.step_type == int(StepType.LAST)
        seeds = np.arange(seed + n, seed + 2 * n, dtype=np.uint64)
        timestep = environment.step(acted["action"].numpy(), last, seeds)


def stacked_against_loop(
    name: str, options: Mapping[str, Any], updates: int = 100
) -> dict[str, Any]:
    """Learn from the same rollouts, stacked and in a loop, and compare all weights.

    One step of the optimizer for each rollout. With several, a row at the clip's edge falls on
    either side of it by rounding alone, and after some tens of updates the two are as far apart as
    two seeds.

    The gradient is not clipped: its norm is an agent's own in the stacked form, and one for all in
    the plain form (tests/learner_service/algorithms/test_mappo.py compares the clipping).
    """
    torch.set_num_threads(1)
    environment = Spread(SpreadConfig(), _ENVS)
    options = {"actor_lr": 5e-4, "critic_lr": 5e-4, "max_grad_norm": 0.0, **options}
    options = {"batch_number": 1, "data_passes": 1, **options}
    network = PluginConfig.model_validate({"name": "mlp", "hidden": (64, 64)})
    algorithm = PluginConfig.model_validate({"name": name, **options})
    stacked = build_algorithm(
        algorithm, environment.spec, network, Precision("fp32", _CPU), _CPU, seed=1
    )
    assert isinstance(stacked, Mappo)
    loop = unstacked(stacked, options)
    policy, generator = stacked.make_policy(), torch.Generator().manual_seed(2)
    for update in range(updates):
        batch = rollout(environment, policy, generator, 1000 * update)
        stacked.update(copy.deepcopy(batch))
        loop.update(batch)
        stacked.publish(policy)
    differences = []
    for plain, whole in (
        (loop.actor.network, stacked.actor.network),
        (loop.critic, stacked.critic),
    ):
        assert isinstance(plain, Loop)
        assert isinstance(whole, MLP)
        differences.append(plain.difference(whole))
    difference = max(differences)
    return {
        "updates": updates,
        "difference": difference,
        "tolerance": _TOLERANCE,
        "passed": difference <= _TOLERANCE,
    }

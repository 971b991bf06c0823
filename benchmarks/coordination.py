"""Games in which agents that learn alike, or at once, miss the team's best: HAPPO beside MAPPO.

    python -m benchmarks.coordination        all games, three seeds

- `opposites`: Kuba et al. 2022, proposition 1. Of four agents the first two must do the same, the
  others the opposite, for a payoff of 1. Agents that see the same and have one policy earn at most
  1/8.
- `kinds`: one agent chooses among three, the other gives a number x: 1 - |x - 1/2| for the third
  choice, else 0.

Runs in one process, without environment servers: each decision is an episode. Scores are mean
payoffs of the last policy, greedy and sampled.
"""

import sys
import time
from collections.abc import Callable
from typing import Any

import psutil
import torch
from torch import Tensor

from benchmarks._commands import named_cases, save_run
from murmur.benchmarks._threads import one_thread
from murmur.benchmarks.effort import Effort
from murmur.learner_service.device.precision import Precision
from murmur.learner_service.learning.base import Policy, build_algorithm
from murmur.learner_service.storage.rollout import Rollout
from murmur.results import run_command
from murmur.shared.config import PluginConfig
from murmur.shared.wire.dataset import OBSERVATION
from murmur.shared.wire.spec import ActionSpec, ArraySpec, Composite, Discrete, EnvSpec
from murmur.shared.wire.timestep import StepType

DESCRIPTION = "games that need coordination: HAPPO beside MAPPO, with known optima"

_ENVS, _UPDATES, _SAMPLED = 64, 100, 1000
_OPTIONS = {"data_passes": 4, "gamma": 0.0, "actor_lr": 5e-3, "critic_lr": 5e-3}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "happo": {"name": "happo"},
    "mappo, own": {"name": "mappo", "share_parameters": False},
    "mappo, shared": {"name": "mappo"},
}


def opposites(action: Tensor) -> Tensor:
    """Return payoffs [n] of choices [n, 4]."""
    same = (action[:, 0] == action[:, 1]) & (action[:, 2] == action[:, 3])
    return (same & (action[:, 0] != action[:, 2])).float()


def kinds(action: Tensor) -> Tensor:
    """Return payoffs [n] of [n, 2, 2]: a choice and a number of each agent, one of them idle."""
    return (action[:, 0, 0] == 2) * (1 - (action[:, 1, 1] - 0.5).abs())


# name -> (agents, actions, payoffs)
GAMES: dict[str, tuple[int, ActionSpec, Callable[[Tensor], Tensor]]] = {
    "opposites": (4, Discrete(2), opposites),
    "kinds": (2, Composite((3,), (-1.0,), (1.0,), ((True,), (False,))), kinds),
}


def play(game: str, policy: Policy, envs: int, generator: torch.Generator | None) -> Rollout:
    """Play a decision in each environment; greedily without a generator."""
    agents, _, payoff = GAMES[game]
    seen = torch.ones(envs, agents, 1)
    acted = policy.act({"observation": seen}, generator)
    kept = {k: x for k, x in acted.items() if k in ("action", "raw_action", "log_prob")}
    arrays = {k: torch.stack([x, x]) for k, x in kept.items()}
    arrays[OBSERVATION + "observation"] = torch.stack([seen, seen])
    arrays["reward"] = torch.zeros(2, envs, agents)
    arrays["reward"][1] = payoff(acted["action"]).unsqueeze(1)
    arrays["step_type"] = torch.full((2, envs), int(StepType.FIRST), dtype=torch.uint8)
    arrays["step_type"][1] = int(StepType.LAST)
    arrays["discount"] = torch.ones(2, envs)
    arrays["discount"][1] = 0
    return Rollout(arrays, [0] * envs)


def score(game: str, name: str, seed: int, updates: int) -> dict[str, float]:
    """Train once; return the mean payoffs of greedy and of sampled play."""
    agents, action, _ = GAMES[game]
    started, cpu = time.process_time(), torch.device("cpu")
    spec = EnvSpec(
        game, agents, (ArraySpec("observation", "float32", (1,)),), action, max_episode_steps=1
    )
    options = {"batch_size": _ENVS * agents, "batch_number": 1, **_OPTIONS, **ALGORITHMS[name]}
    network = PluginConfig(name="mlp", hidden=(32,), agent_id=False)
    algorithm = build_algorithm(
        PluginConfig(**options), spec, network, Precision("fp32", cpu), cpu, seed
    )
    policy, generator = algorithm.snapshot(), torch.Generator().manual_seed(seed)
    for _ in range(updates):
        algorithm.update(play(game, policy, _ENVS, generator))
        algorithm.refresh(policy)
    greedy, sampled = (
        float(play(game, policy, _SAMPLED, how).arrays["reward"][1].mean())
        for how in (None, generator)
    )
    seconds = time.process_time() - started
    return {"greedy": round(greedy, 3), "sampled": round(sampled, 3), "CPU-s": round(seconds, 1)}


def run(effort: Effort = Effort.FULL) -> dict[str, Any]:
    """Train on all games; each seed's payoffs, beside the optimum of 1."""
    seeds = effort.choose((1,), (1,), (1, 2, 3))
    updates = effort.choose(2, _UPDATES, _UPDATES)
    result: dict[str, Any] = {"optimum": 1.0, "updates": updates}
    with one_thread():
        for game in GAMES:
            result[game] = {}
            for name in ALGORITHMS:
                found = [score(game, name, seed, updates) for seed in seeds]
                result[game][name] = found
                print(f"{game}, {name}: {found}", file=sys.stderr, flush=True)
    return {**result, "load_average": psutil.getloadavg()[0]}


def main() -> None:
    """Run all and save the result."""
    named_cases(__doc__)
    save_run("coordination", run)


if __name__ == "__main__":
    run_command(main)

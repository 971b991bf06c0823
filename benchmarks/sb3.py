"""Stable-Baselines3 on a task of several choices and a game of turns, by murmur's budgets.

    python -m benchmarks.sb3 factors --seeds 1 2 3
    python -m benchmarks.sb3 tictactoe

trains MaskablePPO of sb3-contrib and murmur one seed after another on one core, and plays both
policies greedily by the same rules: `factors` as benchmarks.actions does, tic-tac-toe against every
line of a perfect player as benchmarks.turns does. Steps, minibatches, passes, widths and rates are
murmur's for both; MaskablePPO plays tic-tac-toe with its own, too. It learns the game as
PettingZoo's tutorial shows, from a wrapper in which the player to move is the only agent.

Not part of any extra: pip install --no-deps stable-baselines3==2.9.2 sb3-contrib==2.9.2, and pandas
"""

# ruff: noqa: ANN401 - the methods are those of Gymnasium

import argparse
import importlib.metadata
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks import actions, turns
from benchmarks._trainings import children_cpu_s
from murmur.doctor.machine import RESULTS
from murmur.env_service.environment import make_environment
from murmur.results import origin_text, provenance, require_clean_source, run_command
from murmur.shared.config import PluginConfig
from murmur.shared.wire.spec import ACTION_MASK
from murmur.shared.wire.timestep import Array, TimeStep

DESCRIPTION = "train Stable-Baselines3 on tasks of several choices and of turns by equal budgets"


_FACTORS: dict[str, Any] = {
    "n_steps": 128,  # of each of 16 copies: 8 minibatches of 256
    "batch_size": 256,
    "n_epochs": 5,
    "learning_rate": 2e-3,
    "gamma": 0.0,
    "ent_coef": 0.01,
    "max_grad_norm": 10.0,
}
_TICTACTOE: dict[str, Any] = {
    "n_steps": 2048,  # 4 minibatches of 512
    "batch_size": 512,
    "n_epochs": 4,
    "learning_rate": lambda left: 1e-3 * max(0.1, left),
    "gamma": 1.0,
    "ent_coef": 0.15,
}
STEPS = {"factors": actions.TASKS["factors"][3], "tictactoe": 400_000}


class Choices(gymnasium.Wrapper[Any, Any, Any, Any]):
    """The task of factors, with its masks where MaskablePPO asks for them."""

    def reset(self, **arguments: Any) -> tuple[Any, dict[str, Any]]:
        """Reset, and keep the mask."""
        observation, info = self.env.reset(**arguments)
        self._mask = info[ACTION_MASK]
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step, and keep the mask."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._mask = info[ACTION_MASK]
        return observation, reward, terminated, truncated, info

    def action_masks(self) -> NDArray[np.bool_]:
        """Return the masks of all choices, one after another."""
        mask: NDArray[np.bool_] = np.asarray(self._mask, np.bool_)
        return mask


class OnePlayer(gymnasium.Env[Any, Any]):
    """Tic-tac-toe whose only agent is the player to move, as PettingZoo's tutorial wraps it."""

    observation_space = gymnasium.spaces.Box(0, 1, (18,))
    action_space = gymnasium.spaces.Discrete(9)

    def __init__(self) -> None:
        """Make the game."""
        from pettingzoo.classic import tictactoe_v3

        self._game = tictactoe_v3.raw_env()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin a game."""
        super().reset(seed=seed)
        self._game.reset(seed=seed)
        return self._seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Move; the reward is that of the player who moved."""
        player = self._game.agent_selection
        self._game.step(int(action))
        over = self._game.terminations[player]
        return self._seen(), float(self._game.rewards[player]), over, False, {}

    def _seen(self) -> NDArray[np.float32]:
        seen = self._game.observe(self._game.agent_selection)
        self._mask = np.asarray(seen["action_mask"], np.bool_)
        vector: NDArray[np.float32] = np.asarray(seen["observation"], np.float32).reshape(-1)
        return vector

    def action_masks(self) -> NDArray[np.bool_]:
        """Return the free cells."""
        return self._mask


class _Greedy:
    """MaskablePPO's likeliest actions for rows of a time step."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def act(self, timestep: TimeStep) -> Array:
        """Return actions for [environments, agents]."""
        seen = timestep.observation["observation"]
        mask = timestep.observation[ACTION_MASK]
        rows, agents = seen.shape[:2]
        flat = mask.reshape(rows * agents, -1).astype(np.bool_)
        action, _ = self._model.predict(
            seen.reshape(rows * agents, -1), action_masks=flat, deterministic=True
        )
        chosen: Array = np.asarray(action).reshape(rows, agents, *action.shape[1:])
        return chosen


def train_factors(seed: int, steps: int) -> tuple[Any, float]:
    """Train MaskablePPO on the factors; return its policy and the CPU-seconds."""
    from sb3_contrib import MaskablePPO
    from stable_baselines3.common.vec_env import DummyVecEnv

    copies = DummyVecEnv([lambda: Choices(actions.Factors())] * 16)
    policy = {"net_arch": [64], "activation_fn": torch.nn.ReLU}
    model = MaskablePPO("MlpPolicy", copies, seed=seed, policy_kwargs=policy, **_FACTORS)
    before = time.process_time()
    model.learn(steps)
    return model, time.process_time() - before


def train_tictactoe(seed: int, steps: int, settings: dict[str, Any]) -> tuple[Any, float]:
    """Train MaskablePPO on both sides of the game; return its policy and the CPU-seconds."""
    from sb3_contrib import MaskablePPO

    policy = {"net_arch": [128, 128], "activation_fn": torch.nn.ReLU} if settings else {}
    model = MaskablePPO("MlpPolicy", OnePlayer(), seed=seed, policy_kwargs=policy, **settings)
    before = time.process_time()
    model.learn(steps)
    return model, time.process_time() - before


def factors(seed: int, share: float) -> dict[str, dict[str, float]]:
    """Train both on the factors; return scores, 1 at best, and CPU-seconds."""
    steps = int(STEPS["factors"] * share)
    model, cpu_s = train_factors(seed, steps)
    section = PluginConfig.model_validate(actions.environment_of("factors"))
    environment = make_environment(section, actions.EPISODES, "ppo")
    score = actions.play(environment, _Greedy(model))
    environment.close()
    before = children_cpu_s() + time.process_time()
    ours = actions.measure("factors", "ppo", seed, steps)["score"]
    ours_s = children_cpu_s() + time.process_time() - before
    return {
        "MaskablePPO": {"score": score, "CPU-s": cpu_s},
        "murmur": {"score": ours, "CPU-s": ours_s},
    }


def tictactoe(seed: int, share: float) -> dict[str, dict[str, float]]:
    """Train both on tic-tac-toe; return ends of lines lost to perfect and other players."""
    moves, found = int(STEPS["tictactoe"] * share), {}
    for name, settings in (("MaskablePPO", _TICTACTOE), ("MaskablePPO, its own settings", {})):
        model, cpu_s = train_tictactoe(seed, moves, settings)
        found[name] = {**lost(_Greedy(model)), "CPU-s": cpu_s}
    with tempfile.TemporaryDirectory() as folder:
        policy, cpu_s = turns.train("tictactoe", seed, moves, Path(folder))
    return {**found, "murmur": {**lost(policy), "CPU-s": cpu_s}}


def lost(policy: Any) -> dict[str, float]:
    """Play all lines from both sides; return how many of their ends the policy lost."""
    return {
        f"lost as {name}, {player} player": turns.play_lines(policy, side, moves)["lost"]
        for side, name in enumerate(turns.SIDES)
        for player, moves in (("perfect", turns.perfect_moves), ("any", turns.legal_moves))
    }


TASKS = {"factors": factors, "tictactoe": tictactoe}


def table(found: dict[str, dict[str, dict[str, float]]]) -> str:
    """Return the Markdown table of all seeds."""
    names = list(next(iter(next(iter(found.values())).values())))
    lines = [f"| seed | of | {' | '.join(names)} |", "|---" * (len(names) + 2) + "|"]
    for seed, results in found.items():
        for of, values in results.items():
            figures = " | ".join(f"{values[name]:.4g}" for name in names)
            lines.append(f"| {seed} | {of} | {figures} |")
    return "\n".join(lines)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=DESCRIPTION)
    parser.add_argument("task", choices=list(TASKS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--share", type=float, default=1.0, help="of the budget, for a try")
    parser.add_argument("--dirty", action="store_true", help="save from source not committed")
    arguments = parser.parse_args()
    require_clean_source(arguments.dirty)
    origin = provenance("benchmarks.sb3")
    torch.set_num_threads(1)
    found = {}
    for seed in arguments.seeds:
        found[str(seed)] = TASKS[arguments.task](seed, arguments.share)
        print(seed, found[str(seed)], file=sys.stderr, flush=True)
    if arguments.share < 1:
        return
    record: dict[str, Any] = {
        "benchmark": "sb3",
        **origin,
        "peer": {p: importlib.metadata.version(p) for p in ("stable-baselines3", "sb3-contrib")},
        "task": arguments.task,
        "seeds": found,
    }
    file = RESULTS / f"sb3-{arguments.task}.json"
    file.write_text(json.dumps(record, indent=1) + "\n")
    versions = ", ".join(f"{name} {version}" for name, version in record["peer"].items())
    heading = f"`{record['command']}`\n\n{origin_text(record)}. {versions}."
    file.with_suffix(".md").write_text(f"{heading}\n\n{table(found)}\n")
    print(f"written: {file}, .md")


if __name__ == "__main__":
    run_command(main)

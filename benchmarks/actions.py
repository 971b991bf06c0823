"""Actions of several parts: tasks whose best return is known, learned with each kind of action.

    python -m benchmarks.actions                    all tasks, three seeds
    murmur bench actions --smoke

Every decision is a task of its own: what is shown says what to do, and an episode has `_STEPS` of
them. The best return of each decision is 1 for an agent, so a return over `_STEPS` is the share of
what is possible. Policies play greedily, 64 episodes that no training saw.
"""

# ruff: noqa: ANN401, D102 - the methods are those of Gymnasium and PettingZoo

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Space
from numpy.typing import NDArray
from pettingzoo import ParallelEnv

import murmur
from benchmarks._commands import named_cases, save_run
from benchmarks._trainings import SYNC_LEARNER
from murmur.benchmarks.effort import Effort
from murmur.env_service.environment import (
    RandomPolicy,
    ScriptedPolicy,
    VectorEnvironment,
    make_environment,
)
from murmur.learner_service.checkpoint.folder import CheckpointFolder
from murmur.learner_service.export.policy import load_policy
from murmur.learner_service.learning.base import Policy
from murmur.results import run_command
from murmur.shared.config import PluginConfig
from murmur.shared.wire.spec import ACTION_MASK
from murmur.shared.wire.timestep import Array, StepType, TimeStep

DESCRIPTION = "tasks of several choices and numbers at once: learned, beside their known optimum"
NEEDS = ("gymnasium", "pettingzoo")

_STEPS = 8  # of an episode
EPISODES = 64
_CUES = 4
_FIRST_SEED = 2**40


class _Cued(gymnasium.Env[Any, Any]):
    """A cue is shown, one of `_CUES`, and the action that it asks for is rewarded."""

    observation_space: Space[Any] = Box(0, 1, (_CUES,))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._step = 0
        return self._shown(), self._info()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward = self._reward(action)
        self._step += 1
        return self._shown(), reward, self._step == _STEPS, False, self._info()

    def _shown(self) -> NDArray[np.float32]:
        self._cue = int(self.np_random.integers(_CUES))
        shown: NDArray[np.float32] = np.eye(_CUES, dtype=np.float32)[self._cue]
        return shown

    def _info(self) -> dict[str, Any]:
        return {}

    def _reward(self, action: Any) -> float:
        raise NotImplementedError


class Hybrid(_Cued):
    """An arm and its parameter: 1 or 0.5, by cue and arm, minus the distance to the best one.

    Arm k is worth 1 for cue k, else 0.5; its best parameter is (cue + 2 k) / 5 - 0.9.
    """

    action_space: Space[Any] = Dict({"arm": Discrete(_CUES), "parameter": Box(-1, 1, (1,))})

    def _reward(self, action: Any) -> float:
        arm, best = action["arm"], (self._cue + 2 * action["arm"]) / 5 - 0.9
        worth = 1.0 if arm == self._cue else 0.5
        return worth - abs(float(action["parameter"][0]) - float(best))


class Factors(_Cued):
    """Five choices among 8: 32,768 combinations, with a mask of each choice.

    Choice f is right if it is (cue + f) modulo 8; another one, drawn in each step, is illegal.
    """

    _CHOICES, _OF = 5, 8
    action_space: Space[Any] = MultiDiscrete([_OF] * _CHOICES)

    def _info(self) -> dict[str, Any]:
        self._right = (self._cue + np.arange(self._CHOICES)) % self._OF
        wrong = (self._right + self.np_random.integers(1, self._OF, self._CHOICES)) % self._OF
        self._mask = np.ones((self._CHOICES, self._OF), np.int8)
        self._mask[np.arange(self._CHOICES), wrong] = 0
        return {ACTION_MASK: self._mask.flatten()}

    def _reward(self, action: Any) -> float:
        if not self._mask[np.arange(self._CHOICES), action].all():
            raise ValueError(f"illegal action {action}")
        return float((action == self._right).mean())


class Unbounded(_Cued):
    """A number without bounds: 1 minus a quarter of its distance to 3 cue - 5."""

    action_space: Space[Any] = Box(-np.inf, np.inf, (1,))

    def _reward(self, action: Any) -> float:
        return 1 - abs(float(action[0]) - (3 * self._cue - 5)) / 4


class Pair(ParallelEnv[str, Any, Any]):  # type: ignore[misc]
    """One agent chooses among four, the other gives two numbers; each is paid for its own."""

    metadata: dict[str, Any] = {"name": "pair"}  # noqa: RUF012 - PettingZoo's own

    def __init__(self) -> None:
        self.possible_agents = ["chooser", "placer"]
        self.agents: list[str] = []

    def observation_space(self, agent: str) -> Space[Any]:
        return Box(0, 1, (_CUES,))

    def action_space(self, agent: str) -> Space[Any]:
        return Discrete(_CUES) if agent == "chooser" else Box(-2, 2, (2,))

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents, self._step = list(self.possible_agents), 0
        self._random = np.random.default_rng(seed)
        return self._shown(), {agent: {} for agent in self.agents}

    def _shown(self) -> dict[str, Any]:
        self._cue = int(self._random.integers(_CUES))
        seen = np.eye(_CUES, dtype=np.float32)[self._cue]
        return dict.fromkeys(self.possible_agents, seen)

    def step(self, actions: dict[str, Any]) -> Any:
        best = np.array([self._cue - 1.5, 1.5 - self._cue])
        rewards = {
            "chooser": float(actions["chooser"] == self._cue),
            "placer": 1 - float(np.abs(actions["placer"] - best).mean()),
        }
        self._step += 1
        over = dict.fromkeys(self.agents, self._step == _STEPS)
        infos: dict[str, Any] = {agent: {} for agent in self.agents}
        if self._step == _STEPS:
            self.agents = []
        return self._shown(), rewards, over, dict.fromkeys(over, False), infos


# name -> (plug-in, factory, algorithms, environment steps)
TASKS: dict[str, tuple[str, str, tuple[str, ...], int]] = {
    "hybrid": ("gymnasium", "Hybrid", ("ppo", "mappo"), 30_000),
    "factors": ("gymnasium", "Factors", ("ppo",), 30_000),
    "unbounded": ("gymnasium", "Unbounded", ("ppo",), 60_000),
    "pair": ("pettingzoo", "Pair", ("mappo",), 30_000),
}


def environment_of(task: str) -> dict[str, Any]:
    """Return the section of a task's environment."""
    plugin, factory, _, _ = TASKS[task]
    return {"name": plugin, "factory": f"benchmarks.actions:{factory}"}


def configuration(task: str, algorithm: str, seed: int, steps: int) -> dict[str, Any]:
    """Return the configuration of a training."""
    return {
        "run": {"seed": seed, "max_env_steps": steps},
        "environment": environment_of(task),
        "env_server": {
            "num_workers": 1,
            "envs_per_worker": 16,
            "sessions_per_worker": 1,
            "metrics_port": 0,
        },
        "algorithm": {"name": algorithm, "actor_lr": 2e-3, "critic_lr": 2e-3, "gamma": 0.0},
        "network": {"name": "mlp", "hidden": [64]},
        "learner": SYNC_LEARNER,
    }


class Greedy:
    """A trained policy, played greedily."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def act(self, timestep: TimeStep) -> Array:
        """Return actions for rows."""
        seen = {name: torch.from_numpy(x.copy()) for name, x in timestep.observation.items()}
        action: Array = self._policy.act(seen, None)["action"].numpy()
        return action


def play(environment: VectorEnvironment, policy: ScriptedPolicy) -> float:
    """Play one episode in each copy; return the mean reward of an agent and a decision."""
    seeds = np.arange(environment.num_envs, dtype=np.uint64) + np.uint64(_FIRST_SEED)
    timestep, total = environment.reset(seeds), 0.0
    running = np.zeros(environment.num_envs, np.bool_)
    for _ in range(_STEPS):
        timestep = environment.step(policy.act(timestep), running, seeds)
        total += float(timestep.reward.mean())
    assert (timestep.step_type == StepType.LAST).all()
    return total / _STEPS


def measure(task: str, algorithm: str, seed: int, steps: int) -> dict[str, float]:
    """Train once; return the greedy policy's score and the seconds of training."""
    plugin = PluginConfig.model_validate(environment_of(task))
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="murmur-bench-") as folder:
        run = murmur.train(
            configuration(task, algorithm, seed, steps), run=Path(folder) / "run", progress=False
        )
        seconds = time.monotonic() - started
        latest = run.latest()
        policy, _, _ = load_policy(CheckpointFolder(latest.parent, 1).load(latest))
    environment = make_environment(plugin, EPISODES, algorithm)
    try:
        return {"score": play(environment, Greedy(policy)), "seconds": seconds}
    finally:
        environment.close()


def run(effort: Effort = Effort.FULL) -> dict[str, Any]:
    """Train on the tasks; return each seed's score beside the optimum and random play."""
    tasks = list(TASKS)[: effort.choose(1, len(TASKS), len(TASKS))]
    seeds = effort.choose(1, 1, 3)
    result: dict[str, Any] = {}
    for task in tasks:
        _, _, algorithms, steps = TASKS[task]
        environment = make_environment(
            PluginConfig.model_validate(environment_of(task)), EPISODES, algorithms[0]
        )
        result[task] = {"optimum": 1.0, "random": play(environment, RandomPolicy(environment))}
        environment.close()
        for algorithm in algorithms[: effort.choose(1, 2, 2)]:
            runs = [
                measure(task, algorithm, seed, effort.choose(1000, steps, steps))
                for seed in range(1, seeds + 1)
            ]
            result[task][algorithm] = {
                "scores": [one["score"] for one in runs],
                "seconds": max(one["seconds"] for one in runs),
            }
            print(f"{task}, {algorithm}: {result[task][algorithm]}", file=sys.stderr, flush=True)
    return result


def main() -> None:
    """Run all and save the result; tasks as arguments: only those, without saving."""
    if chosen := named_cases(__doc__, TASKS):
        for task in chosen:
            print(task, measure(task, TASKS[task][2][0], 1, TASKS[task][3]))
    else:
        save_run("actions", run)


if __name__ == "__main__":
    run_command(main)

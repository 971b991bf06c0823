"""Agents from a set, whose order differs between processes, and what follows from it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from murmur.kit.check_env import check_apart

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]  # up to ten processes in a row
SOURCE = '''
import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete
from pettingzoo import ParallelEnv

NAMES = [f"uav_{i}" for i in range(5)]


class Roles(ParallelEnv):
    """Each agent is paid for the action of its number; it sees nothing of it."""

    metadata = {"name": "roles"}

    def __init__(self, kind="set"):
        self.kind = kind
        self.possible_agents = sorted(NAMES) if kind == "sorted" else list(set(NAMES))

    def observation_space(self, agent):
        return Box(-1, 1, (1,), np.float32)

    def action_space(self, agent):
        return Discrete(5)

    def observations(self):
        return {agent: np.zeros(1, np.float32) for agent in set(self.agents)}  # another order

    def reset(self, seed=None, options=None):
        self.agents, self.steps = NAMES[::-1], 0  # another order than possible_agents
        return self.observations(), {agent: {} for agent in NAMES}

    def step(self, actions):
        self.steps += 1
        over = self.steps == 10
        seen = self.observations()
        rewards = {agent: float(actions[agent] == NAMES.index(agent)) for agent in set(NAMES)}
        ends, cuts = dict.fromkeys(NAMES, over), dict.fromkeys(NAMES, False)
        if over:
            self.agents = []
        return seen, rewards, ends, cuts, {agent: {} for agent in NAMES}


class Towns(gymnasium.Env):
    """A parcel goes to a town that is drawn from a set."""

    observation_space, action_space = Box(-1, 1, (1,), np.float32), Discrete(2)
    prices = {"north": 1.0, "south": 2.0, "east": 3.0, "west": 4.0}

    def __init__(self, ordered=False):
        self.towns = sorted(self.prices) if ordered else list(set(self.prices))

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.town = self.towns[int(self.np_random.integers(4))]
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), self.prices[self.town], True, False, {}
'''


@pytest.fixture(autouse=True)
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "agents_of_a_set.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)


def murmur(*arguments: str, **environment: str) -> tuple[int, str]:
    """Run a command; its exit code and what it printed."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MURMUR", "PYTHONHASHSEED"))}
    done = subprocess.run(
        [sys.executable, "-m", "murmur", *arguments],
        capture_output=True,
        text=True,
        env=kept | environment,
        timeout=250,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def configured(share_parameters: bool, updates: int, **env_server: Any) -> str:
    config = {
        "environment": {"name": "pettingzoo", "factory": "agents_of_a_set:Roles"},
        "algorithm": {"name": "ippo", "share_parameters": share_parameters},
        "env_server": {"num_workers": 4, "envs_per_worker": 4, **env_server},
        "run": {"max_updates": updates},
        "evaluation": {"every_updates": 0},
        "learner": {"port": 0, "metrics_port": 0, "device": "cpu"},
    }
    Path("roles.yaml").write_text(json.dumps(config))  # JSON is YAML
    return "roles.yaml"


@pytest.mark.parametrize(
    ("factory", "key", "words"),
    [
        ("Roles", "kind=sorted", "the agents are uav_"),
        ("Towns", "ordered=true", "the same seed and actions in another process"),
    ],
)
def test_check_env_looks_from_a_second_process(factory: str, key: str, words: str) -> None:
    name = f"agents_of_a_set:{factory}"
    (problem,) = check_apart(name, [], 20.0).problems
    assert words in problem
    assert check_apart(name, [f"arguments.{key}"], 20.0).problems == []


@pytest.mark.long
def test_agents_with_own_networks_must_have_one_order() -> None:
    code, said = murmur("train", configured(False, 60), "--run", "own")
    assert code == 2
    assert "agents: uav_" in said
    assert "list the agents in one order in every process" in said
    one_worker = configured(False, 2, num_workers=1)
    code, said = murmur("train", one_worker, "--run", "one", PYTHONHASHSEED="0")
    assert code == 0, said
    scores, refused = [], 0
    for seed in range(3):
        hashing = {"PYTHONHASHSEED": str(seed)}
        code, said = murmur("evaluate", "one", "--episodes=4", "--json=out.json", **hashing)
        if code:
            assert "agents: uav_" in said
            refused += 1
        else:
            scores.append(json.loads(Path("out.json").read_text())["metrics"]["return"])
    assert refused
    assert scores
    assert all(score == scores[0] for score in scores)
    other = "1"
    more = ("train", "--resume", "one", "--set", "run.max_updates=4")
    code, said = murmur(*more, PYTHONHASHSEED=other)
    assert (code, "agents: uav_" in said) == (2, True)
    code, said = murmur("train", one_worker, "--from", "one", "--run", "new", PYTHONHASHSEED=other)
    assert (code, "has the agents in another order" in said) == (2, True)


@pytest.mark.long
def test_rows_of_agents_that_share_a_network_are_put_in_order() -> None:
    """The network learns by the agents' numbers: one that another worker gives another one."""
    config = configured(True, 60)
    code, said = murmur("train", config, "--run", "shared")
    assert code == 0, said
    log = Path("shared/logs/learner.log").read_text()
    assert "lists the agents in another order than the run" in log
    scores = []
    for seed in range(3):
        hashing = {"PYTHONHASHSEED": str(seed)}
        code, said = murmur("evaluate", "shared", "--episodes=4", "--json=out.json", **hashing)
        assert code == 0, said
        scores.append(json.loads(Path("out.json").read_text())["metrics"]["return"])
    assert scores == [scores[0]] * 3
    assert min(scores[0]) >= 40  # of 50; 10 by chance
    code, said = murmur(
        "train", config, "--from", "shared", "--run", "new", "--set=run.max_updates=1"
    )
    assert code == 0, said

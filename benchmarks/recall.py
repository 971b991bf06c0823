"""A number recalled: off-policy actor-critics with memory on a task whose optimum is known.

Each of two agents sees a number c, uniform in [-1, 1], as the episode begins, then a clock alone.
Its action a two steps later earns -(a - c)^2; other actions earn nothing. With memory a = c earns
0. Without it a cannot depend on c, so that no policy earns more than -E[c^2] = -1/3.

Runs in one process, without environment servers: the algorithms, their replay and their policies
are those of a training. Scores are greedy, of the last policy, on new episodes.
"""

import statistics
import time
from typing import Any

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch import Tensor

from murmur.benchmarks._threads import one_thread
from murmur.benchmarks.effort import Effort
from murmur.learner_service.device.precision import Precision
from murmur.learner_service.learning.base import Algorithm, Policy, build_algorithm
from murmur.learner_service.storage.replay import ReplayStorage
from murmur.shared.config import PluginConfig
from murmur.shared.wire.dataset import OBSERVATION
from murmur.shared.wire.spec import ArraySpec, Continuous, EnvSpec
from murmur.shared.wire.timestep import StepType

DESCRIPTION = "recall a number two steps later, off-policy with memory (optimum 0, without -0.333)"

_AGENTS, _DELAY = 2, 2
_ROWS = _DELAY + 2  # of an episode: one for each decision, and the last
_SPEC = EnvSpec(
    "recall",
    _AGENTS,
    (ArraySpec("observation", "float32", (2,)),),
    Continuous(1),
    max_episode_steps=_DELAY + 1,
)
_ENVS, _UPDATES_A_ROUND, _PLAYED = 16, 4, 500
_GRU = {"recurrent": 16, "recurrent_cell": "gru"}
_LSTM = {"recurrent": 16, "recurrent_cell": "lstm"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"{name}, GRU": (name, _GRU) for name in ("maddpg", "matd3", "masac", "ddpg", "td3", "sac")},
    "sac, LSTM": ("sac", _LSTM),
    "sac, no memory": ("sac", {}),
    "td3, no memory": ("td3", {}),
}


def run(effort: Effort = Effort.FULL) -> dict[str, Any]:
    """Train every case from three seeds, one after the other on one core."""
    updates = effort.choose(2, 2000, 2000)
    seeds = effort.choose((1,), (1,), (1, 2, 3))
    names = effort.choose(["masac, GRU"], list(CASES), list(CASES))
    with one_thread():
        rows = {name: score(name, seeds, updates) for name in names}
    return {
        "optimum": 0.0,
        "bound without memory": round(-1 / 3, 3),
        "updates": updates,
        "episodes a score is of": _PLAYED,
        "load_average": psutil.getloadavg()[0],
        **rows,
    }


def score(name: str, seeds: tuple[int, ...], updates: int) -> dict[str, Any]:
    """Train a case and return its reward an agent: each seed's, the mean, and the CPU time.

    Args:
        name: key of CASES.
        seeds: seeds of the trainings.
        updates: updates of a training.
    """
    start, found = time.process_time(), []
    for seed in seeds:
        algorithm = build(name, seed)
        train(algorithm, seed, updates)
        found.append(round(float(play(algorithm, None, _PLAYED, seed + 1000)["reward"].mean()), 4))
    seconds = (time.process_time() - start) / len(seeds)
    return {"reward": found, "mean": round(statistics.mean(found), 4), "CPU-s": round(seconds, 1)}


def build(name: str, seed: int) -> Algorithm[Any]:
    """Build a case's algorithm."""
    algorithm, memory = CASES[name]
    replay = {"capacity_rows": 20_000, "start_rows": 256, "unroll_steps": _ROWS, "batch_size": 128}
    # From 3e-3 the policy follows critics that know nothing yet so far that all units die which
    # feed the memory: in 180 updates of DDPG, seed 2.
    options: dict[str, Any] = {"gamma": 0.9, "actor_lr": 1e-3, "critic_lr": 5e-3}
    options |= {"target_tau": 0.05, "replay": replay}
    if algorithm in ("masac", "sac"):
        options |= {"initial_temperature": 0.02, "temperature_lr": 3e-3, "target_entropy": -2.0}
    else:
        options |= {"noise_start": 0.5, "exploration_env_steps": 20_000}
    network = PluginConfig(name="mlp", hidden=(32,), **memory)
    config = PluginConfig(name=algorithm, **options)
    cpu = torch.device("cpu")
    return build_algorithm(config, _SPEC, network, Precision("fp32", cpu), cpu, seed)


def train(algorithm: Algorithm[Any], seed: int, updates: int) -> None:
    """Play and learn in turns: an episode of each environment, then some updates."""
    storage = algorithm.make_storage(_SPEC, None)
    assert isinstance(storage, ReplayStorage)
    generator = torch.Generator().manual_seed(seed)
    policy, done = algorithm.snapshot(), 0
    while done < updates:
        unroll = storage.begin(_ENVS, 0, 0)
        for key, x in play(algorithm, generator, _ENVS, seed + done, policy).items():
            if key in unroll.arrays:
                unroll.arrays[key].copy_(x)
        unroll.cursor, unroll.first_version = _ROWS + 1, 0
        storage.add(unroll)
        for _ in range(_UPDATES_A_ROUND * storage.ready):
            batch = storage.sample(0, 0.0)
            if batch is not None:
                algorithm.update(algorithm.transforms.batch(batch))
                storage.done(batch)
                done += 1
        algorithm.refresh(policy)


def play(
    algorithm: Algorithm[Any],
    generator: torch.Generator | None,
    envs: int,
    seed: int,
    policy: Policy | None = None,
) -> dict[str, Tensor]:
    """Play one episode of each environment, and the row that begins the next.

    Args:
        algorithm: algorithm whose policy plays.
        generator: random generator of exploration; None: greedy.
        envs: n, environments.
        seed: seed of the cues.
        policy: policy of `Algorithm.snapshot`; None: a new one.

    Returns:
        [rows, n, ...] arrays of an unroll, by name; greedy: the last reward alone.
    """
    policy = policy or algorithm.snapshot()
    cue = np.random.default_rng(seed).uniform(-1, 1, (envs, _AGENTS)).astype(np.float32)
    kinds = [StepType.FIRST, *[StepType.MID] * _DELAY, StepType.LAST, StepType.FIRST]
    memory = torch.zeros(envs, _AGENTS, policy.memory_size)
    reward: NDArray[np.float32] = np.zeros((envs, _AGENTS), np.float32)
    rows: dict[str, list[Tensor]] = {}
    for t, kind in enumerate(kinds):
        seen = np.zeros((envs, _AGENTS, 2), np.float32)
        seen[..., 0] = cue if kind == StepType.FIRST else 0
        seen[..., 1] = t % _ROWS / _DELAY
        if kind == StepType.FIRST:
            memory = torch.zeros_like(memory)
        observation = torch.from_numpy(seen)
        remembered = memory if policy.memory_size else None
        acted = policy.act({"observation": observation}, generator, remembered)
        memory = acted["memory"].clone() if policy.memory_size else memory
        answered = kind == StepType.LAST
        row = {
            "step_type": torch.full((envs,), int(kind), dtype=torch.uint8),
            "reward": torch.from_numpy(reward if answered else np.zeros_like(reward)),
            "discount": torch.full((envs,), 0.0 if answered else 1.0),
            "action": acted["action"].clone(),
            OBSERVATION + "observation": observation,
        }
        if answered and generator is None:
            return {"reward": row["reward"]}
        for name, x in row.items():
            rows.setdefault(name, []).append(x)
        reward = -np.square(acted["action"].numpy()[..., 0] - cue)
    found = {name: torch.stack(each) for name, each in rows.items()}
    if policy.memory_size:
        found["memory"] = torch.zeros_like(memory).unsqueeze(0)
    return found

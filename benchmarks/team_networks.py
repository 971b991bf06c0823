"""Networks over teams and over entities, on tasks whose best return is known.

    python -m benchmarks.team_networks              all cases, three seeds
    murmur bench team_networks --smoke

relay: agents stand in a ring that is drawn in every step; each sees its own number, and must name
the number of the agent one or two places before it. No agent sees another's number, so without
messages no policy is right more often than once in K. strongest: each agent sees up to four
entities in any order, and must name the kind of the strongest; places without one hold stronger
ones.

Every step is a task of its own, worth 1 for an agent; a score is the share that the greedy policy
earns in 64 episodes that no training saw. Policies are trained with 3 agents and play with 3 and 5.
All runs in one process, on one core, without environment servers.
"""

import sys
import time
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from benchmarks._commands import named_cases, save_run
from benchmarks.actions import Greedy, play
from murmur.benchmarks._threads import one_thread
from murmur.benchmarks.effort import Effort
from murmur.env_service.environment import (
    BaselineFactory,
    RandomPolicy,
    VectorEnvironment,
    make_environment,
)
from murmur.learner_service.checkpoint.contents import saved_policy, spec_text
from murmur.learner_service.checkpoint.resize import with_agents
from murmur.learner_service.device.precision import Precision
from murmur.learner_service.learning.base import Policy, build_algorithm
from murmur.learner_service.storage.rollout import Rollout
from murmur.results import run_command
from murmur.shared.config import PluginConfig, Section
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.wire.dataset import OBSERVATION
from murmur.shared.wire.seeding import uniform
from murmur.shared.wire.spec import ADJACENCY, ArraySpec, Discrete, EnvSpec
from murmur.shared.wire.timestep import Array, StepType, TimeStep

DESCRIPTION = "messages along a graph and attention over entities: learned, beside the optimum"
NEEDS = ("gymnasium", "pettingzoo")

_STEPS = 8  # of an episode, as benchmarks.actions plays them
_EPISODES = 64
_NUMBERS, _ENTITIES, _KINDS = 4, 4, 3


class _Tasks(VectorEnvironment):
    """N copies whose every step is a task, drawn with the episode's seed when it begins."""

    class Config(Section):
        """Options."""

        num_agents: int = Field(3, ge=3, description="agents")

    BASELINES: Mapping[str, BaselineFactory] = {"random": RandomPolicy}
    NAME: str
    ACTIONS: int
    DRAWS: int  # numbers in [0, 1) of an agent and a task

    def __init__(self, config: Config, num_envs: int) -> None:
        """Allocate N copies; each starts with the first `step` that restarts it."""
        self._agents, self.num_envs = config.num_agents, num_envs
        self.spec = EnvSpec(
            self.NAME,
            config.num_agents,
            self.arrays(config.num_agents),
            Discrete(self.ACTIONS),
            max_episode_steps=_STEPS,
        )
        self._age = np.zeros(num_envs, np.int64)
        self._drawn = np.zeros((num_envs, _STEPS + 1, config.num_agents, self.DRAWS))
        self._answer = np.zeros((num_envs, config.num_agents), np.int64)

    @abstractmethod
    def arrays(self, agents: int) -> tuple[ArraySpec, ...]:
        """Return the specs of the observations."""

    @abstractmethod
    def task(self, drawn: NDArray[np.float64]) -> tuple[dict[str, Array], NDArray[np.int64]]:
        """Return observations and right actions [N, A] of numbers [N, A, DRAWS]."""

    @override
    def step(
        self, action: Array, restart: NDArray[np.bool_], seeds: NDArray[np.uint64]
    ) -> TimeStep:
        reward = ((action == self._answer) & ~restart[:, None]).astype(np.float32)
        self._age = np.where(restart, 0, self._age + 1)
        if restart.any():
            count = int(np.prod(self._drawn.shape[1:]))
            fresh = uniform(seeds[restart], count).T
            self._drawn[restart] = fresh.reshape(-1, *self._drawn.shape[1:])
        seen, self._answer = self.task(self._drawn[np.arange(self.num_envs), self._age])
        last = self._age == _STEPS
        step_type = np.where(last, StepType.LAST, StepType.MID)
        return TimeStep(
            step_type=np.where(restart, StepType.FIRST, step_type).astype(np.uint8),
            reward=reward,
            discount=np.where(last, 0, 1).astype(np.float32),
            observation=seen,
            metrics={},
        )


class Relay(_Tasks):
    """Name the number of the agent one or two places before one's own in the ring.

    Observation of an agent: its number and the distance that it is asked for, one-hot, and
    `adjacency`: it hears the agent before it.
    """

    NAME, ACTIONS, DRAWS = "relay", _NUMBERS, 3

    @override
    def arrays(self, agents: int) -> tuple[ArraySpec, ...]:
        return (
            ArraySpec("observation", "float32", (_NUMBERS + 2,)),
            ArraySpec(ADJACENCY, "uint8", (agents,)),
        )

    @override
    def task(self, drawn: NDArray[np.float64]) -> tuple[dict[str, Array], NDArray[np.int64]]:
        number = (drawn[..., 0] * _NUMBERS).astype(np.int64)
        two = drawn[..., 1] < 0.5
        ring = drawn[..., 2].argsort(1)  # agents in their order
        before = np.empty_like(ring)
        np.put_along_axis(before, ring, np.roll(ring, 1, axis=1), 1)
        asked = np.where(two, np.take_along_axis(before, before, 1), before)
        number_shown = np.arange(_NUMBERS) == number[..., None]
        shown = np.concatenate([number_shown, two[..., None], ~two[..., None]], -1)
        hears = np.arange(self._agents) == before[..., None]
        seen: dict[str, Array] = {
            "observation": shown.astype(np.float32),
            ADJACENCY: hears.astype(np.uint8),
        }
        return seen, np.take_along_axis(number, asked, 1)


class Strongest(_Tasks):
    """Name the kind of the strongest entity that is there; one to four are.

    An entity is its strength in [0, 1) and its kind, one-hot. Places without one hold a strength in
    [1, 2) and any kind.
    """

    NAME, ACTIONS, DRAWS = "strongest", _KINDS, 3 * _ENTITIES + 1

    @override
    def arrays(self, agents: int) -> tuple[ArraySpec, ...]:
        return (
            ArraySpec("entities", "float32", (_ENTITIES, 1 + _KINDS)),
            ArraySpec("entities_mask", "uint8", (_ENTITIES,)),
        )

    @override
    def task(self, drawn: NDArray[np.float64]) -> tuple[dict[str, Array], NDArray[np.int64]]:
        key, strength, kind = np.split(drawn[..., 1:], 3, axis=-1)  # [N, A, E] each
        count = 1 + (drawn[..., :1] * _ENTITIES).astype(np.int64)
        there = key.argsort(-1).argsort(-1) < count
        kinds = (kind * _KINDS).astype(np.int64)
        best = np.where(there, strength, -1).argmax(-1)
        strength = np.where(there, strength, 1 + strength)
        shown = np.arange(_KINDS) == kinds[..., None]
        seen: dict[str, Array] = {
            "entities": np.concatenate([strength[..., None], shown], -1).astype(np.float32),
            "entities_mask": there.astype(np.uint8),
        }
        return seen, np.take_along_axis(kinds, best[..., None], -1)[..., 0]


_GRAPH = {"name": "graph", "width": 32, "hidden": (32,)}
_LISTENING = {
    "name": "attention",
    "width": 32,
    "hidden": (32,),
    "communication": True,
    "rounds": 2,
}
_ENTITY = {"name": "attention", "width": 16, "hidden": (32,)}
_MLP = {"name": "mlp", "hidden": (64, 64), "agent_id": False}
# case -> (environment, algorithm, network)
CASES: dict[str, tuple[type[_Tasks], str, dict[str, Any]]] = {
    "relay, graph, mappo": (Relay, "mappo", _GRAPH),
    "relay, graph, ippo": (Relay, "ippo", _GRAPH),
    "relay, attention with communication, mappo": (Relay, "mappo", _LISTENING),
    "relay, mlp, mappo": (Relay, "mappo", _MLP),
    "strongest, attention, mappo": (Strongest, "mappo", _ENTITY),
    "strongest, mlp, mappo": (Strongest, "mappo", _MLP),
}
# The best score, and the best without messages; by the commonest kind.
BOUNDS = {"relay": (1.0, 1 / _NUMBERS), "strongest": (1.0, 1 / _KINDS)}
_ENVS, _UPDATES = 64, 60
_MINIBATCHES, _PASSES = 4, 4
_CPU = torch.device("cpu")


def configuration(case: str, seed: int) -> ExperimentConfig:
    """Return the configuration of a training with three agents."""
    kind, algorithm, network = CASES[case]
    options = {"actor_lr": 3e-3, "critic_lr": 3e-3, "gamma": 0.0, "data_passes": _PASSES}
    options |= {"batch_size": _ENVS * _STEPS * 3 // _MINIBATCHES, "batch_number": _MINIBATCHES}
    return ExperimentConfig.model_validate(
        {
            "run": {"seed": seed},
            "environment": environment_of(kind),
            "algorithm": {"name": algorithm, **options},
            "network": network,
        }
    )


def environment_of(kind: type[_Tasks], num_agents: int = 3) -> dict[str, Any]:
    """Return the section of an environment."""
    return {"name": f"benchmarks.team_networks:{kind.__name__}", "num_agents": num_agents}


def episodes(
    environment: VectorEnvironment, policy: Policy, generator: torch.Generator, first_seed: int
) -> Rollout:
    """Play one episode in each copy, as a rollout."""
    seeds = np.arange(environment.num_envs, dtype=np.uint64) + np.uint64(first_seed)
    running, timestep = np.zeros(len(seeds), np.bool_), environment.reset(seeds)
    rows: dict[str, list[Tensor]] = {}
    for t in range(_STEPS + 1):
        seen = {name: torch.tensor(x) for name, x in timestep.observation.items()}
        row = policy.act(seen, generator) | {OBSERVATION + name: x for name, x in seen.items()}
        for name in ("step_type", "reward", "discount"):
            row[name] = torch.tensor(getattr(timestep, name))
        for name, x in row.items():
            rows.setdefault(name, []).append(x.clone())
        if t < _STEPS:
            timestep = environment.step(row["action"].numpy(), running, seeds)
    return Rollout({name: torch.stack(x) for name, x in rows.items()}, [0] * len(seeds))


def train(config: ExperimentConfig, updates: int) -> dict[str, Any]:
    """Train in this process; return what a checkpoint holds of the policy."""
    seed = config.run.seed
    environment = make_environment(config.environment, _ENVS)
    algorithm = build_algorithm(
        config.algorithm,
        environment.spec,
        config.network,
        Precision("fp32", _CPU),
        _CPU,
        seed,
    )
    policy, generator = algorithm.snapshot(), torch.Generator().manual_seed(seed)
    for update in range(updates):
        first_seed = (seed * updates + update) * _ENVS
        algorithm.update(episodes(environment, policy, generator, first_seed))
        algorithm.refresh(policy)
    return {
        "spec": spec_text(environment.spec),
        "config": config.model_dump_json(),
        "algorithm": algorithm.state_dict(),
    }


def measure(case: str, seed: int, updates: int) -> dict[str, float]:
    """Train once; return the greedy policy's scores by number of agents, and CPU-seconds."""
    kind, _, network = CASES[case]
    started = time.process_time()
    state = train(configuration(case, seed), updates)
    result = {"CPU-s": time.process_time() - started}
    # A network that flattens the adjacency cannot act for another number of agents.
    for agents in (3,) if kind is Relay and network is _MLP else (3, 5):
        plugin = PluginConfig.model_validate(environment_of(kind, agents))
        environment = make_environment(plugin, _EPISODES)
        resized = with_agents(state, case, agents)
        policy, _ = saved_policy(case, resized, Precision("fp32", _CPU), _CPU)
        result[f"{agents} agents"] = play(environment, Greedy(policy))
    return result


def run(effort: Effort = Effort.FULL) -> dict[str, Any]:
    """Train all cases; return each seed's scores beside the optimum."""
    seeds, updates = effort.choose((1,), (1,), (1, 2, 3)), effort.choose(2, _UPDATES, _UPDATES)
    result: dict[str, Any] = {"updates": updates, "load_average": psutil.getloadavg()[0]}
    for name, (best, blind) in BOUNDS.items():
        result[f"{name}, bounds"] = {"optimum": best, "blind": round(blind, 4)}
    with one_thread():
        for case in CASES:
            runs = [measure(case, seed, updates) for seed in seeds]
            result[case] = {name: [round(one[name], 4) for one in runs] for name in runs[0]}
            print(f"{case}: {result[case]}", file=sys.stderr, flush=True)
    return result


def main() -> None:
    """Run all and save the result; cases as arguments: only those, without saving."""
    if chosen := named_cases(__doc__, CASES):
        for case in chosen:
            print(case, measure(case, 1, _UPDATES))
    else:
        save_run("team_networks", run)


if __name__ == "__main__":
    run_command(main)

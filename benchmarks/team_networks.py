"""Networks over teams and over entities, on tasks whose best return is known.

    python -m benchmarks.team_networks              all cases, three seeds
    murmur bench team_networks --smoke

relay: agents stand in a ring that is drawn in every step; each sees a number of its own, and must
name that of the agent one or two places before it. What an agent sees says nothing of it: without
messages no policy is right more often than once in K. strongest: each agent sees up to six entities
in any order, and must name the kind of the strongest; places without an entity hold stronger ones.

Every step is a task of its own, worth 1 for an agent; a score is the share that the greedy policy
earns in 64 episodes that no training saw. Policies are trained with 3 agents and play with 3 and 5.
"""

import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from typing_extensions import override

import murmur
from benchmarks._trainings import SYNC_LEARNER
from benchmarks.actions import play
from murmur.benchmarks.effort import Effort
from murmur.env_service.environment import (
    BaselineFactory,
    RandomPolicy,
    VectorEnvironment,
    make_environment,
)
from murmur.results import provenance, require_clean_source, save_result
from murmur.shared.config import PluginConfig, Section
from murmur.shared.wire.seeding import uniform
from murmur.shared.wire.spec import ADJACENCY, ArraySpec, Discrete, EnvSpec
from murmur.shared.wire.timestep import Array, StepType, TimeStep

DESCRIPTION = "messages along a graph and attention over entities: learned, beside the optimum"

_STEPS = 8  # of an episode, as benchmarks.actions plays them
_EPISODES = 64
_NUMBERS, _ENTITIES, _KINDS = 4, 6, 3


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

    def arrays(self, agents: int) -> tuple[ArraySpec, ...]:
        """Return the specs of the observations."""
        raise NotImplementedError

    def task(self, drawn: NDArray[np.float64]) -> tuple[dict[str, Array], NDArray[np.int64]]:
        """Return observations and right actions [N, A] of numbers [N, A, DRAWS]."""
        raise NotImplementedError

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
    """Name the kind of the strongest entity of those that are there, one to six.

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


_GRAPH = {"name": "graph", "width": 32, "hidden": [32]}
_OVER_AGENTS = {"name": "attention", "width": 32, "hidden": [32]}
_OVER_AGENTS |= {"communication": True, "rounds": 2}
_ENTITY = {"name": "attention", "width": 32, "hidden": [32]}
_MLP = {"name": "mlp", "hidden": [64, 64], "agent_id": False}
# case -> (environment, algorithm, network)
CASES: dict[str, tuple[type[_Tasks], str, dict[str, Any]]] = {
    "relay, graph, mappo": (Relay, "mappo", _GRAPH),
    "relay, graph, ippo": (Relay, "ippo", _GRAPH),
    "relay, attention with communication, mappo": (Relay, "mappo", _OVER_AGENTS),
    "relay, mlp, mappo": (Relay, "mappo", _MLP),
    "strongest, attention, mappo": (Strongest, "mappo", _ENTITY),
    "strongest, attention, ippo": (Strongest, "ippo", _ENTITY),
    "strongest, mlp, mappo": (Strongest, "mappo", _MLP),
}
_ENV_STEPS = 60_000
# The best score, and what is reached without messages, or without a look at the entities.
BOUNDS = {"relay": (1.0, 1 / _NUMBERS), "strongest": (1.0, 1 / _KINDS)}


def environment_of(kind: type[_Tasks], num_agents: int = 3) -> dict[str, Any]:
    """Return the section of an environment."""
    return {"name": f"benchmarks.team_networks:{kind.__name__}", "num_agents": num_agents}


def configuration(case: str, seed: int, steps: int) -> dict[str, Any]:
    """Return the configuration of a training with three agents."""
    kind, algorithm, network = CASES[case]
    return {
        "run": {"seed": seed, "max_env_steps": steps},
        "environment": environment_of(kind),
        "env_server": {
            "num_workers": 1,
            "envs_per_worker": 32,
            "sessions_per_worker": 1,
            "metrics_port": 0,
        },
        "algorithm": {"name": algorithm, "actor_lr": 1e-3, "critic_lr": 1e-3, "gamma": 0.0},
        "network": network,
        "learner": SYNC_LEARNER,
    }


def measure(case: str, seed: int, steps: int) -> dict[str, float]:
    """Train once; return the greedy policy's scores by number of agents, and seconds."""
    kind, _, network = CASES[case]
    started, scores = time.monotonic(), dict[str, float]()
    with tempfile.TemporaryDirectory(prefix="murmur-bench-") as folder:
        run = murmur.train(
            configuration(case, seed, steps), run=Path(folder) / "run", progress=False
        )
        scores["seconds"] = time.monotonic() - started
        # A network that flattens the adjacency cannot act for another number of agents.
        for agents in (3,) if kind is Relay and network is _MLP else (3, 5):
            plugin = PluginConfig.model_validate(environment_of(kind, agents))
            environment = make_environment(plugin, _EPISODES)
            policy = murmur.load(run.latest(), num_agents=agents)
            scores[f"{agents} agents"] = play(environment, policy)
            environment.close()
    return scores


def run(effort: Effort = Effort.FULL) -> dict[str, Any]:
    """Train all cases; return each seed's scores beside the optimum."""
    seeds, steps = effort.choose((1,), (1,), (1, 2, 3)), effort.choose(1000, _ENV_STEPS, _ENV_STEPS)
    result: dict[str, Any] = {"environment steps": steps}
    for name, (best, blind) in BOUNDS.items():
        result[f"{name}, bounds"] = {"optimum": best, "without": blind}
    for case in list(CASES)[: effort.choose(1, len(CASES), len(CASES))]:
        runs = [measure(case, seed, steps) for seed in seeds]
        result[case] = {name: [round(one[name], 4) for one in runs] for name in runs[0]}
        print(f"{case}: {result[case]}", file=sys.stderr, flush=True)
    return result


def main() -> int:
    """Run all and save the result; cases as arguments: only those, without saving."""
    if chosen := sys.argv[1:]:
        for case in chosen:
            print(case, measure(case, 1, _ENV_STEPS))
        return 0
    require_clean_source(dirty=False)
    origin = provenance("benchmarks.team_networks")
    print(save_result("team_networks", run(), origin))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Teams that differ: options of their own, a league of unequal teams, states of agents.

Three games of `benchmarks.unequal_teams` whose answers are computed there. `Prizes` is learned with
options of each team, with one discount for both, and without memory. `Hiding` is learned by seekers
in a league against two hiders of other trainings. Of `Loads` it is measured how much of the
rewards' variance a critic explains. All run in one process, without environment servers.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from typing_extensions import override

from benchmarks._trainings import SYNC_LEARNER
from benchmarks.unequal_teams import Hiding, Loads, Prizes
from murmur.benchmarks._threads import one_thread
from murmur.benchmarks.effort import Effort
from murmur.env_service.environment import VectorEnvironment
from murmur.learner_service.device.cuda_graph import Graphs
from murmur.learner_service.device.precision import Precision
from murmur.learner_service.learning.base import Algorithm, Policy, build_algorithm
from murmur.learner_service.learning.team_specs import View
from murmur.learner_service.serving.game import Game, Pairing
from murmur.learner_service.serving.league import League
from murmur.learner_service.serving.staging import HostStaging
from murmur.learner_service.storage.rollout import RolloutStorage
from murmur.shared.config import PluginConfig
from murmur.shared.config.experiment import LeagueConfig
from murmur.shared.wire.dataset import OBSERVATION
from murmur.shared.wire.spec import EnvSpec
from murmur.shared.wire.timestep import Array, StepType, TimeStep

DESCRIPTION = "unequal teams in games whose equilibria are known; critics with agents' own states"

_CPU = torch.device("cpu")
_ENVS = 32
_FAST = {"actor_lr": 1e-2, "critic_lr": 1e-2, "data_passes": 4, "entropy_weight": 0.02}
_MEMORY = {"recurrent": 16}
_PATIENT: dict[str, Any] = {"gamma": 1.0, "network": _MEMORY}
_HASTY: dict[str, Any] = {"gamma": 0.3, "actor_lr": 5e-3, "network": {"hidden": [8]}}
PRIZES: dict[str, tuple[dict[str, Any], float, float]] = {  # options, known rewards
    "options of each team": ({"patient": _PATIENT, "hasty": _HASTY}, 4.0, 1.0),
    "one discount": ({"patient": _PATIENT, "hasty": _HASTY | {"gamma": 1.0}}, 2.0, 4.0),
    "no memory": ({"patient": {"gamma": 1.0}, "hasty": _HASTY}, 2.0, 1.0),
}
LOADS = {"own": 1.0, "shared": 0.5, "none": 0.0}  # state: explained variance, known


def run(effort: Effort = Effort.FULL) -> dict[str, Any]:
    """Learn all games from three seeds, on one core."""
    seeds = effort.choose((1,), (1,), (1, 2, 3))
    result: dict[str, Any] = {"prizes": {}, "hiding": {}, "loads": {}}
    started = time.process_time()
    with one_thread():
        for case, (_, patient, hasty) in PRIZES.items():
            found = [prizes(case, seed, effort.choose(2, 150, 150)) for seed in seeds]
            result["prizes"][case] = {
                "patient, known": patient,
                "patient": [x["patient"] for x in found],
                "hasty, known": hasty,
                "hasty": [x["hasty"] for x in found],
            }
        for state, known in LOADS.items():
            explained = [loads(state, seed, effort.choose(2, 100, 100)) for seed in seeds]
            result["loads"][f"state: {state}"] = {"known": known, "explained variance": explained}
        seekers = [hiding(seed, effort.choose(2, 60, 60), 200) for seed in seeds]
        answer = {"known": 1.0, "best against any hider": round(2 / 3, 3)}
        result["hiding"] = {"two hiders of other trainings": {**answer, "seekers": seekers}}
    result["CPU-seconds"] = round(time.process_time() - started)
    return {**result, "load_average": psutil.getloadavg()[0]}


def prizes(case: str, seed: int, updates: int) -> dict[str, float]:
    """Learn `Prizes`; return the greedy reward of an agent of each team.

    Args:
        case: key of PRIZES.
        seed: seed of the training.
        updates: updates of the training.
    """
    environment = Prizes(_ENVS)
    algorithm = _build("ippo", environment.spec, seed, _FAST | {"teams": PRIZES[case][0]})
    _train(algorithm, environment, seed, updates)
    reward = _episode(algorithm.snapshot(), environment, None, seed + 1000)["reward"].sum(0).mean(0)
    return {
        "patient": round(float(reward[[0, 2]].mean()), 3),
        "hasty": round(float(reward[1]), 3),
    }


def loads(state: str, seed: int, updates: int) -> float:
    """Learn `Loads` with MAPPO; return the critic's explained variance in the last updates.

    Args:
        state: key of LOADS.
        seed: seed of the training.
        updates: updates of the training.
    """
    environment = Loads(_ENVS, state)
    algorithm = _build("mappo", environment.spec, seed, _FAST)
    explained = _train(algorithm, environment, seed, updates)
    return round(statistics.mean(explained[-max(1, updates // 10) :]), 3)


def hiding(seed: int, updates: int, episodes: int) -> float:
    """Learn `Hiding` by seekers, against two hiders of other trainings; return their greedy reward.

    One opponent was trained with all agents, by two teams, the other as the hider alone, in a
    league against the seekers of the first. The lure is another one for each.

    Args:
        seed: seed of the trainings.
        updates: updates of each training.
        episodes: episodes to play at the end, half of them against each hider.
    """
    environment = Hiding(_ENVS, lure=1)
    teams: dict[str, Any] = {"teams": {"seeker": {}, "hider": {}}}
    every = _build("ippo", environment.spec, seed, _FAST | teams)
    _train(every, environment, seed, updates)
    whole = View.of("", (0, 1, 2), environment.spec, centralized=False)
    opponents: list[tuple[Policy, View | None]] = [(every.snapshot(), whole)]
    for agents, lure in (("hider", 2), ("seeker", 1)):
        side = Side(Hiding(_ENVS, lure), agents, opponents, seed)
        algorithm = _build("ippo", side.spec, seed, _FAST)
        _train(algorithm, side, seed, updates)
        opponents.append((algorithm.snapshot(), None))
    seekers, _ = opponents.pop()
    side = Side(Hiding(episodes), "seeker", opponents, seed)
    reward = _episode(seekers, side, None, seed + 1000)["reward"][1]
    return round(float(reward.mean()), 3)


class Side(VectorEnvironment):
    """The agents of one side of a game, whose other agents a league plays."""

    def __init__(
        self,
        environment: VectorEnvironment,
        agents: str,
        opponents: Sequence[tuple[Policy, View | None]],
        seed: int,
    ) -> None:
        """Assign the opponents.

        Args:
            environment: environment of all agents.
            agents: name of the agents on this side.
            opponents: policies and the agents that they act for; None: the others alone.
            seed: seed of the draws.
        """
        files = tuple(str(number) for number in range(len(opponents)))
        config = LeagueConfig(agents=(agents,), checkpoints=files)
        self._environment, self.num_envs = environment, environment.num_envs
        self._game = Game.of(environment.spec, config)
        self.spec = self._game.team.spec
        self._league = League(config, seed, _CPU)
        for file, (policy, view) in zip(files, opponents, strict=True):
            self._league.add(file, self._game.assign(policy, view))
        self._pairing, self._slots = Pairing.of(self.num_envs), np.arange(self.num_envs)
        self._episodes: NDArray[np.int64] = np.zeros(self.num_envs, np.int64)
        self._generator = torch.Generator().manual_seed(seed)
        self._staging = HostStaging(self._generator, None, Graphs(_CPU))
        self._others: Array = np.zeros((self.num_envs, len(self._game.others.agents)), np.int32)

    @override
    def step(
        self, action: Array, restart: NDArray[np.bool_], seeds: NDArray[np.uint64]
    ) -> TimeStep:
        game, joint = self._game, np.zeros((self.num_envs, self._environment.spec.num_agents), int)
        joint[:, game.own_rows], joint[:, game.other_rows] = action, self._others
        timestep = self._environment.step(joint, restart, seeds)
        self._episodes += restart
        self._league.draw(self._pairing, restart, self._slots, self._episodes)
        games = [(self._pairing, timestep)]
        # No episode is against the policy as it is now: league.latest is 0.
        latest = self._league.opponents[0].policy
        (self._others,) = self._league.act(games, latest, self._generator, self._staging)
        view = {name: x[:, game.own_rows] for name, x in timestep.observation.items()}
        return replace(timestep, reward=timestep.reward[:, game.own_rows], observation=view)


def hiding_configuration(seed: int, lure: int, env_steps: int, **sections: Any) -> dict[str, Any]:  # noqa: ANN401 - what YAML can say
    """Return the configuration of a run in `Hiding`.

    Args:
        seed: seed of the run.
        lure: option of the environment.
        env_steps: environment steps of the run.
        **sections: options of sections beside or in place of these.
    """
    base: dict[str, Any] = {
        "run": {"max_env_steps": env_steps, "seed": seed},
        "environment": {"name": f"{Hiding.__module__}:{Hiding.__name__}", "lure": lure},
        "env_server": {"num_workers": 1, "envs_per_worker": 32, "metrics_port": 0},
        "algorithm": {"name": "ippo", "unroll_steps": 16, "actor_lr": 3e-3, "critic_lr": 3e-3},
        "network": {"name": "mlp", "hidden": [32]},
        "learner": SYNC_LEARNER | {"keep_checkpoints": 1},
    }
    return base | {name: base.get(name, {}) | own for name, own in sections.items()}


def _build(name: str, spec: EnvSpec, seed: int, options: dict[str, Any]) -> Algorithm[Any]:
    rows = (spec.max_episode_steps + 1) * _ENVS * spec.num_agents
    options = options | {"unroll_steps": spec.max_episode_steps + 1, "batch_size": rows // 2}
    config = PluginConfig(name=name, batch_number=2, **options)
    network = PluginConfig(name="mlp", hidden=(32,), agent_id=False)
    return build_algorithm(config, spec, network, Precision("fp32", _CPU), _CPU, seed)


def _train(
    algorithm: Algorithm[Any], environment: VectorEnvironment, seed: int, updates: int
) -> list[float]:
    """Play an episode of each copy and learn from it, in turns; return explained variances."""
    storage = algorithm.make_storage(environment.spec, None)
    assert isinstance(storage, RolloutStorage)
    storage.expect(_ENVS)
    generator = torch.Generator().manual_seed(seed)
    policy, explained = algorithm.snapshot(), list[float]()
    while len(explained) < updates:
        unroll = storage.begin(_ENVS, 0, 0)
        played = _episode(policy, environment, generator, seed + len(explained))
        for name, x in played.items():
            unroll.arrays[name].copy_(x)
        unroll.cursor, unroll.first_version = len(played["reward"]), 0
        storage.add(unroll)
        while storage.ready:
            batch = storage.sample(0, 0.0)
            assert batch is not None
            seen = algorithm.transforms.batch(batch)
            explained.append(float(algorithm.update(seen)["explained_variance"]))
            storage.done(seen)
        algorithm.refresh(policy)
    return explained


def _episode(
    policy: Policy, environment: VectorEnvironment, generator: torch.Generator | None, seed: int
) -> dict[str, torch.Tensor]:
    """Play one episode of each copy, and the row that begins the next.

    Args:
        policy: policy of `Algorithm.snapshot`.
        environment: environment of episodes of one length.
        generator: random generator of actions; None: greedy.
        seed: seed of the episodes.

    Returns:
        name -> [rows, n, ...] arrays of an unroll.
    """
    spec, n = environment.spec, environment.num_envs
    seeds = np.arange(n, dtype=np.uint64) + np.uint64(seed * 2 * n)
    timestep, rows = environment.reset(seeds), dict[str, list[torch.Tensor]]()
    memory = torch.zeros(n, spec.num_agents, policy.memory_size)
    for _ in range(spec.max_episode_steps + 2):
        observation = {k: torch.from_numpy(x.copy()) for k, x in timestep.observation.items()}
        if timestep.step_type[0] == StepType.FIRST:
            memory = torch.zeros_like(memory)
        acted = policy.act(observation, generator, memory if policy.memory_size else None)
        memory = acted.pop("memory", memory).clone()
        row = {
            "step_type": torch.from_numpy(timestep.step_type.copy()),
            "reward": torch.from_numpy(timestep.reward.copy()),
            "discount": torch.from_numpy(timestep.discount.copy()),
            "action": acted["action"],
            **({"log_prob": acted["log_prob"]} if "log_prob" in acted else {}),
            **{OBSERVATION + name: x for name, x in observation.items()},
        }
        for name, x in row.items():
            rows.setdefault(name, []).append(x.clone())
        restart = timestep.step_type == StepType.LAST
        timestep = environment.step(acted["action"].numpy(), restart, seeds + np.uint64(n))
    found = {name: torch.stack(each) for name, each in rows.items()}
    if policy.memory_size:
        found["memory"] = torch.zeros_like(memory).unsqueeze(0)
    return found

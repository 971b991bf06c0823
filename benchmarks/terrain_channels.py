"""Terrain's channels: all drawn by the environment server, or partly computed by the learner."""

import statistics
import time
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from murmur.benchmarks.effort import Effort
from murmur.env_service.envs.terrain import Config, TerrainEnvironment
from murmur.learner_service.layers.inputs import ActorInputs, CriticInputs, InputOptions
from murmur.shared.wire.spec import ACTION_MASK
from murmur.shared.wire.timestep import StepType, TimeStep

DESCRIPTION = (
    "terrain with its channels computed by the server or by the learner: bytes on the wire, CPU "
    "time of both sides"
)

By = Literal["server", "learner"]
_PASSES = 4  # an update of terrain-reference reads every time step about this often


class _Mission:
    """Environments that fly random legal moves."""

    def __init__(self, channels_by: By, num_envs: int) -> None:
        self.env = TerrainEnvironment(Config(channels_by=channels_by), num_envs)
        self._generator = np.random.default_rng(0)
        self._restart: NDArray[np.bool_] = np.ones(num_envs, np.bool_)
        self._episode = 0
        self._last: TimeStep | None = None

    def step(self) -> tuple[TimeStep, float]:
        """Return the next time step and the CPU-seconds it took."""
        env, n = self.env, self.env.num_envs
        actions = np.zeros((n, env.spec.num_agents), np.int32)
        if self._last is not None:
            legal = self._last.observation[ACTION_MASK]
            draws = self._generator.random(legal.shape)
            actions = np.multiply(legal, draws).argmax(-1).astype(np.int32)
        seeds = np.arange(n, dtype=np.uint64) + np.uint64(self._episode * n)
        started = time.process_time()
        self._last = env.step(actions, self._restart, seeds)
        took = time.process_time() - started
        self._restart = self._last.step_type == StepType.LAST
        self._episode += int(self._restart.any())
        return self._last, took


def _inputs(mission: _Mission, rows: int) -> Callable[[], None]:
    """Return a function that computes the reference preset's network inputs for `rows` rows."""
    spec = mission.env.spec
    options = InputOptions(agent_id=False)
    actor, critic = ActorInputs(spec, options), CriticInputs(spec, options)
    observation = mission.step()[0].observation
    batch = {
        name: torch.from_numpy(np.resize(array, (rows, *array.shape[1:])))
        for name, array in observation.items()
    }
    action = torch.zeros((rows, spec.num_agents), dtype=torch.int64)

    def compute() -> None:
        with torch.no_grad():
            actor(batch)
            critic(batch, action)

    return compute


def compare(num_envs: int, rounds: int, episodes: int, rows: int) -> dict[str, Any]:
    """Measure both in turns; medians over the rounds."""
    ways: tuple[By, ...] = ("server", "learner")
    missions = {by: _Mission(by, num_envs) for by in ways}
    inputs = {by: _inputs(missions[by], rows) for by in ways}
    steps: dict[By, list[float]] = {by: [] for by in ways}
    reads: dict[By, list[float]] = {by: [] for by in ways}
    agents = missions["server"].env.spec.num_agents
    for _ in range(rounds):
        for by in ways:
            took = sum(missions[by].step()[1] for _ in range(16 * episodes))
            steps[by].append(took / (16 * episodes * num_envs * agents))
            started = time.process_time()
            inputs[by]()
            reads[by].append((time.process_time() - started) / (rows * agents))
    table: dict[str, Any] = {}
    for by in ways:
        observation = missions[by].step()[0].observation
        step, read = statistics.median(steps[by]) * 1e6, statistics.median(reads[by]) * 1e6
        table[f"channels by the {by}"] = {
            "bytes of an environment's time step": sum(x[0].nbytes for x in observation.values()),
            "environment server, CPU us per agent-step": step,
            "learner's inputs, CPU us per agent-step and pass": read,
            f"both with {_PASSES} passes, CPU us per agent-step": step + _PASSES * read,
        }
    return table


def run(effort: Effort = Effort.FULL) -> dict[str, Any]:
    """Measure both ways, in turns."""
    num_envs, rounds, episodes, rows = effort.choose((2, 1, 1, 8), (32, 3, 1, 512), (32, 9, 4, 512))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {"channels": compare(num_envs, rounds, episodes, rows)}
    finally:
        torch.set_num_threads(threads)

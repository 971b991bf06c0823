"""How fast environments step where nothing else does: no learner, no wire, random actions.

    python -m murmur.benchmarks.gpu_topics.alone CONFIG ENVIRONMENTS SECONDS

steps them for this time and prints agent-steps a second.
"""

import json
import subprocess
import sys
import time
from collections.abc import Sequence

import numpy as np

from env_service.environment import make_environment
from murmur.child import child_environment
from shared.config import ExperimentConfig, PluginConfig
from shared.spec import Discrete, EnvSpec
from shared.timestep import Array, StepType

_WARM_STEPS = 20  # compile
_STARTS_S = 60.0


def rate_alone(config: ExperimentConfig, seconds: float) -> float:
    """Agent-steps a second of all workers' environments, each worker in a process of its own."""
    server = config.env_server
    envs = max(1, server.envs_per_worker // server.sessions_per_worker)
    plugin = json.dumps({"name": config.environment.name, **config.environment.options})
    command = [sys.executable, "-P", "-m", __name__, plugin, str(envs), str(seconds)]
    children = [
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=child_environment()
        )
        for _ in range(server.num_workers)
    ]
    try:
        found = [child.communicate(timeout=_STARTS_S + seconds)[0] for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    return sum(float(rate) for rate in found)


def step_alone(plugin: PluginConfig, num_envs: int, seconds: float) -> float:
    """Agent-steps a second of one process."""
    environment = make_environment(plugin, num_envs)
    spec, generator = environment.spec, np.random.default_rng(0)
    begin, seeds = np.ones(num_envs, np.bool_), np.arange(num_envs, dtype=np.uint64)
    steps, turn, started = 0, 0, time.monotonic()
    while turn < _WARM_STEPS + 1 or time.monotonic() - started < seconds:
        if turn == _WARM_STEPS:
            steps, started = 0, time.monotonic()
        row = environment.step(_actions(spec, num_envs, generator), begin, seeds)
        steps += int((row.step_type != int(StepType.FIRST)).sum())
        begin = row.step_type >= int(StepType.LAST)
        seeds = seeds + begin.astype(np.uint64) * np.uint64(num_envs)
        turn += 1
    return steps * spec.num_agents / (time.monotonic() - started)


def _actions(spec: EnvSpec, num_envs: int, generator: np.random.Generator) -> Array:
    rows = num_envs, spec.num_agents
    if isinstance(spec.action, Discrete):
        return generator.integers(spec.action.num_actions, size=rows).astype(np.int32)
    low, high = np.maximum(spec.action.low, -1), np.minimum(spec.action.high, 1)
    return generator.uniform(low, high, size=(*rows, spec.action.size)).astype(np.float32)


def main(arguments: Sequence[str]) -> None:
    """See the module."""
    plugin, num_envs, seconds = arguments
    print(step_alone(PluginConfig(**json.loads(plugin)), int(num_envs), float(seconds)))


if __name__ == "__main__":
    main(sys.argv[1:])

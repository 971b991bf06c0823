"""Speed of environments alone: no learner, no wire, random actions.

    python -m murmur.benchmarks.gpu_topics.alone CONFIG ENVIRONMENTS SECONDS

steps them, prints a line when they are warm, and waits for one; then steps them for this time and
prints agent-steps a second and the processor's share.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from murmur.env_service.environment import make_environment, random_action
from murmur.runs.child import child_environment
from murmur.shared.config import PluginConfig
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.wire.spec import Composite, Discrete, EnvSpec
from murmur.shared.wire.timestep import Array, StepType

_WARM_STEPS = 20  # compile
_STARTS_S = 60.0


@dataclass(frozen=True)
class Alone:
    """Speed of environments alone.

    Attributes:
        rate: agent-steps per second.
        cores: processor cores in use by their processes.
    """

    rate: float
    cores: float


def rate_alone(config: ExperimentConfig, seconds: float) -> Alone:
    """Step all workers' environments, each worker in a process of its own; all begin together."""
    server = config.env_server
    envs = max(1, server.envs_per_worker // server.sessions_per_worker)
    plugin = json.dumps({"name": config.environment.name, **config.environment.options})
    command = [sys.executable, "-P", "-m", __name__, plugin, str(envs), str(seconds)]
    children = [
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=child_environment(),
            text=True,
        )
        for _ in range(server.num_workers)
    ]
    try:
        for child in children:
            assert child.stdout is not None
            child.stdout.readline()  # it is warm
        found = [child.communicate("\n", _STARTS_S + seconds)[0].split() for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    rates, cores = zip(*found, strict=True)
    return Alone(sum(map(float, rates)), sum(map(float, cores)))


def step_alone(
    plugin: PluginConfig, num_envs: int, seconds: float, warm: Callable[[], object]
) -> Alone:
    """Step the environments in this process.

    Args:
        plugin: environment to step.
        num_envs: number of environments.
        seconds: length of the measurement [s].
        warm: function to call after the first steps.
    """
    environment = make_environment(plugin, num_envs)
    spec, generator = environment.spec, np.random.default_rng(0)
    begin, seeds = np.ones(num_envs, np.bool_), np.arange(num_envs, dtype=np.uint64)
    steps, turn, started, used = 0, 0, time.monotonic(), time.process_time()
    while turn < _WARM_STEPS + 1 or time.monotonic() - started < seconds:
        if turn == _WARM_STEPS:
            warm()
            steps, started, used = 0, time.monotonic(), time.process_time()
        row = environment.step(_actions(spec, num_envs, generator), begin, seeds)
        steps += int((row.step_type != int(StepType.FIRST)).sum())
        begin = row.step_type >= int(StepType.LAST)
        seeds = seeds + begin.astype(np.uint64) * np.uint64(num_envs)
        turn += 1
    took = time.monotonic() - started
    return Alone(steps * spec.num_agents / took, (time.process_time() - used) / took)


def _actions(spec: EnvSpec, num_envs: int, generator: np.random.Generator) -> Array:
    rows = num_envs, spec.num_agents
    if isinstance(spec.action, Discrete):
        return generator.integers(spec.action.num_actions, size=rows).astype(np.int32)
    if isinstance(spec.action, Composite):
        draws = generator.integers(2**63, size=num_envs, dtype=np.uint64)
        return random_action(spec, draws, None)
    low, high = np.maximum(spec.action.low, -1), np.minimum(spec.action.high, 1)
    return generator.uniform(low, high, size=(*rows, spec.action.size)).astype(np.float32)


def main(arguments: Sequence[str]) -> None:
    """Measure the speed of environments alone, with random actions."""
    plugin, num_envs, seconds = arguments

    def warm() -> None:
        print("warm", flush=True)
        sys.stdin.readline()

    found = step_alone(PluginConfig(**json.loads(plugin)), int(num_envs), float(seconds), warm)
    print(found.rate, found.cores)


if __name__ == "__main__":
    main(sys.argv[1:])

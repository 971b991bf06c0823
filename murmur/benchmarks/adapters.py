"""Cost of the contract for a PettingZoo or Gymnasium environment, against the bare environment.

CPU time of one thread, per environment step with its resets. Raw stepping is the plainest loop:
ready-made actions, nothing kept. Both take turns; the figures are medians.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from murmur.benchmarks.effort import Effort
from murmur.env_service.adapters.factory import AdapterConfig, create
from murmur.env_service.environment import make_environment, random_action
from murmur.shared.config import PluginConfig
from murmur.shared.wire.spec import Continuous, Discrete
from murmur.shared.wire.timestep import StepType

DESCRIPTION = "PettingZoo and Gymnasium environments behind the contract against raw stepping"
NEEDS = ("gymnasium", "pettingzoo", "mpe2")

_COPIES = 16
_CASES: dict[str, dict[str, Any]] = {
    "mpe2 simple_spread, discrete": {
        "name": "pettingzoo",
        "factory": "mpe2.simple_spread_v3:parallel_env",
    },
    "mpe2 simple_spread, continuous": {
        "name": "pettingzoo",
        "factory": "mpe2.simple_spread_v3:parallel_env",
        "arguments": {"continuous_actions": True},
    },
    "mpe2 simple_speaker_listener": {
        "name": "pettingzoo",
        "factory": "mpe2.simple_speaker_listener_v4:parallel_env",
    },
    "mpe2 simple_tag": {"name": "pettingzoo", "factory": "mpe2.simple_tag_v3:parallel_env"},
    "CartPole": {
        "name": "gymnasium",
        "factory": "gymnasium:make",
        "arguments": {"id": "CartPole-v1"},
    },
    "Pendulum": {
        "name": "gymnasium",
        "factory": "gymnasium:make",
        "arguments": {"id": "Pendulum-v1"},
    },
}


def run(effort: Effort = Effort.FULL) -> dict[str, Any]:
    """Measure microseconds per step, raw and behind the contract, for each environment."""
    steps, repeats = effort.choose((5, 1), (25, 5), (100, 15))
    result = {}
    for name, options in _CASES.items():
        plugin = PluginConfig.model_validate(options)
        raw, adapted = _raw(plugin, steps), _adapted(plugin, steps)
        raw(), adapted()
        pairs = [(raw(), adapted()) for _ in range(repeats)]
        plain = statistics.median(p for p, _ in pairs)
        ratio = statistics.median(p / q for p, q in pairs)
        result[name] = {
            "raw µs/step": round(plain, 2),
            "overhead µs/step": round(statistics.median(q - p for p, q in pairs), 2),
            "share of the raw rate %": round(100 * ratio, 1),
        }
    return {"copies": _COPIES, "overhead": result}


def _raw(plugin: PluginConfig, steps: int) -> Callable[[], float]:
    """Return a measurement of the bare objects: microseconds per step."""
    config = AdapterConfig(
        factory=plugin.options["factory"], arguments=plugin.options.get("arguments", {})
    )
    environments = [create(config) for _ in range(_COPIES)]
    many = plugin.name == "pettingzoo"
    first = environments[0]
    for seed, environment in enumerate(environments):
        environment.reset(seed=seed)
    agents = first.possible_agents if many else []
    for agent in agents:
        first.action_space(agent).seed(1)

    def sample() -> Any:  # noqa: ANN401 - an action, as the environment wants it
        if many:
            return {agent: first.action_space(agent).sample() for agent in agents}
        return first.action_space.sample()

    actions = [[sample() for _ in environments] for _ in range(steps)]

    def play() -> float:
        start = time.process_time()
        for row in actions:
            for seed, environment in enumerate(environments):
                _, _, terminated, truncated, _ = environment.step(row[seed])
                over = not environment.agents if many else terminated or truncated
                if over:
                    environment.reset(seed=seed)
        return (time.process_time() - start) / (steps * _COPIES) * 1e6

    return play


def _adapted(plugin: PluginConfig, steps: int) -> Callable[[], float]:
    """Return a measurement behind the contract: microseconds per step, resets in place of steps."""
    environment = make_environment(plugin, _COPIES)
    seeds = np.arange(_COPIES, dtype=np.uint64)
    timestep = environment.reset(seeds)
    spec, random = environment.spec, np.random.default_rng(1)
    shape = (steps, _COPIES, spec.num_agents)
    if isinstance(spec.action, Discrete):
        counts = timestep.observation.get("action_mask")
        high = spec.action.num_actions if counts is None else np.asarray(counts).sum(axis=-1)
        actions: Any = random.integers(high, size=shape, dtype=np.int32)
    elif isinstance(spec.action, Continuous):
        actions = random.uniform(-1, 1, (*shape, spec.action.size)).astype(np.float32)
    else:
        draws = random.integers(2**63, size=(steps, _COPIES), dtype=np.uint64)
        actions = [random_action(spec, draw, None) for draw in draws]
    ended = np.zeros(_COPIES, np.bool_)

    def play() -> float:
        nonlocal timestep
        taken = 0
        start = time.process_time()
        for action in actions:
            np.equal(timestep.step_type, StepType.LAST, out=ended)
            taken += _COPIES - int(np.count_nonzero(ended))
            timestep = environment.step(action, ended, seeds)
        return (time.process_time() - start) / taken * 1e6

    return play

"""Grid and random search: the settings that a sweep tries."""

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from murmur.sweeps.spec import Distribution, SweepConfig, experiment
from shared.config.experiment import ExperimentConfig

_DIGITS = 4  # significant ones of a drawn float, so that tables and folders can show it whole


def settings_to_try(spec: SweepConfig) -> list[dict[str, Any]]:
    """Return the settings of a grid or a random search beside the configuration, without seeds.

    Returns:
        one mapping of keys to values for each; [{}] if nothing varies.
    """
    if spec.method == "random":
        rng = np.random.default_rng(spec.search_seed)
        return [draw(spec.vary, rng) for _ in range(spec.trials)]
    values = [values.values for values in spec.vary.values()]
    return [dict(zip(spec.vary, point, strict=True)) for point in itertools.product(*values)]


def draw(vary: Mapping[str, Distribution], rng: np.random.Generator) -> dict[str, Any]:
    """Draw one value of each key, independently."""
    return {key: _draw(values, rng) for key, values in vary.items()}


def _draw(values: Distribution, rng: np.random.Generator) -> Any:  # noqa: ANN401 - a YAML value
    if values.kind == "choice":
        return values.values[int(rng.integers(len(values.values)))]
    if values.kind == "integers":
        return int(rng.integers(int(values.low), int(values.high), endpoint=True))
    if values.kind == "log_uniform":
        drawn = math.exp(rng.uniform(math.log(values.low), math.log(values.high)))
    else:
        drawn = rng.uniform(values.low, values.high)
    return min(max(float(f"{drawn:.{_DIGITS}g}"), values.low), values.high)


def example(spec: SweepConfig) -> ExperimentConfig:
    """Return the configuration of a run with the first, or the lowest, of all values.

    Raises:
        ConfigError: if they do not fit together.
    """
    settings = {key: _first(values) for key, values in spec.vary.items()}
    return experiment(spec, spec.configs[0], settings, "example")


def _first(values: Distribution) -> Any:  # noqa: ANN401 - a YAML value
    if values.kind == "choice":
        return values.values[0]
    return int(values.low) if values.kind == "integers" else values.low

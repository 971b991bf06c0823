"""The result of an evaluation: every metric of its episodes, and their summary."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

_RESAMPLES = 2000  # of the bootstrap


@dataclass(frozen=True, slots=True)
class Summary:
    """One metric over the episodes of an evaluation.

    Attributes:
        mean, std, min, max: statistics over episodes; std of n - 1 degrees of freedom, 0 if n = 1.
        low, high: 95 % confidence interval of the mean, by percentile bootstrap.
    """

    mean: float
    std: float
    low: float
    high: float
    min: float
    max: float


@dataclass(frozen=True)
class EvaluationResult:
    """The result of E episodes.

    "return" is always among the metrics: the episode's rewards, summed over steps and agents.

    Attributes:
        environment: name of the environment.
        policy: readable name of the policy.
        first_seed: seed of the first episode; episode i had first_seed + i. If its environment
            failed, the log names the seed that replaced it.
        metrics: name -> [E], each metric at the end of the episode.
        curves: name -> [E, T+1], each metric on every row, row 0 being the start; NaN after the
            episode's end. T is the longest episode's number of steps.
    """

    environment: str
    policy: str
    first_seed: int
    metrics: dict[str, NDArray[np.float64]]
    curves: dict[str, NDArray[np.float64]] = field(repr=False)

    def summary(self) -> dict[str, Summary]:
        """Return every metric's mean, spread and confidence interval; deterministic."""
        summaries = {}
        for name, values in self.metrics.items():
            resampled = np.random.default_rng(0).choice(values, (_RESAMPLES, len(values)))
            low, high = np.percentile(resampled.mean(axis=1), [2.5, 97.5])
            std = values.std(ddof=1) if len(values) > 1 else 0.0
            summaries[name] = Summary(
                *(float(x) for x in (values.mean(), std, low, high, values.min(), values.max()))
            )
        return summaries

    def to_json(self) -> str:
        """Return summary, episodes and mean curves over episodes as one JSON object."""
        means = {
            name: np.ma.masked_array(curves, np.isnan(curves)).mean(axis=0)
            for name, curves in self.curves.items()
        }
        data: dict[str, Any] = {
            "environment": self.environment,
            "policy": self.policy,
            "first_seed": self.first_seed,
            "episodes": len(next(iter(self.metrics.values()))),
            "summary": {name: asdict(summary) for name, summary in self.summary().items()},
            "metrics": {name: values.tolist() for name, values in self.metrics.items()},
            "mean_curves": {name: mean.tolist() for name, mean in means.items()},  # masked: None
        }
        return json.dumps(data, indent=1)


def joined_result(
    environment: str, policy: str, first_seed: int, parts: list[dict[str, NDArray[np.float64]]]
) -> EvaluationResult:
    """Join the curves of several sessions, and read the values at the episodes' ends."""
    longest = max(part["return"].shape[1] for part in parts)

    def widened(curve: NDArray[np.float64]) -> NDArray[np.float64]:
        missing = (0, 0), (0, longest - curve.shape[1])
        return np.pad(curve, missing, constant_values=np.nan)

    curves = {name: np.concatenate([widened(p[name]) for p in parts]) for name in parts[0]}
    rows = (~np.isnan(curves["return"])).sum(axis=1)  # of each episode, the start included
    metrics = {name: curve[np.arange(len(rows)), rows - 1] for name, curve in curves.items()}
    return EvaluationResult(environment, policy, first_seed, metrics, curves)

"""A file of configs/acceptance: an environment, how it is scored, and the algorithms' goals."""

from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import Field, model_validator

from benchmarks.acceptance.scores import Floats, interquartile_mean
from murmur.shared.config import Section
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.config.files import CONFIG_DIRS
from murmur.shared.config.plugins import plugin_names
from murmur.shared.config.section import validate
from murmur.shared.config.text import parse_yaml
from murmur.shared.process.errors import ConfigError

TESTS = next((d / "acceptance" for d in CONFIG_DIRS if d.is_dir()), Path("configs/acceptance"))
_PLATEAU = 1.0  # how near to a plateau is on it, in published units

# A9: name -> (algorithm, options); see _stacked.py
STACKED: dict[str, tuple[str, dict[str, Any]]] = {
    "mappo": ("mappo", {"share_parameters": False}),
    "ippo": ("mappo", {"share_parameters": False, "centralized": False}),
}


class Way(NamedTuple):
    """Another way to evaluate a policy.

    Attributes:
        override: override of the run's configuration.
        text: how that is, as pages say it.
    """

    override: str
    text: str


WAYS = {
    "sampled": Way("evaluation.sample=true", "actions drawn from the policy, not its likeliest"),
    "averaged": Way("algorithm.averaged_policy=true", "the mean of the latest weights"),
    "latest": Way("algorithm.averaged_policy=false", "the latest weights, not their mean"),
}


class Goal(Section):
    """A score to reach and the number of environment steps for it. Scores are in published units.

    Exactly one of `at_least` and `one_of` is given. A goal that was lowered keeps its former value.
    """

    env_steps: int = Field(gt=0, description="environment steps after which it is evaluated")
    at_least: float | None = Field(None, description="lowest score that passes")
    one_of: tuple[float, ...] = Field((), description="every seed ends within 1 of one of these")
    share_of_seeds: float = Field(
        0,
        ge=0,
        le=1,
        description="number of seeds that must reach at_least; 0: their joint score must",
    )
    long: bool = Field(False, description="only with --long")
    was: float | None = Field(None, description="at_least before the goal was lowered")

    @model_validator(mode="after")
    def _has_one_condition(self) -> "Goal":
        if (self.at_least is None) == (not self.one_of):
            raise ValueError("give either at_least or one_of")
        return self

    def text(self) -> str:
        """Return the condition as text."""
        if self.one_of:
            return "each on " + ", ".join(f"{x:g}" for x in self.one_of)
        seeds = f" in {self.share_of_seeds:.0%} of seeds" if self.share_of_seeds else ""
        was = "" if self.was is None else f" (was {self.was:g})"
        return f">= {self.at_least:g}{seeds}{was}"

    def passed(self, scores: Floats) -> bool:
        """Return whether scores [seeds, episodes] meet the condition."""
        means = scores.mean(axis=1)
        if self.one_of:
            distance = np.abs(means[:, None] - np.array(self.one_of)).min(axis=1)
            return bool((distance <= _PLATEAU).all())
        assert self.at_least is not None
        if self.share_of_seeds:
            return bool((means >= self.at_least).mean() >= self.share_of_seeds)
        return interquartile_mean(scores) >= self.at_least


class Score(Section):
    """The units in which a test's returns are reported, and its reference scores."""

    divisor: float = Field(1, gt=0, description="the published score is S / divisor")
    per_steps: int = Field(
        0,
        ge=0,
        description="number of steps that S is of, further episodes following; 0: of an episode",
    )
    unit: str = Field("sum over agents", description="what the published score is")
    scripted: float | str = Field(
        description="score of a scripted team, or the bound that stands for it, in published "
        "units; or the name of the environment's baseline that plays it"
    )
    scripted_is: str = Field("scripted", description="what that is")
    unpaid_steps: int = Field(
        0,
        ge=0,
        description="number of steps at the beginning of episodes that evaluations during training "
        "leave out; they are the same whatever is played",
    )


class Candidate(Section):
    """One algorithm in a test."""

    goals: tuple[Goal, ...] = Field(min_length=1)
    seeds: tuple[int, ...] = (1, 2, 3)
    also: tuple[Literal["sampled", "averaged", "latest"], ...] = Field(
        (), description="other ways in which policies play the episodes once more; see WAYS"
    )
    config: dict[str, Any] = Field(
        default={}, description="sections of its own, over the test's: algorithm, network, ..."
    )


class Task(Section):
    """A file of configs/acceptance."""

    title: str
    score: Score
    episodes: int = Field(100, ge=1)
    first_seed: int = Field(100_001, ge=0, description="seed of the first evaluated episode")
    config: dict[str, Any] = Field(description="sections that all algorithms share")
    algorithms: dict[str, Candidate]


def task_names() -> list[str]:
    """Return the names A1, A2, ... D1, ... that --list lists."""
    return [*sorted(path.stem.upper() for path in TESTS.glob("*.yaml")), "A9"]


def published() -> list[str]:
    """Return the names of the tests whose goals rest on published figures: A1, A2, ..."""
    return [name for name in task_names() if name.startswith("A")]


def defaults() -> list[str]:
    """Return the names of the tests of default options: D1, D2, ..."""
    return [name for name in task_names() if name.startswith("D")]


def load_task(name: str) -> Task:
    """Load a test's file.

    Raises:
        ConfigError: for an unknown test or a file that is no test.
    """
    file = TESTS / f"{name.lower()}.yaml"
    if not file.is_file():
        raise ConfigError(f"no acceptance test '{name}'; known: {', '.join(task_names())}")
    return validate(Task, parse_yaml(file.read_text(), str(file)), str(file))


def experiment(name: str, test: Task, algorithm: str, seed: int) -> ExperimentConfig:
    """Build the configuration of one run."""
    data: dict[str, Any] = {
        "run": {"name": f"{name.lower()}-{algorithm}", "seed": seed},
        "learner": {
            "pipeline": "sync",
            "device": "cpu",
            "checkpoint_every_updates": 100_000,
            "port": 0,
            "metrics_port": 0,
        },
        "env_server": {"sessions_per_worker": 1, "metrics_port": 0},
        "algorithm": {"name": algorithm},
    }
    for top in (test.config, test.algorithms[algorithm].config):
        for section, values in top.items():
            data[section] = {**data.get(section, {}), **values}
    return validate(ExperimentConfig, data)


def built(config: ExperimentConfig) -> bool:
    """Return whether the algorithm is there."""
    return config.algorithm.name in plugin_names("algorithm")

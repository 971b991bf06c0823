"""Entropy that a team can remove in a terrain mission, on the results' episodes.

Three planners fly all agents of terrain-reference together, and plan again after every look:

- truth: knows the map.
- worlds: knows how maps are drawn, 124 half-planes, weighed by Bayes' rule with all that was seen.
- cells: knows what is believed of each cell, and nothing of how maps are drawn.

Plans are those of murmur.env_service.envs.terrain.planning: each is a local optimum, so better ones
may exist; the gain of a beam four times as wide says how much the search leaves. Plans are flown in
the environment, and its own entropy and F1 are the result.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from benchmarks.acceptance.scores import bootstrap_interval
from murmur.benchmarks.effort import Effort
from murmur.env_service.envs.terrain import Config, TerrainEnvironment
from murmur.env_service.envs.terrain.planning import (
    Beliefs,
    Floats,
    Game,
    block_sums,
    game_of,
    look_all,
    plan,
    position,
    weigher,
)

DESCRIPTION = "terrain's final entropy and F1 by planners that know the map, its kind, or neither"

_FIRST_SEED = 1  # of the episodes that results are measured on

Weigh = Callable[[TerrainEnvironment], Floats]
"""How much each block of the one environment's map matters: [B, B] shares of the interest."""


def run(effort: Effort = Effort.FULL) -> dict[str, Any]:
    """Measure each planner's mean entropy and F1 after the last step, with 95 % intervals."""
    environment = TerrainEnvironment(Config(), 1)
    game = game_of(environment.config, environment.mission)
    episodes = effort.choose(1, 5, 50)
    width = effort.choose(2, 32, 256)
    planners = {
        "truth": truth(game),
        "worlds": by_team(weigher(environment.config, game)),
        "cells": by_team(Beliefs(game)),
    }
    result: dict[str, Any] = {
        "episodes": episodes,
        "beam": width,
        "load_average": psutil.getloadavg()[0],
    }
    for name, weigh in planners.items():
        flown = fly_all(environment, game, weigh, episodes, width)
        result[name] = {"entropy": _interval(flown[:, 0]), "F1": _interval(flown[:, 1])}
    few = effort.choose(1, 2, 10)
    narrow, wide = (
        fly_all(environment, game, planners["truth"], few, w)[:, 0].mean()
        for w in (width, 4 * width)
    )
    result["truth, less entropy by a beam four times as wide"] = float(narrow - wide)
    return result


def _interval(values: Floats) -> dict[str, float]:
    low, high = bootstrap_interval(values[None])
    return {"mean": float(values.mean()), "low": low, "high": high}


def truth(game: Game) -> Weigh:
    """Return a weighing by the map itself."""

    def weigh(environment: TerrainEnvironment) -> Floats:
        interest = environment.state.truth[0].astype(np.float64)
        return block_sums(interest / interest.sum(), game.rows, game.columns)

    return weigh


def by_team(weigh: Callable[[NDArray[np.float32]], Floats]) -> Weigh:
    """Return a weighing by all that the team has observed together."""
    return lambda environment: weigh(environment.state.odds[0, -1])


def fly_all(
    environment: TerrainEnvironment, game: Game, weigh: Weigh, episodes: int, width: int
) -> Floats:
    """Fly all episodes; return entropy and F1 at the end of each, [episodes, 2]."""
    seeds = range(_FIRST_SEED, _FIRST_SEED + episodes)
    return np.array([fly(environment, game, weigh, seed, width) for seed in seeds])


def fly(
    environment: TerrainEnvironment, game: Game, weigh: Weigh, seed: int, width: int
) -> tuple[float, float]:
    """Plan and fly one episode.

    Returns:
        the environment's entropy and F1 after the last step.
    """
    config = environment.config
    seeds, begin = np.array([seed], np.uint64), np.ones(1, np.bool_)
    timestep = environment.step(np.zeros((1, config.num_agents), np.int32), begin, seeds)
    looks = np.zeros((len(game.rows), len(game.columns)), np.int16)
    paths = None
    for left in range(config.budget + 1, 0, -1):
        now = position(environment.state.cells[0], environment.mission)
        look_all(game, now[:, None], looks)
        paths = plan(game, now, left, weigh(environment), looks, width, paths)
        action = (game.targets[now] == paths[:, :1]).argmax(axis=1).astype(np.int32)
        timestep = environment.step(action[None], ~begin, seeds)
        flown = position(environment.state.cells[0], environment.mission)
        if not np.array_equal(flown, paths[:, 0]):
            raise RuntimeError("the environment did not fly the plan")
        paths = paths[:, 1:]
    return float(timestep.metrics["entropy"][0]), float(timestep.metrics["f1"][0])

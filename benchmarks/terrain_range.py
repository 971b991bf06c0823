"""Losses of a terrain team by the range of its messages: planners that know more and more.

    python -m benchmarks.terrain_range [episodes]

All fly the same missions of terrain-reference, seeds 1 to 500. `planner` and `team-planner` are the
environment's baselines. The others search more: a plan is the better of a new one and the last one,
improved. And they suppose that agents that they lost fly on as planned.

- range: each agent plans for itself and those it hears, by what they measured.
- relays: also, agents tell all in range what they know of flights, what they were told included.
- places: each agent knows all flights, but measurements of those in range only.
- together: one plan for all agents, by the measurements of all.
- truth: the same by the map itself.

So range and relays differ by what messages hold, relays and places by their range, places and
together by measurements, together and truth by beliefs, team-planner and together by search. None
is a strict bound: plans are local optima.

Each flight is a line of runs/terrain_range.jsonl; a run continues after those of its commit.
"""

import argparse
import json
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from benchmarks._commands import save_run
from benchmarks.acceptance.scores import bootstrap_interval
from benchmarks.terrain_bound import truth
from murmur.benchmarks.effort import Effort
from murmur.doctor.machine import commit
from murmur.env_service.environment import ScriptedPolicy
from murmur.env_service.envs.terrain import BASELINES, Config, TerrainEnvironment
from murmur.env_service.envs.terrain.planning import (
    Floats,
    Game,
    Ints,
    Looks,
    expected_entropy,
    game_of,
    look_all,
    plan,
    position,
    weigher,
)
from murmur.results import run_command
from murmur.shared.wire.spec import ACTION_MASK
from murmur.shared.wire.timestep import TimeStep

DESCRIPTION = "what range, messages, beliefs and search cost planners of terrain, paired episodes"

ROWS = ("planner", "range", "relays", "places", "team-planner", "together", "truth")

_LINES = Path("runs/terrain_range.jsonl")
_WIDTH = 8  # of the beams, as the baselines have
_AT_ONCE = 2  # processes


def reached(heard: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Return whom each agent reaches through others: [A, A] direct hearing -> [A, A]."""
    links = heard.astype(np.int64)
    return np.asarray(np.linalg.matrix_power(links, len(links)) > 0)


def best_plan(
    game: Game, bits: Floats, now: Ints, weight: Floats, looks: Looks, kept: Ints, usable: bool
) -> Ints:
    """Return the better of a new plan and an old one, improved.

    Args:
        game: game of the mission.
        bits: [S] expected entropy of a cell in each look state.
        now: [A] positions.
        weight: [B, B] weight of each block.
        looks: [B, B] look state of each block.
        kept: [A, steps] old plan.
        usable: true if the old plan leads on from the positions.

    Returns:
        [A, steps] positions after each move; -1 for an agent blocked by the others.
    """

    def left(paths: Ints) -> float:
        after = looks.copy()
        look_all(game, paths[paths[:, 0] >= 0], after)
        return float((weight * bits[after]).sum())

    starts = (None, kept) if usable else (None,)
    steps = kept.shape[1]
    plans = [plan(game, now, steps, weight, looks, _WIDTH, start) for start in starts]
    better: Ints = min(plans, key=left)
    return better


class Searcher:
    """A policy that plans like the environment's planners, but searches and remembers more.

    Args:
        environment: environment of one mission.
        knows: one of ROWS that is no baseline.
    """

    def __init__(self, environment: TerrainEnvironment, knows: str) -> None:
        self._env, self._knows = environment, knows
        self._game = game_of(environment.config, environment.mission)
        self._bits = expected_entropy(environment.config.noise).ravel()
        self._weigh, self._truth = weigher(environment.config, self._game), truth(self._game)
        agents = environment.spec.num_agents
        self._minds = 1 if knows in ("together", "truth") else agents
        # Of each mind and agent, by time: where it was if that is known, else where it was planned.
        self._flights = np.full((self._minds, agents, environment.config.budget + 2), -1)
        self._known = np.zeros(self._flights.shape, np.bool_)

    def act(self, timestep: TimeStep) -> NDArray[np.int32]:
        """Return the actions, [1, A] int32."""
        env, game = self._env, self._game
        t, now = int(env.state.time[0]), position(env.state.cells[0], env.mission)
        if t == 0:
            self._flights[:], self._known[:] = -1, False
        groups = self._groups()
        usable = [self._leads_on(mind, group, now, t) for mind, group in enumerate(groups)]
        for mind, group in enumerate(groups):
            self._flights[mind, group, t] = now[group]
            self._known[mind, group, t] = True
        if self._knows == "relays":
            self._relay(groups)
        mask = np.asarray(timestep.observation[ACTION_MASK])[0]
        action = mask.argmax(axis=1).astype(np.int32)
        for mind, group in enumerate(groups):
            flights = self._flights[mind]
            flights[group, t + 1 :] = self._planned(mind, group, t, usable[mind])
            for agent in group if self._minds == 1 else [mind]:
                following = flights[agent, t + 1]
                chosen = (game.targets[now[agent]] == following).argmax()
                if following >= 0 and mask[agent, chosen]:
                    action[agent] = chosen
        actions: NDArray[np.int32] = action[None]
        return actions

    def _groups(self) -> list[Ints]:
        """Return the agents that each mind plans for."""
        heard = self._env.state.heard[0]
        if self._knows == "relays":
            heard = reached(heard)
        elif self._knows != "range":
            heard = np.ones_like(heard)
        return [np.flatnonzero(row) for row in heard[: self._minds]]

    def _leads_on(self, mind: int, group: Ints, now: Ints, t: int) -> bool:
        """Tell whether a mind's last plan for a group leads on from its positions."""
        flights = self._flights[mind, group]
        return bool((flights[:, t] == now[group]).all() and (flights[:, t:] >= 0).all())

    def _relay(self, groups: list[Ints]) -> None:
        """Let all in a group know where anyone in it knows agents to have been."""
        for mind, group in enumerate(groups):
            for other in group:
                new = self._known[other] & ~self._known[mind]
                self._flights[mind][new] = self._flights[other][new]
                self._known[mind] |= new

    def _planned(self, mind: int, group: Ints, t: int, usable: bool) -> Ints:
        """Plan a group's moves after time t by what a mind knows and supposes, [A, steps]."""
        env, game = self._env, self._game
        flights = self._flights[mind]
        looks = np.zeros((len(game.rows), len(game.columns)), np.int16)
        others = flights.copy()
        others[group, t + 1 :] = -1
        look_all(game, others[others >= 0][None], looks)
        if self._knows == "truth":
            weight = self._truth(env)
        else:
            weight = self._weigh(env.state.odds[0, -1 if self._minds == 1 else mind])
        kept = np.ascontiguousarray(flights[group, t + 1 :])
        return best_plan(game, self._bits, flights[group, t], weight, looks, kept, usable)


@cache
def flyer(row: str) -> tuple[TerrainEnvironment, ScriptedPolicy]:
    """Make an environment of one mission and one of ROWS for it, once in each process."""
    environment = TerrainEnvironment(Config(), 1)
    known = BASELINES.get(row)
    return environment, known(environment) if known else Searcher(environment, row)


def fly_all(seed: int) -> list[dict[str, Any]]:
    """Fly one mission by each planner; return the lines."""
    lines = []
    for row in ROWS:
        environment, policy = flyer(row)
        begun = time.process_time()
        timestep = environment.reset(np.array([seed], np.uint64))
        while timestep.discount[0] > 0:
            action = policy.act(timestep)
            timestep = environment.step(action, np.zeros(1, np.bool_), np.zeros(1, np.uint64))
        seconds = time.process_time() - begun
        scores = {name: float(timestep.metrics[name][0]) for name in ("entropy", "f1")}
        lines.append({"row": row, "seed": seed, **scores, "seconds": seconds})
    return lines


def measured(episodes: int) -> list[dict[str, Any]]:
    """Fly the missions that the file of lines lacks; return the lines of all."""
    now, seeds = commit(), range(1, episodes + 1)
    text = _LINES.read_text().splitlines() if _LINES.is_file() else []
    lines = [line for line in map(json.loads, text) if line["commit"] == now]
    flown = {line["seed"] for line in lines}
    _LINES.parent.mkdir(exist_ok=True)
    with ProcessPoolExecutor(_AT_ONCE) as pool, _LINES.open("a") as file:
        tasks = [pool.submit(fly_all, seed) for seed in seeds if seed not in flown]
        for task in as_completed(tasks):
            new = [{**line, "commit": now} for line in task.result()]
            file.write("".join(json.dumps(line) + "\n" for line in new))
            file.flush()
            lines += new
    return [line for line in lines if line["seed"] in seeds]


def run(effort: Effort = Effort.FULL, episodes: int = 500) -> dict[str, Any]:
    """Measure each planner's entropy and F1 after the last step, with 95 % intervals."""
    if effort is Effort.FULL:
        lines = measured(episodes)
    else:
        lines = [line for seed in range(effort.choose(1, 20, 0)) for line in fly_all(seed + 1)]
    scores = defaultdict(list)
    for line in sorted(lines, key=lambda line: int(line["seed"])):
        scores[line["row"]].append([line["entropy"], line["f1"], line["seconds"]])
    rows = {row: np.array(values) for row, values in scores.items()}
    result: dict[str, Any] = {
        "episodes": len(rows["planner"]),
        "load_average": psutil.getloadavg()[0],
    }
    for row in ROWS:
        entropy, f1, seconds = rows[row].T
        result[row] = {
            "entropy": _shown(entropy),
            "F1": _shown(f1),
            "entropy, less than planner's": _shown(rows["planner"][:, 0] - entropy),
            "CPU-s": round(float(seconds.mean()), 3),
        }
    return result


def _shown(values: Floats) -> str:
    low, high = bootstrap_interval(values[None])
    return f"{values.mean():.4f} [{low:.4f}, {high:.4f}]"


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("episodes", type=int, nargs="?", default=500, help="default: 500")
    save_run("terrain_range", partial(run, episodes=parser.parse_args().episodes))


if __name__ == "__main__":
    run_command(main)

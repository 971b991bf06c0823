"""MPE's speaker and listener: the best score of any team, as a reference for A4.

A planner that knows which landmark is meant from the second row on, the earliest that a listener
can know it, plays the episodes that the acceptance test A4 evaluates. Its first move is the one
that is best on average over the three landmarks. What it plans is then played in the real
environment and must bring what was planned.

The listener's dynamics (mpe2 1.x): position x += 0.1 v, then v = 0.75 v + f, with f of 0.5 along
one axis if actions are discrete, of up to 0.5 along each if they are continuous. Both agents are
paid -(x^2 + y^2), the squared distance from the landmark, after each of 25 steps. In the
environment that results published before 2023 come from, v moves first.
"""

from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from benchmarks.acceptance.task import load_task
from murmur.benchmarks.effort import Effort
from murmur.env_service.compiled import compiled
from murmur.env_service.environment import VectorEnvironment, make_environment
from murmur.shared.config import PluginConfig

DESCRIPTION = "the best possible return of MPE's speaker and listener, on A4's episodes"
NEEDS = ("pettingzoo", "mpe2")

_STEPS, _PUSH = 25, 0.5
_X, _V = 3.0, 2.2  # the grid of costs to go reaches so far
_NX, _NV = 601, 221

Floats = NDArray[np.float64]


def run(effort: Effort = Effort.FULL) -> dict[str, Any]:
    """Plan and play A4's episodes; return mean return and standard error by kind of action."""
    episodes, width = effort.choose((2, 4), (10, 20), (load_task("A4").episodes, 400))
    result: dict[str, Any] = {"episodes": episodes, "load_average": psutil.getloadavg()[0]}
    coarse = np.array([-_PUSH, 0.0, _PUSH])
    fine = np.linspace(-_PUSH, _PUSH, effort.choose(5, 21, 21))
    start = begin(episodes)
    orders = (("mpe2", False), ("velocity first", True))
    for order, first in orders[: effort.choose(1, None, None)]:
        to_go = costs_to_go(coarse, first)
        costs, actions = plan_discrete(*start, to_go, width, first)
        result[f"discrete, {order}"] = _summary(-2 * costs)
        if not first:
            _check(-2 * costs, play(actions, continuous=False))
            wider, _ = plan_discrete(*start, to_go, 4 * width, first)
            result["discrete, more from a beam four times as wide"] = float(
                2 * (costs - wider).mean()
            )
        costs, forces = plan_continuous(*start, costs_to_go(fine, first), fine, first)
        result[f"continuous, {order}"] = _summary(-2 * costs)
        if not first:
            _check(-2 * costs, play(forces, continuous=True))
    return result


def _summary(returns: Floats) -> dict[str, float]:
    return {
        "mean return": float(returns.mean()),
        "standard error": float(returns.std() / len(returns) ** 0.5),
    }


def _check(planned: Floats, played: Floats) -> None:
    """Check that the environment is the one that was planned for."""
    if not np.allclose(planned, played, atol=1e-3):
        raise RuntimeError(
            f"planned {planned.round(3)}, but the environment gave {played.round(3)}"
        )


def _environment(
    episodes: int, *, continuous: bool
) -> tuple[VectorEnvironment, NDArray[np.uint64]]:
    task = load_task("A4")
    options = dict(task.config["environment"])
    options["arguments"] = {**options["arguments"], "continuous_actions": continuous}
    seeds = np.arange(task.first_seed, task.first_seed + episodes, dtype=np.uint64)
    return make_environment(PluginConfig(**options), episodes), seeds


def begin(episodes: int) -> tuple[Floats, NDArray[np.int64]]:
    """Return the listener's place from each landmark, [E, 3, 2], and the landmark meant, [E].

    The kind of actions changes nothing in it.
    """
    environment, seeds = _environment(episodes, continuous=False)
    speaker, listener = environment.reset(seeds).observation["observation"].swapaxes(0, 1)
    environment.close()
    return -listener[:, 2:8].reshape(-1, 3, 2).astype(np.float64), speaker[:, :3].argmax(1)


def play(actions: NDArray[Any], *, continuous: bool) -> Floats:
    """Play the listener's actions [E, T], or forces [E, T, 2]; return the returns [E]."""
    environment, seeds = _environment(len(actions), continuous=continuous)
    timestep = environment.reset(seeds)
    total = np.zeros(len(actions))
    for t in range(_STEPS):
        if continuous:  # numbers from -1 to 1 for none, left, right, down, up
            push = actions[:, t] / _PUSH
            act = np.full((len(actions), 2, 5), -1.0, np.float32)
            act[:, 1, [1, 3]] = 2 * np.maximum(-push, 0) - 1
            act[:, 1, [2, 4]] = 2 * np.maximum(push, 0) - 1
        else:
            act = np.zeros((len(actions), 2), np.int32)
            act[:, 1] = actions[:, t]
        timestep = environment.step(act, np.zeros(len(actions), bool), seeds)
        total += timestep.reward.sum(1)
    environment.close()
    return total


@compiled()
def _moved(x: float, v: float, f: float, velocity_first: bool) -> tuple[float, float]:
    if velocity_first:
        v = 0.75 * v + f
        return x + 0.1 * v, v
    return x + 0.1 * v, 0.75 * v + f


@compiled()
def _at(table: Floats, x: float, v: float) -> float:
    """Interpolate a table [_NX, _NV] bilinearly."""
    i = min(max((x + _X) * (_NX - 1) / (2 * _X), 0.0), _NX - 1.001)
    j = min(max((v + _V) * (_NV - 1) / (2 * _V), 0.0), _NV - 1.001)
    a, b = int(i), int(j)
    p, q = i - a, j - b
    low = (1 - q) * table[a, b] + q * table[a, b + 1]
    high = (1 - q) * table[a + 1, b] + q * table[a + 1, b + 1]
    result: float = (1 - p) * low + p * high
    return result


@compiled()
def costs_to_go(forces: Floats, velocity_first: bool) -> Floats:
    """Return the least sum of x^2 over each number of steps along one axis, [T + 1, _NX, _NV]."""
    table = np.zeros((_STEPS + 1, _NX, _NV))
    for k in range(1, _STEPS + 1):
        for i in range(_NX):
            for j in range(_NV):
                best = np.inf
                for f in forces:
                    x = -_X + i * 2 * _X / (_NX - 1)
                    x, v = _moved(x, -_V + j * 2 * _V / (_NV - 1), f, velocity_first)
                    best = min(best, x * x + _at(table[k - 1], x, v))
                table[k, i, j] = best
    return table


@compiled()
def _step(state: Floats, action: int, velocity_first: bool) -> Floats:
    """Return (x, y, v, w, cost) after an action: none, left, right, down or up."""
    f = _PUSH * ((action == 2) - (action == 1))
    g = _PUSH * ((action == 4) - (action == 3))
    x, v = _moved(state[0], state[2], f, velocity_first)
    y, w = _moved(state[1], state[3], g, velocity_first)
    return np.array([x, y, v, w, state[4] + x * x + y * y])


@compiled()
def _search(
    state: Floats, steps: int, to_go: Floats, width: int, velocity_first: bool
) -> tuple[float, NDArray[np.int64]]:
    """Search the least cost from a state on, by a beam of states with lower bounds."""
    states, paths = state.reshape(1, 5), np.zeros((1, steps), np.int64)
    for t in range(steps):
        n = len(states)
        after, bound = np.empty((5 * n, 5)), np.empty(5 * n)
        for s in range(n):
            for action in range(5):
                new = _step(states[s], action, velocity_first)
                left = to_go[steps - t - 1]
                after[5 * s + action] = new
                bound[5 * s + action] = (
                    new[4] + _at(left, new[0], new[2]) + _at(left, new[1], new[3])
                )
        kept = np.argsort(bound)[:width]
        states, paths = after[kept], paths[kept // 5]
        paths[:, t] = kept % 5
    best = np.argmin(states[:, 4])
    return states[best, 4], paths[best]


@compiled()
def plan_discrete(
    places: Floats, goals: NDArray[np.int64], to_go: Floats, width: int, velocity_first: bool
) -> tuple[Floats, NDArray[np.int64]]:
    """Plan discrete actions: return costs [E] and the listener's actions [E, T].

    Args:
        places: [E, 3, 2] positions from `begin`.
        goals: [E] goals from `begin`.
        to_go: result of `costs_to_go` for each axis alone: a lower bound of the cost of both
            together.
        width: states that a beam keeps.
        velocity_first: flag of the order of integration; see the module.
    """
    costs, actions = np.empty(len(places)), np.zeros((len(places), _STEPS), np.int64)
    for e in range(len(places)):
        least = np.inf
        for first in range(5):
            blind = 0.0
            for landmark in range(3):
                start = np.zeros(5)
                start[:2] = places[e, landmark]
                state = _step(start, first, velocity_first)
                cost, path = _search(state, _STEPS - 1, to_go, width, velocity_first)
                blind += cost
                if landmark == goals[e]:
                    meant, rest = cost, path
            if blind < least:
                least, costs[e], actions[e, 0] = blind, meant, first
                actions[e, 1:] = rest
    return costs, actions


@compiled()
def plan_continuous(
    places: Floats, goals: NDArray[np.int64], to_go: Floats, forces: Floats, velocity_first: bool
) -> tuple[Floats, Floats]:
    """Plan forces: return costs [E] and forces [E, T, 2] of those given; else as plan_discrete."""
    costs, plan = np.zeros(len(places)), np.zeros((len(places), _STEPS, 2))
    for e in range(len(places)):
        for axis in range(2):
            x, v = places[e, goals[e], axis], 0.0
            for t in range(_STEPS):
                least = np.inf
                for f in forces:
                    bound = 0.0
                    for landmark in range(3):
                        if t == 0 or landmark == goals[e]:
                            place = places[e, landmark, axis] if t == 0 else x
                            a, b = _moved(place, v, f, velocity_first)
                            bound += a * a + _at(to_go[_STEPS - t - 1], a, b)
                    if bound < least:
                        least, plan[e, t, axis] = bound, f
                x, v = _moved(x, v, plan[e, t, axis], velocity_first)
                costs[e] += x * x
    return costs, plan

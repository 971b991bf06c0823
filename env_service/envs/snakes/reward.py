"""Rewards of a player's step: the game's own, a dense one, a zero-sum one."""

import math

import numpy as np
from numpy.typing import NDArray

from murmur.env_service.compiled import compiled
from murmur.env_service.envs.snakes.game import TEAM, Games
from murmur.env_service.envs.snakes.opponents import flat_distance2

GAME, SHAPED, ZERO_SUM = range(3)
REWARDS = {"game": GAME, "shaped": SHAPED, "zero-sum": ZERO_SUM}


@compiled()
def team_sum(values: NDArray[np.int32], team: int) -> int:
    """Sum values [6] over a team's players."""
    first = TEAM * team
    return int(values[first] + values[first + 1] + values[first + 2])


@compiled()
def lead(games: Games, n: int, team: int) -> int:
    """Return a team's score minus the other team's, so far."""
    return team_sum(games.score[n], team) - team_sum(games.score[n], 1 - team)


@compiled()
def step_reward(games: Games, n: int, player: int, kind: int, extras: bool) -> float:
    """Return a player's reward for game n's last step.

    With r the change of the player's length (`Games.reward`), d the flat Euclidean distance from
    its head to the nearest bean after the step, and E, T the means of r over enemies and team:

        game      r
        shaped    status + (20 if r > 0 else -d) - 10 [r < 0], where status is, by the teams'
                  scores, +10 ahead, -5 behind, 0 level; in the last step +50, -25, 0
                  extras: + 0.1 / (d + 1) [r <= 0] + 0.1 [r >= 0] + 0.05 [r > 0]
        zero-sum  0.8 (r - E) + 0.2 (T - E), in the last step + 10 if won, - 10 if lost

    A snake of length 3 that dies has r = 0, so shaped counts it neither as eating nor as dying.
    """
    team = player // TEAM
    change = games.reward[n, player]
    if kind == GAME:
        return float(change)
    ahead = lead(games, n, team)
    if kind == ZERO_SUM:
        own = team_sum(games.reward[n], team) / TEAM
        enemy = team_sum(games.reward[n], 1 - team) / TEAM
        reward = 0.8 * (change - enemy) + 0.2 * (own - enemy)
        if games.over[n]:
            reward += 10.0 * ((ahead > 0) - (ahead < 0))
        return float(reward)
    won, lost = (50.0, -25.0) if games.over[n] else (10.0, -5.0)
    reward = won if ahead > 0 else (lost if ahead < 0 else 0.0)
    if change > 0:
        return reward + 20.0 + (0.15 if extras else 0.0)
    distance = nearest_bean(games, n, player)
    reward -= distance
    if change < 0:
        reward -= 10.0
    if extras:
        reward += 0.1 / (distance + 1.0) + (0.1 if change == 0 else 0.0)
    return float(reward)


@compiled()
def nearest_bean(games: Games, n: int, player: int) -> float:
    """Return the flat Euclidean distance from a head to the nearest bean; 0 if there is none."""
    least = -1
    for cell in games.bean[n]:
        if cell >= 0:
            distance = flat_distance2(games.body[n, player, 0], cell)
            least = distance if least < 0 else min(least, distance)
    return math.sqrt(max(least, 0))


METRICS = (
    "score",
    "opponent_score",
    "score_difference",
    "win",
    "draw",
    "loss",
    "deaths",
    "opponent_deaths",
    "beans",
    "opponent_beans",
)


@compiled()
def measure(games: Games, n: int, out: NDArray[np.float32]) -> None:
    """Write game n's METRICS so far, for the learner's side; win, draw, loss are 0 until LAST."""
    own, enemy = games.side[n], 1 - games.side[n]
    ahead = lead(games, n, own)
    over = games.over[n]
    out[0] = team_sum(games.score[n], own)
    out[1] = team_sum(games.score[n], enemy)
    out[2] = ahead
    out[3] = over and ahead > 0
    out[4] = over and ahead == 0
    out[5] = over and ahead < 0
    out[6] = team_sum(games.deaths[n], own)
    out[7] = team_sum(games.deaths[n], enemy)
    out[8] = team_sum(games.eaten[n], own)
    out[9] = team_sum(games.eaten[n], enemy)

"""Games of turns that are learned by playing both sides: tic-tac-toe and connect four.

Tic-tac-toe's answer is known: a perfect player is not beaten. From every run's last policy, the
likeliest moves are played against every line that a perfect player may choose, from both sides, and
against every line of legal moves. Connect four is played against random moves.
"""

import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from benchmarks._trainings import children_cpu_s, run_training
from murmur.benchmarks.effort import Effort
from murmur.env_service.environment import RandomPolicy, make_environment
from murmur.runs.policy import Policy, load
from murmur.shared.config.files import load as load_config
from murmur.shared.wire.timestep import StepType, TimeStep

DESCRIPTION = "tic-tac-toe against all lines of a perfect player, connect four against random moves"
NEEDS = ("pettingzoo", "pygame")

Board = tuple[int, ...]  # nine cells: 0 free, 1 the first player's, 2 the second's
_ROWS = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
SIDES = ("first", "second")
_PORTS = ("learner.port=0", "learner.metrics_port=0", "env_server.metrics_port=0")


def run(effort: Effort = Effort.FULL) -> dict[str, Any]:
    """Train and play; return the results of the games, by configuration and seed."""
    seeds = effort.choose((1,), (1,), (1, 2, 3))
    moves = effort.choose(4_000, 0, 0)
    result: dict[str, Any] = {"load_average": psutil.getloadavg()[0]}
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            policy, cpu_s = train("tictactoe", seed, moves, Path(folder))
            found: dict[str, Any] = {"CPU-seconds": round(cpu_s)}
            for side, name in enumerate(SIDES):
                found[f"{name}, perfect player"] = play_lines(policy, side, perfect_moves)
                found[f"{name}, any player"] = play_lines(policy, side, legal_moves)
            result[f"tictactoe, seed {seed}"] = found
        if effort is Effort.SMOKE:  # the same again
            return result
        policy, cpu_s = train("connect-four", 1, moves, Path(folder))
        found = {"CPU-seconds": round(cpu_s)}
        for side, name in enumerate(SIDES):
            found[f"{name}, random moves"] = play_random(policy, side, effort.choose(0, 50, 250))
        result["connect four, seed 1"] = found
    return result


def train(name: str, seed: int, moves: int, folder: Path) -> tuple[Policy, float]:
    """Train a configuration; return its last policy and the CPU-seconds of all processes.

    Args:
        name: configuration.
        seed: seed of the run.
        moves: number of moves to learn from; 0: as configured.
        folder: folder that keeps the run.
    """
    run_folder = folder / f"{name}-{seed}"
    command = [sys.executable, "-m", "murmur", "train", name, "--run", str(run_folder)]
    for item in (f"run.seed={seed}", *_PORTS, *([f"run.max_env_steps={moves}"] * bool(moves))):
        command += ["--set", item]
    before = children_cpu_s()
    with (folder / f"{name}-{seed}.log").open("w") as log:
        try:
            run_training(command, log)
        except subprocess.CalledProcessError:
            print((folder / f"{name}-{seed}.log").read_text()[-4000:], file=sys.stderr)
            raise
    return load(run_folder, "latest"), children_cpu_s() - before


def winner(board: Board) -> int:
    """Return the player with three in a row; 0 if there is none."""
    return next((board[i] for i, j, k in _ROWS if board[i] and board[i] == board[j] == board[k]), 0)


def after(board: Board, move: int, player: int) -> Board:
    """Return the board after a move."""
    return (*board[:move], player, *board[move + 1 :])


def legal_moves(board: Board, player: int) -> list[int]:
    """Return the free cells."""
    return [cell for cell in range(9) if not board[cell]]


@cache
def value(board: Board, player: int) -> int:
    """Return the result of perfect play for the player to move: 1 a win, 0 a draw, -1 a loss."""
    if won := winner(board):
        return 1 if won == player else -1
    results = [-value(after(board, m, player), 3 - player) for m in legal_moves(board, player)]
    return max(results, default=0)


def perfect_moves(board: Board, player: int) -> list[int]:
    """Return all moves that keep the result of perfect play."""
    best, other = value(board, player), 3 - player
    moves = legal_moves(board, player)
    return [m for m in moves if -value(after(board, m, player), other) == best]


def play_lines(
    policy: Policy, side: int, opponent: Callable[[Board, int], list[int]]
) -> dict[str, int]:
    """Play the likeliest moves against every line of an opponent, in PettingZoo's environment.

    Args:
        policy: policy of a run.
        side: agent that the policy plays, 0 or 1.
        opponent: function from a board and a player to all the moves it may choose.

    Returns:
        number of the different boards at the end at which the policy won, drew and lost.
    """
    results = dict.fromkeys(("won", "drew", "lost"), 0)
    lines: dict[Board, tuple[int, ...]] = {(0,) * 9: ()}  # open boards, and moves that lead there
    for turn in range(9):
        player, following = 1 + turn % 2, dict[Board, tuple[int, ...]]()
        if turn % 2 == side and lines:
            chosen = policy.act(positions(list(lines.values())))[:, side].tolist()
            choices = [[move] for move in chosen]
        else:
            choices = [opponent(board, player) for board in lines]
        for (board, moves), options in zip(lines.items(), choices, strict=True):
            for move in options:
                following[after(board, move, player)] = (*moves, move)
        lines = {}
        for board, moves in following.items():
            won = winner(board)
            if won or turn == 8:
                results["drew" if not won else "won" if won == side + 1 else "lost"] += 1
            else:
                lines[board] = moves
    return results


def positions(lines: list[tuple[int, ...]]) -> TimeStep:
    """Return the time step after each of some lines of equally many moves."""
    config = load_config("tictactoe")
    environment = make_environment(config.environment, len(lines))
    seeds, no_restart = np.zeros(len(lines), np.uint64), np.zeros(len(lines), np.bool_)
    timestep = environment.reset(seeds)
    for moves in np.array(lines, np.int32).reshape(len(lines), -1).T:
        timestep = environment.step(np.repeat(moves[:, None], 2, 1), no_restart, seeds)
    return timestep


def play_random(policy: Policy, side: int, games: int) -> dict[str, float]:
    """Play the likeliest moves against random ones in connect four, one game in each environment.

    Args:
        policy: policy of a run.
        side: agent that the policy plays, 0 or 1.
        games: number of games.

    Returns:
        shares of the games that the policy won, drew and lost.
    """
    environment = make_environment(load_config("connect-four").environment, games)
    random, seeds = RandomPolicy(environment), np.arange(games, dtype=np.uint64)
    random.seed(seeds)
    timestep = environment.reset(seeds)
    result: NDArray[np.float64] = np.full(games, np.nan)
    while np.isnan(result).any():
        action = random.act(timestep)
        action[:, side] = policy.act(timestep)[:, side]
        timestep = environment.step(action, timestep.step_type == StepType.LAST, seeds)
        over = (timestep.step_type == StepType.LAST) & np.isnan(result)
        result[over] = timestep.reward[over, side]
    shares = {"won": result > 0, "drew": result == 0, "lost": result < 0}
    return {name: round(float(share.mean()), 3) for name, share in shares.items()}

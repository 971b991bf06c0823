"""Plans of a terrain mission's looks that maximize the expected entropy reduction.

The value of a plan is the entropy that it is expected to take from the cells of interest by the
mission's end. It follows exactly from the number of looks at each cell from each altitude, because
entropies are sums over cells and reports are independent. Plans are improved one agent at a time,
by a beam search over its paths while the others' are fixed. This ends in a local optimum, so better
plans may exist.
"""

import math
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from murmur.env_service.compiled import compiled
from murmur.env_service.envs.terrain.belief import ODDS_MAX, ODDS_MIN
from murmur.env_service.envs.terrain.config import Config
from murmur.env_service.envs.terrain.sensor import footprint, map_shape
from murmur.env_service.envs.terrain.simulation import Mission
from murmur.env_service.envs.terrain.world import world
from murmur.shared.process.errors import ConfigError

_LOOKS = 8  # at a cell from one altitude; more change nothing
_LEVELS = 4
_SWEEPS = 4  # over the agents, at most
_DRAWS = 2000  # of maps, to list all that there are
_MAPS = 256  # more are not listed

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Looks = NDArray[np.int16]
F = TypeVar("F", np.float32, np.float64)


class Game(NamedTuple):
    """The constants of a search. A position is (x Y + y) Z + z, a column x Y + y.

    The map is cut along the borders of all footprints, so that a look covers whole blocks.

    Attributes:
        rows, columns: [B] first cell of each block.
        spans: [P, 4] blocks seen from each position: first row, end, first column, end.
        targets: [P, K] position that each action leads to, -1 off the lattice.
        levels: number of altitudes Z.
        gain: [S, Z] bits that a look from an altitude is expected to take from a cell of interest
            in look state S.
        then: [S, Z] look state after that look; a new mission has 0.
    """

    rows: Ints
    columns: Ints
    spans: Ints
    targets: Ints
    levels: int
    gain: Floats
    then: Looks


def game_of(config: Config, mission: Mission) -> Game:
    """Make the game of a mission.

    Raises:
        ConfigError: if it has more than 4 altitudes, which give too many look states.
    """
    if len(config.altitudes_m) > _LEVELS:
        raise ConfigError(
            f"planners plan for at most {_LEVELS} altitudes; environment.altitudes_m has "
            f"{len(config.altitudes_m)}"
        )
    shape = map_shape(config)
    places = np.array(list(np.ndindex(*mission.lattice)), np.int32)
    rects = np.zeros((len(places), 4), np.int64)
    for place, rect in zip(places, rects, strict=True):
        footprint(mission.camera, place, shape, rect)
    rows = np.unique([0, *rects[:, 0], *rects[:, 1]])
    columns = np.unique([0, *rects[:, 2], *rects[:, 3]])
    spans = np.hstack([np.searchsorted(rows, rects[:, :2]), np.searchsorted(columns, rects[:, 2:])])
    to = places[:, None] + mission.moves
    inside = ((to >= 0) & (to < mission.lattice)).all(axis=2)
    packed = np.ravel_multi_index(tuple(np.moveaxis(to, 2, 0)), mission.lattice, mode="clip")
    levels = len(mission.metres)
    entropy = expected_entropy(config.noise)
    states = np.arange(entropy.size).reshape(entropy.shape)
    once_more = np.minimum(np.arange(_LOOKS + 1) + 1, _LOOKS)
    then = np.stack([np.take(states, once_more, axis=k).ravel() for k in range(levels)], axis=1)
    bits = entropy.ravel()
    return Game(
        rows=rows[rows < shape[0]],
        columns=columns[columns < shape[1]],
        spans=spans,
        targets=np.where(inside, packed, -1),
        levels=levels,
        gain=bits[:, None] - bits[then],
        then=then.astype(np.int16),
    )


def position(cells: NDArray[np.int32], mission: Mission) -> Ints:
    """Convert lattice positions [..., 3] to a Game's position numbers [...]."""
    at = tuple(np.moveaxis(cells, -1, 0))
    return np.asarray(np.ravel_multi_index(at, mission.lattice), np.int64)


def block_sums(values: NDArray[F], rows: Ints, columns: Ints) -> NDArray[F]:
    """Sum values [X, Y] over blocks that begin at these rows and columns."""
    return np.asarray(np.add.reduceat(np.add.reduceat(values, rows, 0), columns, 1))


class Beliefs:
    """Weights of blocks by a belief, without knowledge of the maps' generator.

    Args:
        game: game with the blocks to weigh.
    """

    def __init__(self, game: Game) -> None:
        self._blocks = game.rows, game.columns

    def __call__(self, odds: NDArray[np.float32]) -> Floats:
        """Return each block's share of the interest, [B, B], by a belief [X, Y]."""
        p = odds.astype(np.float64)
        p /= 1 + p
        return block_sums(p / p.sum(), *self._blocks)


class Worlds:
    """Weights of blocks by all maps that can be drawn and their posterior probabilities.

    With L the log-odds gathered on a cell, a map m has the log-likelihood sum over cells of
    m L, up to a constant. All is summed over blocks in which no map changes.

    Args:
        game: game with the blocks to weigh.
        maps: [M, X, Y] maps that can be drawn, of equal prior; with few pixels some are likelier.
    """

    def __init__(self, game: Game, maps: NDArray[np.uint8]) -> None:
        borders = [
            np.flatnonzero((np.diff(maps, axis=axis) != 0).any(axis=(0, 3 - axis))) + 1
            for axis in (1, 2)
        ]
        rows, columns = np.union1d(game.rows, borders[0]), np.union1d(game.columns, borders[1])
        self._rows, self._columns = rows, columns
        self._within = np.searchsorted(rows, game.rows), np.searchsorted(columns, game.columns)
        self._maps = maps[:, rows[:, None], columns].reshape(len(maps), -1).astype(np.float32)
        self._sizes = maps.sum(axis=(1, 2), dtype=np.int64)
        ends = np.append(rows, maps.shape[1]), np.append(columns, maps.shape[2])
        self._cells = np.outer(*map(np.diff, ends))

    def __call__(self, odds: NDArray[np.float32]) -> Floats:
        """Return each block's share of the interest, [B, B], by a belief [X, Y]."""
        gathered = block_sums(np.log(odds), self._rows, self._columns)
        likelihood = (self._maps @ gathered.ravel()).astype(np.float64)
        posterior = np.exp(likelihood - likelihood.max())
        shares = (posterior / posterior.sum() / self._sizes).astype(np.float32)
        weight = (shares @ self._maps).reshape(self._cells.shape) * self._cells
        return block_sums(weight, *self._within)


def weigher(config: Config, game: Game) -> Beliefs | Worlds:
    """Make the weights of blocks: Worlds if at most 256 maps are drawn, else Beliefs."""
    shape, generator = map_shape(config), np.random.default_rng(0)
    draw, found = world(config, shape), set[bytes]()
    for _ in range(_DRAWS):
        found.add(draw(generator).tobytes())
        if len(found) > _MAPS:
            return Beliefs(game)
    maps = [np.frombuffer(one, np.uint8).reshape(shape) for one in sorted(found)]
    return Worlds(game, np.stack(maps))


def expected_entropy(noise: tuple[float, ...]) -> Floats:
    """Compute the expected entropy of a cell of interest after looks from each altitude, bits.

    H(p) with odds p / (1 - p) = product over altitudes of ((1 - e) / e)^(2 right - looks), e the
    noise and right ~ Binomial(looks, 1 - e), clamped as the environment's beliefs are.

    Returns:
        array with an axis of 0 to _LOOKS looks for each altitude.
    """
    found = np.empty((_LOOKS + 1,) * len(noise))
    for index in np.ndindex(found.shape):
        log_odds, chance = np.zeros(1), np.ones(1)
        for looks, wrong in zip(index, noise, strict=True):
            right = np.arange(looks + 1)
            ways = np.array([math.comb(looks, k) for k in range(looks + 1)], np.float64)
            log_ratio = (2 * right - looks) * np.log((1 - wrong) / wrong)
            log_odds = np.add.outer(log_odds, log_ratio).ravel()
            likely = ways * (1 - wrong) ** right * wrong ** (looks - right)
            chance = np.multiply.outer(chance, likely).ravel()
        odds = np.clip(np.exp(log_odds), ODDS_MIN, ODDS_MAX)
        p = odds / (1 + odds)
        found[index] = -(chance * (p * np.log2(p) + (1 - p) * np.log2(1 - p))).sum()
    return found


def plan(
    game: Game,
    now: Ints,
    steps: int,
    weight: Floats,
    looks: Looks,
    width: int,
    paths: Ints | None = None,
) -> Ints:
    """Plan the paths of all agents.

    Args:
        game: game of the mission.
        now: [A] positions.
        steps: number of moves that are left.
        weight: [B, B] weight of each block.
        looks: [B, B] look state of each block.
        width: width of the beam.
        paths: [A, steps] plan to improve; None if there is none yet.

    Returns:
        [A, steps] positions after each move; -1 for an agent blocked by the others.
    """
    agents = len(now)
    flown = [a for a in range(agents) if paths is not None]
    paths = np.full((agents, steps), -1) if paths is None else paths.copy()
    for _ in range(_SWEEPS):
        improved = False
        for a in range(agents):
            others = [b for b in flown if b != a]
            after = looks.copy()
            look_all(game, paths[others], after)
            worth = _worth(game, paths[a], weight, after.copy()) if a in flown else -1.0
            path = np.zeros(steps, np.int64)
            blocked = _blocked(game, now, paths, a, others)
            found = best_path(game, int(now[a]), blocked, weight, after, width, path)
            if found > worth + 1e-9:
                paths[a], improved = path, True
                flown = sorted({*flown, a})
        if not improved:
            break
    return paths


def _blocked(
    game: Game, now: Ints, paths: Ints, agent: int, others: list[int]
) -> NDArray[np.bool_]:
    """Return the columns forbidden to an agent after each move, [steps, columns] bool.

    Forbidden are columns of another agent after the same move; those of an agent with a lower id
    before the move, because of the mask; and, for the same reason, those that an agent with a
    higher id enters next.
    """
    steps = paths.shape[1]
    blocked = np.zeros((steps, len(game.spans) // game.levels), np.bool_)
    moves = np.arange(steps)
    for b in others:
        columns = paths[b] // game.levels
        blocked[moves, columns] = True
        if b < agent:
            blocked[0, now[b] // game.levels] = True
            blocked[moves[1:], columns[:-1]] = True
        else:
            blocked[moves[:-1], columns[1:]] = True
    return blocked


@compiled()
def _gain(game: Game, position: int, weight: Floats, looks: Looks) -> float:
    """Compute the bits that a look from a position is expected to remove."""
    r0, r1, c0, c1 = game.spans[position]
    level, total = position % game.levels, 0.0
    for r in range(r0, r1):
        for c in range(c0, c1):
            total += weight[r, c] * game.gain[looks[r, c], level]
    return total


@compiled()
def _look(game: Game, position: int, looks: Looks) -> None:
    """Carry out a look."""
    r0, r1, c0, c1 = game.spans[position]
    level = position % game.levels
    for r in range(r0, r1):
        for c in range(c0, c1):
            looks[r, c] = game.then[looks[r, c], level]


@compiled()
def look_all(game: Game, paths: Ints, looks: Looks) -> None:
    """Carry out all looks of the paths [A, steps]."""
    for path in paths:
        for position in path:
            _look(game, position, looks)


@compiled()
def _worth(game: Game, path: Ints, weight: Floats, looks: Looks) -> float:
    """Compute the bits that a path is expected to remove; `looks` is changed."""
    total = 0.0
    for position in path:
        total += _gain(game, position, weight, looks)
        _look(game, position, looks)
    return total


@compiled()
def best_path(
    game: Game,
    start: int,
    blocked: NDArray[np.bool_],
    weight: Floats,
    looks: Looks,
    width: int,
    path: Ints,
) -> float:
    """Find the best path of one agent by beam search.

    Args:
        game: game of the mission.
        start: position of the agent.
        blocked: [steps, columns] columns forbidden to it after each move.
        weight: [B, B] weight of each block.
        looks: [B, B] look state of each block after the others' looks.
        width: number of paths kept after each move.
        path: [steps] receives its positions.

    Returns:
        bits that it is expected to remove; -1 if there is no free path.
    """
    steps, actions = len(path), game.targets.shape[1]
    parents = np.zeros((steps, width), np.int64)
    places = np.zeros((steps, width), np.int64)
    states = np.empty((width, *looks.shape), np.int16)
    states[0] = looks
    at, scores = np.full(1, start), np.zeros(1)
    for t in range(steps):
        worth = np.full(len(at) * actions, -1.0)  # of each path after each next move
        for i in range(len(at)):
            for k in range(actions):
                target = game.targets[at[i], k]
                if target >= 0 and not blocked[t, target // game.levels]:
                    worth[i * actions + k] = scores[i] + _gain(game, target, weight, states[i])
        following = np.empty_like(states)
        last = np.full(len(game.spans), -1.0)  # paths of one worth that meet have the same looks
        kept, count = np.empty(width), 0
        for j in np.argsort(-worth, kind="mergesort"):
            target = game.targets[at[j // actions], j % actions]
            if worth[j] < 0 or count == width:
                break
            if abs(worth[j] - last[target]) < 1e-12:
                continue
            last[target] = worth[j]
            parents[t, count], places[t, count] = j // actions, target
            following[count] = states[j // actions]
            _look(game, target, following[count])
            kept[count], count = worth[j], count + 1
        if count == 0:
            return -1.0
        at, scores, states = places[t, :count].copy(), kept[:count].copy(), following
    # Follow the parents back from the best path's end; paths are sorted by worth.
    best = 0
    for t in range(steps - 1, -1, -1):
        path[t], best = places[t, best], parents[t, best]
    return float(scores[0])

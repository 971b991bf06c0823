"""All environments advanced by one compiled call: move, measure, talk, fuse, draw the channels.

Beside it the information gain that an agent expects of each of its actions.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from murmur.env_service.compiled import compiled
from murmur.env_service.envs.terrain import channels
from murmur.env_service.envs.terrain.belief import (
    ODDS_HIGH,
    ODDS_LOW,
    UNDECIDED,
    Pool,
    Scratch,
    Totals,
    entropy_row,
    fuse,
    pool,
    scratch,
    settle_row,
)
from murmur.env_service.envs.terrain.channels import channel_plan
from murmur.env_service.envs.terrain.config import Config
from murmur.env_service.envs.terrain.lattice import MOVES, action_mask, lattice_shape, move_agents
from murmur.env_service.envs.terrain.sensor import (
    Camera,
    camera,
    footprint,
    map_shape,
    measure,
    stream,
)
from murmur.env_service.splitmix import mix

EXPECTED_GAIN = "expected_gain"
OBSERVED_EVERY = 3  # row and column: gains differ by 2 % (rms), in a fifth of the time
_MESSAGES = 1_000_000  # number of the random stream that loses messages; agents use 0 .. A-1


class Mission(NamedTuple):
    """The constants of a mission.

    Attributes:
        camera: camera of the mission; see sensor.
        rows: pooling along x.
        columns: pooling along y.
        moves: [K, 3] action set.
        lattice: [3] positions along x, y, z.
        metres: [Z] altitudes, meters.
        spacing: spacing of the lattice, meters.
        budget: number of moves after the first.
        failure_rate: share of messages lost in range.
        mask_collisions: true to mask moves onto agents with lower ids; see Config.
        actor: codes of the actor's channels in order.
        critic: codes of the critic's channels in order.
        scratch: working memory of one environment at a time.
    """

    camera: Camera
    rows: Pool
    columns: Pool
    moves: NDArray[np.int32]
    lattice: NDArray[np.int32]
    metres: NDArray[np.float64]
    spacing: float
    budget: int
    failure_rate: float
    mask_collisions: bool
    actor: NDArray[np.int64]
    critic: NDArray[np.int64]
    scratch: Scratch


class State(NamedTuple):
    """The state of all environments; entry n belongs to environment n.

    Attributes:
        truth: [N, X, Y] uint8, 1 = of interest.
        odds: [N, A + 1, X, Y] float32, belief of each agent; the last is the global one.
        pooled: [N, A + 1, H, W] float64, probabilities of these beliefs, area-pooled.
        entropy: [N, X, Y] float32, entropy of the global belief, bits.
        label: [N, X, Y] uint8, label of each cell in the global belief; see belief.UNDECIDED.
        looked: [N, X, Y] uint8, 1 = in a footprint so far.
        cells: [N, A, 3] int32, positions.
        rects: [N, A, 4] int64, last footprints.
        heard: [N, A, A] uint8, [n, a, b] = a heard b's last message.
        executed: [N, A] int32, last executed actions.
        visits: [N, Z] int64, measurements at each altitude after the start.
        avoided: [N] int64, actions replaced to avoid a conflict so far.
        time: [N] int64, decisions carried out.
        key: [N] uint64, key of the episode's random streams.
        range: [N] float64, communication range of the episode, meters.
        totals: sums over the global maps.
        maps: [N, A, C, H, W] float32, the actor's channels.
        critic: [N, Cg, H, W] float32, the critic's channels.
        mask: [N, A, K] uint8, legal actions.
    """

    truth: NDArray[np.uint8]
    odds: NDArray[np.float32]
    pooled: NDArray[np.float64]
    entropy: NDArray[np.float32]
    label: NDArray[np.uint8]
    looked: NDArray[np.uint8]
    cells: NDArray[np.int32]
    rects: NDArray[np.int64]
    heard: NDArray[np.uint8]
    executed: NDArray[np.int32]
    visits: NDArray[np.int64]
    avoided: NDArray[np.int64]
    time: NDArray[np.int64]
    key: NDArray[np.uint64]
    range: NDArray[np.float64]
    totals: Totals
    maps: NDArray[np.float32]
    critic: NDArray[np.float32]
    mask: NDArray[np.uint8]


# Values of arrays of State before an episode's first measurement; the others are 0.
_INITIAL = {"odds": 1, "pooled": 0.5, "entropy": 1, "label": UNDECIDED, "executed": -1}


def mission(config: Config) -> Mission:
    """Make the constants of a mission."""
    x, y, z = lattice_shape(config)
    rows, columns = map_shape(config)
    lens, plan = camera(config), channel_plan(config)
    size = int(2 * lens.radius_x.max()), int(2 * lens.radius_y.max())
    largest = min(size[0], rows), min(size[1], columns)
    return Mission(
        camera=lens,
        rows=pool(rows, x),
        columns=pool(columns, y),
        moves=MOVES[config.num_actions],
        lattice=np.array([x, y, z], np.int32),
        metres=np.array(config.altitudes_m),
        spacing=config.spacing_m,
        budget=config.budget,
        failure_rate=config.failure_rate,
        mask_collisions=config.mask_collisions,
        actor=np.array(plan.actor, np.int64),
        critic=np.array(plan.critic, np.int64),
        scratch=scratch(config.num_agents, largest, x, max(columns, size[1])),
    )


def state(config: Config, num_envs: int) -> State:
    """Allocate the state of `num_envs` environments; begin() starts an episode."""
    x, y, z = lattice_shape(config)
    grid = (num_envs, *map_shape(config))
    agents, plan = config.num_agents, channel_plan(config)
    return State(
        truth=np.zeros(grid, np.uint8),
        odds=np.zeros((num_envs, agents + 1, *grid[1:]), np.float32),
        pooled=np.zeros((num_envs, agents + 1, x, y)),
        entropy=np.zeros(grid, np.float32),
        label=np.zeros(grid, np.uint8),
        looked=np.zeros(grid, np.uint8),
        cells=np.zeros((num_envs, agents, 3), np.int32),
        rects=np.zeros((num_envs, agents, 4), np.int64),
        heard=np.zeros((num_envs, agents, agents), np.uint8),
        executed=np.zeros((num_envs, agents), np.int32),
        visits=np.zeros((num_envs, z), np.int64),
        avoided=np.zeros(num_envs, np.int64),
        time=np.zeros(num_envs, np.int64),
        key=np.zeros(num_envs, np.uint64),
        range=np.zeros(num_envs),
        totals=Totals(*np.zeros((len(Totals._fields), num_envs))),
        maps=np.zeros((num_envs, agents, len(plan.actor), x, y), np.float32),
        critic=np.zeros((num_envs, len(plan.critic), x, y), np.float32),
        mask=np.zeros((num_envs, agents, config.num_actions), np.uint8),
    )


def begin(
    state: State,
    n: int,
    seed: int,
    truth: NDArray[np.uint8],
    cells: NDArray[np.int32],
    communication_range: float,
) -> None:
    """Reset environment n to a new episode, before its first measurement.

    Args:
        state: state of all environments.
        n: number of the environment.
        seed: seed of the episode; all its random streams derive from it.
        truth: [X, Y] ground truth, 0 or 1.
        cells: [A, 3] start positions of the agents.
        communication_range: range of messages, meters.
    """
    arrays = state._asdict()
    totals: Totals = arrays.pop("totals")
    for name, array in arrays.items():
        array[n] = _INITIAL.get(name, 0)
    state.truth[n] = truth
    state.cells[n] = cells
    state.key[n] = seed
    state.range[n] = communication_range
    for sums in totals:
        sums[n] = 0
    totals.interest[n] = np.count_nonzero(truth)
    totals.interest_entropy[n] = totals.interest[n]  # one bit for each cell
    totals.weighted[n] = 0.5 * truth.size


@compiled()
def _talk(mission: Mission, state: State, n: int) -> None:
    """Decide which last messages each agent of environment n hears: its own, and those in range."""
    agents = state.cells.shape[1]
    key = stream(state.key[n], state.time[n], _MESSAGES)
    for a in range(agents):
        for b in range(agents):
            p, q = state.cells[n, a], state.cells[n, b]
            distance = math.sqrt(
                ((p[0] - q[0]) * mission.spacing) ** 2
                + ((p[1] - q[1]) * mission.spacing) ** 2
                + (mission.metres[p[2]] - mission.metres[q[2]]) ** 2
            )
            draw = mix(key + np.uint64(a * agents + b)) >> np.uint64(11)
            arrives = float(draw) * 2.0**-53 >= mission.failure_rate
            state.heard[n, a, b] = a == b or (distance <= state.range[n] and arrives)


@compiled()
def _measure(mission: Mission, state: State, n: int) -> None:
    """Measure, exchange messages and fuse in environment n; update its global belief and sums."""
    agents = state.cells.shape[1]
    work = mission.scratch
    for a in range(agents):
        cell, rect = state.cells[n, a], state.rects[n, a]
        footprint(mission.camera, cell, state.truth.shape[1:], rect)
        measure(
            state.truth[n],
            rect,
            mission.camera.noise[cell[2]],
            stream(state.key[n], state.time[n], a),
            work.words,
            work.seen[a],
        )
        if state.time[n] > 0:
            state.visits[n, cell[2]] += 1
    _talk(mission, state, n)
    for reader in range(agents + 1):
        for a in range(agents):
            # One's own report comes first, then the others' in the order of their ids; as the
            # belief is clamped before each update the order can matter.
            sender = a
            if reader < agents:
                sender = reader if a == 0 else (a - 1 if a <= reader else a)
                if not state.heard[n, reader, sender]:
                    continue
            fuse(
                state.odds[n, reader],
                state.rects[n, sender],
                work.seen[sender],
                mission.camera.ratio[state.cells[n, sender, 2]],
                mission.rows,
                mission.columns,
                state.pooled[n, reader],
                work,
            )
    _settle(state, n, work)


@compiled()
def _settle(state: State, n: int, scratch: Scratch) -> None:
    """Update all quantities that derive from environment n's global belief.

    Each cell of the union of the footprints is visited once: row by row, the footprints' column
    ranges are walked from left to right, skipping columns that an earlier range covered.
    """
    rects, totals, agents = state.rects[n], state.totals, state.cells.shape[1]
    order = np.argsort(rects[:, 2], kind="mergesort")
    weighted = base = interest = 0.0
    claimed = correct = seen = 0
    for i in range(rects[:, 0].min(), rects[:, 1].max()):
        done = 0
        for agent in order:
            first, end = max(done, rects[agent, 2]), rects[agent, 3]
            if i < rects[agent, 0] or i >= rects[agent, 1] or first >= end:
                continue
            row = settle_row(
                state.odds[n, agents, i, first:end],
                state.entropy[n, i, first:end],
                state.label[n, i, first:end],
                state.looked[n, i, first:end],
                state.truth[n, i, first:end],
                scratch,
            )
            weighted, base = weighted + float(row[0]), base + float(row[1])
            interest, seen = interest + float(row[2]), seen + int(row[5])
            claimed, correct = claimed + int(row[3]), correct + int(row[4])
            done = end
    base += totals.weighted[n]
    totals.weighted[n] += weighted
    totals.interest_entropy[n] += interest
    totals.claimed[n] += claimed
    totals.correct[n] += correct
    totals.seen[n] += seen
    totals.newly_seen[n] = seen
    totals.gain[n] = 1 - totals.weighted[n] / base if base > 0 else 0.0


@compiled()
def _draw(mission: Mission, state: State, n: int) -> None:
    """Draw all channels of environment n."""
    agents = state.cells.shape[1]
    rects, maps = state.rects[n], state.maps[n]
    image = np.empty(maps.shape[2:], np.float64)
    for a in range(agents):
        for i, channel in enumerate(mission.actor):
            out = maps[a, i]
            if channel == channels.BUDGET:
                out[:] = max(mission.budget - state.time[n], 0) / max(mission.budget, 1)
            elif channel == channels.AGENT_ID:
                out[:] = (a + 1) / agents
            elif channel == channels.POSITION:
                channels.own_position(state.cells[n], state.heard[n, a], a, mission.lattice, out)
            elif channel == channels.W_ENTROPY:
                channels.weighted_entropy(state.pooled[n, a], out)
            elif channel in (channels.LOCAL_W_ENTROPY, channels.LOCAL_PROB):
                _draw_local(mission, state, n, a, image)
                if channel == channels.LOCAL_PROB:
                    channels.probability(image, out)
                else:
                    channels.weighted_entropy(image, out)
            elif channel == channels.PROB:
                channels.probability(state.pooled[n, a], out)
            elif channel == channels.FOOTPRINT:
                channels.footprints(
                    rects, state.heard[n, a], a, 0.0, mission.rows, mission.columns, out
                )
    everyone = np.ones(agents, np.uint8)
    for i, channel in enumerate(mission.critic):
        out = state.critic[n, i]
        if channel == channels.POSITIONS:
            channels.all_positions(state.cells[n], mission.lattice, out)
        elif channel == channels.GLOBAL_W_ENTROPY:
            channels.weighted_entropy(state.pooled[n, agents], out)
        elif channel == channels.GLOBAL_PROB:
            channels.probability(state.pooled[n, agents], out)
        elif channel == channels.FOOTPRINTS:
            channels.footprints(rects, everyone, -1, 1.0, mission.rows, mission.columns, out)


@compiled()
def _draw_local(mission: Mission, state: State, n: int, a: int, image: NDArray[np.float64]) -> None:
    """Pool agent a's last look in environment n into `image` [H, W], as probabilities."""
    lens, work = mission.camera, mission.scratch
    z = state.cells[n, a, 2]
    rect = state.rects[n, a]
    size = (2 * lens.radius_x[z], 2 * lens.radius_y[z])
    offset = (
        rect[0] - lens.centre_x[state.cells[n, a, 0]] + lens.radius_x[z],
        rect[2] - lens.centre_y[state.cells[n, a, 1]] + lens.radius_y[z],
    )
    visible = (rect[1] - rect[0], rect[3] - rect[2])
    channels.pool_image(work.seen[a], offset, visible, size, 1 - lens.noise[z], work.a, image)


@compiled()
def advance(
    mission: Mission,
    state: State,
    action: NDArray[np.int32],
    moves: NDArray[np.bool_],
    measures: NDArray[np.bool_],
) -> None:
    """Move and measure in the chosen environments, then draw every environment's observation.

    Args:
        mission: constants of the mission.
        state: state of all environments; updated.
        action: [N, A] chosen actions.
        moves: [N] bool, true if an environment's agents execute their actions.
        measures: [N] bool, true if they then measure.
    """
    for n in range(action.shape[0]):
        cells = state.cells[n]
        if moves[n]:
            state.avoided[n] += move_agents(
                cells, action[n], mission.moves, mission.lattice, state.executed[n]
            )
        if measures[n]:
            _measure(mission, state, n)
        _draw(mission, state, n)
        mask = state.mask[n]
        action_mask(cells, mission.moves, mission.lattice, mission.mask_collisions, mask)


@compiled()
def look_gain(
    odds: NDArray[np.float32], ratio: np.float32, scratch: Scratch, rows: NDArray[np.float32]
) -> float:
    """Compute the expected weighted entropy reduction of a look at a row of cells, bits.

    sum p w1 (H(p) - H(p | 1)) + (1 - p) w0 (H(p) - H(p | 0)), with p the belief, H(p | z) the
    entropy after report z, and w the weight of the cell after that report: 1 if then of interest,
    0 if not, 0.5 if undecided.

    Args:
        odds: [n] belief.
        ratio: odds that a report is right.
        scratch: working memory.
        rows: [4, >= n] working memory.
    """
    n = odds.shape[0]
    now, then, given, total = rows[0, :n], rows[1, :n], rows[2, :n], np.float32(0)
    entropy_row(odds, now, scratch)
    for report in range(2):
        factor = ratio if report == 1 else np.float32(1) / ratio
        for j in range(n):
            given[j] = odds[j] * factor
        entropy_row(given, then, scratch)
        for j in range(n):
            weight = np.float32(0.5) * (
                np.float32(given[j] > ODDS_HIGH) + np.float32(given[j] >= ODDS_LOW)
            )
            says_one = odds[j] / (np.float32(1) + odds[j])
            chance = says_one if report == 1 else np.float32(1) - says_one
            total += chance * weight * (now[j] - then[j])
    return float(total)


@compiled()
def sampled(first: int, end: int, every: int) -> tuple[int, int, int]:
    """Choose every `every`-th number of a range, as far from its first as from its last.

    So a turned or mirrored footprint has the same cells.

    Returns:
        (first number, step, count).
    """
    n = end - first
    if n < every:
        return first, 1, n
    start = (n - 1) * ((every + 1) // 2) % every
    return first + start, every, (n - start + every - 1) // every


@compiled()
def expected_gains(
    mission: Mission,
    state: State,
    mask: NDArray[np.uint8],
    every: int,
    gains: NDArray[np.float64],
) -> None:
    """Compute the expected gain of each agent's legal actions by its own belief.

    Args:
        mission: constants of the mission.
        state: state of all environments.
        mask: [N, A, K] legal actions.
        every: step between the rows and columns of a footprint that are used, odd; 1: all.
        gains: [N, A, K] receives bits; 0 for illegal actions.
    """
    camera = mission.camera
    rect = np.empty(4, np.int64)
    rows = np.empty((4, state.odds.shape[3]), np.float32)
    odds = np.empty(state.odds.shape[3], np.float32)
    target = np.empty(3, np.int32)
    for n in range(mask.shape[0]):
        for a in range(mask.shape[1]):
            for k in range(mask.shape[2]):
                gains[n, a, k] = 0
                if not mask[n, a, k]:
                    continue
                for axis in range(3):
                    target[axis] = state.cells[n, a, axis] + mission.moves[k, axis]
                footprint(camera, target, state.truth.shape[1:], rect)
                x, step_x, across = sampled(rect[0], rect[1], every)
                y, step_y, along = sampled(rect[2], rect[3], every)
                ratio, total = camera.ratio[target[2]], 0.0
                for i in range(across):
                    for j in range(along):
                        odds[j] = state.odds[n, a, x + i * step_x, y + j * step_y]
                    total += look_gain(odds[:along], ratio, mission.scratch, rows)
                cells = (rect[1] - rect[0]) * (rect[3] - rect[2])
                gains[n, a, k] = total * cells / max(1, across * along)

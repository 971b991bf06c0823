"""All environments advanced by one compiled call: move, measure, talk, fuse, draw the channels."""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from murmur.env_service.compiled import compiled
from murmur.env_service.envs.terrain import channels
from murmur.env_service.envs.terrain.belief import (
    UNDECIDED,
    Pool,
    Scratch,
    Totals,
    fuse,
    pool,
    scratch,
    settle,
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


def mission(config: Config) -> Mission:
    """Make the constants of a mission."""
    x, y, z = lattice_shape(config)
    rows, columns = map_shape(config)
    lens, plan = camera(config), channel_plan(config)
    size = (int(2 * lens.radius_x.max()), int(2 * lens.radius_y.max()))
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
        scratch=scratch(
            config.num_agents,
            (min(size[0], rows), min(size[1], columns)),
            x,
            max(columns, size[1]),
        ),
    )


def state(config: Config, num_envs: int) -> State:
    """Allocate the state of `num_envs` environments; begin() starts an episode."""
    x, y, z = lattice_shape(config)
    grid = (num_envs, *map_shape(config))
    agents = config.num_agents
    return State(
        truth=np.zeros(grid, np.uint8),
        odds=np.ones((num_envs, agents + 1, *grid[1:]), np.float32),
        pooled=np.full((num_envs, agents + 1, x, y), 0.5),
        entropy=np.ones(grid, np.float32),
        label=np.full(grid, UNDECIDED, np.uint8),
        looked=np.zeros(grid, np.uint8),
        cells=np.zeros((num_envs, agents, 3), np.int32),
        rects=np.zeros((num_envs, agents, 4), np.int64),
        heard=np.zeros((num_envs, agents, agents), np.uint8),
        executed=np.full((num_envs, agents), -1, np.int32),
        visits=np.zeros((num_envs, z), np.int64),
        avoided=np.zeros(num_envs, np.int64),
        time=np.zeros(num_envs, np.int64),
        key=np.zeros(num_envs, np.uint64),
        range=np.zeros(num_envs),
        totals=Totals(
            weighted=np.zeros(num_envs),
            interest_entropy=np.zeros(num_envs),
            interest=np.zeros(num_envs, np.int64),
            claimed=np.zeros(num_envs, np.int64),
            correct=np.zeros(num_envs, np.int64),
            seen=np.zeros(num_envs, np.int64),
            gain=np.zeros(num_envs),
            newly_seen=np.zeros(num_envs, np.int64),
        ),
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
    state.truth[n] = truth
    state.odds[n] = 1
    state.pooled[n] = 0.5
    state.entropy[n] = 1
    state.label[n] = UNDECIDED
    state.looked[n] = 0
    state.cells[n] = cells
    state.rects[n] = 0
    state.heard[n] = 0
    state.executed[n] = -1
    state.visits[n] = 0
    state.avoided[n] = 0
    state.time[n] = 0
    state.key[n] = seed
    state.range[n] = communication_range
    totals = state.totals
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
    settle(
        n,
        state.rects[n],
        state.odds[n, agents],
        state.entropy[n],
        state.label[n],
        state.looked[n],
        state.truth[n],
        state.totals,
        work,
    )


@compiled()
def _draw(
    mission: Mission,
    state: State,
    n: int,
    maps: NDArray[np.float32],
    critic: NDArray[np.float32],
) -> None:
    """Draw all channels of environment n.

    Args:
        mission: constants of the mission.
        state: state of all environments.
        n: number of the environment.
        maps: [A, C, H, W] receives the actor's channels.
        critic: [Cg, H, W] receives the critic's channels.
    """
    agents = state.cells.shape[1]
    rects = state.rects[n]
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
    _draw_critic(mission, state, n, critic)


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
def _draw_critic(mission: Mission, state: State, n: int, critic: NDArray[np.float32]) -> None:
    """Draw the critic's channels of environment n; see _draw."""
    agents, rects = state.cells.shape[1], state.rects[n]
    everyone = np.ones(agents, np.uint8)
    for i, channel in enumerate(mission.critic):
        out = critic[i]
        if channel == channels.POSITIONS:
            channels.all_positions(state.cells[n], mission.lattice, out)
        elif channel == channels.GLOBAL_W_ENTROPY:
            channels.weighted_entropy(state.pooled[n, agents], out)
        elif channel == channels.GLOBAL_PROB:
            channels.probability(state.pooled[n, agents], out)
        elif channel == channels.FOOTPRINTS:
            channels.footprints(rects, everyone, -1, 1.0, mission.rows, mission.columns, out)


@compiled()
def advance(
    mission: Mission,
    state: State,
    action: NDArray[np.int32],
    moves: NDArray[np.bool_],
    measures: NDArray[np.bool_],
    maps: NDArray[np.float32],
    critic: NDArray[np.float32],
    mask: NDArray[np.uint8],
) -> None:
    """Move and measure in the chosen environments, then draw every environment's observation.

    Args:
        mission: constants of the mission.
        state: state of all environments; updated.
        action: [N, A] chosen actions.
        moves: [N] bool, true if an environment's agents execute their actions.
        measures: [N] bool, true if they then measure.
        maps: [N, A, C, H, W] receives the actor's channels.
        critic: [N, Cg, H, W] receives the critic's channels.
        mask: [N, A, K] receives the legal actions.
    """
    for n in range(action.shape[0]):
        cells = state.cells[n]
        if moves[n]:
            state.avoided[n] += move_agents(
                cells, action[n], mission.moves, mission.lattice, state.executed[n]
            )
        if measures[n]:
            _measure(mission, state, n)
        _draw(mission, state, n, maps[n], critic[n])
        action_mask(cells, mission.moves, mission.lattice, mission.mask_collisions, mask[n])

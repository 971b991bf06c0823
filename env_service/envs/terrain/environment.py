"""The terrain-monitoring environment: N missions behind the VectorEnvironment contract."""

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from env_service.environment import VectorEnvironment
from env_service.envs.terrain import simulation
from env_service.envs.terrain.channels import ACTOR_SENT, BUDGET_LEFT, CRITIC_SENT, channel_plan
from env_service.envs.terrain.config import Config
from env_service.envs.terrain.gain import EXPECTED_GAIN, OBSERVED_EVERY, expected_gains
from env_service.envs.terrain.lattice import MOVES, lattice_shape
from env_service.envs.terrain.sensor import cell_size_m, map_shape
from env_service.envs.terrain.world import world
from shared.config.symmetry import ArrayChange, Symmetry, grid_change
from shared.wire.spec import ACTION_MASK, AGENT_CELL, STATE, ArraySpec, Discrete, EnvSpec
from shared.wire.timestep import Array, StepType, TimeStep

FlightPlan = Callable[[np.random.Generator, NDArray[np.int32]], NDArray[np.int32]]
"""(generator, [A, 3] start) -> [budget + 1, A, 3] positions, one for each step of an episode."""


def _spec(config: Config) -> EnvSpec:
    """Make the spec of the environment's observations, actions and metrics."""
    height, width, _ = lattice_shape(config)
    plan = channel_plan(config)
    maps, state = _names(config)
    observations = [ArraySpec(maps, "float32", (len(plan.actor), height, width))]
    if plan.critic:
        shape = (len(plan.critic), height, width)
        observations.append(ArraySpec(state, "float32", shape, per_agent=False))
    if plan.budget_left:
        observations.append(ArraySpec(BUDGET_LEFT, "float32", (1,)))
    if config.expected_gain:
        observations.append(ArraySpec(EXPECTED_GAIN, "float32", (config.num_actions,)))
    observations.append(ArraySpec(AGENT_CELL, "int32", (2,)))
    observations.append(ArraySpec(ACTION_MASK, "uint8", (config.num_actions,)))
    return EnvSpec(
        name="terrain",
        num_agents=config.num_agents,
        observations=tuple(observations),
        action=Discrete(config.num_actions),
        metrics=(
            "entropy",
            "f1",
            "coverage",
            "collisions_avoided",
            *(f"altitude_share_{h:g}".replace(".", "_") for h in config.altitudes_m),
        ),
        max_episode_steps=config.budget + 1,
        agents=tuple(f"uav_{a}" for a in range(config.num_agents)),
        derived=plan.derived,
        symmetries=symmetries(config),
    )


def _names(config: Config) -> tuple[str, str]:
    """Return the names of the agents' and the critic's arrays of drawn channels."""
    return ("maps", STATE) if config.channels_by == "server" else (ACTOR_SENT, CRITIC_SENT)


class TerrainEnvironment(VectorEnvironment):
    """N missions of UAVs that map one area each.

    All agents of all missions move at once; within a mission conflicts are settled in the order
    of the agents' ids (see lattice.move_agents). Metrics are valid on every row, so a row is a
    point of the curve over mission time.

    Attributes:
        config: options of the mission.
        mission: constants of the mission.
        state: state of all N environments, which scripted policies may read.
        draw_world: function that draws an episode's ground truth.
        communication_ranges_m: communication ranges, m, one of which is drawn for each episode.
        flight_plan: plan that agents follow instead of their actions, or None. Their first look is
            at the plan's first position, so the FIRST row shows the prior. A plan takes effect
            when an episode begins.
    """

    def __init__(self, config: Config, num_envs: int) -> None:
        self.config = config
        self.num_envs = num_envs
        self.spec = _spec(config)
        self.mission = simulation.mission(config)
        self.state = simulation.state(config, num_envs)
        self.communication_ranges_m = config.communication_ranges_m or (
            config.communication_range_m,
        )
        self.flight_plan: FlightPlan | None = None
        self.draw_world = world(config, map_shape(config))
        start_m = config.start_altitude_m
        self._start_level = (
            len(config.altitudes_m) - 1 if start_m is None else config.altitudes_m.index(start_m)
        )
        self._decisions = config.budget + 1

        agents = config.num_agents
        x, y, _ = lattice_shape(config)
        plan = channel_plan(config)
        self._maps = np.zeros((num_envs, agents, len(plan.actor), x, y), np.float32)
        self._critic = np.zeros((num_envs, len(plan.critic), x, y), np.float32)
        self._budget_left = plan.budget_left
        self._mask = np.zeros((num_envs, agents, config.num_actions), np.uint8)
        self._gains = np.zeros(self._mask.shape)
        self._paths = np.zeros((num_envs, self._decisions + 1, agents, 3), np.int32)
        self._plans = np.zeros((num_envs, self._decisions, agents, 3), np.int32)
        self._planned = np.zeros(num_envs, np.bool_)

    @override
    def step(
        self, action: Array, restart: NDArray[np.bool_], seeds: NDArray[np.uint64]
    ) -> TimeStep:
        state, num_actions = self.state, self.config.num_actions
        chosen = action.astype(np.int32, copy=False)
        assert restart.all() or 0 <= chosen[~restart].min() <= chosen[~restart].max() < num_actions
        for n in np.flatnonzero(restart):
            self._begin(int(n), int(seeds[n]))
        entropy = self._entropy()
        going = ~restart
        state.time[going] += 1
        assert (state.time <= self._decisions).all(), "an episode continued after its LAST row"
        following = going & self._planned
        if following.any():
            state.cells[following] = self._plans[following, state.time[following] - 1]
        simulation.advance(
            self.mission,
            state,
            chosen,
            going & ~self._planned,
            going | ~self._planned,
            self._maps,
            self._critic,
            self._mask,
        )
        self._paths[np.arange(self.num_envs), state.time] = state.cells
        reward = self._reward(entropy)
        reward[restart] = 0
        last = state.time == self._decisions
        step_type = np.where(last, StepType.LAST, StepType.MID).astype(np.uint8)
        step_type[restart] = StepType.FIRST
        maps_name, critic_name = _names(self.config)
        observation: dict[str, Array] = {
            maps_name: self._maps,
            AGENT_CELL: np.ascontiguousarray(state.cells[:, :, :2]),
            ACTION_MASK: self._mask,
        }
        if self._critic.shape[1]:
            observation[critic_name] = self._critic
        if self._budget_left:
            observation[BUDGET_LEFT] = self._left()
        if self.config.expected_gain:
            lens = self.mission.camera
            expected_gains(self.mission, state, self._mask, OBSERVED_EVERY, self._gains)
            cells = 4 * lens.radius_x[0] * lens.radius_y[0]
            observation[EXPECTED_GAIN] = (self._gains / cells).astype(np.float32)
        return TimeStep(
            step_type, reward, np.where(last, 0, 1).astype(np.float32), observation, self._metrics()
        )

    def _begin(self, n: int, seed: int) -> None:
        """Set up a new episode in environment n: a pure function of the seed."""
        config = self.config
        generator = np.random.default_rng(seed)
        truth = self.draw_world(generator)
        x, y, _ = lattice_shape(config)
        columns = generator.choice(x * y, config.num_agents, replace=False)
        cells = np.stack(
            [columns // y, columns % y, np.full_like(columns, self._start_level)], axis=1
        ).astype(np.int32)
        reach = float(generator.choice(self.communication_ranges_m))
        self._planned[n] = self.flight_plan is not None
        if self.flight_plan is not None:
            self._plans[n] = self.flight_plan(generator, cells)
            cells = self._plans[n, 0]
        simulation.begin(self.state, n, seed, truth, cells, reach)

    def _left(self) -> Array:
        """Return the share of the moves that are left, [N, A, 1]."""
        budget = self.config.budget
        left = np.maximum(budget - self.state.time, 0) / max(budget, 1)
        agents = self.config.num_agents
        return np.repeat(left.astype(np.float32), agents).reshape(self.num_envs, agents, 1)

    def _entropy(self) -> NDArray[np.float64]:
        """Return the mean entropy [N], bits, of the cells of interest in the global belief."""
        totals = self.state.totals
        return totals.interest_entropy / np.maximum(totals.interest, 1)

    def _reward(self, entropy: NDArray[np.float64]) -> NDArray[np.float32]:
        """Return the reward [N, A] of the step from entropy [N]."""
        config = self.config
        shared = config.reward_scale * self.state.totals.gain + config.reward_offset
        if config.interest_weight:
            shared = shared + config.interest_weight * (entropy - self._entropy())
        return np.repeat(shared[:, None], config.num_agents, axis=1).astype(np.float32)

    def _metres(self, cells: NDArray[np.int32]) -> NDArray[np.float64]:
        """Convert lattice positions [..., 3] to meters."""
        metres = cells.astype(np.float64) * self.config.spacing_m
        metres[..., 2] = self.mission.metres[cells[..., 2]]
        return metres

    def _metrics(self) -> dict[str, NDArray[np.float32]]:
        """Return the environment's own results so far."""
        state, totals = self.state, self.state.totals
        visits = state.visits / np.maximum(state.visits.sum(axis=1, keepdims=True), 1)
        values = (
            self._entropy(),
            2 * totals.correct / np.maximum(totals.claimed + totals.interest, 1),
            totals.seen / state.truth[0].size,
            state.avoided,
            *visits.T,
        )
        return {
            name: value.astype(np.float32)
            for name, value in zip(self.spec.metrics, values, strict=True)
        }

    def render_state(self, index: int) -> Mapping[str, Array]:
        """Return copies of the arrays that a picture needs.

        Returns:
            truth: [X, Y] uint8, 1 = of interest.
            prob, entropy: [X, Y] float32 of the global belief; bits.
            positions_m, paths_m: [A, 3] and [t + 1, A, 3] x, y, altitude, now and on every row.
            footprints: [A, 4] last ones: first row, end, first column, end (ends excluded).
            heard: [A, A] uint8, a heard b's last message.
            executed_action: [A] int32, -1 before the first move.
            cell_m, time: side of a map cell; decisions so far.
        """
        state, time = self.state, int(self.state.time[index])
        odds = state.odds[index, -1]
        return {
            "truth": state.truth[index].copy(),
            "prob": odds / (1 + odds),
            "entropy": state.entropy[index].copy(),
            "positions_m": self._metres(state.cells[index]),
            "paths_m": self._metres(self._paths[index, : time + 1]),
            "footprints": state.rects[index].copy(),
            "heard": state.heard[index].copy(),
            "executed_action": state.executed[index].copy(),
            "cell_m": np.array(cell_size_m(self.config)),
            "time": np.array(time),
        }


def symmetries(config: Config) -> tuple[Symmetry, ...]:
    """Return the symmetries of a configured mission, without the identity.

    Three rules are not the same in a mirrored or turned area. A UAV that gives way to another takes
    the next action by number. Where a collision mask would leave no move, the last action by number
    remains. And the cell below a camera is rounded down: unless the spacing is a whole number of
    map cells, a footprint is off by up to one of them, of some hundred. What is drawn at random
    (camera errors, lost messages) is as likely in the changed area.

    Flips and half turns; quarter turns too if area and camera are square. None if the channel
    `position` is there and has no middle: its own cell would move.
    """
    height, width, _ = lattice_shape(config)
    if "position" in config.actor_channels and not (height % 2 and width % 2):
        return ()
    square = config.area_x_m == config.area_y_m and config.fov_x_deg == config.fov_y_deg
    own, team = ("maps", STATE) if config.channels_by == "server" else (ACTOR_SENT, CRITIC_SENT)
    maps = (own, team) if config.critic_channels else (own,)
    moves = [tuple(move) for move in MOVES[config.num_actions].tolist()]
    found = []
    for flip in (False, True):
        for turns in range(4):
            if (turns % 2 and not square) or (not flip and not turns):
                continue
            grid = grid_change(height, width, flip=flip, turns=turns)
            cell = ArrayChange(
                AGENT_CELL,
                order=grid.order,
                signs=tuple(map(float, grid.signs)),
                offsets=tuple(map(float, grid.offsets)),
            )
            action = tuple(moves.index((*grid.direction(m[:2]), m[2])) for m in moves)
            arrays = [*(ArrayChange(m, flip=flip, turns=turns) for m in maps), cell]
            if config.expected_gain:  # new entry action[k] is old entry k
                order = tuple(action.index(k) for k in range(len(action)))
                arrays.append(ArrayChange(EXPECTED_GAIN, order=order))
            name = f"{'flip, ' if flip else ''}{90 * turns} degrees"
            found.append(Symmetry(name, tuple(arrays), action))
    return tuple(found)

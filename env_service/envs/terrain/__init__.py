"""UAVs map a region of interest together: the environment plug-in `terrain`.

Of its baselines random and lawnmower fly a plan that replaces actions and take budget + 1
measurements for each agent; information gain acts like a learner would and takes one more, at its
start.
"""

from collections.abc import Callable, Mapping
from itertools import product
from typing import cast

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from murmur.env_service.environment import BaselineFactory, ScriptedPolicy, VectorEnvironment
from murmur.env_service.envs.terrain import simulation
from murmur.env_service.envs.terrain.channels import (
    ACTOR_SENT,
    BUDGET_LEFT,
    CRITIC_SENT,
    channel_plan,
)
from murmur.env_service.envs.terrain.config import Config as Config
from murmur.env_service.envs.terrain.lattice import MOVES, is_inside, lattice_shape
from murmur.env_service.envs.terrain.planning import (
    block_sums,
    game_of,
    look_all,
    plan,
    position,
    weigher,
)
from murmur.env_service.envs.terrain.sensor import cell_size_m, map_shape
from murmur.env_service.envs.terrain.world import world
from murmur.shared.config.symmetry import ArrayChange, Symmetry, grid_change
from murmur.shared.process.errors import ConfigError
from murmur.shared.wire.spec import ACTION_MASK, AGENT_CELL, STATE, ArraySpec, Discrete, EnvSpec
from murmur.shared.wire.timestep import Array, StepType, TimeStep

_WIDTH = 8  # paths that a planner's search keeps after each move

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
        observations.append(ArraySpec(simulation.EXPECTED_GAIN, "float32", (config.num_actions,)))
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
        """Allocate N missions; each starts with the first `step` that restarts it.

        Raises:
            RasterError: if the configured raster cannot be used.
        """
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
        start_m = config.start_altitude_m or config.altitudes_m[-1]
        self._start_level = config.altitudes_m.index(start_m)
        self._decisions = config.budget + 1

        agents = config.num_agents
        self._budget_left = channel_plan(config).budget_left
        self._gains = np.zeros(self.state.mask.shape)
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
        before, entropy = state.cells.copy(), self._entropy()
        going = ~restart
        state.time[going] += 1
        assert (state.time <= self._decisions).all(), "an episode continued after its LAST row"
        following = going & self._planned
        if following.any():
            state.cells[following] = self._plans[following, state.time[following] - 1]
        moves, measures = going & ~self._planned, going | ~self._planned
        simulation.advance(self.mission, state, chosen, moves, measures)
        self._paths[np.arange(self.num_envs), state.time] = state.cells
        reward = self._reward(before, entropy)
        reward[restart] = 0
        last = state.time == self._decisions
        step_type = np.where(last, StepType.LAST, StepType.MID).astype(np.uint8)
        step_type[restart] = StepType.FIRST
        maps_name, critic_name = _names(self.config)
        observation: dict[str, Array] = {
            maps_name: state.maps,
            AGENT_CELL: np.ascontiguousarray(state.cells[:, :, :2]),
            ACTION_MASK: state.mask,
        }
        if state.critic.shape[1]:
            observation[critic_name] = state.critic
        if self._budget_left:
            budget, agents = self.config.budget, self.config.num_agents
            left = (np.maximum(budget - state.time, 0) / max(budget, 1)).astype(np.float32)
            observation[BUDGET_LEFT] = np.repeat(left[:, None, None], agents, axis=1)
        if self.config.expected_gain:
            lens, every = self.mission.camera, simulation.OBSERVED_EVERY
            simulation.expected_gains(self.mission, state, state.mask, every, self._gains)
            cells = 4 * lens.radius_x[0] * lens.radius_y[0]
            observation[simulation.EXPECTED_GAIN] = (self._gains / cells).astype(np.float32)
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

    def _entropy(self) -> NDArray[np.float64]:
        """Return the mean entropy [N], bits, of the cells of interest in the global belief."""
        totals = self.state.totals
        return totals.interest_entropy / np.maximum(totals.interest, 1)

    def _reward(
        self, before: NDArray[np.int32], entropy: NDArray[np.float64]
    ) -> NDArray[np.float32]:
        """Return the reward [N, A] of the step from positions `before` [N, A, 3], entropy [N]."""
        config, state = self.config, self.state
        shared = config.reward_scale * state.totals.gain + config.reward_offset
        if config.interest_weight:
            shared = shared + config.interest_weight * (entropy - self._entropy())
        if config.coverage_weight:
            newly_seen = state.totals.newly_seen / state.truth[0].size
            shared = shared + config.coverage_weight * newly_seen
        if config.altitude_weight:
            altitudes = self.mission.metres[state.cells[:, :, 2]]
            shared = shared + config.altitude_weight * altitude_diversity(altitudes)
        reward = np.repeat(shared[:, None], config.num_agents, axis=1)
        if config.distance_weight:
            flown = np.linalg.norm(self._metres(state.cells) - self._metres(before), axis=-1)
            reward -= config.distance_weight * (flown / config.spacing_m)
        if config.overlap_weight:
            reward -= config.overlap_weight * footprint_overlap(state.rects)
        if config.collision_weight:
            places = self._metres(state.cells)[..., :2]
            reward -= config.collision_weight * close_agents(places, config.collision_distance_m)
        return reward.astype(np.float32)

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


def altitude_diversity(metres: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return [N] 0.01 var(z) + 0.1 mean |z_i - z_j| over pairs, of altitudes [N, A] in meters."""
    agents = metres.shape[1]
    pairs = np.abs(metres[:, :, None] - metres[:, None]).sum(axis=(1, 2))
    mean = pairs / max(agents * (agents - 1), 1)
    return np.asarray(0.01 * metres.var(axis=1) + 0.1 * mean)


def footprint_overlap(rects: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return each footprint's largest share that another one covers: [N, A, 4] -> [N, A]."""
    low = np.maximum(rects[:, :, None, ::2], rects[:, None, :, ::2])
    high = np.minimum(rects[:, :, None, 1::2], rects[:, None, :, 1::2])
    common = np.maximum(high - low, 0).prod(axis=-1)  # [N, A, A]
    own = np.diagonal(common, axis1=1, axis2=2).copy()
    agents = np.arange(rects.shape[1])
    common[:, agents, agents] = 0
    return np.asarray(common.max(axis=2) / np.maximum(own, 1))


def close_agents(metres: NDArray[np.float64], distance: float) -> NDArray[np.float64]:
    """Count the other agents within a horizontal distance: [N, A, 2] meters -> [N, A]."""
    apart = np.linalg.norm(metres[:, :, None] - metres[:, None], axis=-1)
    return np.asarray((apart <= distance).sum(axis=2) - 1.0)


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
    own, team = _names(config)
    maps = (own, team) if config.critic_channels else (own,)
    moves = [tuple(move) for move in MOVES[config.num_actions].tolist()]
    found = []
    for flip, turns in product((False, True), range(4)):
        if (turns % 2 and not square) or (not flip and not turns):
            continue
        grid = grid_change(height, width, flip=flip, turns=turns)
        signs, offsets = tuple(map(float, grid.signs)), tuple(map(float, grid.offsets))
        cell = ArrayChange(AGENT_CELL, order=grid.order, signs=signs, offsets=offsets)
        action = tuple(moves.index((*grid.direction(m[:2]), m[2])) for m in moves)
        arrays = [*(ArrayChange(m, flip=flip, turns=turns) for m in maps), cell]
        if config.expected_gain:  # new entry action[k] is old entry k
            order = tuple(action.index(k) for k in range(len(action)))
            arrays.append(ArrayChange(simulation.EXPECTED_GAIN, order=order))
        name = f"{'flip, ' if flip else ''}{90 * turns} degrees"
        found.append(Symmetry(name, tuple(arrays), action))
    return tuple(found)


class FlightPlanPolicy:
    """A policy that gives the environment a flight plan; its own actions are not used.

    Attributes:
        advises: always False: the policy changes the environment, so it cannot be imitated.

    Args:
        environment: environment that flies the plan from its next episode on.
        plan: flight plan; see environment.FlightPlan.
    """

    advises = False

    def __init__(self, environment: TerrainEnvironment, plan: FlightPlan) -> None:
        environment.flight_plan = plan
        self._action = np.zeros((environment.num_envs, environment.spec.num_agents), np.int32)

    def act(self, timestep: TimeStep) -> NDArray[np.int32]:
        """Return [N, A] zeros."""
        return self._action


def random(environment: VectorEnvironment) -> ScriptedPolicy:
    """Make a policy of independent random walks, uniform over moves that stay on the lattice."""
    env = cast(TerrainEnvironment, environment)
    moves, lattice = env.mission.moves, env.mission.lattice
    steps = env.config.budget + 1

    def plan(generator: np.random.Generator, start: NDArray[np.int32]) -> NDArray[np.int32]:
        path = np.empty((steps, *start.shape), np.int32)
        path[0] = start
        for t in range(1, steps):
            for agent, cell in enumerate(path[t - 1]):
                legal = [move for move in moves if is_inside(cell, move, lattice)]
                path[t, agent] = cell + legal[generator.integers(len(legal))]
        return path

    return FlightPlanPolicy(env, plan)


def lawnmower(altitude_m: float | None = None) -> BaselineFactory:
    """Make policies that fly fixed lanes at one altitude: 60 % of the area, 20 % across, back.

    Agents 0, 1, 4, 5, ... fly along x, in lanes from 20 and 60 % of y; agents 2, 3, 6, 7, ... fly
    along y, in lanes from 20 and 60 % of x. On the reference lattice these are [10, 40] m with a
    position each 5 m. A path of another length is sampled evenly.

    Args:
        altitude_m: altitude, m; None for the lowest of the lattice.
    """

    def factory(environment: VectorEnvironment) -> ScriptedPolicy:
        env = cast(TerrainEnvironment, environment)
        levels = env.config.altitudes_m
        height = levels[0] if altitude_m is None else altitude_m
        if height not in levels:
            raise ConfigError(f"lawnmower at {height:g} m: the lattice has altitudes_m = {levels}")
        x, y = (int(n) - 1 for n in env.mission.lattice[:2])
        lanes = []
        for agent in range(env.config.num_agents):
            along, across = (x, y) if agent % 4 < 2 else (y, x)
            first, last = round(0.2 * along), round(0.8 * along)
            lane = round((0.2 + 0.4 * (agent % 2)) * across)
            next_lane = round((0.4 + 0.4 * (agent % 2)) * across)
            out = [(k, lane) for k in range(first, last)]
            side = [(last, k) for k in range(lane, next_lane)]
            back = [(k, next_lane) for k in range(last, first - 1, -1)]
            path = np.array(out + side + back)
            path = path if agent % 4 < 2 else path[:, ::-1]
            keep = np.linspace(0, len(path) - 1, env.config.budget + 1).round().astype(int)
            level = np.full((len(keep), 1), levels.index(height))
            lanes.append(np.hstack([path[keep], level]))
        flight = np.stack(lanes, axis=1).astype(np.int32)  # [budget + 1, A, 3]
        return FlightPlanPolicy(env, lambda generator, start: flight)

    height = "the lowest altitude" if altitude_m is None else f"{altitude_m:g} m"
    factory.__doc__ = f"Fixed lanes at {height}: along the area, across, and back."
    return factory


class InformationGain:
    """A policy in which each agent takes the action of largest expected information gain.

    The expected gains of an agent's legal actions (see simulation.look_gain) are normalized to
    shares. If agents coordinate, the share of an action is multiplied by 1 - share of every other
    agent's action that leads to the same position. This happens in the order of ids, so that a
    later agent uses the discounted shares of an earlier one. The largest share wins.

    Args:
        environment: environment with the beliefs.
        coordinate: true if agents know the others' intended actions.

    Attributes:
        advises: false if the policy changes the environment; see FlightPlanPolicy.
    """

    advises = True

    def __init__(self, environment: TerrainEnvironment, coordinate: bool) -> None:
        self._env = environment
        self._coordinate = coordinate
        shape = (environment.num_envs, environment.spec.num_agents, environment.config.num_actions)
        self._gains = np.zeros(shape)

    def act(self, timestep: TimeStep) -> NDArray[np.int32]:
        """Return the actions, [N, A] int32."""
        env, shares = self._env, self._gains
        mask = np.asarray(timestep.observation[ACTION_MASK], np.uint8)
        simulation.expected_gains(env.mission, env.state, mask, 1, shares)
        total = shares.sum(axis=2, keepdims=True)
        shares /= np.where(total > 0, total, 1)
        if self._coordinate:
            target = env.state.cells[:, :, None] + env.mission.moves  # [N, A, K, 3]
            agents = range(shares.shape[1])
            for a in agents:
                for b in agents:
                    if a != b:
                        same = (target[:, a, :, None] == target[:, b, None]).all(axis=-1)
                        shares[:, a] *= 1 - (same * shares[:, b, None]).sum(axis=-1)
        # Where nothing is gained anywhere all shares are 0: the first legal action then.
        return np.asarray(np.where(mask, shares, -1.0).argmax(axis=2), np.int32)


class Planner:
    """A policy that plans all looks until the end of the mission, again after every look.

    The plan uses a belief, the looks behind it, the agents' positions and, if only few different
    maps are drawn, those maps.

    Args:
        environment: environment with the beliefs.
        shared: true for one plan of the team, from all its looks; false if each agent plans for
            itself and the agents it hears, and flies its own part.
        omniscient: true to plan by the true map in place of a belief; only for a shared plan.
    """

    def __init__(
        self, environment: TerrainEnvironment, *, shared: bool, omniscient: bool = False
    ) -> None:
        self._env = environment
        self._shared = shared
        self._game = game_of(environment.config, environment.mission)
        self._weigh = None if omniscient else weigher(environment.config, self._game)
        blocks = len(self._game.rows), len(self._game.columns)
        beliefs = 1 if shared else environment.spec.num_agents
        self._looks = np.zeros((environment.num_envs, beliefs, *blocks), np.int16)

    def act(self, timestep: TimeStep) -> NDArray[np.int32]:
        """Return the actions, [N, A] int32."""
        mask = np.asarray(timestep.observation[ACTION_MASK])
        action: NDArray[np.int32] = mask.argmax(axis=2).astype(np.int32)
        self._looks[timestep.step_type == StepType.FIRST] = 0
        everyone = np.arange(action.shape[1])
        for n in np.flatnonzero(timestep.step_type < StepType.LAST):
            for k in range(self._looks.shape[1]):
                heard = everyone if self._shared else np.flatnonzero(self._env.state.heard[n, k])
                planned = self._plan(n, k, heard)
                for agent, chosen in zip(heard, planned, strict=True):
                    own = self._shared or agent == k
                    if own and chosen >= 0 and mask[n, agent, chosen]:
                        action[n, agent] = chosen
        return action

    def _plan(self, n: np.intp, k: int, agents: NDArray[np.intp]) -> NDArray[np.intp]:
        """Plan the agents' actions by belief k of environment n; -1 if there is no path."""
        env, game, looks = self._env, self._game, self._looks[n, k]
        now = position(env.state.cells[n, agents], env.mission)
        look_all(game, now[:, None], looks)
        left = env.config.budget + 1 - int(env.state.time[n])
        if self._weigh is None:
            interest = env.state.truth[n].astype(np.float64)
            weight = block_sums(interest / max(interest.sum(), 1), game.rows, game.columns)
        else:
            weight = self._weigh(env.state.odds[n, -1 if self._shared else k])
        following = plan(game, now, left, weight, looks, _WIDTH)[:, 0]
        leads = (game.targets[now] == following[:, None]).argmax(axis=1)
        return np.where(following >= 0, leads, -1)


def planner(environment: VectorEnvironment) -> ScriptedPolicy:
    """Make planners in which each agent plans for itself and the agents it hears."""
    return Planner(cast(TerrainEnvironment, environment), shared=False)


def team_planner(environment: VectorEnvironment) -> ScriptedPolicy:
    """Make a planner of one plan for all agents, as if each heard all messages."""
    return Planner(cast(TerrainEnvironment, environment), shared=True)


def omniscient_planner(environment: VectorEnvironment) -> ScriptedPolicy:
    """Make a planner of one plan for all agents that sees the true map, as no team can."""
    env = cast(TerrainEnvironment, environment)
    return Planner(env, shared=True, omniscient=True)


def information_gain(environment: VectorEnvironment) -> ScriptedPolicy:
    """Make a greedy information-gain policy; agents hear each other as configured."""
    return InformationGain(cast(TerrainEnvironment, environment), coordinate=True)


def information_gain_silent(environment: VectorEnvironment) -> ScriptedPolicy:
    """Make a greedy information-gain policy without messages: no range, no coordination."""
    env = cast(TerrainEnvironment, environment)
    env.communication_ranges_m = (0.0,)
    policy = InformationGain(env, coordinate=False)
    policy.advises = False
    return policy


make = TerrainEnvironment
BASELINES: dict[str, BaselineFactory] = {
    "random": random,
    "lawnmower": lawnmower(),
    "lawnmower-5m": lawnmower(5.0),
    "lawnmower-10m": lawnmower(10.0),
    "lawnmower-15m": lawnmower(15.0),
    "information-gain": information_gain,
    "planner": planner,
    "team-planner": team_planner,
    "omniscient-planner": omniscient_planner,
    "information-gain-silent": information_gain_silent,
}

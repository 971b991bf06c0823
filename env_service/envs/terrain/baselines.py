"""Policies that need no learner: random, lawnmower, greedy information gain, and a planner.

Random and lawnmower fly a plan that replaces actions and take budget + 1 measurements for each
agent; information gain acts like a learner would and takes one more, at its start.
"""

from collections.abc import Callable
from typing import cast

import numpy as np
from numpy.typing import NDArray

from env_service.environment import BaselineFactory, ScriptedPolicy, VectorEnvironment
from env_service.envs.terrain.environment import TerrainEnvironment
from env_service.envs.terrain.gain import expected_gains
from env_service.envs.terrain.lattice import is_inside
from env_service.envs.terrain.planning import game_of, look_all, plan, position, weigher
from shared.process.errors import ConfigError
from shared.wire.spec import ACTION_MASK
from shared.wire.timestep import StepType, TimeStep


class FlightPlanPolicy:
    """A policy that gives the environment a flight plan; its own actions are not used.

    Attributes:
        advises: always False: the policy changes the environment, so it cannot be imitated.

    Args:
        environment: environment that flies the plan from its next episode on.
        plan: flight plan; see environment.FlightPlan.
    """

    def __init__(
        self,
        environment: TerrainEnvironment,
        plan: Callable[[np.random.Generator, NDArray[np.int32]], NDArray[np.int32]],
    ) -> None:
        self.advises = False
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

    The expected gains of an agent's legal actions (see gain.look_gain) are normalized to shares. If
    agents coordinate, the share of an action is multiplied by 1 - share of every other agent's
    action that leads to the same position. This happens in the order of ids, so that a later agent
    uses the discounted shares of an earlier one. The largest share wins.

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
        expected_gains(env.mission, env.state, mask, 1, shares)
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
        width: number of paths that the search keeps after each move.
        shared: true for one plan of the team, from all its looks; false if each agent plans for
            itself and the agents it hears, and flies its own part.
    """

    def __init__(self, environment: TerrainEnvironment, width: int, *, shared: bool) -> None:
        self._env = environment
        self._width = width
        self._shared = shared
        self._game = game_of(environment.config, environment.mission)
        self._weigh = weigher(environment.config, self._game)
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
        weight = self._weigh(env.state.odds[n, -1 if self._shared else k])
        following = plan(game, now, left, weight, looks, self._width)[:, 0]
        leads = (game.targets[now] == following[:, None]).argmax(axis=1)
        return np.where(following >= 0, leads, -1)


def planner(environment: VectorEnvironment) -> ScriptedPolicy:
    """Make planners in which each agent plans for itself and the agents it hears."""
    return Planner(cast(TerrainEnvironment, environment), 8, shared=False)


def team_planner(environment: VectorEnvironment) -> ScriptedPolicy:
    """Make a planner of one plan for all agents, as if each heard all messages."""
    return Planner(cast(TerrainEnvironment, environment), 8, shared=True)


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


BASELINES: dict[str, BaselineFactory] = {
    "random": random,
    "lawnmower": lawnmower(),
    "lawnmower-5m": lawnmower(5.0),
    "lawnmower-10m": lawnmower(10.0),
    "lawnmower-15m": lawnmower(15.0),
    "information-gain": information_gain,
    "planner": planner,
    "team-planner": team_planner,
    "information-gain-silent": information_gain_silent,
}

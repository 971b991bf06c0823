"""A leader and its followers fly to a goal in formation: the environment plug-in `formation`.

The task of the leader-follower MASAC programs that build on `path_env` (docs/formation.md says what
they do differently), for N copies at once. Lengths are pixels, time is steps: x grows to the right,
y downwards, a heading of 0 points right and one of pi/2 up.

Everything is held with the copies last, [.., N], so that every operation runs along contiguous
memory; only what is returned is turned to [N, A, ...]. Agent 0 is the leader.
"""

from collections.abc import Mapping
from typing import Literal, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from murmur.env_service.environment import (
    BaselineFactory,
    RandomPolicy,
    ScriptedPolicy,
    VectorEnvironment,
    blank_timestep,
)
from murmur.shared.config import Section
from murmur.shared.wire.seeding import uniform
from murmur.shared.wire.spec import STATE, ArraySpec, Continuous, EnvSpec
from murmur.shared.wire.timestep import Array, StepType, TimeStep

Floats = NDArray[np.float32]

_TWO_PI = np.float32(2 * np.pi)
_LOW, _HIGH = (50.0, 50.0), (750.0, 650.0)  # px, the flight area; positions are clipped to it
_BORDER = 50.0  # px, nearer than this (or as near) to the area's edge is near the border
ACCELERATION = (0.3, 0.6)  # px/step^2 of a full action: leader, follower
TURN = (0.6, 1.2)  # rad of a full action: leader, follower
_MIN_SPEED, _MAX_SPEED = 10.0, (20.0, 40.0)  # px/step
_COLLISION = 20.0  # px to the obstacle, for the leader
_NEAR_OBSTACLE = 40.0  # px
_GOAL = 40.0  # px
FORMATION = 50.0  # px to the leader
_SPEED_MATCH = 1.0  # px/step

# Whole numbers from (low, high), both included; headings are uniform over the circle.
_LEADER_START = ((300, 400), (500, 550), (10, 20))  # x, y, speed
_FOLLOWER_START = ((400, 500), (500, 550), (20, 30))
_OBSTACLE_START = ((350, 350), (400, 450))  # x, y
_GOAL_START = ((300, 500), (150, 200))

_CLOSE = 25.0  # px to the leader, where the price of distance begins
_FAR = 125.0  # px, where it no longer grows
_MISMATCH = 10.0  # px/step, difference of speeds from which its price no longer grows
_PROGRESS = 100.0  # px, the unit of progress

_SEEN_LENGTH = 200.0  # px, unit of relative positions observed
_SEEN_SPEED = 20.0  # px/step, unit of speeds observed
# Reference observations -> normalised: times and plus, by leader and follower. Lengths become
# (x - 400)/100 and (y - 350)/100, speeds (v - 20)/10, the heading theta - pi.
_TIMES = np.array([[10, 10, 3, _TWO_PI, 10, 10, 1], [10, 10, 3, _TWO_PI, 10, 10, 3]], np.float32)
_PLUS = np.array(
    [[-4, -3.5, -2, -np.pi, -4, -3.5, 0], [-4, -3.5, -2, -np.pi, -4, -3.5, -2]], np.float32
)
_METRICS = (
    "success",
    "collision",
    "timeout",
    "formation",
    "formation_joined",
    "formation_all",
    "steps",
)
_CENTRE, _HALF = (400.0, 350.0), (350.0, 300.0)  # px, of the flight area


class Config(Section):
    """Options of `formation`. Defaults: the published task; configs/formation.yaml: one to learn.

    Rewards are paid in every step in which their condition holds.
    """

    num_followers: int = Field(2, ge=1, le=16, description="UAVs that follow the leader")
    episode_steps: int = Field(1000, ge=1, description="longest episode; then it is cut off")
    observation: Literal["reference", "formation"] = Field(
        "reference",
        description="reference: 7 numbers per agent, the leader sees neither followers nor "
        "obstacle; formation: everyone sees everything, relative to itself",
    )
    normalize: bool = Field(
        False,
        description="reference: the same numbers, shifted and scaled so that 100 px, 10 px/step "
        "and 1 rad are 1",
    )
    role: bool = Field(
        False, description="also tell each agent whether it leads (1) or follows (0)"
    )
    state: bool = Field(
        False, description="also give everything, in the area's frame, as one state"
    )

    time_reward: float = Field(-0.2, description="everyone, always")
    border_reward: float = Field(-1.0, description="an agent within 50 px of the area's edge")
    near_obstacle_reward: float = Field(
        -2.0, description="an agent within 40 px of the obstacle, but for a leader that collides"
    )
    collision_reward: float = Field(-500.0, description="leader, at a collision")
    goal_reward: float = Field(1000.0, description="leader, at the goal")
    goal_formation: float = Field(
        0.0,
        ge=0,
        le=1,
        description="part of goal_reward paid by the share of followers in formation",
    )
    follower_goal_reward: float = Field(
        0.0, description="a follower in formation, when the leader is at the goal"
    )
    goal_distance_weight: float = Field(
        -0.02, description="leader, except at the goal: times its distance to the goal, px"
    )
    progress_weight: float = Field(
        0.0, description="leader: times what it came nearer to the goal, 100 px"
    )
    follower_distance_weight: float = Field(
        -0.005,
        description="times the distance of leader and follower, px: the leader for each follower "
        "out of formation; a follower out of formation, or nearer to the goal than the leader",
    )
    matched_reward: float = Field(
        1.0,
        description="leader for each follower, follower for itself: in formation, its speed within "
        "1 px/step of the leader's (follower: and the leader nearer to the goal)",
    )
    apart_reward: float = Field(
        0.0, description="a follower out of formation; the leader the mean of its followers'"
    )
    spread_weight: float = Field(
        0.0,
        description="times a follower's distance to the leader, 0 up to 25 px and 1 from 125 px; "
        "the leader the mean of its followers'",
    )
    mismatch_weight: float = Field(
        0.0,
        description="a follower in formation: times the difference of speeds, 1 from 10 px/step; "
        "the leader the mean of its followers'",
    )
    speed_weight: float = Field(
        0.0, description="leader: times its speed, 0 at the lowest and 1 at the highest"
    )

    @model_validator(mode="after")
    def _normalise_has_a_meaning(self) -> "Config":
        if self.normalize and self.observation != "reference":
            raise ValueError("normalize is for observation: reference; the other is scaled already")
        return self


class Formation(VectorEnvironment):
    """The leader and its followers in N copies. Buffers are overwritten by every step.

    Actions are (acceleration, turn), both in [-1, 1]. The episode terminates (discount 0) when the
    leader collides or is at the goal, and is truncated (discount 1) after `episode_steps`.

    Metrics (all but the first three are over the rows after FIRST so far; in formation = less than
    50 px from the leader):
        success, collision, timeout: 1 for the cause of the episode's end, else 0.
        formation: share of followers in formation, averaged over rows.
        formation_joined: share of rows in formation, of each follower's rows from its first one
            in formation on; 0 if there are none.
        formation_all: share of rows with all followers in formation.
        steps: number of rows.

    Attributes:
        body: [4, A, N] x, y (px), speed (px/step), heading (rad, in [0, 2 pi)).
        goal: [2, N] x, y, px.
        obstacle: [2, N] x, y, px.
    """

    def __init__(self, config: Config, num_envs: int) -> None:
        """Allocate N copies; each starts with the first `step` that restarts it."""
        n, a = num_envs, 1 + config.num_followers
        self._config, self.num_envs = config, n
        width = (7 if config.observation == "reference" else 18 + 2 * (a - 1)) + config.role
        observations = [ArraySpec("observation", "float32", (width,))]
        if config.state:
            observations.append(ArraySpec(STATE, "float32", (5 * a + 4,), per_agent=False))
        self.spec = EnvSpec(
            name="formation",
            num_agents=a,
            observations=tuple(observations),
            action=Continuous(2),
            metrics=_METRICS,
            max_episode_steps=config.episode_steps,
            agents=("leader", *(f"follower_{i}" for i in range(1, a))),
        )
        self.body = np.zeros((4, a, n), np.float32)
        self._targets = np.zeros((3, 2, n), np.float32)  # goal, obstacle, leader; x, y
        self.goal, self.obstacle = self._targets[0], self._targets[1]
        self._acceleration = _by_role(a, ACCELERATION)
        self._turn = _by_role(a, TURN)
        self._max_speed = _by_role(a, _MAX_SPEED)

        self._control = np.zeros((2, a, n), np.float32)
        self._direction = np.zeros((2, a, n), np.float32)  # where the noses point; y downwards
        self._offset = np.zeros((3, 2, a, n), np.float32)  # goal, obstacle, leader from each agent
        self._distance = np.zeros((3, a, n), np.float32)
        self._square = np.zeros((3, a, n), np.float32)
        self._goal_distance_before = np.zeros(n, np.float32)
        self._near = np.zeros((a - 1, n), np.bool_)  # in formation
        self._joined = np.zeros((a - 1, n), np.bool_)  # in formation, now or before
        self._steps = np.zeros(n, np.int32)
        # Rows: the first two summed over followers, the third with all of them in formation.
        self._counts = np.zeros((3, n), np.int32)  # followers near, those joined, rows all near

        self._rewards = np.zeros((a, n), np.float32)
        self._seen = np.zeros((width, a, n), np.float32)
        if config.role:
            self._seen[-1, 0] = 1
        self._timestep = blank_timestep(self.spec, n)

    def step(
        self, action: Array, restart: NDArray[np.bool_], seeds: NDArray[np.uint64]
    ) -> TimeStep:
        """Advance every copy, then restart each copy that `restart` marks."""
        self._move(action)
        starting = np.flatnonzero(restart)
        if starting.size:
            self._start(starting, seeds[starting])
        self._measure()

        self._steps += 1
        self._steps[starting] = 0
        # The leader alone ends episodes: at the goal, at the obstacle, or when time is over.
        leader_to_goal, leader_to_obstacle = self._distance[0, 0], self._distance[1, 0]
        success = leader_to_goal < np.float32(_GOAL)
        collision = leader_to_obstacle < np.float32(_COLLISION)
        success[starting] = collision[starting] = False
        ended = success | collision
        timeout = (self._steps >= self._config.episode_steps) & ~ended
        timeout[starting] = False
        self._count(starting, success, collision, timeout)
        timestep = self._timestep
        timestep.step_type.fill(StepType.MID)
        timestep.step_type[ended | timeout] = StepType.LAST
        timestep.step_type[starting] = StepType.FIRST
        np.subtract(1, ended, out=timestep.discount, dtype=np.float32)

        self._score(success, collision)
        timestep.reward[:] = self._rewards.T
        timestep.reward[starting] = 0
        if self._config.observation == "reference":
            self._observe_reference()
        else:
            self._observe_formation()
        timestep.observation["observation"][:] = self._seen.transpose(2, 1, 0)
        if self._config.state:
            self._write_state(timestep.observation[STATE])
        return timestep

    def _move(self, action: Array) -> None:
        """Update speed and heading, then the position by the new ones."""
        x, y, speed, heading = self.body
        self._goal_distance_before[:] = self._distance[0, 0]
        np.clip(action.transpose(2, 1, 0), -1, 1, out=self._control)
        accelerate, turn = self._control
        accelerate *= self._acceleration
        speed += accelerate
        np.clip(speed, np.float32(_MIN_SPEED), self._max_speed, out=speed)
        turn *= self._turn
        heading += turn
        heading[heading < 0] += _TWO_PI
        heading[heading >= _TWO_PI] -= _TWO_PI  # also what the line before rounded up to 2 pi
        self._point()
        x += speed * self._direction[0]
        y += speed * self._direction[1]
        for position, low, high in zip((x, y), _LOW, _HIGH, strict=True):
            np.clip(position, np.float32(low), np.float32(high), out=position)

    def _point(self) -> None:
        """Update the directions from the headings."""
        np.cos(self.body[3], out=self._direction[0])
        np.sin(self.body[3], out=self._direction[1])
        np.negative(self._direction[1], out=self._direction[1])

    def _start(self, index: NDArray[np.intp], seeds: NDArray[np.uint64]) -> None:
        """Place the agents, the obstacle and the goal of some copies."""
        a = self.spec.num_agents
        draws = uniform(seeds, 4 * a + 4)  # [4A + 4, n]
        body = draws[: 4 * a].reshape(4, a, -1)
        for row in range(3):
            body[row, 0] = _whole(body[row, 0], _LEADER_START[row])
            body[row, 1:] = _whole(body[row, 1:], _FOLLOWER_START[row])
        body[3] *= _TWO_PI
        self.body[:, :, index] = body
        for axis in range(2):
            self.goal[axis, index] = _whole(draws[4 * a + axis], _GOAL_START[axis])
            self.obstacle[axis, index] = _whole(draws[4 * a + 2 + axis], _OBSTACLE_START[axis])
        self._joined[:, index] = False
        self._point()

    def _measure(self) -> None:
        """Update all offsets and distances to goal, obstacle and leader."""
        self._targets[2] = self.body[:2, 0]
        np.subtract(self._targets[:, :, None], self.body[:2], out=self._offset)
        np.multiply(self._offset[:, 0], self._offset[:, 0], out=self._distance)
        np.multiply(self._offset[:, 1], self._offset[:, 1], out=self._square)
        self._distance += self._square
        np.sqrt(self._distance, out=self._distance)
        np.less(self._distance[2, 1:], np.float32(FORMATION), out=self._near)

    def _score(self, success: NDArray[np.bool_], collision: NDArray[np.bool_]) -> None:
        """Write the rewards of the state just measured, term by term; see Config."""
        c, r = self._config, self._rewards
        x, y = self.body[:2]
        to_goal, to_obstacle = self._distance[:2]
        low, high = np.array(_LOW) + _BORDER, np.array(_HIGH) - _BORDER
        r.fill(c.time_reward)
        if c.border_reward:
            at_border = (x <= low[0]) | (x >= high[0]) | (y <= low[1]) | (y >= high[1])
            r += np.float32(c.border_reward) * at_border
        if c.near_obstacle_reward:
            near_obstacle = to_obstacle < np.float32(_NEAR_OBSTACLE)
            near_obstacle[0] &= ~collision
            r += np.float32(c.near_obstacle_reward) * near_obstacle
        r[0] += np.float32(c.collision_reward) * collision
        if c.goal_reward:
            paid = np.float32(1 - c.goal_formation) + np.float32(
                c.goal_formation
            ) * self._near.mean(axis=0, dtype=np.float32)
            r[0] += np.float32(c.goal_reward) * paid * success
        if c.follower_goal_reward:
            r[1:] += np.float32(c.follower_goal_reward) * (self._near & success)
        if c.goal_distance_weight:
            r[0] += np.float32(c.goal_distance_weight) * to_goal[0] * ~success
        if c.progress_weight:
            progress = self._goal_distance_before - to_goal[0]
            r[0] += np.float32(c.progress_weight / _PROGRESS) * progress
        if c.speed_weight:
            excess = self.body[2, 0] - np.float32(_MIN_SPEED)
            r[0] += np.float32(c.speed_weight / (_MAX_SPEED[0] - _MIN_SPEED)) * excess
        self._score_followers()

    def _score_followers(self) -> None:
        """Add the terms of the followers' distances and speeds relative to the leader."""
        c, near, distance = self._config, self._near, self._distance[2, 1:]
        leader, followers = self._rewards[0], self._rewards[1:]
        difference = np.abs(self.body[2, 1:] - self.body[2, 0])
        if c.follower_distance_weight or c.matched_reward:
            weight, reward = np.float32(c.follower_distance_weight), np.float32(c.matched_reward)
            matched = reward * (difference < np.float32(_SPEED_MATCH))
            apart = weight * distance
            leader += _total(np.where(near, matched, apart))
            behind = near & (self._distance[0, 0] < self._distance[0, 1:])
            followers += np.where(behind, matched, apart)
        if c.apart_reward or c.spread_weight or c.mismatch_weight:
            price = np.clip((distance - np.float32(_CLOSE)) / np.float32(_FAR - _CLOSE), 0, 1)
            price *= np.float32(c.spread_weight)
            price += np.float32(c.apart_reward) * ~near
            mismatch = np.minimum(difference / np.float32(_MISMATCH), 1)
            price += np.float32(c.mismatch_weight) * mismatch * near
            followers += price
            leader += _total(price) / np.float32(c.num_followers)

    def _count(
        self,
        starting: NDArray[np.intp],
        success: NDArray[np.bool_],
        collision: NDArray[np.bool_],
        timeout: NDArray[np.bool_],
    ) -> None:
        """Count rows in formation; write the metrics.

        Args:
            starting: numbers of the copies that begin an episode.
            success: [N] whether the leader is at the goal.
            collision: [N] whether the leader is at the obstacle.
            timeout: [N] whether the episode is cut off.
        """
        # Followers may join on FIRST, which is not counted itself.
        self._joined |= self._near
        near, joined, all_near = self._counts
        near += self._near.sum(axis=0, dtype=np.int32)
        joined += self._joined.sum(axis=0, dtype=np.int32)
        all_near += self._near.all(axis=0)
        self._counts[:, starting] = 0
        m, rows = self._timestep.metrics, np.maximum(self._steps, 1)
        m["success"][:] = success
        m["collision"][:] = collision
        m["timeout"][:] = timeout
        m["formation"][:] = near / (rows * self._config.num_followers)
        m["formation_joined"][:] = near / np.maximum(joined, 1)
        m["formation_all"][:] = all_near / rows
        m["steps"][:] = self._steps

    def _observe_reference(self) -> None:
        """Write [7, A, N]: x, y, speed, heading; then goal and obstacle flag, or the leader."""
        seen, body = self._seen, self.body
        np.multiply(body[:2], np.float32(1 / 1000), out=seen[:2])
        np.multiply(body[2], np.float32(1 / 30), out=seen[2])
        np.multiply(body[3], np.float32(1 / (2 * np.pi)), out=seen[3])
        np.multiply(self.goal, np.float32(1 / 1000), out=seen[4:6, 0])
        np.less(self._distance[1, 0], np.float32(_NEAR_OBSTACLE), out=seen[6, 0], casting="unsafe")
        seen[4:7, 1:] = seen[:3, :1]
        if self._config.normalize:
            for agents, times, plus in zip((slice(1), slice(1, None)), _TIMES, _PLUS, strict=True):
                seen[:7, agents] *= times[:, None, None]
                seen[:7, agents] += plus[:, None, None]

    def _observe_formation(self) -> None:
        """Write [18 + 2n, A, N] of docs/formation.md, relative to the agent: ahead, left."""
        seen, (cos, minus_sin) = self._seen, self._direction
        length, unit_speed = np.float32(1 / _SEEN_LENGTH), np.float32(1 / _SEEN_SPEED)
        for axis in range(2):
            np.subtract(self.body[axis], np.float32(_CENTRE[axis]), out=seen[axis])
            seen[axis] *= np.float32(1 / _HALF[axis])
        np.multiply(self.body[2], unit_speed, out=seen[2])
        seen[3], seen[4] = cos, -minus_sin
        inverse = 1 / np.maximum(self._distance, np.float32(1e-3))
        targets = seen[5:14].reshape(3, 3, *cos.shape)  # by goal, obstacle, leader
        ahead, left = _turned(self._offset[:, 0], self._offset[:, 1], cos, minus_sin)
        np.multiply(ahead, inverse, out=targets[:, 0])
        np.multiply(left, inverse, out=targets[:, 1])
        np.multiply(self._distance, length, out=targets[:, 2])
        # Velocity of the leader, then how many followers are in formation and how far they are.
        velocity = self._direction[:, :1] * (self.body[2, :1] * unit_speed)
        seen[14], seen[15] = _turned(velocity[0], velocity[1], cos, minus_sin)
        seen[16, 0] = self._near.mean(axis=0, dtype=np.float32)
        seen[16, 1:] = self._near
        seen[17] = _total(self._distance[2, 1:]) * (length / np.float32(self._config.num_followers))
        n = self._config.num_followers
        away = (self.body[:2, 1:, None] - self.body[:2, None]) * length  # [2, follower, agent, N]
        followers = seen[18 : 18 + 2 * n].reshape(n, 2, *cos.shape)
        followers[:, 0], followers[:, 1] = _turned(away[0], away[1], cos, minus_sin)

    def _write_state(self, state: Array) -> None:
        """Write [N, 5A + 4]: x, y, speed, cos and sin of each heading; goal, obstacle."""
        n, a = self.num_envs, self.spec.num_agents
        centre = np.array(_CENTRE, np.float32)[:, None]
        scale = np.array(_HALF, np.float32)[:, None]
        bodies = state[:, : 5 * a].reshape(n, a, 5).transpose(2, 1, 0)  # a view
        bodies[:2] = (self.body[:2] - centre[..., None]) / scale[..., None]
        bodies[2] = self.body[2] * np.float32(1 / _SEEN_SPEED)
        bodies[3], bodies[4] = self._direction[0], -self._direction[1]
        for k, place in enumerate((self.goal, self.obstacle)):
            state[:, 5 * a + 2 * k : 5 * a + 2 * k + 2] = ((place - centre) / scale).T

    def render_state(self, index: int) -> Mapping[str, Array]:
        """Return places, px; headings, rad; speeds, px/step; formation flags; bounds; radii, px."""
        return {
            "agents": self.body[:2, :, index].T.copy(),
            "heading": self.body[3, :, index].copy(),
            "speed": self.body[2, :, index].copy(),
            "goal": self.goal[:, index].copy(),
            "obstacle": self.obstacle[:, index].copy(),
            "in_formation": self._near[:, index].astype(np.uint8),
            "area": np.array([_LOW, _HIGH], np.float32),
            "radii": np.array([_GOAL, _COLLISION, _NEAR_OBSTACLE, FORMATION], np.float32),
        }


def _by_role(a: int, values: tuple[float, float]) -> Floats:
    """Return [A, 1]: the leader's value, then the followers'."""
    return np.array([values[0]] + [values[1]] * (a - 1), np.float32)[:, None]


def _whole(draws: Floats, bounds: tuple[int, int]) -> Floats:
    """Map uniform numbers in [0, 1) to whole numbers from low to high, both included."""
    low, high = bounds
    whole: Floats = np.float32(low) + np.floor(draws * np.float32(high - low + 1))
    return whole


def _total(rows: Floats) -> Floats:
    """Sum over the first axis, in its order.

    `rows.sum(axis=0)` adds in another order if there is only one copy, and so rounds differently.
    """
    total: Floats = rows[0].copy()
    for row in rows[1:]:
        total += row
    return total


def _turned(x: Floats, y: Floats, cos: Floats, minus_sin: Floats) -> tuple[Floats, Floats]:
    """Turn an offset (y downwards) into a UAV's frame: distance ahead, distance to its left."""
    return x * cos + y * minus_sin, x * minus_sin - y * cos


make = Formation


class PursuitPolicy:
    """A policy in which the leader waits for its followers, then flies slowly to the goal.

    The leader passes the obstacle along its tangent. Followers steer at the leader's next position
    if it flies straight, and match its speed when they are near. The policy reads the environment,
    so it works with any observation.
    """

    _CLEARANCE = 55.0  # px kept from the obstacle
    _LOOK = 140.0  # px from the obstacle where avoiding it begins
    _CLOSE = 100.0  # px from the obstacle where the leader no longer flies across its front
    _NEAR = 100.0  # px to the leader where followers begin to match its speed

    def __init__(
        self, environment: VectorEnvironment, *, wait: bool = True, slow: bool = True
    ) -> None:
        """Set the leader's behavior.

        Args:
            environment: copies to act for.
            wait: true if the leader flies to the followers until all are in formation.
            slow: true for the leader's lowest speed, false for its highest.
        """
        self._env = cast(Formation, environment)
        self._wait, self._slow = wait, slow

    def act(self, timestep: TimeStep) -> Array:
        """Return the actions, [N, A, 2] float32."""
        x, y, speed, heading = self._env.body
        dx, dy = x[1:] - x[0], y[1:] - y[0]
        apart = np.hypot(dx, dy) >= FORMATION  # [n, N]
        to = self._env.goal - self._env.body[:2, 0]
        if self._wait:
            count = np.maximum(apart.sum(axis=0), 1)
            centre = np.stack([(dx * apart).sum(axis=0), (dy * apart).sum(axis=0)]) / count
            to = np.where(apart.any(axis=0), centre, to)
        bearing = self._around_obstacle(np.arctan2(-to[1], to[0]))

        action = np.zeros((x.shape[1], len(x), 2), np.float32)
        action[:, 0, 0] = -1 if self._slow else 1
        action[:, 0, 1] = np.clip(_wrapped(bearing - heading[0]) / TURN[0], -1, 1)
        ahead_x = dx - speed[0] * np.cos(heading[0])
        ahead_y = dy + speed[0] * np.sin(heading[0])
        pursuit = np.arctan2(ahead_y, -ahead_x)
        match = np.clip((speed[0] - speed[1:]) / ACCELERATION[1], -1, 1)
        action[:, 1:, 0] = np.where(np.hypot(dx, dy) > self._NEAR, 1, match).T
        action[:, 1:, 1] = np.clip(_wrapped(pursuit - heading[1:]) / TURN[1], -1, 1).T
        return action

    def _around_obstacle(self, bearing: Floats) -> Floats:
        """Return the bearings [N], rad, nearest to the wanted ones that avoid the obstacle."""
        dx, dy = self._env.obstacle - self._env.body[:2, 0]
        distance = np.hypot(dx, dy)
        to_obstacle = np.arctan2(-dy, dx)
        tangent = np.arcsin(np.minimum(self._CLEARANCE / np.maximum(distance, 1e-3), 1))
        tangent = np.where(distance < self._CLEARANCE, np.pi / 2 + 0.4, tangent)
        wanted = _wrapped(bearing - to_obstacle)
        flown = _wrapped(self._env.body[3, 0] - to_obstacle)
        # So near that it must turn at once, it turns to the side to which it flies already.
        side = np.where((distance < self._CLOSE) & (np.abs(flown) < tangent), flown, wanted)
        blocked = (distance < self._LOOK) & (np.abs(side) < tangent)
        clear: Floats = np.where(
            blocked, to_obstacle + np.where(side < 0, -tangent, tangent), bearing
        )
        return clear


def _wrapped(angle: Floats) -> Floats:
    """Wrap an angle to [-pi, pi)."""
    wrapped: Floats = np.mod(angle + np.pi, 2 * np.pi) - np.pi
    return wrapped


def hasty_pursuit(environment: VectorEnvironment) -> ScriptedPolicy:
    """Make a pursuit policy in which the leader flies to the goal at full speed, no waiting."""
    return PursuitPolicy(environment, wait=False, slow=False)


BASELINES: dict[str, BaselineFactory] = {
    "random": RandomPolicy,
    "pursuit": PursuitPolicy,
    "hasty-pursuit": hasty_pursuit,
}

"""Agents cover landmarks together: the environment plug-in `spread`.

Cooperative navigation, the `simple_spread_v3` of the multi-agent particle environments (Lowe et al.
2017, "Multi-Agent Actor-Critic for Mixed Cooperative-Competitive Environments", arXiv:1706.02275;
mpe2), for N copies at once, where agents pay for bumping into each other. Positions are meters in a
square of side 2, a step lasts 0.1 s. Agents are discs of radius 0.15 m and mass 1 kg with a double
integrator's dynamics; overlapping discs push each other away.

Everything is held with the copies last, [.., N], so that every operation runs along contiguous
memory; only what is returned is turned to [N, A, ...].
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import permutations

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from murmur.env_service.environment import (
    BaselineFactory,
    RandomPolicy,
    VectorEnvironment,
    blank_timestep,
)
from murmur.shared.config import Section
from murmur.shared.wire.seeding import uniform
from murmur.shared.wire.spec import STATE, ArraySpec, Continuous, Discrete, EnvSpec
from murmur.shared.wire.timestep import Array, StepType, TimeStep

Floats = NDArray[np.float32]

_DT = 0.1  # s
_DAMPING = 0.25  # share of the velocity lost in a step
_THRUST = 5.0  # N, force of a full action
_RADIUS = 0.15  # m
_CONTACT = np.float32(2 * _RADIUS)  # m, distance of two agents that touch
_STIFFNESS = 100.0  # N/m
_MARGIN = 1e-3  # m, how soft the contact is
_REACH = np.float32(2 * _RADIUS + 20 * _MARGIN)  # m, beyond it the contact force is below 2e-10 N
_COVERED = np.float32(0.1)  # m, a landmark with an agent so near is occupied
# noop, left, right, down, up: force along x and y.
_DIRECTIONS = np.array([[0, -1, 1, 0, 0], [0, 0, 0, -1, 1]], np.float32)
# What a step multiplies by and compares with, made once: at a hundred copies a step costs as many
# microseconds as it calls NumPy times, so reductions go by the ufunc itself as well.
_KICK = np.float32(_THRUST * _DT)  # m/s, velocity gained by a full action in a step, by mass 1
_KICKS = _DIRECTIONS * _KICK
_STEP_S, _KEPT, _HALF = np.float32(_DT), np.float32(1 - _DAMPING), np.float32(0.5)


class Config(Section):
    """Options of `spread`."""

    num_agents: int = Field(3, ge=1, description="agents, and as many landmarks")
    continuous: bool = Field(
        False, description="a 2-D force in [-1, 1] instead of noop, left, right, down, up"
    )
    episode_steps: int = Field(25, ge=1, description="decisions in an episode")
    local_ratio: float = Field(
        0.5, ge=0, le=1, description="weight of an agent's own collisions against the team's cover"
    )
    state: bool = Field(False, description="also give all agents' observations as one state")


class Spread(VectorEnvironment):
    """Cooperative navigation in N copies. Buffers are overwritten by every step.

    Observation of an agent, float32: its velocity (2), its position (2), the landmarks relative to
    it (2n), the other agents relative to it (2(n-1)), 2(n-1) zeros where mpe2 has its unused
    communication. Reward of an agent: local_ratio * -(agents it touches) + (1 - local_ratio) *
    -(sum over landmarks of the distance to the nearest agent). An episode ends by truncation.

    Metrics:
        return: rewards of the episode, summed over agents.
        collisions: pairs of agents in contact, summed over the episode's steps.
        occupied: landmarks with an agent within 0.1 m after the last step.
    """

    def __init__(self, config: Config, num_envs: int) -> None:
        """Allocate N copies; each starts with the first `step` that restarts it."""
        n, a = num_envs, config.num_agents
        self._config, self.num_envs = config, n
        width = 4 + 2 * a + 4 * (a - 1)
        observations = [ArraySpec("observation", "float32", (width,))]
        if config.state:
            observations.append(ArraySpec(STATE, "float32", (a * width,), per_agent=False))
        self.spec = EnvSpec(
            name="spread",
            num_agents=a,
            observations=tuple(observations),
            action=Continuous(2) if config.continuous else Discrete(5),
            metrics=("return", "collisions", "occupied"),
            max_episode_steps=config.episode_steps,
        )
        # Rows: velocities [2, A], then positions of agents and landmarks [2, 2A]; x before y.
        self._rows = np.zeros((6 * a, n), np.float32)
        self._velocity = self._rows[: 2 * a].reshape(2, a, n)
        self._entities = self._rows[2 * a :].reshape(2, 2 * a, n)
        self._position = self._entities[:, :a]
        self._from_rows = _observation_matrix(a, width)

        # By (x or y), entity, agent: the entity's place as the agent sees it, m.
        self._offset = np.zeros((2, 2 * a, a, n), np.float32)
        self._square = np.zeros((2, 2 * a, a, n), np.float32)
        self._distance = np.zeros((2 * a, a, n), np.float32)
        self._not_self = np.where(np.eye(2 * a, a), np.float32(1e6), np.float32(0))[..., None]
        self._push = np.zeros((a, a, n), np.float32)  # contact force over distance, N/m
        self._pushes = np.zeros((2, a, a, n), np.float32)
        self._nearest = np.zeros((a, n), np.float32)
        self._thrust = np.zeros((2, a, n), np.float32)
        self._moved = np.zeros((2, a, n), np.float32)

        self._steps = np.zeros(n, np.int32)
        timestep = blank_timestep(self.spec, n)
        self._reward, self._step_type = timestep.reward, timestep.step_type
        self._metrics = timestep.metrics
        self._seen = timestep.observation["observation"].reshape(n, a * width)  # a view
        own = {STATE: self._seen} if config.state else {}
        self._timestep = replace(timestep, observation={**timestep.observation, **own})

    def step(
        self, action: Array, restart: NDArray[np.bool_], seeds: NDArray[np.uint64]
    ) -> TimeStep:
        """Advance every copy, then restart each copy that `restart` marks."""
        self._move(action)
        (starting,) = restart.nonzero()
        if starting.size:
            self._start(starting, seeds[starting])
        self._measure()
        self._steps += 1
        self._step_type.fill(StepType.MID)
        self._step_type[self._steps >= self._config.episode_steps] = StepType.LAST
        self._score()
        if starting.size:
            self._steps[starting] = 0
            self._step_type[starting] = StepType.FIRST
            self._reward[starting] = 0
            for metric in ("return", "collisions"):
                self._metrics[metric][starting] = 0
        np.matmul(self._rows.T, self._from_rows, out=self._seen)
        return self._timestep

    def _move(self, action: Array) -> None:
        """Step the double integrator in mpe2's order: position first, velocity after."""
        if self._config.continuous:
            np.clip(action.transpose(2, 1, 0), -1, 1, out=self._thrust)
            self._thrust *= _KICK
        else:
            _KICKS.take(np.asarray(action.T, np.int32), axis=1, out=self._thrust)
        self._add_contact()
        np.multiply(self._velocity, _STEP_S, out=self._moved)
        self._position += self._moved
        self._velocity *= _KEPT
        self._velocity += self._thrust

    def _add_contact(self) -> None:
        """Add the push of every touching pair to the thrust.

        The force is stiffness * margin * softplus((contact - distance) / margin), away from the
        other; computed only where it is not negligible, which is in few pairs.
        """
        a = self._config.num_agents
        distance, push = self._distance[:a].reshape(-1), self._push.reshape(-1)  # views
        (near,) = (distance < _REACH).nonzero()
        if not near.size:
            return
        d = np.maximum(distance[near], np.float32(1e-9))
        depth = np.logaddexp(0, (_CONTACT - d) / np.float32(_MARGIN))
        push[near] = np.float32(-_STIFFNESS * _MARGIN * _DT) * depth / d
        np.multiply(self._offset[:, :a], self._push, out=self._pushes)
        np.add.reduce(self._pushes, axis=1, out=self._moved)
        self._thrust += self._moved
        push[near] = 0

    def _start(self, index: NDArray[np.intp], seeds: NDArray[np.uint64]) -> None:
        """Scatter the agents and landmarks of some copies over the square, at rest."""
        self._velocity[..., index] = 0
        draws = uniform(seeds, self._entities.shape[0] * self._entities.shape[1])  # [4A, n]
        self._entities[..., index] = (2 * draws - 1).reshape(*self._entities.shape[:2], -1)

    def _measure(self) -> None:
        """Update offsets and distances of agents to agents and landmarks; to oneself: 1 km."""
        np.subtract(self._entities[:, :, None], self._position[:, None], out=self._offset)
        np.multiply(self._offset, self._offset, out=self._square)
        np.add(self._square[0], self._square[1], out=self._distance)
        self._distance += self._not_self
        np.sqrt(self._distance, out=self._distance)

    def _score(self) -> None:
        """Write rewards and metrics of the positions just measured, ignoring restarts."""
        a, ratio = self._config.num_agents, np.float32(self._config.local_ratio)
        np.minimum.reduce(self._distance[a:], axis=1, out=self._nearest)  # [L, N]
        touching = np.add.reduce(self._distance[:a] < _CONTACT, axis=0, dtype=np.float32)
        cover = np.add.reduce(self._nearest, axis=0)  # [N]
        np.add(ratio * touching.T, ((1 - ratio) * cover)[:, None], out=self._reward)
        np.negative(self._reward, out=self._reward)
        self._metrics["return"] += np.add.reduce(self._reward, axis=1)
        self._metrics["collisions"] += np.add.reduce(touching, axis=0) * _HALF
        np.add.reduce(
            self._nearest < _COVERED, axis=0, dtype=np.float32, out=self._metrics["occupied"]
        )

    def render_state(self, index: int) -> Mapping[str, Array]:
        """Return positions of agents and landmarks, m, [A, 2] each, and the agents' radius, m."""
        a = self._config.num_agents
        return {
            "agents": self._position[:, :, index].T.copy(),
            "landmarks": self._entities[:, a:, index].T.copy(),
            "radius": np.array(_RADIUS, np.float32),
        }


def _observation_matrix(a: int, width: int) -> Floats:
    """Return the matrix [6A, A*F] from the state to all agents' observations.

    Every observed number is a row of the state, or the difference of two, so one matrix product
    writes all observations. It is exact: each sum has at most two nonzero terms.
    """
    matrix = np.zeros((6 * a, a, width), np.float32)
    for me in range(a):
        for axis in range(2):
            velocity, entities = axis * a, 2 * a + axis * 2 * a
            matrix[velocity + me, me, axis] = 1
            matrix[entities + me, me, 2 + axis] = 1
            others = [a + landmark for landmark in range(a)] + [o for o in range(a) if o != me]
            for i, other in enumerate(others):
                matrix[entities + other, me, 4 + 2 * i + axis] = 1
                matrix[entities + me, me, 4 + 2 * i + axis] = -1
    return matrix.reshape(6 * a, a * width)


class AssignmentPolicy:
    """A policy in which each agent flies to its own landmark by PD control.

    The landmarks are assigned at the episode's start to minimize the sum of distances: over all
    permutations up to 6 agents, beyond that greedily, nearest pair first.
    """

    _HORIZON = 0.15  # s, the velocity aimed at would cover what is left in this time

    def __init__(self, environment: VectorEnvironment) -> None:
        """Keep the spec of the environment."""
        self._spec = environment.spec
        self._target = np.zeros((environment.num_envs, self._spec.num_agents), np.intp)

    def act(self, timestep: TimeStep) -> Array:
        """Return the actions that bring each agent's velocity nearest to its aim."""
        observed = np.asarray(timestep.observation["observation"], np.float32)
        n, a = self._target.shape
        velocity, landmarks = observed[..., :2], observed[..., 4 : 4 + 2 * a].reshape(n, a, a, 2)
        starting = np.flatnonzero(timestep.step_type == StepType.FIRST)
        if starting.size:
            self._target[starting] = _assign(np.linalg.norm(landmarks[starting], axis=-1))
        offset = np.take_along_axis(landmarks, self._target[:, :, None, None], axis=2)[:, :, 0]
        aim = (offset - _DT * velocity) / self._HORIZON  # the step moves by the old velocity first
        force = (aim - (1 - _DAMPING) * velocity) / (_THRUST * _DT)  # [N, A, 2], 1 = full thrust
        if not isinstance(self._spec.action, Discrete):
            clipped: Floats = np.clip(force, -1, 1)
            return clipped
        misses = np.square(force[..., None] - _DIRECTIONS).sum(axis=-2)  # [N, A, 5]
        action: NDArray[np.int32] = misses.argmin(axis=-1).astype(np.int32)
        return action


def _assign(distance: Floats) -> NDArray[np.intp]:
    """Assign a landmark to each agent: distances [n, A, L] -> landmarks [n, A]."""
    n, a, _ = distance.shape
    if a <= 6:
        orders = np.array(list(permutations(range(a))))  # [P, A]
        cost = distance[:, np.arange(a), orders].sum(axis=-1)  # [n, P]
        best: NDArray[np.intp] = orders[cost.argmin(axis=1)]
        return best
    target = np.zeros((n, a), np.intp)
    left, copies = distance.astype(np.float64), np.arange(n)
    for _ in range(a):
        agent, landmark = np.divmod(left.reshape(n, -1).argmin(axis=1), a)
        target[copies, agent] = landmark
        left[copies, agent] = np.inf
        left[copies, :, landmark] = np.inf
    return target


make = Spread


BASELINES: dict[str, BaselineFactory] = {"random": RandomPolicy, "assignment": AssignmentPolicy}

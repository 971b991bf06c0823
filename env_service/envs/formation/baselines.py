"""Scripted policies of `formation`, which read the environment's state."""

from typing import cast

import numpy as np
from numpy.typing import NDArray

from env_service.environment import (
    BaselineFactory,
    RandomPolicy,
    ScriptedPolicy,
    VectorEnvironment,
)
from env_service.envs.formation.environment import ACCELERATION, FORMATION, TURN, Formation
from shared.wire.timestep import Array, TimeStep

Floats = NDArray[np.float32]


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

"""Formation by hand, and against a plain second implementation."""

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from murmur.env_service.checks import assert_environment
from murmur.env_service.environment import ScriptedPolicy
from murmur.env_service.envs.formation import BASELINES, Config, Formation, PursuitPolicy, make
from murmur.shared.config.files import load
from murmur.shared.config.section import validate
from murmur.shared.process.errors import ConfigError
from murmur.shared.wire.timestep import StepType, TimeStep

NOTHING: dict[str, Any] = dict.fromkeys(
    (
        "time_reward",
        "border_reward",
        "near_obstacle_reward",
        "collision_reward",
        "goal_reward",
        "goal_distance_weight",
        "follower_distance_weight",
        "matched_reward",
    ),
    0.0,
)


def learnable(**options: Any) -> Config:
    """The options of configs/formation.yaml."""
    return validate(Config, {**load("formation", environ={}).environment.options, **options})


def reset(environment: Formation, first_seed: int = 0) -> TimeStep:
    n = environment.num_envs
    return environment.reset(np.arange(first_seed, first_seed + n, dtype=np.uint64))


def advance(environment: Formation, action: Any = None) -> TimeStep:
    n, a = environment.num_envs, environment.spec.num_agents
    array = np.zeros((n, a, 2), np.float32) if action is None else np.asarray(action, np.float32)
    return environment.step(array, np.zeros(n, np.bool_), np.zeros(n, np.uint64))


def placed(
    config: Config,
    *agents: tuple[float, float, float, float],
    goal: tuple[float, float] = (400, 160),
    obstacle: tuple[float, float] = (350, 440),
) -> Formation:
    """One copy with its agents at (x, y, speed, heading) given."""
    environment = make(config, 1)
    reset(environment)
    environment.body[:, :, 0] = np.array(agents, np.float32).T
    environment.goal[:, 0], environment.obstacle[:, 0] = goal, obstacle
    environment._measure()
    return environment


class Plain:
    """One copy in float64, agent by agent, with numbers where the environment has names."""

    def __init__(self, environment: Formation, i: int, config: Config) -> None:
        """Take over the state of copy i."""
        self.agents = environment.body[:, :, i].T.astype(float).tolist()
        self.goal = environment.goal[:, i].astype(float).tolist()
        self.obstacle = environment.obstacle[:, i].astype(float).tolist()
        self.config = config
        self.goal_distance = self.to(self.goal)

    def to(self, place: list[float], agent: int = 0) -> float:
        return math.dist(self.agents[agent][:2], place)

    def step(self, action: NDArray[np.float32]) -> None:
        self.goal_distance = self.to(self.goal)
        for k, (agent, (a, phi)) in enumerate(zip(self.agents, action.tolist(), strict=True)):
            a, phi = max(-1.0, min(1.0, a)), max(-1.0, min(1.0, phi))
            acceleration, turn, top = (0.6, 1.2, 40.0) if k else (0.3, 0.6, 20.0)
            speed = max(10.0, min(top, agent[2] + acceleration * a))
            heading = (agent[3] + turn * phi) % (2 * math.pi)
            x = max(50.0, min(750.0, agent[0] + speed * math.cos(heading)))
            y = max(50.0, min(650.0, agent[1] - speed * math.sin(heading)))
            agent[:] = [x, y, speed, heading]

    def followers(self) -> list[tuple[float, float, float]]:
        """Of each follower: distance to the leader, difference of speeds, distance to the goal."""
        leader, *others = self.agents
        return [
            (self.to(f[:2]), abs(f[2] - leader[2]), self.to(self.goal, k))
            for k, f in enumerate(others, 1)
        ]

    def rewards(self) -> list[float]:
        c, followers = self.config, self.followers()
        goal_distance, obstacle_distance = self.to(self.goal), self.to(self.obstacle)
        success, collision = goal_distance < 40, obstacle_distance < 20
        rewards = []
        for k, (x, y, _, _) in enumerate(self.agents):
            r = c.time_reward
            if x <= 100 or x >= 700 or y <= 100 or y >= 600:
                r += c.border_reward
            if self.to(self.obstacle, k) < 40 and not (k == 0 and collision):
                r += c.near_obstacle_reward
            rewards.append(r)
        if collision:
            rewards[0] += c.collision_reward
        if success:
            share = sum(d < 50 for d, _, _ in followers) / len(followers)
            rewards[0] += c.goal_reward * (1 - c.goal_formation + c.goal_formation * share)
        else:
            rewards[0] += c.goal_distance_weight * goal_distance
        rewards[0] += c.progress_weight * (self.goal_distance - goal_distance) / 100
        rewards[0] += c.speed_weight * (self.agents[0][2] - 10) / 10
        for k, (d, dv, follower_goal_distance) in enumerate(followers, 1):
            if d < 50:
                rewards[0] += c.matched_reward if dv < 1 else 0
            else:
                rewards[0] += c.follower_distance_weight * d
            if d < 50 and goal_distance < follower_goal_distance:
                rewards[k] += c.matched_reward if dv < 1 else 0
            else:
                rewards[k] += c.follower_distance_weight * d
            price = c.spread_weight * min(max((d - 25) / 100, 0), 1)
            price += c.mismatch_weight * min(dv / 10, 1) if d < 50 else c.apart_reward
            rewards[k] += price
            rewards[0] += price / len(followers)
            if success and d < 50:
                rewards[k] += c.follower_goal_reward
        return rewards

    def observation(self, k: int) -> list[float]:
        x, y, speed, heading = self.agents[k]
        leader = self.agents[0]
        if self.config.observation == "reference":
            seen = [x / 1000, y / 1000, speed / 30, heading / (2 * math.pi)]
            if k == 0:
                seen += [self.goal[0] / 1000, self.goal[1] / 1000, self.to(self.obstacle) < 40]
            else:
                seen += [leader[0] / 1000, leader[1] / 1000, leader[2] / 30]
        else:
            seen = [(x - 400) / 350, (y - 350) / 300, speed / 20, math.cos(heading)]
            seen.append(math.sin(heading))

            def turned(dx: float, up: float) -> tuple[float, float]:
                """An offset as complex number, turned so that the nose is the real axis."""
                z = complex(dx, up) * complex(math.cos(heading), -math.sin(heading))
                return z.real, z.imag

            for px, py in (self.goal, self.obstacle, leader[:2]):
                d = math.dist((x, y), (px, py))
                ahead, left = turned(px - x, y - py)
                seen += [ahead / max(d, 1e-3), left / max(d, 1e-3), d / 200]
            vx, vy = leader[2] * math.cos(leader[3]), leader[2] * math.sin(leader[3])
            seen += [v / 20 for v in turned(vx, vy)]
            distances = [d for d, _, _ in self.followers()]
            near = [float(d < 50) for d in distances]
            seen.append(sum(near) / len(near) if k == 0 else near[k - 1])
            seen.append(sum(distances) / len(distances) / 200)
            for fx, fy, _, _ in self.agents[1:]:
                seen += [v / 200 for v in turned(fx - x, y - fy)]
        return [*map(float, seen), *([float(k == 0)] if self.config.role else [])]


@pytest.mark.parametrize("num_followers", [1, 2, 4, 16])
@pytest.mark.parametrize("kind", ["reference", "formation"])
def test_equals_the_plain_implementation(num_followers: int, kind: str) -> None:
    n, a = 6, 1 + num_followers
    config = (
        Config(num_followers=num_followers, goal_formation=0.25)
        if kind == "reference"
        else learnable(num_followers=num_followers, matched_reward=0.5)
    )
    environment = make(config, n)
    pursuit, random = PursuitPolicy(environment), np.random.default_rng(num_followers)
    timestep = reset(environment, 100)
    ended = 0
    for row in range(60):
        action = random.uniform(-1.5, 1.5, (n, a, 2)).astype(np.float32)
        if row > 8:  # else few episodes would end, and hardly a follower would be near
            action[::2] = np.asarray(pursuit.act(timestep))[::2]
        plain = [Plain(environment, i, config) for i in range(n)]
        restart = timestep.step_type == StepType.LAST
        timestep = environment.step(action, restart, np.full(n, 300 + row, np.uint64))
        for i in np.flatnonzero(~restart):
            plain[i].step(action[i])
            np.testing.assert_allclose(environment.body[:3, :, i].T, _rows(plain[i], 3), atol=1e-3)
            turned = environment.body[3, :, i] - np.array(_rows(plain[i], 4))[:, 3]
            np.testing.assert_allclose(np.cos(turned), 1, atol=1e-5)
            assert timestep.reward[i].tolist() == pytest.approx(plain[i].rewards(), abs=2e-3)
            seen = np.array(timestep.observation["observation"][i])
            wanted = np.array([plain[i].observation(k) for k in range(a)])
            if kind == "formation":  # directions of what is next to an agent: to the rounding of
                for both in (seen, wanted):  # places, so compare direction times distance
                    for column in (5, 8, 11):
                        both[:, column : column + 2] *= both[:, column + 2 : column + 3]
            np.testing.assert_allclose(seen, wanted, atol=2e-5)
            terminated = plain[i].to(plain[i].goal) < 40 or plain[i].to(plain[i].obstacle) < 20
            assert timestep.discount[i] == (0 if terminated else 1)
            assert (timestep.step_type[i] == StepType.LAST) == terminated
            ended += terminated
    assert ended >= 3


def _rows(plain: Plain, count: int) -> list[list[float]]:
    return [agent[:count] for agent in plain.agents]


def test_motion_by_hand() -> None:
    environment = placed(Config(num_followers=1), (400, 500, 15, 0), (500, 500, 20, math.pi / 2))
    advance(environment, [[[1, 0], [-1, 0]]])
    # Leader: 15 + 0.3, to the right. Follower: 20 - 0.6, up, which is towards smaller y.
    np.testing.assert_allclose(environment.body[:3, 0, 0], [415.3, 500, 15.3], rtol=1e-6)
    np.testing.assert_allclose(environment.body[:3, 1, 0], [500, 480.6, 19.4], rtol=1e-6)
    advance(environment, [[[0, 1], [0, 0.5]]])
    # Both turn by 0.6 rad to the left, and fly along the new heading.
    np.testing.assert_allclose(environment.body[3, :, 0], [0.6, math.pi / 2 + 0.6], rtol=1e-6)
    wanted = [415.3 + 15.3 * math.cos(0.6), 500 - 15.3 * math.sin(0.6)]
    np.testing.assert_allclose(environment.body[:2, 0, 0], wanted, rtol=1e-6)


def test_speeds_actions_and_positions_are_clipped() -> None:
    environment = placed(Config(num_followers=1), (745, 55, 19.9, 0), (60, 640, 39.9, 4.0))
    advance(environment, [[[9, 0], [9, 0]]])  # 9 counts as 1
    np.testing.assert_allclose(environment.body[:3, :, 0], [[750, 50], [55, 650], [20, 40]])
    environment = placed(Config(num_followers=1), (400, 300, 10.1, 0), (400, 300, 10.5, 0))
    advance(environment, [[[-1, -5], [-1, 0]]])
    assert environment.body[2, :, 0].tolist() == [10, 10]
    np.testing.assert_allclose(environment.body[3, 0, 0], 2 * math.pi - 0.6, rtol=1e-6)


def test_heading_stays_in_the_circle() -> None:
    below = float(np.nextafter(np.float32(2 * np.pi), np.float32(0)))
    environment = placed(Config(num_followers=2), (400, 300, 10, 6.0), *[(400, 300, 10, below)] * 2)
    tiny = 1e-9  # less than zero by so little that one turn more rounds to a whole one
    environment.body[3, 1, 0] = 0
    advance(environment, [[[0, 1], [0, -tiny], [0, 1]]])
    wanted = [6.6 - 2 * math.pi, 0, 1.2]
    np.testing.assert_allclose(environment.body[3, :, 0], wanted, atol=1e-6)
    random = np.random.default_rng(0)
    environment = make(Config(num_followers=4), 50)
    reset(environment)
    for _ in range(50):
        advance(environment, random.uniform(-1, 1, (50, 5, 2)))
        heading = environment.body[3]
        assert ((heading >= 0) & (heading < np.float32(2 * np.pi))).all()


def test_start_is_as_published() -> None:
    environment = make(Config(num_followers=3), 4000)
    timestep = reset(environment)
    x, y, speed, heading = environment.body
    for values, low, high in (
        (x[0], 300, 400),
        (x[1:], 400, 500),
        (y, 500, 550),
        (speed[0], 10, 20),
        (speed[1:], 20, 30),
        (environment.goal[0], 300, 500),
        (environment.goal[1], 150, 200),
        (environment.obstacle[0], 350, 350),
        (environment.obstacle[1], 400, 450),
    ):
        assert (values == np.floor(values)).all()
        assert (values.min(), values.max()) == (low, high)
        assert values.mean() == pytest.approx((low + high) / 2, rel=0.02)
    assert heading.min() >= 0
    assert heading.max() < 2 * np.pi
    assert heading.mean() == pytest.approx(np.pi, rel=0.02)
    assert not timestep.reward.any()
    assert (timestep.discount == 1).all()


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        # Leader (400, 300) flies right at 10 to (410, 300), 100 from the goal at (510, 300). The
        # first follower ends at (410, 330): 30 away, as fast. The second at (410, 500): 200 away,
        # 5 faster.
        ({"time_reward": -0.2}, [-0.2, -0.2, -0.2]),
        ({"goal_distance_weight": -0.02}, [-2.0, 0, 0]),
        ({"progress_weight": 2.0}, [0.2, 0, 0]),
        ({"follower_distance_weight": -0.005}, [-1.0, 0, -1.0]),
        ({"matched_reward": 1.0}, [1.0, 1.0, 0]),
        ({"apart_reward": -1.0}, [-0.5, 0, -1.0]),
        ({"spread_weight": -1.0}, [-0.525, -0.05, -1.0]),  # (30 - 25) / 100; at most 1
        ({"mismatch_weight": -1.0}, [0, 0, 0]),  # only counts in formation
        ({"speed_weight": -1.0}, [0, 0, 0]),
        ({"border_reward": -1.0, "near_obstacle_reward": -2.0}, [0, 0, 0]),
    ],
)
def test_rewards_by_hand(options: dict[str, float], wanted: list[float]) -> None:
    environment = placed(
        Config(**{**NOTHING, **options}),
        (400, 300, 10, 0),
        (400, 330, 10, 0),
        (395, 500, 15, 0),
        goal=(510, 300),
    )
    assert advance(environment).reward[0].tolist() == pytest.approx(wanted, abs=1e-5)


def test_speed_terms_by_hand() -> None:
    agents = ((400, 300, 16, 0.0), (400, 330, 14, 0.0), (400, 310, 36, 0.0))
    environment = placed(
        Config(**{**NOTHING, "mismatch_weight": -1.0, "speed_weight": -1.0}), *agents
    )
    # Differences of 2 and 20 px/step: 0.2 and 1. The leader: their mean 0.6, and 6/10 of its range.
    assert advance(environment).reward[0].tolist() == pytest.approx([-1.2, -0.2, -1.0])


def test_a_follower_ahead_of_the_leader_pays_for_its_distance() -> None:
    weights = {"matched_reward": 1.0, "follower_distance_weight": -0.005}
    environment = placed(
        Config(num_followers=1, **{**NOTHING, **weights}),
        (400, 300, 10, 0.0),
        (440, 300, 10, 0.0),
        goal=(600, 300),
    )
    assert advance(environment).reward[0].tolist() == pytest.approx([1.0, -0.2])


def test_border_and_obstacle_by_hand() -> None:
    weights = {"border_reward": -1.0, "near_obstacle_reward": -2.0, "collision_reward": -500.0}
    config = Config(**{**NOTHING, **weights})
    environment = placed(config, (700, 300, 10, 0.0), (340, 420, 10, 0.0), (350, 580, 20, 4.8))
    timestep = advance(environment)  # follower 1 is over the obstacle, which does it no harm
    assert timestep.reward[0].tolist() == [-1, -2, 0]
    assert timestep.step_type[0] == StepType.MID
    environment = placed(
        config, (310, 440, 10, 0.0), (90, 90, 10, 0.0), (400, 590, 10, 3 * np.pi / 2)
    )
    timestep = advance(environment)  # the leader 30 from the obstacle
    assert timestep.reward[0].tolist() == [-2, -1, -1]
    timestep = advance(environment)  # then 20: not yet less
    assert timestep.reward[0].tolist() == [-2, -1, -1]
    timestep = advance(environment)
    assert timestep.reward[0].tolist() == [-500, -1, -1]
    # A follower near the obstacle pays for it, whether the leader collides or not.
    environment = placed(config, (325, 440, 10, 0.0), (340, 420, 10, 0.0), (500, 300, 10, 0.0))
    assert advance(environment).reward[0].tolist() == [-500, -2, 0]
    # As near as 50 px to the area's edge is near: at x = 100, at y = 100, and not 1 px beyond.
    up = np.pi / 2
    for agents, wanted in (
        (((500, 300, 10, 0.0), (90, 300, 10, 0.0), (500, 110, 10, up)), [0, -1, -1]),
        (((500, 300, 10, 0.0), (91, 300, 10, 0.0), (500, 111, 10, up)), [0, 0, 0]),
    ):
        assert advance(placed(config, *agents)).reward[0].tolist() == wanted


def test_reaching_the_goal() -> None:
    agents = ((400, 300, 10, 0.0), (400, 330, 10, 0.0), (400, 500, 10, 0.0))
    weights = {"goal_reward": 10.0, "goal_distance_weight": -1.0, "goal_formation": 0.5}
    environment = placed(
        Config(**{**NOTHING, **weights}, follower_goal_reward=2.0), *agents, goal=(445, 300)
    )
    timestep = advance(environment)
    # 35 from the goal: no price of distance; half of 10, and half of the other half.
    assert timestep.reward[0].tolist() == [7.5, 2, 0]
    assert timestep.step_type[0] == StepType.LAST
    assert timestep.discount[0] == 0
    metrics = {name: float(value[0]) for name, value in timestep.metrics.items()}
    assert metrics == {
        "success": 1,
        "collision": 0,
        "timeout": 0,
        "formation": 0.5,
        "formation_joined": 1,
        "formation_all": 0,
        "steps": 1,
    }


def test_collision_ends_and_timeout_cuts_off() -> None:
    environment = placed(Config(num_followers=1), (325, 440, 10, 0.0), (600, 300, 10, 0.0))
    timestep = advance(environment)
    assert (timestep.step_type[0], timestep.discount[0]) == (StepType.LAST, 0)
    assert timestep.metrics["collision"][0] == 1
    assert timestep.metrics["formation_joined"][0] == 0

    environment = make(Config(num_followers=1, episode_steps=3), 1)
    reset(environment)
    kinds = [int(advance(environment, [[[0, 1], [0, 1]]]).step_type[0]) for _ in range(3)]
    assert kinds == [StepType.MID, StepType.MID, StepType.LAST]
    timestep = advance(placed(Config(num_followers=1, episode_steps=1), *[(400, 300, 10, 0)] * 2))
    assert (timestep.step_type[0], timestep.discount[0]) == (StepType.LAST, 1)
    assert timestep.metrics["timeout"][0] == 1
    at_both = placed(Config(num_followers=1, episode_steps=1), *[(325, 440, 10, 0.0)] * 2)
    timestep = advance(at_both)  # a collision in the very step that would be the last
    assert (timestep.step_type[0], timestep.discount[0]) == (StepType.LAST, 0)
    assert (timestep.metrics["collision"][0], timestep.metrics["timeout"][0]) == (1, 0)


def test_formation_metrics_by_hand() -> None:
    # The leader circles; what counts is where the followers are put before each step.
    environment = placed(Config(episode_steps=5), *[(400, 300, 10, 0.0)] * 3)
    environment.body[0, 1:, 0] = 600
    environment._joined[:] = False
    near = [(0, 0), (1, 0), (1, 1), (0, 1), (1, 0)]
    for row in near:
        leader = environment.body[:, 0, 0].copy()
        for k, is_near in enumerate(row, 1):
            environment.body[:, k, 0] = leader + np.array([0, 0 if is_near else 250, 0, 0])
        timestep = advance(environment, [[[0, 1], [0, 0], [0, 0]]])
    # 5 of 10; from the second row on for the first, from the third for the second: 5 of 4 + 3;
    # all in formation once in 5 rows.
    assert timestep.step_type[0] == StepType.LAST
    assert timestep.metrics["formation"][0] == pytest.approx(0.5)
    assert timestep.metrics["formation_joined"][0] == pytest.approx(5 / 7)
    assert timestep.metrics["formation_all"][0] == pytest.approx(0.2)
    assert timestep.metrics["steps"][0] == 5
    timestep = reset(environment)
    assert not any(value.any() for value in timestep.metrics.values())


def test_formation_metrics_begin_anew_with_the_episode() -> None:
    environment = make(Config(num_followers=1), 200)
    reset(environment)
    environment.body[:, 1] = environment.body[:, 0]
    advance(environment)  # all are in formation
    reset(environment, 1)
    at_start = environment._near[0].copy()  # row FIRST, which does not count
    assert 0 < at_start.sum() < 200
    environment.body[:, 1] = environment.body[:, 0]
    environment.body[1, 1] -= 250
    assert not advance(environment).metrics["formation"].any()
    environment.body[:, 1] = environment.body[:, 0]
    metrics = advance(environment).metrics
    assert (metrics["formation"] == 0.5).all()
    # Who was in formation at the start had joined by the row in which it was away.
    assert metrics["formation_joined"].tolist() == np.where(at_start, 0.5, 1).tolist()


def test_reference_observation_by_hand() -> None:
    environment = placed(Config(num_followers=1), (300, 440, 15, 0.0), (500, 520, 24, np.pi))
    seen = np.asarray(advance(environment).observation["observation"])[0]
    # After the move: leader at 315, which is 35 from the obstacle; follower at 476.
    leader = [0.315, 0.44, 0.5, 0, 0.4, 0.16, 1]
    np.testing.assert_allclose(seen[0], leader, atol=1e-6)
    np.testing.assert_allclose(seen[1], [0.476, 0.52, 0.8, 0.5, 0.315, 0.44, 0.5], atol=1e-6)


def test_normalised_reference_observation_by_hand() -> None:
    config = Config(num_followers=1, normalize=True, role=True)
    environment = placed(config, (300, 440, 15, 0.0), (500, 520, 24, np.pi))
    for _ in range(2):  # what a step writes does not depend on what stood there
        seen = np.asarray(advance(environment).observation["observation"])[0]
    # Leader at 330, heading 0, follower at 452, heading pi; the goal is at (400, 160).
    leader = [-0.7, 0.9, -0.5, -np.pi, 0, -1.9, 1, 1]
    np.testing.assert_allclose(seen[0], leader, atol=2e-6)
    np.testing.assert_allclose(seen[1], [0.52, 1.7, 0.4, 0, -0.7, 0.9, -0.5, 0], atol=2e-6)
    with pytest.raises(ConfigError, match="normalize is for observation: reference"):
        validate(Config, {"normalize": True, "observation": "formation"})


def test_formation_observation_by_hand() -> None:
    config = learnable(num_followers=1, state=True)
    up = math.pi / 2
    environment = placed(config, (400, 370, 20, up), (380, 350, 10, 0.0), goal=(400, 150))
    observed = advance(environment).observation
    seen = np.asarray(observed["observation"])[0]
    # The leader flew up to (400, 350), the goal 200 straight ahead; the obstacle at (350, 440) is
    # 90 behind and 50 to the left. The follower flew right to (390, 350), 10 to the leader's left.
    far = math.hypot(90, 50)
    leader = [
        0,
        0,
        1,
        0,
        1,
        1,
        0,
        1,
        -90 / far,
        50 / far,
        far / 200,
        0,
        0,
        0,
        1,
        0,
        1,
        0.05,
        0,
        0.05,
    ]
    np.testing.assert_allclose(seen[0], [*leader, 1], atol=1e-6)
    to_goal, to_obstacle = math.hypot(10, 200), math.hypot(40, 90)
    follower = [-10 / 350, 0, 0.5, 1, 0, 10 / to_goal, 200 / to_goal, to_goal / 200]
    follower += [-40 / to_obstacle, -90 / to_obstacle, to_obstacle / 200, 1, 0, 0.05, 0, 1]
    follower += [1, 0.05, 0, 0, 0]  # in formation, mean distance, itself, no leader
    np.testing.assert_allclose(seen[1], follower, atol=1e-6)
    state = [0, 0, 1, 0, 1, -10 / 350, 0, 0.5, 1, 0, 0, -200 / 300, -50 / 350, 90 / 300]
    np.testing.assert_allclose(np.asarray(observed["state"])[0], state, atol=1e-6)


@pytest.mark.parametrize(
    "config",
    [
        Config(num_followers=1, episode_steps=60),
        Config(num_followers=16, role=True, state=True, episode_steps=60),
        learnable(num_followers=4, state=True, episode_steps=60),
        learnable(num_followers=1, state=False, role=False, episode_steps=60),
    ],
)
def test_keeps_the_contract(config: Config) -> None:
    assert_environment(lambda n: make(config, n))


def test_the_published_task_is_the_default() -> None:
    options = load("formation-reference", environ={}).environment.options
    assert validate(Config, options) == Config(normalize=True, state=True)
    with pytest.raises(ConfigError, match="did you mean 'num_followers'"):
        validate(Config, {"num_folowers": 2})


def play(
    config: Config, policy: ScriptedPolicy, environment: Formation, gamma: float = 1.0
) -> tuple[dict[str, float], NDArray[np.float64]]:
    """First episodes of all copies: mean metrics, and each agent's mean return: [A]."""
    n = environment.num_envs
    timestep = reset(environment, 1)
    metrics = {name: np.zeros(n) for name in environment.spec.metrics}
    returns, factor, playing = np.zeros(timestep.reward.shape), 1.0, np.ones(n, np.bool_)
    while playing.any():
        timestep = advance(environment, policy.act(timestep))
        returns[playing] += factor * timestep.reward[playing]
        factor *= gamma
        last = playing & (timestep.step_type == StepType.LAST)
        for name, value in timestep.metrics.items():
            metrics[name][last] = value[last]
        playing &= ~last
    return {name: float(v.mean()) for name, v in metrics.items()}, returns.mean(axis=0)


@pytest.mark.parametrize("num_followers", [1, 2, 3, 4])
def test_pursuit_reaches_the_goal_in_formation(num_followers: int) -> None:
    for config in (Config(num_followers=num_followers), learnable(num_followers=num_followers)):
        environment = make(config, 100)
        metrics, _ = play(config, BASELINES["pursuit"](environment), environment)
        assert metrics["success"] == 1
        assert metrics["formation"] > 0.92
        assert metrics["formation_joined"] > 0.98
        hasty, _ = play(config, BASELINES["hasty-pursuit"](environment), environment)
        assert hasty["success"] == 1
        assert hasty["formation"] < 0.87
        assert hasty["steps"] < metrics["steps"] - 8


class Bent:
    """Pursuit with the leader's or the followers' actions replaced."""

    def __init__(self, environment: Formation, bend: str) -> None:
        """`bend` is one of lose, circle, crash."""
        self._env, self._bend = environment, bend
        self._pursuit = PursuitPolicy(environment, wait=False)
        self._random = np.random.default_rng(0)

    def act(self, timestep: TimeStep) -> NDArray[np.float32]:
        action = np.array(self._pursuit.act(timestep), np.float32)
        if self._bend == "lose":  # the followers fly anywhere
            action[:, 1:] = self._random.uniform(-1, 1, action[:, 1:].shape)
        elif self._bend == "circle":  # the leader stays where it is
            action[:, 0] = (-1, 1)
        else:  # the leader ends it all, as fast as it can
            dx, dy = self._env.obstacle - self._env.body[:2, 0]
            left = np.arctan2(-dy, dx) - self._env.body[3, 0]
            action[:, 0, 1] = np.clip((np.mod(left + np.pi, 2 * np.pi) - np.pi) / 0.6, -1, 1)
            action[:, 0, 0] = 1
            action[:, 1:] = self._random.uniform(-1, 1, action[:, 1:].shape)
        return action


@pytest.mark.parametrize("gamma", [0.9, 0.95, 0.99])
@pytest.mark.parametrize("num_followers", [1, 4])
def test_the_formation_reward_ranks_behaviours(gamma: float, num_followers: int) -> None:
    """For the leader alone and for the mean of the team, whichever the algorithm maximises."""
    config = learnable(num_followers=num_followers, episode_steps=300)
    environment = make(config, 100)

    def value(policy: ScriptedPolicy) -> NDArray[np.float64]:
        _, returns = play(config, policy, environment, gamma)
        return np.array([returns[0], returns.mean()])

    pursuit = value(PursuitPolicy(environment))
    hasty = value(PursuitPolicy(environment, wait=False, slow=False))
    circle, lose, crash = (value(Bent(environment, b)) for b in ("circle", "lose", "crash"))
    assert (pursuit > hasty + 0.3).all()
    assert (pursuit > circle + 0.3).all()
    assert (hasty > lose + 3).all()
    assert lose[0] > crash[0] + 3  # however badly the followers fly, the leader goes to the goal


def test_arriving_in_formation_is_the_only_thing_that_pays() -> None:
    """In perfect formation, at the lowest speed, going nowhere still costs: no use loitering."""
    config = learnable(num_followers=1)
    environment = placed(config, (400, 300, 10, 0.0), (400, 310, 10, 0.0), goal=(405, 600))
    timestep = advance(environment)  # from 5 left of the goal's column to 5 right of it
    assert timestep.reward[0].tolist() == pytest.approx([-0.05, -0.05], abs=1e-5)


def test_random_policy_is_random_and_legal() -> None:
    environment = make(Config(), 50)
    action = np.asarray(BASELINES["random"](environment).act(reset(environment)))
    assert action.shape == (50, 3, 2)
    assert action.dtype == np.float32
    assert np.abs(action).max() <= 1
    assert action.std() == pytest.approx(1 / math.sqrt(3), rel=0.1)


def test_render_state() -> None:
    environment = placed(Config(num_followers=1), (400, 300, 10, 0.0), (400, 330, 10, 0.0))
    advance(environment)
    state = environment.render_state(0)
    np.testing.assert_allclose(np.asarray(state["agents"], float), [[410, 300], [410, 330]])
    assert state["in_formation"].tolist() == [1]
    assert (state["heading"].tolist(), state["speed"].tolist()) == ([0, 0], [10, 10])

"""Spread against a plain second implementation and by hand."""

import numpy as np
import pytest
from mpe2 import simple_spread_v3
from numpy.typing import NDArray

from murmur.env_service.checks import assert_environment
from murmur.env_service.envs.spread import BASELINES, Config, Spread, make
from murmur.shared.wire.timestep import StepType, TimeStep


def reset(environment: Spread, first_seed: int = 0) -> TimeStep:
    n = environment.num_envs
    return environment.reset(np.arange(first_seed, first_seed + n, dtype=np.uint64))


def advance(environment: Spread, action: NDArray[np.generic]) -> TimeStep:
    n = environment.num_envs
    return environment.step(action, np.zeros(n, np.bool_), np.zeros(n, np.uint64))


class PlainSpread:
    """One copy in float64, agent by agent, as the particle environments write it."""

    def __init__(self, observation: NDArray[np.float32]) -> None:
        """Read the state off the agents' first observation: [A, F]."""
        a = len(observation)
        self.position = observation[:, 2:4].astype(float)
        self.velocity = observation[:, 0:2].astype(float)
        self.landmarks = self.position[0] + observation[0, 4 : 4 + 2 * a].reshape(a, 2)

    def step(self, force: NDArray[np.float64], local_ratio: float) -> list[float]:
        """Forces [A, 2] in units of full thrust -> the agents' rewards."""
        a = len(self.position)
        force = 5.0 * force.astype(float)
        for i in range(a):
            for j in range(a):
                if i != j:
                    away = self.position[i] - self.position[j]
                    distance = np.hypot(*away)
                    depth = 1e-3 * np.logaddexp(0, -(distance - 0.3) / 1e-3)
                    force[i] += 100.0 * depth * away / distance
        self.position = self.position + 0.1 * self.velocity
        self.velocity = 0.75 * self.velocity + 0.1 * force
        cover = sum(min(np.hypot(*(p - m)) for p in self.position) for m in self.landmarks)
        rewards = []
        for i in range(a):
            touched = sum(
                np.hypot(*(self.position[i] - self.position[j])) < 0.3 for j in range(a) if j != i
            )
            rewards.append(-local_ratio * touched - (1 - local_ratio) * cover)
        return rewards

    def observation(self, i: int) -> NDArray[np.float64]:
        a = len(self.position)
        others = [self.position[j] - self.position[i] for j in range(a) if j != i]
        return np.concatenate(
            [
                self.velocity[i],
                self.position[i],
                *(self.landmarks - self.position[i]),
                *others,
                np.zeros(2 * (a - 1)),
            ]
        )


def test_equals_mpe2() -> None:
    environment, raw = make(Config(), 1), simple_spread_v3.parallel_env(N=3, max_cycles=25)
    raw.reset(seed=0)
    world = raw.aec_env.unwrapped.world
    random = np.random.default_rng(0)
    collisions = 0
    for episode in range(10):
        timestep = reset(environment, episode)
        raw.reset(seed=0)
        first = timestep.observation["observation"][0]
        for i, agent in enumerate(world.agents):  # mpe2 begins where we do
            agent.state.p_pos = first[i, 2:4].astype(float)
            agent.state.p_vel = np.zeros(2)
        for i, landmark in enumerate(world.landmarks):
            landmark.state.p_pos = (first[0, 2:4] + first[0, 4 + 2 * i : 6 + 2 * i]).astype(float)
        for step in range(25):
            action = random.integers(5, size=(1, 3))
            timestep = advance(environment, action)
            observed, rewards, _, truncated, _ = raw.step(
                {name: int(a) for name, a in zip(raw.agents, action[0], strict=True)}
            )
            seen = np.stack(list(observed.values()))
            np.testing.assert_allclose(timestep.observation["observation"][0], seen, atol=2e-4)
            np.testing.assert_allclose(timestep.reward[0], list(rewards.values()), atol=5e-4)
            assert (timestep.step_type[0] == StepType.LAST) == all(truncated.values())
            assert (step == 24) == all(truncated.values())
        collisions += int(timestep.metrics["collisions"][0])
    assert collisions > 0


@pytest.mark.parametrize("num_agents", [1, 2, 3, 5])
@pytest.mark.parametrize("continuous", [False, True])
def test_equals_the_plain_implementation(num_agents: int, continuous: bool) -> None:
    n, ratio = 20, 0.3
    config = Config(num_agents=num_agents, continuous=continuous, local_ratio=ratio)
    environment = make(config, n)
    first = reset(environment).observation["observation"]
    plain = [PlainSpread(first[i]) for i in range(n)]
    directions = np.array([[0, 0], [-1, 0], [1, 0], [0, -1], [0, 1]])
    random = np.random.default_rng(0)
    collisions = 0.0
    for _ in range(25):
        forces = random.uniform(-1.5, 1.5, (n, num_agents, 2))
        choice = random.integers(0, 5, (n, num_agents), dtype=np.int32)
        force = np.clip(forces, -1, 1) if continuous else directions[choice]
        timestep = advance(environment, forces.astype(np.float32) if continuous else choice)
        rewards = np.array([p.step(force[i], ratio) for i, p in enumerate(plain)])
        np.testing.assert_allclose(timestep.reward, rewards, atol=2e-4)
        wanted = np.array([[p.observation(a) for a in range(num_agents)] for p in plain])
        observed = np.asarray(timestep.observation["observation"], np.float64)
        np.testing.assert_allclose(observed, wanted, atol=2e-4)
        collisions += float(timestep.metrics["collisions"].sum())
    assert collisions > 0 or num_agents == 1  # else contact was not tested


def test_motion_by_hand() -> None:
    environment = make(Config(num_agents=1), 1)
    start = reset(environment).observation["observation"][0, 0].copy()
    right, noop = np.array([[2]], np.int32), np.array([[0]], np.int32)
    seen = [
        advance(environment, a).observation["observation"][0, 0].copy() for a in (right, noop, noop)
    ]
    # The position moves by the old velocity first: 5 N for 0.1 s on 1 kg is 0.5 m/s after step 1.
    moved = [float(o[2] - start[2]) for o in seen]
    assert moved == pytest.approx([0.0, 0.05, 0.05 + 0.1 * 0.375], abs=1e-6)
    assert [float(o[0]) for o in seen] == pytest.approx([0.5, 0.375, 0.28125])
    assert [float(o[1]) for o in seen] == [0.0, 0.0, 0.0]


def test_reward_of_one_agent_is_half_its_distance() -> None:
    environment = make(Config(num_agents=1), 3)
    reset(environment)
    timestep = advance(environment, np.zeros((3, 1), np.int32))
    landmark = timestep.observation["observation"][:, 0, 4:6]
    np.testing.assert_allclose(
        timestep.reward[:, 0], -0.5 * np.hypot(landmark[:, 0], landmark[:, 1]), rtol=1e-6
    )


def test_start_is_uniform_over_the_square_and_at_rest() -> None:
    timestep = reset(make(Config(), 4000))
    observed = timestep.observation["observation"]
    assert not observed[..., :2].any()
    position = observed[..., 2:4]
    assert np.abs(position).max() <= 1
    np.testing.assert_allclose(position.mean(), 0, atol=0.02)
    np.testing.assert_allclose(position.var(), 1 / 3, atol=0.01)  # of a uniform over [-1, 1]


def test_episode_ends_by_truncation_and_reports() -> None:
    environment = make(Config(episode_steps=3), 2)
    reset(environment)
    total = np.zeros(2)
    for step in range(3):
        timestep = advance(environment, np.zeros((2, 3), np.int32))
        total += timestep.reward.sum(axis=1)
        wanted = StepType.LAST if step == 2 else StepType.MID
        assert (timestep.step_type == wanted).all()
    assert (timestep.discount == 1).all()
    np.testing.assert_allclose(timestep.metrics["return"], total, rtol=1e-6)


def test_state_is_all_observations_in_a_row() -> None:
    timestep = reset(make(Config(state=True), 4))
    observation = timestep.observation["observation"]
    np.testing.assert_array_equal(timestep.observation["state"], observation.reshape(4, -1))


@pytest.mark.parametrize(
    ("baseline", "continuous", "low", "high"),
    # On the scale of mpe2's simple_spread_v3, summed over agents, random play gives -79.5.
    [
        ("random", False, -82.0, -77.0),
        ("assignment", False, -25.0, -20.0),
        ("assignment", True, -20.0, -15.0),
    ],
)
def test_baselines_give_what_they_are_known_for(
    baseline: str, continuous: bool, low: float, high: float
) -> None:
    environment = make(Config(continuous=continuous), 1000)
    policy = BASELINES[baseline](environment)
    timestep = reset(environment)
    for _ in range(25):
        timestep = advance(environment, policy.act(timestep))
    assert low < timestep.metrics["return"].mean() < high


def test_assignment_serves_many_agents() -> None:
    environment = make(Config(num_agents=8, episode_steps=60), 20)
    policy = BASELINES["assignment"](environment)
    timestep = reset(environment)
    for _ in range(60):
        timestep = advance(environment, policy.act(timestep))
    assert timestep.metrics["occupied"].mean() > 5


@pytest.mark.parametrize(
    "config", [Config(), Config(continuous=True, state=True, num_agents=4), Config(num_agents=1)]
)
def test_keeps_the_contract(config: Config) -> None:
    assert_environment(lambda num_envs: make(config, num_envs))

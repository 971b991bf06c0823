"""check_environment names what is wrong, and finds nothing wrong with what murmur ships."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from murmur.env_service.checks import assert_environment, check_environment, describe_environment
from murmur.env_service.environment import VectorEnvironment, baselines, make_environment
from murmur.shared.config import PluginConfig
from murmur.shared.config.plugins import plugin_names
from murmur.shared.process.errors import ConfigError, EnvironmentFault
from murmur.shared.wire.seeding import uniform
from murmur.shared.wire.spec import ACTION_MASK, AGENT_MASK, ArraySpec, Discrete, EnvSpec
from murmur.shared.wire.timestep import Array, StepType, TimeStep

SMALL: dict[str, dict[str, Any]] = {
    "gymnasium": {"factory": "gymnasium:make", "arguments": {"id": "CartPole-v1"}},
    "gymnasium_vector": {
        "factory": "gymnasium:make_vec",
        "arguments": {
            "id": "CartPole-v1",
            "vectorization_mode": "sync",
            "vector_kwargs": {"autoreset_mode": "Disabled"},
        },
    },
    "pettingzoo": {"factory": "mpe2.simple_spread_v3:parallel_env"},
    "spread": {"num_agents": 2},
}


@pytest.mark.timeout(900)  # compiles terrain and snakes in a fresh clone: 25 CPU-seconds each
@pytest.mark.parametrize("name", plugin_names("environment"))
def test_every_shipped_environment_keeps_the_contract(name: str) -> None:
    plugin = PluginConfig(name=name, **SMALL.get(name, {}))
    assert_environment(lambda num_envs: make_environment(plugin, num_envs), max_rows=60)


@pytest.mark.parametrize("name", plugin_names("environment"))
def test_every_baseline_acts(name: str) -> None:
    plugin = PluginConfig(name=name, **SMALL.get(name, {}))
    for make_policy in baselines(plugin).values():
        environment = make_environment(plugin, 2)
        policy = make_policy(environment)
        timestep = environment.reset(np.array([1, 2], np.uint64))
        for _ in range(3):
            action = policy.act(timestep)
            restart = np.array(timestep.step_type == StepType.LAST)
            timestep = environment.step(action, restart, np.array([1, 2], np.uint64))


def test_options_are_checked_with_a_hint() -> None:
    with pytest.raises(ConfigError, match=r"environment\.num_agent'; did you mean 'num_agents'"):
        make_environment(PluginConfig.model_validate({"name": "spread", "num_agent": 2}), 1)
    with pytest.raises(ConfigError, match="did you mean 'spread'"):
        make_environment(PluginConfig(name="spred"), 1)


class Toy(VectorEnvironment):
    """A correct environment: guess the sum of the previous actions; 4 steps, then terminates."""

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self.spec = EnvSpec(
            name="toy",
            num_agents=2,
            observations=(
                ArraySpec("x", "float32", (1,)),
                ArraySpec(ACTION_MASK, "uint8", (3,)),
            ),
            action=Discrete(3),
            metrics=("sum",),
            max_episode_steps=4,
        )
        self.x = np.zeros((num_envs, 2, 1), np.float32)
        self.age = np.zeros(num_envs, np.int64)
        self.calls = 0

    def step(
        self, action: Array, restart: NDArray[np.bool_], seeds: NDArray[np.uint64]
    ) -> TimeStep:
        n = self.num_envs
        self.age = np.where(restart, 0, self.age + 1)
        fresh = uniform(seeds, 2).T[..., None]
        moved = self.x + np.asarray(action, np.float32)[..., None]
        self.x = np.where(restart[:, None, None], fresh, moved).astype(np.float32)
        kind = np.where(self.age == 4, StepType.LAST, StepType.MID)
        kind[restart] = StepType.FIRST
        return TimeStep(
            step_type=kind.astype(np.uint8),
            reward=np.where(restart[:, None], 0, self.x[..., 0]).astype(np.float32),
            discount=np.where(self.age == 4, 0, 1).astype(np.float32),
            observation={"x": self.x, ACTION_MASK: np.ones((n, 2, 3), np.uint8)},
            metrics={"sum": self.x.sum(axis=(1, 2))},
        )


Change = Callable[[Toy, TimeStep], TimeStep]


def broken(change: Change) -> Callable[[int], VectorEnvironment]:
    class Broken(Toy):
        def step(
            self, action: Array, restart: NDArray[np.bool_], seeds: NDArray[np.uint64]
        ) -> TimeStep:
            return change(self, super().step(action, restart, seeds))

    return Broken


def with_observation(timestep: TimeStep, name: str, value: Array) -> TimeStep:
    return replace(timestep, observation={**timestep.observation, name: value})


def nan_in_one_copy(toy: Toy, t: TimeStep) -> TimeStep:
    x = toy.x.copy()
    x[toy.age == 2] = np.nan
    return with_observation(t, "x", x)


def shifting_mean(toy: Toy, t: TimeStep) -> TimeStep:
    return with_observation(t, "x", toy.x - toy.x.mean(dtype=np.float32))


def clock(toy: Toy, t: TimeStep) -> TimeStep:
    toy.calls += 1
    return with_observation(t, "x", np.asarray(toy.x + toy.calls, np.float32))


def global_random(_: Toy, t: TimeStep) -> TimeStep:
    return replace(
        t, reward=t.reward + (t.reward != 0) * np.random.rand(*t.reward.shape).astype("f")
    )


def last_as_mid(_: Toy, t: TimeStep) -> TimeStep:
    return replace(t, step_type=np.minimum(t.step_type, 1).astype(np.uint8), discount=t.discount**0)


def first_after_last(toy: Toy, t: TimeStep) -> TimeStep:
    kind = np.where(toy.age == 2, StepType.FIRST, t.step_type).astype(np.uint8)
    return replace(t, step_type=kind, reward=t.reward * (kind != 0)[:, None].astype("f"))


BREACHES: dict[str, tuple[Change, str]] = {
    "dtype": (lambda _, t: replace(t, reward=t.reward.astype(float)), "reward has dtype float64"),
    "shape": (lambda e, t: with_observation(t, "x", e.x[..., 0]), "'x' has shape"),
    "missing": (lambda e, t: replace(t, observation={"x": e.x}), "'action_mask' is in the spec"),
    "extra": (lambda e, t: with_observation(t, "y", e.x), "'y' is not in the spec"),
    "no metric": (lambda _, t: replace(t, metrics={}), "metric 'sum' is in the spec but missing"),
    "reward on FIRST": (
        lambda _, t: replace(t, reward=t.reward + 1),
        "on FIRST, where no action has been taken yet",
    ),
    "discount": (
        lambda _, t: replace(t, discount=t.discount * 0),
        "has discount 0 on FIRST, where 1 must be",
    ),
    "odd discount": (
        lambda _, t: replace(t, discount=t.discount * 0 + 0.9),
        "has discount 0.9 on MID, where 1 must be",
    ),
    "odd discount on LAST": (
        lambda _, t: replace(t, discount=np.where(t.discount == 0, 0.9, 1).astype(np.float32)),
        "has discount 0.9 on LAST, where 0 or 1 must be",
    ),
    "kind": (lambda _, t: replace(t, step_type=t.step_type + np.uint8(3)), "expected 0, 1 or 2"),
    "own restart": (first_after_last, "FIRST, but without a restart comes MID or LAST"),
    "no end": (last_as_mid, "continues after 4 decisions, its spec says that 4 is the longest"),
    "NaN": (nan_in_one_copy, "nan in observation 'x' of agent 0"),
    "metric NaN": (
        lambda _, t: replace(t, metrics={"sum": t.metrics["sum"] * np.float32("nan")}),
        "nan in metric 'sum' on LAST",
    ),
    "mask": (
        lambda _, t: with_observation(t, ACTION_MASK, np.zeros_like(t.observation[ACTION_MASK])),
        "an action_mask that allows no action to agent 0",
    ),
    "mask values": (
        lambda _, t: with_observation(
            t, ACTION_MASK, np.full_like(t.observation[ACTION_MASK], 255)
        ),
        "255 in action_mask of agent 0, where 0 or 1 must be",
    ),
    "others": (shifting_mean, "depends on the other copies: observation 'x'"),
    "memory": (clock, "after LAST gave another episode: observation 'x'"),
    "random": (global_random, "gave another episode: reward"),
}


def test_a_correct_environment_has_no_problems() -> None:
    assert check_environment(Toy) == []


@pytest.mark.parametrize("breach", BREACHES)
def test_each_breach_is_named(breach: str) -> None:
    change, wanted = BREACHES[breach]
    problems = check_environment(broken(change))
    assert any(wanted in problem for problem in problems), problems
    with pytest.raises(AssertionError, match="breaks its contract"):
        assert_environment(broken(change))


def test_an_exception_is_a_problem() -> None:
    def fail(toy: Toy, timestep: TimeStep) -> TimeStep:
        if toy.age.max() == 3:
            raise ValueError("no more")
        return timestep

    assert check_environment(broken(fail))[0] == "step raises ValueError: no more (first in row 3)"


def test_an_exception_when_closed_is_a_problem() -> None:
    class Stuck(Toy):
        def close(self) -> None:
            raise RuntimeError("the door is stuck")

    assert check_environment(Stuck) == [
        "close raises RuntimeError: the door is stuck (first in row 0)"
    ]


@pytest.mark.parametrize("most", [2**31 - 1, 2**32 - 1])
def test_seeds_are_as_large_as_those_of_training(most: int) -> None:
    class Short(Toy):
        """Knows no seed above `most`."""

        def step(
            self, action: Array, restart: NDArray[np.bool_], seeds: NDArray[np.uint64]
        ) -> TimeStep:
            if (seeds > most).any():
                raise OverflowError("what a number")
            return super().step(action, restart, seeds)

    assert check_environment(Short) == ["step raises OverflowError: what a number (first in row 0)"]


@pytest.mark.parametrize(
    ("x", "words"),
    [
        ("nan", "step returned nan in observation 'x' of .*"),
        ("far", "step raises ValueError: .*'far'"),
    ],
)
def test_what_is_described_keeps_the_contract_too(x: str, words: str) -> None:
    class Unlucky(Toy):
        """Its episode with seed 40, which only the description plays, goes wrong in its end."""

        seed = 0

        def step(
            self, action: Array, restart: NDArray[np.bool_], seeds: NDArray[np.uint64]
        ) -> TimeStep:
            self.seed = int(seeds[0]) if restart[0] else self.seed
            timestep = super().step(action, restart, seeds)
            if self.seed == 40 and self.age[0] == 3:
                self.x[0] = float(x)
            return timestep

    assert check_environment(Unlucky) == []
    with pytest.raises(EnvironmentFault, match=f"^{words}, in the episode with seed 40 at step 3$"):
        describe_environment(Unlucky)
    assert describe_environment(Toy)[-1].startswith("episodes of 4 steps")


def test_writing_into_the_actions_is_a_problem() -> None:
    class Writes(Toy):
        def step(
            self, action: Array, restart: NDArray[np.bool_], seeds: NDArray[np.uint64]
        ) -> TimeStep:
            action[:] = 0
            return super().step(action, restart, seeds)

    assert "read-only" in check_environment(Writes)[0]


def test_a_restart_that_leaves_traces_is_a_problem() -> None:
    class Sticky(Toy):
        """Ignores a restart in the middle but for the row it must call FIRST."""

        def step(
            self, action: Array, restart: NDArray[np.bool_], seeds: NDArray[np.uint64]
        ) -> TimeStep:
            middle = restart & (self.age > 0) & (self.age < 4)
            before = self.x.copy()
            timestep = super().step(action, restart, seeds)
            self.x[middle] = before[middle]
            return with_observation(timestep, "x", self.x)

    problems = check_environment(Sticky)
    assert any("restart in the middle of an episode leaves traces" in p for p in problems), problems


@pytest.mark.parametrize(("alive", "problems"), [(1, 0), (255, 1)])
def test_who_lives_is_0_or_1(alive: int, problems: int) -> None:
    class Mortal(Toy):
        def __init__(self, num_envs: int) -> None:
            super().__init__(num_envs)
            mask = ArraySpec(AGENT_MASK, "uint8", ())
            self.spec = replace(self.spec, observations=(*self.spec.observations, mask))

        def step(
            self, action: Array, restart: NDArray[np.bool_], seeds: NDArray[np.uint64]
        ) -> TimeStep:
            everyone = np.full((self.num_envs, 2), alive, np.uint8)
            return with_observation(super().step(action, restart, seeds), AGENT_MASK, everyone)

    found = check_environment(Mortal)
    assert len(found) == problems
    assert all("255 in agent_mask of agent 0, where 0 or 1 must be" in problem for problem in found)


@pytest.mark.parametrize(
    ("leaves", "line"),
    [
        (False, None),
        (True, "1 to 2 of them as an episode begins, 0 to 2 in its course, in 500 random steps"),
    ],
)
def test_a_changing_number_of_agents_is_described(leaves: bool, line: str | None) -> None:
    class Changing(Toy):
        """The second agent is there if its first number is small; the first one leaves early."""

        def __init__(self, num_envs: int) -> None:
            super().__init__(num_envs)
            masked = (*self.spec.observations, ArraySpec(AGENT_MASK, "uint8", ()))
            self.spec = replace(self.spec, observations=masked)
            self.there = np.ones((num_envs, 2), np.uint8)

        def step(
            self, action: Array, restart: NDArray[np.bool_], seeds: NDArray[np.uint64]
        ) -> TimeStep:
            timestep = super().step(action, restart, seeds)
            if leaves:
                self.there[restart] = 1
                self.there[restart, 1] = timestep.observation["x"][restart, 1, 0] < 0.5
                self.there[self.age >= 2, 0] = 0
                timestep.reward[:] = timestep.reward * self.there
            timestep.observation[AGENT_MASK] = self.there
            return timestep

    lines = describe_environment(Changing)
    assert lines[0] == "2 agents"
    assert (lines[1] == line) if line else lines[1].startswith("sees x")

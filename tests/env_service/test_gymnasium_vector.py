"""Vectorised Gymnasium environments behind the contract."""

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from murmur.env_service.adapters.kinds import recognise
from murmur.env_service.checks import assert_environment, check_environment, describe_environment
from murmur.env_service.environment import RandomPolicy, VectorEnvironment, make_environment
from murmur.env_service.watchdog.faults import FaultCount, GuardedEnvironment
from murmur.kit.check_env import check_apart
from murmur.runs.child import murmur_command
from murmur.shared.config import PluginConfig
from murmur.shared.process.errors import ConfigError, EnvironmentFault
from murmur.shared.wire.timestep import StepType, TimeStep

DISABLED = {"vectorization_mode": "sync", "vector_kwargs": {"autoreset_mode": "Disabled"}}


def made(factory: str = "gymnasium:make_vec", n: int = 3, **options: Any) -> VectorEnvironment:
    return make_environment(PluginConfig(name="gymnasium_vector", factory=factory, **options), n)


def of_gymnasium(id_: str, n: int, **arguments: Any) -> VectorEnvironment:
    return made(n=n, arguments={"id": id_, **DISABLED, **arguments})


class Counting(VectorEnv[Any, Any, Any]):
    """Each copy observes its step, a number drawn from its seed, and its last action.

    Its even copies terminate in step 4, its odd ones are truncated in step 6.
    """

    metadata = {"autoreset_mode": AutoresetMode.DISABLED}  # noqa: RUF012 - as Gymnasium has it
    obeys = True

    def __init__(self, num_envs: int = 1) -> None:
        self.num_envs = num_envs
        self.single_observation_space = Dict(
            {
                "step": Discrete(10),
                "numbers": Box(-1, 1e4, (2,), np.float64),
                "picture": Box(0, 255, (4, 6, 3), np.uint8),
                "action_mask": MultiDiscrete([2, 2]),
            }
        )
        self.single_action_space = Discrete(2, start=5)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.steps, self.drawn = np.zeros(num_envs, np.int64), np.zeros(num_envs)
        self.action = np.zeros(num_envs, np.int64)
        self.ended = np.zeros(num_envs, np.bool_)

    def _seen(self) -> dict[str, Any]:
        picture = np.zeros((self.num_envs, 4, 6, 3), np.uint8)
        picture[..., 1] = self.steps[:, None, None]
        mask = np.ones((self.num_envs, 2), np.int8)
        mask[np.arange(self.num_envs), self.steps % 2] = 0
        return {
            "step": self.steps.copy(),
            "numbers": np.stack([self.drawn, self.action], -1),
            "picture": picture,
            "action_mask": mask,
        }

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        mask = (options or {}).get("reset_mask", np.ones(self.num_envs, np.bool_))
        if not self.obeys:
            mask = np.ones(self.num_envs, np.bool_)
        self.steps[mask], self.ended[mask], self.action[mask] = 0, False, 0
        self.drawn[mask] = self.np_random.random()
        return self._seen(), {}

    def step(self, actions: NDArray[np.int64]) -> tuple[Any, ...]:
        assert self.action_space.contains(actions)
        assert not self.ended.any()
        assert self._seen()["action_mask"][np.arange(self.num_envs), actions - 5].all()
        self.steps += 1
        self.action = actions.copy()
        even = np.arange(self.num_envs) % 2 == 0
        terminations, truncations = even & (self.steps == 4), ~even & (self.steps == 6)
        self.ended = terminations | truncations
        infos = {"score": 10.0 * self.steps, "_score": self.ended, "deep": {"er": self.steps * 1.0}}
        return self._seen(), self.steps * 1.0, terminations, truncations, infos


class Disobedient(Counting):
    """It resets all copies, whatever the mask says."""

    obeys = False


class Silent(Counting):
    """It does not say how its episodes begin."""

    metadata = {}  # noqa: RUF012


OWN = f"{__name__}:Counting"


@pytest.mark.parametrize("id_", ["CartPole-v1", "Pendulum-v1", "Blackjack-v1"])
def test_environments_of_gymnasium_keep_the_contract(id_: str) -> None:
    assert_environment(lambda n: of_gymnasium(id_, n), max_rows=60)


def test_copies_in_processes_keep_the_contract() -> None:
    assert_environment(
        lambda n: of_gymnasium("CartPole-v1", n, vectorization_mode="async"), max_rows=30
    )


@pytest.mark.parametrize("id_", ["CartPole-v1", "Pendulum-v1"])
def test_rows_equal_those_of_single_environments(id_: str) -> None:
    single = PluginConfig(name="gymnasium", factory="gymnasium:make", arguments={"id": id_})
    one, other = of_gymnasium(id_, 3), make_environment(single, 3)
    assert one.spec == other.spec
    policy = RandomPolicy(one)
    seeds = np.array([3, 2**40 + 7, 11], np.uint64)
    here, there = one.reset(seeds), other.reset(seeds)
    for row in range(240):
        for name, array in here.observation.items():
            assert np.array_equal(array, there.observation[name]), (row, name)
        assert np.array_equal(here.reward, there.reward)
        assert np.array_equal(here.discount, there.discount)
        assert np.array_equal(here.step_type, there.step_type)
        over = here.step_type == StepType.LAST
        over[1] |= row == 100  # in the middle of an episode
        seeds = seeds + over.astype(np.uint64)
        action = policy.act(here)
        here, there = one.step(action, over, seeds), other.step(action, over, seeds)


def test_a_mask_of_one_copy_a_call_keeps_the_contract() -> None:
    assert_environment(lambda n: made(OWN, n, metrics=["score", "deep.er"]), max_rows=60)


def step(environment: VectorEnvironment, before: TimeStep, seed: int) -> TimeStep:
    over = before.step_type == StepType.LAST
    mask = before.observation["action_mask"]
    return environment.step(
        mask.argmax(-1).astype(np.int32), over, np.full(environment.num_envs, seed, np.uint64)
    )


def test_ends_masks_pictures_and_metrics_of_each_copy() -> None:
    environment = made(OWN, 2, metrics=["score", "deep.er"])
    assert {o.name: o.shape for o in environment.spec.observations} == {
        "observation": (12,),
        "image.picture": (3, 4, 6),
        "action_mask": (2,),
    }
    row = environment.reset(np.array([1, 2], np.uint64))
    first = row.observation["observation"][:, 0, :2].copy()
    assert first[0, 0] != first[1, 0]
    ends = []
    for age in range(1, 8):
        row = step(environment, row, 9)
        ends.append(row.step_type.tolist())
        if age <= 4:
            assert row.observation["action_mask"][0, 0].tolist() == [age % 2, 1 - age % 2]
            assert (row.observation["image.picture"][0, 0, 1] == age).all()
            assert row.reward[:, 0].tolist() == [age, age]
        if age == 4:
            assert row.discount.tolist() == [0, 1]
            assert (row.metrics["score"][0], row.metrics["deep.er"][0]) == (40, 4)
            assert row.metrics["length"].tolist() == [4, 4]
        if age == 5:
            assert row.metrics["length"].tolist() == [0, 5]
            assert row.reward[:, 0].tolist() == [0, 5]
    mid, last, begun = StepType.MID, StepType.LAST, StepType.FIRST
    copies = np.array(ends).T.tolist()
    assert copies[0] == [mid, mid, mid, last, begun, mid, mid]
    assert copies[1] == [mid, mid, mid, mid, mid, last, begun]
    assert row.discount[1] == 1


def test_a_reset_that_disobeys_its_mask_is_a_fault() -> None:
    environment = made(f"{__name__}:Disobedient", 2)
    row = environment.reset(np.array([1, 2], np.uint64))
    for _ in range(4):
        row = step(environment, row, 9)
    with pytest.raises(EnvironmentFault, match=r"does not obey reset.*of copies that the mask"):
        step(environment, row, 9)


def test_a_limit_truncates_each_copy() -> None:
    environment = made(OWN, 2, max_episode_steps=3)
    assert environment.spec.max_episode_steps == 3
    row = environment.reset(np.array([1, 2], np.uint64))
    for _ in range(3):
        row = step(environment, row, 9)
    assert row.step_type.tolist() == [StepType.LAST, StepType.LAST]
    assert row.discount.tolist() == [1, 1]
    assert_environment(lambda n: made(OWN, n, max_episode_steps=3), max_rows=30)


def cartpole(n: int, **options: Any) -> VectorEnvironment:
    return made(n=n, arguments={"id": "CartPole-v1"}, **options)  # steps all copies as one array


def test_next_step_autoreset_begins_episodes_where_they_are_due() -> None:
    environment = cartpole(2)
    assert not environment.seeded
    assert [n.kind for n in environment.notices.all] == ["unseeded"]
    policy = RandomPolicy(environment)
    row = environment.reset(np.array([1, 2], np.uint64))
    lengths, begun = [], 0
    for _ in range(200):
        over = row.step_type == StepType.LAST
        row = environment.step(policy.act(row), over, np.zeros(2, np.uint64))
        assert ((row.step_type == StepType.FIRST) == over).all()
        assert (row.reward[:, 0] == ~over).all()
        assert (np.abs(row.observation["observation"][over]) <= 0.05).all()
        begun += int(over.sum())
        lengths += row.metrics["length"][row.step_type == StepType.LAST].tolist()
    assert begun >= 10
    assert 8 < np.mean(lengths) < 60
    assert check_environment(cartpole, max_rows=60) == []
    assert "episodes of" in describe_environment(cartpole, 200)[-1]


def test_a_fault_of_next_step_autoreset_loses_all_copies() -> None:
    guarded = GuardedEnvironment(lambda: cartpole(2), FaultCount(10, lambda *_: None))
    guarded.step(np.zeros((2, 1), np.int32), np.ones(2, np.bool_))
    guarded.step(np.zeros((2, 1), np.int32), np.array([True, False]))
    assert guarded.over.all()
    row = guarded.step(np.zeros((2, 1), np.int32), guarded.over)
    assert (row.step_type == StepType.FIRST).all()


@pytest.mark.parametrize(
    ("factory", "options", "why"),
    [
        (
            "gymnasium:make_vec",
            {
                "arguments": {
                    "id": "CartPole-v1",
                    "vectorization_mode": "sync",
                    "vector_kwargs": {"autoreset_mode": "SameStep"},
                }
            },
            "SameStep, which hides an episode's last observation; make it with autoreset_mode: Di",
        ),
        (
            "gymnasium:make_vec",
            {"arguments": {"id": "CartPole-v1"}, "max_episode_steps": 9},
            "max_episode_steps: 9 cannot end episodes of 'gymnasium:make_vec', which begins them",
        ),
        (f"{__name__}:Silent", {}, r"metadata\['autoreset_mode'\] None"),
        (OWN, {"arguments": {"num_envs": 2}}, "made 2 copies where num_envs=3"),
        (OWN, {"renew": True}, "cannot make one copy again"),
        (
            "gymnasium:make",
            {"arguments": {"id": "CartPole-v1"}},
            "num_envs",
        ),
    ],
    ids=["same step", "limit", "no mode", "copies", "renew", "single"],
)
def test_what_cannot_work_is_refused(factory: str, options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        made(factory, **options)


def test_factories_are_recognised_and_named_by_the_other_plug_in() -> None:
    arguments = {"id": "CartPole-v1"}
    assert recognise("gymnasium:make_vec", arguments) == "gymnasium_vector"
    wrong = PluginConfig(name="gymnasium", factory="gymnasium:make_vec", arguments=arguments)
    with pytest.raises(ConfigError, match=r"set environment\.name: gymnasium_vector"):
        make_environment(wrong, 2)


def test_check_env_tells_what_next_step_autoreset_cannot_promise() -> None:
    checked = check_apart("gymnasium:make_vec", ["arguments.id=CartPole-v1"], 10.0)
    assert checked.problems == []
    assert any("no two runs are alike" in notice for notice in checked.notices)


@pytest.mark.long
def test_the_sync_pipeline_refuses_episodes_without_seeds(tmp_path: Path) -> None:
    config = {
        "run": {"name": "unseeded", "max_updates": 1},
        "environment": {
            "name": "gymnasium_vector",
            "factory": "gymnasium:make_vec",
            "arguments": {"id": "CartPole-v1"},
        },
        "algorithm": {"name": "ppo"},
        "env_server": {"metrics_port": 0},
        "learner": {"port": 0, "metrics_port": 0, "pipeline": "sync"},
    }
    file = tmp_path / "unseeded.yaml"
    file.write_text(yaml.safe_dump(config))
    command = murmur_command("train", str(file), "--run", str(tmp_path / "run"))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode
    assert "set learner.pipeline: async" in done.stderr + done.stdout
    async_ = murmur_command(
        *("train", str(file), "--run", str(tmp_path / "other")),
        *("--set", "learner.pipeline=async"),
    )
    done = subprocess.run(async_, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "no two runs are alike" in done.stderr + done.stdout

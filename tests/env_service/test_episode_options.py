"""Options of episodes: given to environments of every kind, drawn by seeds, or refused."""

from functools import partial
from typing import Any

import numpy as np
import pytest

from murmur.env_service.checks import idle_options
from murmur.env_service.environment import make_environment
from murmur.env_service.episode_options import EpisodeOptions
from murmur.env_service.sessions.worker import guarded_environment
from murmur.env_service.watchdog.faults import FaultCount, GuardedEnvironment
from murmur.runs.settings import TASK, with_plugin_defaults
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.config.section import validate
from murmur.shared.process.errors import ConfigError, WireError
from murmur.shared.wire.timestep import Array

HERE = "tests.env_service.windy"
KINDS: dict[str, dict[str, Any]] = {
    "gymnasium": {"name": "gymnasium", "factory": f"{HERE}:Windy"},
    "pettingzoo": {"name": "pettingzoo", "factory": f"{HERE}:WindyTeam"},
    "vectorised": {"name": "gymnasium_vector", "factory": f"{HERE}:windy_vector"},
    "own": {"name": f"{HERE}:WindyCopies"},
}
OPTIONS: dict[str, Any] = {
    "curriculum": {"wind": {"from": 1, "to": 9, "over_updates": 10}},
    "randomize": {"mass": [0.5, 2.0]},
}


def make(
    environment: dict[str, Any], num_envs: int, share: float = 0.0, **changes: Any
) -> GuardedEnvironment:
    config = validate(ExperimentConfig, {"environment": {**environment, **OPTIONS, **changes}})
    faults = FaultCount(0, lambda reason, episodes: None)
    return guarded_environment(config, num_envs, faults, progress=share)


def play(environment: GuardedEnvironment, seeds: list[list[int]]) -> list[dict[int, Array]]:
    """Play each copy's episodes one after the other; return, by seed, what each row observes."""
    n = environment.num_envs
    number = [0] * n
    environment.seeds[:] = [own[0] for own in seeds]
    timestep, seen = environment.reset(), dict[int, list[Array]]()
    for _ in range(12):
        for i in range(n):
            row = timestep.observation["observation"][i, 0].copy()
            seen.setdefault(int(environment.seeds[i]), []).append(row)
        for i in np.flatnonzero(environment.over).tolist():
            number[i] = min(number[i] + 1, len(seeds[i]) - 1)
            environment.seeds[i] = seeds[i][number[i]]
        action = np.ones((n, environment.spec.num_agents), np.int32)
        timestep = environment.step(action, environment.over)
    return [{seed: np.stack(rows[:6]) for seed, rows in seen.items()}]


@pytest.mark.parametrize("kind", KINDS)
def test_two_servers_draw_the_same_values_for_a_seed(kind: str) -> None:
    one, other = (
        play(make(KINDS[kind], len(seeds)), seeds)[0]
        for seeds in ([[5, 2**62], [6, 7]], [[7, 6], [2**62, 5], [8, 8]])
    )
    for seed in (5, 6, 7, 2**62):
        np.testing.assert_array_equal(one[seed], other[seed])
    masses = {float(rows[0, 1]) for rows in other.values()}
    assert len(masses) == 5
    assert all(0.5 <= mass <= 2 for mass in masses)
    assert {float(rows[0, 0]) for rows in other.values()} == {1.0}


@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_value_begins_with_the_next_episode(kind: str) -> None:
    environment = make(KINDS[kind], 2)
    environment.seeds[:] = [1, 2]
    timestep, winds = environment.reset(), list[list[float]]()
    for step in range(8):
        winds.append(timestep.observation["observation"][:, 0, 0].tolist())
        if step == 2:
            environment.options.set({"wind": 4.0})
        restart = environment.over | (np.array([step == 1, False]))
        action = np.zeros((2, environment.spec.num_agents), np.int32)
        timestep = environment.step(action, restart)
    # Copy 0 is restarted at step 2, before the change; copy 1 after its fifth step.
    assert [w[0] for w in winds] == [1.0] * 8
    assert [w[1] for w in winds] == [1.0] * 6 + [4.0] * 2


def test_a_resumed_episode_keeps_its_value_until_the_next_one() -> None:
    environment = make(KINDS["gymnasium"], 2)
    options = environment.options
    options.set({"wind": 5.0})
    options.resume([{"wind": 3.0}, {}])
    environment.seeds[:] = [1, 2]
    assert environment.reset().observation["observation"][:, 0, 0].tolist() == [3, 5]
    assert environment.reset().observation["observation"][:, 0, 0].tolist() == [3, 5]
    options.next_episode([0])
    assert environment.reset().observation["observation"][:, 0, 0].tolist() == [5, 5]


def test_evaluations_use_the_last_value() -> None:
    environment = make(KINDS["gymnasium"], 1, share=1.0)
    assert environment.reset().observation["observation"][0, 0, 0] == 9


def test_a_recreated_copy_is_given_its_options_again() -> None:
    environment = make({**KINDS["gymnasium"], "renew": True}, 1)
    environment.seeds[:] = 4
    first = environment.reset().observation["observation"].copy()
    np.testing.assert_array_equal(environment.reset().observation["observation"], first)
    assert first[0, 0, 0] == 1


@pytest.mark.parametrize(
    ("environment", "changes", "message"),
    [
        ({"name": "memory"}, {}, "environment 'memory' takes no option 'wind' of an episode"),
        (KINDS["own"], {"randomize": {"mas": [1, 2]}}, "no option 'mas' .*did you mean 'mass'"),
        (
            {"name": "gymnasium", "factory": f"{HERE}:Deaf"},
            {},
            r"'tests.env_service.windy:Deaf' takes no options in reset\(\), so .* wind, mass",
        ),
        (
            KINDS["gymnasium"],
            {"randomize": {"sun": [1, 2]}},
            r"options=\{'wind': 1.0, 'sun': .*raised ValueError: no option \['sun'\]",
        ),
        (
            {**KINDS["vectorised"], "arguments": {"mode": "NextStep"}},
            {},
            "begins episodes by itself .* cannot set wind, mass; autoreset mode Disabled could",
        ),
        (
            KINDS["vectorised"],
            {"randomize": {"reset_mask": [1, 2]}},
            "'reset_mask' is murmur's own option",
        ),
    ],
    ids=["memory", "unknown", "no parameter", "raises", "next step", "mask"],
)
def test_environments_that_do_not_take_them_are_refused(
    environment: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(environment, 2, **changes)


def test_options_of_another_curriculum_are_refused() -> None:
    config = validate(ExperimentConfig, {"environment": {**KINDS["own"], **OPTIONS}})
    options = EpisodeOptions(config.environment, 1, {"wind": 1.0})
    with pytest.raises(
        WireError, match=r"\['rain'\], environment.curriculum here names \['wind'\]"
    ):
        options.set({"rain": 1.0})


@pytest.mark.parametrize(("factory", "idle"), [("Windy", []), ("Idle", ["wind", "mass"])])
def test_options_without_effect_are_found(factory: str, idle: list[str]) -> None:
    environment = {"name": "gymnasium", "factory": f"{HERE}:{factory}", **OPTIONS}
    config = validate(ExperimentConfig, {"environment": environment}).environment
    found = idle_options(partial(make_environment, config), config)
    assert [text.split("'")[1] for text in found] == idle


def test_an_option_may_not_also_be_set_for_good() -> None:
    environment = {"name": "memory", "delay": 4, "randomize": {"delay": [1, 2]}}
    config = validate(ExperimentConfig, {"environment": environment})
    with pytest.raises(ConfigError, match=r"environment\.delay=4 and .*randomize\.delay"):
        with_plugin_defaults(config, kinds=TASK)

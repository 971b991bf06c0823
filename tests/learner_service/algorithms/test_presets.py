"""Algorithms that are another one with some of its options set."""

from typing import Any

import pytest

from murmur.shared.config import PluginConfig
from murmur.shared.config.plugins import load_plugin, resolve_plugin
from murmur.shared.config.section import validate
from murmur.shared.config.text import plain_data
from murmur.shared.process.errors import ConfigError

ALONE = {"centralized": False}
TD3 = {"twin_critics": True, "policy_delay": 2, "target_noise": None}
ONE_AGENT = {"replay": {"update_interval": 1}, "gamma": 0.99}
DQN = {
    "replay": {"update_interval": 2},
    "epsilon_env_steps": 10_000,
    "averaged_policy": False,
    "gamma": 0.99,
}
PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "ippo": ("mappo", ALONE),
    "ppo": ("mappo", ALONE),
    "vdn": ("qmix", {"mixer": "vdn"}),
    "iql": ("qmix", {"mixer": "none", **DQN}),
    "qplex": ("qmix", {"mixer": "qplex", "mixer_hidden": 64}),
    "ddpg": ("maddpg", {**ALONE, **ONE_AGENT, "actor_lr": 1e-4, "target_tau": 0.005}),
    "matd3": ("maddpg", TD3),
    "td3": ("maddpg", {**TD3, **ALONE, **ONE_AGENT}),
    "sac": ("masac", {**ALONE, **ONE_AGENT}),
}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_another_algorithm_with_options(name: str) -> None:
    base, options = PRESETS[name]
    preset, whole = load_plugin("algorithm", name), load_plugin("algorithm", base)
    assert preset.build is whole.build
    assert preset.Config().model_dump() == whole.Config(**options).model_dump()
    assert preset.Config(gamma=0.5).gamma == 0.5
    assert preset.__doc__ != whole.__doc__


@pytest.mark.parametrize(
    ("names", "gamma"),
    [
        (("coma", "qmix", "qplex", "vdn", "maddpg", "matd3", "masac"), 0.95),
        (("iql", "ddpg", "td3", "sac"), 0.99),
    ],
)
def test_teams_discount_more_than_agents_by_themselves(
    names: tuple[str, ...], gamma: float
) -> None:
    assert {load_plugin("algorithm", name).Config().gamma for name in names} == {gamma}


@pytest.mark.parametrize("name", ["maddpg", "matd3", "ddpg", "td3"])
def test_presets_of_before_an_option_climb_as_they_did(name: str) -> None:
    whole = plain_data(resolve_plugin("algorithm", PluginConfig(name=name)).options)
    again = resolve_plugin("algorithm", PluginConfig(name=name, **whole))
    assert again.options.actor_gradient is None
    before = {key: value for key, value in whole.items() if key != "actor_gradient"}
    run = resolve_plugin("algorithm", PluginConfig(name=name, **before))
    assert run.options.actor_gradient == "gumbel"


def test_defaults_of_a_section_hold_beside_what_is_set() -> None:
    sac = load_plugin("algorithm", "sac").Config
    replay = validate(sac, {"replay": {"batch_size": 64}}, "algorithm").replay
    assert (replay.batch_size, replay.update_interval, replay.start_rows) == (64, 1, 1000)
    assert (
        validate(sac, {"replay": {"update_interval": 8}}, "algorithm").replay.update_interval == 8
    )
    with pytest.raises(ConfigError, match=r"algorithm\.replay\.update_intervall"):
        validate(sac, {"replay": {"update_intervall": 8}}, "algorithm")


@pytest.mark.parametrize("name", [n for n in PRESETS if n != "matd3"])
def test_a_preset_refuses_what_would_make_it_another(name: str) -> None:
    _, options = PRESETS[name]
    key, other = ("mixer", "qmix") if "mixer" in options else ("centralized", True)
    with pytest.raises(ConfigError, match=rf"algorithm\.{key}.*{other}"):
        validate(load_plugin("algorithm", name).Config, {key: other}, "algorithm")

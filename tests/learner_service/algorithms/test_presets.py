"""Algorithms that are another one with some of its options set."""

from typing import Any

import pytest

from shared.config.plugins import load_plugin
from shared.config.section import validate
from shared.process.errors import ConfigError

ALONE = {"centralized": False}
TD3 = {"twin_critics": True, "policy_delay": 2, "target_noise": 0.2}
PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "ippo": ("mappo", ALONE),
    "ppo": ("mappo", ALONE),
    "vdn": ("qmix", {"mixer": "vdn"}),
    "iql": ("qmix", {"mixer": "none"}),
    "ddpg": ("maddpg", ALONE),
    "matd3": ("maddpg", TD3),
    "td3": ("maddpg", {**TD3, **ALONE}),
    "sac": ("masac", ALONE),
}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_another_algorithm_with_options(name: str) -> None:
    base, options = PRESETS[name]
    preset, whole = load_plugin("algorithm", name), load_plugin("algorithm", base)
    assert preset.build is whole.build
    assert preset.Config().model_dump() == whole.Config(**options).model_dump()
    assert preset.Config(gamma=0.5).gamma == 0.5
    assert preset.__doc__ != whole.__doc__


@pytest.mark.parametrize("name", [n for n in PRESETS if n != "matd3"])
def test_a_preset_refuses_what_would_make_it_another(name: str) -> None:
    _, options = PRESETS[name]
    key, other = ("mixer", "qmix") if "mixer" in options else ("centralized", True)
    with pytest.raises(ConfigError, match=rf"algorithm\.{key}.*{other}"):
        validate(load_plugin("algorithm", name).Config, {key: other}, "algorithm")

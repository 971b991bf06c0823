"""Plug-ins by name."""

from importlib.metadata import EntryPoint
from typing import Any

import pytest

from murmur.learner_service import algorithms, networks
from murmur.shared.config.plugins import load_plugin, plugin_names
from murmur.shared.config.section import validate
from murmur.shared.process.errors import ConfigError

GROUP = "murmur.environments"


def test_a_module_in_the_folder_is_a_plugin() -> None:
    assert {"spread", "terrain"} <= set(plugin_names("environment"))
    assert load_plugin("environment", "spread").__name__ == "murmur.env_service.envs.spread"


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(
        ConfigError, match=r"no environment 'sprad'; did you mean 'spread'\? known: .*terrain"
    ):
        load_plugin("environment", "sprad")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("DQN", r"DQN is algorithm: \{name: iql, double_q: false\}"),
        ("IPPO", r"did you mean 'ippo'\?"),
        ("qtran", r"not built here; the nearest is algorithm: \{name: qplex\}"),
        ("MAPPO", r"did you mean 'mappo'\?"),
    ],
)
def test_a_name_of_the_literature_says_what_to_write(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_plugin("algorithm", name)


@pytest.mark.parametrize(("kind", "package"), [("algorithm", algorithms), ("network", networks)])
def test_what_is_advised_for_another_name_is_valid(kind: str, package: Any) -> None:
    for options in (*package.KNOWN_AS.values(), *package.NEAREST.values()):
        given = {key: value for key, value in options.items() if key != "name"}
        validate(load_plugin(kind, options["name"]).Config, given)
    assert not {*package.KNOWN_AS, *package.NEAREST} & set(plugin_names(kind))


def test_an_entry_point_of_another_package_is_a_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint(name="outside", value="murmur.shared.wire.timestep", group=GROUP)
    monkeypatch.setattr("murmur.shared.config.plugins.entry_points", lambda group: [entry])
    assert "outside" in plugin_names("environment")
    assert load_plugin("environment", "outside").__name__ == "murmur.shared.wire.timestep"


def test_a_package_cannot_take_the_place_of_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint(name="spread", value="murmur.shared.wire.timestep", group=GROUP)
    monkeypatch.setattr("murmur.shared.config.plugins.entry_points", lambda group: [entry])
    assert load_plugin("environment", "spread").__name__ == "murmur.env_service.envs.spread"


@pytest.mark.parametrize(
    ("kind", "function"), [("environment", "make"), ("algorithm", "build"), ("network", "build")]
)
def test_whatever_is_listed_can_be_chosen(kind: str, function: str) -> None:
    for name in plugin_names(kind):
        module = load_plugin(kind, name)
        assert {"Config", function} <= set(vars(module)), name

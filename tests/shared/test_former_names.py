"""Options under the names they had before: accepted for one release, with one notice each."""

import logging
import re
from pathlib import Path
from typing import Any

import pytest

from murmur.learner_service.checkpoint.contents import saved_config
from murmur.learner_service.layers.building import resolve_network
from murmur.learner_service.learning.options import CriticConfig
from murmur.runs.settings import resolved_data, with_plugin_defaults
from murmur.shared.config import PluginConfig, Section
from murmur.shared.config import section as checking
from murmur.shared.config.files import load
from murmur.shared.config.plugins import KINDS, load_plugin, plugin_names
from murmur.shared.config.section import FORMER_NAMES, REMOVED, validate
from murmur.shared.config.text import to_yaml
from murmur.shared.process.errors import ConfigError

OLD: dict[str, Any] = {
    "environment": {"name": "formation", "num_followers": 1, "normalise": True},
    "algorithm": {"name": "masac", "normalise_rewards": True, "replay": {"prioritised": True}},
    "network": {"name": "mlp", "initialisation": "he", "normalise_observations": True},
    "augment": {"preset": "random-shift", "colour": True},
}


@pytest.fixture(autouse=True)
def _unnoticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "_noticed", set())


def test_each_former_name_is_taken_with_one_notice(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            config = with_plugin_defaults(load(OLD, environ={}))
    assert config.augment.color
    assert config.environment.options["normalize"]
    assert config.algorithm.options["normalize_rewards"]
    assert config.algorithm.options["replay"]["prioritized"]
    assert config.network.options["initialization"] == "he"
    assert config.network.options["normalize_observations"]
    assert sorted(caplog.messages) == sorted(
        f"{old} is called {new} now; the former name works until 0.4"
        for old, new in (
            ("environment.normalise", "environment.normalize"),
            ("algorithm.normalise_rewards", "algorithm.normalize_rewards"),
            ("algorithm.replay.prioritised", "algorithm.replay.prioritized"),
            ("network.initialisation", "network.initialization"),
            ("network.normalise_observations", "network.normalize_observations"),
            ("augment.colour", "augment.color"),
        )
    )


def test_the_last_of_both_names_counts(tmp_path: Path) -> None:
    """A file of before may extend a configuration of now, and overrides may use either name."""
    base, mine = tmp_path / "base.yaml", tmp_path / "mine.yaml"
    base.write_text("environment: {name: snakes, normalize: true}\n")
    mine.write_text(f"extends: {base}\nenvironment: {{normalise: false}}\n")

    def normalizes(*overrides: str) -> bool:
        environment = with_plugin_defaults(
            load(str(mine), overrides, {}), ["environment"]
        ).environment
        return bool(environment.options["normalize"])

    assert not normalizes()
    assert normalizes("environment.normalize=true")
    assert not normalizes("environment.normalize=true", "environment.normalise=false")
    assert normalizes("environment.normalise=false", "environment.normalize=true")


def test_environment_variables_and_evaluations_take_former_names() -> None:
    config = load(OLD, ["evaluation.environment.normalise=false"], {"MURMUR__AUGMENT__COLOUR": "0"})
    assert not config.augment.color
    evaluated = with_plugin_defaults(
        with_plugin_defaults(config).for_evaluation(), ["environment"]
    ).environment
    assert not evaluated.options["normalize"]


def test_a_checkpoint_of_before_has_its_configuration() -> None:
    text = to_yaml(load(OLD, environ={})).replace("color:", "colour:")
    assert "colour: true" in text
    assert "normalise_rewards" in text
    config = saved_config({"config": text}, "update-000001.pt")
    assert config.augment.color
    assert resolved_data(config)["network"]["initialization"] == "he"


@pytest.mark.parametrize("key", REMOVED)
def test_an_option_that_is_gone_is_refused_unless_at_its_default(key: str) -> None:
    """Configurations of former runs, also in checkpoints, say every option."""
    default, instead = REMOVED[key]
    assert load(OLD, {key: default}, {}) == load(OLD, (), {})
    with pytest.raises(ConfigError, match=f"'{key}' = 77: it is gone; {re.escape(instead)}"):
        load(OLD, [f"{key}=77"], {})


def test_the_critics_network_takes_former_names() -> None:
    policy = PluginConfig(name="mlp", initialisation="orthogonal")
    critic = CriticConfig(critic_network={"initialisation": "he"}).network_of_critic(policy)
    assert resolve_network(critic, None).options.initialization == "he"
    with pytest.raises(ConfigError, match=r"normalize_observations: policy and critic are fed"):
        CriticConfig(critic_network={"normalise_observations": True}).network_of_critic(policy)


def test_an_option_of_a_foreign_plugin_keeps_its_name() -> None:
    class Own(Section):
        normalise: bool = False

    assert validate(Own, {"normalise": True}, "environment").normalise


def test_no_option_of_murmur_has_a_former_name() -> None:
    for kind in KINDS:
        for name in plugin_names(kind):
            assert not FORMER_NAMES.keys() & load_plugin(kind, name).Config.model_fields.keys()

"""Options of episodes in the configuration and on the wire."""

import math
from typing import Any

import numpy as np
import pytest

from murmur.shared.config.episode_options import EnvironmentConfig
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.config.section import PluginConfig, validate
from murmur.shared.config.text import parse_yaml, to_yaml
from murmur.shared.process.errors import ConfigError, WireError
from murmur.shared.rpc import rollout_pb2 as pb
from murmur.shared.wire.codec import ActionCodec
from murmur.shared.wire.episode_options import options_from_proto, options_to_proto
from murmur.shared.wire.seeding import unit
from murmur.shared.wire.spec import ArraySpec, Discrete, EnvSpec

WIND = {"from": 0, "to": 10, "over_env_steps": 100}
LEVELS: dict[str, Any] = {"levels": [1, 2], "when": {"metric": "success", "above": 0.8}}


def of(environment: dict[str, Any], **more: Any) -> ExperimentConfig:
    return validate(ExperimentConfig, {"environment": {"name": "gymnasium", **environment}, **more})


def test_options_of_episodes_are_none_of_the_environments_own() -> None:
    config = of({"arguments": {"id": 1}, "curriculum": {"wind": WIND}, "randomize": {"m": [1, 2]}})
    environment = config.environment
    assert environment.options == {"arguments": {"id": 1}}
    assert environment.names == ("wind", "m")
    assert environment.values_at(0) == {"wind": 0.0}
    assert environment.values_at(0.25) == {"wind": 2.5}
    assert validate(ExperimentConfig, parse_yaml(to_yaml(config), "x")) == config
    assert "curriculum" not in to_yaml(of({}))


def test_a_plugin_config_is_an_environment() -> None:
    config = ExperimentConfig(environment=PluginConfig(name="memory", delay=2))  # type: ignore[arg-type]
    assert config.environment == EnvironmentConfig(name="memory", delay=2)


def test_evaluations_have_the_last_value_and_ranges_of_their_own() -> None:
    ranges = {"mass": [1, 2], "size": [3, 4]}
    own = {"environment": {"randomize": {"mass": [5, 5]}}}
    config = of({"curriculum": {"wind": WIND}, "randomize": ranges}, evaluation=own)
    evaluated = config.for_evaluation().environment
    assert evaluated.values_at(1) == {"wind": 10.0}
    assert evaluated.drawn(3)["mass"] == 5
    assert evaluated.drawn(3)["size"] == config.environment.drawn(3)["size"]


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"curriculum": {"wind": 3}}, "'environment.curriculum.wind' = 3: it holds keys"),
        ({"curriculum": {"wind": {**WIND, "form": 1}}}, "'wind.form'; did you mean 'from'"),
        ({"curriculum": {"wind": {"from": 0, "to": 1}}}, "one of over_env_steps, over_updates"),
        ({"curriculum": {"wind": {**WIND, "over_updates": 1}}}, "give one of over_env_steps"),
        ({"curriculum": {"wind": {**WIND, "to": None}}}, "give levels, or from and to"),
        ({"curriculum": {"wind": {**LEVELS, "from": 1, "to": 2}}}, "give levels, or from and to"),
        ({"curriculum": {"wind": {**LEVELS, "levels": [1]}}}, r"levels=\[1\]: .* at least two"),
        ({"curriculum": {"wind": {**LEVELS, "when": {"metric": "x"}}}}, "above, or below"),
        ({"curriculum": {"wind": {**LEVELS, "when": {"mtric": "x"}}}}, "did you mean 'metric'"),
        ({"curriculum": {"wind": WIND}, "randomize": {"wind": [1, 2]}}, "both set 'wind'"),
        (
            {"arguments": {"wind": 2}, "curriculum": {"wind": WIND}},
            "arguments.wind=2 and curriculum.wind both set 'wind'",
        ),
        ({"arguments": {"m": 2}, "randomize": {"m": [1, 2]}}, "and randomize.m both set 'm'"),
        ({"randomize": {"m": [2, 1]}}, r"m: \[2, 1\]: write the least value first"),
        ({"randomize": {"m": [1, 2, 3]}}, r"write \[low, high\]"),
        ({"randomize": {"m": {"low": 0, "high": 1, "log": True}}}, "it must be more than 0"),
        ({"randomize": {"m": {"low": 0.5, "high": 1, "whole": True}}}, "whole bounds"),
        ({"randomize": {"m": {"low": 0, "high": 1e17, "whole": True}}}, "is beyond"),
        ({"curriculum": {"wind": {**WIND, "to": 1e17, "whole": True}}}, "is beyond"),
        ({"randomize": {"m": {"choices": []}}}, r"write \[low, high\]"),
        ({"randomize": {"m": [True, 2]}}, "'m.low' = True"),
    ],
)
def test_bad_options_are_refused_with_the_fix(environment: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        of(environment)


def test_evaluations_may_not_change_the_curriculum() -> None:
    with pytest.raises(ConfigError, match="evaluations use each course's last value"):
        of({"curriculum": {"wind": WIND}}, evaluation={"environment": {"curriculum": {}}})
    own = {"environment": {"arguments": {"wind": 1}}}
    with pytest.raises(ConfigError, match=r"evaluation\.environment: arguments\.wind=1"):
        of({"curriculum": {"wind": WIND}}, evaluation=own)


def test_from_more_to_less_is_a_line() -> None:
    course = {"from": 4, "to": 1, "over_updates": 3, "whole": True}
    environment = of({"curriculum": {"n": course}}).environment
    values = [environment.values_at(x / 3)["n"] for x in range(4)]
    assert values == [4, 3, 2, 1]
    assert all(type(value) is int for value in values)


def test_draws_are_uniform_and_independent() -> None:
    ranges = {
        "u": [2, 4],
        "l": {"low": 0.01, "high": 100, "log": True},
        "w": {"low": 1, "high": 3, "whole": True},
        "c": {"choices": ["a", 7, True]},
    }
    environment = of({"randomize": ranges}).environment
    draws = [environment.drawn(seed) for seed in range(2000)]
    u = np.array([draw["u"] for draw in draws], float)
    logs = np.log10(np.array([draw["l"] for draw in draws], float))
    assert abs(u.mean() - 3) < 0.05
    assert 2 <= u.min() < 2.01
    assert 3.99 < u.max() < 4
    assert abs(logs.mean()) < 0.15
    assert abs(logs.std() - 4 / math.sqrt(12)) < 0.1
    for name, values in (("w", [1, 2, 3]), ("c", ["a", 7, True])):
        counts = [sum(draw[name] == value for draw in draws) for value in values]
        assert min(counts) > 600
    assert abs(np.corrcoef(u, logs)[0, 1]) < 0.1
    assert draws[5] == environment.drawn(5)


def test_a_draw_by_hand() -> None:
    """Of every server and release: what is drawn for a seed may never change."""
    assert unit(1, "mass") == HAND
    assert of({"randomize": {"mass": [0.5, 2.0]}}).environment.drawn(1) == {
        "mass": 0.5 + 1.5 * HAND
    }


HAND = 0.377899478674547

SPEC = EnvSpec("x", 1, (ArraySpec("o", "float32", (1,)),), Discrete(3), (), 0)


def test_options_travel_unchanged() -> None:
    options: dict[str, Any] = {"a": 0.1, "b": 3, "c": True, "d": "maze-é", "e": -0.0, "f": 0}
    back = options_from_proto(options_to_proto(options))
    assert back == options
    assert [type(value) for value in back.values()] == [type(x) for x in options.values()]
    codec = ActionCodec(SPEC, 2)
    action = np.array([[1], [2]], np.int32)
    plain = codec.pack(4, 5, action)
    sequence, version, found = codec.unpack(codec.with_options(plain, options))
    assert (sequence, version, found.tolist()) == (4, 5, [[1], [2]])
    assert codec.options == options
    codec.unpack(plain)
    assert not codec.options


@pytest.mark.parametrize(
    "options",
    [
        [pb.EpisodeOption(name="a")],
        [pb.EpisodeOption(number=1)],
        [pb.EpisodeOption(name="a", number=math.nan)],
        [pb.EpisodeOption(name="a", number=1), pb.EpisodeOption(name="a", number=2)],
    ],
)
def test_options_without_a_value_end_the_stream(options: list[pb.EpisodeOption]) -> None:
    with pytest.raises(WireError, match="no value of option"):
        options_from_proto(options)

"""A critic whose network is not like the policy's."""

from typing import Any

import pytest
from torch import nn

from murmur.learner_service.device.precision import Precision
from murmur.learner_service.layers.building import resolve_network
from murmur.learner_service.layers.stacked import StackedLinear
from murmur.learner_service.learning.base import Algorithm, algorithm_config, build_algorithm
from murmur.learner_service.learning.options import CriticConfig
from murmur.runs.settings import with_plugin_defaults
from murmur.shared.config import PluginConfig
from murmur.shared.config.files import load
from murmur.shared.process.errors import ConfigError
from tests.learner_service.algorithms.test_contract import make_spec
from tests.learner_service.toys import CPU, map_spec

REPLAY = {"capacity_rows": 100, "start_rows": 10, "batch_size": 4}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "coma": {},
    "mappo": {},
    "maddpg": {"replay": REPLAY, "twin_critics": True},
    "masac": {"replay": REPLAY},
}


def build(algorithm: str, critic: dict[str, Any], **network: Any) -> Algorithm[Any]:
    spec = map_spec() if network.get("name") == "cnn" else make_spec("masked")
    options = ALGORITHMS[algorithm]
    return build_algorithm(
        PluginConfig(**{"name": algorithm, "critic_network": critic, **options}),
        *(spec, PluginConfig(**{"name": "mlp", "hidden": (7,), **network})),
        *(Precision("fp32", CPU), CPU, 0),
    )


def hidden(network: nn.Module) -> list[int]:
    """Widths of the linear layers but the last."""
    return [m.weight.shape[2] for m in network.modules() if isinstance(m, StackedLinear)][:-1]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_critic_has_layers_of_its_own(name: str) -> None:
    algorithm = build(name, {"hidden": (9, 5), "activation": "tanh"})
    actor, critic = algorithm.parts["actor"], algorithm.parts["critic"]
    assert isinstance(actor, nn.Module)
    assert isinstance(critic, nn.Module)
    assert (hidden(actor), hidden(critic)) == ([7], [9, 5])
    kinds = [
        sum(applies(m) for m in network.modules())
        for network in (actor, critic)
        for applies in (lambda m: getattr(m, "relu", False), lambda m: isinstance(m, nn.Tanh))
    ]
    assert kinds == [1, 0, 0, 2]


def test_a_recurrent_critic_keeps_the_policys_memory() -> None:
    algorithm = build("mappo", {"hidden": (9,)}, recurrent=4)
    assert algorithm.memory_size == 4
    critic = algorithm.parts["critic"]
    assert isinstance(critic, nn.Module)
    assert [m.weight.shape[2] for m in critic.modules() if isinstance(m, StackedLinear)] == [
        *(9, 4),  # then the GRU's inputs, 3 * 4, and the value
        *(12, 1),
    ]


@pytest.mark.parametrize(
    ("critic", "options", "message"),
    [
        ({"recurrent": 4}, {}, r"critic_network\.recurrent: .* alike; set network\.recurrent"),
        ({"widths": 4}, {}, "widths"),
        ({"name": "mlpp"}, {}, "mlpp"),
        (
            {"channels": (4,)},
            {"share_encoder": True, "centralized": False},
            r"critic_network\.channels: .*only the linear layers are the critic's own: hidden, ",
        ),
        ({"hidden": (4,)}, {"centralized": False, "share_trunk": True}, "leave out .*critic_net"),
    ],
)
def test_what_cannot_differ_is_refused(
    critic: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    spec = map_spec() if "share_encoder" in options else make_spec("masked")
    with pytest.raises(ConfigError, match=message):
        build_algorithm(
            PluginConfig(**{"name": "mappo", "critic_network": critic, **options}),
            *(spec, PluginConfig(name="auto"), Precision("fp32", CPU), CPU, 0),
        )


def test_a_critic_of_another_kind() -> None:
    cnn = {"name": "cnn", "channels": (4,), "kernels": (3,), "strides": (1,)}
    algorithm = build("mappo", {"name": "impala", "channels": (4,)}, **cnn)
    names = [type(m).__name__ for m in algorithm.parts["critic"].modules()]  # type: ignore[attr-defined]
    assert "Residual" in names


def test_a_resolved_network_has_a_critic_of_another_kind() -> None:
    """As a run that is resumed has it: with all options of the policy's network."""
    config = load(
        {
            "environment": {"name": "spread"},
            "algorithm": {"name": "mappo", "critic_network": {"name": "mlp", "hidden": (4,)}},
            "network": {"name": "cnn", "channels": (4,), "kernels": (3,), "strides": (1,)},
        },
        environ={},
    )
    options = with_plugin_defaults(config)
    assert "centered" in options.network.options
    algorithm = algorithm_config(options.algorithm)
    assert isinstance(algorithm, CriticConfig)
    critic = algorithm.network_of_critic(options.network)
    assert resolve_network(critic, None).options.hidden == (4,)

"""Activations, normalisation and initial weights of linear layers."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from murmur.learner_service.device.precision import Precision
from murmur.learner_service.layers.stacked import (
    LayersConfig,
    StackedLayerNorm,
    StackedLinear,
    linear_layers,
)
from murmur.learner_service.learning.base import build_algorithm
from murmur.shared.config import PluginConfig
from murmur.shared.wire.dataset import OBSERVATION
from murmur.shared.wire.spec import ACTION_MASK
from tests.learner_service.algorithms.test_contract import make_spec, rollout
from tests.learner_service.reference_layers import unstack
from tests.learner_service.toys import CPU


def layers(widths: list[int], slices: tuple[int, ...], **options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return linear_layers(widths, slices, LayersConfig(**options))


def weights(network: nn.Sequential) -> list[torch.Tensor]:
    return [m.weight.detach() for m in network if isinstance(m, StackedLinear)]


@pytest.mark.parametrize(
    ("name", "at_minus_one"),
    [
        ("relu", 0.0),
        ("elu", math.exp(-1) - 1),
        ("gelu", -0.5 * (1 + math.erf(-1 / math.sqrt(2)))),
        ("silu", -1 / (1 + math.e)),
        ("tanh", math.tanh(-1)),
    ],
)
def test_activation_by_hand(name: str, at_minus_one: float) -> None:
    network = layers([1, 1, 1], (0,), activation=name)
    with torch.no_grad():
        for parameter, value in zip(network.parameters(), (1, 0, 1, 0), strict=True):
            parameter.fill_(value)
        assert float(network(torch.tensor([[-1.0]]))) == pytest.approx(at_minus_one, abs=1e-6)


def test_layer_norm_by_hand() -> None:
    norm = StackedLayerNorm((0, 1), 2)
    with torch.no_grad():
        norm.weight[1], norm.bias[1] = 3, 5
        # (1, 3): mean 2, deviation 1, so (-1, 1); the second agent's times 3 plus 5.
        out = norm(torch.tensor([[1.0, 3.0], [1.0, 3.0]]))
    torch.testing.assert_close(out, torch.tensor([[-1.0, 1.0], [2.0, 8.0]]), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("slices", "stacked"),
    [((0, 0, 0), False), *((s, x) for s in ((0, 1, 2), (0, 0, 1)) for x in (False, True))],
)
def test_normed_layers_equal_torchs_in_a_loop(slices: tuple[int, ...], stacked: bool) -> None:
    network = layers([4, 5, 2], slices, layer_norm=True, activation="tanh")
    with torch.no_grad():
        network[1].weight.normal_()
        network[1].bias.normal_()
    loop = nn.Sequential(*layers([4, 5, 2], slices, layer_norm=True, activation="tanh"))
    loop.load_state_dict(network.state_dict())
    unstack(loop)
    x = torch.randn(3, 6, 4) if stacked else torch.randn(18, 4)
    torch.testing.assert_close(network(x), loop(x))


def test_orthogonal_weights_keep_lengths_times_the_gain() -> None:
    first, last = weights(layers([8, 8, 3], (0, 1), initialization="orthogonal", output_gain=0.01))
    for weight in first:  # W^T W = 2 I for ReLU
        torch.testing.assert_close(weight.T @ weight, 2 * torch.eye(8), atol=1e-5, rtol=0)
    for weight in last:
        torch.testing.assert_close(weight.T @ weight, 1e-4 * torch.eye(3), atol=1e-8, rtol=0)
    assert not torch.equal(first[0], first[1])


def test_he_weights_spread_by_their_inputs() -> None:
    first, last = weights(layers([400, 300, 200], (0,), initialization="he"))
    assert float(first.std()) == pytest.approx(math.sqrt(2 / 400), rel=0.02)
    assert float(last.std()) == pytest.approx(1 / math.sqrt(300), rel=0.02)


def test_default_weights_are_pytorchs() -> None:
    first = weights(layers([100, 300, 1], (0,)))[0]
    assert float(first.abs().max()) == pytest.approx(0.1, rel=0.01)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("share", [True, False], ids=["shared", "own"])
def test_an_algorithm_learns_with_every_option(precision: str, share: bool) -> None:
    spec = make_spec("masked")
    network = PluginConfig(
        name="mlp",
        **{"hidden": (8, 8), "recurrent": 4, "activation": "tanh", "layer_norm": True},
        **{"initialization": "orthogonal", "output_gain": 0.01},
    )
    algorithm = build_algorithm(
        PluginConfig(name="mappo", batch_size=20, batch_number=1, share_parameters=share),
        *(spec, network, Precision(precision, CPU), CPU, 0),
    )
    before = {k: v.clone() for k, v in algorithm.parts["actor"].state_dict().items()}
    batch = rollout(algorithm, spec, 0, (0, 1))
    taken = batch.arrays["log_prob"].exp()
    legal = batch.arrays[OBSERVATION + ACTION_MASK].sum(-1)
    torch.testing.assert_close(taken, 1 / legal.float(), atol=0.02, rtol=0)  # close to uniform
    assert float(algorithm.update(batch)["actor_grad_norm"]) > 0
    after = algorithm.parts["actor"].state_dict()
    assert all(not torch.equal(after[k], v) for k, v in before.items())

"""The layer that gives a network's outputs: found in each network, and rescaled by hand."""

import pytest
import torch
from torch import Tensor, nn

from learner_service.networks.building import build_network
from learner_service.networks.inputs import InputShape
from learner_service.networks.output_layer import output_layer, rescale_last
from learner_service.networks.recurrent import RecurrentState
from learner_service.networks.stacked import StackedLinear
from shared.config import PluginConfig

VECTOR = InputShape(None, 5)
GROUPS = (0, 0, 1)


def test_last_outputs_of_each_group_are_rescaled() -> None:
    network = build_network(PluginConfig(name="mlp"), VECTOR, 2, GROUPS)
    layer = output_layer(network, VECTOR, GROUPS)
    assert isinstance(layer, StackedLinear)
    vector = torch.randn(7, 3, 5)
    before = network(None, vector)
    rescale_last(layer, torch.tensor([3.0, 0.5]), torch.tensor([1.0, -2.0]))
    after = network(None, vector)
    torch.testing.assert_close(after[..., 0], before[..., 0])
    torch.testing.assert_close(after[:, :2, 1], 3 * before[:, :2, 1] + 1)
    torch.testing.assert_close(after[:, 2, 1], 0.5 * before[:, 2, 1] - 2)


@pytest.mark.parametrize(
    ("name", "image", "vector"),
    [
        ("mlp", None, 5),
        ("cnn", (3, 11, 11), 5),
        ("nature", (3, 84, 84), 0),
        ("impala", (3, 84, 84), 2),
    ],
)
def test_every_network_has_one_and_keeps_its_weights(
    name: str, image: tuple[int, int, int] | None, vector: int
) -> None:
    shape = InputShape(image, vector)
    network = build_network(PluginConfig(name=name), shape, 1, (0, 0))
    weights = {name: x.clone() for name, x in network.state_dict().items()}
    assert output_layer(network, shape, (0, 0)) is not None
    assert all(torch.equal(x, weights[name]) for name, x in network.state_dict().items())


def test_with_memory_it_reads_the_gru() -> None:
    network = build_network(
        PluginConfig(name="mlp", recurrent=8), VECTOR, 1, (0, 0, 0), may_remember=True
    )
    layer = output_layer(network, VECTOR, (0, 0, 0))
    assert layer is not None
    first = torch.ones(2, 4, dtype=torch.bool)
    inputs = None, torch.randn(8, 3, 5), RecurrentState(torch.zeros(4, 3, 8), first)
    before, _ = network(*inputs)
    rescale_last(layer, torch.tensor([2.0]), torch.tensor([1.0]))
    after, _ = network(*inputs)
    torch.testing.assert_close(after, 2 * before + 1)


class _Ending(nn.Module):
    """A plug-in's network; what follows its last linear layer differs."""

    def __init__(self, end: nn.Module, *, bias: bool = True) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1, bias=bias), end)

    def forward(self, image: Tensor | None, vector: Tensor) -> Tensor:
        out: Tensor = self.layers(vector)
        return out


def test_only_a_last_linear_layer_counts() -> None:
    torch.manual_seed(0)
    found = output_layer(network := _Ending(nn.Identity()), VECTOR, (0, 0))
    assert found is network.layers[2]
    vector = torch.randn(7, 2, 5)
    before = network(None, vector)
    rescale_last(found, torch.tensor([0.5]), torch.tensor([3.0]))
    torch.testing.assert_close(network(None, vector), 0.5 * before + 3)
    for other in (_Ending(nn.Tanh()), _Ending(nn.ReLU()), _Ending(nn.Identity(), bias=False)):
        assert output_layer(other, VECTOR, (0, 0)) is None
    assert output_layer(network, VECTOR, (0, 1)) is None  # two groups, one layer

"""Weights cast together: the numbers of autocast, with one kernel each way for all of them."""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from murmur.learner_service.device.precision import Precision
from murmur.learner_service.layers.building import build_network
from murmur.learner_service.layers.casting import cast_weights, frozen, snapshot
from murmur.learner_service.layers.inputs import InputShape
from murmur.learner_service.layers.recurrent import RecurrentState
from murmur.learner_service.learning.base import build_algorithm
from murmur.shared.config import PluginConfig
from tests.learner_service.toys import CPU, random_batch, vector_spec

SHAPES = {"mlp": InputShape(None, 5), "cnn": InputShape((3, 11, 11), 2)}
NETWORKS = {
    "mlp": {"name": "mlp", "hidden": (8, 8)},
    "gru": {"name": "mlp", "hidden": (8,), "recurrent": 4},
    "cnn": {"name": "cnn", "channels": (4, 4), "kernels": (3, 3), "strides": (1, 1)},
}
BF16 = Precision("bf16", CPU)
Within = Callable[[Precision, nn.Module], AbstractContextManager[None]]


def make(name: str, slices: tuple[int, ...]) -> tuple[nn.Module, InputShape]:
    shape = SHAPES["cnn" if name == "cnn" else "mlp"]
    torch.manual_seed(1)
    config = PluginConfig(**NETWORKS[name])
    return build_network(config, shape, 4, slices, may_remember=True), shape


def learn(
    network: nn.Module, shape: InputShape, precision: Precision, within: Within
) -> list[Tensor]:
    """Outputs of two steps of 6 joint rows, and the gradients of all parameters."""
    generator = torch.Generator().manual_seed(2)
    image = None if shape.image is None else torch.rand(12, 3, *shape.image, generator=generator)
    vector = torch.randn(12, 3, shape.vector, generator=generator)
    network.zero_grad()
    with within(precision, network):
        if hasattr(network, "remember"):
            first = torch.zeros(2, 6, dtype=torch.bool)
            out, _ = network(image, vector, RecurrentState(torch.ones(6, 3, 4), first))
        else:
            out = network(image, vector)
    out.float().square().sum().backward()
    return [out.detach(), *(p.grad.clone() for p in network.parameters() if p.grad is not None)]


def autocast(precision: Precision, network: nn.Module) -> AbstractContextManager[Any]:
    return precision.autocast()


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("slices", [(0, 0, 0), (0, 1, 2)])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_passes_equal_autocast_to_the_bit(
    name: str, slices: tuple[int, ...], precision: str
) -> None:
    network, shape = make(name, slices)
    arithmetic = Precision(precision, CPU)
    expected = learn(network, shape, arithmetic, autocast)
    found = learn(network, shape, arithmetic, cast_weights)
    assert len(found) == 1 + len(list(network.parameters()))
    for mine, its in zip(found, expected, strict=True):
        assert mine.dtype == its.dtype
        assert torch.equal(mine, its)


def test_agents_that_share_weights_in_groups_agree_with_autocast() -> None:
    network, shape = make("mlp", (0, 0, 1))
    expected = learn(network, shape, BF16, autocast)
    for mine, its in zip(learn(network, shape, BF16, cast_weights), expected, strict=True):
        # Two agents' gradients are added in bf16, which has 8 significant bits.
        torch.testing.assert_close(mine, its, rtol=0, atol=2**-7 * float(its.abs().max()))


class _Copies(TorchDispatchMode):
    """Counts conversions: of lists, and of single tensors by their number of elements."""

    def __init__(self) -> None:
        super().__init__()
        self.lists, self.sizes = 0, Counter[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name == "aten::_foreach_copy_":
            self.lists += 1
            assert all(a.stride() == b.stride() for a, b in zip(*args, strict=True))
        elif name in ("aten::_to_copy", "aten::copy_", "aten::clone"):
            self.sizes[args[0].numel()] += 1
        return out


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("slices", [(0, 0, 0), (0, 1, 2)])
def test_one_copy_casts_all_weights_and_one_their_gradients(
    name: str, slices: tuple[int, ...]
) -> None:
    network, shape = make(name, slices)
    with _Copies() as plain:
        learn(network, shape, BF16, autocast)
    with _Copies() as together:
        learn(network, shape, BF16, cast_weights)
    assert plain.lists == 0
    assert together.lists == 2
    cast = [p for part, p in network.named_parameters() if not part.startswith("gru.")]
    cast += [p for part, p in network.named_parameters() if part.startswith("gru.input")]
    assert plain.sizes.total() - together.sizes.total() >= 2 * len(cast)


def test_what_is_not_cast_is_the_parameter_itself() -> None:
    network = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    linear, norm = network
    weight = linear.weight
    with cast_weights(BF16, network):
        assert linear.weight.dtype == linear.bias.dtype == torch.bfloat16
        assert norm.weight.dtype == torch.float32
    assert linear.weight is weight
    with cast_weights(Precision("fp32", CPU), network):
        assert linear.weight is weight
    frozen_copy = snapshot(network, BF16)
    published = frozen_copy[0].weight
    with cast_weights(BF16, frozen_copy):
        assert frozen_copy[0].weight is published


def test_weights_are_parameters_again_after_an_error() -> None:
    network = nn.Linear(3, 4)
    weight = network.weight
    with pytest.raises(RuntimeError, match="shapes"), cast_weights(BF16, network):
        network(torch.zeros(2, 2))
    assert network.weight is weight
    assert list(network.state_dict()) == ["weight", "bias"]


def test_frozen_network_within_a_cast_passes_gradient_on() -> None:
    network = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    rows = torch.randn(5, 3, requires_grad=True)
    with cast_weights(BF16, network):
        learned = network(rows.detach())
        with frozen(network[1]):
            through = network[1](rows.new_ones(5, 4) * rows.sum(1, keepdim=True))
        assert network[1].weight.requires_grad
    through.float().sum().backward()
    assert rows.grad is not None
    assert all(p.grad is None for p in network.parameters())
    learned.float().sum().backward()
    assert all(p.grad is not None for p in network.parameters())


def test_a_compiled_network_casts_by_itself() -> None:
    network = nn.Sequential(nn.Linear(3, 4))
    network.compile(backend="eager")
    with cast_weights(BF16, network):
        assert torch.is_autocast_enabled("cpu")
        assert network[0].weight.dtype == torch.float32


@pytest.mark.parametrize("name", ["coma", "mappo"])
def test_an_update_casts_no_weight_alone(name: str) -> None:
    spec = vector_spec()
    network = PluginConfig(name="mlp", hidden=(31, 37))
    options = PluginConfig(name=name, batch_size=12, batch_number=2, data_passes=2)
    algorithm = build_algorithm(options, spec, network, BF16, CPU, 1)
    batch = random_batch(spec, 6, 4, 1)
    batch.arrays["log_prob"] = torch.full(batch.arrays["action"].shape, -1.0)
    with _Copies() as copies:
        algorithm.update(batch)
    weights = {
        p.numel()
        for net in (algorithm.actor, algorithm.critic)
        for p in net.parameters()
        if p.numel() > 37
    }
    assert copies.lists > 0
    assert not weights & set(copies.sizes)

"""What the built-in networks are made of."""

from typing import Any

import pytest
import torch

from murmur.learner_service.device.precision import Precision
from murmur.learner_service.layers.building import build_network, resolve_network
from murmur.learner_service.layers.forward import forward, forward_twice, number_of_twins
from murmur.learner_service.layers.inputs import (
    ActorInputs,
    CriticInputs,
    InputOptions,
    Inputs,
    InputShape,
)
from murmur.shared.config import PluginConfig
from murmur.shared.process.errors import ConfigError
from tests.learner_service.toys import CPU, map_spec


def count(network: torch.nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


PUBLISHED = PluginConfig(
    name="cnn", channels=(256, 256, 256), kernels=(5, 4, 4), strides=(1, 1, 1), hidden=(256,)
)


def test_the_published_cnn_has_the_reference_parameter_counts() -> None:
    # conv 7*256*25+256, conv 256*256*16+256 twice, linear 256*256+256, linear 256*6+6.
    # The released system counts 2 275 846 and 2 307 846: it also holds a linear layer of
    # 256*256+256 = 65 792 that its forward pass never uses.
    spec, config = map_spec(), PUBLISHED
    actor_shape, critic_shape = (
        ActorInputs(spec, InputOptions()).shape,
        CriticInputs(spec, InputOptions()).shape,
    )
    assert actor_shape == InputShape((7, 11, 11), 0)
    assert critic_shape == InputShape((12, 11, 11), 0)  # + 4 state maps + others' actions
    actor, critic = (build_network(config, s, 6) for s in (actor_shape, critic_shape))
    assert count(actor) == 2_275_846 - 65_792
    assert count(critic) == 2_307_846 - 65_792
    assert actor(torch.zeros(2, 1, 7, 11, 11), None).shape == (2, 1, 6)


def test_auto_picks_by_what_is_observed() -> None:
    auto = PluginConfig(name="auto")
    assert type(build_network(auto, InputShape(None, 4), 2)).__name__ == "MLP"
    assert type(build_network(auto, InputShape((1, 11, 11), 0), 2)).__name__ == "ImageNetwork"


def test_kernels_are_cut_to_what_is_left_of_a_small_map() -> None:
    config = PluginConfig(
        name="cnn", channels=(4, 4, 4), kernels=(5, 4, 4), strides=(1, 1, 1), hidden=(5,)
    )
    net = build_network(config, InputShape((2, 3, 6), 3), 2)
    # 5x4x4 on 3x6: 3x5 -> 1x2, 1x2 -> 1x1, 1x1 -> 1x1
    kernels = [m.kernel_size for m in net.modules() if isinstance(m, torch.nn.Conv2d)]
    assert kernels == [(3, 5), (1, 2), (1, 1)]
    assert net(torch.zeros(7, 1, 2, 3, 6), torch.zeros(7, 1, 3)).shape == (7, 1, 2)


def test_mlp_refuses_images_and_cnn_needs_them() -> None:
    with pytest.raises(ConfigError, match=r"'mlp' takes no images.*\(1, 4, 4\); use 'cnn'"):
        build_network(PluginConfig(name="mlp"), InputShape((1, 4, 4), 0), 2)
    with pytest.raises(ConfigError, match=r"'cnn' needs images.*use 'mlp'"):
        build_network(PluginConfig(name="cnn"), InputShape(None, 4), 2)
    uneven = PluginConfig(name="cnn", channels=(1, 2), kernels=(3,))
    with pytest.raises(ConfigError, match="must be equally long"):
        build_network(uneven, InputShape((1, 4, 4), 0), 2)


@pytest.mark.parametrize(
    ("side", "channels", "kernels", "strides"),
    [
        (3, (32, 32), (3, 3), (1, 1)),
        (7, (32, 32), (3, 3), (1, 1)),
        (15, (32, 32), (3, 3), (1, 1)),
        (16, (32, 64, 64), (5, 3, 3), (2, 1, 1)),
        (35, (32, 64, 64), (5, 3, 3), (2, 2, 1)),
    ],
)
def test_layers_of_a_map_suit_its_size(
    side: int, channels: tuple[int, ...], kernels: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    for name in ("auto", "cnn"):
        options = resolve_network(PluginConfig(name=name), (3, side, side + 2)).options
        assert (options.channels, options.kernels, options.strides) == (channels, kernels, strides)
        net = build_network(PluginConfig(name=name), InputShape((3, side, side + 2), 0), 4)
        assert count(net) < 700_000


def test_layers_of_a_map_are_as_many_as_are_given() -> None:
    def layers(**given: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        found = resolve_network(PluginConfig(name="cnn", **given), (3, 7, 7)).options
        return found.channels, found.kernels, found.strides

    assert layers(channels=(8,)) == ((8,), (3,), (1,))
    assert layers(channels=(8, 8, 8, 8))[1:] == ((3, 3, 3, 3), (1, 1, 1, 1))
    assert layers(kernels=(2, 2, 2)) == ((32, 32, 32), (2, 2, 2), (1, 1, 1))
    assert layers(strides=(2,)) == ((32,), (3,), (2,))


def test_an_mlp_by_hand() -> None:
    net = build_network(PluginConfig(name="mlp", hidden=(2,)), InputShape(None, 2), 1)
    first, _, second = net.layers
    with torch.no_grad():
        first.weight.copy_(torch.tensor([[[1.0, -1.0], [2.0, 0.0]]]))  # [slice, in, out]
        first.bias.copy_(torch.tensor([[[0.5, 0.0]]]))
        second.weight.copy_(torch.tensor([[[3.0], [4.0]]]))
        second.bias.fill_(1.0)
    # relu(1*1 + 2*2 + .5) = 5.5, relu(-1) = 0; 3*5.5 + 4*0 + 1 = 17.5
    assert net(None, torch.tensor([[[1.0, 2.0]]])).item() == 17.5


def test_a_kernel_as_large_as_the_map_is_the_same_convolution() -> None:
    net = build_network(
        PluginConfig(name="cnn", channels=(4,), kernels=(5,), strides=(1,), hidden=()),
        InputShape((3, 5, 5), 0),
        2,
    )
    layer = next(m for m in net.modules() if isinstance(m, torch.nn.Conv2d))
    x = torch.randn(6, 3, 5, 5)
    plain = torch.nn.functional.conv2d(x, layer.weight, layer.bias)
    torch.testing.assert_close(layer(x), plain.relu())


class _Plain(torch.nn.Module):
    """A network that has nothing but `forward`."""

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.network = network
        self.twins = number_of_twins(network)

    def forward(self, image: torch.Tensor | None, vector: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.network(image, vector)
        return out


@pytest.mark.parametrize("hidden", [(), (16, 16)])
@pytest.mark.parametrize(
    ("slices", "agents", "twins"), [((0,), 3, 1), ((0, 1), 3, 2), ((0, 1, 2, 3, 0, 1), 3, 2)]
)
@pytest.mark.parametrize("name", ["mlp", "cnn", "normed"])
def test_rows_valued_for_two_actions_are_two_passes(
    name: str, slices: tuple[int, ...], agents: int, twins: int, hidden: tuple[int, ...]
) -> None:
    shape = InputShape((2, 3, 3) if name == "cnn" else None, 5)
    options: dict[str, Any] = {}
    if name == "cnn":
        options = {"channels": (4,), "kernels": (2,), "strides": (1,)}
    elif name == "normed":
        name, options = "mlp", {"layer_norm": True, "activation": "silu"}
    network = build_network(PluginConfig(name=name, hidden=hidden, **options), shape, 2, slices)
    network.twins = twins
    rows = 4, agents
    image = torch.randn(*rows, *shape.image) if shape.image else None
    vector, change = torch.randn(*rows, 5), torch.randn(*rows, 2)
    wanted = torch.randn(2, 4, agents, 2 * twins)

    def go(some: torch.nn.Module) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        network.zero_grad()
        moved = change.clone().requires_grad_()
        both = forward_twice(some, Inputs(image, vector), moved, Precision("fp32", CPU))
        (wanted * torch.stack(both)).sum().backward()
        return list(both), [moved.grad, *(p.grad for p in network.parameters())]

    outputs, gradients = go(network)
    plain_outputs, plain_gradients = go(_Plain(network))
    torch.testing.assert_close(outputs, plain_outputs)
    torch.testing.assert_close(gradients, plain_gradients)
    # The weights have learned from the first pass alone.
    network.zero_grad()
    first, _ = forward(network, Inputs(image, vector), precision=Precision("fp32", CPU))
    torch.testing.assert_close(outputs[0], first)
    (wanted[0] * first).sum().backward()
    torch.testing.assert_close(gradients[1:], [p.grad for p in network.parameters()])
    assert all(p.requires_grad for p in network.parameters())


class _Sum(torch.nn.Module):
    """Sums what it is fed; the second of two twins gives the negative."""

    twins = 2

    def forward(self, image: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
        sums = image.flatten(2).sum(2) + vector.sum(2)
        return (sums * torch.tensor([1, -1]).repeat(sums.shape[1] // 2)).unsqueeze(2)


def test_twins_are_fed_each_row_in_turn() -> None:
    image, vector = torch.tensor([1.0, 2.0]), torch.tensor([30.0, 40.0])
    rows = Inputs(image.view(1, 2, 1, 1, 1), vector.view(1, 2, 1))
    out, _ = forward(_Sum(), rows, precision=Precision("fp32", CPU))
    assert out.tolist() == [[[31, -31], [42, -42]]]

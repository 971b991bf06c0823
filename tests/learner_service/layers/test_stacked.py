"""Stacked layers equal a loop over agents, forward and backward, and keep agents apart."""

import pytest
import torch
from torch import Tensor, nn

from murmur.learner_service.layers.stacked import (
    StackedConv2d,
    StackedLinear,
    count_slices,
    linear_relu,
    resolve_sharing,
)
from murmur.shared.process.errors import ConfigError


@pytest.mark.parametrize("size", [4, 7])  # a map as large as the kernel takes the linear path
def test_one_slice_equals_torch(size: int) -> None:
    plain, ours = nn.Conv2d(3, 5, 4), StackedConv2d((0,), 3, 5, (4, 4), 1)
    ours.load_state_dict(plain.state_dict())
    image = torch.randn(6, 3, size, size)
    torch.testing.assert_close(ours(image), plain(image))
    ours(image).square().sum().backward()
    plain(image).square().sum().backward()
    torch.testing.assert_close(ours.weight.grad, plain.weight.grad)
    torch.testing.assert_close(ours.bias.grad, plain.bias.grad)


def rows_of(x: Tensor, agent: int, agents: int) -> Tensor:
    return x[agent::agents]


SLICES = [(0, 1), (0, 1, 2), (0, 0, 1), (1, 0, 1, 2), (1, 0), (0, 0)]


@pytest.mark.parametrize("slices", SLICES)
def test_slices_equal_a_loop_over_agents(slices: tuple[int, ...]) -> None:
    agents = len(slices)
    linear, conv = StackedLinear(slices, 4, 5), StackedConv2d(slices, 2, 3, (2, 2), 1)
    assert len(linear.weight) == count_slices(slices) == len(set(slices))
    vectors, images = torch.randn(6 * agents, 4), torch.randn(6 * agents, 2, 3, 3)
    loss, plain = torch.zeros(()), torch.zeros(())
    for agent, s in enumerate(slices):
        want = rows_of(vectors, agent, agents) @ linear.weight[s] + linear.bias[s]
        plain = plain + want.square().sum()
        torch.testing.assert_close(rows_of(linear(vectors), agent, agents), want, rtol=0, atol=1e-6)
        part = slice(3 * s, 3 * s + 3)
        want = nn.functional.conv2d(
            rows_of(images, agent, agents), conv.weight[part], conv.bias[part]
        )
        plain = plain + want.square().sum()
        torch.testing.assert_close(rows_of(conv(images), agent, agents), want, rtol=0, atol=1e-6)
    loss = linear(vectors).square().sum() + conv(images).square().sum()
    parameters = [linear.weight, linear.bias, conv.weight, conv.bias]
    for ours, theirs in zip(
        torch.autograd.grad(loss, parameters), torch.autograd.grad(plain, parameters), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize(("slices", "moved"), [((0, 1, 2), 1), ((0, 0, 1), 0), ((2, 1, 0), 1)])
def test_gradients_of_slices_stay_apart(slices: tuple[int, ...], moved: int) -> None:
    linear, conv = StackedLinear(slices, 4, 5), StackedConv2d(slices, 2, 3, (2, 2), 1)
    rows_of(linear(torch.randn(6, 4)), 1, 3).square().sum().backward()
    rows_of(conv(torch.randn(6, 2, 3, 3)), 1, 3).square().sum().backward()
    for parameter in (linear.weight, linear.bias, conv.weight, conv.bias):
        assert parameter.grad is not None
        norms = parameter.grad.view(count_slices(slices), -1).norm(dim=1)
        assert norms.nonzero().flatten().tolist() == [moved]  # only the second agent's


def test_sharing_by_all_by_none_and_by_groups() -> None:
    assert resolve_sharing(True, 3, "x") == (0, 0, 0)
    assert resolve_sharing(False, 3, "x") == (0, 1, 2)
    assert resolve_sharing((0, 1, 0), 3, "x") == (0, 1, 0)
    with pytest.raises(ConfigError, match=r"= \[0, 1\] names the networks of 2 .* has 3; give one"):
        resolve_sharing((0, 1), 3, "algorithm.of")
    for gap in ((0, 2, 2), (1, 1, 2), (0, -1, 1)):
        with pytest.raises(ConfigError, match="must number the networks 0, 1, 2, … and use each"):
            resolve_sharing(gap, 3, "x")


def test_a_layer_fused_with_relu_equals_both_to_the_bit() -> None:
    x, weight, bias = torch.randn(40, 7), torch.randn(7, 5), torch.randn(5)
    found = []
    for fused in (True, False):
        given = [t.clone().requires_grad_() for t in (x, weight, bias)]
        rows, matrix, offset = given
        plain = torch.addmm(offset, rows, matrix).relu() if not fused else None
        out = linear_relu(*given) if plain is None else plain
        out.backward(torch.ones_like(out).cumsum(0))
        found.append([out.detach(), *(t.grad for t in given)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    with torch.no_grad():
        assert torch.equal(linear_relu(x, weight, bias), found[0][0])


@pytest.mark.parametrize("slices", [(0, 0), (0, 1)])
def test_layers_with_relu_equal_those_without_and_relu(slices: tuple[int, ...]) -> None:
    linear, conv = (
        StackedLinear(slices, 4, 8, relu=True),
        StackedConv2d(slices, 2, 3, (2, 2), 1, relu=True),
    )
    x, whole, image = torch.randn(6, 4), torch.randn(6, 2, 2, 2), torch.randn(6, 2, 5, 5)
    sums = linear(x, before_relu=True)
    assert (sums < 0).any()
    assert torch.equal(linear(x), sums.relu())
    for maps in (whole, image):
        conv.relu = False
        plain = conv(maps)
        conv.relu = True
        assert (plain < 0).any()
        assert torch.equal(conv(maps), plain.relu())

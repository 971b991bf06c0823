"""Stacked layers equal a loop over agents, forward and backward, and keep agents apart."""

import pytest
import torch
from torch import Tensor, nn

from learner_service.networks.stacked import StackedConv2d, StackedLinear


@pytest.mark.parametrize("size", [4, 7])  # a map as large as the kernel takes the linear path
def test_one_slice_equals_torch(size: int) -> None:
    torch.manual_seed(0)
    plain, ours = nn.Conv2d(3, 5, 4), StackedConv2d(1, 3, 5, (4, 4), 1)
    ours.load_state_dict(plain.state_dict())
    image = torch.randn(6, 3, size, size)
    torch.testing.assert_close(ours(image), plain(image))
    ours(image).square().sum().backward()
    plain(image).square().sum().backward()
    torch.testing.assert_close(ours.weight.grad, plain.weight.grad)
    torch.testing.assert_close(ours.bias.grad, plain.bias.grad)


def rows_of(x: Tensor, agent: int, agents: int) -> Tensor:
    return x[agent::agents]


@pytest.mark.parametrize("agents", [2, 3])
def test_slices_equal_a_loop_over_agents(agents: int) -> None:
    torch.manual_seed(0)
    linear, conv = StackedLinear(agents, 4, 5), StackedConv2d(agents, 2, 3, (2, 2), 1)
    vectors, images = torch.randn(6 * agents, 4), torch.randn(6 * agents, 2, 3, 3)
    for agent in range(agents):
        want = rows_of(vectors, agent, agents) @ linear.weight[agent] + linear.bias[agent]
        torch.testing.assert_close(rows_of(linear(vectors), agent, agents), want)
        part = slice(3 * agent, 3 * agent + 3)
        want = nn.functional.conv2d(
            rows_of(images, agent, agents), conv.weight[part], conv.bias[part]
        )
        torch.testing.assert_close(rows_of(conv(images), agent, agents), want)


def test_gradients_of_agents_stay_apart() -> None:
    linear, conv = StackedLinear(3, 4, 5), StackedConv2d(3, 2, 3, (2, 2), 1)
    rows_of(linear(torch.randn(6, 4)), 1, 3).square().sum().backward()
    rows_of(conv(torch.randn(6, 2, 3, 3)), 1, 3).square().sum().backward()
    for parameter in (linear.weight, linear.bias, conv.weight, conv.bias):
        assert parameter.grad is not None
        norms = parameter.grad.view(3, -1).norm(dim=1)
        assert norms[1] > 0
        assert norms[0] == norms[2] == 0

"""Convolutions by Toom and Cook's method are convolutions."""

import pytest
import torch
import torch.nn.functional as F

from learner_service.networks import toom_cook
from learner_service.networks.stacked import StackedConv2d

SIZES = [(n, k) for n in range(2, toom_cook.LARGEST_MAP + 1) for k in range(2, n + 1)]


def test_one_row_by_hand() -> None:
    # 1 * 1 + 2 * 0 + 4 * 2 + 5 * 3, and one to the right, one down, both; + 10.
    x = torch.tensor([[[[1.0, 2, 3], [4, 5, 6], [7, 8, 9]]]])
    weight, bias = torch.tensor([[[[1.0, 0], [2, 3]]]]), torch.tensor([10.0])
    want = torch.tensor([[[[34.0, 40], [52, 58]]]])
    torch.testing.assert_close(toom_cook.conv2d(x, weight, bias), want)


@pytest.mark.parametrize(("n", "k"), SIZES)
def test_values_and_gradients_equal_the_direct_sum(n: int, k: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 16, n, n, requires_grad=True)
    weight = (torch.randn(8, 16, k, k) / (4 * k)).requires_grad_()
    bias = torch.randn(8, requires_grad=True)
    ours, direct = toom_cook.conv2d(x, weight, bias), F.conv2d(x, weight, bias)
    assert ours.shape == direct.shape
    torch.testing.assert_close(ours, direct, rtol=0, atol=5e-5)
    factor = torch.randn_like(direct)
    got = torch.autograd.grad(ours, [x, weight, bias], factor)
    want = torch.autograd.grad(direct, [x, weight, bias], factor)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-5 * float(b.abs().max()))


def test_it_is_taken_where_it_is_faster() -> None:
    layer = StackedConv2d((0,), 32, 32, (4, 4), 1)
    weight, many, few = layer.weight, torch.randn(32, 32, 7, 7), torch.randn(31, 32, 7, 7)
    assert toom_cook.is_faster(many, weight, (1, 1))
    with torch.profiler.profile() as profile:
        layer(many)
    assert "aten::bmm" in {event.key for event in profile.key_averages()}
    assert not toom_cook.is_faster(few, weight, (1, 1))
    assert not toom_cook.is_faster(many, weight, (2, 2))
    assert not toom_cook.is_faster(many.double(), weight.double(), (1, 1))
    assert not toom_cook.is_faster(torch.randn(32, 32, 8, 8), weight, (1, 1))
    assert not toom_cook.is_faster(many, weight[:31], (1, 1))
    with torch.autocast("cpu", torch.bfloat16):
        assert not toom_cook.is_faster(many, weight, (1, 1))

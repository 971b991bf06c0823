"""Convolutions by Toom and Cook's method are convolutions."""

import pytest
import torch
import torch.nn.functional as F

from murmur.learner_service.layers import toom_cook
from murmur.learner_service.layers.stacked import StackedConv2d

SIZES = [
    (n, k, pieces)
    for n in range(2, toom_cook.LARGEST_MAP + 1)
    for k in range(2, n + 1)
    for pieces in range(1, k + 1)
    if k % pieces == 0 and (n - k + 1) % pieces == 0
]


def test_one_row_by_hand() -> None:
    # 1 * 1 + 2 * 0 + 4 * 2 + 5 * 3, and one to the right, one down, both; + 10.
    x = torch.tensor([[[[1.0, 2, 3], [4, 5, 6], [7, 8, 9]]]])
    weight, bias = torch.tensor([[[[1.0, 0], [2, 3]]]]), torch.tensor([10.0])
    want = torch.tensor([[[[34.0, 40], [52, 58]]]])
    torch.testing.assert_close(toom_cook.conv2d(x, weight, bias), want)


def test_what_acting_has_prepared_serves_learning() -> None:
    """A policy's forward pass runs in inference mode, whose tensors no backward pass may use."""
    toom_cook._matrices.cache_clear()
    convolution = StackedConv2d((0,), 32, 32, (4, 4), 1)
    x = torch.ones(32, 32, 7, 7)
    with torch.inference_mode():
        convolution(x)
    assert toom_cook._matrices.cache_info().currsize == 1
    convolution(x).sum().backward()
    assert convolution.weight.grad is not None


@pytest.mark.parametrize(("n", "k", "pieces"), SIZES)
def test_values_and_gradients_equal_the_direct_sum(n: int, k: int, pieces: int) -> None:
    x = torch.randn(6, 16, n, n, requires_grad=True)
    weight = (torch.randn(8, 16, k, k) / (4 * k)).requires_grad_()
    bias = torch.randn(8, requires_grad=True)
    ours, direct = toom_cook.conv2d(x, weight, bias, pieces), F.conv2d(x, weight, bias)
    assert ours.shape == direct.shape
    torch.testing.assert_close(ours, direct, rtol=0, atol=5e-5)
    factor = torch.randn_like(direct)
    got = torch.autograd.grad(ours, [x, weight, bias], factor)
    want = torch.autograd.grad(direct, [x, weight, bias], factor)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-5 * float(b.abs().max()))


@pytest.mark.parametrize("autocast", [True, False])
def test_bfloat16_rounds_at_most_2_5_times_the_direct_sum(autocast: bool) -> None:
    x = torch.randn(32, 128, 7, 7).relu().requires_grad_()
    weight = (torch.randn(128, 128, 4, 4) / 45).requires_grad_()
    bias = torch.zeros(128, requires_grad=True)
    inputs = [x, weight, bias]
    factor = torch.randn(32, 128, 4, 4)
    want = F.conv2d(*inputs)
    wanted = [want.detach(), *torch.autograd.grad(want, inputs, factor)]

    def errors(pieces: int | None) -> list[float]:
        """Of the result and of the three gradients, relative, root mean square."""
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            given = inputs if autocast else [i.bfloat16() for i in inputs]
            out = toom_cook.conv2d(*given, pieces) if pieces else F.conv2d(*given)
        assert out.dtype == torch.bfloat16
        got = [out, *torch.autograd.grad(out, inputs, factor.bfloat16())]
        pairs = zip(got, wanted, strict=True)
        return [float((a.detach().float() - b).norm() / b.norm()) for a, b in pairs]

    for ours, direct in zip(errors(pieces=2), errors(pieces=None), strict=True):
        assert ours <= 2.5 * direct


def test_it_is_taken_where_it_is_faster() -> None:
    layer = StackedConv2d((0,), 128, 128, (4, 4), 1)
    weight, many, few = layer.weight, torch.randn(32, 128, 7, 7), torch.randn(31, 128, 7, 7)
    assert toom_cook.pieces(many, weight, (1, 1)) == 1
    with torch.profiler.profile() as profile:
        layer(many)
    assert "aten::bmm" in {event.key for event in profile.key_averages()}
    assert toom_cook.pieces(few, weight, (1, 1)) is None
    assert toom_cook.pieces(many, weight, (2, 2)) is None
    assert toom_cook.pieces(many.double(), weight.double(), (1, 1)) is None
    assert toom_cook.pieces(torch.randn(32, 128, 8, 8), weight, (1, 1)) is None
    assert toom_cook.pieces(many[:, :32], weight[:32, :32], (1, 1)) == 1
    assert toom_cook.pieces(many, weight[:31], (1, 1)) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert toom_cook.pieces(many, weight, (1, 1)) == 2
        assert toom_cook.pieces(many, weight[:127], (1, 1)) is None
        assert toom_cook.pieces(many, weight[..., :3, :3], (1, 1)) is None

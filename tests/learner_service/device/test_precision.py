"""One optimiser step: clipped by norm, skipped where fp16 overflows."""

import logging
import math
from contextlib import suppress

import pytest
import torch
from torch import nn

from murmur.learner_service.device import precision as module
from murmur.learner_service.device.device import times_as_long_as_fp32
from murmur.learner_service.device.precision import Precision, _spread, clip_gradients
from murmur.shared.config.learner import LearnerConfig
from tests.learner_service.toys import CPU


def line(weight: float = 1.0) -> nn.Linear:
    layer = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        layer.weight.fill_(weight)
    return layer


def test_gradient_is_clipped_and_the_norm_before_is_returned() -> None:
    layer = line()
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    # d/dw of 3 w0 + 4 w1 is (3, 4), norm 5; clipped to norm 1: (.6, .8)
    loss = layer(torch.tensor([[3.0, 4.0]])).sum()
    norm = Precision("fp32", CPU).step(loss, optimizer, layer.parameters(), 1.0)
    assert float(norm) == pytest.approx(5)
    assert layer.weight.flatten().tolist() == pytest.approx([1 - 0.6, 1 - 0.8], abs=1e-5)


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_a_fused_optimizer_clips_as_a_plain_division_does(max_norm: float) -> None:
    rows = torch.randn(8, 4)
    layers = [nn.Linear(4, 3) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    fast, plain = (torch.optim.Adam(x.parameters(), lr=0.1, fused=True) for x in layers)
    precision = Precision("fp32", CPU)
    for _ in range(3):
        norm = precision.step(
            layers[0](rows).square().sum(), fast, layers[0].parameters(), max_norm
        )
        plain.zero_grad()
        layers[1](rows).square().sum().backward()
        expected = clip_gradients([list(layers[1].parameters())], max_norm, 1)[0]
        plain.step()
        assert torch.equal(norm, expected)
        for mine, its in zip(layers[0].parameters(), layers[1].parameters(), strict=True):
            assert torch.equal(mine, its)
    assert not hasattr(fast, "grad_scale")  # the next step is not clipped by it


def test_zero_means_no_clipping() -> None:
    layer = line()
    loss = layer(torch.tensor([[300.0, 400.0]])).sum()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    norm = Precision("fp32", CPU).step(loss, optimizer, layer.parameters(), 0)
    assert float(norm) == pytest.approx(500)
    assert layer.weight.flatten().tolist() == pytest.approx([-2, -3])


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_forward_uses_the_precision_and_weights_stay_fp32(name: str) -> None:
    layer, precision = line(), Precision(name, CPU)
    with precision.autocast():
        out = layer(torch.ones(1, 2))
    expected = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]
    assert out.dtype == expected
    assert layer.weight.dtype == torch.float32
    assert precision.scaler.is_enabled() == (name == "fp16")


def test_fp16_skips_a_step_that_overflows_and_takes_the_next() -> None:
    layer, precision = line(), Precision("fp16", CPU)
    precision.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1, fused=True)

    def step() -> float:
        with precision.autocast():
            out = layer(torch.tensor([[3.0, 4.0]]))
        return float(precision.step(out.float().sum(), optimizer, layer.parameters(), 1.0))

    assert step() == 0  # 2^20 * 3 is beyond fp16's 65504
    assert layer.weight.flatten().tolist() == [1, 1]
    assert precision.scaler.get_scale() == 2.0**19
    norms = [step() for _ in range(12)]
    assert norms[-1] == pytest.approx(5, rel=1e-3)
    assert layer.weight.max() < 1


@pytest.mark.parametrize(
    ("preset", "scale", "interval"),
    [("conservative", 2.0**10, 2000), ("aggressive", 2.0**16, 1000)],
)
def test_presets_of_the_loss_scaler(preset: str, scale: float, interval: int) -> None:
    scaler = Precision("fp16", CPU, preset).scaler
    assert scaler.get_scale() == scale
    assert scaler.get_growth_interval() == interval
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor()) == (2.0, 0.5)


def test_skipped_steps_and_the_scale_are_counted_on_the_device() -> None:
    layer, precision = line(), Precision("fp16", CPU, "aggressive")
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1, fused=True)
    for value in (4.0, 4.0, 0.01):  # 2^16 * 4 and 2^15 * 4 are beyond fp16's 65504
        with precision.autocast():
            out = layer(torch.full((1, 2), value))
        precision.step(out.float().sum(), optimizer, layer.parameters(), 1.0)
    found = {name: float(value) for name, value in precision.scalars().items()}
    assert found == {"loss_scale": 2.0**14, "scaler_skipped_steps": 2.0}
    assert not Precision("bf16", CPU).scalars()


def test_recovering_makes_a_scaler_ready_for_the_next_step() -> None:
    layer, precision = line(), Precision("fp16", CPU)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with precision.autocast():
        loss = layer(torch.ones(1, 2)).float().sum()
    with precision.gradients(optimizer) as scaled:
        scaled(loss).backward()  # an error ends the update here
    precision.recover()
    with precision.autocast():
        loss = layer(torch.ones(1, 2)).float().sum()
    precision.step(loss, optimizer, layer.parameters(), 1.0)
    assert precision.scaler.get_scale() == 2.0**10
    assert layer.weight.max() < 1


def test_an_error_within_gradients_leaves_them_to_the_next_step() -> None:
    """fp16: `unscale_` would refuse a second call before the update of the scale."""
    layer, precision = line(), Precision("fp16", CPU)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    loss = layer(torch.ones(1, 2)).sum()
    with suppress(ZeroDivisionError), precision.gradients(optimizer) as scaled:
        scaled(loss).backward()
        raise ZeroDivisionError
    assert layer.weight.grad is not None
    assert layer.weight.grad.flatten().tolist() == [2.0**10, 2.0**10]  # as scaled as they were
    loss = layer(torch.ones(1, 2)).sum()
    norm = precision.step(loss, optimizer, layer.parameters(), 0)
    assert float(norm) == pytest.approx(math.sqrt(2))
    torch.testing.assert_close(layer.weight.detach(), torch.full((1, 2), 0.9))


def test_a_product_in_fp32_takes_as_long_as_one_in_fp32() -> None:
    assert 0.02 < times_as_long_as_fp32(torch.float32) < 50  # a machine may be busy in one of them


@pytest.mark.parametrize(
    ("precision", "bearable", "told"),
    [("bf16", 0.0, True), ("bf16", math.inf, False), ("fp32", 0.0, False), ("auto", 0.0, False)],
)
def test_slow_arithmetic_on_the_cpu_is_told(
    precision: str,
    bearable: float,
    told: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(module, "_SLOW", bearable)
    with caplog.at_level(logging.WARNING):
        Precision.of(LearnerConfig.model_validate({"precision": precision}), CPU).warn_if_slow()
    assert ("set learner.precision=fp32" in caplog.text) == told


@pytest.mark.parametrize("num_slices", [1, 3])
def test_networks_clipped_together_are_clipped_as_alone(num_slices: int) -> None:
    shapes = [[(3, 4, 2), (3, 5)], [(3, 2), (3, 4), (3, 1)]]
    grads = [[torch.randn(shape) for shape in of_one] for of_one in shapes]
    together, alone = (
        [[nn.Parameter(torch.zeros_like(grad)) for grad in of_one] for of_one in grads]
        for _ in range(2)
    )
    for networks in (together, alone):
        for of_one, its in zip(networks, grads, strict=True):
            for parameter, grad in zip(of_one, its, strict=True):
                parameter.grad = grad.clone()
    norms = clip_gradients(together, 0.5, num_slices)
    apart = torch.cat([clip_gradients([of_one], 0.5, num_slices) for of_one in alone])
    assert torch.equal(norms, apart)
    for mine, its in zip(together, alone, strict=True):
        for p, q in zip(mine, its, strict=True):
            assert p.grad is not None
            assert torch.equal(p.grad, q.grad)


def test_each_gradient_finds_the_scale_of_its_slice() -> None:
    shapes = (((2, 2), (2, 1)), ((3, 1),))
    scales = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])  # of networks of two and of three slices
    spread = scales[_spread(shapes, CPU)]
    assert spread.tolist() == [1, 1, 2, 2, 1, 2, 3, 4, 5]

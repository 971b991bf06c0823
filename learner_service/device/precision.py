"""Mixed precision: autocast, loss scaling, clipping and the optimiser step, in one place."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Self

import torch
from torch import Tensor, nn

from murmur.learner_service.device.adam import Adam, step_together
from murmur.learner_service.device.device import half_precision, times_as_long_as_fp32
from murmur.learner_service.device.readback import to_host
from murmur.learner_service.ranks.group import ALONE, Group
from murmur.shared.config.learner import LearnerConfig
from murmur.shared.process.ledger import enter
from murmur.shared.process.process import logger

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SLOW = 1.5  # times as long as in fp32
# Of a loss's scale: its first value, and the steps without overflow after which it doubles. Every
# overflow halves it and costs a step.
_PRESETS = {"conservative": (2.0**10, 2000), "aggressive": (2.0**16, 1000)}


# Of each parameter of each network: slices, and numbers of each.
Shapes = tuple[tuple[tuple[int, ...], ...], ...]
Spreads = dict[Shapes, Tensor]


class _Scaler(torch.amp.GradScaler):
    """torch's, but that what is saved of it is read without a wait inside the driver."""

    def get_scale(self) -> float:
        """The scale of the loss."""
        if not self.is_enabled() or self._scale is None:
            return super().get_scale()
        return float(to_host(self._scale))

    def _get_growth_tracker(self) -> int:
        if not self.is_enabled() or self._growth_tracker is None:
            return super()._get_growth_tracker()
        return int(to_host(self._growth_tracker))


class Precision:
    """fp32, bf16 or fp16 arithmetic; weights, losses, returns and optimisers stay in fp32.

    Layers that normalise stay in fp32, too: autocast leaves them alone. Every optimiser step uses
    the mean of the gradients over the ranks of the group: all ranks make the same step.

    Only fp16 needs its loss scaled: bf16 has the exponent range of fp32 (Micikevicius et al. 2018,
    "Mixed Precision Training", arXiv:1710.03740).
    """

    def __init__(
        self,
        name: str,
        device: torch.device,
        grad_scaler: str = "conservative",
        group: Group = ALONE,
    ) -> None:
        """Choose the arithmetic.

        Args:
            name: fp32, bf16 or fp16.
            device: device of the arithmetic.
            grad_scaler: fp16: how the loss's scale is found, "conservative" or "aggressive".
            group: group of the ranks that learn together.
        """
        self.name = name
        self.dtype = _DTYPES[name]
        self._device = device
        self.group = group
        scale, interval = _PRESETS[grad_scaler]
        self.scaler = _Scaler(
            device.type, init_scale=scale, growth_interval=interval, enabled=name == "fp16"
        )
        self._skipped = torch.zeros((), device=device)
        self._spreads: Spreads = {}

    @classmethod
    def of(cls, config: LearnerConfig, device: torch.device, group: Group = ALONE) -> Self:
        """The configured arithmetic; `auto` is fp32 on the CPU, else the device's 16-bit type.

        In the async pipeline `auto` has been replaced before, see `with_precision`.
        """
        name = half_precision() if device.type == "cuda" else "fp32"
        if config.precision != "auto":
            name = config.precision
        return cls(name, device, config.grad_scaler, group)

    def warn_if_slow(self) -> None:
        """Say so if a CPU emulates it, at 100 times the time."""
        if self._device.type != "cpu" or self.name == "fp32":
            return
        times = times_as_long_as_fp32(self.dtype)
        if times > _SLOW:
            logger.warning(
                "learner.precision=%s: a matrix product takes %.0f times as long as in fp32 on "
                "this processor; set learner.precision=fp32",
                self.name,
                times,
            )

    def scalars(self) -> dict[str, Tensor]:
        """fp16: loss_scale and scaler_skipped_steps so far, on the device; else nothing."""
        if not self.scaler.is_enabled():
            return {}
        return {
            "loss_scale": self.scaler.scale(torch.ones_like(self._skipped)),
            "scaler_skipped_steps": self._skipped.clone(),
        }

    def autocast(self) -> AbstractContextManager[Any]:
        """Run forward passes within this."""
        if self.name == "fp32":
            return nullcontext()
        return torch.autocast(self._device.type, dtype=_DTYPES[self.name])

    def recover(self) -> None:
        """Reset the loss scaler's host state after an update that an error cut short."""
        if self.scaler.is_enabled():
            self.scaler.update(self.scaler.get_scale())

    def step(
        self,
        loss: Tensor,
        optimizer: torch.optim.Optimizer,
        parameters: Iterable[nn.Parameter],
        max_norm: float,
        num_slices: int = 1,
    ) -> Tensor:
        """Find the gradients, unscale, clip the gradient's norm, step.

        Args:
            loss: scalar, fp32.
            optimizer: optimizer of these parameters.
            parameters: those with gradients to clip together.
            max_norm: largest norm of the gradient; 0: no clipping.
            num_slices: agents with weights of their own, stacked along the parameters' first
                dimension: each agent's gradient is clipped by its own norm.

        Returns:
            the gradient's norm before clipping (the largest agent's), a scalar on the device (no
            synchronisation); 0 where fp16 overflowed, which skips the step and lowers the scale.
        """
        with self.gradients(optimizer) as scaled:
            torch.autograd.backward(scaled(loss))
        norms = self._clip_for([optimizer], [list(parameters)], max_norm, num_slices)
        self.apply(optimizer)
        return norms[0]

    def step_together(
        self,
        terms: Sequence[tuple[Tensor, Tensor]],
        learned: Sequence[tuple[torch.optim.Optimizer, nn.Module]],
        max_norm: float,
        num_slices: int = 1,
    ) -> Tensor:
        """As `step`, for several networks with one loss; each is clipped by its own norm.

        Args:
            terms: the loss, as values and their weights of the same shape: the sum over all of
                values times weights. No gradient reaches the weights.
            learned: optimisers, each with the network whose parameters it has.
            max_norm: largest norm of each gradient, see `step`.
            num_slices: number of agents with weights of their own, see `step`.

        Returns:
            [n] each network's norm, as `step` returns it.
        """
        optimizers = [optimizer for optimizer, _ in learned]
        values, weights = zip(*terms, strict=True)
        with self.gradients(*optimizers) as scaled:
            torch.autograd.backward(values, [scaled(weight) for weight in weights])
        norms = self._clip_for(
            optimizers, [_stepped(optimizer) for optimizer in optimizers], max_norm, num_slices
        )
        self.apply(*optimizers)
        return norms

    def step_slices(
        self,
        optimizer: torch.optim.Optimizer,
        networks: Sequence[tuple[list[nn.Parameter], int]],
        max_norm: float,
    ) -> list[Tensor]:
        """Clip the gradients of networks that one optimizer steps, and step, after `gradients`.

        Args:
            optimizer: optimizer of all of them.
            networks: parameters of each network, with its number of slices.
            max_norm: largest norm of each gradient, see `step`.

        Returns:
            each network's norm, as `step` returns it.
        """
        if all(slices > 1 for _, slices in networks):
            grads = [(_gradients(of_one), slices) for of_one, slices in networks]
            by_slice = clip_slices(grads, max_norm, self._spreads)
            norms = [of_one.amax() for of_one in by_slice]
        else:
            norms = [
                clip_gradients([of_one], max_norm, slices, self._spreads)[0]
                for of_one, slices in networks
            ]
        self.apply(optimizer)
        return [self._finite(norm) for norm in norms]

    @contextmanager
    def gradients(self, *optimizers: torch.optim.Optimizer) -> Iterator[Callable[[Tensor], Tensor]]:
        """Average over ranks, and unscale, the gradients that a backward pass within this finds.

        After an error within, nothing is averaged nor unscaled.

        Args:
            optimizers: optimizers whose parameters' gradients are reset first; other gradients
                accumulate.

        Yields:
            function that scales a loss, or the gradient of the loss with respect to an output;
            `torch.autograd.backward` takes what it returns.
        """
        enter("backward")
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        yield self.scaler.scale
        if self.group.size > 1:
            self._average(optimizers)
        enter("optimize")
        for optimizer in optimizers:
            self.scaler.unscale_(optimizer)

    def _average(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Average the gradients over the ranks in one exchange, scaled losses' as they are.

        An overflow on one rank is then one on all. A parameter without a gradient here has zeros:
        another rank may have one.
        """
        learned = {p: None for optimizer in optimizers for p in _stepped(optimizer)}
        for parameter in learned:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.group.mean_([p.grad for p in learned if p.grad is not None])

    def _clip_for(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        parameters: list[list[nn.Parameter]],
        max_norm: float,
        num_slices: int,
    ) -> Tensor:
        """`clip` for each; a fused optimiser divides all its gradients by one number itself."""
        fused = all(getattr(o, "_step_supports_amp_scaling", False) for o in optimizers)
        if not fused or not max_norm or num_slices > 1:
            norms = clip_gradients(parameters, max_norm, num_slices, self._spreads)
            return self._finite(norms)
        norms = gradient_norms([_gradients(of_one) for of_one in parameters])
        scales = (norms / max_norm).clamp_min(1)
        for optimizer, scale in zip(optimizers, scales.unbind(), strict=True):
            optimizer.grad_scale = scale  # type: ignore[attr-defined]
        return self._finite(norms)

    def _finite(self, norm: Tensor) -> Tensor:
        """0 where fp16 overflowed."""
        return norm.where(norm.isfinite(), 0.0) if self.scaler.is_enabled() else norm

    def apply(self, *optimizers: torch.optim.Optimizer) -> None:
        """Step the optimizers: the last part of `step`, after `gradients` and clipping."""
        if self.scaler.is_enabled():
            found = [self.scaler._found_inf_per_device(optimizer) for optimizer in optimizers]
            overflows = [overflow for of_one in found for overflow in of_one.values()]
            self._skipped.add_(torch.stack(overflows).amax())
        if not self.scaler.is_enabled() and all(isinstance(o, Adam) for o in optimizers):
            step_together([o for o in optimizers if isinstance(o, Adam)])
        else:
            for optimizer in optimizers:
                self.scaler.step(optimizer)
        for optimizer in optimizers:
            vars(optimizer).pop("grad_scale", None)  # of `_clip_for`
        self.scaler.update()
        enter("forward")


def _stepped(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return an optimiser's parameters: of networks that share some, its own."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def _gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def clip_gradients(
    parameters: list[list[nn.Parameter]],
    max_norm: float,
    num_slices: int,
    spreads: Spreads | None = None,
) -> Tensor:
    """Scale gradients of networks down to a norm, each slice's by its own.

    Args:
        parameters: those of each network.
        max_norm: largest norm; 0: no clipping.
        num_slices: number of slices of each network.
        spreads: keeps what is the same in every call.

    Returns:
        [n] each network's norm before, the largest slice's.
    """
    grads = [_gradients(of_one) for of_one in parameters]
    if num_slices == 1:
        norms = gradient_norms(grads)
        if max_norm:
            scales = (norms / max_norm).clamp_min(1)
            for of_one, scale in zip(grads, scales.unbind(), strict=True):
                torch._foreach_div_(of_one, scale)
        return norms
    by_slice = clip_slices([(of_one, num_slices) for of_one in grads], max_norm, spreads)
    return _stacked(by_slice).amax(1)


def clip_slices(
    grads: Sequence[tuple[list[Tensor], int]], max_norm: float, spreads: Spreads | None = None
) -> list[Tensor]:
    """Scale each slice's gradients down to a norm.

    Args:
        grads: those of each network, with its number of slices, more than one.
        max_norm: largest norm; 0: no clipping.
        spreads: keeps what is the same in every call.

    Returns:
        the norms before of each network's slices.
    """
    by_slice = [[grad.view(slices, -1) for grad in of_one] for of_one, slices in grads]
    norms = [_slice_norms(of_one) for of_one in by_slice]
    if max_norm:
        scales = (torch.cat(norms) / max_norm).clamp_min(1)
        _divide(by_slice, scales, {} if spreads is None else spreads)
    return norms


def _slice_norms(grads: list[Tensor]) -> Tensor:
    """[S] the norm of each row of all gradients [S, ...] of a network together."""
    if grads[0].device.type != "cpu":  # two kernels, where norms of each and of them are five
        norms: Tensor = torch.linalg.vector_norm(torch.cat(grads, 1), dim=1)
        return norms
    parts = torch._foreach_norm([row for grad in grads for row in grad.unbind(0)])
    norms = torch.linalg.vector_norm(torch.stack(parts).view(len(grads), -1), dim=0)
    return norms


def _divide(by_slice: list[list[Tensor]], scales: Tensor, spreads: Spreads) -> None:
    """Divide gradients [S, ...] of networks by the numbers of their slices, one by one."""
    every = [grad for of_one in by_slice for grad in of_one]
    if scales.device.type == "cpu":
        each = torch.split(scales.unsqueeze(1), [len(of_one[0]) for of_one in by_slice])
        rows = [row for of_one, row in zip(by_slice, each, strict=True) for _ in of_one]
    else:  # operations on lists are one kernel where shapes are equal, else one for each tensor
        shapes = tuple(tuple(tuple(grad.shape) for grad in of_one) for of_one in by_slice)
        if shapes not in spreads:
            spreads[shapes] = _spread(shapes, scales.device)
        spread = scales.index_select(0, spreads[shapes])
        parts = torch.split(spread, [grad.numel() for grad in every])
        rows = [part.view_as(grad) for part, grad in zip(parts, every, strict=True)]
    torch._foreach_div_(every, rows)


def _spread(shapes: Shapes, device: torch.device) -> Tensor:
    """The number of its scale for each of all networks' gradients, which lie one by one."""
    each, first = [], 0
    for of_one in shapes:
        slices = of_one[0][0]
        numbers = torch.arange(first, first + slices, device=device).unsqueeze(1)
        each += [numbers.expand(-1, width).flatten() for _, width in of_one]
        first += slices
    return torch.cat(each)


def gradient_norms(grads: list[list[Tensor]]) -> Tensor:
    """[n] the norm of each network's gradients together."""
    every = [grad for of_one in grads for grad in of_one]
    if every[0].device.type != "cpu":  # two kernels, where norms of each and of them are five
        each = torch.cat([grad.flatten() for grad in every])
        numbers = [sum(grad.numel() for grad in of_one) for of_one in grads]
        norms: Tensor = each.new_empty(len(grads))
        for x, norm in zip(torch.split(each, numbers), norms.unbind(), strict=True):
            torch.linalg.vector_norm(x, out=norm)
        return norms
    parts = torch.stack(torch._foreach_norm(every))
    sizes = [len(of_one) for of_one in grads]
    if len(set(sizes)) == 1:
        norms = torch.linalg.vector_norm(parts.view(len(grads), -1), dim=1)
        return norms
    return _stacked([torch.linalg.vector_norm(part) for part in torch.split(parts, sizes)])


def _stacked(parts: list[Tensor]) -> Tensor:
    """torch.stack, without a copy of one."""
    return torch.stack(parts) if len(parts) > 1 else parts[0].unsqueeze(0)

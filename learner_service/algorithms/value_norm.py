"""Returns in units of their running deviation: PopArt."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from learner_service.algorithms.returns import of_agents
from learner_service.group.group import ALONE, Group
from learner_service.networks.inputs import InputShape
from learner_service.networks.output_layer import output_layer, rescale_last
from shared.process import logger


class ValueNorm(nn.Module):
    """Running mean and deviation of returns, with the bias of the first steps taken out.

    Each parameter group has its own: agents with networks of their own may be paid differently.
    Yu et al. 2022, section 5.1; van Hasselt et al. 2016, "Learning values across many orders of
    magnitude" (arXiv:1602.07714), section 2.2: what a change of the statistics does to values must
    be undone in the network's last layer. Else values of few updates grow with the deviation, which
    is that of returns that are made of values, and both without bound.
    """

    mean: Tensor
    square: Tensor
    weight: Tensor
    _sharing: Tensor

    def __init__(self, sharing: Tensor, decay: float = 0.99) -> None:
        """`sharing` [S, A] is of `sharing_agents`; `decay` what the past weighs at every update."""
        super().__init__()
        self._decay = decay
        self.register_buffer("_sharing", sharing, persistent=False)
        for name in ("mean", "square", "weight"):
            self.register_buffer(name, torch.zeros(len(sharing)))

    def update(
        self, returns: Tensor, counted: Tensor, group: Group = ALONE
    ) -> tuple[Tensor, Tensor]:
        """Update by returns [R, A] where `counted` is 1; a group without any keeps its statistics.

        The returns are those of all ranks of the group.

        Returns:
            [S] scale and [S] shift of the network's outputs that keep values as they were; the
            first statistics keep nothing, since values of a new network mean nothing.
        """
        started, mean, std = self._moments()
        counts, sums, squares = (
            self._sharing @ x.sum(0)
            for x in (counted, returns * counted, returns.square() * counted)
        )
        group.sum_([counts, sums, squares])
        fresh, counts = (1 - self._decay) * (counts > 0).float(), counts.clamp_min(1)
        self.mean.lerp_(sums / counts, fresh)
        self.square.lerp_(squares / counts, fresh)
        self.weight.lerp_(torch.ones_like(self.weight), fresh)
        _, new_mean, new_std = self._moments()
        scale, shift = std / new_std, (mean - new_mean) / new_std
        return torch.where(started, scale, 1.0), torch.where(started, shift, 0.0)

    def _moments(self) -> tuple[Tensor, Tensor, Tensor]:
        """Whether there are any, and each parameter group's mean and deviation, [S]."""
        weight = self.weight.clamp_min(1e-8)
        mean = self.mean / weight
        variance = self.square / weight - mean.square()
        started = self.weight > 0
        return started, mean, torch.where(started, variance.clamp_min(1e-4).sqrt(), 1.0)

    def _statistics(self) -> tuple[Tensor, Tensor]:
        """Each agent's mean and deviation, [A]."""
        _, mean, std = self._moments()
        return of_agents(mean, self._sharing), of_agents(std, self._sharing)

    def normalize(self, x: Tensor) -> Tensor:
        """[..., A] to units of the deviation."""
        mean, std = self._statistics()
        return (x - mean) / std

    def denormalize(self, x: Tensor) -> Tensor:
        """Back again."""
        mean, std = self._statistics()
        return x * std + mean


def value_rescaling(
    network: nn.Module, shape: InputShape, slices: tuple[int, ...], wanted: bool
) -> Callable[[Tensor, Tensor], None]:
    """What applies [S] scales and [S] shifts to the values of a network.

    Nothing does if it is not `wanted`, nor, with a warning, if the network ends in no linear layer.
    """
    layer = output_layer(network, shape, slices) if wanted else None
    if layer is not None:
        return partial(rescale_last, layer)
    if wanted:
        logger.warning(
            "the value network ends in no linear layer: its values move whenever "
            "algorithm.normalize_values renews their statistics, and may diverge; end it in a "
            "torch.nn.Linear with bias, or set algorithm.normalize_values=false"
        )
    return _keep


def _keep(scale: Tensor, shift: Tensor) -> None:
    pass

"""Running means and variances of arrays, by which they are brought to mean 0 and variance 1."""

import torch
from torch import Tensor, nn

from learner_service.group.group import ALONE, Group

_EPSILON = 1e-8  # added to variances
_CLIP = 10.0  # deviations; as Gymnasium, SB3 and CleanRL clip


class RunningMoments(nn.Module):
    """Mean and variance of all rows so far, for each parameter group, [S, *shape].

    Chan, Golub, LeVeque 1979, "Updating Formulae and a Pairwise Algorithm for Computing Sample
    Variances": counts, means and sums of squares of two samples are joined exactly. Nothing waits
    for the device. Before the first rows the mean is 0 and the variance 1.

    Attributes:
        count: [S] rows, float64.
        mean: float64.
        squares: sum of squared differences from the mean, float64.
        offset: the mean, float32.
        scale: 1 / deviation, float32.
        square_scale: 1 / root of the mean square, float32.
    """

    TAKEN_WHOLE = True  # fine-tuning: a count of rows without their mean is wrong

    count: Tensor
    mean: Tensor
    squares: Tensor
    offset: Tensor
    scale: Tensor
    square_scale: Tensor
    _set: Tensor
    _sharing: Tensor

    def __init__(self, sharing: Tensor, shape: tuple[int, ...]) -> None:
        """Begin with no rows; `sharing` [S, A] is of `sharing_agents`."""
        super().__init__()
        sets, self._shape = len(sharing), shape
        self.register_buffer("_sharing", sharing.double(), persistent=False)
        self.register_buffer("_set", sharing.argmax(0), persistent=False)
        self.register_buffer("count", torch.zeros(sets, dtype=torch.float64))
        for name in ("mean", "squares"):
            self.register_buffer(name, torch.zeros(sets, *shape, dtype=torch.float64))
        self.register_buffer("offset", torch.zeros(sets, *shape))
        for name in ("scale", "square_scale"):
            self.register_buffer(name, torch.ones(sets, *shape))

    def normalised(self, x: Tensor) -> Tensor:
        """[..., A, *shape] in deviations from the mean, at most 10 of them; float32."""
        offset, scale = self._of_agents(self.offset), self._of_agents(self.scale)
        return ((x.float() - offset) * scale).clamp(-_CLIP, _CLIP)

    def scaled(self, x: Tensor) -> Tensor:
        """[..., A, *shape] over the root of the mean square; float32, signs stay."""
        return x.float() * self._of_agents(self.square_scale)

    @torch.no_grad()
    def update(self, x: Tensor, counted: Tensor, group: Group = ALONE) -> None:
        """Take in rows, those of all ranks of the group.

        Args:
            x: [..., A, *shape].
            counted: [..., A] 1 for a row that counts, else 0.
            group: of the ranks.
        """
        agents = counted.shape[-1]
        weight = counted.reshape(-1, agents, 1).double()
        rows = x.reshape(-1, agents, self.mean[0].numel()).double().where(weight > 0, 0.0)
        counts, sums, squares = (
            self._sharing @ part.sum(0) for part in (weight, rows, rows.square())
        )  # [S, 1], [S, F], [S, F]
        group.sum_([counts, sums, squares])
        some, before = counts.clamp_min(1), self.count.unsqueeze(1)
        total = (before + counts).clamp_min(1)
        mean, known = self.mean.view_as(sums), self.squares.view_as(sums)
        difference = (sums / some - mean) * (counts > 0)
        within = squares - sums.square() / some
        known.add_(within + difference.square() * before * counts / total)
        mean.add_(difference * counts / total)
        self.count.add_(counts.squeeze(1))
        variance, begun = known / total, self.count.unsqueeze(1) > 0
        self.offset.view_as(sums).copy_(mean)
        for scale, square in (
            (self.scale, variance),
            (self.square_scale, variance + mean.square()),
        ):
            found = (square + _EPSILON).rsqrt()
            scale.view_as(sums).copy_(found.where(begun, 1.0))

    def _of_agents(self, x: Tensor) -> Tensor:
        """[A, *shape] of [S, *shape]; [1, *shape] stays."""
        return x if len(x) == 1 else x.index_select(0, self._set)

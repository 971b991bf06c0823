"""Running means and variances of arrays, by which they are brought to mean 0 and variance 1."""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from murmur.learner_service.device.readback import to_host
from murmur.learner_service.ranks.group import ALONE, Group

_EPSILON = 1e-8  # added to variances
_CLIP = 10.0  # deviations; as Gymnasium, SB3 and CleanRL clip
_KNOWN = 20.0  # deviations from the mean of all rows so far within which a value is taken as it is
CROWD_ROWS = 16  # joint rows; a smaller batch does not tell its outliers from the rest
_FEW = 100  # one in this number of a batch's values may be an outlier; two rows at least
_CROWD_REACH = 3.0  # ranges of a batch, beyond it
_RARE_REACH = 1000.0  # the same of rewards; and deviations, at least, from the known mean
CLIPPED = "clipped/"  # prefix of scalars: numbers that statistics did not take in as they are


class Outlier(NamedTuple):
    """The value of a batch that was clipped most, as tensors on the device.

    Attributes:
        at: [1] place in the batch's rows, [R, A, F] flat.
        value: [1] number as it came.
        taken: [1] number that entered the statistics.
    """

    at: Tensor
    value: Tensor
    taken: Tensor


def reach_of_constant(value: Tensor, deviations: float) -> Tensor:
    """Return the distance from a value that has never changed at which another is plausible.

    Args:
        value: any shape.
        deviations: times the value's size, at least 1; 0: any distance is.
    """
    return deviations * value.abs().clamp_min(1) if deviations else value + math.inf


def agents_of_slices(sharing: Tensor) -> list[Tensor | None]:
    """Return the agents of each parameter group, [number] int64; None: all are of one group.

    Args:
        sharing: [S, A] mask of `sharing_agents`.
    """
    if len(sharing) == 1:
        return [None]
    return [row.nonzero().flatten() for row in sharing]


def crowd(
    rows: Tensor,
    counts: Tensor,
    agents: Tensor | None,
    reach: float,
    constant: float,
    number: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the ends of what a batch makes plausible for a parameter group, [F].

    Args:
        rows: [R, A, F] rows, at least CROWD_ROWS.
        counts: [R, A, 1] whether a value counts.
        agents: agents of the group, see `agents_of_slices`; on the device of the rows.
        reach: ranges of the batch, without its few extremes, to each side of it.
        constant: reach for constant values, see `reach_of_constant`.
        number: scalar, R without padding; None: nothing is padded.
    """
    if agents is not None:
        rows, counts = rows.index_select(1, agents), counts.index_select(1, agents)
    values, valid = rows.flatten(0, 1), counts.flatten(0, 1)
    lowest, highest = values.where(valid, math.inf), values.where(valid, -math.inf)
    if number is None:
        few = max(2 * rows.shape[1], len(values) // _FEW)
        low = lowest.topk(few + 1, 0, largest=False).values[-1]
        high = highest.topk(few + 1, 0).values[-1]
    else:
        at = (number * rows.shape[1] // _FEW).clamp(2 * rows.shape[1], len(values) - 1).view(1)
        low = lowest.sort(0).values.index_select(0, at)[0]
        high = highest.sort(0, descending=True).values.index_select(0, at)[0]
    width = high - low
    beyond = (width * reach).where(width > 0, reach_of_constant(low, constant))
    enough = width >= 0  # else hardly a value counts
    return (low - beyond).where(enough, -math.inf), (high + beyond).where(enough, math.inf)


class RunningMoments(nn.Module):
    """Mean and variance of all rows so far, for each parameter group, [S, *shape].

    Chan, Golub, LeVeque 1979, "Updating Formulae and a Pairwise Algorithm for Computing Sample
    Variances": counts, means and sums of squares of two samples are joined exactly. Nothing waits
    for the device. Before the first rows the mean is 0 and the variance 1.

    A few absurd values must not set the scale of all others for good, so values are winsorised
    before they are taken in (Tukey 1962, "The Future of Data Analysis", section 14): clipped to
    what is plausible, by one of two intervals.

    - known: the mean of all rows so far, plus or minus 20 deviations;
    - crowd: the range of the batch without its 1 % lowest and highest values, and 3 times that
      range to each side, so that a change that many rows share is taken as it is.

    Of a constant no scale is known: plus or minus 20 times its size, at least 20. Rewards may be
    rare and large. They have wider intervals: sqrt(count) deviations, at least 1000, and 1000
    ranges; so one that was seen before is taken as it is, and of many rows no single one more than
    doubles the variance. Where nothing is clipped, the arithmetic is that of all rows.

    Attributes:
        clipped: values of the last update that were clipped, of this rank, float32 scalar.
        outlier: the one that was clipped most; None: not looked for, as none was.
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

    def __init__(self, sharing: Tensor, shape: tuple[int, ...], *, rare: bool = False) -> None:
        """Begin with no rows.

        Args:
            sharing: [S, A] mask of `sharing_agents`.
            shape: shape of a row of one agent.
            rare: rare large values are meant, as of rewards.
        """
        super().__init__()
        slices, self._rare = len(sharing), rare
        self._agents_of = agents_of_slices(sharing)
        self.clipped = sharing.new_zeros(())
        self.outlier: Outlier | None = None
        self.register_buffer("_sharing", sharing.double(), persistent=False)
        self.register_buffer("_set", sharing.argmax(0), persistent=False)
        self.register_buffer("count", torch.zeros(slices, dtype=torch.float64))
        for name in ("mean", "squares"):
            self.register_buffer(name, torch.zeros(slices, *shape, dtype=torch.float64))
        self.register_buffer("offset", torch.zeros(slices, *shape))
        for name in ("scale", "square_scale"):
            self.register_buffer(name, torch.ones(slices, *shape))

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
            counted: [..., A] mask: 1 for a row that counts, else 0.
            group: group of the ranks.
        """
        agents = counted.shape[-1]
        weight = counted.reshape(-1, agents, 1).double()
        rows = x.reshape(-1, agents, self.mean[0].numel()).double().where(weight > 0, 0.0)
        rows = self._plausible(rows, weight)
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

    def outlier_text(self) -> str:
        """Describe the value that the last update clipped most; waits for the device.

        Returns:
            an empty text if nothing was clipped.
        """
        if self.outlier is None:
            return ""
        clipped, at, came, taken = to_host([self.clipped, *self.outlier])
        if not clipped:
            return ""
        row = len(self._set), *self.mean.shape[1:]
        agent, *index = np.unravel_index(int(at) % math.prod(row), row)
        of = f" of agent {agent}" if len(self._set) > 1 else ""
        where = f" at index {[int(i) for i in index]}" if index else ""
        return f"{float(came):g}{of}{where} counts as {float(taken):.3g}"

    def _plausible(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Clip rows [R, A, F] where weight [R, A, 1] is not 0; see the class."""
        counts = weight > 0
        known_low, known_high = self._known()
        low, high = self._of_agents(known_low), self._of_agents(known_high)
        outside = ((rows < low) | (rows > high)) & counts
        self.clipped, self.outlier = self.clipped.new_zeros(()), None
        # The host of a CUDA device does not wait to see whether there is anything to clip.
        if rows.device.type == "cpu" and not outside.any():
            return rows
        if len(rows) >= CROWD_ROWS:
            reach = _RARE_REACH if self._rare else _CROWD_REACH
            crowds = [
                crowd(rows, counts, agents, reach, 0.0 if self._rare else _KNOWN)
                for agents in self._agents_of
            ]
            crowd_low, crowd_high = (torch.stack(ends) for ends in zip(*crowds, strict=True))
        else:  # it says nothing, and if it is the first, all of it is plausible
            first = self.count.unsqueeze(1) == 0
            crowd_low, crowd_high = (
                torch.full_like(known_low, end).where(first, -end) for end in (-math.inf, math.inf)
            )
        low = self._of_agents(torch.minimum(known_low, crowd_low))
        high = self._of_agents(torch.maximum(known_high, crowd_high))
        taken = torch.maximum(torch.minimum(rows, high), low).where(counts, rows)
        excess = (rows - taken).abs().flatten()
        self.clipped = (excess > 0).sum().float()
        at = excess.argmax(0, keepdim=True)
        came, counted = (x.flatten().gather(0, at) for x in (rows, taken))
        self.outlier = Outlier(at, came, counted)
        return taken

    def _known(self) -> tuple[Tensor, Tensor]:
        """Ends of what all rows so far make plausible, [S, F]; none (inf, -inf) without rows."""
        count = self.count.unsqueeze(1)
        mean, squares = (x.view(len(x), -1) for x in (self.mean, self.squares))
        reach = (squares / count.clamp_min(1)).sqrt()
        reach = reach * (count.sqrt().clamp_min(_RARE_REACH) if self._rare else _KNOWN)
        reach = reach.where(squares > 0, reach_of_constant(mean, 0.0 if self._rare else _KNOWN))
        reach = reach.where(count > 0, -math.inf)
        return mean - reach, mean + reach

    def _of_agents(self, x: Tensor) -> Tensor:
        """[A, *shape] of [S, *shape]; [1, *shape] stays."""
        return x if len(x) == 1 else x.index_select(0, self._set)

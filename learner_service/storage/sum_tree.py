"""Sampling in proportion to priorities, all on the device, no Python loop over them."""

import torch
from torch import Tensor

_BRANCHES = 128


class SumTree:
    """N priorities under sums of 128: a million are three levels.

    A draw descends from the root: at each level one cumulative sum over 128 numbers and one search
    in it, for the whole batch at once. Sums are added up again from their 128 parts whenever
    one changes, so they do not drift.

    Attributes:
        leaves: [N] priorities; a view, to read.
        root: [128] sums of all priorities, in as many parts; a view, to read.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        """Make a tree of priorities that are zero.

        Args:
            size: N, number of priorities.
            device: device of the priorities.
        """
        number = size
        self._levels: list[Tensor] = []  # leaves first
        while True:
            blocks = -(-size // _BRANCHES)
            self._levels.append(torch.zeros(blocks * _BRANCHES, device=device))
            if blocks == 1:
                break
            size = blocks
        self.leaves, self.root = self._levels[0][:number], self._levels[-1]

    def set(self, index: Tensor, priority: Tensor) -> None:
        """Set priorities.

        Args:
            index: [M] int64 indices; if one comes twice, its larger priority counts.
            priority: [M] float32, >= 0.
        """
        leaves = self._levels[0]
        leaves[index] = 0.0
        leaves.scatter_reduce_(0, index, priority, "amax")
        for below, above in zip(self._levels, self._levels[1:], strict=False):
            index = index // _BRANCHES
            above[index] = below.view(-1, _BRANCHES)[index].sum(1)

    def set_range(self, start: int, priority: Tensor) -> None:
        """Set the priorities at start, start + 1, ...: [M] float32."""
        self._levels[0][start : start + len(priority)] = priority
        stop = start + len(priority)
        for below, above in zip(self._levels, self._levels[1:], strict=False):
            start, stop = start // _BRANCHES, -(-stop // _BRANCHES)
            above[start:stop] = below.view(-1, _BRANCHES)[start:stop].sum(1)

    def sample(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw indices in proportion to their priority, one from each of `count` strata.

        Schaul, Quan, Antonoglou, Silver 2016, "Prioritized Experience Replay", appendix B.2.1
        (arXiv:1511.05952). Those of priority zero are never drawn; the total must not be zero.

        Returns:
            [count] int64 indices, and [count] their probabilities.
        """
        device = self._levels[0].device
        total = self.root.sum()
        # float64: float32 has but sixteen numbers for each of a million.
        left = torch.rand(count, generator=generator, device=device, dtype=torch.float64)
        left = (torch.arange(count, device=device) + left) * (total.double() / count)
        index: Tensor | None = None
        for level in reversed(self._levels):
            blocks = level.view(-1, _BRANCHES)
            if index is None:  # all draws begin at the root
                sums = blocks[0].cumsum(0, dtype=torch.float64)
            elif len(blocks) < count:  # add up each block once, else that of each draw
                sums = blocks.cumsum(1, dtype=torch.float64).index_select(0, index)
            else:
                sums = blocks.index_select(0, index).cumsum(1, dtype=torch.float64)
            # Rounding must not carry a draw past the last that has any priority.
            left = torch.minimum(left, sums[..., -1] * (1 - 1e-9))
            at = left if index is None else left.unsqueeze(1)
            branch = torch.searchsorted(sums, at, right=True)
            before = sums.gather(-1, (branch - 1).clamp_min(0))
            left = (at - torch.where(branch > 0, before, 0.0)).view(count)
            branch = branch.view(count)
            index = branch if index is None else torch.add(branch, index, alpha=_BRANCHES)
        assert index is not None
        return index, self._levels[0].index_select(0, index) / total

"""The belief about each cell, kept as the odds o = p / (1 - p) that it is of interest.

Bayes' rule adds log-odds, hence multiplies odds: a measurement with accuracy a makes them
o a / (1 - a) where the camera said 1 and o (1 - a) / a where it said 0, with no exponential. The
prior is p = 0.5, o = 1, so cells outside a footprint need no work at all. As in the released
system p is clamped to [1e-4, 0.9999] before every update and in every entropy.

Everything here touches only the cells of a footprint; sums over the whole map (pooled
probabilities, entropies, F1 counts) follow from the differences.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from murmur.env_service.compiled import compiled

P_MIN = 1e-4
ODDS_MIN = np.float32(P_MIN / (1 - P_MIN))
ODDS_MAX = np.float32((1 - P_MIN) / P_MIN)

# The weight of a cell is 1 above p = 0.501, 0 below 0.499, else 0.5. F1 counts it as of interest
# above 0.5, by enough that two contradicting looks stay a draw whatever a float's last bit says.
ODDS_HIGH = np.float32(0.501 / 0.499)
ODDS_LOW = np.float32(0.499 / 0.501)
ODDS_CLAIM = np.float32(1 + 1e-4)
UNDECIDED = 1  # label of a cell at 0.5: how many of ODDS_LOW, ODDS_CLAIM, ODDS_HIGH it exceeds

_ZERO = np.float32(0)
_ONE = np.float32(1)
_TWO = np.float32(2)
_HALF = np.float32(0.5)
_SQRT_HALF_BITS = np.int32(0x3F3504F3)  # float32 bits of sqrt(1/2)
_LOG2_SCALE = np.float32(2 / np.log(2))
_C3, _C5, _C7, _C9 = (np.float32(1 / n) for n in (3, 5, 7, 9))


class Pool(NamedTuple):
    """Area pooling of one axis, from map cells to the rows (or columns) of a feature map.

    A bin is `scale` cells long; a cell across a border belongs to both bins by its parts.

    Attributes:
        first: [cells] int64, bin in which a cell begins.
        share: [cells] float32, part of the cell in that bin; the rest is in the next.
        overlap: [cells + 1, bins] float64, part of each bin that the first n cells fill, in cells.
        scale: length of a bin, cells.
    """

    first: NDArray[np.int64]
    share: NDArray[np.float32]
    overlap: NDArray[np.float64]
    scale: float


def pool(cells: int, bins: int) -> Pool:
    """Make area pooling from `cells` to `bins` <= cells; equals OpenCV's INTER_AREA."""
    scale = cells / bins
    edges = np.arange(bins) * scale
    overlap = np.clip(np.arange(cells + 1)[:, None] - edges, 0.0, scale)
    inside = np.diff(overlap, axis=0)  # [cells, bins]
    first = np.argmax(inside > 1e-6, axis=1)
    share = inside[np.arange(cells), first]
    share[share > 1 - 1e-6] = 1.0
    return Pool(first.astype(np.int64), share.astype(np.float32), overlap, scale)


class Scratch(NamedTuple):
    """Working memory that all environments share.

    Attributes:
        seen: [A, rows, columns] uint8, last report of each agent's camera.
        words: [cells / 4] uint64, random bits.
        column: [H, Y] float32, pooled along x only; zero between calls.
        a, b, c: [Y] float32 rows.
        a_bits, b_bits: int32 views of a and b.
        exponent_a, exponent_b: [Y] int32 rows.
    """

    seen: NDArray[np.uint8]
    words: NDArray[np.uint64]
    column: NDArray[np.float32]
    a: NDArray[np.float32]
    b: NDArray[np.float32]
    c: NDArray[np.float32]
    a_bits: NDArray[np.int32]
    b_bits: NDArray[np.int32]
    exponent_a: NDArray[np.int32]
    exponent_b: NDArray[np.int32]


def scratch(num_agents: int, footprint: tuple[int, int], bins: int, columns: int) -> Scratch:
    """Allocate working memory for the largest footprint and a map of this number of columns."""
    a, b, c = np.zeros((3, columns), np.float32)
    return Scratch(
        np.zeros((num_agents, *footprint), np.uint8),
        np.zeros((footprint[0] * footprint[1] + 3) // 4, np.uint64),
        np.zeros((bins, columns), np.float32),
        a,
        b,
        c,
        a.view(np.int32),
        b.view(np.int32),
        *np.zeros((2, columns), np.int32),
    )


@compiled()
def fuse(
    odds: NDArray[np.float32],
    rect: NDArray[np.int64],
    seen: NDArray[np.uint8],
    ratio: np.float32,
    rows: Pool,
    columns: Pool,
    pooled: NDArray[np.float64],
    scratch: Scratch,
) -> None:
    """Fuse one measurement into one belief and keep its pooled probabilities up to date.

    Args:
        odds: [X, Y] belief.
        rect: [4] measured footprint.
        seen: [>= rows, >= columns] the camera's report of the footprint, from [0, 0] on.
        ratio: odds that a report is right.
        rows: pooling along x.
        columns: pooling along y.
        pooled: [H, W] mean probability of each bin, updated.
        scratch: working memory.
    """
    inverse = _ONE / ratio
    width = rect[3] - rect[2]
    delta = scratch.a[:width]
    for i in range(rect[0], rect[1]):
        belief = odds[i, rect[2] : rect[3]]
        report = seen[i - rect[0], :width]
        for j in range(width):
            old = belief[j]
            factor = ratio if report[j] else inverse
            new = min(max(old, ODDS_MIN), ODDS_MAX) * factor
            belief[j] = new
            delta[j] = (new - old) / ((_ONE + old) * (_ONE + new))  # p_new - p_old
        share = rows.share[i]
        target = scratch.column[rows.first[i], rect[2] : rect[3]]
        for j in range(width):
            target[j] += share * delta[j]
        if share < _ONE:
            rest = _ONE - share
            target = scratch.column[rows.first[i] + 1, rect[2] : rect[3]]
            for j in range(width):
                target[j] += rest * delta[j]
    _pool_change(rect, rows, columns, pooled, scratch)


@compiled()
def _pool_change(
    rect: NDArray[np.int64],
    rows: Pool,
    columns: Pool,
    pooled: NDArray[np.float64],
    scratch: Scratch,
) -> None:
    """Add a measurement's changes, pooled along x in scratch.column, to the bins; see fuse."""
    if rect[0] >= rect[1] or rect[2] >= rect[3]:
        return
    area = rows.scale * columns.scale
    last = rows.first[rect[1] - 1] + int(rows.share[rect[1] - 1] < _ONE)
    for r in range(rows.first[rect[0]], last + 1):
        for j in range(rect[2], rect[3]):
            value = scratch.column[r, j] / area
            scratch.column[r, j] = 0
            share = columns.share[j]
            pooled[r, columns.first[j]] += share * value
            if share < _ONE:
                pooled[r, columns.first[j] + 1] += (_ONE - share) * value


@compiled()
def entropy_row(odds: NDArray[np.float32], out: NDArray[np.float32], scratch: Scratch) -> None:
    """Compute the binary entropy, bits, of a row of odds: H = log2(1 + o) - o / (1 + o) log2(o).

    log2 in float32 by its exponent and 2 atanh((m - 1) / (m + 1)) of its mantissa m in
    [sqrt(1/2), sqrt(2)): only arithmetic, so the compiler vectorizes it. Exact at o = 1.

    Args:
        odds: [n] odds above 0; clamped to [ODDS_MIN, 1 / ODDS_MIN].
        out: [n] receives the entropy; may be `scratch.c`, not `scratch.a` or `scratch.b`.
        scratch: working memory.
    """
    n = odds.shape[0]
    a, b = scratch.a[:n], scratch.b[:n]
    a_bits, b_bits = scratch.a_bits[:n], scratch.b_bits[:n]
    exponent_a, exponent_b = scratch.exponent_a[:n], scratch.exponent_b[:n]
    for j in range(n):
        # H(o) = H(1 / o); below 1 the difference of two nearly equal terms does not arise.
        o = max(min(odds[j], _ONE / odds[j]), ODDS_MIN)
        out[j] = o / (_ONE + o)
        a[j] = o
        b[j] = _ONE + o
    for j in range(n):
        e = (a_bits[j] - _SQRT_HALF_BITS) >> np.int32(23)
        exponent_a[j] = e
        a_bits[j] -= e << np.int32(23)
        e = (b_bits[j] - _SQRT_HALF_BITS) >> np.int32(23)
        exponent_b[j] = e
        b_bits[j] -= e << np.int32(23)
    for j in range(n):
        s = (a[j] - _ONE) / (a[j] + _ONE)
        q = s * s
        log_o = np.float32(exponent_a[j]) + _LOG2_SCALE * s * (
            _ONE + q * (_C3 + q * (_C5 + q * (_C7 + q * _C9)))
        )
        s = (b[j] - _ONE) / (b[j] + _ONE)
        q = s * s
        log_1o = np.float32(exponent_b[j]) + _LOG2_SCALE * s * (
            _ONE + q * (_C3 + q * (_C5 + q * (_C7 + q * _C9)))
        )
        out[j] = log_1o - out[j] * log_o


class Totals(NamedTuple):
    """Sums over the global map of each environment, kept up to date by differences.

    All are [N] float64, counts too, which are exact below 2^53.

    Attributes:
        weighted: sum of w H; w = 1 of interest, 0.5 undecided, 0 not (belief).
        interest_entropy: sum of H over the cells truly of interest.
        interest: number of cells truly of interest.
        claimed: number of cells believed to be of interest.
        correct: number of claimed cells that are of interest.
        seen: number of cells looked at so far.
        gain: relative gain of the last step, sum w (H_before - H) / sum w H_before with w after
            the step.
        newly_seen: number of cells looked at for the first time in the last step.
    """

    weighted: NDArray[np.float64]
    interest_entropy: NDArray[np.float64]
    interest: NDArray[np.float64]
    claimed: NDArray[np.float64]
    correct: NDArray[np.float64]
    seen: NDArray[np.float64]
    gain: NDArray[np.float64]
    newly_seen: NDArray[np.float64]


@compiled(reassociate=True)
def settle_row(
    odds: NDArray[np.float32],
    entropy: NDArray[np.float32],
    label: NDArray[np.uint8],
    looked: NDArray[np.uint8],
    truth: NDArray[np.uint8],
    scratch: Scratch,
) -> tuple[np.float32, np.float32, np.float32, np.float32, np.float32, np.float32]:
    """Update entropy, label and looked of some cells after their odds changed.

    Args:
        odds: [n] belief after the step.
        entropy: [n] H before the step; overwritten.
        label: [n] label before the step (see UNDECIDED); overwritten.
        looked: [n] flags, 1 if a cell has ever been looked at; set to 1.
        truth: [n] ground truth.
        scratch: working memory.

    Returns:
        changes of (sum w H, sum w H_before, sum of H over true interest, claimed, correct, seen);
        the second with w after the step.
    """
    n = odds.shape[0]
    after = scratch.c[:n]
    entropy_row(odds, after, scratch)
    weighted = base = interest = claimed = correct = seen = _ZERO
    for j in range(n):  # float32 throughout, counts too: one vector width, all exact below 2^24
        old = np.float32(label[j])
        new = (
            (_ONE if odds[j] >= ODDS_LOW else _ZERO)
            + (_ONE if odds[j] > ODDS_CLAIM else _ZERO)
            + (_ONE if odds[j] > ODDS_HIGH else _ZERO)
        )
        new_weight = (_HALF if new > _ZERO else _ZERO) + (_HALF if new > _TWO else _ZERO)
        old_weight = (_HALF if old > _ZERO else _ZERO) + (_HALF if old > _TWO else _ZERO)
        label[j] = np.uint8(new)
        before = entropy[j]
        entropy[j] = after[j]
        weighted += new_weight * after[j] - old_weight * before
        base += (new_weight - old_weight) * before
        real = np.float32(truth[j])
        interest += real * (after[j] - before)
        change = (_ONE if new > _ONE else _ZERO) - (_ONE if old > _ONE else _ZERO)
        claimed += change
        correct += change * real
        seen += _ONE - np.float32(looked[j])
        looked[j] = 1
    return weighted, base, interest, claimed, correct, seen

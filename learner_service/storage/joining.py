"""Unrolls side by side: the arrays of a batch."""

import torch
from torch import Tensor

from learner_service.storage.storage import FILLED_WITH_ONES, Unroll
from shared.timestep import StepType


def part_of(unroll: Unroll, first: int, last: int) -> dict[str, Tensor]:
    """What is to be learned of some of an unroll's environments: views."""
    rows = slice(unroll.start, unroll.start + unroll.rows + 1)
    return {
        name: array[:, first:last] if name == "memory" else array[rows, first:last]
        for name, array in unroll.arrays.items()
    }


def side_by_side(parts: list[dict[str, Tensor]]) -> tuple[dict[str, Tensor], int]:
    """Copies of all parts, padded to one length with ABORTED rows; and the number of these."""
    length = max(len(part["step_type"]) for part in parts)
    padding = 0
    filled = []
    for part in parts:
        missing = length - len(part["step_type"])
        padding += missing * part["step_type"].shape[1]
        filled.append(_fill_up(part, missing) if missing else part)
    # torch.cat of one part copies too: the unroll is free for new rows from here on.
    return {k: _join([p[k] for p in filled]) for k in parts[0]}, padding


def _join(parts: list[Tensor]) -> Tensor:
    """[L + 1, B, ...] of parts [L + 1, b, ...]."""
    if parts[0].dim() <= 4:
        return torch.cat(parts, 1)
    # On CUDA parts of up to four dimensions are copied by one kernel.
    joined = torch.cat([part.flatten(2) for part in parts], 1)
    return joined.view(*joined.shape[:2], *parts[0].shape[2:])


def _fill_up(part: dict[str, Tensor], rows: int) -> dict[str, Tensor]:
    """Followed by this number of ABORTED rows: zeros, as they come over the wire."""
    filled = {}
    for name, array in part.items():
        if name == "memory":
            filled[name] = array
            continue
        value = int(StepType.ABORTED) if name == "step_type" else int(name in FILLED_WITH_ONES)
        aborted = torch.full_like(array[:1], value).expand(rows, *array.shape[1:])
        filled[name] = torch.cat([array, aborted])
    return filled


def lengthened(arrays: dict[str, Tensor], length: int) -> dict[str, Tensor]:
    """The arrays [<= length, B, ...] of a batch with `length` rows, the last ones ABORTED."""
    missing = length - len(arrays["step_type"])
    return _fill_up(arrays, missing) if missing else arrays

"""Replays of several learners, dealt to another number of them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learner_service.storage.feed import SavedPart
from shared.process import logger

Numbers = NDArray[np.int64]


def deal(
    parts: Sequence[SavedPart], rank: int, size: int, columns: int, chunk_columns: int
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Every size-th column of all parts, by age: what was put last is overwritten last.

    Args:
        parts: of replays with the same arrays; some may be empty.
        rank: that gets its share.
        size: number of learners.
        columns: it has room for; the oldest are lost where that is too few.
        chunk_columns: of each saved chunk.

    Returns:
        what `ReplayStorage.state_dict` would return of the rank's replay, and its columns.
    """
    of_part, source, lost = _shares(parts, rank, size, columns)
    count, first = len(source), parts[0].state
    length = first["length"]
    priorities = torch.zeros(count, length)
    arrays: dict[str, Tensor] = {}
    for at, part in enumerate(parts):
        target = np.flatnonzero(of_part == at)
        columns_here = source[target]
        priorities[target] = part.state["priorities"].view(-1, length)[columns_here]
        for number, read in sorted(part.chunks.items()):
            chunk, start = read(), number * chunk_columns
            inside = (columns_here >= start) & (columns_here < start + len(chunk["step_type"]))
            for name, array in chunk.items():
                if name not in arrays:
                    arrays[name] = torch.zeros((count, *array.shape[1:]), dtype=array.dtype)
                arrays[name][target[inside]] = array[columns_here[inside] - start]
    if lost:
        logger.warning("%d rows of the replay have no room here", lost * length)
    generators = {part.rank: part.state["generator"] for part in parts}
    state = {
        **first,
        "columns": columns,
        "inserted": sum(part.state["inserted"] for part in parts) // size,
        "rate": None,  # another than this rank's: a burst is due
        "cursor": count % columns,
        "filled": count,
        "priorities": priorities.flatten(),
        "max_priority": max(part.state["max_priority"] for part in parts),
        "generator": generators.get(rank, torch.empty(0, dtype=torch.uint8)),
        "prefetched": None,
    }
    return state, arrays


def _shares(
    parts: Sequence[SavedPart], rank: int, size: int, columns: int
) -> tuple[Numbers, Numbers, int]:
    """Of a rank's columns, oldest first, the part and the column there; and how many are lost."""
    of_part, source, age = [], [], []
    for at, part in enumerate(parts):
        state = part.state
        filled, total = state["filled"], state["columns"]
        first = state["cursor"] if filled == total else 0
        source.append((first + np.arange(filled)) % total)
        age.append(filled - np.arange(filled))  # 1: the newest
        of_part.append(np.full(filled, at))
    order = np.lexsort((np.concatenate(of_part), -np.concatenate(age)))[rank::size]
    lost = max(0, len(order) - columns)
    kept = order[lost:]
    return np.concatenate(of_part)[kept], np.concatenate(source)[kept], lost

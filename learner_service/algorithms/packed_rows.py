"""Named arrays of rows side by side in one array, so that one launch gathers rows of all of them.

Numbers of four bytes are in `words`, of one byte in `bytes`. Integers are kept as their bits.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

WORDS, BYTES = "words", "bytes"


class Part(NamedTuple):
    """Where an array's numbers are in a row.

    Attributes:
        name: of the array.
        kind: WORDS or BYTES.
        start: first of its numbers.
        shape: of a row of one agent.
        dtype: of the array.
    """

    name: str
    kind: str
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype


Layout = tuple[Part, ...]


def packed(arrays: Mapping[str, Tensor], spare: int = 0) -> tuple[Layout, dict[str, Tensor]]:
    """Lay arrays side by side.

    Args:
        arrays: name -> [R, A, ...].
        spare: words of each agent's row to leave free at the end.

    Returns:
        where each is, and WORDS [R, A, W + spare] float32 and BYTES [R, A, V] uint8 as far as there
        are any.
    """
    parts: dict[str, list[Tensor]] = {WORDS: [], BYTES: []}
    width, layout = {WORDS: 0, BYTES: 0}, []
    for name, x in arrays.items():
        kind = BYTES if x.element_size() == 1 else WORDS
        layout.append(Part(name, kind, width[kind], tuple(x.shape[2:]), x.dtype))
        parts[kind].append(_as_numbers(x, kind))
        width[kind] += math.prod(x.shape[2:])
    if spare:
        some = next(iter(arrays.values()))
        parts[WORDS].append(some.new_zeros((*some.shape[:2], spare), dtype=torch.float32))
    found = {kind: torch.cat(of, -1) for kind, of in parts.items() if of}
    return tuple(layout), found


def unpacked(layout: Layout, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Take apart what `packed` laid side by side: name -> [R, A, ...], copies."""
    found = {}
    for name, kind, start, shape, dtype in layout:
        x = rows[kind][..., start : start + math.prod(shape)].contiguous()
        if kind == BYTES:
            x = x.view(dtype)
        elif not dtype.is_floating_point:
            x = x.view(torch.int32).to(dtype)
        found[name] = x.view(*x.shape[:2], *shape)
    return found


def _as_numbers(x: Tensor, kind: str) -> Tensor:
    """[R, A, F] float32 or uint8."""
    x = x.unsqueeze(-1).flatten(2)
    if kind == BYTES:
        return x.view(torch.uint8)
    return x.float() if x.is_floating_point() else x.to(torch.int32).view(torch.float32)

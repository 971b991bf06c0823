"""Steps on minibatches as functions of named tensors, and what they return, side by side.

A CUDA graph reads its inputs at fixed addresses, so a step gets all that changes by name. Networks
are fed rows in blocks of one size, so that one graph of each network serves any number of rows.
"""

from collections.abc import Iterator, Mapping
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from learner_service.networks.inputs import Inputs
from learner_service.networks.recurrent import RecurrentState

_PARTS = ("stored", "vector", "memory", "first")
Fed = tuple[Inputs, RecurrentState | None]


def named(name: str, inputs: Inputs, state: RecurrentState | None) -> dict[str, Tensor]:
    """Name the inputs of a network; keys begin with `name`, the network's."""
    memory, first = (None, None) if state is None else (state.memory, state.first)
    parts = inputs.stored, inputs.vector, memory, first
    given = zip(_PARTS, parts, strict=True)
    return {f"{name}/{part}": x for part, x in given if x is not None}


def fed(name: str, given: Mapping[str, Tensor]) -> Fed:
    """Rebuild the inputs that `named` took apart."""
    stored, vector, memory, first = (given.get(f"{name}/{part}") for part in _PARTS)
    return Inputs(stored, vector), None if memory is None else RecurrentState(memory, first)


def blocks(
    inputs: Inputs, state: RecurrentState | None, size: int
) -> Iterator[tuple[int, int, Inputs, RecurrentState | None]]:
    """Parts of one size of a batch: the last one is filled up.

    Args:
        inputs: [B, A, ...]; with a recurrent state [T * B, A, ...].
        state: of B environments; None: rows are on their own.
        size: rows, or environments, of a block.

    Yields:
        where it begins among the B and ends, and what the network is fed.
    """
    if state is None:
        for start in range(0, inputs.batch, size):
            part = inputs.rows(slice(start, start + size))
            missing, stop = size - part.batch, start + part.batch
            yield start, stop, part.each(partial(_padded, dim=0, missing=missing)), None
        return
    assert state.first is not None
    steps, envs = state.first.shape
    for start in range(0, envs, size):
        stop = min(start + size, envs)
        missing = size - (stop - start)

        def of(x: Tensor, start: int = start, stop: int = stop, missing: int = missing) -> Tensor:
            own = x.view(steps, envs, *x.shape[1:])[:, start:stop]
            return _padded(own, 1, missing).flatten(0, 1)

        part = inputs.each(of)
        memory = _padded(state.memory[start:stop], 0, missing)
        yield (
            start,
            stop,
            part,
            RecurrentState(memory, _padded(state.first[:, start:stop], 1, missing)),
        )


def _padded(x: Tensor, dim: int, missing: int) -> Tensor:
    """Zeros behind what there is along a dimension."""
    return F.pad(x, (*(0 for _ in range(2 * (x.dim() - 1 - dim))), 0, missing)) if missing else x

"""Inputs of networks as named tensors, which steps on minibatches get."""

from collections.abc import Mapping

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

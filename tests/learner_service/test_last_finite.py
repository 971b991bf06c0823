"""An update that turned not finite leaves no trace, whatever the algorithm and its precision."""

import copy
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from murmur.learner_service.learning.base import Algorithm
from murmur.learner_service.loop import LastFinite
from murmur.learner_service.storage.rollout import Batch
from murmur.shared.wire.dataset import OBSERVATION
from tests.learner_service.algorithms.test_contract import ENTRIES, Case

POISONS = {"a reward": 1e30, "no number": math.nan, "infinity": math.inf, "an observation": 3e38}


def poisoned(batch: Any, poison: str) -> Any:
    """The same batch with one wrong number."""
    batch = copy.deepcopy(batch)
    if poison == "an observation":
        batch.arrays[OBSERVATION + "view"][1, 0] = POISONS[poison]
    elif isinstance(batch, Batch):
        batch.arrays["reward"][2:, 0, 0] = POISONS[poison]
    elif "memory" in batch.arrays:  # sequences, whose first rewards came before them
        batch.arrays["reward"][1:, 0, 0] = POISONS[poison]
    else:
        batch.reward[0, 0] = POISONS[poison]
    return batch


def tensors(state: object) -> list[Tensor]:
    """All tensors of a state_dict."""
    if isinstance(state, Tensor):
        return [state]
    inner = state.values() if isinstance(state, Mapping) else ()
    inner = state if isinstance(state, list | tuple) else inner
    return [t for value in inner for t in tensors(value)]


def state_of(algorithm: Algorithm) -> list[Tensor]:
    state = copy.deepcopy(algorithm.state_dict())
    state["parts"].pop("scaler")
    return tensors(state["parts"])


def same(one: list[Tensor], other: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def finite(algorithm: Algorithm, last: LastFinite, batch: Any) -> bool:
    """Update as the learner does; whether all that it looks at is finite."""
    last.keep()
    scalars = algorithm.update(copy.deepcopy(batch))
    return all(math.isfinite(float(x)) for x in (*scalars.values(), last.total()))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", ENTRIES)
def test_an_undone_update_leaves_no_trace(name: str, precision: str) -> None:
    """Of the first update too, before which optimisers have no state."""
    entry = ENTRIES[name]
    case = Case(entry, entry.spaces[0], False, entry.recurrent[-1])
    algorithm, untouched = (case.build(precision=precision) for _ in range(2))
    last, good = LastFinite(algorithm), case.batch(algorithm)
    for _ in range(2):
        before, counts = state_of(algorithm), dict(algorithm.counts)
        undone = set()
        for poison in POISONS:
            if not finite(algorithm, last, poisoned(good, poison)):
                undone.add(poison)
            last.restore()  # even if finite: an observation may meet a layer that saturates
        after = state_of(algorithm)
        if len(after) == len(before):  # else optimisers have made their state
            same(after, before)
        assert algorithm.counts == counts
        if precision == "fp16":  # the scale has fallen: what comes next is not the same
            assert finite(algorithm, last, good)
            continue
        assert undone >= {"a reward", "no number", "infinity"}
        # What is learned next is what would have been learned without it.
        algorithm._generator.set_state(untouched._generator.get_state())
        assert finite(algorithm, last, good)
        untouched.update(copy.deepcopy(good))
        same(state_of(algorithm), state_of(untouched))

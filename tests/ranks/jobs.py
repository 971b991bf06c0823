"""What ranks do in tests of learning: each keeps one algorithm."""

from typing import Any

import torch
from torch import Tensor, nn

from murmur.learner_service.learning.base import Algorithm
from murmur.learner_service.ranks.group import Group
from tests.ranks.draws import Draws, Rows

_kept: list[Algorithm[Any]] = []


def build(group: Group, case: Any) -> None:
    """Make the case's algorithm the one of this rank."""
    _kept[:] = [case.build(group)]


def update(
    group: Group, state: dict[str, Any], seed: int, parts: list[tuple[Any, Rows]]
) -> dict[str, Tensor]:
    """One update from a state; returns `outcome`."""
    algorithm, (batch, rows) = _kept[0], parts[group.rank]
    algorithm.load_state_dict(state)
    with Draws(seed, rows, group.rank):
        seen = algorithm.transforms.batch(batch)
        scalars = algorithm.update(seen)
    return outcome(algorithm, seen, scalars)


def outcome(
    algorithm: Algorithm[Any],
    batch: Any,
    scalars: dict[str, Tensor],
) -> dict[str, Tensor]:
    """All that an update changed and returned, by name."""
    found = {f"scalar/{name}": x.detach().float() for name, x in scalars.items()}
    if getattr(batch, "td_error", None) is not None:
        found["td_error"] = batch.td_error.detach()
    for name, part in algorithm.parts.items():
        if isinstance(part, nn.Module):
            tensors = {**dict(part.named_parameters()), **dict(part.named_buffers())}
            found |= {f"{name}/{key}": x.detach().clone() for key, x in tensors.items()}
        elif isinstance(part, torch.optim.Optimizer):
            for i, moments in enumerate(part.state.values()):
                found |= {f"{name}/{i}/{key}": x.clone() for key, x in moments.items()}
    scaler = algorithm.parts["scaler"].state_dict()
    return found | {f"scaler/{k}": torch.tensor(float(v)) for k, v in scaler.items()}

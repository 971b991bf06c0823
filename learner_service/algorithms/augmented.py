"""Rows of a rollout as an augmentation would have had them seen, for passes after the first."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from learner_service.algorithms.minibatches import Rows
from learner_service.augment import Augment
from learner_service.networks.inputs import Inputs
from learner_service.storage.rollout import Batch
from learner_service.storage.unroll import OBSERVATION

Fed = Callable[[dict[str, Tensor], Tensor], tuple[Inputs, Inputs]]


def passes(
    rows: Rows,
    count: int,
    batch: Batch,
    augment: Augment | None,
    generator: torch.Generator,
    fed: Fed,
    single: bool = False,
) -> Iterator[Rows]:
    """The rows of `count` passes: as they are, then, if there is an augmentation, augmented.

    Args:
        rows: whole rows, as they are.
        count: of passes.
        batch: that they are of.
        augment: what changes the rows of all passes but the first; None: nothing.
        generator: see `augmented`.
        fed: see `augmented`.
        single: whether passes are over rows of single agents.
    """
    first = rows.of_single_agents() if single else rows
    yield first
    for _ in range(count - 1):
        if augment is None:
            yield first
        else:
            observation = {name: x.flatten(0, 1) for name, x in batch.observation().items()}
            again = augmented(rows, observation, augment, generator, fed)
            yield again.of_single_agents() if single else again


@torch.no_grad()
def augmented(
    rows: Rows,
    observation: dict[str, Tensor],
    augment: Augment,
    generator: torch.Generator,
    fed: Fed,
) -> Rows:
    """The same transitions with what was seen and done augmented.

    Advantages, targets and log probabilities stay: a symmetry changes none of them, if the policy
    that acted is as symmetric as its world (Mittal et al. 2024, "Symmetry Considerations for
    Learning Task Symmetric Robot Policies", arXiv:2403.04359). With memory an environment's rows
    change alike.

    Args:
        rows: [R, A, ...] of whole rows, time outermost.
        observation: name -> [>= R, ...] what was seen; what is beyond R is left out.
        augment: what changes.
        generator: what it draws from.
        fed: inputs of the policy and of the critic from observations and actions taken.
    """
    count = len(rows.weight)
    batch = {OBSERVATION + name: x for name, x in observation.items()} | rows.columns
    batch = {name: x[:count] for name, x in batch.items()}
    first = None if rows.actor_state is None else rows.actor_state.first
    length = 1 if first is None else len(first)
    if length > 1:  # environments first
        batch = {k: x.reshape(length, -1, *x.shape[1:]).transpose(0, 1) for k, x in batch.items()}
    found = augment(batch, generator)
    if length > 1:
        found = {k: x.transpose(0, 1).flatten(0, 1) for k, x in found.items()}
    columns = {name: found[name] for name in rows.columns}
    seen = {name: found[OBSERVATION + name] for name in observation}
    actor, critic = fed(seen, columns["action"])
    return replace(rows, actor=actor, critic=critic, columns=columns)

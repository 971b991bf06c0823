"""Minibatches of a pass, each by itself."""

from dataclasses import dataclass

from torch import Tensor

from murmur.learner_service.learning.minibatches import Minibatch, Pass


@dataclass
class Part(Minibatch):
    """A minibatch with what a pass knows of it."""

    counts: Tensor
    sharing: Tensor


def apart(shuffled: Pass) -> list[Part]:
    return [
        Part(**vars(shuffled.at(k)), counts=shuffled.counts[k], sharing=shuffled.sharing)
        for k in range(shuffled.number)
    ]

"""An algorithm that learns from stacks of images, in a run whose rows hold single ones."""

from collections.abc import Mapping
from typing import Generic, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from learner_service.algorithms.base import Algorithm, Policy
from learner_service.algorithms.wrapping import Wrapping, WrappingPolicy
from learner_service.storage.frames import Frames
from learner_service.storage.storage import Batch

B = TypeVar("B", bound=Batch)


class StackingPolicy(WrappingPolicy):
    """A policy for stacks that is given single images and keeps the last ones in its memory."""

    def __init__(self, inner: Policy, frames: Frames) -> None:
        super().__init__(inner)
        self._frames = frames
        self.memory_size = inner.memory_size + frames.memory_size

    @torch.inference_mode()
    def act(
        self,
        observation: Mapping[str, Tensor],
        generator: torch.Generator | None,
        memory: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """See Policy; its memory is that of the policy inside, then the frames."""
        own = self.inner.memory_size
        if memory is None:
            some = observation[self._frames.images[0].name]
            memory = torch.zeros((*some.shape[:2], self.memory_size), device=some.device)
        stacked, previous = self._frames.see(observation, memory[..., own:])
        acted = self.inner.act(stacked, generator, memory[..., :own] if own else None)
        acted["memory"] = torch.cat([acted["memory"], previous], -1) if own else previous
        return acted


class Stacking(Wrapping[B], Generic[B]):
    """Its storage keeps single images, its batches hold stacks."""

    def __init__(self, inner: Algorithm[B], frames: Frames) -> None:
        inner.frames = self._stacked = frames
        super().__init__(inner)
        self.memory_size = inner.memory_size + frames.memory_size

    @override
    def make_policy(self) -> StackingPolicy:
        return StackingPolicy(self.inner.make_policy(), self._stacked)

    @override
    def publish(self, policy: Policy) -> None:
        assert isinstance(policy, StackingPolicy)
        self.inner.publish(policy.inner)

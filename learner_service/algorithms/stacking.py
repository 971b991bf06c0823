"""An algorithm that learns from stacks of images, in a run whose rows hold single ones."""

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from learner_service.algorithms.base import Algorithm, Policy, Stateful
from learner_service.storage.frames import Frames
from learner_service.storage.storage import Storage, Taken
from shared.spec import EnvSpec

B = TypeVar("B", bound=Taken)


class StackingPolicy(Policy):
    """A policy for stacks that is given single images and keeps the last ones in its memory."""

    def __init__(self, inner: Policy, frames: Frames) -> None:
        self.inner, self._frames = inner, frames
        self.memory_size = inner.memory_size + frames.memory_size
        for name, part in vars(inner).items():
            if isinstance(part, nn.Module):  # here, too: an export looks for weights
                setattr(self, name, part)

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
        stacked, past = self._frames.see(observation, memory[..., own:])
        acted = self.inner.act(stacked, generator, memory[..., :own] if own else None)
        acted["memory"] = torch.cat([acted["memory"], past], -1) if own else past
        return acted


class Stacking(Algorithm[B], Generic[B]):
    """Passes everything on to an algorithm built for the stacked spec."""

    def __init__(self, inner: Algorithm[B], frames: Frames) -> None:
        inner.frames = self.frames = self._stacked = frames
        self.inner, self.graphs = inner, inner.graphs
        self.unroll_length = inner.unroll_length
        self.rows_per_update = getattr(inner, "rows_per_update", 0)  # a replay's has none
        self.unrolls_per_update, self.extras = inner.unrolls_per_update, inner.extras
        self.memory_size = inner.memory_size + frames.memory_size

    @property
    def parts(self) -> Mapping[str, Stateful]:
        """See Algorithm."""
        return self.inner.parts

    @property
    def counts(self) -> dict[str, float]:
        """See Algorithm."""
        return self.inner.counts

    def precision_scalars(self) -> dict[str, Tensor]:
        """See Algorithm."""
        return self.inner.precision_scalars()

    def make_storage(self, spec: EnvSpec, max_policy_lag: int | None) -> Storage[Any]:
        """See Algorithm; the spec is that of single images."""
        return self.inner.make_storage(spec, max_policy_lag)

    def update(self, batch: B) -> dict[str, Tensor]:
        """See Algorithm; the batch holds stacks."""
        return self.inner.update(batch)

    def make_policy(self) -> StackingPolicy:
        """See Algorithm."""
        return StackingPolicy(self.inner.make_policy(), self._stacked)

    def publish(self, policy: Policy) -> None:
        """See Algorithm."""
        assert isinstance(policy, StackingPolicy)
        self.inner.publish(policy.inner)

    def compile(self, backend: str = "inductor") -> None:
        """See Algorithm."""
        self.inner.compile(backend)

    def state_dict(self) -> dict[str, Any]:
        """See Algorithm: the same as without stacking."""
        return self.inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See Algorithm."""
        self.inner.load_state_dict(state)

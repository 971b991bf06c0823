"""A base for algorithms that change what another algorithm learns from and acts on."""

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from learner_service.algorithms.base import Algorithm, Policy, Stateful
from learner_service.storage.feed import Taken
from learner_service.storage.storage import Storage
from shared.spec import EnvSpec

B = TypeVar("B", bound=Taken)


class WrappingPolicy(Policy):
    """A policy around another one."""

    def __init__(self, inner: Policy) -> None:
        self.inner, self.memory_size = inner, inner.memory_size
        for name, part in vars(inner).items():
            if isinstance(part, nn.Module):  # here, too: an export looks for weights
                setattr(self, name, part)


class Wrapping(Algorithm[B], Generic[B]):
    """Passes everything on to the algorithm inside."""

    def __init__(self, inner: Algorithm[B]) -> None:
        self.inner, self.graphs = inner, inner.graphs
        self.unroll_length = inner.unroll_length
        self.rows_per_update = getattr(inner, "rows_per_update", 0)  # a replay's has none
        self.unrolls_per_update, self.extras = inner.unrolls_per_update, inner.extras
        self.memory_size, self.frames = inner.memory_size, inner.frames

    @property
    def parts(self) -> Mapping[str, Stateful]:
        """See Algorithm."""
        return self.inner.parts

    @property
    def counts(self) -> dict[str, float]:
        """See Algorithm."""
        return self.inner.counts

    def keep(self, **parts: Stateful) -> None:
        """See Algorithm."""
        self.inner.keep(**parts)

    def precision_scalars(self) -> dict[str, torch.Tensor]:
        """See Algorithm."""
        return self.inner.precision_scalars()

    def outliers(self) -> dict[str, str]:
        """See Algorithm."""
        return self.inner.outliers()

    def graph_bytes(self, rows: int) -> float:
        """See Algorithm."""
        return self.inner.graph_bytes(rows)

    def make_storage(self, spec: EnvSpec, max_policy_lag: int | None) -> Storage[Any]:
        """See Algorithm."""
        return self.inner.make_storage(spec, max_policy_lag)

    def update(self, batch: B) -> dict[str, torch.Tensor]:
        """See Algorithm."""
        return self.inner.update(batch)

    def compile(self, backend: str = "inductor") -> None:
        """See Algorithm."""
        self.inner.compile(backend)

    def state_dict(self) -> dict[str, Any]:
        """See Algorithm: that of the algorithm inside."""
        return self.inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See Algorithm."""
        self.inner.load_state_dict(state)

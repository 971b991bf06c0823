"""A base for algorithms that change what another algorithm learns from and acts on."""

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from typing_extensions import override

from learner_service.algorithms.base import Algorithm, Policy, Stateful
from learner_service.storage.storage import Batch, UnrollStorage
from shared.spec import EnvSpec

B = TypeVar("B", bound=Batch)


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
    @override
    def parts(self) -> Mapping[str, Stateful]:
        return self.inner.parts

    @property
    @override
    def counts(self) -> dict[str, float]:
        return self.inner.counts

    @override
    def keep(self, **parts: Stateful) -> None:
        self.inner.keep(**parts)

    @override
    def precision_scalars(self) -> dict[str, torch.Tensor]:
        return self.inner.precision_scalars()

    @override
    def outliers(self) -> dict[str, str]:
        return self.inner.outliers()

    @override
    def graph_bytes(self, rows: int) -> float:
        return self.inner.graph_bytes(rows)

    @override
    def make_storage(self, spec: EnvSpec, max_policy_lag: int | None) -> UnrollStorage[Any]:
        return self.inner.make_storage(spec, max_policy_lag)

    @override
    def update(self, batch: B) -> dict[str, torch.Tensor]:
        return self.inner.update(batch)

    @override
    def compile(self, backend: str = "inductor") -> None:
        self.inner.compile(backend)

    def state_dict(self) -> dict[str, Any]:
        """See Algorithm: that of the algorithm inside."""
        return self.inner.state_dict()

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.inner.load_state_dict(state)

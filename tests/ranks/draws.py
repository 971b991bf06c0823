"""Random numbers of ranks as parts of those of one learner that has all of their rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


@dataclass(frozen=True)
class Rows:
    """Rows of one learner among those of all.

    Attributes:
        first: of them.
        count: of them.
        total: of all.
    """

    first: int
    count: int
    total: int


class Draws(TorchFunctionMode):
    """Replaces what is drawn from a generator.

    The n-th draw of every learner is a part of the same numbers: those of its rows. Shuffles differ
    by rank; one learner with all rows has the ranks' orders one after the other.
    """

    def __init__(
        self, seed: int, rows: Rows, rank: int, owners: Sequence[Tensor] | None = None
    ) -> None:
        """Begin with the first draw.

        Args:
            seed: the same for all.
            rows: to draw numbers for.
            rank: of this learner.
            owners: one learner with all rows: the rank of each unit of every shuffle; after the
                last shuffle they repeat.
        """
        super().__init__()
        self._seed, self._rows, self._rank, self._owners = seed, rows, rank, owners
        self._calls = self._shuffles = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("generator") is None:
            return func(*args, **kwargs)
        self._calls += 1
        name = func.__name__
        if name == "randperm":
            return self._order(args[0])
        assert name in ("normal_", "uniform_", "exponential_", "bernoulli_"), name
        mine, rows = args[0], self._rows
        dim = next(i for i, size in enumerate(mine.shape) if size % rows.count == 0)
        each = mine.shape[dim] // rows.count
        shape = list(mine.shape)
        shape[dim] = each * rows.total
        every = getattr(torch.empty(shape), name)(*args[1:], generator=self._generator(0))
        return mine.copy_(every.narrow(dim, each * rows.first, each * rows.count))

    def _generator(self, stream: int) -> torch.Generator:
        seed = (self._seed * 1000 + self._calls) * 1000 + stream
        return torch.Generator().manual_seed(seed)

    def _order(self, count: int) -> Tensor:
        if self._owners is None:
            return torch.randperm(count, generator=self._generator(self._rank))
        owners = self._owners[self._shuffles % len(self._owners)]
        self._shuffles += 1
        assert len(owners) == count
        orders = []
        for rank in range(int(owners.max()) + 1):
            own = (owners == rank).nonzero().squeeze(1)
            orders.append(own[torch.randperm(len(own), generator=self._generator(rank))])
        return torch.cat(orders)

"""The learners of a run, one process each, as torchrun starts them: gradients and decisions."""

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import Tensor

from murmur.shared.process.errors import (
    ConfigError,
    ConnectionLostError,
    MurmurError,
    ResourceError,
)
from murmur.shared.process.ledger import state

if TYPE_CHECKING:
    from torch.distributed import Store

Extreme = Literal["min", "max", "sum"]
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_CPU = torch.device("cpu")
_BY_VARIABLES = "env://"  # torch's name for them


class Group:
    """All learners of a run; each calls the same methods in the same order.

    A group of one returns at once and launches nothing. Tensors travel by NCCL on CUDA and by gloo
    on a CPU; numbers of the host always travel by gloo. Only the thread that learns calls it.

    Attributes:
        rank: rank of this learner, 0 to size - 1.
        size: number of learners.
        calls: collectives so far. A CUDA graph counts its own once, when it is captured.
        bytes: bytes that they exchanged, of this learner.
        waited_s: seconds in which the thread waited in them, for data and for other ranks.
        store: store at which the ranks met; None of a learner that is alone.
        device: device that this rank learns on.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        store: "Store | None" = None,
        device: torch.device = _CPU,
    ) -> None:
        """Use `ALONE`, `from_environment` or `join`."""
        self.rank = rank
        self.size = size
        self.device = device
        self.calls = self.bytes = 0
        self.waited_s = 0.0
        self.store = store
        self._holders: list[Callable[[], None]] = []

    @classmethod
    def from_environment(cls, device: torch.device, timeout_s: float) -> "Group":
        """Join the group that torchrun's variables describe; ALONE without them.

        Args:
            device: device that this rank learns on.
            timeout_s: longest wait for the other ranks, in any call.

        Raises:
            ConfigError: if some of the variables are missing or wrong.
            ConnectionLostError: if the ranks do not find one another in time.
        """
        size = os.environ.get("WORLD_SIZE", "1")
        if size == "1":
            return ALONE
        missing = [name for name in _VARIABLES if not os.environ.get(name)]
        if missing:
            raise ConfigError(
                f"WORLD_SIZE={size}, but {', '.join(missing)} is not set; start the learners with "
                "torchrun, or unset WORLD_SIZE"
            )
        rank = os.environ["RANK"]
        if not (size.isdecimal() and rank.isdecimal() and int(rank) < int(size)):
            raise ConfigError(
                f"RANK={rank} and WORLD_SIZE={size} must be numbers, RANK from 0 to WORLD_SIZE - 1"
            )
        return cls.join(int(rank), int(size), device, timeout_s)

    @classmethod
    def join(
        cls,
        rank: int,
        size: int,
        device: torch.device,
        timeout_s: float,
        rendezvous: str = _BY_VARIABLES,
    ) -> Self:
        """Meet the other ranks. A process joins one group.

        Args:
            rank: rank of this process.
            size: number of ranks.
            device: device that this rank learns on.
            timeout_s: longest wait for the other ranks, in any call.
            rendezvous: meeting address, as `torch.distributed.init_process_group` takes it.

        Raises:
            ConnectionLostError: if they do not find one another in time, or one ends meanwhile.
            ResourceError: if this build of torch cannot.
        """
        import torch.distributed as dist  # only a group needs it, and what imports it

        if not dist.is_available():
            raise ResourceError(
                f"this build of torch ({torch.__version__}) has no torch.distributed, which "
                f"{size} learners need; install another build, or start one learner"
            )
        from murmur.learner_service.ranks.meeting import (
            fresh,
            loopback_store,
            on_one_machine,
            stay_on_loopback,
        )

        on_cuda = device.type == "cuda"
        # Else ranks may wait for each other within a capture, which may fail on one of them.
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
        timeout = timedelta(seconds=timeout_s)
        try:
            whole = None
            if rendezvous == _BY_VARIABLES and on_one_machine(size):
                stay_on_loopback()
                whole = loopback_store(rank, timeout)
            if whole is None:
                whole, _, _ = next(dist.rendezvous(rendezvous, rank, size, timeout=timeout))
            whole.set_timeout(timeout)
            store = fresh(whole, rank, size, timeout_s)
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if on_cuda else "gloo",
                store=store,
                timeout=timeout,
                rank=rank,
                world_size=size,
                device_id=device if on_cuda else None,
            )
        except (RuntimeError, ValueError, OSError) as error:
            raise ConnectionLostError(
                f"rank {rank} of {size} cannot join the other learners within {timeout_s:g} s: "
                f"{_error_text(error)}; check that all ranks run, and MASTER_ADDR and MASTER_PORT"
            ) from error
        return cls(rank, size, store, device)

    def own_seed(self, seed: int) -> int:
        """A seed of this rank's own; on rank 0 the given one."""
        return (seed + (self.rank << 32)) % 2**64

    # --- tensors on the device -------------------------------------------------------------------

    def mean_(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by their means over the ranks, in one flat exchange for each dtype."""
        if self.size > 1:
            self._reduce(tensors, "sum", 1 / self.size)

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by their sums over the ranks."""
        if self.size > 1:
            self._reduce(tensors, "sum")

    def totals(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Sums of tensors over the ranks, with gradient.

        The gradient that reaches a tensor is the sum's times the number of ranks: gradients are
        averaged over the ranks, and that of a loss of sums is added up over them.
        """
        if self.size == 1:
            return list(tensors)
        totals = [t.detach().clone() for t in tensors]
        self.sum_(totals)
        own = [self.size * (t - t.detach()) for t in tensors]
        return [total + mine for total, mine in zip(totals, own, strict=True)]

    def largest_(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by their largest values over the ranks, element by element."""
        if self.size > 1:
            self._reduce(tensors, "max")

    @torch.no_grad()
    def broadcast_(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors, of any dtypes, by those of rank 0."""
        if self.size == 1 or not tensors:
            return
        import torch.distributed as dist

        flat = torch.cat([t.contiguous().reshape(-1).view(torch.uint8) for t in tensors])
        self._exchange(flat, lambda: dist.broadcast(flat, 0))
        parts = flat.split_with_sizes([t.numel() * t.element_size() for t in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.clone().view(tensor.dtype).view_as(tensor))

    @torch.no_grad()
    def _reduce(self, tensors: Sequence[Tensor], how: Extreme, scale: float = 1) -> None:
        """Reduce tensors in place; the result is the same bit for bit on all ranks."""
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            by_type.setdefault(tensor.dtype, []).append(tensor)
        for alike in by_type.values():
            flat = torch.cat([t.reshape(-1) for t in alike])
            self._all_reduce(flat, how)
            if scale != 1:
                flat.mul_(scale)
            parts = flat.split_with_sizes([t.numel() for t in alike])
            reduced = [part.view_as(t) for part, t in zip(parts, alike, strict=True)]
            torch._foreach_copy_(alike, reduced)

    # --- numbers of the host ---------------------------------------------------------------------

    def agree(self, values: Mapping[str, float], how: Extreme) -> dict[str, float]:
        """The least, the greatest or the sum of numbers over the ranks, by name.

        Args:
            values: the same names on all ranks; whole numbers are exact up to 2^53.
            how: min, max or sum, of each.
        """
        if self.size == 1:
            return dict(values)
        flat = torch.tensor(list(values.values()), dtype=torch.float64)
        self._all_reduce(flat, how)
        return dict(zip(values, flat.tolist(), strict=True))

    def all_ranks(self, condition: bool) -> bool:
        """Whether a condition holds on every rank."""
        return self.agree({"holds": condition}, "min")["holds"] > 0

    def any_rank(self, condition: bool) -> bool:
        """Whether a condition holds on a rank."""
        return self.agree({"holds": condition}, "max")["holds"] > 0

    def of_rank_0(self, number: int) -> int:
        """A whole number of rank 0, below 2^53; what the others give does not matter."""
        own = 0 if self.rank else number
        return round(self.agree({"number": own}, "sum")["number"])

    def gather(self, value: float) -> list[float]:
        """A number of each rank, by rank."""
        mine = {str(rank): value * (rank == self.rank) for rank in range(self.size)}
        return list(self.agree(mine, "sum").values())

    def before_close(self, drop: Callable[[], None]) -> None:
        """Note what drops graphs: they may hold collectives, for which NCCL would wait for ever."""
        if self.size > 1:
            self._holders.append(drop)

    def close(self) -> None:
        """Leave the group. No thread uses it any more."""
        if self.size == 1:
            return
        import torch.distributed as dist

        for drop in self._holders:
            drop()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        dist.destroy_process_group()

    # --- the exchange ----------------------------------------------------------------------------

    def _all_reduce(self, flat: Tensor, how: Extreme) -> None:
        import torch.distributed as dist

        by_name = {"min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX, "sum": dist.ReduceOp.SUM}
        self._exchange(flat, lambda: dist.all_reduce(flat, by_name[how]))

    def _exchange(self, flat: Tensor, call: Callable[[], Any]) -> None:
        """One collective.

        Raises:
            ConnectionLostError: if another rank is gone or does not come in time.
        """
        started = time.monotonic()
        with state("wait_ranks"):
            try:
                call()
            except RuntimeError as error:
                if flat.is_cuda and torch.cuda.is_current_stream_capturing():
                    raise  # nothing is exchanged yet: it is the capture that failed
                raise ConnectionLostError(
                    f"rank {self.rank} of {self.size}: another rank is gone, or did not come "
                    f"within {math.ceil(time.monotonic() - started)} s: {_error_text(error)}; "
                    "see the logs of the other ranks"
                ) from error
        self.waited_s += time.monotonic() - started
        self.calls += 1
        self.bytes += flat.nbytes


def _error_text(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


ALONE = Group(0, 1)


@torch.no_grad()
def checksum(tensor: Tensor) -> Tensor:
    """A number that any change of one element changes: an int64 scalar on the tensor's device.

    sum over i of (2 i + 1) b_i modulo 2^64, b_i the bytes. A factor that is odd has an inverse
    modulo 2^64, so no change of a single byte is lost.
    """
    raw = tensor.contiguous().reshape(-1).view(torch.uint8)
    words = raw.view(torch.int32) if raw.numel() % 4 == 0 else raw
    factors = torch.arange(1, 2 * len(words), 2, device=tensor.device)
    return (words * factors).sum()


def require_same(
    group: Group,
    tensors: Mapping[str, Tensor],
    when: str,
    read: Callable[[Tensor], Tensor] = lambda x: x,
) -> None:
    """Compare tensors over the ranks: one exchange of 16 bytes each, and one wait for the device.

    Args:
        group: all of its ranks call this.
        tensors: tensors by name, the same names on all ranks.
        when: moment of the check, for the message, for example "update 300".
        read: copies a tensor to the host.

    Raises:
        MurmurError: naming the tensors that differ.
    """
    if group.size == 1:
        return
    mine = torch.stack([checksum(tensor) for tensor in tensors.values()])
    extremes = torch.stack([mine, ~mine])  # ~x falls as x rises
    group.largest_([extremes])
    different = read(extremes[0] != ~extremes[1]).tolist()
    wrong = [name for name, differs in zip(tensors, different, strict=True) if differs]
    if wrong:
        raise MurmurError(
            f"{when}: {len(wrong)} of {len(tensors)} tensors differ between the {group.size} "
            f"learners, first '{wrong[0]}': they no longer learn one policy. All ranks need the "
            "same device model, the same versions of torch and of its libraries, and the same "
            "code; continue from the last checkpoint"
        )

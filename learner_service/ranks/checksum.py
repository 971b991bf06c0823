"""Whether all ranks hold the same tensors, bit for bit."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from learner_service.ranks.group import Group
from shared.process.errors import MurmurError


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

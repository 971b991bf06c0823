"""Geometry of maps: where agents stand, what surrounds them, images stacked by channel."""

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.process.errors import ConfigError, SpecError
from shared.wire.spec import AGENT_CELL, ArraySpec, EnvSpec


def others_action_map(cell: Tensor, action: Tensor, num_actions: int, h: int, w: int) -> Tensor:
    """Draw every other agent's action at its cell: (action + 1) / K, else 0.

    Actions of agents on one cell add up.

    Args:
        cell: [B, A, 2] int64 (row, column).
        action: [B, A] int64.
        num_actions: K.
        h: rows of the map.
        w: columns of the map.

    Returns:
        [B, A, 1, h, w] float32.
    """
    b, a = action.shape
    flat = cell[..., 0] * w + cell[..., 1]  # [B, A]
    # Whole numbers until the end: their sums are exact in whatever order a GPU forms them.
    value = (action + 1).float()
    every = torch.zeros(b, h * w, device=action.device).scatter_add_(1, flat, value)
    others = every.unsqueeze(1).repeat(1, a, 1)
    others.scatter_add_(2, flat.unsqueeze(-1), -value.unsqueeze(-1))
    return others.div_(num_actions).view(b, a, 1, h, w)


def centre(maps: Tensor, cell: Tensor) -> Tensor:
    """Shift maps so that the given cell lies in the middle; what comes in from outside is zero.

    A convolution then meets what surrounds the agent always at the same place, wherever the agent
    stands.

    Args:
        maps: [R, C, H, W].
        cell: [R, 2] int64 (row, column).

    Returns:
        [R, C, H, W]; [r, :, H // 2, W // 2] is maps[r, :, row, column].
    """
    _, _, h, w = maps.shape
    up, left = h // 2, w // 2
    padded = F.pad(maps, (left, w - 1 - left, up, h - 1 - up))
    which = torch.arange(maps.shape[0], device=maps.device)
    windows = padded.unfold(2, h, 1).unfold(3, w, 1)  # a view: [R, C, H, W, H, W]
    return windows[which, :, cell[:, 0], cell[:, 1]]


def centered(maps: Tensor, channels: tuple[int, ...], cell: Tensor) -> Tensor:
    """Some channels of maps, shifted so that each agent's cell lies in the middle.

    By slices: a list of channels as an index would be copied to the device in every call.

    Args:
        maps: [B, A, C, H, W].
        channels: indices of the channels to shift.
        cell: [B, A, 2] (row, column).
    """
    first, count = channels[0], len(channels)
    if channels == tuple(range(first, first + count)):
        some = maps.narrow(2, first, count)
    else:
        some = torch.cat([maps.narrow(2, channel, 1) for channel in channels], 2)
    cell = cell.long().flatten(0, 1)  # long() leaves nothing for flatten to copy
    return centre(some.flatten(0, 1), cell).view_as(some)


def check_centred(
    key: str, channels: tuple[int, ...], image: tuple[int, int, int] | None, spec: EnvSpec
) -> None:
    """Refuse to centre maps that are not there."""
    if not channels:
        return
    if spec.observation(AGENT_CELL) is None:
        raise ConfigError(
            f"network.{key} needs an environment that says where its agents stand "
            f"('{AGENT_CELL}'); '{spec.name}' does not"
        )
    count = image[0] if image else 0
    if max(channels) >= count or min(channels) < 0:
        raise ConfigError(f"network.{key} = {list(channels)}, but there are {count} maps")


def stacked_shape(images: list[ArraySpec]) -> tuple[int, int, int] | None:
    """Shape of images stacked by channel."""
    if not images:
        return None
    sizes = {i.shape[1:] for i in images}
    if len(sizes) > 1:
        raise SpecError(
            "images of different size cannot be stacked: "
            + ", ".join(f"{i.name} {i.shape}" for i in images)
        )
    return sum(i.shape[0] for i in images), images[0].shape[1], images[0].shape[2]

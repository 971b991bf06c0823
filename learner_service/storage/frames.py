"""Stacks of an agent's last images, made on the learner: each frame is sent and stored once.

A stack holds the frames of rows t - k + 1 ... t along the channels, oldest first. Rows before the
episode's first are that first one again. What a row's stack needs of the rows before it lies

    acting       in the policy's memory of each slot: 1 if it holds frames, then the frames
    in unrolls   in "memory", which is what the first row was acted with
    in a replay  in front of each column's rows

The memory is float32, like any policy's, so that slots, checkpoints, leagues and exported files
treat it as one; bytes are exact in it.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from murmur.shared.wire.dataset import OBSERVATION, Episodes
from murmur.shared.wire.spec import ArraySpec, EnvSpec
from murmur.shared.wire.timestep import StepType

_FIRST = int(StepType.FIRST)


@dataclass(frozen=True)
class Frames:
    """Observations that are stacked, and the depth of the stacks.

    Attributes:
        depth: k, frames of a stack; 2 or more.
        images: specs of the images of single steps.
        memory_size: numbers that an agent's previous frames take in memory.
    """

    depth: int
    images: tuple[ArraySpec, ...]

    @property
    def memory_size(self) -> int:
        """Numbers per agent: a flag, and k - 1 frames of each image."""
        return 1 + sum((self.depth - 1) * math.prod(image.shape) for image in self.images)

    def stacked_spec(self, spec: EnvSpec) -> EnvSpec:
        """Return the spec that an algorithm learns from: images with k times the channels."""
        deep = {i.name: (self.depth * i.shape[0], *i.shape[1:]) for i in self.images}
        return replace(
            spec,
            observations=tuple(
                replace(o, shape=deep.get(o.name, o.shape)) for o in spec.observations
            ),
        )

    def of_memory(self, memory: Tensor) -> dict[str, Tensor]:
        """Name -> [B, k - 1, A, C, H, W] frames before a row, of its memory [B, A, memory_size]."""
        found, start = {}, 1
        for image in self.images:
            shape = *memory.shape[:2], self.depth - 1, *image.shape
            size = math.prod(shape[2:])
            previous = memory[..., start : start + size].reshape(shape).transpose(1, 2)
            if image.dtype == "uint8":  # a caller of an exported policy may give anything
                previous = previous.clamp(0, 255)
            found[image.name] = previous.to(getattr(torch, image.dtype))
            start += size
        return found

    def before(self, episodes: Episodes, rows: NDArray[np.int64]) -> Tensor:
        """Return the memory [B, A, memory_size] with which rows of a dataset begin.

        Args:
            episodes: episodes of the dataset.
            rows: [B] indices of the rows.
        """
        starts = np.cumsum(episodes.length) - episodes.length
        began = starts[np.searchsorted(starts, rows, side="right") - 1]
        back = np.arange(self.depth - 1, 0, -1)
        index = np.maximum(rows[:, None] - back, began[:, None])  # [B, k - 1]
        parts: list[Tensor] = []
        for image in self.images:
            previous = torch.from_numpy(episodes.arrays[OBSERVATION + image.name][index])
            parts.append(previous.transpose(1, 2).flatten(2).float())
        return torch.cat([torch.ones_like(parts[0][..., :1]), *parts], -1)

    def stack_unrolls(self, frames: Tensor, previous: Tensor, step_type: Tensor) -> Tensor:
        """Stacks of whole unrolls.

        Args:
            frames: [T, B, A, C, H, W].
            previous: [B, k - 1, A, C, H, W] frames of the rows before.
            step_type: [T, B].

        Returns:
            [T, B, A, k * C, H, W].
        """
        length, envs = step_type.shape
        rows = torch.cat([previous.transpose(0, 1), frames])  # [k - 1 + T, B, ...]
        time = torch.arange(length, device=frames.device).view(-1, 1)
        # The row that each row's episode began with; before the unroll: as far back as there is.
        began = torch.where(step_type == _FIRST, time, 1 - self.depth).cummax(0).values  # [T, B]
        back = torch.arange(self.depth - 1, -1, -1, device=frames.device)
        row = torch.maximum(time.unsqueeze(-1) - back, began.unsqueeze(-1)) + self.depth - 1
        env = torch.arange(envs, device=frames.device).view(1, -1, 1)
        return _gathered(rows, row * envs + env, (length, envs))

    def stack_rows(self, frames: Tensor, step_type: Tensor, row: Tensor, time: Tensor) -> Tensor:
        """Stacks of single rows of a replay.

        Args:
            frames: [columns, k - 1 + rows, A, C, H, W], previous frames before each column's rows.
            step_type: [columns * rows].
            row: [B] index of rows into `step_type`.
            time: [B] the same within their columns.

        Returns:
            [B, A, k * C, H, W].
        """
        width = frames.shape[1]
        height = width - self.depth + 1
        at = torch.div(row, height, rounding_mode="floor") * width + time + self.depth - 1
        steps, goes_back = [at], torch.ones_like(row, dtype=torch.bool)
        for back in range(1, self.depth):
            # The row looked at last: it has one before it unless its episode begins with it.
            newer = (row - back + 1).clamp_min(0)
            known = time - back + 1 >= 0  # else it lies before the column: no step type is kept
            begins = known & (step_type.index_select(0, newer) == _FIRST)
            goes_back = goes_back & ~begins
            steps.append(torch.where(goes_back, at - back, steps[-1]))
        index = torch.stack(steps[::-1], -1)  # [B, k]
        return _gathered(frames, index, (len(row),))


def _gathered(frames: Tensor, index: Tensor, leading: tuple[int, ...]) -> Tensor:
    """[..., A, k * C, H, W] of frames [x, y, A, C, H, W] at flat indices [..., k] into x * y."""
    agents, *shape = frames.shape[2:]
    number = torch.arange(agents, device=frames.device).view(-1, 1)
    flat = index.unsqueeze(-2) * agents + number  # [..., A, k]
    found = frames.flatten(0, 2).index_select(0, flat.flatten())
    return found.view(*leading, agents, index.shape[-1] * shape[0], *shape[1:])


def find_frames(depth: int, spec: EnvSpec) -> Frames | None:
    """Find the images that each agent observes, to be stacked; None if none are."""
    sources = {source for derived in spec.derived for source in derived.sources}
    images = tuple(o for o in spec.own_images if o.name not in sources)
    return Frames(depth, images) if depth > 1 and images else None

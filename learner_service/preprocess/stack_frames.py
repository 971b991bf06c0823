"""Stacks of an agent's last images, of single ones that storage keeps."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from murmur.learner_service.preprocess.transform import Transform
from murmur.learner_service.storage.frames import Frames
from murmur.learner_service.storage.rollout import Rollout
from murmur.learner_service.storage.storage import Batch
from murmur.shared.wire.dataset import OBSERVATION
from murmur.shared.wire.spec import EnvSpec

B = TypeVar("B", bound=Batch)


class StackFrames(Transform):
    """Stacks the frames of rollouts and of acting; a replay stacks the frames it draws.

    A policy's memory of each slot holds 1 once there are frames, then the frames.
    """

    acts = True

    def __init__(self, frames: Frames) -> None:
        """Keep which images are stacked.

        Args:
            frames: images and the number of frames.
        """
        self.frames: Frames = frames
        self.memory_size = frames.memory_size

    @override
    def spec(self, spec: EnvSpec) -> EnvSpec:
        return self.frames.stacked_spec(spec)

    @override
    def batch(self, batch: B, updates: int) -> B:
        if not isinstance(batch, Rollout):
            return batch
        arrays, frames = dict(batch.arrays), self.frames
        memory = arrays.pop("memory")  # [1, B, A, Z]: the policy's own, then the frames
        own = memory.shape[-1] - frames.memory_size
        for name, previous in frames.of_memory(memory[0, ..., own:]).items():
            images = arrays[OBSERVATION + name]
            arrays[OBSERVATION + name] = frames.stack_unrolls(images, previous, arrays["step_type"])
        if own:
            arrays["memory"] = memory[..., :own]
        return replace(batch, arrays=arrays)

    @override
    def act(
        self, observation: Mapping[str, Tensor], memory: Tensor | None
    ) -> tuple[Mapping[str, Tensor], Tensor]:
        depth, found = self.frames.depth, dict(observation)
        if memory is None:
            some = observation[self.frames.images[0].name]
            memory = torch.zeros((*some.shape[:2], self.memory_size), device=some.device)
        parts, start = [torch.ones_like(memory[..., :1])], 1
        began = memory[..., :1] == 0
        for image in self.frames.images:
            now = observation[image.name]
            shape = *now.shape[:2], depth - 1, math.prod(image.shape)
            size = shape[2] * shape[3]
            flat = now.flatten(2).unsqueeze(2)  # [B, A, 1, C * H * W]
            previous = memory[..., start : start + size].reshape(shape)
            first = flat.float().expand(shape)
            previous = torch.where(began.unsqueeze(-1), first, previous)
            if now.dtype == torch.uint8:  # a caller of an exported policy may give anything
                previous = previous.clamp(0, 255)
            stack = torch.cat([previous.to(now.dtype), flat], 2)
            found[image.name] = stack.reshape(*now.shape[:2], -1, *image.shape[1:])
            parts.append(stack[:, :, 1:].flatten(2).float())
            start += size
        return found, torch.cat(parts, -1)

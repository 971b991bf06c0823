"""The transforms of a run, in the order in which they are applied."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from murmur.learner_service.layers.building import NORMALISE, Network
from murmur.learner_service.layers.stacked import sharing_agents
from murmur.learner_service.preprocess.augment.base import Augment
from murmur.learner_service.preprocess.augment.building import build_rl_augment
from murmur.learner_service.preprocess.frozen import HideFrozen
from murmur.learner_service.preprocess.normalize import NormalizeObservations, NormalizeRewards
from murmur.learner_service.preprocess.running_moments import RunningMoments
from murmur.learner_service.preprocess.transform import Transform, Transforms
from murmur.learner_service.ranks.group import Group
from murmur.learner_service.storage.demonstrations import not_told
from murmur.learner_service.storage.frames import Frames, find_frames
from murmur.learner_service.storage.rollout import Rollout
from murmur.learner_service.storage.storage import NEXT, Batch
from murmur.shared.config.experiment import NO_AUGMENT, AugmentConfig, ImitationConfig
from murmur.shared.process.errors import ConfigError
from murmur.shared.wire.dataset import OBSERVATION
from murmur.shared.wire.spec import EXPERT_ACTION, EnvSpec

B = TypeVar("B", bound=Batch)
_NOT_ASKED = -1


class EndImitation(Transform):
    """Hides experts' actions from updates after those of imitation: older rows may have some."""

    def __init__(self, updates: int) -> None:
        """Keep when imitation ends.

        Args:
            updates: number of updates that imitate.
        """
        self._updates = updates

    @override
    def batch(self, batch: B, updates: int) -> B:
        if updates >= self._updates and isinstance(batch, Rollout):
            batch.arrays[OBSERVATION + EXPERT_ACTION].fill_(_NOT_ASKED)
        return batch


class EndCloning(Transform):
    """Says of rows that environments sent, and a dataset did not, that no expert acted."""

    @override
    def batch(self, batch: B, updates: int) -> B:
        if isinstance(batch, Rollout) and OBSERVATION + EXPERT_ACTION not in batch.arrays:
            action = batch.arrays["action"]
            batch.arrays[OBSERVATION + EXPERT_ACTION] = torch.full_like(action, not_told(action))
        return batch


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
        if memory is None:
            some = observation[self.frames.images[0].name]
            memory = torch.zeros((*some.shape[:2], self.memory_size), device=some.device)
        found, parts = dict(observation), [torch.ones_like(memory[..., :1])]
        began = memory[..., :1].view(*memory.shape[:2], 1, 1, 1, 1) == 0
        for name, frames in self.frames.of_memory(memory).items():
            now = observation[name].unsqueeze(2)  # [B, A, 1, C, H, W]
            previous = torch.where(began, now, frames.transpose(1, 2))  # [B, A, k - 1, C, H, W]
            stack = torch.cat([previous, now], 2)
            found[name] = stack.flatten(2, 3)
            parts.append(stack[:, :, 1:].flatten(2).float())
        return found, torch.cat(parts, -1)


Slices = tuple[int, ...]  # number of each agent's parameter group


def build_transforms(
    spec: EnvSpec,
    network: Network,
    augment: AugmentConfig | None,
    imitation: ImitationConfig | None,
    *,
    frozen: tuple[int, ...],
    slices: Slices,
    reward_sets: Slices | None,
    group: Group,
    device: torch.device,
) -> Transforms:
    """Return what the configuration asks for.

    Args:
        spec: spec of the environment.
        network: network that observations are for.
        augment: section of the configuration; None: nothing is augmented.
        imitation: section of the configuration; None: imitation does not end.
        frozen: numbers of frozen agents.
        slices: parameter group of each agent.
        reward_sets: set of each agent whose rewards have statistics together; None: rewards stay.
        group: ranks that learn together.
        device: device of batches.

    Raises:
        ConfigError: if something asked for does not fit the environment, or another transform.
    """
    parts: list[Transform] = []
    learns = [float(agent not in frozen) for agent in range(spec.num_agents)]
    counted = torch.tensor(learns, device=device)
    if imitation is not None and imitation.baseline:
        parts.append(EndImitation(imitation.updates))
    if imitation is not None and imitation.dataset:
        parts.append(EndCloning())
    frames = find_frames(network.frame_stack, spec)
    if frames is not None:
        parts.append(StackFrames(frames))
    if reward_sets is not None:
        moments = RunningMoments(sharing_agents(reward_sets, device), (), rare=True)
        parts.append(NormalizeRewards(moments.to(device), counted, group))
    if network.normalizes:
        if augment is not None and augment.preset == "symmetry":
            raise ConfigError(
                "augment.preset=symmetry mirrors observations in the environment's own units; set "
                f"{NORMALISE}=false"
            )
        parts.append(NormalizeObservations(spec, slices, counted, group))
    if frozen:
        parts.append(HideFrozen(frozen, slices, device))
    changes: Augment | None = None
    if augment is not None and augment != NO_AUGMENT:
        seen = spec if frames is None else frames.stacked_spec(spec)
        changes = build_rl_augment(augment, seen, device, (OBSERVATION, NEXT + OBSERVATION))
    return Transforms(parts, changes)

"""The transforms of a run, in the order in which they are applied."""

from typing import TypeVar

import torch
from typing_extensions import override

from murmur.learner_service.layers.building import NORMALISE, Network
from murmur.learner_service.layers.stacked import sharing_agents
from murmur.learner_service.preprocess.augment.base import Augment
from murmur.learner_service.preprocess.augment.building import build_rl_augment
from murmur.learner_service.preprocess.frozen import HideFrozen
from murmur.learner_service.preprocess.normalize import NormalizeObservations, NormalizeRewards
from murmur.learner_service.preprocess.running_moments import RunningMoments
from murmur.learner_service.preprocess.stack_frames import StackFrames
from murmur.learner_service.preprocess.transform import Transform, Transforms
from murmur.learner_service.ranks.group import Group
from murmur.learner_service.storage.demonstrations import not_told
from murmur.learner_service.storage.frames import find_frames
from murmur.learner_service.storage.rollout import Rollout
from murmur.learner_service.storage.storage import NEXT, Batch
from murmur.shared.config.experiment import AugmentConfig, ImitationConfig
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
        parts.append(NormalizeObservations(spec, slices, counted, group, device))
    if frozen:
        parts.append(HideFrozen(frozen, slices, device))
    changes: Augment | None = None
    if augment is not None and augment.text:
        seen = spec if frames is None else frames.stacked_spec(spec)
        changes = build_rl_augment(augment, seen, device, (OBSERVATION, NEXT + OBSERVATION))
    return Transforms(parts, changes)

"""The transforms of a run, in the order in which they are applied."""

import torch

from learner_service.layers.building import NORMALISE, Network
from learner_service.layers.stacked import sharing_agents
from learner_service.preprocess.augment import build_rl_augment
from learner_service.preprocess.augmentation import Augmentation
from learner_service.preprocess.frozen import HideFrozen
from learner_service.preprocess.imitation import EndImitation
from learner_service.preprocess.normalize import (
    NormalizeObservations,
    NormalizeRewards,
    ObservationNorm,
)
from learner_service.preprocess.running_moments import RunningMoments
from learner_service.preprocess.stack_frames import StackFrames
from learner_service.preprocess.transform import Transform, Transforms
from learner_service.ranks.group import Group
from learner_service.storage.frames import find_frames
from learner_service.storage.storage import NEXT, OBSERVATION
from shared.config.experiment import AugmentConfig, ImitationConfig
from shared.process.errors import ConfigError
from shared.wire.spec import EnvSpec

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
        parts.append(NormalizeObservations(ObservationNorm(spec, slices, counted, device), group))
    if frozen:
        parts.append(HideFrozen(frozen, slices, device))
    if augment is not None:
        seen = spec if frames is None else frames.stacked_spec(spec)
        found = build_rl_augment(augment, seen, device, (OBSERVATION, NEXT + OBSERVATION))
        if found is not None:
            parts.append(Augmentation(found))
    return Transforms(parts)

"""Demonstrations: a dataset's episodes as rollouts, whose actions are cloned."""

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from murmur.learner_service.storage.frames import Frames
from murmur.shared.process.errors import ConfigError
from murmur.shared.process.process import logger
from murmur.shared.wire.dataset import OBSERVATION, Dataset, Episodes
from murmur.shared.wire.spec import (
    ACTION_MASK,
    AGENT_MASK,
    EXPERT_ACTION,
    TURN_MASK,
    EnvSpec,
    action_factors,
    factor_starts,
)
from murmur.shared.wire.timestep import Array

# Log-probability in rows that do not count, which may be of another time, and of a dataset: their
# ratio is 0, for an infinite one times a weight of 0 is NaN.
NEVER_TAKEN = 1e4
KEY = "imitation.dataset"
_EXTRAS = {"log_prob", "raw_action"}  # outputs of policies that cloning does without


def not_told(action: Tensor | Array) -> float:
    """Return the entry of an expert's action where there is none, for actions of this dtype."""
    floating = (
        action.is_floating_point() if isinstance(action, Tensor) else action.dtype.kind == "f"
    )
    return float("nan") if floating else -1


class Demonstrations:
    """All episodes of a dataset, one after the other in a circle. Used by the thread that learns.

    A batch follows from the seed and the policy version alone, so a resumed run draws the same.

    Attributes:
        updates: number of the run's updates that clone; infinity: all do.
    """

    def __init__(
        self,
        folder: str,
        updates: float,
        spec: EnvSpec,
        extras: Mapping[str, tuple[int, ...]],
        frames: Frames | None,
        device: torch.device,
        seed: int,
    ) -> None:
        """Read the dataset.

        Args:
            folder: folder of the dataset.
            updates: number of the run's updates that clone; infinity: all do.
            spec: spec of the environment.
            extras: name -> shape of a policy's outputs beside the action.
            frames: images to stack, if any.
            device: device of the batches.
            seed: seed of the draws.

        Raises:
            ConfigError: if it cannot be read, or is of another environment.
        """
        if unknown := sorted(extras.keys() - _EXTRAS):
            raise ConfigError(
                f"{KEY}={folder}: the algorithm keeps '{unknown[0]}' of every action, which a "
                "dataset does not have; use coma, mappo, happo, ippo or ppo"
            )
        dataset = Dataset(folder, KEY)
        dataset.require_spec(spec)
        self.updates = updates
        self._extras, self._frames = extras, frames
        self._device, self._seed = device, seed
        self._agents = spec.num_agents
        parts = list(dataset.parts())
        self._episodes = Episodes(
            {name: np.concatenate([p.arrays[name] for p in parts]) for name in parts[0].arrays},
            np.concatenate([p.length for p in parts]),
            np.concatenate([p.seed for p in parts]),
        )
        expert = self._episodes.arrays["action"].copy()
        if illegal := _hide_illegal(expert, self._episodes, spec):
            logger.warning("%s: %d actions are illegal and not cloned", KEY, illegal)
        self._arrays = self._episodes.arrays | {OBSERVATION + EXPERT_ACTION: expert}
        which = "all" if math.isinf(updates) else f"the first {updates:g}"
        logger.info("cloning %s in %s updates", dataset.describe(), which)

    def sample(self, version: int, length: int, envs: int) -> dict[str, Tensor]:
        """Draw stretches of the episodes.

        Args:
            version: policy version.
            length: L, transitions of a stretch.
            envs: number of stretches B.

        Returns:
            name -> [L + 1, B, ...], see Rollout.
        """
        count = len(self._arrays["step_type"])
        first = np.random.default_rng((self._seed, version)).integers(count, size=envs)
        rows = (np.arange(length + 1)[:, None] + first) % count
        arrays = {
            name: torch.from_numpy(array[rows]).to(self._device)
            for name, array in self._arrays.items()
        }
        for name in self._extras:
            action = arrays["action"]
            if name == "raw_action":
                arrays[name] = action.clone()
            else:
                shape = *action.shape[:2], self._agents
                arrays[name] = torch.full(shape, NEVER_TAKEN, device=self._device)
        if self._frames is not None:
            memory = self._frames.before(self._episodes, first)
            arrays["memory"] = memory.unsqueeze(0).to(self._device)
        return arrays


def _hide_illegal(expert: Array, episodes: Episodes, spec: EnvSpec) -> int:
    """Mark the actions [R, A, ...] that the environment's mask forbids as not told; count them."""
    mask = episodes.arrays.get(OBSERVATION + ACTION_MASK)
    if mask is None:
        return 0
    factors = action_factors(spec.action)
    chosen = expert.reshape(*expert.shape[:2], -1)[..., : len(factors)].astype(np.int64)
    index = chosen + np.array(factor_starts(factors))
    illegal = (np.take_along_axis(mask, index, -1) == 0).any(-1)
    expert[illegal] = not_told(expert)
    illegal[np.cumsum(episodes.length) - 1] = False  # of LAST rows no action was taken
    for name in (AGENT_MASK, TURN_MASK):  # nor of agents that are gone, or wait
        illegal &= episodes.arrays.get(OBSERVATION + name, np.ones_like(illegal)) != 0
    return int(illegal.sum())

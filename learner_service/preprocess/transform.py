"""The contract of a transform, and the list of a run's transforms.

The learner applies the list to each batch before `algorithm.update`, a policy to each observation
before `act`. Storage keeps what environments sent. Random changes alone wait for the algorithm: it
asks for other ones in each pass over a batch, within its CUDA graphs.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from murmur.learner_service.preprocess.augment.base import Augment
from murmur.learner_service.preprocess.running_moments import CLIPPED, RunningMoments
from murmur.learner_service.storage.frames import Frames
from murmur.learner_service.storage.replay import ReplayBatch
from murmur.learner_service.storage.rollout import Rollout
from murmur.learner_service.storage.storage import Batch
from murmur.shared.wire.spec import EnvSpec

B = TypeVar("B", bound=Batch)
Rows = dict[str, Tensor]


class Transform:
    """One change. A subclass overrides what it changes. Used by the thread that learns.

    Attributes:
        memory_size: numbers that `act` carries from row to row for each agent.
        acts: whether `act` changes anything.
        frames: images that storage keeps singly, and this stacks.
    """

    memory_size = 0
    frames: Frames | None = None
    acts = False

    def spec(self, spec: EnvSpec) -> EnvSpec:
        """Return the spec of what the algorithm sees."""
        return spec

    def batch(self, batch: B, updates: int) -> B:
        """Return a batch with what changes of it; the tensors of the given one stay.

        Args:
            batch: rollout, transitions or sequences.
            updates: number of updates made so far.
        """
        return batch

    def act(
        self, observation: Mapping[str, Tensor], memory: Tensor | None
    ) -> tuple[Mapping[str, Tensor], Tensor | None]:
        """Return an observation as the algorithm's own policy sees it, and the next memory.

        Args:
            observation: name -> [B, A, ...].
            memory: [B, A, memory_size] float32 memory of the row before; zero, or None for all,
                where an episode begins.
        """
        return observation, None

    def state(self) -> dict[str, nn.Module]:
        """Return the parts of checkpoints, by name."""
        return {}

    def snapshot(self) -> "Transform":
        """Return what a policy acts with: no update changes it."""
        return self

    def publish(self, snapshot: "Transform") -> None:
        """Copy what was learned into a snapshot."""

    def statistics(self) -> dict[str, RunningMoments]:
        """Return running statistics by what they are of: "reward", "observation 'name'"."""
        return {}


class Transforms:
    """Transforms one after another, and random changes, for which the algorithm asks.

    Advantages, targets and log probabilities stay where rows change at random: a symmetry changes
    none of them, if the policy that acted is as symmetric as its world (Mittal et al. 2024,
    "Symmetry Considerations for Learning Task Symmetric Robot Policies", arXiv:2403.04359).

    Attributes:
        parts: transforms, in the order in which they are applied.
        memory_size: numbers of a policy's memory that are theirs, behind its own.
        acts: whether any changes what is acted on.
        draws: whether `draw` changes rows.
        frames: images that storage keeps singly; None: none.
    """

    def __init__(self, parts: Iterable[Transform] = (), augment: Augment | None = None) -> None:
        """Keep transforms in their order, and what changes rows at random."""
        self.parts, self._augment = tuple(parts), augment
        self.memory_size = sum(part.memory_size for part in self.parts)
        self.acts = any(part.acts for part in self.parts)
        self.draws = augment is not None
        self.frames = next((part.frames for part in self.parts if part.frames), None)

    def spec(self, spec: EnvSpec) -> EnvSpec:
        """Return the spec of what the algorithm sees."""
        for part in self.parts:
            spec = part.spec(spec)
        return spec

    def batch(self, batch: B, updates: int = 0) -> B:
        """Return what an update learns from; see Transform."""
        for part in self.parts:
            batch = part.batch(batch, updates)
        return batch

    def draw(self, rows: Mapping[str, Tensor], generator: torch.Generator, steps: int = 1) -> Rows:
        """Return rows changed at random; may be captured.

        Args:
            rows: name -> [steps * B, ...], time outermost: observations with their prefix, actions.
            generator: source of random numbers, on the device.
            steps: rows of an environment, which change alike.
        """
        assert self._augment is not None
        if steps == 1:
            return self._augment(rows, generator)
        # Environments first: a draw is for each first index.
        by_env = {k: x.reshape(steps, -1, *x.shape[1:]).transpose(0, 1) for k, x in rows.items()}
        found = self._augment(by_env, generator)
        return {k: x.transpose(0, 1).flatten(0, 1) for k, x in found.items()}

    def act(
        self, observation: Mapping[str, Tensor], memory: Tensor | None
    ) -> tuple[Mapping[str, Tensor], Tensor | None]:
        """Return what a policy sees, and the next memory; see Transform."""
        kept: Tensor | None = None
        for part in self.parts:  # one of them has a memory, at most
            observation, following = part.act(observation, memory)
            kept = kept if following is None else following
        return observation, kept

    def state(self) -> dict[str, nn.Module]:
        """Return the parts of checkpoints, by name."""
        return {name: part for of in self.parts for name, part in of.state().items()}

    def snapshot(self) -> "Transforms":
        """Return what a policy acts with."""
        return Transforms(part.snapshot() for part in self.parts if part.acts)

    def publish(self, snapshot: "Transforms") -> None:
        """Copy what was learned into a snapshot."""
        acting = [part for part in self.parts if part.acts]
        for part, copy in zip(acting, snapshot.parts, strict=True):
            part.publish(copy)

    def statistics(self) -> dict[str, RunningMoments]:
        """Return running statistics by what they are of; see Transform."""
        return {what: of for part in self.parts for what, of in part.statistics().items()}

    def scalars(self) -> dict[str, Tensor]:
        """Return how many values statistics clipped, for logs: scalars on the device."""
        found: dict[str, Tensor] = {}
        for what, moments in self.statistics().items():
            name = CLIPPED + what.partition(" ")[0]
            found[name] = found[name] + moments.clipped if name in found else moments.clipped
        return found

    def outliers(self) -> dict[str, str]:
        """Describe what the last batch clipped, by what it is of; waits for the device."""
        texts = {what: moments.outlier_text() for what, moments in self.statistics().items()}
        return {what: text for what, text in texts.items() if text}


def reward_of(batch: Batch) -> Tensor:
    """Return a batch's rewards [..., A]: transitions of a replay have theirs beside the arrays."""
    if isinstance(batch, ReplayBatch) and "reward" not in batch.arrays:
        return batch.reward
    return batch.arrays["reward"]


def with_reward(batch: B, reward: Tensor) -> B:
    """Return a batch with other rewards; see `reward_of`."""
    if isinstance(batch, ReplayBatch) and "reward" not in batch.arrays:
        return _replaced(batch, reward=reward)
    return _replaced(batch, arrays={**batch.arrays, "reward": reward})


def with_arrays(batch: B, change: Callable[[Mapping[str, Tensor]], Rows]) -> B:
    """Return a batch with changed arrays, those of both ends of transitions.

    Args:
        batch: rollout, transitions or sequences.
        change: arrays by name -> changed ones.
    """
    changes = {"arrays": change(batch.arrays)}
    if isinstance(batch, ReplayBatch) and batch.next_arrays:
        changes["next_arrays"] = change(batch.next_arrays)
    return _replaced(batch, **changes)


def _replaced(batch: B, **changes: Any) -> B:  # noqa: ANN401 - fields of a batch
    if isinstance(batch, ReplayBatch):
        changes["error_memory"] = None  # graphs read what is changed elsewhere each time
    assert isinstance(batch, Rollout | ReplayBatch)
    return cast("B", replace(batch, **changes))

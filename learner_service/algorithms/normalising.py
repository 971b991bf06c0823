"""Normalises an algorithm's observations and rewards by running statistics.

What is stored stays as the environment gave it. An update normalises its batch by the statistics
that the policy acted with, learns, and then takes the batch into the statistics of observations;
`publish` hands them to the policy together with the weights. So a policy that acts, is evaluated or
exported has the statistics that belong to its weights, and none of them changes by acting. Values
far beyond all others are clipped before they are taken in, see RunningMoments, and counted.
"""

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from learner_service.algorithms.base import Algorithm, Policy
from learner_service.algorithms.options import SharingConfig
from learner_service.algorithms.returns import sharing_agents
from learner_service.algorithms.running_moments import CLIPPED, RunningMoments
from learner_service.algorithms.wrapping import Wrapping, WrappingPolicy
from learner_service.group.group import Group
from learner_service.networks.building import NORMALISE
from learner_service.runtime.precision import Precision
from learner_service.storage.feed import Taken
from learner_service.storage.replay_batch import ReplayBatch
from learner_service.storage.rollout import Batch
from learner_service.storage.storage import OBSERVATION
from shared.errors import ConfigError
from shared.spec import AGENT_MASK, NO_INPUTS, EnvSpec
from shared.timestep import StepType

B = TypeVar("B", bound=Taken)
_LAST, _ABORTED = int(StepType.LAST), int(StepType.ABORTED)


class ObservationNorm(nn.Module):
    """Running statistics of each observation that is no image; each parameter group has its own."""

    def __init__(
        self, spec: EnvSpec, slices: tuple[int, ...], learns: Tensor, device: torch.device
    ) -> None:
        """Begin with no rows.

        Args:
            spec: of the environment.
            slices: the parameter group of each agent.
            learns: [A] 1, or 0 for a frozen agent, whose rows are not taken in.
            device: of batches.

        Raises:
            ConfigError: if the environment observes images alone.
        """
        super().__init__()
        self._learns: Tensor
        self.register_buffer("_learns", learns, persistent=False)
        drawn = {source for derived in spec.derived for source in derived.sources}
        self._arrays = {
            o.name: o
            for o in spec.observations
            if len(o.shape) != 3 and o.name not in NO_INPUTS and o.name not in drawn
        }
        if not self._arrays:
            raise ConfigError(
                f"{NORMALISE} = true: environment '{spec.name}' observes images alone, which are "
                "scaled already; set it to false"
            )
        found = {}
        for name, array in self._arrays.items():
            sharing = sharing_agents(slices if array.per_agent else (0,), device)
            found[_key(name)] = RunningMoments(sharing, array.shape).to(device)
        self.moments = nn.ModuleDict(found)

    def normalised(self, arrays: Mapping[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
        """Arrays by name; observations [..., A, *shape] or [..., *shape] with the prefix change."""
        found = dict(arrays)
        for name in self._arrays:
            if prefix + name in arrays:
                x = arrays[prefix + name]
                found[prefix + name] = self._of(name).normalised(self._rows(name, x)).view(x.shape)
        return found

    def update(self, arrays: Mapping[str, Tensor], there: Tensor, group: Group) -> None:
        """Take in a batch's observations.

        Args:
            arrays: of the batch, by name with the prefix OBSERVATION.
            there: [..., A] 1 where there is a row, else 0.
            group: of the ranks.
        """
        counted = there * self._learns
        if OBSERVATION + AGENT_MASK in arrays:
            counted = counted * (arrays[OBSERVATION + AGENT_MASK] != 0)
        for name, array in self._arrays.items():
            rows = self._rows(name, arrays[OBSERVATION + name])
            weight = counted if array.per_agent else counted.amax(-1, keepdim=True)
            self._of(name).update(rows, weight, group)

    def clipped(self) -> Tensor:
        """Count the numbers that the last update clipped, a scalar on the device."""
        return torch.stack([self._of(name).clipped for name in self._arrays]).sum()

    def outliers(self) -> dict[str, str]:
        """Describe the number of each observation that the last update clipped most."""
        found = {}
        for name, array in self._arrays.items():
            text = self._of(name).outlier_text(array.shape, array.per_agent)
            if text:
                found[f"observation '{name}'"] = text
        return found

    def _of(self, name: str) -> RunningMoments:
        found = self.moments[_key(name)]
        assert isinstance(found, RunningMoments)
        return found

    def _rows(self, name: str, x: Tensor) -> Tensor:
        """[..., A, *shape]; what all agents share is a row of one agent."""
        array = self._arrays[name]
        return x if array.per_agent else x.unsqueeze(x.dim() - len(array.shape))


def _key(name: str) -> str:
    """An observation's name as that of a module, which has no dots."""
    return name.replace(".", "/")


class NormalisingPolicy(WrappingPolicy):
    """A policy for normalised observations, with statistics that stay until published to."""

    def __init__(self, inner: Policy, norm: ObservationNorm) -> None:
        super().__init__(inner)
        self.observation_norm = copy.deepcopy(norm)

    @torch.inference_mode()
    @override
    def act(
        self,
        observation: Mapping[str, Tensor],
        generator: torch.Generator | None,
        memory: Tensor | None = None,
    ) -> dict[str, Tensor]:
        return self.inner.act(self.observation_norm.normalised(observation), generator, memory)


class Normalising(Wrapping[B], Generic[B]):
    """See the module. Used by the thread that learns.

    Attributes:
        observations: their statistics; None: observations stay.
        rewards: those of rewards; None: rewards stay.
    """

    def __init__(
        self,
        inner: Algorithm[B],
        observations: ObservationNorm | None,
        rewards: RunningMoments | None,
        learns: Tensor,
        group: Group,
    ) -> None:
        """Wrap an algorithm; checkpoints hold the statistics as parts of it.

        Args:
            inner: learns.
            observations: see the class.
            rewards: see the class.
            learns: [A] 1, or 0 for a frozen agent, whose rewards are not taken in.
            group: of the ranks, who take in the rows of all.
        """
        super().__init__(inner)
        self.observations, self.rewards = observations, rewards
        self._learns, self._ranks = learns, group
        if observations is not None:
            inner.keep(observation_norm=observations)
        if rewards is not None:
            inner.keep(reward_norm=rewards)

    @override
    def update(self, batch: B) -> dict[str, Tensor]:
        assert isinstance(batch, Batch | ReplayBatch)
        arrays: dict[str, Tensor] = batch.arrays
        changes: dict[str, Any] = {"arrays": arrays}
        kinds, group = arrays.get("step_type"), self._ranks
        # A replay's transitions have their rewards apart.
        reward = arrays["reward"] if isinstance(batch, Batch) or kinds is not None else batch.reward
        if self.rewards is not None:
            earned, counted = self._earned(arrays, reward, kinds)
            self.rewards.update(earned, counted, group)
            scaled = self.rewards.scaled(reward)
            if kinds is None:
                changes["reward"] = scaled
            else:
                changes["arrays"] = {**arrays, "reward": scaled}
        norm = self.observations
        if norm is not None:
            changes["arrays"] = norm.normalised(changes["arrays"], OBSERVATION)
            if isinstance(batch, ReplayBatch):
                changes["next_arrays"] = norm.normalised(batch.next_arrays, OBSERVATION)
        if isinstance(batch, ReplayBatch):
            changes["error_memory"] = None  # what is normalised lies elsewhere each time
        seen: Any = replace(batch, **changes)
        scalars = self.inner.update(seen)
        if isinstance(batch, ReplayBatch):
            batch.td_error = seen.td_error
        if norm is not None:
            there = torch.ones_like(reward) if kinds is None else (kinds != _ABORTED).unsqueeze(-1)
            norm.update(arrays, there.expand_as(reward), group)
        return scalars

    def precision_scalars(self) -> dict[str, Tensor]:
        """See Algorithm; also how many numbers the last update clipped."""
        scalars = self.inner.precision_scalars()
        if self.observations is not None:
            scalars[CLIPPED + "observation"] = self.observations.clipped()
        if self.rewards is not None:
            scalars[CLIPPED + "reward"] = self.rewards.clipped
        return scalars

    @override
    def outliers(self) -> dict[str, str]:
        found = self.inner.outliers()
        if self.observations is not None:
            found |= self.observations.outliers()
        if self.rewards is not None and (text := self.rewards.outlier_text((), per_agent=True)):
            found["reward"] = text
        return found

    def _earned(
        self, arrays: Mapping[str, Tensor], reward: Tensor, kinds: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Rewards of actions, and [..., A] 1 for an alive agent that learns, else 0.

        Args:
            arrays: of the batch.
            reward: [..., A].
            kinds: [T + 1, N] step types of rows in sequence, each with the reward of the action
                before it; None: rewards lie beside their actions.
        """
        alive = arrays.get(OBSERVATION + AGENT_MASK)
        counted = self._learns.expand_as(reward)
        if alive is not None:
            counted = counted * (alive != 0)
        if kinds is None:
            return reward, counted
        taken = (kinds[:-1] < _LAST) & (kinds[1:] != _ABORTED)
        return reward[1:], counted[:-1] * taken.unsqueeze(-1)

    @override
    def make_policy(self) -> Policy:
        policy = self.inner.make_policy()
        return policy if self.observations is None else NormalisingPolicy(policy, self.observations)

    @torch.no_grad()
    @override
    def publish(self, policy: Policy) -> None:
        if self.observations is None:
            self.inner.publish(policy)
            return
        assert isinstance(policy, NormalisingPolicy)
        self.inner.publish(policy.inner)
        theirs, mine = policy.observation_norm.buffers(), self.observations.buffers()
        for published, learned in zip(theirs, mine, strict=True):
            published.copy_(learned)


def normalising(
    inner: Algorithm[Any],
    options: object,
    spec: EnvSpec,
    observations: bool,
    precision: Precision,
    device: torch.device,
) -> Algorithm[Any]:
    """The algorithm with what its options normalise; itself if that is nothing.

    Args:
        inner: the algorithm.
        options: its options.
        spec: of the environment.
        observations: network.normalize_observations.
        precision: has the group of the ranks.
        device: it learns on.

    Raises:
        ConfigError: if there is nothing to normalise.
    """
    agents = spec.num_agents
    shared = options if isinstance(options, SharingConfig) else SharingConfig()
    rewards = shared.normalize_rewards
    if not observations and not rewards:
        return inner
    learns = [float(agent not in shared.frozen_agents) for agent in range(agents)]
    counted = torch.tensor(learns, device=device)
    norm, of_rewards = None, None
    if observations:
        norm = ObservationNorm(spec, shared.slices(agents), counted, device)
    if rewards:
        sharing = sharing_agents(shared.reward_sets(agents), device)
        of_rewards = RunningMoments(sharing, (), rare=True).to(device)
    return Normalising(inner, norm, of_rewards, counted, precision.group)

"""Observations and rewards in units of their running statistics.

What is stored stays as the environment gave it. `publish` hands the statistics of observations to
the policy together with the weights. So a policy that acts, is evaluated or exported has those that
belong to its weights, and none of them changes by acting. Values far beyond all others are clipped
before they are taken in, see RunningMoments, and counted.
"""

import copy
from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from murmur.learner_service.layers.building import NORMALISE
from murmur.learner_service.layers.stacked import sharing_agents
from murmur.learner_service.preprocess.running_moments import RunningMoments
from murmur.learner_service.preprocess.transform import (
    Transform,
    reward_of,
    with_arrays,
    with_reward,
)
from murmur.learner_service.ranks.group import Group
from murmur.learner_service.storage.storage import Batch, is_transition
from murmur.shared.process.errors import ConfigError
from murmur.shared.wire.dataset import OBSERVATION
from murmur.shared.wire.spec import AGENT_MASK, NO_INPUTS, TURN_MASK, EnvSpec
from murmur.shared.wire.timestep import StepType

B = TypeVar("B", bound=Batch)


class NormalizeObservations(nn.Module, Transform):
    """Brings observations to mean 0 and deviation 1, those of a policy by published statistics.

    A batch is normalised by the statistics that the policy acted with, then they take it in. Each
    observation that is no image has statistics, those of each parameter group apart.
    """

    acts = True

    def __init__(
        self, spec: EnvSpec, slices: tuple[int, ...], learns: Tensor, group: Group
    ) -> None:
        """Begin with no rows.

        Args:
            spec: spec of the environment.
            slices: the parameter group of each agent.
            learns: [A] mask on the device of batches, 0 for a frozen agent; its rows are not taken
                in.
            group: ranks whose rows are taken in.

        Raises:
            ConfigError: if the environment observes images alone.
        """
        super().__init__()
        self._group = group
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
        self._moments = dict[str, RunningMoments]()
        for name, array in self._arrays.items():
            sharing = sharing_agents(slices if array.per_agent else (0,), learns.device)
            self._moments[name] = RunningMoments(sharing, array.shape).to(learns.device)
        # Names of modules have no dots.
        modules = {name.replace(".", "/"): moments for name, moments in self._moments.items()}
        self.moments = nn.ModuleDict(modules)

    def normalised(self, arrays: Mapping[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
        """Arrays by name; observations [..., A, *shape] or [..., *shape] with the prefix change."""
        found = dict(arrays)
        for name, moments in self._moments.items():
            if prefix + name in arrays:
                x = arrays[prefix + name]
                found[prefix + name] = moments.normalised(self._rows(name, x)).view(x.shape)
        return found

    def update(self, arrays: Mapping[str, Tensor], there: Tensor) -> None:
        """Take in a batch's observations.

        Args:
            arrays: arrays of the batch, by name with the prefix OBSERVATION.
            there: [..., A] mask: 1 where there is a row, else 0.
        """
        counted = there * self._learns
        for mask in (AGENT_MASK, TURN_MASK):
            if OBSERVATION + mask in arrays:
                counted = counted * (arrays[OBSERVATION + mask] != 0)
        for name, array in self._arrays.items():
            rows = self._rows(name, arrays[OBSERVATION + name])
            weight = counted if array.per_agent else counted.amax(-1, keepdim=True)
            self._moments[name].update(rows, weight, self._group)

    @override
    def statistics(self) -> dict[str, RunningMoments]:
        return {f"observation '{name}'": moments for name, moments in self._moments.items()}

    def _rows(self, name: str, x: Tensor) -> Tensor:
        """[..., A, *shape]; what all agents share is a row of one agent."""
        array = self._arrays[name]
        return x if array.per_agent else x.unsqueeze(x.dim() - len(array.shape))

    @override
    def batch(self, batch: B, updates: int) -> B:
        seen = with_arrays(batch, lambda arrays: self.normalised(arrays, OBSERVATION))
        there = torch.ones_like(reward_of(batch))
        if (kinds := batch.arrays.get("step_type")) is not None:
            there = (kinds != int(StepType.ABORTED)).unsqueeze(-1).expand_as(there)
        self.update(batch.arrays, there)
        return seen

    @override
    def act(
        self, observation: Mapping[str, Tensor], memory: Tensor | None
    ) -> tuple[Mapping[str, Tensor], None]:
        return self.normalised(observation), None

    @override
    def state(self) -> dict[str, nn.Module]:
        return {"observation_norm": self}

    @override
    def snapshot(self) -> "NormalizeObservations":
        return copy.deepcopy(self, {id(self._group): self._group})  # the ranks stay the same

    @torch.no_grad()
    @override
    def publish(self, snapshot: Transform) -> None:
        assert isinstance(snapshot, NormalizeObservations)
        for theirs, mine in zip(snapshot.buffers(), self.buffers(), strict=True):
            theirs.copy_(mine)


class NormalizeRewards(Transform):
    """Divides rewards by their root mean square, after it has taken in the batch's."""

    def __init__(self, moments: RunningMoments, learns: Tensor, group: Group) -> None:
        """Keep the statistics.

        Args:
            moments: statistics of rewards.
            learns: [A] mask, 0 for a frozen agent; its rewards are not taken in.
            group: ranks whose rows are taken in.
        """
        self._moments = moments
        self._learns = learns
        self._group = group

    @override
    def batch(self, batch: B, updates: int) -> B:
        reward = reward_of(batch)
        counted = self._learns.expand_as(reward)
        if (alive := batch.arrays.get(OBSERVATION + AGENT_MASK)) is not None:
            counted = counted * (alive != 0)
        earned, kinds = reward, batch.arrays.get("step_type")
        if kinds is not None:  # rows in sequence, each with the reward of the action before it
            earned, counted = reward[1:], counted[:-1] * is_transition(kinds).unsqueeze(-1)
        self._moments.update(earned, counted, self._group)
        return with_reward(batch, self._moments.scaled(reward))

    @override
    def state(self) -> dict[str, nn.Module]:
        return {"reward_norm": self._moments}

    @override
    def statistics(self) -> dict[str, RunningMoments]:
        return {"reward": self._moments}

"""Algorithms that ranks and one learner are compared with, and batches that can be divided."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from murmur.learner_service.device.precision import Precision
from murmur.learner_service.layers.stacked import Sharing, resolve_sharing
from murmur.learner_service.learning.base import Algorithm, algorithm_config, build_algorithm
from murmur.learner_service.ranks.group import ALONE, Group
from murmur.learner_service.storage.replay import ReplayBatch
from murmur.learner_service.storage.rollout import Batch, transitions
from murmur.shared.config import PluginConfig
from murmur.shared.wire.dataset import OBSERVATION
from murmur.shared.wire.spec import (
    ACTION_MASK,
    ADJACENCY,
    AGENT_MASK,
    STATE,
    ArraySpec,
    Continuous,
    Discrete,
    EnvSpec,
)
from tests.learner_service.toys import ABORTED, CPU, FIRST, MID, random_batch, random_transitions
from tests.ranks.draws import Rows

AGENTS, LENGTH = 3, 6
ENVS = (3, 5)  # of each rank: unrolls of a rollout
SAMPLED = (16, 16)  # rows of each rank's batch from its replay
SEQUENCES = (4, 4)  # sequences of each rank's batch from its replay
_FIRST_SCALE = 2.0**16


@dataclass(frozen=True)
class Case:
    """An algorithm with its options, in an environment of three agents that die.

    Attributes:
        options: the section algorithm.
        space: of actions: discrete, masked or continuous.
        sharing: algorithm.share_parameters.
        recurrent: network.recurrent.
        network: name and options of a network other than mlp.
        image: whether agents see images, too.
        states: whether critics see a state of each agent.
        mortal: whether agents die.
        scaled: whether losses are scaled, as in fp16.
        normalize: network.normalize_observations.
    """

    options: dict[str, Any] = field(hash=False)
    space: str = "discrete"
    sharing: Sharing = True
    recurrent: int = 0
    network: dict[str, Any] = field(default_factory=dict, hash=False)
    image: bool = False
    states: bool = False
    mortal: bool = True
    scaled: bool = False
    normalize: bool = False

    @property
    def spec(self) -> EnvSpec:
        """Of the environment."""
        observations = [ArraySpec("view", "float32", (4,))]
        if self.mortal:
            observations.append(ArraySpec(AGENT_MASK, "uint8", ()))
        if self.space == "masked":
            observations.append(ArraySpec(ACTION_MASK, "uint8", (3,)))
        if self.image:
            observations.append(ArraySpec("image", "float32", (2, 8, 8)))
        if self.states:
            observations.append(ArraySpec(STATE, "float32", (2,)))
        if self.network:
            observations.append(ArraySpec(ADJACENCY, "uint8", (AGENTS,)))
            observations.append(ArraySpec("things", "float32", (3, 2)))
        action = Continuous(2) if self.space == "continuous" else Discrete(3)
        return EnvSpec("toy", AGENTS, tuple(observations), action, (), LENGTH)

    @property
    def in_sequences(self) -> bool:
        """Return whether batches hold sequences of environments: rollouts, or of a replay."""
        return self.on_policy or self.recurrent > 0

    @property
    def on_policy(self) -> bool:
        """Whether batches are rollouts."""
        return self.options["name"] in ("coma", "mappo", "happo")

    def build(self, group: Group = ALONE) -> Algorithm[Any]:
        """The algorithm of one learner, or of a rank."""
        precision = Precision("fp32", CPU, group=group)
        if self.scaled:
            precision.scaler = torch.amp.GradScaler("cpu", init_scale=_FIRST_SCALE)
        net: dict[str, Any] = {"name": "mlp"} | self.network
        if self.image:
            net = {"name": "cnn", "channels": (3,), "kernels": (3,), "strides": (2,)}
        if self.normalize:
            net["normalize_observations"] = True
        network = PluginConfig(**net, hidden=(8,), recurrent=self.recurrent)
        whole = PluginConfig(**self.options, share_parameters=self.sharing)
        own = algorithm_config(whole).for_rank(group.size).model_dump()
        config = PluginConfig(name=whole.name, **own)
        return build_algorithm(config, self.spec, network, precision, CPU, 3)

    def batch(self, algorithm: Algorithm[Any], seed: int) -> Any:
        """What one learner learns from, made by its own policy if it is on-policy."""
        if not self.in_sequences:
            return self._sampled(seed)
        rollout = self._rollout(algorithm, seed)
        return rollout if self.on_policy else _of_replay(rollout)

    def parts(self, batch: Any) -> list[tuple[Any, Rows]]:
        """What each rank has of a batch."""
        found: list[tuple[Any, Rows]] = []
        first = 0
        counts = SAMPLED if not self.in_sequences else ENVS if self.on_policy else SEQUENCES
        for count in counts:
            rows = slice(first, first + count)
            part = _envs(batch, rows) if self.in_sequences else _sampled_rows(batch, rows)
            part = part if self.on_policy or not self.recurrent else _of_replay(part)
            total = sum(counts)
            found.append((part, Rows(first, count, total)))
            first += count
        return found

    def owners(self, batch: Any) -> list[Tensor] | None:
        """The rank of each unit of every shuffle, which repeat; None: nothing is shuffled."""
        if not self.on_policy:
            return None
        weight = transitions(batch).valid.unsqueeze(-1).repeat(1, 1, AGENTS)  # [L, B, A]
        alive = batch.arrays.get(OBSERVATION + AGENT_MASK)
        if alive is not None:
            weight &= alive[:-1] != 0
        ranks = torch.repeat_interleave(torch.arange(len(ENVS)), torch.tensor(ENVS))  # [B]
        every = ranks.view(1, -1, 1).expand_as(weight)
        if self.options["name"] == "coma" and self.sharing is True and not self.recurrent:
            return [every[weight]]
        frozen = self.options.get("frozen_agents", [])
        found: list[Tensor] = []
        for agents in self._agents_of_teams():
            counted = weight[..., agents].any(2)
            units = ranks[counted.any(0)] if self.recurrent else every[..., 0][counted]
            learning = [agent for agent in agents if agent not in frozen]
            turns = min(1, len(learning))
            if self.options["name"] == "happo":
                slices = resolve_sharing(self.sharing, AGENTS, "share_parameters")
                turns = len({slices[agent] for agent in learning})
            found += [units] * turns * self.options["data_passes"]
        return found

    def _agents_of_teams(self) -> list[list[int]]:
        teams = self.options.get("teams", {})
        return [team["agents"] for team in teams.values()] or [list(range(AGENTS))]

    def _sampled(self, seed: int) -> ReplayBatch:
        batch = random_transitions(self.spec, sum(SAMPLED), seed)
        batch.weight /= batch.weight.max()
        random = torch.Generator().manual_seed(seed)
        for arrays in (batch.arrays, batch.next_arrays):
            if self.mortal:
                alive = arrays[OBSERVATION + AGENT_MASK]
                alive.copy_(torch.rand(alive.shape, generator=random) < 0.7)
                alive[:12, 1] = 0  # agent 1 lives mostly on the second rank
        return batch

    def _rollout(self, algorithm: Algorithm[Any], seed: int) -> Batch:
        """Random rows with actions of the policy; in every fourth rank 1 has nothing to learn."""
        actions = EnvSpec("toy", AGENTS, self.spec.observations, Discrete(3), (), LENGTH)
        envs = sum(ENVS)
        batch = random_batch(actions, LENGTH, envs, seed)
        batch.arrays["step_type"][0, ::2] = MID
        random = torch.Generator().manual_seed(seed)
        if self.mortal:
            alive = batch.arrays[OBSERVATION + AGENT_MASK]
            alive.copy_(torch.rand(alive.shape, generator=random) < 0.8)
            alive[:, :3, 1] = 0
        if self.network:
            edges = batch.arrays[OBSERVATION + ADJACENCY]
            edges.copy_(torch.rand(edges.shape, generator=random) < 0.5)
        batch.arrays["step_type"][4:, 1] = ABORTED
        if seed % 4 == 3:
            batch.arrays["step_type"][:, ENVS[0] :] = ABORTED
        policy = algorithm.snapshot()
        memory = torch.randn(envs, AGENTS, policy.memory_size, generator=random)
        acted: list[dict[str, Tensor]] = []
        for t in range(LENGTH + 1):
            memory = memory * (batch.arrays["step_type"][t] != FIRST).view(-1, 1, 1)
            if t == 0 and policy.memory_size:
                batch.arrays["memory"] = memory.clone().unsqueeze(0)
            observation = {k: v[t] for k, v in batch.observation().items()}
            row = policy.act(observation, random, memory if policy.memory_size else None)
            memory = row.pop("memory", memory).clone()
            acted.append(row)
        for name in acted[0]:
            batch.arrays[name] = torch.stack([row[name] for row in acted]).clone()
        return batch


def _of_replay(batch: Batch) -> ReplayBatch:
    """The same sequences as a replay gives them."""
    none = torch.zeros(0)
    index = torch.zeros(LENGTH * batch.arrays["reward"].shape[1], dtype=torch.long)
    return ReplayBatch(batch.arrays, {}, none, none, none, index, index)


def _envs(batch: Batch, envs: slice) -> Batch:
    return Batch({name: x[:, envs].clone() for name, x in batch.arrays.items()}, [])


def _sampled_rows(batch: ReplayBatch, rows: slice) -> ReplayBatch:
    """With weights over their own largest, as a replay gives them."""
    largest = batch.weight[rows].max()
    return ReplayBatch(
        {name: x[rows].clone() for name, x in batch.arrays.items()},
        {name: x[rows].clone() for name, x in batch.next_arrays.items()},
        batch.reward[rows].clone(),
        batch.discount[rows].clone(),
        batch.weight[rows] / largest,
        batch.index[rows],
        batch.age[rows],
        largest_weight=largest,
    )

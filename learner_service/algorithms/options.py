"""Options that several algorithms have, and what others ask of them."""

import math
from typing import Annotated, Any, Self

from pydantic import Field
from typing_extensions import override

from learner_service.networks.building import RESERVED
from learner_service.networks.layers import LayersConfig
from learner_service.networks.stacked import Sharing, resolve_sharing
from learner_service.preprocess.frozen import FROZEN as FROZEN
from learner_service.preprocess.frozen import SHARING as SHARING
from learner_service.storage.flight import Demand, Flight, transitions_in, unmeasured
from shared.config import PluginConfig, Section
from shared.errors import ConfigError

Change = tuple[str, dict[str, Any]]  # text, and the options that change: dotted name -> value

# Options that several algorithms have with defaults of their own.
BatchSize = Annotated[
    int,
    Field(
        ge=0,
        description="agent-transitions in a minibatch, of all learners together; 0: as many as fit "
        "the memory",
    ),
]
BatchNumber = Annotated[
    int,
    Field(
        ge=1,
        description="minibatches; an update starts at batch_size * batch_number agent-transitions; "
        "it has more minibatches if the environments give more at once",
    ),
]
DataPasses = Annotated[int, Field(ge=1, description="passes over each rollout")]
Gamma = Annotated[float, Field(ge=0, le=1, description="discount factor")]
ActorRate = Annotated[float, Field(gt=0, description="Adam's learning rate of the policy")]
CriticRate = Annotated[float, Field(gt=0, description="Adam's learning rate of the critic")]
TargetTau = Annotated[
    float,
    Field(gt=0, le=1, description="share by which target networks follow per update"),
]
EntropyWeight = Annotated[float, Field(ge=0, description="weight of the policy's entropy, per nat")]
GradNorm = Annotated[float, Field(ge=0, description="gradient norm is clipped; 0: never")]
EpsilonStart = Annotated[float, Field(ge=0, le=1, description="share of uniform random actions")]
EpsilonEnd = Annotated[float, Field(ge=0, le=1, description="the share once annealed")]
ShareEncoder = Annotated[
    bool,
    Field(
        description="images: policy and critic share the convolutions, which the critic's gradient "
        "alone trains (DrQ)",
    ),
]


class AlgorithmConfig(Section):
    """Base of an algorithm's options: answers what others ask of them without knowing any.

    An algorithm that answers nothing is asked for nothing: its batch size is not searched, and
    `murmur doctor` probes no change of it.
    """

    def open_batch_size(self) -> str:
        """Dotted name of the batch size that is to be found (it is 0); empty: there is none."""
        return ""

    def with_batch_size(self, size: int) -> Self:
        """The same with the batch size that is to be found set."""
        return self

    def for_trial(self) -> Self:
        """The same without what only repeats or puts off an update's work."""
        return self

    def for_rank(self, size: int) -> Self:
        """The share of one of `size` learners that learn together, in what is of all of them.

        Raises:
            ConfigError: if an option cannot be divided.
        """
        return self

    def for_environments(
        self, environments: int, agents: int, max_episode_steps: int, *, remembers: bool
    ) -> Self:
        """The same with what depends on the number of environments settled.

        Args:
            environments: that train, of all learners; 0: not known.
            agents: of an environment.
            max_episode_steps: of the spec.
            remembers: the policy has a memory.

        Raises:
            ConfigError: if something does and they are not known.
        """
        return self

    def batch_size_advice(self) -> str:
        """What to change on a GPU where not even a batch of one row fits."""
        return "free memory of the device"

    def learned_at_once(self, num_agents: int) -> int:
        """Agents' rows in one forward and backward pass; 0: not known."""
        return 0

    def waiting_advice(self) -> str:
        """How more environments may act at once, rows being no older; empty: no option does it."""
        return ""

    def with_flight(self, unroll_steps: int, unrolls_per_update: int) -> Self:
        """The same with what was chosen of an unroll's length and of an update's unrolls."""
        return self

    def cheaper_learning(self) -> list[Change]:
        """Changes that may make learning from a row cheaper, to be probed."""
        return []

    def larger_updates(self, factor: float) -> Change | None:
        """A change after which an update takes `factor` times the rows at the same cost each."""
        return None


def shares(options: Section, size: int, *names: str, section: str = "algorithm") -> dict[str, int]:
    """What one of `size` learners gets of options, by name.

    Raises:
        ConfigError: if one cannot be divided, naming the nearest number that can.
    """
    found = {}
    for name in names:
        value = getattr(options, name)
        found[name], left = divmod(value, size)
        if left:
            nearest = max(1, round(value / size)) * size
            raise ConfigError(
                f"{section}.{name}={value} is of all {size} learners together and cannot be "
                f"divided among them; set it to {nearest}, or start another number of learners"
            )
    return found


class SharingConfig(Section):
    """Options of algorithms whose agents may share networks."""

    share_parameters: Sharing = Field(
        True,
        description="false: each agent has networks of its own; or the number of each agent's "
        "networks: [0, 0, 1] lets the first two share",
    )
    frozen_agents: tuple[int, ...] = Field(
        (),
        description="numbers of agents, from 0, that act but are not trained; they have networks "
        "of their own by share_parameters",
    )
    normalise_rewards: bool = Field(
        False, description="divide rewards by their running root mean square"
    )

    def slices(self, num_agents: int) -> tuple[int, ...]:
        """The parameter group of each agent.

        Raises:
            ConfigError: if share_parameters does not fit the number of agents.
        """
        return resolve_sharing(self.share_parameters, num_agents, SHARING)

    def reward_sets(self, num_agents: int) -> tuple[int, ...]:
        """The set of each agent whose rewards are normalised together: that of its networks."""
        return self.slices(num_agents)


class CriticConfig(SharingConfig):
    """Options of algorithms that have critics beside their policies."""

    critic_network: dict[str, Any] = Field(
        {},
        description="options of the critic's network where they differ from `network`: "
        "{hidden: [256, 256]}; with `name` another network",
    )

    def network_of_critic(
        self, network: PluginConfig, *, shares_encoder: bool = False
    ) -> PluginConfig:
        """The critic's network: the policy's with the changes of `critic_network`.

        Args:
            network: of the policy.
            shares_encoder: whether both have the same convolutions.

        Raises:
            ConfigError: for a change of what networks are fed or remember, or of a shared encoder.
        """
        changes = self.critic_network
        if not changes:
            return network
        option = "algorithm.critic_network"
        if fed := sorted(RESERVED.keys() & changes.keys()):
            raise ConfigError(
                f"{option}.{fed[0]}: policy and critic are fed and remember alike; set "
                f"network.{fed[0]} for both"
            )
        if shares_encoder and (of_encoder := sorted(changes.keys() - LayersConfig.model_fields)):
            raise ConfigError(
                f"{option}.{of_encoder[0]}: with algorithm.share_encoder = true only the linear "
                f"layers are the critic's own: {', '.join(LayersConfig.model_fields)}"
            )
        options, name = network.options, str(changes.get("name", network.name))
        if name != network.name:
            options = {key: value for key, value in options.items() if key in RESERVED}
        return PluginConfig(**{**options, **changes, "name": name})


class OnPolicyConfig(AlgorithmConfig):
    """Options of algorithms that make passes over a rollout in minibatches."""

    batch_size: BatchSize
    batch_number: BatchNumber
    max_batch_size: int = Field(
        0,
        ge=0,
        description="agent-transitions that a minibatch may grow to, by a whole factor k, if the "
        "environments give k * batch_size * batch_number or more at once, learning rates by "
        "sqrt(k); settled at the start by their number; 0: more minibatches instead",
    )
    data_passes: DataPasses
    unroll_steps: int = Field(
        0,
        ge=0,
        description="transitions of an unroll; 0: chosen, 16 to 128, so that one unroll of every "
        "environment makes an update; in the async pipeline, of every one that the learner can use",
    )
    unrolls_per_update: int = Field(
        0,
        ge=0,
        description="unrolls that an update takes, of all learners together, each of one "
        "environment, or more if it needs them for batch_size * batch_number agent-transitions; 0: "
        "chosen, in the async pipeline so that all environments the learner can use act at once",
    )

    @override
    def open_batch_size(self) -> str:
        return "" if self.batch_size else "batch_size"

    @override
    def with_batch_size(self, size: int) -> Self:
        return self.model_copy(update={"batch_size": size})

    @override
    def learned_at_once(self, num_agents: int) -> int:
        return self.batch_size

    @override
    def for_trial(self) -> Self:
        return self.model_copy(update={"data_passes": 1})

    def for_rank(self, size: int) -> Self:
        """See AlgorithmConfig: minibatches, and unrolls of an update."""
        return self.model_copy(update=shares(self, size, "batch_size", "unrolls_per_update"))

    def for_environments(
        self, environments: int, agents: int, max_episode_steps: int, *, remembers: bool
    ) -> Self:
        """See AlgorithmConfig: the size of minibatches, which then has no room to grow left.

        They are as many as configured, if the bound allows it.
        """
        if not self.max_batch_size:
            return self
        option = f"algorithm.max_batch_size={self.max_batch_size}"
        if not self.batch_size:
            raise ConfigError(
                f"{option}: with algorithm.batch_size=0 minibatches are as large as the memory "
                "allows and cannot grow; set batch_size, or max_batch_size=0"
            )
        if self.max_batch_size < self.batch_size:
            raise ConfigError(
                f"{option} is less than algorithm.batch_size={self.batch_size}, from which "
                "minibatches grow; set max_batch_size to more, or to 0"
            )
        if not environments:
            raise ConfigError(
                f"{option}: minibatches grow with the number of environments, which is not known "
                "at the start; set env_server.num_workers, or max_batch_size=0"
            )
        asked = self.batch_size * self.batch_number
        rows = math.ceil(asked / agents)
        demand = Demand(rows, environments, 1, max_episode_steps, remembers)
        given = Flight(self.unroll_steps, self.unrolls_per_update, None)
        flight = unmeasured(demand, given, environments)
        each = transitions_in(flight.unroll_steps, max_episode_steps)
        at_once = flight.unrolls_per_update * each * agents
        growth = max(1, min(at_once // asked, self.max_batch_size // self.batch_size))
        size = growth * self.batch_size
        return self.model_copy(update={"batch_size": size, "max_batch_size": 0})

    def waiting_advice(self) -> str:
        """See AlgorithmConfig: an update that takes unrolls of more environments."""
        if self.unrolls_per_update:
            return "set algorithm.unrolls_per_update=0, which chooses"
        return "raise algorithm.batch_number"

    @override
    def with_flight(self, unroll_steps: int, unrolls_per_update: int) -> Self:
        return self.model_copy(
            update={"unroll_steps": unroll_steps, "unrolls_per_update": unrolls_per_update}
        )

    def cheaper_learning(self) -> list[Change]:
        """See AlgorithmConfig: larger minibatches, fewer passes."""
        changes: list[Change] = []
        if self.batch_number > 1:
            by = min(4, self.batch_number)
            fewer = math.ceil(self.batch_number / by)
            options = {"batch_size": self.batch_size * by, "batch_number": fewer}
            if 0 < self.max_batch_size < self.batch_size * by:
                options["max_batch_size"] = self.batch_size * by
            changes.append((f"minibatches {by} times as large, {by} times fewer", options))
        if self.data_passes > 1:
            half = self.data_passes // 2
            what = f"{half} passes over the data instead of {self.data_passes}"
            changes.append((what, {"data_passes": half}))
        return changes

    @override
    def larger_updates(self, factor: float) -> Change | None:
        if self.unrolls_per_update:
            return "updates that take in all environments", {"unrolls_per_update": 0}
        larger = math.ceil(self.batch_number * factor)
        what = f"{larger} minibatches an update instead of {self.batch_number}"
        return what, {"batch_number": larger}


class OnPolicyCriticConfig(CriticConfig, OnPolicyConfig):
    """Options of COMA and MAPPO alike."""

    gamma: Gamma = 0.99
    actor_lr: ActorRate
    critic_lr: CriticRate
    final_lr_fraction: float = Field(
        1.0, gt=0, le=1, description="learning rates fall linearly to this share of themselves"
    )
    anneal_updates: int = Field(
        0, ge=0, description="updates over which learning rates and entropy weight fall; 0: never"
    )
    entropy_weight: EntropyWeight
    max_grad_norm: GradNorm = 10.0

    def for_environments(
        self, environments: int, agents: int, max_episode_steps: int, *, remembers: bool
    ) -> Self:
        """See AlgorithmConfig: with minibatches learning rates grow, by the square root.

        Malladi, Lyu, Panigrahi, Arora 2022, "On the SDEs and Scaling Rules for Adaptive Gradient
        Algorithms" (arXiv:2205.10287): Adam's noise then stays what it was.
        """
        grown = super().for_environments(
            environments, agents, max_episode_steps, remembers=remembers
        )
        if grown.batch_size == self.batch_size:
            return grown
        by = math.sqrt(grown.batch_size / self.batch_size)
        rates = {"actor_lr": by * self.actor_lr, "critic_lr": by * self.critic_lr}
        return grown.model_copy(update=rates)

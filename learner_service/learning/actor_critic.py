"""The skeleton of COMA, MAPPO, MADDPG, MASAC and QMIX: how networks are built, fed and published.

A subclass names its POLICY and makes its networks and optimisers in `_build`. OnPolicyAlgorithm and
OffPolicyAlgorithm add what a rollout and what a replay ask for.
"""

from abc import abstractmethod
from dataclasses import replace
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from murmur.learner_service.device.adam import Adam
from murmur.learner_service.device.precision import Precision
from murmur.learner_service.layers.building import (
    NORMALISE,
    build_network,
    build_twins,
    observed_image,
    resolve_network,
    shared_encoder,
)
from murmur.learner_service.layers.casting import publish
from murmur.learner_service.layers.encoded import Encoder, learned_parameters
from murmur.learner_service.layers.inputs import ActorInputs, InputShape
from murmur.learner_service.layers.recurrent import memory_size
from murmur.learner_service.layers.stacked import count_slices, sharing_agents
from murmur.learner_service.learning.base import Algorithm, Policy
from murmur.learner_service.learning.options import CriticConfig, SharingConfig
from murmur.learner_service.learning.policies import SnapshotPolicy
from murmur.learner_service.storage.storage import Batch
from murmur.shared.config import PluginConfig
from murmur.shared.process.errors import ConfigError
from murmur.shared.wire.spec import EnvSpec

B = TypeVar("B", bound=Batch)


class ActorCritic(Algorithm[B], Generic[B]):
    """Algorithm with actors and critics, as the module says.

    Used by the thread that learns, except for the policies it hands out.

    Networks, optimisers and all other modules that `_build` makes are parts of checkpoints.

    Attributes:
        POLICY: class of the policies that act.
        REMEMBERS: whether it can work with recurrent networks.
    """

    POLICY: type[SnapshotPolicy]
    REMEMBERS = False
    actor: nn.Module

    def __init__(
        self,
        config: SharingConfig,
        spec: EnvSpec,
        network: PluginConfig,
        precision: Precision,
        device: torch.device,
        seed: int,
    ) -> None:
        """Build networks and optimisers.

        Args:
            config: configuration of the algorithm.
            spec: spec of the environment.
            network: name and options of the networks.
            precision: precision of forward passes.
            device: device to learn on.
            seed: seed of the first weights and of the algorithm's random draws.

        Raises:
            SpecError: if the algorithm does not fit the actions.
            ConfigError: if options do not fit the agents, the network or each other.
        """
        super().__init__(precision, device, seed)
        self._config = config
        self._spec = spec
        self._critic_network = network
        if isinstance(config, CriticConfig):
            self._critic_network = config.network_of_critic(network)
        self._seed = seed
        self._slices = config.slices(spec.num_agents)
        self._sharing = sharing_agents(self._slices, device)  # [S, A]
        self._num_slices = count_slices(self._slices)
        image = observed_image(spec)
        self._net = net = resolve_network(network, image)
        critic = resolve_network(self._critic_network, image)
        if net.normalizes and hasattr(critic.options, "communicates"):
            raise ConfigError(
                f"algorithm.critic_network = {critic.name}: it reads masks and adjacency as 0 and "
                f"1, and {NORMALISE}=true changes what both networks are fed; set it to false"
            )
        self._options = replace(net.inputs, alive=net.inputs.alive or critic.inputs.alive)
        self._keeps_apart = net.stacked and critic.stacked
        self._actor_inputs = ActorInputs(spec, self._options)
        # Optimisers with what they train, in the order of `_adam`.
        self._learned: list[tuple[Adam, nn.Module]] = []
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._build()
        self.memory_size = memory_size(self._acts)
        self._keep_attributes()
        self._prepare()

    @abstractmethod
    def _build(self) -> None:
        """Make the networks, with weights drawn from torch's generator, and the optimisers."""

    def _prepare(self) -> None:
        """Make what needs the networks, once they are there."""

    @property
    def _acts(self) -> nn.Module:
        """The network that policies are copies of."""
        return self.actor

    @property
    def _explores_by(self) -> Tensor | None:
        """Exploration values published with the policy; None if there are none."""
        return None

    def _make_actor(
        self,
        num_outputs: int,
        encoder: Encoder | None = None,
        slices: tuple[int, ...] | None = None,
    ) -> nn.Module:
        """Build the agents' networks: [B, A, num_outputs] of observations. They train no encoder.

        Args:
            num_outputs: numbers that a network gives for an agent.
            encoder: convolutions shared with the critic; None: they are the network's own.
            slices: [agents of the network] their parameter groups; None: those of all agents.
        """
        return build_network(
            self._net,
            self._actor_inputs.shape,
            num_outputs,
            slices or self._slices,
            may_remember=self.REMEMBERS,
            encoder=encoder,
            trains=False,
        ).to(self._device)

    def _make_critic(
        self,
        shape: InputShape,
        num_outputs: int,
        encoder: Encoder | None = None,
        slices: tuple[int, ...] | None = None,
        *,
        apart: bool,
    ) -> nn.Module:
        """The agents' critics, see build_network: [B, A, num_outputs] of inputs of that shape."""
        return build_network(
            resolve_network(self._critic_network, shape.image),
            shape,
            num_outputs,
            slices or self._slices,
            may_remember=self.REMEMBERS,
            apart=apart,
            encoder=encoder,
        ).to(self._device)

    def _make_twins(
        self,
        shape: InputShape,
        num_outputs: int,
        number: int,
        encoder: Encoder | None,
        slices: tuple[int, ...],
    ) -> nn.Module:
        """Build `number` critics for each agent, side by side as slices."""
        twins = tuple(number * s + twin for s in slices for twin in range(number))
        return build_twins(
            resolve_network(self._critic_network, shape.image),
            shape,
            num_outputs,
            self._slices,
            twins,
            number,
            encoder,
            may_remember=self.REMEMBERS,
        ).to(self._device)

    def _shared_encoder(
        self, critic: InputShape, slices: tuple[int, ...] | None = None
    ) -> Encoder | None:
        """The convolutions that actor and critic have in common, if share_encoder is set."""
        option, wanted = "algorithm.share_encoder", getattr(self._config, "share_encoder", False)
        if not wanted:
            return None
        actor = self._actor_inputs.shape
        return shared_encoder(self._net, actor, critic, slices or self._slices, option)

    def _adam(self, network: nn.Module, lr: float, **how: float | tuple[float, float]) -> Adam:
        """An optimiser of what the network learns by its own gradient."""
        adam = self._adam_of([{"params": learned_parameters(network), "lr": lr}], **how)
        self._learned.append((adam, network))
        return adam

    @override
    def make_policy(self) -> SnapshotPolicy:
        inputs, explores_by = self._actor_inputs, self._explores_by
        return self.POLICY(self._acts, inputs, self._spec, self._precision, explores_by)

    @torch.no_grad()
    @override
    def publish(self, policy: Policy) -> None:
        assert isinstance(policy, SnapshotPolicy)
        publish(self._acts, policy.actor)
        if self._explores_by is not None:
            policy.exploration.copy_(self._explores_by)

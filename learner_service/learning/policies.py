"""Policies that act with a frozen copy of an actor, and the actors of COMA, MAPPO and IPPO."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from murmur.learner_service.device.precision import Precision
from murmur.learner_service.layers.building import Network
from murmur.learner_service.layers.casting import snapshot
from murmur.learner_service.layers.distributions import (
    ILLEGAL,
    ActionDistribution,
    Categorical,
    Choices,
    CompositeDistribution,
    Normal,
    PolicyDistribution,
)
from murmur.learner_service.layers.forward import forward
from murmur.learner_service.layers.inputs import ActorInputs, Inputs
from murmur.learner_service.layers.recurrent import RecurrentState, memory_size
from murmur.learner_service.layers.stacked import count_slices, per_agent
from murmur.learner_service.learning.base import Policy
from murmur.learner_service.learning.exploration import EpsilonSoftmax
from murmur.shared.process.errors import ConfigError
from murmur.shared.wire.spec import (
    ACTION_MASK,
    TURN_MASK,
    Composite,
    Continuous,
    Discrete,
    EnvSpec,
    action_bounds,
    action_layout,
)


class SnapshotPolicy(Policy):
    """A frozen copy of an actor; a subclass makes a distribution of its outputs.

    Attributes:
        RETURNS_LOG_PROB: whether `act` returns the log-probability of the action.
        actor: copy of the algorithm's actor.
        exploration: numbers on the device that the algorithm explores by, if it has any.
    """

    RETURNS_LOG_PROB = False
    exploration: Tensor

    def __init__(
        self,
        actor: nn.Module,
        inputs: ActorInputs,
        spec: EnvSpec,
        precision: Precision,
        exploration: Tensor | None = None,
    ) -> None:
        """Copy the actor and what it explores by.

        Args:
            actor: module with weights in fp32.
            inputs: inputs of the actor, made of observations.
            spec: spec of the environment.
            precision: precision of forward passes.
            exploration: numbers to explore by, see the class.
        """
        self.actor, self.memory_size = snapshot(actor, precision), memory_size(actor)
        self._inputs = inputs
        self._spec = spec
        self._precision = precision
        if exploration is not None:
            self.exploration = exploration.clone()

    @property
    def network(self) -> nn.Module:
        """The actor's network."""
        return self.actor

    @abstractmethod
    def distribution(self, out: Tensor, mask: Tensor | None) -> ActionDistribution:
        """Return the distribution of actions.

        Args:
            out: [B, A, outputs] float32, output of the network.
            mask: [B, A, K] 1 = legal, or None if all actions are.
        """

    def in_bounds(self, action: Tensor) -> dict[str, Tensor]:
        """Return an action with numbers [B, A, U] as the environment takes it, as "action"."""
        return {"action": action}

    @torch.inference_mode()
    @override
    def act(
        self,
        observation: Mapping[str, Tensor],
        generator: torch.Generator | None,
        memory: Tensor | None = None,
    ) -> dict[str, Tensor]:
        inputs = self._inputs(observation)
        hidden = None if memory is None else RecurrentState(memory)
        with self._precision.autocast():
            out, remembered = forward(self.network, inputs, hidden)
        pi = self.distribution(out.float(), observation.get(ACTION_MASK))
        action = pi.mode() if generator is None else pi.sample(generator)
        numbers = action.is_floating_point()
        acted = self.in_bounds(action) if numbers else {"action": action.int()}
        if TURN_MASK in observation:
            turn = observation[TURN_MASK].view(*action.shape[:2], *(1,) * (action.dim() - 2))
            acted["action"] = acted["action"] * turn
        if self.RETURNS_LOG_PROB:
            assert isinstance(pi, PolicyDistribution)
            acted["log_prob"] = pi.log_prob(action)
        if remembered is not None:
            acted["memory"] = remembered
        return acted if generator is not None else acted | pi.greedy_by()


class ComaPolicy(SnapshotPolicy):
    """The actor and its epsilon, frozen."""

    @override
    def distribution(self, out: Tensor, mask: Tensor | None) -> EpsilonSoftmax:
        return EpsilonSoftmax(out, mask, self.exploration)


def policy_outputs(spec: EnvSpec) -> int:
    """Return the outputs of a policy for an agent: logits, then means of continuous actions."""
    if isinstance(spec.action, Discrete):
        return spec.action.num_actions
    if isinstance(spec.action, Continuous):
        return spec.action.size
    return spec.action.num_alternatives + spec.action.size


def policy_extras(spec: EnvSpec) -> dict[str, tuple[int, ...]]:
    """Return what a MappoPolicy's `act` returns beside the action, see Algorithm."""
    dtype, shape = action_layout(spec.action)
    return {"log_prob": ()} | ({"raw_action": shape} if dtype.kind == "f" else {})


class Actor(nn.Module):
    """A policy network and, for actions with numbers, each one's log deviation.

    Attributes:
        counted: [A, U] mask, 1 where an agent has the number, else 0; None: all have all.
        choices: layout of the choices of a Composite; None for other actions.
    """

    counted: Tensor | None

    def __init__(
        self, network: nn.Module, spec: EnvSpec, slices: tuple[int, ...], log_std: float
    ) -> None:
        super().__init__()
        self.network, self._slices = network, slices
        self.log_std = None
        if not isinstance(spec.action, Discrete) and spec.action.size:
            shape = (count_slices(slices), spec.action.size)
            self.log_std = nn.Parameter(torch.full(shape, log_std))
        self._outputs = policy_outputs(spec)
        self.choices = None
        counted = None
        if isinstance(spec.action, Composite):
            self.choices = Choices(spec.action.factors)
            self._num_logits = spec.action.num_alternatives
            if spec.action.idle:
                counted = 1 - torch.tensor(spec.action.idle, dtype=torch.float32)
        self.register_buffer("counted", counted, persistent=False)

    def forward(
        self, inputs: Inputs, mask: Tensor | None, hidden: RecurrentState | None
    ) -> tuple[PolicyDistribution, Tensor | None]:
        """Return the distribution for inputs [R, A, ...], shaped [R, A]; and the next state."""
        out, memory = forward(self.network, inputs, hidden)
        return self.distribution(out, mask), memory

    def distribution(
        self, out: Tensor, mask: Tensor | None, illegal: Tensor | None = None
    ) -> PolicyDistribution:
        """Return the distribution of outputs [R, A, ...], of which a value may be the last."""
        out = out[..., : self._outputs]
        if self.choices is not None:
            logits, mean = out[..., : self._num_logits], out[..., self._num_logits :]
            normal = None if self.log_std is None else self._normal(mean)
            return CompositeDistribution(self.choices, logits, normal, mask, illegal)
        if self.log_std is None:
            return Categorical(out, mask, illegal)
        return self._normal(out)

    def _normal(self, mean: Tensor) -> Normal:
        assert self.log_std is not None
        return Normal(mean, per_agent(self.log_std, self._slices), self.counted)


class MappoPolicy(SnapshotPolicy):
    """The actor of MAPPO and IPPO, frozen."""

    RETURNS_LOG_PROB = True
    actor: Actor

    def __init__(self, *how: Any) -> None:  # noqa: ANN401 - those of SnapshotPolicy
        super().__init__(*how)
        # Saves a kernel; on a CPU the plain way serves, which every exporter knows.
        device = next(self.actor.parameters()).device
        on_device = device.type != "cpu"
        self._illegal = torch.full((), ILLEGAL, device=device) if on_device else None
        if isinstance(self._spec.action, Composite):
            self._bounds = torch.tensor(action_bounds(self._spec.action), device=device).unbind()

    @property
    @override
    def network(self) -> nn.Module:
        return self.actor.network

    @override
    def distribution(self, out: Tensor, mask: Tensor | None) -> PolicyDistribution:
        return self.actor.distribution(out, mask, self._illegal)

    @override
    def in_bounds(self, action: Tensor) -> dict[str, Tensor]:
        """Clip actions to the bounds; the density is that of the action before clipping."""
        if isinstance(self._spec.action, Composite):
            return {"action": action.clamp(*self._bounds), "raw_action": action}
        assert isinstance(self._spec.action, Continuous)
        low, high = self._spec.action.low, self._spec.action.high
        return {"action": action.clamp(low, high), "raw_action": action}


def require_one_trunk(
    options: Any,  # noqa: ANN401 - MAPPO's, which stands above
    network: Network,
) -> None:
    """Check that one network can give a policy and its values.

    Args:
        options: options of MAPPO.
        network: the policy's network.

    Raises:
        ConfigError: if the value function sees something else than the policy.
    """
    problem = ""
    if options.centralized:
        problem = (
            "a centralized value function sees the state, the policy does not; set "
            "algorithm.centralized=false, or share_trunk=false"
        )
    elif options.share_encoder:
        problem = "policy and values share everything already; set algorithm.share_encoder=false"
    elif options.critic_network:
        problem = (
            "policy and values come from one network; leave out algorithm.critic_network, or set "
            "share_trunk=false"
        )
    elif network.mixes:
        problem = (
            f"network '{network.name}' mixes agents, and an agent's value must come from its own "
            "observation; use another network, or set share_trunk=false"
        )
    if problem:
        raise ConfigError(f"algorithm.share_trunk = true: {problem}")

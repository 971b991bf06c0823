"""What MAPPO and IPPO act with: a distribution over actions, and a frozen copy of its network."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from learner_service.algorithms.actor_critic import SnapshotPolicy
from learner_service.networks.building import ImageShape, resolve_network
from learner_service.networks.distributions import ILLEGAL, Categorical, Normal
from learner_service.networks.forward import forward
from learner_service.networks.inputs import Inputs
from learner_service.networks.recurrent import RecurrentState
from learner_service.networks.stacked import count_slices, per_agent
from shared.config import PluginConfig
from shared.errors import ConfigError
from shared.spec import ACTION_MASK, Continuous, Discrete, EnvSpec


def policy_outputs(spec: EnvSpec) -> int:
    """Outputs of a policy for an agent: logits of actions, or means of continuous ones."""
    return spec.action.num_actions if isinstance(spec.action, Discrete) else spec.action.size


def policy_extras(spec: EnvSpec) -> dict[str, tuple[int, ...]]:
    """What a MappoPolicy's `act` returns beside the action, see Algorithm."""
    if isinstance(spec.action, Continuous):
        return {"log_prob": (), "raw_action": (spec.action.size,)}
    return {"log_prob": ()}


def require_one_trunk(options: Any, network: PluginConfig, image: ImageShape) -> None:  # noqa: ANN401
    """Check that one network can give a policy and its values.

    Args:
        options: of MAPPO.
        network: of the policy.
        image: that it sees.

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
    elif not resolve_network(network, image).stacked:
        problem = (
            f"network '{network.name}' mixes agents, and an agent's value must come from its own "
            "observation; use a network that declares STACKED, or set share_trunk=false"
        )
    if problem:
        raise ConfigError(f"algorithm.share_trunk = true: {problem}")


class Actor(nn.Module):
    """A policy network and, for continuous actions, each dimension's log deviation."""

    def __init__(
        self, network: nn.Module, spec: EnvSpec, slices: tuple[int, ...], log_std: float
    ) -> None:
        super().__init__()
        self.network, self._slices = network, slices
        self.log_std = None
        if isinstance(spec.action, Continuous):
            shape = (count_slices(slices), spec.action.size)
            self.log_std = nn.Parameter(torch.full(shape, log_std))
        self._outputs = policy_outputs(spec)

    def forward(
        self,
        inputs: Inputs,
        mask: Tensor | None,
        hidden: RecurrentState | None,
        illegal: Tensor | None = None,
    ) -> tuple[Categorical | Normal, Tensor | None]:
        """The policy's distribution for inputs [R, A, ...], shaped [R, A]; and its memory."""
        out, memory = forward(self.network, inputs, hidden)
        return self.distribution(out, mask, illegal), memory

    def distribution(
        self, out: Tensor, mask: Tensor | None, illegal: Tensor | None = None
    ) -> Categorical | Normal:
        """The policy's distribution of outputs [R, A, ...], without a value at their end."""
        out = out[..., : self._outputs]
        if self.log_std is None:
            return Categorical(out, mask, illegal)
        return Normal(out, per_agent(self.log_std, self._slices))


class MappoPolicy(SnapshotPolicy):
    """The actor, frozen."""

    def __init__(self, *how: Any) -> None:  # noqa: ANN401 - those of SnapshotPolicy
        super().__init__(*how)
        # Saves a kernel; on a CPU the plain way serves, which every exporter knows.
        device = next(self.actor.parameters()).device
        on_device = device.type != "cpu"
        self._illegal = torch.full((), ILLEGAL, device=device) if on_device else None

    @torch.inference_mode()
    def act(
        self,
        observation: Mapping[str, Tensor],
        generator: torch.Generator | None,
        memory: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """See Policy; with the log probability and, if continuous, the action before clipping."""
        inputs = self._inputs(observation)
        with self._precision.autocast():
            hidden = None if memory is None else RecurrentState(memory)
            pi, remembered = self.actor(inputs, observation.get(ACTION_MASK), hidden, self._illegal)
        action = pi.mode() if generator is None else pi.sample(generator)
        acted = {"log_prob": pi.log_prob(action)}
        if remembered is not None:
            acted["memory"] = remembered
        if generator is None:
            acted |= {"logits": pi.logits} if isinstance(pi, Categorical) else {"mean": action}
        if isinstance(self._spec.action, Discrete):
            return {"action": action.int(), **acted}
        low, high = self._spec.action.low, self._spec.action.high
        return {"action": action.clamp(low, high), "raw_action": action, **acted}

"""What MAPPO and IPPO act with: a distribution over actions, and a frozen copy of its network."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from learner_service.algorithms.base import Policy
from learner_service.networks.distributions import ILLEGAL, Categorical, Normal
from learner_service.networks.forward import forward
from learner_service.networks.inputs import ActorInputs, Inputs
from learner_service.networks.recurrent import Past, memory_size
from learner_service.networks.snapshot import snapshot
from learner_service.networks.stacked import count_slices, per_agent
from learner_service.runtime.precision import Precision
from shared.spec import ACTION_MASK, Continuous, Discrete, EnvSpec


def policy_outputs(spec: EnvSpec) -> int:
    """Outputs of a policy for an agent: logits of actions, or means of continuous ones."""
    return spec.action.num_actions if isinstance(spec.action, Discrete) else spec.action.size


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
        past: Past | None,
        illegal: Tensor | None = None,
    ) -> tuple[Categorical | Normal, Tensor | None]:
        """The policy's distribution for inputs [R, A, ...], shaped [R, A]; and its memory."""
        out, memory = forward(self.network, inputs, past)
        return self.distribution(out, mask, illegal), memory

    def distribution(
        self, out: Tensor, mask: Tensor | None, illegal: Tensor | None = None
    ) -> Categorical | Normal:
        """The policy's distribution of outputs [R, A, ...], without a value at their end."""
        out = out[..., : self._outputs]
        if self.log_std is None:
            return Categorical(out, mask, illegal)
        return Normal(out, per_agent(self.log_std, self._slices))


class MappoPolicy(Policy):
    """The actor, frozen."""

    def __init__(
        self, actor: Actor, inputs: ActorInputs, spec: EnvSpec, precision: Precision
    ) -> None:
        self.actor = snapshot(actor, precision)
        self.memory_size = memory_size(actor.network)
        self._inputs, self._spec, self._precision = inputs, spec, precision
        # Saves a kernel; on a CPU the plain way serves, which every exporter knows.
        device = next(self.actor.parameters()).device
        on_device = device.type != "cpu"
        self._illegal = torch.tensor(ILLEGAL, device=device) if on_device else None

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
            past = None if memory is None else Past(memory)
            pi, remembered = self.actor(inputs, observation.get(ACTION_MASK), past, self._illegal)
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

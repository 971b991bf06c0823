"""MADDPG, its own-critic form DDPG, and MATD3.

Lowe, Wu, Tamar, Harb, Abbeel, Mordatch 2017, "Multi-Agent Actor-Critic for Mixed
Cooperative-Competitive Environments" (arXiv:1706.02275): each agent has a deterministic policy over
its own observations and a critic that, while learning, sees the state and what all agents do. An
agent's policy climbs its own critic with respect to its own action; the others' actions are those
of the batch. With `centralised: false` the critic sees only what its agent sees and does (DDPG,
Lillicrap et al. 2016, arXiv:1509.02971). MATD3 (Ackermann et al. 2019, arXiv:1910.01465) takes from
TD3 (Fujimoto et al. 2018, arXiv:1802.09477) twin critics, delayed policies and noise on the target
actions.

Continuous actions are tanh of the policy's outputs, with Gaussian noise while training. Discrete
ones are samples of a softmax, passed to the critic as one-hot vectors, with the gradient of
Gumbel-softmax (Jang et al. 2017, arXiv:1611.01144, section 2.2, straight-through).
"""

import copy
from collections.abc import Mapping
from typing import Any, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from learner_service.algorithms.base import Policy
from learner_service.algorithms.frozen import FrozenAgents
from learner_service.algorithms.off_policy import (
    NEXT,
    PRIORITY,
    OffPolicyAlgorithm,
    OffPolicyConfig,
    agent_shares,
    agents_loss,
    living,
    living_rows,
    observed,
)
from learner_service.algorithms.options import CriticConfig
from learner_service.algorithms.returns import mean_over, polyak_update
from learner_service.networks.building import (
    build_network,
    build_twins,
    input_options,
    shared_encoder,
    weight_sets,
)
from learner_service.networks.casting import frozen
from learner_service.networks.distributions import explore, one_hot, sample
from learner_service.networks.encoded import learned_parameters
from learner_service.networks.forward import forward_agents
from learner_service.networks.inputs import ActorInputs, Inputs, JointInputs, with_action
from learner_service.networks.snapshot import publish, snapshot
from learner_service.networks.stacked import count_slices
from learner_service.runtime.adam import Adam
from learner_service.runtime.precision import Precision
from learner_service.storage.replay_batch import ReplayBatch
from shared.config import PluginConfig
from shared.errors import ConfigError, SpecError
from shared.spec import ACTION_MASK, Discrete, EnvSpec

OfAgents = tuple[Tensor, Tensor, Tensor]  # what `agents_loss` takes beside the loss
_ILLEGAL = -1e9  # a logit no legal one comes near; finite, so that it has a gradient


class Config(CriticConfig, OffPolicyConfig):
    """Options of MADDPG, DDPG and MATD3."""

    centralised: bool = Field(
        True, description="false: DDPG, a critic sees its own agent's observation and action alone"
    )
    share_encoder: bool = Field(
        False,
        description="images: policy and critic share the convolutions, which the critic's gradient "
        "alone trains (DrQ)",
    )
    gamma: float = Field(0.99, ge=0, le=1, description="discount factor")
    actor_lr: float = Field(5e-4, gt=0, description="Adam's learning rate of the policy")
    critic_lr: float = Field(1e-3, gt=0, description="Adam's learning rate of the critic")
    target_tau: float = Field(
        0.01, gt=0, le=1, description="share by which the targets follow per update"
    )
    max_grad_norm: float = Field(10.0, ge=0, description="gradient norm is clipped; 0: never")
    output_penalty: float = Field(
        1e-3,
        ge=0,
        description="weight of the policy's squared outputs before tanh or softmax: keeps them "
        "from saturating",
    )
    twin_critics: bool = Field(False, description="two critics, the lesser target counts (TD3)")
    policy_delay: int = Field(
        1, ge=1, description="critic updates per update of the policy and the targets (TD3: 2)"
    )
    target_noise: float = Field(
        0.0,
        ge=0,
        description="continuous: deviation of noise on target actions, in halves of their range "
        "(TD3: 0.2)",
    )
    target_noise_clip: float = Field(0.5, ge=0, description="bound on that noise, same unit")
    noise_start: float = Field(
        0.3, ge=0, description="continuous: deviation of exploration, in halves of the range"
    )
    noise_end: float = Field(0.1, ge=0, description="the deviation once annealed")
    gumbel_temperature: float = Field(
        1.0, gt=0, description="discrete: of the softmax that gives the gradient"
    )
    epsilon_start: float = Field(0.0, ge=0, le=1, description="share of uniform random actions")
    epsilon_end: float = Field(0.0, ge=0, le=1, description="the share once annealed")
    exploration_env_steps: int = Field(
        50_000,
        ge=1,
        description="rows after the first update over which noise and epsilon change linearly",
    )

    def for_trial(self) -> Self:
        """See AlgorithmConfig: policies move in every update."""
        return self.model_copy(update={"policy_delay": 1})


def gumbel_softmax(
    logits: Tensor, mask: Tensor | None, temperature: float, generator: torch.Generator
) -> Tensor:
    """A sample of the softmax as a one-hot vector, with the gradient of the relaxed sample.

    y = softmax((logits + g) / temperature), g standard Gumbel; forward one_hot(argmax y), backward
    dy. Jang et al. 2017, arXiv:1611.01144. The argmax of logits + g is distributed as the softmax
    whatever the temperature.

    Args:
        logits: [..., K]; carries the gradient.
        mask: [..., K] 1 = legal, or None if all are.
        temperature: small: gradient nearer to the sample's, and of larger variance.
        generator: of g.

    Returns:
        [..., K], exactly zero and without gradient where illegal.
    """
    if mask is not None:
        logits = logits.masked_fill(mask == 0, _ILLEGAL)
    clock = torch.empty_like(logits).exponential_(generator=generator)
    gumbel = -clock.clamp_min(1e-30).log()  # a clock of exactly zero would make it infinite
    soft = ((logits + gumbel) / temperature).softmax(-1)
    hard = one_hot(soft.argmax(-1), logits.shape[-1]).to(soft.dtype)
    return hard + (soft - soft.detach())


class Actions:
    """Between the environment's actions and the critics', which are vectors of about unit size.

    Continuous actions are mapped from [low, high] to [-1, 1], discrete ones to one-hot vectors.

    Attributes:
        discrete: whether there are K of them.
        size: numbers in a critic's action: U or K.
    """

    def __init__(self, spec: EnvSpec) -> None:
        """Raises SpecError for a continuous action without finite bounds."""
        self.discrete = isinstance(spec.action, Discrete)
        if isinstance(spec.action, Discrete):
            self.size = spec.action.num_actions
            return
        self.size, self._low, self._high = spec.action.size, spec.action.low, spec.action.high
        self._middle = (self._low + self._high) / 2
        self._half = (self._high - self._low) / 2
        if not 0 < self._half < float("inf"):
            raise SpecError(
                f"maddpg needs actions with finite bounds; those of '{spec.name}' are "
                f"[{self._low}, {self._high}]"
            )

    def encode(self, action: Tensor) -> Tensor:
        """[B, A] int or [B, A, U] of the environment -> [B, A, size]."""
        if self.discrete:
            return one_hot(action, self.size)
        return (action - self._middle) / self._half

    def decode(self, unit: Tensor) -> Tensor:
        """[B, A, U] in [-1, 1] -> the environment's."""
        return (self._middle + self._half * unit).clamp(self._low, self._high)


class MaddpgPolicy(Policy):
    """The actor and its exploration, frozen."""

    def __init__(
        self,
        actor: nn.Module,
        inputs: ActorInputs,
        spec: EnvSpec,
        exploration: Tensor,
        precision: Precision,
    ) -> None:
        self.actor = snapshot(actor, precision)
        self.exploration = exploration.clone()  # epsilon, noise
        self._inputs, self._spec, self._precision = inputs, spec, precision
        self._actions = Actions(spec)
        self._even = self.exploration.new_tensor(1 / self._actions.size)

    @torch.inference_mode()
    def act(
        self,
        observation: Mapping[str, Tensor],
        generator: torch.Generator | None,
        memory: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """See Policy; greedy: tanh of the outputs, or the largest of them that is legal."""
        inputs = self._inputs(observation)
        out = forward_agents(self.actor, inputs, self._precision, self._spec.num_agents)
        epsilon, noise = self.exploration
        if self._actions.discrete:
            mask = observation.get(ACTION_MASK)
            if mask is not None:
                out = out.masked_fill(mask == 0, _ILLEGAL)
            if generator is None:
                return {"action": out.argmax(-1).int()}
            pi = explore(out.softmax(-1), mask, epsilon, self._even)
            return {"action": sample(pi, generator).int()}
        unit = out.tanh()
        if generator is not None:
            unit = unit + noise * torch.empty_like(unit).normal_(generator=generator)
            uniform = torch.empty_like(unit).uniform_(-1, 1, generator=generator)
            chance = torch.empty_like(unit[..., :1]).uniform_(generator=generator)
            unit = torch.where(chance < epsilon, uniform, unit.clamp(-1, 1))
        return {"action": self._actions.decode(unit)}


class Maddpg(OffPolicyAlgorithm):
    """See the module. Used by the learner thread."""

    def __init__(
        self,
        config: Config,
        spec: EnvSpec,
        network: PluginConfig,
        precision: Precision,
        device: torch.device,
        seed: int,
    ) -> None:
        """Build actors, critics, their targets and optimisers.

        Raises:
            SpecError: if continuous actions have no finite bounds.
            ConfigError: if target_noise is set and actions are discrete, or share_parameters does
                not fit the number of agents.
        """
        super().__init__(config.replay, config.gamma, precision, device, seed)
        self._config, self._spec, self._actions = config, spec, Actions(spec)
        if self._actions.discrete and config.target_noise:
            raise ConfigError(
                f"algorithm.target_noise={config.target_noise} is for continuous actions; "
                f"'{spec.name}' has discrete ones; set it to 0"
            )
        options = input_options(network, spec)
        self._actor_inputs = ActorInputs(spec, options)
        self._joint_inputs = JointInputs(spec, options, centralised=config.centralised)
        slices = config.slices(spec.num_agents)
        self._frozen = FrozenAgents(config.frozen_agents, slices, device)
        self._num_slices, self._shares = count_slices(slices), agent_shares(slices, device)
        self._critics = 2 if config.twin_critics else 1
        self._build_networks(network, slices, seed)
        self.target_actor = copy.deepcopy(self.actor).requires_grad_(False)
        self.target_critic = copy.deepcopy(self.critic).requires_grad_(False)
        on_cuda = device.type == "cuda"
        self._actor_optimizer, self._critic_optimizer = (
            Adam(learned_parameters(network), lr, fused=True, capturable=on_cuda)
            for network, lr in ((self.actor, config.actor_lr), (self.critic, config.critic_lr))
        )
        self._parts |= {
            "actor": self.actor,
            "critic": self.critic,
            "target_actor": self.target_actor,
            "target_critic": self.target_critic,
            "actor_optimizer": self._actor_optimizer,
            "critic_optimizer": self._critic_optimizer,
        }
        self._exploration = torch.zeros(2, device=device)  # epsilon, noise
        self._set_exploration()
        self._captured = self._capture("update", self._learn)

    def _build_networks(self, network: PluginConfig, slices: tuple[int, ...], seed: int) -> None:
        """Build the actors and critics, with weights drawn from the seed."""
        config, encoder = self._config, None
        twins = tuple(s * self._critics + i for s in slices for i in range(self._critics))
        seen, shape = self._actor_inputs.shape, self._joint_inputs.with_action_shape
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if config.share_encoder:
                option = "algorithm.share_encoder"
                encoder = shared_encoder(network, seen, shape, slices, option)
            self.actor = build_network(
                network, seen, self._actions.size, slices, encoder=encoder, trains=False
            ).to(self._device)
            of_critic = config.network_of_critic(network, shares_encoder=config.share_encoder)
            critic = build_twins(of_critic, shape, 1, slices, twins, self._critics, encoder)
            self.critic = critic.to(self._device)

    def update(self, batch: ReplayBatch) -> dict[str, Tensor]:
        """One step of all critics and, when it is their turn, of all policies and the targets.

        Returns:
            critic_loss, q_mean, target_mean, td_error (mean absolute), critic_grad_norm, epsilon;
            continuous: noise; if the policies moved: actor_loss, actor_grad_norm.
        """
        self._count_update()
        moves = self._counts["updates"] % self._config.policy_delay == 0
        scalars = self._captured(self._rows_of(batch), moves_policies=moves)
        batch.td_error = scalars.pop(PRIORITY)
        self._set_exploration()
        scalars["epsilon"] = self._exploration[0].clone()
        if not self._actions.discrete:
            scalars["noise"] = self._exploration[1].clone()
        return scalars

    def _learn(self, rows: Mapping[str, Tensor], *, moves_policies: bool) -> dict[str, Tensor]:
        """The update, on the device from end to end; with and without the policies' turn."""
        rows = self._augmented(rows)
        observation = observed(rows)
        alive = living(observation, rows["reward"])
        of_agents = alive, living_rows(alive, observation, self._group), self._shares
        action = self._actions.encode(rows["action"])
        joint = self._joint_inputs(observation, action)
        scalars = self._critic_step(rows, joint, action, of_agents)
        if moves_policies:
            scalars |= self._actor_step(observation, joint, of_agents)
            polyak_update(self.target_actor, self.actor, self._config.target_tau)
            polyak_update(self.target_critic, self.critic, self._config.target_tau)
        return scalars

    def _critic_step(
        self, rows: Mapping[str, Tensor], joint: Inputs, action: Tensor, of_agents: OfAgents
    ) -> dict[str, Tensor]:
        target = self._target(rows)
        q = self._q(self.critic, joint, action)
        error = q - target.unsqueeze(-1)
        squares = rows["weight"].unsqueeze(1) * error.square().sum(
            -1
        )  # twins add: each its own loss
        loss = agents_loss(squares, *of_agents)
        norm = self._precision.step(
            loss,
            self._critic_optimizer,
            self.critic.parameters(),
            self._config.max_grad_norm,
            weight_sets(self.critic, self._num_slices * self._critics),
        )
        td_error = mean_over(error.detach().abs().mean(-1), of_agents[0], 1)
        return {
            "critic_loss": loss.detach() / (self._num_slices * self._critics),
            "q_mean": q.detach().mean(),
            "target_mean": target.mean(),
            "td_error": td_error.mean(),
            "critic_grad_norm": norm,
            PRIORITY: td_error,
        }

    @torch.no_grad()
    def _target(self, rows: Mapping[str, Tensor]) -> Tensor:
        """[B, A] reward + discount * Q'(x', u'); who is dead then has nothing to come."""
        c = self._config
        observation = observed(rows, NEXT)
        out = self._act(self.target_actor, observation)
        if c.target_noise:
            noise = torch.empty_like(out).normal_(generator=self._generator) * c.target_noise
            noise = noise.clamp(-c.target_noise_clip, c.target_noise_clip)
            action = (out.tanh() + noise).clamp(-1, 1)
        else:
            action = self._choose(out, observation)
        joint = self._joint_inputs(observation, action)
        q = self._q(self.target_critic, joint, action).amin(-1)
        alive = living(observation, rows["reward"])
        return rows["reward"] + rows["discount"] * alive * q

    def _actor_step(
        self, observation: Mapping[str, Tensor], joint: Inputs, of_agents: OfAgents
    ) -> dict[str, Tensor]:
        """Each agent's own action is its policy's, the others' are the batch's."""
        out = self._act(self.actor, observation)
        own = self._choose(out, observation)
        with frozen(self.critic):  # only the way through it is wanted
            q = self._q(self.critic, joint, own)[..., 0]
        loss = self._config.output_penalty * out.square().mean(-1) - q
        loss = agents_loss(loss, *of_agents)
        norm = self._precision.step(
            loss,
            self._actor_optimizer,
            learned_parameters(self.actor),
            self._config.max_grad_norm,
            self._num_slices,
        )
        return {"actor_loss": loss.detach() / self._num_slices, "actor_grad_norm": norm}

    def _act(self, actor: nn.Module, observation: Mapping[str, Tensor]) -> Tensor:
        """[B, A, size] outputs, before tanh or softmax."""
        inputs = self._actor_inputs(observation)
        return forward_agents(actor, inputs, self._precision, self._spec.num_agents)

    def _choose(self, out: Tensor, observation: Mapping[str, Tensor]) -> Tensor:
        """[B, A, size] actions as the critics see them, differentiable."""
        if not self._actions.discrete:
            return out.tanh()
        mask = observation.get(ACTION_MASK)
        return gumbel_softmax(out, mask, self._config.gumbel_temperature, self._generator)

    def _q(self, critic: nn.Module, joint: Inputs, own: Tensor) -> Tensor:
        """[B, A, C] float32 of own actions [B, A, size]: a twin is one more slice, fed alike."""
        inputs = with_action(joint, own)
        return forward_agents(critic, inputs, self._precision, self._spec.num_agents, self._critics)

    def _set_exploration(self) -> None:
        c = self._config
        epsilon = self._annealed(c.epsilon_start, c.epsilon_end, c.exploration_env_steps)
        noise = self._annealed(c.noise_start, c.noise_end, c.exploration_env_steps)
        self._exploration[0].fill_(epsilon)
        self._exploration[1].fill_(noise)

    def make_policy(self) -> MaddpgPolicy:
        """See Algorithm."""
        return MaddpgPolicy(
            self.actor, self._actor_inputs, self._spec, self._exploration, self._precision
        )

    @torch.no_grad()
    def publish(self, policy: Policy) -> None:
        """See Algorithm."""
        assert isinstance(policy, MaddpgPolicy)
        publish(self.actor, policy.actor)
        policy.exploration.copy_(self._exploration)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See Algorithm."""
        super().load_state_dict(state)
        self._set_exploration()


build = Maddpg

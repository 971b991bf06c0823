"""MASAC: soft actor-critic for teams.

Haarnoja et al. 2018, "Soft Actor-Critic Algorithms and Applications" (arXiv:1812.05905), with
critics that see all agents' observations and actions while learning, as in Lowe et al. 2017,
"Multi-Agent Actor-Critic for Mixed Cooperative-Competitive Environments" (arXiv:1706.02275), or
only the agent's own. Twin critics against overestimation, target networks that follow slowly, a
temperature that is learned so that the policy keeps a wanted entropy. Continuous actions are
squashed by tanh; for discrete ones the expectation over the own action is exact (Christodoulou
2019, "Soft Actor-Critic for Discrete Action Settings", arXiv:1910.07207).

All agents learn at once: every loss is of the networks before the update. The actors are evaluated
once on the next and once on the current observations. Both critics of all agents are slices of one
stack. One backward pass and one optimiser step serve all of it.
"""

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from learner_service.algorithms import options
from learner_service.algorithms.actor_critic import SnapshotPolicy
from learner_service.algorithms.base import require_bounds
from learner_service.algorithms.off_policy import (
    NEXT,
    PRIORITY,
    OffPolicyAlgorithm,
    OffPolicyConfig,
    alive_mask,
    alive_rows,
    observed,
    of_alive,
)
from learner_service.algorithms.returns import polyak_update, target_of
from learner_service.networks.building import weight_sets
from learner_service.networks.casting import cast_weights
from learner_service.networks.distributions import Categorical, SquashedNormal, one_hot
from learner_service.networks.encoded import learned_parameters
from learner_service.networks.forward import forward_agents, forward_agents_twice
from learner_service.networks.inputs import Inputs, JointInputs, with_action
from shared.spec import ACTION_MASK, AGENT_MASK, Discrete, EnvSpec

_MIN_STD = 1e-3  # of an action scaled to [-1, 1], before squashing


class Config(options.CriticConfig, OffPolicyConfig):
    """Options of MASAC."""

    centralized: bool = Field(
        True, description="false: critics see the agent's own observation and action alone"
    )
    share_encoder: options.ShareEncoder = False
    actor_lr: options.ActorRate = 3e-4
    critic_lr: options.CriticRate = 1e-3
    target_tau: options.TargetTau = 0.005
    initial_temperature: float = Field(
        0.1, gt=0, description="weight of a nat of entropy against the rewards, at the start"
    )
    learn_temperature: bool = Field(True, description="false: it stays as it starts")
    shared_temperature: bool = Field(False, description="true: one for all agents, not one each")
    temperature_lr: float = Field(3e-4, gt=0, description="Adam's learning rate of its logarithm")
    target_entropy: float = Field(
        -1.0,
        description="continuous: entropy to keep, nats per dimension of actions scaled to [-1, 1]",
    )
    target_entropy_share: float = Field(
        0.2,
        ge=0,
        le=1,
        description="discrete: entropy to keep, as a share of that of all legal actions alike",
    )
    cuda_graph: bool = Field(
        True,
        description="CUDA: replay the update as one graph; false: eagerly, as with "
        "learner.cuda_graph=false",
    )


def soft_value(q: Tensor, log_prob: Tensor, temperature: Tensor) -> Tensor:
    """Value of a state by one sampled action: Q - alpha log pi(a).

    Its negative is the actor's loss. Haarnoja et al. 2018, equations 3 and 7.

    Args:
        q: [B, A] value of the action.
        log_prob: [B, A] its log density.
        temperature: [A] or [1].

    Returns:
        [B, A].
    """
    return q - temperature * log_prob


def expected_soft_value(q: Tensor, log_probs: Tensor, temperature: Tensor) -> Tensor:
    """Value of a state over all own actions: sum_k pi(k) (Q(k) - alpha log pi(k)).

    Its negative is the actor's loss. Christodoulou 2019, equations 10 and 12.

    Args:
        q: [B, A, K] value of each own action, the others' given.
        log_probs: [B, A, K] of the policy; no action of probability 0 counts.
        temperature: [A] or [1].

    Returns:
        [B, A].
    """
    return (log_probs.exp() * (q - temperature.unsqueeze(-1) * log_probs)).sum(-1)


def soft_q_target(reward: Tensor, discount: Tensor, value: Tensor) -> Tensor:
    """What the critics aim at: r + discount V(s'). No gradient reaches anything.

    Args:
        reward: [B, A] discounted sum of n steps.
        discount: [B, A] or [B, 1] gamma^n; 0 where the episode terminated, or this agent's life
            did.
        value: [B, A] soft value of the state n steps on, by the target critics.

    Returns:
        [B, A].
    """
    return (reward + discount * value).detach()


def temperature_loss(log_temperature: Tensor, entropy: Tensor, wanted: Tensor | float) -> Tensor:
    """Falls by cooling a policy that has more entropy than wanted, and by warming one with less.

    log alpha (H - H_wanted). Haarnoja et al. 2018, section 5, with log alpha in place of alpha: the
    sign is that of equation 18, and the step does not fade as alpha does.

    Args:
        log_temperature: [A] or [1]; alone carries gradient.
        entropy: [B, A] of the policy.
        wanted: [B, A] or a number.

    Returns:
        [B, A].
    """
    return log_temperature * (entropy - wanted).detach()


class Actor(nn.Module):
    """A policy network and what its outputs mean."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, inputs: Inputs) -> Tensor:
        """Outputs [B, A, K] or [B, A, 2 U] float32 for inputs [B, A, ...]."""
        out: Tensor = self.network(inputs.image, inputs.vector)
        return out.float()


def squashed_normal(outputs: Tensor) -> SquashedNormal:
    """The policy of an actor's outputs [..., 2 U]: means, and deviations before softplus."""
    mean, raw = outputs.chunk(2, -1)
    return SquashedNormal(mean, F.softplus(raw) + _MIN_STD)


class Temperature(nn.Module):
    """Logarithm of the temperature, [A], or [1] for all agents."""

    def __init__(self, size: int, initial: float, learned: bool) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.full((size,), math.log(initial)), requires_grad=learned)


class MasacPolicy(SnapshotPolicy):
    """The actor, frozen."""

    @torch.inference_mode()
    def act(
        self,
        observation: Mapping[str, Tensor],
        generator: torch.Generator | None,
        memory: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """See Policy. Sampled from the distribution that is learned, nothing clipped or added."""
        inputs = self._inputs(observation)
        with self._precision.autocast():
            out = self.actor(inputs)
        if isinstance(self._spec.action, Discrete):
            pi = Categorical(out, observation.get(ACTION_MASK))
            if generator is None:
                return {"action": pi.mode().int(), "logits": pi.logits}
            return {"action": pi.sample(generator).int()}
        squashed = squashed_normal(out)
        action = squashed.mode() if generator is None else squashed.draw(generator)
        middle, half = action_range(self._spec)
        return {"action": middle + half * action}


def action_range(spec: EnvSpec) -> tuple[float, float]:
    """Middle and half width of the bounds of continuous actions."""
    low, high = require_bounds("masac", spec)
    return (low + high) / 2, (high - low) / 2


class Masac(OffPolicyAlgorithm):
    """See the module. Used by the thread that learns."""

    POLICY = MasacPolicy
    actor: Actor
    _config: Config

    def _build(self) -> None:
        """pi(o) and both Q(x, u) of each agent, their targets, and the temperatures alpha."""
        c, spec = self._config, self._spec
        self._joint_inputs = JointInputs(spec, self._options, centralized=c.centralized)
        if isinstance(spec.action, Discrete):  # critics give a value for each own action
            actor_outputs = self._num_outputs = spec.action.num_actions
            shape = self._joint_inputs.shape
        else:
            actor_outputs, self._num_outputs = 2 * spec.action.size, 1
            shape = self._joint_inputs.with_action_shape
            self._middle, self._half = action_range(spec)
            self._wanted = c.target_entropy * spec.action.size
        encoder = self._shared_encoder(shape)
        self.actor = Actor(self._make_actor(actor_outputs, encoder)).to(self._device)
        own = self._slices if self._num_slices > 1 else (0,)  # agents that all share are just rows
        self.critic = self._make_twins(shape, self._num_outputs, 2, encoder, own)
        self.target = target_of(self.critic)
        self.temperature = Temperature(
            1 if c.shared_temperature else spec.num_agents,
            c.initial_temperature,
            c.learn_temperature,
        ).to(self._device)
        # One optimiser for all that is learned, with learning rates by group.
        groups = [
            {"params": learned_parameters(self.actor), "lr": c.actor_lr},
            {"params": list(self.critic.parameters()), "lr": c.critic_lr},
        ]
        if c.learn_temperature:
            groups.append({"params": [self.temperature.log], "lr": c.temperature_lr})
        self._optimizer = self._adam_of(groups)

    def _learn(self, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The update, on the device from end to end: static shapes, no synchronisation."""
        rows, c = self._augmented(rows), self._config
        obs, next_obs = observed(rows), observed(rows, NEXT)  # name -> [B, A, ...] or [B, ...]
        reward, discount = rows["reward"], rows["discount"]  # [B, A], and gamma^n: [B, A] or [B, 1]
        # What each row counts for: each parameter group is to get the mean over its agents' rows.
        share = (self._shares / reward.shape[0]).expand_as(reward)
        if AGENT_MASK in obs:
            alive = (obs[AGENT_MASK] != 0).float()
            share = alive * (self._shares / alive_rows(alive, obs, self._group))
            discount = of_alive(discount, alive_mask(next_obs))
        # 1. Policies pi(. | o) and pi(. | o') before the update; [B, A, K] or [B, A, 2 U].
        temperature = self.temperature.log.detach().exp()  # alpha: [A] or [1]
        with cast_weights(self._precision, self.actor):
            out = self.actor(self._actor_inputs(obs))
            with torch.no_grad():
                next_out = self.actor(self._actor_inputs(next_obs))
        # 2. Their values: q [B, A, 2] of the actions taken, else [B, A].
        learn = self._discrete if isinstance(self._spec.action, Discrete) else self._continuous
        q, value, next_value, entropy, wanted = learn(
            rows["action"], obs, next_obs, out, next_out, temperature
        )
        # 3. Critics: J_Q = w (Q - y)^2, y = r + gamma V(o') (equation 5).
        target = soft_q_target(reward, discount, next_value)
        error = F.mse_loss(q, target.unsqueeze(-1).expand_as(q), reduction="none")
        critic_loss = error.sum(-1) * rows["weight"].unsqueeze(1)
        # 4. Policies: J_pi = -V(o) (equation 7).
        loss = critic_loss - value
        # 5. Temperatures: J_alpha = log alpha (H - H_wanted) (equation 18).
        if c.learn_temperature:
            loss = loss + temperature_loss(self.temperature.log, entropy, wanted)
        # 6. One backward pass and one step of all; targets follow.
        share = share.flatten()
        actor_norm, critic_norm = self._step(torch.dot(loss.flatten(), share))
        # 7. Logs, and the new priorities [B].
        with torch.no_grad():
            td_error = error.sqrt().mean(-1)
            names = ("critic_loss", "actor_loss", "entropy", "q_mean", "target_mean", "td_error")
            logged = torch.stack([critic_loss, -value, entropy, q[..., 0], target, td_error])
            means = logged.flatten(1) @ share / self._num_slices
            if AGENT_MASK in obs:
                alive_agents = alive.sum(1, keepdim=True).clamp_min(1)
                td_error = td_error * alive * (td_error.shape[1] / alive_agents)
        return {
            **dict(zip(names, means.unbind(), strict=True)),
            "temperature": temperature.mean(),
            "actor_grad_norm": actor_norm,
            "critic_grad_norm": critic_norm,
            PRIORITY: td_error.mean(1),
        }

    def _step(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Step 6 of `_learn`; returns the norms of the policies' and the critics' gradients."""
        self._precision.backward(loss, self._optimizer)
        policy = learned_parameters(self.actor)
        actor_norm = self._precision.clip(policy, self._config.max_grad_norm, self._num_slices)
        critic_norm = self._precision.clip(
            self.critic.parameters(),
            self._config.max_grad_norm,
            weight_sets(self.critic, 2 * self._num_slices),
        )
        self._precision.apply(self._optimizer)
        polyak_update(self.target, self.critic, self._config.target_tau)
        return actor_norm, critic_norm

    def _continuous(
        self,
        action: Tensor,
        obs: Mapping[str, Tensor],
        next_obs: Mapping[str, Tensor],
        out: Tensor,
        next_out: Tensor,
        temperature: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | float]:
        """[B, A, 2] values of the actions taken; [B, A] soft values now and next, and entropy."""
        # 2. V(o) = min Q(o, a) - alpha log pi(a | o), a ~ pi, and V(o') by targets (equation 3).
        noise = torch.empty((2, *action.shape), device=action.device)
        noise.normal_(generator=self._generator)
        # [2, B, A, U] and [2, B, A], of o and of o'
        sampled, log_prob = squashed_normal(torch.stack([out, next_out])).sample(noise)
        own, next_action = sampled.unbind()
        log_prob, next_log_prob = log_prob.unbind()
        with torch.no_grad():
            joint = self._joint_inputs(next_obs, next_action)
            next_q = self._critics(self.target, with_action(joint, next_action))
            next_value = soft_value(next_q.squeeze(-1).amin(2), next_log_prob, temperature)
        action = (action - self._middle) / self._half
        joint = with_action(self._joint_inputs(obs, action), action)
        change = own - action  # the actor's loss moves no critic
        q, own_q = forward_agents_twice(
            self.critic, joint, change, self._precision, self._spec.num_agents, 2
        )  # [B, A, 2]
        value = soft_value(own_q.amin(2), log_prob, temperature)
        return q, value, next_value, -log_prob.detach(), self._wanted

    def _discrete(
        self,
        action: Tensor,
        obs: Mapping[str, Tensor],
        next_obs: Mapping[str, Tensor],
        out: Tensor,
        next_out: Tensor,
        temperature: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | float]:
        """As `_continuous`; over all own actions, the others' as taken, and next as drawn."""
        # 2. V(o) = sum_k pi(k | o) (min Q(o, k) - alpha log pi(k | o)): Christodoulou, equation 10.
        k, mask = self._num_outputs, obs.get(ACTION_MASK)
        pi, next_pi = Categorical(out, mask), Categorical(next_out, next_obs.get(ACTION_MASK))
        with torch.no_grad():
            joint = self._joint_inputs(next_obs, one_hot(next_pi.sample(self._generator), k))
            next_q = self._critics(self.target, joint).amin(2)
            next_value = expected_soft_value(next_q, next_pi.logits, temperature)
        action = action.long()
        every = self._critics(self.critic, self._joint_inputs(obs, one_hot(action, k)))
        taken = action[..., None, None].expand(*action.shape, 2, 1)
        q = every.gather(-1, taken).squeeze(-1)
        value = expected_soft_value(every.detach().amin(2), pi.logits, temperature)
        wanted = self._config.target_entropy_share * _log_legal(mask, k)
        return q, value, next_value, pi.entropy().detach(), wanted

    def _critics(self, network: nn.Module, inputs: Inputs) -> Tensor:
        """[B, A, 2, outputs] values by both critics of inputs [B, A, ...]."""
        q = forward_agents(network, inputs, self._precision, self._spec.num_agents, 2)
        return q.view(-1, self._spec.num_agents, 2, self._num_outputs)


def _log_legal(mask: Tensor | None, num_actions: int) -> Tensor | float:
    """Entropy of the uniform choice among legal actions: [B, A], or a number if all are legal."""
    if mask is None:
        return math.log(num_actions)
    return mask.float().sum(-1).clamp_min(1).log()


build = Masac

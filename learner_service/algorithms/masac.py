"""MASAC: soft actor-critic for teams.

Haarnoja et al. 2018, "Soft Actor-Critic Algorithms and Applications" (arXiv:1812.05905), with
critics that see all agents' observations and actions while learning, as in Lowe et al. 2017,
"Multi-Agent Actor-Critic for Mixed Cooperative-Competitive Environments" (arXiv:1706.02275), or
only the agent's own. Twin critics against overestimation, target networks that follow slowly, a
temperature that is learned so that the policy keeps a wanted entropy. Continuous actions are
squashed by tanh; for discrete ones the expectation over the own action is exact (Christodoulou
2019, "Soft Actor-Critic for Discrete Action Settings", arXiv:1910.07207).

All agents learn at once: all losses use the weights from before this update. The actors are
evaluated once on the next and once on the current observations. Both critics of all agents are
slices of one stack. One backward pass and one optimiser step serve all of it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from typing_extensions import override

from murmur.learner_service.layers.building import weight_slices
from murmur.learner_service.layers.casting import cast_weights, frozen
from murmur.learner_service.layers.distributions import ActionDistribution, Categorical, one_hot
from murmur.learner_service.layers.encoded import learned_parameters
from murmur.learner_service.layers.forward import forward, forward_twice
from murmur.learner_service.layers.inputs import Inputs, JointInputs, with_action
from murmur.learner_service.layers.stacked import count_slices
from murmur.learner_service.learning import options
from murmur.learner_service.learning.base import require_bounds
from murmur.learner_service.learning.off_policy import (
    PRIORITY,
    OffPolicyAlgorithm,
    OffPolicyConfig,
    alive_mask,
    alive_rows,
    of_alive,
)
from murmur.learner_service.learning.policies import SnapshotPolicy
from murmur.learner_service.learning.returns import polyak_update, target_of
from murmur.learner_service.learning.sequences import Sequences
from murmur.learner_service.storage.storage import NEXT, observed
from murmur.shared.wire.spec import ACTION_MASK, AGENT_MASK, Discrete, EnvSpec

Term = tuple[Tensor, Tensor]  # a network's output, and d loss / d output
_MIN_STD = 1e-3  # of an action scaled to [-1, 1], before squashing


class Config(options.CriticConfig, OffPolicyConfig):
    """Options of MASAC.

    The temperature begins low and rises to keep the wanted entropy, as large rewards need within a
    few thousand updates. From 0.1 it falls for tens of thousands, and meanwhile six actions are
    worth 0.1 log 6 / (1 - gamma) = 3.6 in entropy: a rare reward of 1 is not to be seen beside it.
    """

    gamma: options.Gamma = 0.95
    centralized: bool = Field(
        True, description="false: critics see the agent's own observation and action alone"
    )
    share_encoder: options.ShareEncoder = False
    actor_lr: options.ActorRate = 3e-4
    critic_lr: options.CriticRate = 1e-3
    target_tau: options.TargetTau = 0.005
    initial_temperature: float = Field(
        0.01, gt=0, description="weight of a nat of entropy against the rewards, at the start"
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
        temperature: alpha, [A] or [1].

    Returns:
        [B, A].
    """
    return torch.addcmul(q, temperature, log_prob, value=-1)


def expected_soft_value(q: Tensor, log_probs: Tensor, temperature: Tensor) -> Tensor:
    """Value of a state over all own actions: sum_k pi(k) (Q(k) - alpha log pi(k)).

    Its negative is the actor's loss. Christodoulou 2019, equations 10 and 12.

    Args:
        q: [B, A, K] value of each own action, the others' given.
        log_probs: [B, A, K] log-probabilities of the policy; no action of probability 0 counts.
        temperature: alpha, [A] or [1].

    Returns:
        [B, A].
    """
    return (log_probs.exp() * (q - temperature.unsqueeze(-1) * log_probs)).sum(-1)


class Actor(nn.Module):
    """A policy network and what its outputs mean."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network


@dataclass
class SquashedNormal(ActionDistribution):
    """tanh of U independent normal variables: actions within (-1, 1).

    Attributes:
        mean: [..., U] float32 means before squashing.
        std: [..., U] float32 deviations before squashing.
    """

    mean: Tensor
    std: Tensor

    def rsample(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Make an action from noise, differentiable by what made the distribution.

        a = tanh(x), x = mean + std * noise;
        log pi(a) = sum log N(x) - log(1 - tanh(x)^2), the latter as 2 (log 2 - x - softplus(-2x)),
        which no large x turns into log 0. Haarnoja et al. 2018, "Soft Actor-Critic Algorithms and
        Applications", appendix C (arXiv:1812.05905).

        Args:
            noise: [..., U] standard normal.

        Returns:
            [..., U] action and [...] its log density.
        """
        x = torch.addcmul(self.mean, self.std, noise)
        # softplus(-2x) = -2 F.softplus(x, beta=-2), so this is log(1 - tanh(x)^2) / -2 + log 2.
        squashing = torch.sub(x, F.softplus(x, beta=-2), alpha=2)
        constant = (0.5 * math.log(2 * math.pi) + 2 * math.log(2)) * noise.shape[-1]
        spread = torch.sub(self.std.log(), squashing, alpha=2)
        return x.tanh(), -constant - torch.addcmul(spread, noise, noise, value=0.5).sum(-1)

    def sample(self, generator: torch.Generator) -> Tensor:
        """Return an action [..., U] alone: without the density it costs a tenth of `rsample`."""
        noise = torch.empty_like(self.mean).normal_(generator=generator)
        return torch.addcmul(self.mean, self.std, noise).tanh()

    def mode(self) -> Tensor:
        """Return the median [..., U], which squashing keeps; the density may peak elsewhere."""
        return self.mean.tanh()


def squashed_normal(outputs: Tensor) -> SquashedNormal:
    """The policy of an actor's outputs [..., 2 U]: means, and deviations before softplus."""
    mean, raw = outputs.chunk(2, -1)
    return SquashedNormal(mean, F.softplus(raw) + _MIN_STD)


class Sampled(torch.autograd.Function):
    """Actions of a squashed normal policy now and next; gradient, by formula, of those now.

    With a = tanh(x), x = mean + std noise: dx gets da (1 - a^2) + 2 a dlog_pi, std gets noise dx -
    dlog_pi / std. Six kernels, where autograd takes nineteen.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's own
        out: Tensor,
        next_out: Tensor,
        noise: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Sample.

        Args:
            ctx: torch's.
            out: [B, A, 2 U] float32 outputs of the actors, as `squashed_normal` takes them.
            next_out: outputs for the next observation, of the same shape.
            noise: [2, B, A, U] standard normal, now and next.

        Returns:
            [B, A, U] actions and [B, A] their log densities now, and the same next.
        """
        pi = squashed_normal(torch.stack([out, next_out]))
        sampled, log_probs = pi.rsample(noise)
        (action, next_action), (log_prob, next_log_prob) = sampled.unbind(), log_probs.unbind()
        ctx.save_for_backward(action, out.chunk(2, -1)[1], pi.std[0], noise[0])
        ctx.mark_non_differentiable(next_action, next_log_prob)
        ctx.set_materialize_grads(False)
        return action, log_prob, next_action, next_log_prob

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,  # noqa: ANN401 - torch's own
        action_grad: Tensor,
        log_prob_grad: Tensor,
        *_: Tensor,
    ) -> tuple[Tensor, None, None]:
        """Gradient of the outputs now."""
        action, raw, std, noise = ctx.saved_tensors
        weight = log_prob_grad.unsqueeze(-1)
        x_grad = torch.ops.aten.tanh_backward(action_grad, action)
        x_grad = torch.addcmul(x_grad, action, weight, value=2)
        std_grad = torch.addcdiv(x_grad * noise, weight, std, value=-1)
        raw_grad = torch.ops.aten.softplus_backward(std_grad, raw, 1, 20)
        return torch.cat([x_grad, raw_grad], -1), None, None


class Temperature(nn.Module):
    """Logarithm of the temperature, [A], or [1] for all agents."""

    def __init__(self, size: int, initial: float, learned: bool) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.full((size,), math.log(initial)), requires_grad=learned)


class MasacPolicy(SnapshotPolicy):
    """The actor, frozen: samples the distribution that is learned, nothing clipped or added."""

    actor: Actor

    @property
    @override
    def network(self) -> nn.Module:
        return self.actor.network

    @override
    def distribution(self, out: Tensor, mask: Tensor | None) -> Categorical | SquashedNormal:
        discrete = isinstance(self._spec.action, Discrete)
        return Categorical(out, mask) if discrete else squashed_normal(out)

    @override
    def in_bounds(self, action: Tensor) -> dict[str, Tensor]:
        low, high = require_bounds(self._spec)
        middle, half = action_range(self._spec)
        # Rounded, the ends of the range may be a float beyond the bounds.
        return {"action": (middle + half * action).clamp(low, high)}


def action_range(spec: EnvSpec) -> tuple[float, float]:
    """Middle and half width of the bounds of continuous actions."""
    low, high = require_bounds(spec)
    return (low + high) / 2, (high - low) / 2


class Found(NamedTuple):
    """Inputs of the losses of an update.

    Attributes:
        q: [B, A, 2] values of the actions taken.
        value: [B, A] soft values now, without gradient.
        terms: pairs (output, d policies' loss / d output), given to autograd.backward.
        next_value: [B, A] soft values next.
        negative_entropy: [B, A] minus the policies' entropy.
        wanted: the entropy to keep, [B, A] or a number.
    """

    q: Tensor
    value: Tensor
    terms: list[Term]
    next_value: Tensor
    negative_entropy: Tensor
    wanted: Tensor | float


class Masac(OffPolicyAlgorithm):
    """Algorithm of actors with entropy, and twin critics. Used by the thread that learns."""

    POLICY, REMEMBERS = MasacPolicy, True
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
        # Of what is logged: values and minus entropies are logged as minus that.
        signs = torch.tensor([-1.0, -1, 1, 1, 1], device=self._device)
        self._signs = signs / count_slices(self._slices)
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
        rows, alive, sequences = self._transitions(rows)
        c = self._config
        obs, next_obs = observed(rows), observed(rows, NEXT)  # name -> [B, A, ...] or [B, ...]
        # [B, A] sum of n steps; [B, A] or [B, 1] gamma^n, 0 where the episode or a life terminated.
        reward, discount = rows["reward"], rows["discount"]
        # What each row counts for: each parameter group is to get the mean over its agents' rows.
        share = (self._shares / reward.shape[0]).expand_as(reward)
        if alive is not None:
            masked = sequences is not None
            share = alive * (self._shares / alive_rows(alive, obs, self._group, masked=masked))
            discount = of_alive(discount, alive_mask(next_obs.get(AGENT_MASK)))
        # 1. Policies pi(. | o) and pi(. | o') before the update; [B, A, K] or [B, A, 2 U].
        temperature = self.temperature.log.detach().exp()  # alpha: [A] or [1]
        with cast_weights(self._precision, self.actor):
            if sequences is None:
                inputs = self._actor_inputs(obs), self._actor_inputs(next_obs)
                out = forward(self.actor.network, inputs[0])[0].float()
                with torch.no_grad():
                    next_out = forward(self.actor.network, inputs[1])[0].float()
            else:
                every = self._actor_inputs(sequences.obs)
                inputs = every.each(sequences.now), every.each(sequences.following)
                every_out = forward(self.actor.network, every, sequences.hidden)[0].float()
                out = sequences.now(every_out)
                next_out = sequences.following(every_out.detach())
        # 2. and 4., in `_continuous` and `_discrete`: values q [B, A, 2] of the actions taken, and
        # the policies' loss; the other results are [B, A].
        learn = self._discrete if isinstance(self._spec.action, Discrete) else self._continuous
        q, value, terms, next_value, negative_entropy, wanted = learn(
            rows["action"], (obs, next_obs), inputs, (out, next_out), temperature, share, sequences
        )
        with torch.no_grad():
            # 3. Critics: J_Q = w (Q - y)^2, y = r + gamma V(o') (equation 5), [B, A].
            target = torch.addcmul(reward, discount, next_value)
            goal = target.unsqueeze(-1).expand_as(q)
            error = q.detach() - goal
            error_weight = (share * rows["weight"].unsqueeze(1)).unsqueeze(-1).expand_as(q)
            q_grad = torch.ops.aten.mse_loss_backward(error_weight, q.detach(), goal, 0)  # no mean
            terms += [(q, q_grad)]
            # 5. Temperatures: J_alpha = log alpha (H - H_wanted) cools a policy with more entropy
            # than wanted (equation 18, by log alpha: its step does not fade as alpha does).
            if c.learn_temperature:
                log_grad = (-wanted - negative_entropy) * share
                with torch.enable_grad():
                    terms += [(self.temperature.log.expand_as(log_grad), log_grad)]
        # 6. One backward pass and one step of all; targets follow.
        values, weights = zip(*terms, strict=True)
        with self._precision.gradients(self._optimizer) as scaled:
            torch.autograd.backward(values, [scaled(weight) for weight in weights])
        actor_parameters = learned_parameters(self.actor), self._num_slices
        critic_parameters = (
            list(self.critic.parameters()),
            weight_slices(self.critic, 2 * self._num_slices),
        )
        actor_norm, critic_norm = self._precision.step_slices(
            self._optimizer, [actor_parameters, critic_parameters], c.max_grad_norm
        )
        polyak_update(self.target, self.critic, c.target_tau)
        # 7. Logs, and the new priorities [B].
        with torch.no_grad():
            td_error = error.abs().mean(-1)
            names = ("actor_loss", "entropy", "q_mean", "target_mean", "td_error")
            logged = torch.stack([value, negative_entropy, q[..., 0], target, td_error])
            means = (logged.flatten(1) @ share.flatten()) * self._signs
            critic_loss = torch.dot(q_grad.flatten(), error.flatten())
            if alive is not None:
                alive_agents = alive.sum(1, keepdim=True).clamp_min(1)
                td_error = td_error * alive * (td_error.shape[1] / alive_agents)
        return {
            "critic_loss": critic_loss / (2 * self._num_slices),
            **dict(zip(names, means.unbind(), strict=True)),
            "temperature": temperature.mean(),
            "actor_grad_norm": actor_norm,
            "critic_grad_norm": critic_norm,
            PRIORITY: td_error.mean(1),
        }

    def _continuous(
        self,
        action: Tensor,
        seen: tuple[Mapping[str, Tensor], Mapping[str, Tensor]],
        inputs: tuple[Inputs, Inputs],
        outs: tuple[Tensor, Tensor],
        temperature: Tensor,
        share: Tensor,
        sequences: Sequences | None,
    ) -> Found:
        """Compute the inputs of the losses; see Found.

        Args:
            action: [B, A, U].
            seen: observations now and next, name -> [B, A, ...] or [B, ...].
            inputs: inputs of the actors, now and next.
            outs: outputs of the actors, now and next.
            temperature: alpha, [A] or [1].
            share: [B, A] weight of each row.
            sequences: sequences of the rows, if networks remember.
        """
        # 2. V(o) = min Q(o, a) - alpha log pi(a | o), a ~ pi, and V(o') by targets (equation 3).
        noise = torch.empty((2, *action.shape), device=action.device)
        noise.normal_(generator=self._generator)
        own, log_prob, next_action, next_log_prob = Sampled.apply(*outs, noise)  # type: ignore[no-untyped-call]
        if (self._middle, self._half) != (0, 1):
            action = (action - self._middle) / self._half
        joint = self._joint_inputs(seen[0], action, inputs[0], whole=True)
        with torch.no_grad():
            following = self._joint_inputs(seen[1], next_action, inputs[1], whole=True)
            state = None
            if sequences is not None:
                state = sequences.next_state(self.target, joint, self._precision)
            next_q, _ = forward(self.target, following, state, self._precision)  # [B, A, 2]
            next_value = soft_value(next_q.amin(2), next_log_prob, temperature)
        # The actor's loss moves no critic.
        if sequences is None:
            # Q(x, a) and Q(x, own): the difference exchanges the own action among the inputs.
            q, own_q = forward_twice(self.critic, joint, own - action, self._precision)
        else:
            q, states = sequences.values(self.critic, joint, self._precision)  # [B, A, 2]
            others = self._joint_inputs(seen[0], action, inputs[0])
            with frozen(self.critic):
                state = sequences.state_now(states.detach())
                own_q, _ = forward(self.critic, with_action(others, own), state, self._precision)
        with torch.no_grad():
            least, which = own_q.min(2, keepdim=True)
            value = soft_value(least.squeeze(2), log_prob, temperature)
            # 4. Policies: J_pi = -V(o) (equation 7).
            q_grad = torch.zeros_like(own_q).scatter_(2, which, -share.unsqueeze(2))
            terms = [(own_q, q_grad), (log_prob, share * temperature)]
        return Found(q, value, terms, next_value, log_prob.detach(), self._wanted)

    def _discrete(
        self,
        action: Tensor,
        seen: tuple[Mapping[str, Tensor], Mapping[str, Tensor]],
        inputs: tuple[Inputs, Inputs],
        outs: tuple[Tensor, Tensor],
        temperature: Tensor,
        share: Tensor,
        sequences: Sequences | None,
    ) -> Found:
        """As `_continuous`; over all own actions, the others' as taken, and next as drawn."""
        # 2. V(o) = sum_k pi(k | o) (min Q(o, k) - alpha log pi(k | o)): Christodoulou, equation 10.
        k, (mask, next_mask) = self._num_outputs, (of_one.get(ACTION_MASK) for of_one in seen)
        pi, next_pi = Categorical(outs[0], mask), Categorical(outs[1], next_mask)
        action = action.long()
        joint = self._joint_inputs(seen[0], one_hot(action, k), inputs[0])
        with torch.no_grad():
            drawn = one_hot(next_pi.sample(self._generator), k)
            following = self._joint_inputs(seen[1], drawn, inputs[1])
            state = None
            if sequences is not None:
                state = sequences.next_state(self.target, joint, self._precision)
            next_q, _ = forward(self.target, following, state, self._precision)
            next_q = torch.unflatten(next_q, -1, (2, -1)).amin(2)  # [B, A, K]
            next_value = expected_soft_value(next_q, next_pi.logits, temperature)
        if sequences is None:
            q, _ = forward(self.critic, joint, None, self._precision)
        else:
            q, _ = sequences.values(self.critic, joint, self._precision)
        every = torch.unflatten(q, -1, (2, -1))  # [B, A, 2, K]
        taken = action[..., None, None].expand(*action.shape, 2, 1)
        q = every.gather(-1, taken).squeeze(-1)
        value = expected_soft_value(every.detach().amin(2), pi.logits, temperature)
        wanted = self._config.target_entropy_share * _log_legal(mask, k)
        # 4. Policies: J_pi = -V(o) (equation 7).
        terms = [(value, -share)]
        return Found(q, value.detach(), terms, next_value, -pi.entropy().detach(), wanted)


def _log_legal(mask: Tensor | None, num_actions: int) -> Tensor | float:
    """Entropy of the uniform choice among legal actions: [B, A], or a number if all are legal."""
    if mask is None:
        return math.log(num_actions)
    return mask.float().sum(-1).clamp_min(1).log()


build = Masac

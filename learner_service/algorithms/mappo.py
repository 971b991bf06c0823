"""MAPPO and IPPO: proximal policy optimisation for teams.

Yu, Velu, Vinitsky, Gao, Wang, Bayen, Wu 2022, "The Surprising Effectiveness of PPO in Cooperative
Multi-Agent Games" (arXiv:2103.01955): each agent's clipped policy gradient, with a value function
that sees the global state while learning (MAPPO) or only what the agent sees (IPPO, de Witt et al.
2020, arXiv:2011.09533), advantages by GAE, values normalised by running statistics, several passes
over each rollout. Discrete or continuous actions, or several of both at once, parameters shared or
one set for each agent, with memory or without.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor, nn
from typing_extensions import override

from murmur.learner_service.device.adam import Adam
from murmur.learner_service.device.cuda_graph import Outputs
from murmur.learner_service.device.readback import to_host
from murmur.learner_service.layers.casting import cast_weights
from murmur.learner_service.layers.distributions import logged_entropy
from murmur.learner_service.layers.forward import forward, forward_both, forward_rows
from murmur.learner_service.layers.inputs import CriticInputs, Inputs
from murmur.learner_service.learning import options
from murmur.learner_service.learning.fixed_shapes import GraphedAlgorithm
from murmur.learner_service.learning.minibatches import (
    IMITATION_LOGGED,
    Pass,
    average_over_expert_rows,
    imitation,
)
from murmur.learner_service.learning.on_policy import RecurrentStates
from murmur.learner_service.learning.policies import (
    Actor,
    MappoPolicy,
    policy_extras,
    policy_outputs,
    require_one_trunk,
)
from murmur.learner_service.learning.returns import (
    ValueNorm,
    clipped_surrogate,
    lambda_returns,
    moments_by_slice,
    most_gain,
    of_agents,
    vtrace_returns,
)
from murmur.learner_service.learning.teams import Teams
from murmur.learner_service.preprocess.running_moments import CLIPPED
from murmur.learner_service.storage.demonstrations import NEVER_TAKEN
from murmur.learner_service.storage.rollout import Rollout, Transitions, transitions
from murmur.shared.wire.spec import ACTION_MASK, EXPERT_ACTION


class Config(options.TeamsConfig):
    """Options of MAPPO.

    The defaults make an optimizer step of 256 rows five times for each: one step for every 51
    agent-transitions. With one for every 256, as of large minibatches, a policy finds no rare
    reward, or stays so uncertain that its likeliest actions alone do not do the task; with one for
    every 26 it learned spread less well. Rates are those of EPyMARL.
    """

    centralized: bool = Field(True, description="false: IPPO, values from own observations alone")
    share_trunk: bool = Field(
        False,
        description="one network gives policy and value, at actor_lr; needs centralized=false",
    )
    share_encoder: options.ShareEncoder = False
    value_weight: float = Field(0.5, gt=0, description="share_trunk: weight of the value loss")
    data_passes: options.DataPasses = 5
    gae_lambda: float = Field(0.95, ge=0, le=1, description="0: one-step TD, 1: Monte Carlo")
    vtrace_clip: float = Field(
        0.0,
        ge=0,
        description="correct targets and advantages of rows that older policies acted, by V-trace "
        "with importance ratios up to this (IMPALA: 1); 0: no correction. Costs a forward pass",
    )
    critic_lr: options.CriticRate = 5e-4
    clip_ratio: float = Field(0.2, gt=0, description="bound on the policy's change in an update")
    normalize_values: bool = Field(True, description="learn values in units of their deviation")
    initial_log_std: float = Field(-0.5, description="continuous: log deviation at the start")


@dataclass(frozen=True)
class Trained:
    """Networks that one step moves.

    Attributes:
        actor: policy network of some agents or of all.
        critic: value network of the same agents; None: the actor gives values, too.
        learned: their optimisers, each with its network.
        num_slices: number of their parameter groups.
    """

    actor: Actor
    critic: nn.Module | None
    learned: list[tuple[Adam, nn.Module]]
    num_slices: int


_BY_ROW = ("actor_loss", "critic_loss", "entropy", "clip_fraction", "kl")
_NORMS = ("actor_grad_norm", "critic_grad_norm")
_BATCH_SCALARS = ("return_mean", "advantage_std", "explained_variance")


class Mappo(GraphedAlgorithm):
    """Algorithm of actors with clipped policy gradients. Used by the thread that learns."""

    POLICY, IMITATES, TAKES_TURNS = MappoPolicy, True, True
    _NUM_BATCH_SCALARS = len(_BATCH_SCALARS)
    _columns = ("log_prob", "advantage", "target")
    actor: Actor
    critic: nn.Module | None
    _config: Config

    def _build(self) -> None:
        """pi(u | o) of each agent, and V(s), V(o), or a value beside the policy's outputs."""
        c, spec = self._config, self._spec
        self.extras = policy_extras(spec)
        self._critic_inputs = self._actor_inputs
        if c.centralized:
            self._critic_inputs = CriticInputs(spec, self._options, actions=False)
        if c.share_trunk:
            require_one_trunk(c, self._net)
        self.actor, self.critic = self._make_networks(self._slices)
        self._make_optimizers()
        norms = _NORMS[:1] if self.critic is None else _NORMS
        imitated = IMITATION_LOGGED if self._imitates else ()
        self._step_scalars = (*_BY_ROW, *imitated, *norms)
        self._logged = (*self._step_scalars, *_BATCH_SCALARS)
        self.value_norm = ValueNorm(self._sharing).to(self._device)

    def _make_networks(self, slices: tuple[int, ...]) -> tuple[Actor, nn.Module | None]:
        """Build policy and value networks of agents with these slices."""
        c, spec, shape = self._config, self._spec, self._critic_inputs.shape
        encoder = self._shared_encoder(shape, slices)
        net = self._make_actor(policy_outputs(spec) + int(c.share_trunk), encoder, slices)
        actor = Actor(net, spec, slices, c.initial_log_std).to(self._device)
        if c.share_trunk:
            return actor, None
        # Without the state each agent's value is of what it sees alone.
        return actor, self._make_critic(shape, 1, encoder, slices, apart=not c.centralized)

    def _make_optimizers(self) -> None:
        """Make the optimisers, which move the networks of all agents at once."""
        self._actor_optimizer = self._adam(self.actor, self._config.actor_lr, eps=1e-5)
        if self.critic is not None:
            self._critic_optimizer = self._adam(self.critic, self._config.critic_lr, eps=1e-5)

    @override
    def _stages(self) -> dict[str, Callable[[Pass], None]]:
        return {"step": self._steps}

    def precision_scalars(self) -> dict[str, Tensor]:
        """Add the number of returns that the last update clipped."""
        scalars = super().precision_scalars()
        if self._config.normalize_values:
            scalars[CLIPPED + "return"] = self.value_norm.clipped
        return scalars

    @override
    def outliers(self) -> dict[str, str]:
        norm = self.value_norm
        if not self._config.normalize_values:
            return {}
        clipped, (came, taken) = to_host([norm.clipped, norm.outlier])
        return {"return": f"{float(came):g} counts as {float(taken):.3g}"} if clipped else {}

    @override
    def _values_of_rows(
        self,
        inputs: tuple[Inputs, Inputs],
        states: RecurrentStates,
        action: Tensor,
        obs: Mapping[str, Tensor],
        envs: int = 0,
    ) -> dict[str, Tensor]:
        # 1. Values V of all rows, and V-trace: log pi(u | o).
        if self.critic is None:
            out = value = forward_rows(self.actor.network, inputs[0], self._precision, states[0])
        else:
            value = forward_rows(self.critic, inputs[1], self._precision, states[1])
        found = {"value": value[..., -1]}
        if self._config.vtrace_clip:
            if self.critic is not None:
                out = forward_rows(self.actor.network, inputs[0], self._precision, states[0])
            pi = self.actor.distribution(out, obs.get(ACTION_MASK))
            found["log_prob"] = pi.log_prob(action)
        return found

    @override
    def _learnable(
        self, batch: Rollout, values: Mapping[str, Tensor], rows: Tensor | None
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        c, t, value = self._config, transitions(batch), values["value"]
        weight = t.weight  # [L, B, A]
        old_log_prob = batch.arrays["log_prob"][:-1]
        if c.normalize_values:
            mean, std = self.value_norm.statistics()
            value = value * std + mean
        log_ratio = None
        if c.vtrace_clip:
            log_ratio = (values["log_prob"][:-1] - old_log_prob).where(weight > 0, 0)
        # 2. Targets G and advantages A = G - V, [L, B, A].
        target, advantage = self._returns(batch, t, value, log_ratio)
        shape, sharing = weight.shape, self._sharing
        target, advantage, counted = (x.flatten(0, 1) for x in (target, advantage, weight))
        # 3. Advantages in units of their deviation, by parameter group.
        target_mean, target_variance = moments_by_slice(
            target, counted, sharing, self._group
        )  # [S]
        mean, variance = moments_by_slice(advantage, counted, sharing, self._group)
        deviation = variance.sqrt()
        explained = 1 - variance / target_variance.clamp_min(1e-8)
        advantage = advantage - of_agents(mean, sharing)
        advantage = advantage / (of_agents(deviation, sharing) + 1e-8)
        # 4. Targets in units of their running deviation (Yu et al., section 5.1).
        if c.normalize_values:
            target = self.value_norm.update(target, counted, self._group, rows)
            mean, std = self.value_norm.statistics()
            target = (target - mean) / std
        columns = {
            "log_prob": old_log_prob.where(weight > 0, NEVER_TAKEN),
            "advantage": advantage.view(shape),
            "target": target.view(shape),
        }
        return columns, weight, torch.stack([target_mean, deviation, explained]).mean(1)

    def _returns(
        self, batch: Rollout, t: Transitions, value: Tensor, log_ratio: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return targets and advantages by GAE, or both by V-trace; [L, B, A].

        Args:
            batch: small arrays of the batch.
            t: its transitions.
            value: [L + 1, B, A] values in units of rewards.
            log_ratio: [L, B, A] log pi - log pi_old for V-trace, 0 where nothing counts; or None.
        """
        c = self._config
        gamma: Tensor | float = c.gamma
        lambda_: Tensor | float = c.gae_lambda
        if t.waits is not None and t.unfinished is not None:
            # Agents take turns. While one waits its value is 0, gamma and lambda are 1: so its
            # rewards from a turn to its next one add up. If that move is unfinished, lambda before
            # it is 0: the value there stands for all that follows.
            value = torch.cat([value[:1], value[1:].masked_fill(t.waits, 0)])
            gamma = torch.full_like(t.reward, c.gamma).masked_fill_(t.waits, 1)
            lambda_ = torch.full_like(t.reward, c.gae_lambda)
            lambda_[:-1].masked_fill_(t.unfinished[1:], 0)
            lambda_.masked_fill_(t.waits, 1)
        if log_ratio is not None:
            return vtrace_returns(
                *(t.reward, t.discount, value, t.next_is_last, log_ratio),
                *(gamma, lambda_, c.vtrace_clip),
            )
        target = lambda_returns(t.reward, t.discount, value[1:], t.next_is_last, gamma, lambda_)
        return target, target - value[:-1]

    def _steps(self, minibatches: Pass, of: Trained | None = None) -> None:
        """Make a step of the policy and of the value function for each minibatch.

        L = -E[min(r A, clip(r) A) + weight H] + E[(V - G)^2], r = pi / pi_old. No loss is summed:
        the gradient with respect to each output is computed here, and backward starts from the
        outputs. Where r A is clipped it is 0. Rows that have an expert's action raise its
        probability in its place.

        Args:
            minibatches: minibatches with rows of the networks' agents.
            of: networks to move; None: those of all agents.
        """
        of = of or Trained(self.actor, self.critic, self._learned, self._num_slices)
        c, share, cost = self._config, minibatches.share, minibatches.cost  # [n, M, A]
        with torch.no_grad():  # weights of the loss, for all minibatches together
            # [n, M, A] dL/dr, dL/d(-H) and dL/d(V - G) / (V - G); share: a row's weight in a mean,
            # cost: -share. Clipped where r dL/dr is below `clipped_below`, r A above A + clip |A|.
            advantage = minibatches.columns["advantage"].view_as(share)
            ratio_grad = advantage * cost
            clipped_below = most_gain(advantage, c.clip_ratio) * cost
            entropy_weight = share * self._schedule.entropy_weight
            error_grad = share * (2.0 if of.critic is not None else 2 * c.value_weight)
        log: list[Outputs] = []
        for i in range(minibatches.number):
            rows = minibatches.at(i)
            if rows.rates is not None:
                self._schedule.step(rows.rates)
            columns, action = rows.columns, rows.columns["action"]
            # 5. pi(u | o) and V of the minibatch, [M, A].
            with cast_weights(self._precision, *(network for _, network in of.learned)):
                if of.critic is None:
                    out, _ = forward(of.actor.network, rows.actor, rows.actor_state)
                    value = out[..., -1]
                else:
                    out, value = forward_both(
                        (of.actor.network, of.critic),
                        (rows.actor, rows.critic),
                        (rows.actor_state, rows.critic_state),
                    )
                    value = value.squeeze(-1)
                pi = of.actor.distribution(out, columns.get("mask"))
            value = value.float()
            expert = None
            if EXPERT_ACTION in columns:
                expert = imitation(columns[EXPERT_ACTION], pi.log_prob, rows.cost)
            # 6. Both parts of the loss.
            with torch.no_grad():
                log_ratio = pi.log_prob(action) - columns["log_prob"]
                log_prob_grad = log_ratio.exp() * ratio_grad[i]  # dr/d log pi = r
                unclipped = log_prob_grad >= clipped_below[i]
                slope, weighted = log_prob_grad * unclipped, entropy_weight[i]
                if expert is not None:  # rows with an expert's action learn from that alone
                    slope = slope.masked_fill(expert.expert_mask, 0)
                    weighted = weighted.masked_fill(expert.expert_mask, 0)
                error = value - columns["target"]
                terms = pi.gradient(action, slope, weighted if c.entropy_weight else None)
                terms += [] if expert is None else [expert.term]
                terms.append((value, error * error_grad[i]))
            norms = self._precision.step_together(terms, of.learned, c.max_grad_norm, of.num_slices)
            log.append(
                {
                    "log_ratio": log_ratio,
                    **pi.logged(),
                    **({} if expert is None else expert.logged),
                    "error": error,
                    "norms": norms,
                }
            )
        self._note(minibatches, log, of.num_slices)

    @torch.no_grad()
    def _note(self, minibatches: Pass, log: list[Outputs], num_slices: int) -> None:
        """Add sums of `_step_scalars` over minibatches, and how many of these count, to `_total`.

        Args:
            minibatches: [n, M, A] weights of their rows.
            log: outputs of each minibatch: log ratios, errors, the entropies' inputs and the
                columns of IMITATION_LOGGED, [M, A] each, and gradient norms.
            num_slices: number of parameter groups that rows belong to.
        """
        found = {name: torch.stack([of[name] for of in log]) for name in log[0]}  # [n, M, A]
        advantage = minibatches.columns["advantage"].view_as(minibatches.share)
        log_ratio, clip = found["log_ratio"], self._config.clip_ratio
        imitated = [found[name] for name in IMITATION_LOGGED if name in found]
        if imitated:  # of a dataset's rows no policy is known that acted
            log_ratio = log_ratio.where(log_ratio > -NEVER_TAKEN / 2, 0)
        gain = clipped_surrogate(log_ratio, advantage, clip)
        entropy, error = logged_entropy(found).expand_as(gain), found["error"].square()
        grown = torch.expm1(log_ratio)  # r - 1
        clipped = (grown.abs() > clip).float()
        loss = -torch.addcmul(gain, entropy, self._schedule.entropy_weight)
        if imitated:
            loss = loss * (1 - found["imitation_share"])
        # Schulman 2020, "Approximating KL divergence": (r - 1) - log r is unbiased, never < 0.
        rows = torch.stack([loss, error, entropy, clipped, grown - log_ratio, *imitated]).flatten(1)
        sums = [rows @ minibatches.share.flatten() / num_slices, found["norms"].sum(0)]
        self._total.add_(torch.cat([*sums, minibatches.counts.sum().view(1)]))

    @torch.no_grad()
    def _scalars(self, total: Tensor, batch_scalars: Tensor) -> Tensor:
        """Return `_logged`, as means over the minibatches in which anything counts."""
        means = total[:-1] / total[-1].clamp_min(1)
        if self._imitates:
            average_over_expert_rows(means, len(_BY_ROW))
        return torch.cat([means, batch_scalars])


build = Mappo
TEAMS = Teams

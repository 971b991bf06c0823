"""COMA: counterfactual multi-agent policy gradients.

Foerster, Farquhar, Afouras, Nardelli, Whiteson 2018, "Counterfactual Multi-Agent Policy Gradients"
(arXiv:1705.08926), as set up for terrain monitoring by Westheider, Rueckin, Popovic 2023,
"Multi-UAV Adaptive Path Planning Using Deep Reinforcement Learning" (arXiv:2303.01150). One actor
is shared by all agents (or each has its own). One centralized critic gives a Q value to each own
action while the others' actions are held fixed. Targets are TD(lambda) from a target critic. Each
rollout is learned from in several passes of minibatches, critic first.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from murmur.learner_service.device.cuda_graph import Outputs
from murmur.learner_service.layers.casting import cast_weights
from murmur.learner_service.layers.distributions import sample, uniform
from murmur.learner_service.layers.forward import forward, forward_rows
from murmur.learner_service.layers.inputs import CriticInputs, Inputs
from murmur.learner_service.layers.recurrent import RecurrentState, memory_size
from murmur.learner_service.learning import options
from murmur.learner_service.learning.base import require_discrete
from murmur.learner_service.learning.exploration import (
    LEAST,
    Exploration,
    log_softmax,
    mixture,
    mixture_gradient,
    penalties,
    policy_probabilities,
)
from murmur.learner_service.learning.fixed_shapes import GraphedAlgorithm
from murmur.learner_service.learning.minibatches import (
    IMITATION_LOGGED,
    Pass,
    Rows,
    average_over_expert_rows,
    deviations,
    imitation,
    recurrent_states,
)
from murmur.learner_service.learning.on_policy import RecurrentStates
from murmur.learner_service.learning.policies import ComaPolicy
from murmur.learner_service.learning.returns import (
    bounded_log,
    lambda_returns,
    most_gain,
    of_agents,
    polyak_update,
    taken,
    target_of,
)
from murmur.learner_service.storage.demonstrations import NEVER_TAKEN
from murmur.learner_service.storage.rollout import Rollout, transitions
from murmur.shared.wire.spec import ACTION_MASK, EXPERT_ACTION
from murmur.shared.wire.timestep import StepType


class Config(options.OnPolicyCriticConfig):
    """Options of COMA.

    The paper's step, one for each row and 1e-5, is one of millions of rows: with it little changes
    in some 100,000. By default an update makes four passes, and PPO's clipped surrogate keeps them
    close to the policy that acted. Rewards are normalized, advantages are not: before a reward is
    found they are the critic's errors, which nothing must enlarge, or policies settle on any
    action; and to a weight of the entropy that does not know the rewards' unit, neither are small.
    """

    BEFORE: ClassVar[Mapping[str, Any]] = {"advantage": "critic", "normalize_rewards": False}

    gamma: options.Gamma = 0.95  # at 0.99 waiting costs next to nothing, and greedy play waits
    data_passes: options.DataPasses = 4
    normalize_rewards: bool = Field(
        True, description="divide rewards by their running root mean square"
    )
    advantage: Literal["critic", "return"] = Field(
        "return",
        description="worth of the action taken, less the counterfactual baseline: the critic's "
        "value, as in the paper, or the TD(lambda) return, which has none of the critic's bias",
    )
    td_lambda: float = Field(0.8, ge=0, le=1, description="0: one-step TD, 1: Monte Carlo")
    critic_lr: options.CriticRate = 1e-3
    epsilon_start: options.EpsilonStart = 0.05
    epsilon_end: options.EpsilonEnd = 0.0
    epsilon_env_steps: int = Field(
        150_000, ge=1, description="environment steps over which epsilon is annealed linearly"
    )
    target_update: Literal["hard", "soft"] = Field("hard", description="how the target follows")
    target_every_updates: int = Field(10, ge=1, description="hard: updates between copies")
    target_tau: float = Field(0.01, gt=0, le=1, description="soft: share moved per update")
    clip_ratio: float = Field(
        0.2,
        ge=0,
        description="bound on the policy's change over the data passes, as PPO's clipped "
        "surrogate with the counterfactual advantage; 0: the plain policy gradient",
    )
    normalize_advantage: bool = Field(False, description="divide advantages by their deviation")


_BY_ROW = ("critic_loss", "q_mean", "entropy", "actor_loss", "advantage_std")
_NORMS = ("critic_grad_norm", "actor_grad_norm")
_BATCH_SCALARS = ("target_mean", "target_std", "explained_variance", "epsilon")


_OF_ACTOR = ("actor/stored", "actor/vector", "mask", "inverse", EXPERT_ACTION)
_LEAST_DEVIATION = 1e-6  # what is added to deviations that advantages are divided by
_LAST = "last/"  # buffers of unrolls' last rows


class Coma(GraphedAlgorithm):
    """Algorithm of actors with counterfactual advantages. Used by the thread that learns."""

    POLICY, IMITATES = ComaPolicy, True
    _NUM_BATCH_SCALARS = 3  # mean, variance and deviation of targets
    _config: Config

    def _build(self) -> None:
        """pi(u | o) of each agent, Q(s, u) of all own actions, and its target Q'.

        Raises:
            SpecError: if the actions are not discrete.
        """
        c, spec = self._config, self._spec
        self._num_actions = k = require_discrete(spec)
        self._critic_inputs = CriticInputs(spec, self._options)
        self.actor = self._make_actor(k)
        # Minibatches are of single agents' rows only where each is learned from by itself.
        self._single = self._keeps_apart and self._num_slices == 1 and not memory_size(self.actor)
        # What a critic is fed for one agent holds what the others did: agents stay apart.
        self.critic = self._make_critic(self._critic_inputs.shape, k, apart=True)
        self.target = target_of(self.critic)
        self._actor_optimizer = self._adam(self.actor, c.actor_lr)
        self._critic_optimizer = self._adam(self.critic, c.critic_lr)
        exploration = Exploration(c.epsilon_start, c.epsilon_end, c.epsilon_env_steps, k)
        self._exploration = exploration.to(self._device)
        unused = () if c.advantage == "return" else ("target",)
        self._unused = {"critic": _OF_ACTOR, "actor": unused}
        self._columns = ("target", "inverse") if c.clip_ratio else ("target",)
        self._step_scalars = (*_BY_ROW, *(IMITATION_LOGGED if self._imitates else ()), *_NORMS)
        self._logged = (*self._step_scalars, *_BATCH_SCALARS)

    @property
    def _epsilon(self) -> Tensor:
        """The share of uniform random actions, a scalar."""
        return self._exploration.epsilon

    _explores_by = _epsilon

    def update(self, batch: Rollout) -> dict[str, Tensor]:
        """Update networks and the target. All scalars but epsilon are 0 if no agent acted."""
        if not self._static:  # else with the choice of last actions, in its graph
            self._exploration.anneal()
        scalars, c = super().update(batch), self._config
        # 8. Q' follows Q.
        if c.target_update == "soft":
            polyak_update(self.target, self.critic, c.target_tau)
        elif self._counts["updates"] % c.target_every_updates == 0:
            polyak_update(self.target, self.critic, 1.0)
        return scalars

    @override
    def _stages(self) -> dict[str, Callable[[Pass], None]]:
        self._choose = self._capture("choose", self._choose_block, in_place=True)
        return {"critic": self._fit, "actor": self._improve}

    @override
    def _rows(self, batch: Rollout) -> Rows:
        return super()._rows(Rollout(self._completed(batch.arrays), []))

    @override
    def _completed(self, arrays: dict[str, Tensor]) -> dict[str, Tensor]:
        """Give unrolls' last rows the actions that the policy would take.

        An unroll's last row has no action yet. In an unroll that was closed before it was full, the
        last row is the one before the padding.
        """
        # 1. a ~ pi(. | o) at the row that the targets of the last transition look at.
        action, kinds = arrays["action"].clone(), arrays["step_type"]
        last, rows = last_written(kinds), action.view(-1, action.shape[2])
        if self._static:
            for start, stop in self._fixed.last_rows(_LAST, arrays, last):
                found = self._call(self._choose, self._fixed.under(_LAST))["action"]
                rows.index_copy_(0, last[start:stop], found[: stop - start].to(rows.dtype))
        else:
            batch = Rollout(arrays, [])
            obs = {name: x.flatten(0, 1) for name, x in batch.observation().items()}
            state = recurrent_states(batch)[0] if self.memory_size else None
            if state is None:
                obs = {name: x.index_select(0, last) for name, x in obs.items()}
            rows.index_copy_(0, last, self._chosen(obs, state, kinds).to(rows.dtype))
        return arrays | {"action": action}

    @torch.no_grad()
    def _choose_block(self, given: Mapping[str, Tensor]) -> Outputs:
        """Choose actions for last rows; may be captured."""
        self._exploration.anneal()
        obs, state = self._fixed.fed_last(given)
        return {"action": self._chosen(obs, state, given.get(_LAST + "step_type")).to(torch.int32)}

    @torch.no_grad()
    def _chosen(
        self, obs: Mapping[str, Tensor], state: RecurrentState | None, step_type: Tensor | None
    ) -> Tensor:
        """Return actions [B, A] of the policy for last rows.

        Args:
            obs: name -> [B, A, ...], or with memory [(L + 1) * B, A, ...] of whole unrolls.
            state: recurrent state before the first row; None: the policy has none.
            step_type: [L + 1, B] step types, read with memory only.
        """
        mask = obs.get(ACTION_MASK)
        logits = forward_rows(self.actor, self._actor_inputs(obs), self._precision, state)
        if state is not None:
            assert step_type is not None
            at = last_written(step_type)
            logits = logits.index_select(0, at)
            mask = None if mask is None else mask.index_select(0, at)
        pi = policy_probabilities(logits, mask, self._epsilon)
        return sample(pi, self._generator)

    @override
    def _values_of_rows(
        self,
        inputs: tuple[Inputs, Inputs],
        states: RecurrentStates,
        action: Tensor,
        obs: Mapping[str, Tensor],
        envs: int = 0,
    ) -> dict[str, Tensor]:
        # Q'(s, u) of the actions taken; that of rows without one before them is not asked for.
        skipped = 0 if states[1] is not None else envs
        critic = inputs[1].each(lambda x: x[skipped:]) if skipped else inputs[1]
        value = taken(
            forward_rows(self.target, critic, self._precision, states[1]),
            action[skipped:],
        )
        found = {"value": F.pad(value, (0, 0, skipped, 0)) if skipped else value}
        if self._config.clip_ratio:  # log pi_old(u | o)
            logits = forward_rows(self.actor, inputs[0], self._precision, states[0])
            pi = policy_probabilities(logits, obs.get(ACTION_MASK), self._epsilon)
            found["log_prob"] = taken(bounded_log(pi), action)
        return found

    @override
    def _learnable(
        self, batch: Rollout, values: Mapping[str, Tensor], rows: Tensor | None
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        # 2. y = r + gamma [(1 - lambda) Q'(s', u') + lambda y'] (section 3, TD(lambda)).
        c, t, value = self._config, transitions(batch), values["value"][1:]
        weight = t.weight
        target = lambda_returns(t.reward, t.discount, value, t.next_is_last, c.gamma, c.td_lambda)
        columns = {"target": target}
        if c.clip_ratio:
            # 1 / pi_old(u | o) of what counts, else 0.
            columns["inverse"] = (-values["log_prob"][:-1].where(weight > 0, NEVER_TAKEN)).exp()
        # Mean, variance and deviation of targets; environment steps, all of all ranks.
        env_steps, counted, mean = t.valid.sum(), weight.sum(), (target * weight).sum()
        self._group.sum_([counted, mean, env_steps])
        self._exploration.advance(env_steps)
        counted = counted.clamp_min(1)
        mean = mean / counted
        squares = ((target - mean).square() * weight).sum()
        self._group.sum_([squares])
        variance = squares / counted
        return columns, weight, torch.stack([mean, variance, variance.sqrt()])

    def _fit(self, minibatches: Pass) -> None:
        """Fit the critic: L = E[(Q(s, u) - y)^2], one minibatch after the other.

        With g = -2 share of the action taken and 0 of the others, the gradient of
        sum share (q - target)^2 is g target - g q.
        """
        # 3. Critic.
        c, share = self._config, minibatches.share  # [n, M, A]
        action, target = minibatches.columns["action"], minibatches.columns["target"]
        g = target.new_zeros(*action.shape, self._num_actions)
        g.scatter_(-1, action.unsqueeze(-1), (2 * minibatches.cost).view(*action.shape, 1))
        of_goal = (g * target.unsqueeze(-1)).view(*share.shape, -1)
        g = g.view_as(of_goal)
        values, norms = [], []
        for i in range(minibatches.number):
            rows = minibatches.at(i)
            if rows.rates is not None:
                self._schedule.step(rows.rates)
            with cast_weights(self._precision, self.critic):
                out, _ = forward(self.critic, rows.critic, rows.critic_state)
            q = out.float()
            (norm,) = self._precision.step_together(
                [(q, torch.addcmul(of_goal[i], q.detach(), g[i], value=-1))],
                [(self._critic_optimizer, self.critic)],
                c.max_grad_norm,
                self._num_slices,
            )
            values.append(q.detach())
            norms.append(norm)
        with torch.no_grad():  # loss, value and norm, summed over minibatches
            q = taken(torch.stack(values), action.view_as(share))
            error = (q - target.view_as(q)).square()
            by_row = self._of_slices(torch.stack([error, q]).flatten(1) @ share.flatten())
            self._total[:3].add_(torch.cat([by_row, torch.stack(norms).sum().view(1)]))

    @torch.no_grad()
    def _values(self, minibatches: Pass) -> Tensor:
        """Return the critic's values of all minibatches, [n, M, A, K]."""
        if minibatches.critic_state is None:
            q = forward_rows(self.critic, minibatches.critic, self._precision)
            return q.view(*minibatches.share.shape, -1)
        found = []
        for rows in (minibatches.at(i) for i in range(minibatches.number)):
            with cast_weights(self._precision, self.critic):
                found.append(forward(self.critic, rows.critic, rows.critic_state)[0].float())
        return torch.stack(found)

    def _improve(self, minibatches: Pass) -> None:
        """Improve the policy, one minibatch after the other.

        Up goes E[log pi(u | o) A], or PPO's surrogate r A, r = pi / pi_old, where it is not
        clipped, and the entropy: -E[pi log pi]; their gradient by the softmax.
        """
        c = self._config
        # 4. Q of all own actions by the critic just fitted, [n, M, A, K].
        of_pi, of_order, root = self._weights(minibatches, self._values(minibatches))
        log: list[Outputs] = []
        for i in range(minibatches.number):
            rows = minibatches.at(i)
            if rows.rates is not None:
                self._schedule.step(rows.rates)
            columns, action = rows.columns, rows.columns["action"]
            penalty = columns.get("penalty")
            # 5. pi(u | o), epsilon included, [M, A, K].
            with cast_weights(self._precision, self.actor):
                logits, _ = forward(self.actor, rows.actor, rows.actor_state)
            logits = logits.float()
            expert = None
            if EXPERT_ACTION in columns:
                log_prob = partial(_log_taken, logits, penalty)
                expert = imitation(columns[EXPERT_ACTION], log_prob, rows.cost)
            with torch.no_grad():
                floor = columns.get("floor", self._exploration.floor)
                softmax, pi = mixture(logits, penalty, self._exploration.keep, floor)
                # 6. A = Q(s, u) - sum_k pi(k) Q(s, (u_others, k)) (section 4), or y in place of Q.
                sums = (pi.unsqueeze(-2) * of_pi[i]).sum(-1)
                advantage, ratio, of_taken = sums[..., 0], sums[..., 1], sums[..., 2]
                found = {"pi": pi, "sums": sums}
                if c.normalize_advantage:
                    found["deviation"] = self._deviation(
                        sums, rows.share, None if root is None else root[i]
                    )
                    of_each = of_agents(found["deviation"] + _LEAST_DEVIATION, self._sets)
                    of_taken = of_taken / of_each
                # 7. Actor.
                if c.clip_ratio:  # not clipped: (1 - r) sign(A) > -clip
                    sign = advantage.sign()
                    inside = torch.addcmul(sign, ratio, sign, value=-1)
                    of_taken = torch.ops.aten.threshold_backward(of_taken, inside, -c.clip_ratio)
                else:
                    of_taken = of_taken / ratio
                weighted = of_order[i]
                if expert is not None:  # rows with an expert's action learn from that alone
                    of_taken = of_taken.masked_fill(expert.expert_mask, 0)
                    weighted = weighted.masked_fill(expert.expert_mask, 0)
                if c.entropy_weight:  # softmax's gradient is free of constants, as log pi's is
                    of_softmax = torch.xlogy(weighted.unsqueeze(-1), pi)
                else:
                    of_softmax = torch.zeros_like(pi)
                of_softmax.scatter_add_(-1, action.unsqueeze(-1), of_taken.unsqueeze(-1))
                terms = [(logits, mixture_gradient(of_softmax, softmax))]
                terms += [] if expert is None else [expert.term]
            (norm,) = self._precision.step_together(
                terms, [(self._actor_optimizer, self.actor)], c.max_grad_norm, self._num_slices
            )
            imitated = {} if expert is None else expert.logged
            log.append(found | imitated | {"norm": norm})
        self._note_actor(minibatches, log)

    @torch.no_grad()
    def _weights(self, minibatches: Pass, q: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Make weights of probabilities and of the gradient, for all minibatches together.

        Args:
            minibatches: minibatches; their columns get what follows from masks.
            q: [n, M, A, K] values of all own actions.

        Returns:
            [n, M, A, J, K] weights of probabilities, whose sums are, in order: the advantage; the
            ratio pi / pi_old of the action taken, or without a clip its pi; the advantage times
            what its log-probability, or the ratio, weighs; and the advantage times the root of
            share, if it is normalised. [n, M, A] weights of the entropy, and that root.
        """
        share, keep, columns = minibatches.share, self._exploration.keep, minibatches.columns
        mask = columns.pop("mask", None)
        if mask is not None:  # penalties of illegal actions, and exploration of legal ones
            floor = self._epsilon * uniform(mask) + LEAST
            columns |= {"penalty": penalties(mask), "floor": floor}
        action = columns["action"].view_as(share)
        by_return = self._config.advantage == "return"
        worth = columns["target"].view_as(share) if by_return else taken(q, action)
        lead, of_action = worth.unsqueeze(-1) - q, torch.zeros_like(q)
        of_taken = minibatches.cost * keep
        if self._config.clip_ratio:
            inverse = columns["inverse"].view_as(share)
            of_taken = of_taken * inverse
            of_action.scatter_(-1, action.unsqueeze(-1), inverse.unsqueeze(-1))
        else:
            of_action.scatter_(-1, action.unsqueeze(-1), 1.0)
        of_pi, root = [lead, of_action, lead * of_taken.unsqueeze(-1)], None
        if self._one_deviation:
            root = share.sqrt()
            of_pi.append(lead * root.unsqueeze(-1))
        return torch.stack(of_pi, -2), share * (self._schedule.entropy_weight * keep), root

    @property
    def _sets(self) -> Tensor:
        """`_sharing` of what minibatches are of."""
        return self._sharing[:, :1] if self._single else self._sharing

    @property
    def _one_deviation(self) -> bool:
        """Whether all rows by which advantages are normalised are here, and there is one set."""
        one = len(self._sharing) == 1 and self._group.size == 1
        return self._config.normalize_advantage and one

    def _deviation(self, sums: Tensor, share: Tensor, root: Tensor | None) -> Tensor:
        """Return [S] deviations of a minibatch's advantages; of one set by three kernels.

        Args:
            sums: [M, A, J] weighted sums of probabilities; see `_weights`.
            share: [M, A] weights of the rows.
            root: their roots; None: there are several slices, or ranks.
        """
        if root is None:
            return deviations(sums[..., 0], share, self._sets, self._group)
        mean = sums[..., 0].reshape(1, -1) @ share.reshape(-1, 1)
        centered = torch.addcmul(sums[..., 3], mean, root, value=-1)
        found: Tensor = torch.linalg.vector_norm(centered).view(1)
        return found

    @torch.no_grad()
    def _note_actor(self, minibatches: Pass, log: list[Outputs]) -> None:
        """Add what is logged of the actor, summed over minibatches, to `_total`.

        Entropy, loss, imitation, deviation of the advantage, norm, number that count.

        Args:
            minibatches: [n, M, A] weights of their rows.
            log: probabilities, sums of them, imitation [M, A, ...], and norms of each.
        """
        found = {name: torch.stack([of[name] for of in log]) for name in log[0]}
        pi, sums, cost = found["pi"], found["sums"], minibatches.cost
        scaled, ratio = sums[..., 0], sums[..., 1]
        if "deviation" in found:
            deviation = found["deviation"]
            of_each = of_agents(deviation + _LEAST_DEVIATION, self._sets)
            scaled = scaled / of_each.unsqueeze(1)
        else:
            deviation = deviations(scaled, minibatches.share, self._sets, self._group)
        if self._config.clip_ratio:
            gain = torch.minimum(ratio * scaled, most_gain(scaled, self._config.clip_ratio))
        else:
            gain = ratio.log() * scaled
        order = torch.xlogy(pi, pi).sum(-1)  # minus the entropy
        rows = [order, gain]
        if "imitation_share" in found:  # of gains and of the entropy what the loss contains
            others = 1 - found["imitation_share"]
            imitated = [-found[name] for name in IMITATION_LOGGED]
            rows = [order, gain * others, order * others, *imitated]
        # Not a product of matrices, which rounds by the number of rows.
        entropy, loss, *more = (torch.stack(rows) * cost).flatten(1).sum(1)
        of_loss = more.pop(0) if more else entropy
        loss = torch.addcmul(loss, of_loss, self._schedule.entropy_weight, value=-1)
        by_row = self._of_slices(torch.stack([entropy, loss, *more]))
        deviation = deviation.mean(-1) if self._num_slices > 1 else deviation.flatten()
        by_step = torch.stack([deviation, found["norm"], minibatches.counts]).sum(1)
        self._total[3:].add_(torch.cat([by_row, by_step]))

    def _of_slices(self, sums: Tensor) -> Tensor:
        """Return means over parameter groups of sums over them."""
        return sums / self._num_slices if self._num_slices > 1 else sums

    @torch.no_grad()
    def _scalars(self, total: Tensor, batch_scalars: Tensor) -> Tensor:
        """Return `_logged`, as means over the minibatches in which anything counts."""
        # Of `_fit` and `_note_actor`, in the order of `_step_scalars`.
        order = (0, 1, 3, 4, len(total) - 3, *range(5, len(total) - 3), 2, len(total) - 2)
        means = torch.stack([total[i] for i in order]) / total[-1].clamp_min(1)
        if self._imitates:
            average_over_expert_rows(means, len(_BY_ROW))
        mean, variance, deviation = batch_scalars
        explained = 1 - means[0] / variance.clamp_min(1e-8)
        return torch.cat([means, torch.stack([mean, deviation, explained, self._epsilon])])


def _log_taken(logits: Tensor, penalty: Tensor | None, action: Tensor) -> Tensor:
    """Return log-probabilities [M, A] of actions, without exploration; see `log_softmax`."""
    return taken(log_softmax(logits, penalty), action)


def last_written(step_type: Tensor) -> Tensor:
    """[B] the last row of each unroll that is none of padding, of the (L + 1) * B joint rows.

    Args:
        step_type: [L + 1, B].
    """
    joint = torch.arange(step_type.numel(), device=step_type.device).view(step_type.shape)
    return joint.where(step_type != int(StepType.ABORTED), joint[0]).amax(0)


build = Coma

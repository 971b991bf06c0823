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
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from learner_service.algorithms import options
from learner_service.algorithms.base import require_discrete
from learner_service.algorithms.coma_policy import ComaPolicy
from learner_service.algorithms.counterfactual import (
    bounded_log,
    counterfactual_advantage,
    taken,
)
from learner_service.algorithms.exploration import (
    LEAST,
    Exploration,
    log_softmax,
    mixture,
    mixture_gradient,
    penalties,
    policy_probabilities,
)
from learner_service.algorithms.imitation import LOGGED, advice, expert_column, mean_of_told
from learner_service.algorithms.minibatches import (
    Pass,
    Rows,
    counted_actions,
    deviations,
    uncounted_never_taken,
)
from learner_service.algorithms.on_policy import OnPolicyAlgorithm, RecurrentStates, each
from learner_service.algorithms.returns import (
    lambda_returns,
    most_gain,
    of_agents,
    polyak_update,
    target_of,
)
from learner_service.algorithms.steps import fed, named
from learner_service.networks.building import resolve_network
from learner_service.networks.casting import cast_weights
from learner_service.networks.distributions import one_hot, sample, uniform
from learner_service.networks.forward import forward
from learner_service.networks.inputs import CriticInputs, Inputs
from learner_service.networks.recurrent import RecurrentState, memory_size, recurrent_states
from learner_service.runtime.cuda_graph import Outputs
from learner_service.storage.rollout import Batch, Transitions, transitions
from shared.spec import ACTION_MASK
from shared.timestep import StepType


class Config(options.OnPolicyCriticConfig):
    """Options of COMA; the defaults are those of the terrain system's authors."""

    batch_size: options.BatchSize = 60
    batch_number: options.BatchNumber = 5
    data_passes: options.DataPasses = 5
    td_lambda: float = Field(0.8, ge=0, le=1, description="0: one-step TD, 1: Monte Carlo")
    actor_lr: options.ActorRate = 1e-5
    critic_lr: options.CriticRate = 1e-4
    entropy_weight: options.EntropyWeight = 0.0
    epsilon_start: options.EpsilonStart = 0.5
    epsilon_end: options.EpsilonEnd = 0.02
    epsilon_env_steps: int = Field(
        150_000, ge=1, description="environment steps over which epsilon is annealed linearly"
    )
    target_update: Literal["hard", "soft"] = Field("hard", description="how the target follows")
    target_every_updates: int = Field(10, ge=1, description="hard: updates between copies")
    target_tau: float = Field(0.01, gt=0, le=1, description="soft: share moved per update")
    clip_ratio: float = Field(
        0.0,
        ge=0,
        description="bound on the policy's change over the data passes, as PPO's clipped "
        "surrogate with the counterfactual advantage; 0: the plain policy gradient",
    )
    normalize_advantage: bool = Field(False, description="divide advantages by their deviation")


_BY_ROW = ("critic_loss", "q_mean", "entropy", "actor_loss", "advantage_std")
_NORMS = ("critic_grad_norm", "actor_grad_norm")
_OF_THE_BATCH = ("target_mean", "target_std", "explained_variance", "epsilon")


_LAST = "last/"  # buffers of unrolls' last rows
_Log = dict[str, Tensor]  # what steps return, by name: [n, ...]


class Coma(OnPolicyAlgorithm):
    """See the module. Used by the thread that learns."""

    POLICY, IMITATES = ComaPolicy, True
    _OF_BATCH = 3  # mean, variance and deviation of targets
    _config: Config
    _critic_inputs: CriticInputs

    def _build(self) -> None:
        """pi(u | o) of each agent, Q(s, u) of all own actions, and its target Q'.

        Raises:
            SpecError: if the actions are not discrete.
        """
        c, spec = self._config, self._spec
        self._num_actions = k = require_discrete("coma", spec)
        self._critic_inputs = CriticInputs(spec, self._options)
        # Minibatches are of single agents' rows only where each is learned from by itself.
        image = self._actor_inputs.shape.image
        networks = self._network, self._critic_network
        stacked = all(resolve_network(network, image).stacked for network in networks)
        self.actor = self._make_actor(k)
        self._single = stacked and self._num_slices == 1 and not memory_size(self.actor)
        # What a critic is fed for one agent holds what the others did: agents stay apart.
        self.critic = self._make_critic(self._critic_inputs.shape, k, apart=True)
        self.target = target_of(self.critic)
        self._actor_optimizer = self._adam(self.actor, c.actor_lr)
        self._critic_optimizer = self._adam(self.critic, c.critic_lr)
        falls = c.epsilon_start, c.epsilon_end, c.epsilon_env_steps
        self._exploration = Exploration(*falls, k).to(self._device)
        self._columns = ("target", "log_prob") if c.clip_ratio else ("target",)
        self._of_steps = (*_BY_ROW, *(LOGGED if self._imitates else ()), *_NORMS)
        self._logged = (*self._of_steps, *_OF_THE_BATCH)

    @property
    def _epsilon(self) -> Tensor:
        """The share of uniform random actions, a scalar."""
        return self._exploration.epsilon

    _explores_by = _epsilon

    def update(self, batch: Batch) -> dict[str, Tensor]:
        """See OnPolicyAlgorithm; updates the target. All but epsilon are 0 if no agent acted."""
        scalars, c = super().update(batch), self._config
        # 8. Q' follows Q.
        if c.target_update == "soft":
            polyak_update(self.target, self.critic, c.target_tau)
        elif self._counts["updates"] % c.target_every_updates == 0:
            polyak_update(self.target, self.critic, 1.0)
        return scalars

    def _learn(self, batch: Batch, number: int) -> Tensor:
        """The update but for the target critic.

        Args:
            batch: all that is learned from.
            number: of minibatches in each pass.
        """
        self._exploration.anneal()
        # 1. and 2. Targets, once.
        rows = self._prepare(batch)
        # 3. to 7. In each pass the critic, then the actor.
        log: list[_Log] = []
        for shuffled, rates in self._passes(rows, batch, number):
            critic = self._critic_pass(shuffled, rates)
            actor = self._actor_pass(shuffled, rates)
            log.append({"share": shuffled.share, "counts": shuffled.counts, **critic, **actor})
        of_batch = self._of_targets(rows.columns["target"], rows.weight, batch.env_steps())
        if not log:
            return self._scalars(torch.zeros_like(self._total), of_batch)
        found = {name: torch.cat([of[name] for of in log]) for name in log[0]}
        sums = torch.cat([self._critic_sums(found), self._actor_sums(found)])
        return self._scalars(sums, of_batch)

    @override
    def _blocks_of_steps(self) -> dict[str, Callable[[Mapping[str, Tensor]], Outputs]]:
        self._choose = self._fixed.capture("choose", self._choose_block)
        return {"critic": self._critic_block, "actor": self._actor_block}

    def _critic_block(self, given: Mapping[str, Tensor]) -> Outputs:
        """Fit the critic to the minibatches of a block; may be captured."""
        own = self._fixed.of_block(given)
        found = self._critic_pass(own, self._schedule.rates(own.counts))
        sums = self._critic_sums(found | {"share": own.share})
        self._total[: len(sums)].add_(sums)
        return {}

    def _actor_block(self, given: Mapping[str, Tensor]) -> Outputs:
        """Improve the policy by the minibatches of a block; may be captured."""
        own = self._fixed.of_block(given)
        found = self._actor_pass(own, self._schedule.rates(own.counts))
        sums = self._actor_sums(found | {"share": own.share, "counts": own.counts})
        self._total[-len(sums) :].add_(sums)
        return {}

    def _completed(self, arrays: dict[str, Tensor]) -> dict[str, Tensor]:
        """See OnPolicyAlgorithm: unrolls' last rows get the actions that the policy would take."""
        # 1. a ~ pi(. | o) at the row that the targets of the last transition look at.
        action, fixed = arrays["action"].clone(), self._fixed
        last, rows = last_written(arrays["step_type"]), action.view(-1, action.shape[2])
        for start, stop in fixed.last_rows(_LAST, arrays, last):
            found = self._call(self._choose, fixed.under(_LAST))["action"]
            rows.index_copy_(0, last[start:stop], found[: stop - start].to(rows.dtype))
        return arrays | {"action": action}

    @torch.no_grad()
    def _choose_block(self, given: Mapping[str, Tensor]) -> Outputs:
        """Actions of the policy for last rows, which may be captured."""
        self._exploration.anneal()
        obs, state = self._fixed.fed_last(given)
        mask = obs.get(ACTION_MASK)
        logits = self._forward(self.actor, self._actor_inputs(obs), state)
        if state is not None:
            at = last_written(given[_LAST + "step_type"])
            logits = logits.index_select(0, at)
            mask = None if mask is None else mask.index_select(0, at)
        pi = policy_probabilities(logits, mask, self._epsilon)
        return {"action": sample(pi, self._generator).to(torch.int32)}

    @override
    def _values_of_rows(
        self,
        inputs: tuple[Inputs, Inputs],
        states: RecurrentStates,
        action: Tensor,
        obs: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        found = {"value": taken(self._forward(self.target, inputs[1], states[1]), action)}
        if self._config.clip_ratio:  # log pi_old(u | o)
            logits = self._forward(self.actor, inputs[0], states[0])
            pi = policy_probabilities(logits, obs.get(ACTION_MASK), self._epsilon)
            found["log_prob"] = taken(bounded_log(pi), action)
        return found

    @override
    def _learnable(
        self, batch: Batch, values: Mapping[str, Tensor], rows: Tensor
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        t = transitions(batch)
        weight = counted_actions(batch, t, self._spec.num_agents)
        columns = {"target": self._returns(t, values["value"][1:])}
        if self._config.clip_ratio:
            columns["log_prob"] = uncounted_never_taken(values["log_prob"][:-1], weight)
        return columns, weight, self._of_targets(columns["target"], weight, t.valid.sum())

    @override
    def _derived(self, columns: dict[str, Tensor]) -> dict[str, Tensor]:
        mask = columns.pop("mask", None)
        if mask is None:
            return columns
        return columns | self._of_mask(mask)

    def _of_mask(self, legal: Tensor) -> dict[str, Tensor]:
        """Return penalties of illegal actions and the floor of exploration, [M, A, K] each."""
        return {"penalty": penalties(legal), "floor": self._epsilon * uniform(legal) + LEAST}

    @torch.no_grad()
    def _prepare(self, batch: Batch) -> Rows:
        """Everything that is computed once per update, as joint rows."""
        action = batch.arrays["action"].long()  # [L + 1, B, A]
        obs = {k: v.flatten(0, 1) for k, v in batch.observation().items()}
        actor_inputs, hidden = self._actor_inputs(obs), recurrent_states(batch)
        t = transitions(batch)
        mask = obs.get(ACTION_MASK)  # [(L + 1) * B, A, K]
        rows_mask = None if mask is None else mask.flatten(0, 1)
        self._choose_last(batch, action, actor_inputs, rows_mask, hidden[0])
        critic_inputs = self._critic_inputs(obs, action.flatten(0, 1))
        columns = {
            "action": action[:-1].flatten(0, 1),
            "target": self._targets(t, critic_inputs, action, hidden[1]).flatten(0, 1),
        }
        columns |= expert_column(obs, len(columns["action"]))
        if mask is not None:
            legal = mask[: len(columns["action"])]
            columns |= self._of_mask(legal)
        weight = counted_actions(batch, t, self._spec.num_agents).flatten(0, 1)
        if self._config.clip_ratio:  # log pi_old(u | o)
            logits = self._network_outputs(self.actor, actor_inputs, hidden[0]).flatten(0, 1)
            pi = policy_probabilities(logits, rows_mask, self._epsilon)
            log_prob = taken(bounded_log(pi).view(*action.shape, -1), action)
            columns["log_prob"] = uncounted_never_taken(log_prob[:-1].flatten(0, 1), weight)
        return self._rows((actor_inputs, critic_inputs), columns, weight, hidden)

    def _fed(self, obs: dict[str, Tensor], action: Tensor) -> tuple[Inputs, Inputs]:
        """Inputs of actor and critic."""
        return self._actor_inputs(obs), self._critic_inputs(obs, action)

    def _choose_last(
        self,
        batch: Batch,
        action: Tensor,
        inputs: Inputs,
        mask: Tensor | None,
        hidden: RecurrentState | None,
    ) -> None:
        """Set the actions [L + 1, B, A] of the unrolls' last rows to what the policy would do.

        An unroll's last row has no action yet. In an unroll that was closed before it was full,
        the last row is the one before the padding.
        """
        # 1. a ~ pi(. | o) at the row that the targets of the last transition look at.
        _, num_unrolls, num_agents = action.shape
        joint = last_written(batch.arrays["step_type"])  # [B] of the (L + 1) * B joint rows
        if hidden is None:
            logits = self._network_outputs(self.actor, inputs.rows(joint)).flatten(0, 1)
        else:
            logits = self._network_outputs(self.actor, inputs, hidden)[joint].flatten(0, 1)
        if mask is not None:
            mask = mask.view(-1, num_agents, mask.shape[-1])[joint].flatten(0, 1)
        pi = policy_probabilities(logits, mask, self._epsilon)
        chosen = sample(pi, self._generator).view(num_unrolls, num_agents)
        action.view(-1, num_agents).index_copy_(0, joint, chosen)

    def _targets(
        self, t: Transitions, inputs: Inputs, action: Tensor, hidden: RecurrentState | None
    ) -> Tensor:
        """[L, B, A] TD(lambda) targets from the target critic's values of rows 1 to L."""
        # 2. y = r + gamma [(1 - lambda) Q'(s', u') + lambda y'] (section 3, TD(lambda)).
        length, num_unrolls, num_agents = action.shape
        if hidden is None:
            q = self._network_outputs(self.target, inputs.rows(slice(num_unrolls, None)))
        else:
            q = self._network_outputs(self.target, inputs, hidden)[num_unrolls:]
        value = q.flatten(0, 1).gather(-1, action[1:].flatten().unsqueeze(-1))
        return self._returns(t, value.view(length - 1, num_unrolls, num_agents))

    def _returns(self, t: Transitions, value: Tensor) -> Tensor:
        """Targets of the target critic's values of rows 1 to L, all [L, B, A]."""
        c = self._config
        return lambda_returns(t.reward, t.discount, value, t.next_is_last, c.gamma, c.td_lambda)

    def _critic_pass(self, shuffled: Pass, rates: Mapping[str, Tensor]) -> _Log:
        """Fit the critic; returns squared errors and values of the actions taken, and norms.

        With g = 2 share of the action taken and 0 of the others, the gradient of
        sum share (q - target)^2 is g (q - target).
        """
        # 3. Critic: L = E[(Q(s, u) - y)^2], one minibatch after the other.
        action, target = shuffled.columns["action"], shuffled.columns["target"]
        g = one_hot(action, self._num_actions) * (2 * shuffled.share).flatten(0, 1).unsqueeze(-1)
        inputs, state = shuffled.inputs(shuffled.critic), shuffled.state(shuffled.critic_state)
        given = {"goal": shuffled.each(target).unsqueeze(-1), "of_error": shuffled.each(g), **rates}
        found = each(self._fit, named("critic", inputs, state) | given)
        q_taken = taken(found["q"].flatten(0, 1), action).view_as(shuffled.share)
        error = (q_taken - target.view_as(q_taken)).square()
        return {"error": error, "q": q_taken, "critic_norm": found["norm"]}

    def _fit(self, given: Mapping[str, Tensor]) -> Outputs:
        """Fit the critic to a minibatch.

        Args:
            given: see `_critic_pass`.

        Returns:
            its values and the gradient's norm.
        """
        self._schedule.step(given)
        with cast_weights(self._precision, self.critic):
            out, _ = forward(self.critic, *fed("critic", given))
        q = out.float()
        (norm,) = self._precision.step_together(
            [(q, (q.detach() - given["goal"]) * given["of_error"])],
            [(self._critic_optimizer, self.critic)],
            self._config.max_grad_norm,
            self._num_slices,
        )
        return {"q": q.detach(), "norm": norm}

    def _values(self, shuffled: Pass) -> Tensor:
        """[n * M, A, K] the critic's values of all minibatches."""
        state = shuffled.state(shuffled.critic_state)
        if state is None:
            return self._network_outputs(self.critic, shuffled.critic)
        given = named("rows", shuffled.inputs(shuffled.critic), state)
        return each(partial(self._forward_block, network=self.critic), given)["out"].flatten(0, 1)

    def _actor_pass(self, shuffled: Pass, rates: Mapping[str, Tensor]) -> _Log:
        """Improve the policy.

        Returns:
            gains, their weights, minus entropies, advantages, what advice logs, and norms.
        """
        # 4. Q of all own actions by the critic just fitted, [n * M, A, K].
        with torch.no_grad():
            q = self._values(shuffled)
            lead = taken(q, shuffled.columns["action"]).unsqueeze(-1) - q
        inputs, state = shuffled.inputs(shuffled.actor), shuffled.state(shuffled.actor_state)
        columns = {k: shuffled.each(x) for k, x in shuffled.columns.items() if k != "target"}
        given = {"share": shuffled.share, "cost": shuffled.cost, "lead": shuffled.each(lead)}
        given |= {**{f"column/{name}": x for name, x in columns.items()}, **rates}
        given |= self._before_improving(given)
        found = each(self._improve, named("actor", inputs, state) | given)
        return self._after_improving(given, found)

    @torch.no_grad()
    def _before_improving(self, given: Mapping[str, Tensor]) -> Outputs:
        """Weights of the gradient by the softmax, for all minibatches together.

        Args:
            given: tensors of a minibatch as `_actor_pass` names them.

        Returns:
            [n, M, A] 1 / pi_old(u | o), and weights of the probability taken and of the entropy.
        """
        keep, found = self._exploration.keep, {}
        of_taken = given["cost"] * keep
        if self._config.clip_ratio:
            found["inverse"] = (-given["column/log_prob"]).exp()
            of_taken = of_taken * found["inverse"]
        of_order = given["share"] * (self._schedule.entropy_weight * keep)
        return found | {"of_taken": of_taken, "of_order": of_order}

    def _improve(self, given: Mapping[str, Tensor]) -> Outputs:
        """Improve the policy by a minibatch.

        Args:
            given: tensors of a minibatch as `_actor_pass` and `_before_improving` name them.

        Returns:
            probabilities, advantages and what advice logs, [M, A, ...], and the gradient's norm.
        """
        self._schedule.step(given)
        # 5. pi(u | o), epsilon included, [M, A, K].
        c, share = self._config, given["share"]
        columns = {k.removeprefix("column/"): v for k, v in given.items() if k[:7] == "column/"}
        with cast_weights(self._precision, self.actor):
            logits, _ = forward(self.actor, *fed("actor", given))
        logits, penalty = logits.float(), columns.get("penalty")
        expert = advice(columns, lambda u: taken(log_softmax(logits, penalty), u), given["cost"])
        with torch.no_grad():
            floor = columns.get("floor", self._exploration.floor)
            softmax, pi = mixture(logits, penalty, self._exploration.keep, floor)
            pi_taken = taken(pi, columns["action"])
            # 6. A = Q(s, u) - sum_k pi(k) Q(s, (u_others, k)) (section 4).
            advantage = scaled = counterfactual_advantage(given["lead"], pi)
            if c.normalize_advantage:
                sharing = self._sharing[:, :1] if self._single else self._sharing
                deviation = deviations(advantage, share, sharing, self._group) + 1e-6
                scaled = advantage / of_agents(deviation, sharing)
            # 7. Actor: up E[log pi(u | o) A], or PPO's surrogate r A, r = pi / pi_old, where it is
            # not clipped, and the entropy: -E[pi log pi]; their gradient by the softmax.
            of_taken = expert.spared(given["of_taken"]) * scaled
            if c.clip_ratio:
                free = pi_taken * given["inverse"] * scaled <= most_gain(scaled, c.clip_ratio)
                of_taken = of_taken * free
            else:
                of_taken = of_taken / pi_taken
            if c.entropy_weight:  # softmax's gradient is free of constants, as that of log pi is
                of_softmax = pi.log() * expert.spared(given["of_order"]).unsqueeze(-1)
            else:
                of_softmax = torch.zeros_like(pi)
            of_softmax.scatter_add_(-1, columns["action"].unsqueeze(-1), of_taken.unsqueeze(-1))
            terms = [(logits, mixture_gradient(of_softmax, softmax)), *expert.terms]
        (norm,) = self._precision.step_together(
            terms, [(self._actor_optimizer, self.actor)], c.max_grad_norm, self._num_slices
        )
        told = {f"told {i}": x for i, x in enumerate(expert.logged)}
        found = {"pi": pi, "taken": pi_taken, "advantage": advantage, "scaled": scaled}
        return found | told | {"actor_norm": norm}

    @torch.no_grad()
    def _after_improving(self, given: Mapping[str, Tensor], found: Outputs) -> Outputs:
        """Return the terms of `_actor_sums`, [n, M, A]: gains, their weights, and others."""
        pi, pi_taken = found.pop("pi"), found.pop("taken")
        scaled, cost = found.pop("scaled"), given["cost"]
        if "told 1" in found:
            cost = cost * (1 - found["told 1"])
        if self._config.clip_ratio:
            most = most_gain(scaled, self._config.clip_ratio)
            gain = torch.minimum(pi_taken * given["inverse"] * scaled, most)
        else:
            gain, cost = pi_taken.log(), cost * scaled
        return found | {"gain": gain, "cost": cost, "order": (pi * pi.log()).sum(-1)}

    @torch.no_grad()
    def _critic_sums(self, found: Mapping[str, Tensor]) -> Tensor:
        """The critic's part of `_of_steps`, summed over minibatches: loss, value, norm."""
        by_row = torch.stack([found["error"], found["q"]]).flatten(1)
        by_row = by_row @ found["share"].flatten() / self._num_slices
        return torch.cat([by_row, found["critic_norm"].sum().view(1)])

    @torch.no_grad()
    def _actor_sums(self, found: Mapping[str, Tensor]) -> Tensor:
        """The actor's part, and the number of minibatches that count.

        Entropy, loss, deviation of the advantage, what advice logs, norm, number.
        """
        share, entropy = found["share"], -found["order"]  # [N, M, A]
        sharing = self._sharing[:, :1] if self._single else self._sharing
        deviation = deviations(found["advantage"], share, sharing, self._group).sum()
        told = [x for k, x in found.items() if k[:4] == "told"]
        # Of the entropy what the loss contains.
        more = [*told, entropy * (1 - told[1])] if told else []
        entropy, *told = torch.stack([entropy, *more]).flatten(1) @ share.flatten()
        of_loss = told.pop() if told else entropy
        loss = (found["gain"] * found["cost"]).sum() - self._schedule.entropy_weight * of_loss
        summed = torch.stack([entropy, loss, deviation, *told]) / self._num_slices
        last = torch.stack([found["actor_norm"].sum(), found["counts"].sum()])
        return torch.cat([summed, last])

    @torch.no_grad()
    def _of_targets(self, target: Tensor, weight: Tensor, env_steps: Tensor) -> Tensor:
        """Mean, variance and deviation of targets; counts environment steps, of all ranks."""
        counted, mean = weight.sum(), (target * weight).sum()
        self._group.sum_([counted, mean, env_steps])
        self._exploration.advance(env_steps)
        counted = counted.clamp_min(1)
        mean = mean / counted
        squares = ((target - mean).square() * weight).sum()
        self._group.sum_([squares])
        variance = squares / counted
        return torch.stack([mean, variance, variance.sqrt()])

    @torch.no_grad()
    def _scalars(self, total: Tensor, of_batch: Tensor) -> Tensor:
        """See OnPolicyAlgorithm; means over the minibatches in which anything counts."""
        # Of `_critic_sums` and `_actor_sums`, in the order of `_of_steps`.
        order = (0, 1, 3, 4, 5, *range(6, len(total) - 2), 2, len(total) - 2)
        means = torch.stack([total[i] for i in order]) / total[-1].clamp_min(1)
        if self._imitates:
            means = mean_of_told(means, [means], len(_BY_ROW))
        mean, variance, deviation = of_batch
        explained = 1 - means[0] / variance.clamp_min(1e-8)
        return torch.cat([means, torch.stack([mean, deviation, explained, self._epsilon])])


def last_written(step_type: Tensor) -> Tensor:
    """[B] the last row of each unroll that is none of padding, of the (L + 1) * B joint rows.

    Args:
        step_type: [L + 1, B].
    """
    joint = torch.arange(step_type.numel(), device=step_type.device).view(step_type.shape)
    return joint.where(step_type != int(StepType.ABORTED), joint[0]).amax(0)


build = Coma

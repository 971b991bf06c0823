"""COMA: counterfactual multi-agent policy gradients.

Foerster, Farquhar, Afouras, Nardelli, Whiteson 2018, "Counterfactual Multi-Agent Policy Gradients"
(arXiv:1705.08926), as set up for terrain monitoring by Westheider, Rueckin, Popovic 2023,
"Multi-UAV Adaptive Path Planning Using Deep Reinforcement Learning" (arXiv:2303.01150). One actor
is shared by all agents (or each has its own). One centralised critic gives a Q value to each own
action while the others' actions are held fixed. Targets are TD(lambda) from a target critic. Each
rollout is learned from in several passes of minibatches, critic first.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

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
from learner_service.algorithms.on_policy import OnPolicyAlgorithm, Steps
from learner_service.algorithms.returns import (
    lambda_returns,
    most_gain,
    of_agents,
    polyak_update,
    target_of,
)
from learner_service.algorithms.steps import fed, named
from learner_service.networks.building import is_stacked
from learner_service.networks.casting import cast_weights
from learner_service.networks.distributions import one_hot, sample, uniform
from learner_service.networks.forward import forward
from learner_service.networks.inputs import CriticInputs, Inputs
from learner_service.networks.recurrent import RecurrentState, memory_size, recurrent_states
from learner_service.runtime.cuda_graph import Outputs
from learner_service.runtime.streams import Branch
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


_AHEAD = "ahead/"  # begins the names of what belongs to the critic's next pass
_Log = dict[str, Tensor]  # what steps return, by name: [n, ...]
_Given = tuple[Pass, dict[str, Tensor]]  # a pass, and its learning rates


class Coma(OnPolicyAlgorithm):
    """See the module. Used by the learner thread."""

    POLICY, IMITATES = ComaPolicy, True
    _config: Config

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
        stacked = all(is_stacked(n, image) for n in (self._network, self._network_of_critic()))
        self.actor = self._make_actor(k)
        self._single = stacked and self._num_slices == 1 and not memory_size(self.actor)
        # What a critic is fed for one agent holds what the others did: agents stay apart.
        self.critic = self._make_critic(self._critic_inputs.shape, k, apart=True)
        self.target = target_of(self.critic)
        self._actor_optimizer = self._adam(self.actor, c.actor_lr)
        self._critic_optimizer = self._adam(self.critic, c.critic_lr)
        falls = c.epsilon_start, c.epsilon_end, c.epsilon_env_steps
        self._exploration = Exploration(*falls, k).to(self._device)
        self._critic_steps = Steps(self, "critic", self._fit)
        own = self._improve, self._before_improving, self._after_improving
        self._actor_steps = Steps(self, "actor", *own)
        self._both_steps = Steps(self, "both", self._both, *own[1:])
        # A loss has one scale, and ranks exchange in one order.
        self._apart = not (self._precision.scaler.is_enabled() or self._group.size > 1)
        self._branch = Branch(self._device)
        values = partial(self._forward_block, network=self.critic)
        self._value_steps = Steps(self, "values", values)
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
        passes = self._passes(rows, batch, number)
        beside = self._static and self._apart
        log = list(self._side_by_side(passes) if beside else self._in_turn(passes))
        env_steps = batch.env_steps()  # `_means` adds those of the other ranks
        scalars = self._means(log, rows, env_steps)
        self._exploration.advance(env_steps)
        return scalars

    def _in_turn(self, passes: Iterator[_Given]) -> Iterator[tuple[Pass, _Log, _Log]]:
        """Passes with what their steps of critic and actor return."""
        for shuffled, rates in passes:
            fitted = self._critic_steps(self._critic_given(shuffled, rates))
            critic = self._fitted(shuffled, fitted)
            yield shuffled, critic, self._actor_steps(self._actor_given(shuffled, rates))

    def _side_by_side(self, passes: Iterator[_Given]) -> Iterator[tuple[Pass, _Log, _Log]]:
        """As `_in_turn`; while the actor learns, the critic is fitted in its next pass.

        The actor needs no more of the critic than its values, which are taken before.
        """
        this = next(passes, None)
        fitted = self._critic_steps(self._critic_given(*this)) if this is not None else {}
        while this is not None:
            critic, given = self._fitted(this[0], fitted), self._actor_given(*this)
            following = next(passes, None)
            if following is None:
                actor = self._actor_steps(given)
            else:
                ahead = self._critic_given(*following)
                found = self._both_steps({**given, **{_AHEAD + k: x for k, x in ahead.items()}})
                fitted = {k.removeprefix(_AHEAD): x for k, x in found.items() if _AHEAD in k}
                actor = {k: x for k, x in found.items() if _AHEAD not in k}
            yield this[0], critic, actor
            this = following

    def _both(self, given: Mapping[str, Tensor]) -> Outputs:
        """A step of the actor, and on a branch of the graph one of the critic."""
        ahead = {k.removeprefix(_AHEAD): x for k, x in given.items() if _AHEAD in k}
        with self._branch.fork():
            fitted = self._fit(ahead)
        improved = self._improve({k: x for k, x in given.items() if _AHEAD not in k})
        self._branch.join()
        return improved | {_AHEAD + k: x for k, x in fitted.items()}

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
            columns |= {
                "penalty": penalties(legal),
                "floor": self._epsilon * uniform(legal) + LEAST,
            }
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
        length, num_unrolls, num_agents = action.shape
        written = batch.arrays["step_type"] != int(StepType.ABORTED)
        row = torch.arange(length, device=action.device).unsqueeze(1)
        last = (written * row).amax(0), torch.arange(num_unrolls, device=action.device)
        joint = last[0] * num_unrolls + last[1]  # [B] of the (L + 1) * B joint rows
        if hidden is None:
            logits = self._network_outputs(self.actor, inputs.rows(joint)).flatten(0, 1)
        else:
            logits = self._network_outputs(self.actor, inputs, hidden)[joint].flatten(0, 1)
        if mask is not None:
            mask = mask.view(-1, num_agents, mask.shape[-1])[joint].flatten(0, 1)
        pi = policy_probabilities(logits, mask, self._epsilon)
        action[last] = sample(pi, self._generator).view(num_unrolls, num_agents)

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
        return lambda_returns(
            t.reward,
            t.discount,
            value.view(length - 1, num_unrolls, num_agents),
            t.next_is_last,
            self._config.gamma,
            self._config.td_lambda,
        )

    def _critic_given(self, shuffled: Pass, rates: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Name the tensors of all minibatches for the critic's steps, each [n, ...].

        With g = 2 share of the action taken and 0 of the others, the gradient of
        sum share (q - target)^2 is g (q - target).
        """
        # 3. Critic: L = E[(Q(s, u) - y)^2], one minibatch after the other.
        action, target = shuffled.columns["action"], shuffled.columns["target"]
        g = one_hot(action, self._num_actions) * (2 * shuffled.share).flatten(0, 1).unsqueeze(-1)
        inputs, state = shuffled.inputs(shuffled.critic), shuffled.state(shuffled.critic_state)
        given = {"goal": shuffled.each(target).unsqueeze(-1), "of_error": shuffled.each(g), **rates}
        return named("critic", inputs, state) | given

    @torch.no_grad()
    def _fitted(self, shuffled: Pass, found: _Log) -> _Log:
        """Squared errors and values of the actions taken, and norms, of what `_fit` returns."""
        action, target = shuffled.columns["action"], shuffled.columns["target"]
        q_taken = taken(found["q"].flatten(0, 1), action).view_as(shuffled.share)
        error = (q_taken - target.view_as(q_taken)).square()
        return {"error": error, "q": q_taken, "critic_norm": found["norm"]}

    def _fit(self, given: Mapping[str, Tensor]) -> Outputs:
        """Fit the critic to a minibatch.

        Args:
            given: see `_critic_given`.

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
        return self._value_steps(given)["out"].flatten(0, 1)

    def _actor_given(self, shuffled: Pass, rates: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Name the tensors of all minibatches for the actor's steps, each [n, ...]."""
        # 4. Q of all own actions by the critic just fitted, [n * M, A, K].
        with torch.no_grad():
            q = self._values(shuffled)
            lead = taken(q, shuffled.columns["action"]).unsqueeze(-1) - q
        inputs, state = shuffled.inputs(shuffled.actor), shuffled.state(shuffled.actor_state)
        columns = {k: shuffled.each(x) for k, x in shuffled.columns.items() if k != "target"}
        given = {"share": shuffled.share, "cost": shuffled.cost, "lead": shuffled.each(lead)}
        given |= {**{f"column/{name}": x for name, x in columns.items()}, **rates}
        return named("actor", inputs, state) | given

    def _before_improving(self, given: Mapping[str, Tensor]) -> Outputs:
        """Weights of the gradient by the softmax, for all minibatches of a block.

        Args:
            given: see `_actor_given`.

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
            given: see `_actor_given` and `_before_improving`.

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

    def _after_improving(self, given: Mapping[str, Tensor], found: Outputs) -> Outputs:
        """What `_means` needs of a block of minibatches, [n, M, A]: gains, their weights, ..."""
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
    def _means(self, log: list[tuple[Pass, _Log, _Log]], rows: Rows, env_steps: Tensor) -> Tensor:
        """`_logged`: means over the minibatches in which anything counts, then over the batch."""
        if not log:
            means = self._sharing.new_zeros(len(self._of_steps))
        else:
            every = [
                {"share": shuffled.share, **critic, **actor} for shuffled, critic, actor in log
            ]
            found = {name: torch.cat([of[name] for of in every]) for name in every[0]}
            share, error, q = found["share"], found["error"], found["q"]  # [N, M, A]
            gain, cost, entropy = found["gain"], found["cost"], -found["order"]
            advantage, told = found["advantage"], [x for k, x in found.items() if k[:4] == "told"]
            sharing = log[0][0].sharing
            deviation = deviations(advantage, share, sharing, self._group).sum()
            if told:  # of the entropy what the loss contains
                told.append(entropy * (1 - told[1]))
            by_row = torch.stack([error, q, entropy, *told]).flatten(1)
            error, q, entropy, *told = by_row @ share.flatten()
            of_loss = told.pop() if told else entropy
            loss = (gain * cost).sum() - self._schedule.entropy_weight * of_loss
            number = torch.cat([shuffled.counts for shuffled, _, _ in log]).sum().clamp_min(1)
            summed = torch.stack([error, q, entropy, loss, deviation, *told]) / self._num_slices
            norms = torch.stack([found["critic_norm"], found["actor_norm"]]).sum(1)
            means = torch.cat([summed, norms]) / number
            means = mean_of_told(means, told, len(_BY_ROW))
        target, weight = rows.columns["target"], rows.weight
        counted, mean = weight.sum(), (target * weight).sum()
        self._group.sum_([counted, mean, env_steps])
        counted = counted.clamp_min(1)
        mean = mean / counted
        squares = ((target - mean).square() * weight).sum()
        self._group.sum_([squares])
        variance = squares / counted
        explained = 1 - means[0] / variance.clamp_min(1e-8)
        return torch.cat([means, torch.stack([mean, variance.sqrt(), explained, self._epsilon])])


build = Coma

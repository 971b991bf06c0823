"""MAPPO and IPPO: proximal policy optimisation for teams.

Yu, Velu, Vinitsky, Gao, Wang, Bayen, Wu 2022, "The Surprising Effectiveness of PPO in Cooperative
Multi-Agent Games" (arXiv:2103.01955): each agent's clipped policy gradient, with a value function
that sees the global state while learning (MAPPO) or only what the agent sees (IPPO, de Witt et al.
2020, arXiv:2011.09533), advantages by GAE, values normalised by running statistics, several passes
over each rollout. Discrete or continuous actions, parameters shared or one set for each agent, with
memory or without.
"""

from collections.abc import Callable, Mapping

import torch
from pydantic import Field
from torch import Tensor, nn
from typing_extensions import override

from learner_service.algorithms import options
from learner_service.algorithms.imitation import LOGGED, advice, expert_column, mean_of_told
from learner_service.algorithms.mappo_policy import (
    Actor,
    MappoPolicy,
    policy_extras,
    policy_outputs,
    require_one_trunk,
)
from learner_service.algorithms.minibatches import (
    Pass,
    Rows,
    counted_actions,
    uncounted_never_taken,
)
from learner_service.algorithms.on_policy import OnPolicyAlgorithm, RecurrentStates, each
from learner_service.algorithms.returns import (
    clipped_surrogate,
    lambda_returns,
    moments_of_sets,
    most_gain,
    of_agents,
    vtrace_returns,
)
from learner_service.algorithms.running_moments import CLIPPED
from learner_service.algorithms.steps import fed, named
from learner_service.algorithms.value_norm import ValueNorm
from learner_service.networks.casting import cast_weights
from learner_service.networks.distributions import Categorical, Normal, logged_entropy
from learner_service.networks.forward import forward, forward_both
from learner_service.networks.inputs import CriticInputs, Inputs
from learner_service.networks.recurrent import RecurrentState, recurrent_states
from learner_service.runtime.cuda_graph import Outputs
from learner_service.runtime.readback import to_host
from learner_service.storage.rollout import Batch, Transitions, transitions
from shared.spec import ACTION_MASK


class Config(options.OnPolicyCriticConfig):
    """Options of MAPPO; the defaults are those that EPyMARL found good on small tasks."""

    centralized: bool = Field(True, description="false: IPPO, values from own observations alone")
    share_trunk: bool = Field(
        False,
        description="one network gives policy and value, at actor_lr; needs centralized=false",
    )
    share_encoder: options.ShareEncoder = False
    value_weight: float = Field(0.5, gt=0, description="share_trunk: weight of the value loss")
    batch_size: options.BatchSize = 1024
    batch_number: options.BatchNumber = 4
    data_passes: options.DataPasses = 4
    gae_lambda: float = Field(0.95, ge=0, le=1, description="0: one-step TD, 1: Monte Carlo")
    vtrace_clip: float = Field(
        0.0,
        ge=0,
        description="correct targets and advantages of rows that older policies acted, by V-trace "
        "with importance ratios up to this (IMPALA: 1); 0: no correction. Costs a forward pass",
    )
    actor_lr: options.ActorRate = 5e-4
    critic_lr: options.CriticRate = 5e-4
    clip_ratio: float = Field(0.2, gt=0, description="bound on the policy's change in an update")
    entropy_weight: options.EntropyWeight = 0.01
    normalize_values: bool = Field(True, description="learn values in units of their deviation")
    initial_log_std: float = Field(-0.5, description="continuous: log deviation at the start")


_BY_ROW = ("actor_loss", "critic_loss", "entropy", "clip_fraction", "kl")
_NORMS = ("actor_grad_norm", "critic_grad_norm")
_OF_THE_BATCH = ("return_mean", "advantage_std", "explained_variance")


class Mappo(OnPolicyAlgorithm):
    """See the module. Used by the thread that learns."""

    POLICY, IMITATES = MappoPolicy, True
    _OF_BATCH = len(_OF_THE_BATCH)
    _columns = ("log_prob", "advantage", "target")
    actor: Actor
    _config: Config

    def _build(self) -> None:
        """pi(u | o) of each agent, and V(s), V(o), or a value beside the policy's outputs."""
        c, spec = self._config, self._spec
        self.extras = policy_extras(spec)
        self._critic_inputs = self._actor_inputs
        if c.centralized:
            self._critic_inputs = CriticInputs(spec, self._options, actions=False)
        if c.share_trunk:
            require_one_trunk(c, self._network, self._actor_inputs.shape.image)
        shape = self._critic_inputs.shape
        encoder = self._shared_encoder(shape)
        net = self._make_actor(policy_outputs(spec) + int(c.share_trunk), encoder)
        self.actor = Actor(net, spec, self._slices, c.initial_log_std).to(self._device)
        self._actor_optimizer = self._adam(self.actor, c.actor_lr, eps=1e-5)
        self.critic: nn.Module | None = None
        if not c.share_trunk:
            # Without the state each agent's value is of what it sees alone.
            self.critic = self._make_critic(shape, 1, encoder, apart=not c.centralized)
            self._critic_optimizer = self._adam(self.critic, c.critic_lr, eps=1e-5)
        norms, imitation = _NORMS[: len(self._learned)], LOGGED if self._imitates else ()
        self._of_steps = (*_BY_ROW, *imitation, *norms)
        self._logged = (*self._of_steps, *_OF_THE_BATCH)
        self.value_norm = ValueNorm(self._sharing).to(self._device)

    def _learn(self, batch: Batch, number: int) -> Tensor:
        """The update.

        Args:
            batch: all that is learned from.
            number: of minibatches in each pass.
        """
        # 1. to 4. Advantages and targets, once.
        rows, of_batch = self._prepare(batch)
        # 5. and 6. Steps of the policy and of the value function.
        every: list[dict[str, Tensor]] = []
        for shuffled, rates in self._passes(rows, batch, number):
            found = self._steps(shuffled, rates)
            every.append(found | {"share": shuffled.share, "counts": shuffled.counts})
        if not every:
            return self._scalars(torch.zeros_like(self._total), of_batch)
        together = {name: torch.cat([of[name] for of in every]) for name in every[0]}
        return self._scalars(self._sums(together), of_batch)

    @override
    def _blocks_of_steps(self) -> dict[str, Callable[[Mapping[str, Tensor]], Outputs]]:
        return {"step": self._block_of_steps}

    def _block_of_steps(self, given: Mapping[str, Tensor]) -> Outputs:
        """Steps on the minibatches of a block, which may be captured."""
        own = self._fixed.of_block(given)
        found = self._steps(own, self._schedule.rates(own.counts))
        self._total.add_(self._sums(found | {"share": own.share, "counts": own.counts}))
        return {}

    def precision_scalars(self) -> dict[str, Tensor]:
        """See Algorithm; also how many returns the last update clipped."""
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

    def _fed(self, obs: dict[str, Tensor], *_: Tensor) -> tuple[Inputs, Inputs]:
        """Inputs of the policy and of the value function; whatever the actions."""
        actor = self._actor_inputs(obs)
        same = self._critic_inputs is self._actor_inputs
        return actor, actor if same else self._critic_inputs(obs)

    @torch.no_grad()
    def _prepare(self, batch: Batch) -> tuple[Rows, Tensor]:
        """Everything that is computed once per update; return_mean and what follows it."""
        arrays, t = batch.arrays, transitions(batch)  # T rows, B environments
        obs = {k: v.flatten(0, 1) for k, v in batch.observation().items()}
        action = arrays["raw_action" if "raw_action" in arrays else "action"][:-1].flatten(0, 1)
        action = action if action.is_floating_point() else action.long()  # [T * B, A, ...]
        weight = counted_actions(batch, t, self._spec.num_agents)  # [T, B, A]
        # 1. Values V of all rows, [T + 1, B, A].
        inputs, hidden = self._fed(obs), recurrent_states(batch)
        value, pi = self._value_and_policy(batch, inputs, hidden)
        log_prob = None if pi is None else pi.log_prob(action).view_as(weight)
        columns, of_batch = self._advantages(batch, t, weight, value, log_prob)
        columns = {"action": action, **{k: x.flatten(0, 1) for k, x in columns.items()}}
        columns |= expert_column(obs, len(action))
        if ACTION_MASK in obs:
            columns["mask"] = obs[ACTION_MASK]
        return self._rows(inputs, columns, weight.flatten(0, 1), hidden), of_batch

    def _advantages(
        self,
        batch: Batch,
        t: Transitions,
        weight: Tensor,
        value: Tensor,
        log_prob: Tensor | None,
        rows: Tensor | None = None,
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Columns of minibatches, [T, B, A]; return_mean and what follows it.

        Args:
            batch: of T + 1 rows.
            t: its transitions.
            weight: [T, B, A] 1 where an action counts, else 0.
            value: [T + 1, B, A] in units of the reward.
            log_prob: V-trace: [T, B, A] of the actions now.
            rows: see `ValueNorm.plausible`.
        """
        c, old_log_prob = self._config, batch.arrays["log_prob"][:-1]  # [T, B, A]
        # 2. Targets G and advantages A = G - V by GAE, or both by V-trace; [T, B, A].
        if log_prob is None:
            target = lambda_returns(
                t.reward, t.discount, value[1:], t.next_is_last, c.gamma, c.gae_lambda
            )
            advantage = target - value[:-1]
        else:
            log_ratio = log_prob - old_log_prob
            target, advantage = vtrace_returns(
                *(t.reward, t.discount, value, t.next_is_last, log_ratio.where(weight > 0, 0)),
                *(c.gamma, c.gae_lambda, c.vtrace_clip),
            )
        shape = weight.shape
        target, advantage, weight = (x.flatten(0, 1) for x in (target, advantage, weight))
        # 3. Advantages in units of their deviation, by parameter group.
        over = weight, self._sharing, self._group
        target_mean, target_variance = moments_of_sets(target, *over)  # [S]
        mean, variance = moments_of_sets(advantage, *over)
        std = variance.sqrt()
        explained = 1 - variance / target_variance.clamp_min(1e-8)
        centre, scale = of_agents(mean, self._sharing), of_agents(std, self._sharing) + 1e-8
        advantage = (advantage - centre) / scale
        # 4. Targets in units of their running deviation (Yu et al., section 5.1).
        if c.normalize_values:
            target = self.value_norm.plausible(target, weight, rows)
            self.value_norm.update(target, weight, self._group)
            target = self.value_norm.normalize(target)
        columns = {
            "log_prob": uncounted_never_taken(old_log_prob.flatten(0, 1), weight),
            "advantage": advantage,
            "target": target,
        }
        columns = {name: x.view(shape) for name, x in columns.items()}
        return columns, torch.stack([target_mean, std, explained]).mean(1)

    @override
    def _values_of_rows(
        self,
        inputs: tuple[Inputs, Inputs],
        states: RecurrentStates,
        action: Tensor,
        obs: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        # 1. Values V of all rows, and V-trace: log pi(u | o).
        if self.critic is None:
            out = value = self._forward(self.actor.network, inputs[0], states[0])
        else:
            value = self._forward(self.critic, inputs[1], states[1])
        found = {"value": value[..., -1]}
        if self._config.vtrace_clip:
            if self.critic is not None:
                out = self._forward(self.actor.network, inputs[0], states[0])
            pi = self.actor.distribution(out, obs.get(ACTION_MASK))
            found["log_prob"] = pi.log_prob(action)
        return found

    @override
    def _learnable(
        self, batch: Batch, values: Mapping[str, Tensor], rows: Tensor
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        t, value, log_prob = transitions(batch), values["value"], values.get("log_prob")
        weight = counted_actions(batch, t, self._spec.num_agents)
        if self._config.normalize_values:
            value = self.value_norm.denormalize(value)
        log_prob = None if log_prob is None else log_prob[:-1]
        columns, of_batch = self._advantages(batch, t, weight, value, log_prob, rows)
        return columns, weight, of_batch

    def _value_and_policy(
        self,
        batch: Batch,
        inputs: tuple[Inputs, Inputs],
        states: tuple[RecurrentState | None, RecurrentState | None],
    ) -> tuple[Tensor, Categorical | Normal | None]:
        """[T + 1, B, A] values of all rows, in units of the reward; V-trace: pi of those but last.

        Args:
            batch: of T + 1 rows.
            inputs: of the policy and of the value function.
            states: the same.
        """
        c, agents, obs = self._config, self._spec.num_agents, batch.observation()
        length, num_unrolls = batch.arrays["step_type"].shape

        def outputs(network: nn.Module, of: int) -> Tensor:
            return self._network_outputs(network, inputs[of], states[of])

        if self.critic is None:
            out = value = outputs(self.actor.network, 0)
        else:
            value = outputs(self.critic, 1)
            out = outputs(self.actor.network, 0) if c.vtrace_clip else value
        value = value[..., -1].view(length, num_unrolls, agents)
        if c.normalize_values:
            value = self.value_norm.denormalize(value)
        if not c.vtrace_clip:
            return value, None
        acted = (length - 1) * num_unrolls  # joint rows with an action; time is outermost
        mask = obs[ACTION_MASK].flatten(0, 1)[:acted] if ACTION_MASK in obs else None
        return value, self.actor.distribution(out[:acted], mask)

    def _given(self, shuffled: Pass) -> dict[str, Tensor]:
        """Name the tensors of all minibatches for the steps, each [n, ...]."""
        states = shuffled.state(shuffled.actor_state), shuffled.state(shuffled.critic_state)
        given = named("actor", shuffled.inputs(shuffled.actor), states[0])
        own = self.critic is not None and shuffled.critic is not shuffled.actor
        critic = shuffled.inputs(shuffled.critic) if own else Inputs(None, None)
        given |= named("critic", critic, states[1])
        given |= {f"column/{name}": shuffled.each(x) for name, x in shuffled.columns.items()}
        return given | {"share": shuffled.share, "cost": shuffled.cost}

    def _steps(self, shuffled: Pass, rates: Mapping[str, Tensor]) -> Outputs:
        """Steps on minibatches, one after the other; returns what `_sums` needs, [n, ...]."""
        given = self._given(shuffled)
        given |= {**self._before(given), **rates}
        return self._after(given, each(self._minibatch, given))

    @torch.no_grad()
    def _before(self, given: Mapping[str, Tensor]) -> Outputs:
        """Weights of the loss, for all minibatches together.

        Args:
            given: of `_given`.

        Returns:
            [n, M, A] those of ratios, the least that a ratio then costs, and those of minus
            entropies and of errors.
        """
        c, cost = self._config, given["cost"]
        return {
            "of_ratio": given["column/advantage"] * cost,
            "least": most_gain(given["column/advantage"], c.clip_ratio) * cost,
            "of_order": given["share"] * self._schedule.entropy_weight,
            "of_error": given["share"] * (2.0 if self.critic is not None else 2 * c.value_weight),
        }

    @torch.no_grad()
    def _after(self, given: Mapping[str, Tensor], found: Outputs) -> Outputs:
        """Return the terms of `_sums`, [n, M, A]: gains, entropies, and others."""
        gain = clipped_surrogate(
            found["log_ratio"], given["column/advantage"], self._config.clip_ratio
        )
        entropy = logged_entropy(found).expand_as(gain)
        return found | {"gain": gain, "entropy": entropy, "error": found["error"].square()}

    def _minibatch(self, given: Mapping[str, Tensor]) -> Outputs:
        """One step of the policy and of the value function.

        Args:
            given: of `_given` and `_before`, and learning rates.

        Returns:
            log ratios, errors, what entropies and advice need to be logged [M, A], and norms.
        """
        self._schedule.step(given)
        columns = {k.removeprefix("column/"): v for k, v in given.items() if k[:7] == "column/"}
        # 5. pi(u | o) and V of the minibatch, [M, A].
        with cast_weights(self._precision, *(network for _, network in self._learned)):
            pi, value = self._evaluate(given, columns.get("mask"))
        # 6. Both parts of the loss.
        terms, found = self._policy_terms(pi, given, columns)
        of_value, error = self._value_terms(value, given, columns)
        norms = self._precision.step_together(
            [*terms, *of_value], self._learned, self._config.max_grad_norm, self._num_slices
        )
        return found | {"error": error, "norms": norms}

    def _policy_terms(
        self, pi: Categorical | Normal, given: Mapping[str, Tensor], columns: Mapping[str, Tensor]
    ) -> tuple[list[tuple[Tensor, Tensor]], Outputs]:
        """The policy's part of the loss as outputs with their gradients, and what is logged of it.

        L = -E[min(r A, clip(r) A) + weight H], r = pi / pi_old; the first has the gradient of
        -E[r A] where it is not clipped.
        """
        action = columns["action"]
        expert = advice(columns, pi.log_prob, given["cost"])
        with torch.no_grad():
            log_ratio = pi.log_prob(action) - columns["log_prob"]
            cost = log_ratio.exp() * given["of_ratio"]
            slope = expert.spared(cost * (cost >= given["least"]))
            weighted = bool(self._config.entropy_weight)
            of_order = expert.spared(given["of_order"]) if weighted else None
            terms = pi.gradient(action, slope, of_order) + expert.terms
        told = {f"told {i}": x for i, x in enumerate(expert.logged)}
        return terms, {"log_ratio": log_ratio, **pi.logged(), **told}

    @torch.no_grad()
    def _value_terms(
        self, value: Tensor, given: Mapping[str, Tensor], columns: Mapping[str, Tensor]
    ) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
        """The same of values [M, A] for E[(V - G)^2], and errors V - G."""
        with torch.enable_grad():
            value = value.float()
        error = value - columns["target"]
        return [(value, error * given["of_error"])], error

    def _evaluate(
        self, given: Mapping[str, Tensor], mask: Tensor | None
    ) -> tuple[Categorical | Normal, Tensor]:
        """The policy's distribution and values [M, A]."""
        (actor, state), (critic, critic_state) = fed("actor", given), fed("critic", given)
        if self.critic is None:
            out, _ = forward(self.actor.network, actor, state)
            return self.actor.distribution(out, mask), out[..., -1]
        same = critic.stored is None and critic.vector is None
        out, value = forward_both(
            (self.actor.network, self.critic),
            (actor, actor if same else critic),
            (state, critic_state),
        )
        return self.actor.distribution(out, mask), value.squeeze(-1)

    @torch.no_grad()
    def _sums(self, found: Mapping[str, Tensor]) -> Tensor:
        """`_of_steps` of minibatches, summed over them, and the number of those that count.

        Args:
            found: of `_steps`, share and counts, [n, ...].
        """
        gain, log_ratio = found["gain"], found["log_ratio"]
        entropy, error = found["entropy"], found["error"]
        told = [x for name, x in found.items() if name[:4] == "told"]
        share = found["share"].flatten()  # of [N, M, A]
        grown = torch.expm1(log_ratio)  # r - 1
        clipped = (grown.abs() > self._config.clip_ratio).float()
        loss = -torch.addcmul(gain, entropy, self._schedule.entropy_weight)
        if told:
            loss = loss * (1 - told[1])
        # Schulman 2020, "Approximating KL divergence": (r - 1) - log r is unbiased, never < 0.
        rows = torch.stack([loss, error, entropy, clipped, grown - log_ratio, *told]).flatten(1)
        sums = [rows @ share / self._num_slices, found["norms"].sum(0)]
        return torch.cat([*sums, found["counts"].sum().view(1)])

    @torch.no_grad()
    def _scalars(self, total: Tensor, of_batch: Tensor) -> Tensor:
        """See OnPolicyAlgorithm; means over the minibatches in which anything counts."""
        means = total[:-1] / total[-1].clamp_min(1)
        if self._imitates:
            means = mean_of_told(means, [means], len(_BY_ROW))
        return torch.cat([means, of_batch])


build = Mappo

"""COMA: counterfactual multi-agent policy gradients.

Foerster, Farquhar, Afouras, Nardelli, Whiteson 2018, "Counterfactual Multi-Agent Policy Gradients"
(arXiv:1705.08926), as set up for terrain monitoring by Westheider, Rueckin, Popovic 2023,
"Multi-UAV Adaptive Path Planning Using Deep Reinforcement Learning" (arXiv:2303.01150): one actor
shared by all agents (or one for each), one centralised critic that gives a Q value to each own
action while the others' actions are held fixed, TD(lambda) targets from a target critic, and
several passes over each rollout in minibatches, critic first.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from learner_service.algorithms.augmented import passes
from learner_service.algorithms.base import (
    Algorithm,
    Policy,
    require_discrete,
)
from learner_service.algorithms.coma_policy import ComaPolicy
from learner_service.algorithms.counterfactual import (
    bounded_log,
    counterfactual_advantage,
    taken,
)
from learner_service.algorithms.exploration import (
    Exploration,
    mixture,
    penalties,
    policy_probabilities,
)
from learner_service.algorithms.frozen import FrozenAgents
from learner_service.algorithms.minibatches import (
    Minibatch,
    Pass,
    Rows,
    deviations,
    number_of_minibatches,
    uncounted_never_taken,
)
from learner_service.algorithms.options import CriticConfig, OnPolicyConfig
from learner_service.algorithms.returns import (
    clipped_surrogate,
    lambda_returns,
    of_agents,
    polyak_update,
    sharing_agents,
)
from learner_service.algorithms.schedule import Schedule
from learner_service.networks.building import (
    build_network,
    input_options,
    is_stacked,
)
from learner_service.networks.casting import cast_weights
from learner_service.networks.distributions import one_hot, sample, uniform
from learner_service.networks.forward import forward, forward_rows
from learner_service.networks.inputs import ActorInputs, CriticInputs, Inputs
from learner_service.networks.recurrent import Past, memory_size, pasts
from learner_service.networks.snapshot import publish
from learner_service.networks.stacked import count_slices
from learner_service.runtime.adam import Adam
from learner_service.runtime.precision import Precision
from learner_service.storage.rollout import Batch, Transitions, transitions
from learner_service.storage.storage import OBSERVATION
from shared.config import PluginConfig
from shared.spec import ACTION_MASK, AGENT_MASK, EnvSpec
from shared.timestep import StepType


class Config(CriticConfig, OnPolicyConfig):
    """Options of COMA; the defaults are those of the terrain system's authors."""

    batch_size: int = Field(
        60,
        ge=0,
        description="agent-transitions in a minibatch, of all learners together; 0: as many as fit "
        "the memory",
    )
    batch_number: int = Field(
        5,
        ge=1,
        description="minibatches; an update starts at batch_size * batch_number rows; it "
        "has more minibatches where more environments act than give so many",
    )
    data_passes: int = Field(5, ge=1, description="passes over each rollout")
    gamma: float = Field(0.99, ge=0, le=1, description="discount factor")
    td_lambda: float = Field(0.8, ge=0, le=1, description="0: one-step TD, 1: Monte Carlo")
    actor_lr: float = Field(1e-5, gt=0, description="Adam's learning rate of the actor")
    critic_lr: float = Field(1e-4, gt=0, description="Adam's learning rate of the critic")
    final_lr_fraction: float = Field(
        1.0, gt=0, le=1, description="learning rates fall linearly to this share of themselves"
    )
    anneal_updates: int = Field(
        0, ge=0, description="updates over which learning rates and entropy weight fall; 0: never"
    )
    max_grad_norm: float = Field(10.0, ge=0, description="gradient norm is clipped; 0: never")
    epsilon_start: float = Field(0.5, ge=0, le=1, description="share of uniform random actions")
    epsilon_end: float = Field(0.02, ge=0, le=1, description="the share once annealed")
    epsilon_env_steps: int = Field(
        150_000, ge=1, description="environment steps over which epsilon is annealed linearly"
    )
    target_update: Literal["hard", "soft"] = Field("hard", description="how the target follows")
    target_every_updates: int = Field(10, ge=1, description="hard: updates between copies")
    target_tau: float = Field(0.01, gt=0, le=1, description="soft: share moved per update")
    entropy_weight: float = Field(0.0, ge=0, description="weight of the policy's entropy, per nat")
    clip_ratio: float = Field(
        0.0,
        ge=0,
        description="bound on the policy's change over the data passes, as PPO's clipped "
        "surrogate with the counterfactual advantage; 0: the plain policy gradient",
    )
    normalize_advantage: bool = Field(False, description="divide advantages by their deviation")


_OF_STEPS = (
    *("critic_loss", "q_mean", "entropy", "actor_loss", "advantage_std"),
    *("critic_grad_norm", "actor_grad_norm"),
)
_OF_THE_BATCH = ("target_mean", "target_std", "explained_variance", "epsilon")


# Rates of a minibatch, and what `_critic_pass` and `_actor_pass` return: tensors [n, ...].
_Rates = tuple[Tensor, ...]
_Log = tuple[Tensor, ...]


class Coma(Algorithm[Batch]):
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
        """Build actor, critic, target critic and optimisers.

        Raises:
            SpecError: if the actions are not discrete.
            ConfigError: if share_parameters or frozen_agents do not fit the agents.
        """
        self._num_actions = num_actions = require_discrete("coma", spec)
        super().__init__(precision, device, seed)
        self._config, self._spec = config, spec
        self._static = device.type != "cpu"  # no shape depends on what rows hold
        self.unroll_length = config.unroll_steps
        self.unrolls_per_update = config.unrolls_per_update
        self.rows_per_update = config.batch_size * config.batch_number
        options = input_options(network, spec)
        self._actor_inputs = ActorInputs(spec, options)
        self._critic_inputs = CriticInputs(spec, options)
        slices = config.slices(spec.num_agents)
        self._frozen = FrozenAgents(config.frozen_agents, slices, device)
        self._num_slices = count_slices(slices)
        self._sharing = sharing_agents(slices, device)
        # Minibatches are of single agents' rows only where each is learned from by itself.
        image = self._actor_inputs.shape.image
        of_critic = config.network_of_critic(network)
        stacked = is_stacked(network, image) and is_stacked(of_critic, image)
        self._joint = self._num_slices > 1 or not stacked
        # What a critic is fed for one agent holds what the others did: agents stay apart.
        networks = (network, self._actor_inputs, False), (of_critic, self._critic_inputs, True)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.actor, self.critic = (
                build_network(
                    own, inputs.shape, num_actions, slices, may_remember=True, apart=apart
                ).to(device)
                for own, inputs, apart in networks
            )
        self.memory_size = memory_size(self.actor)
        self.target = copy.deepcopy(self.critic).requires_grad_(False)
        self._exploration = Exploration(
            config.epsilon_start, config.epsilon_end, config.epsilon_env_steps, num_actions
        ).to(device)
        self._prepare_learning()
        self._captured = self._capture("update", self._learn)
        self._counts = {"updates": 0}

    def _prepare_learning(self) -> None:
        """Make what changes the networks, and note what a checkpoint holds of it."""
        config, device = self._config, self._device
        how: dict[str, Any] = {"fused": True, "capturable": device.type == "cuda"}
        self._actor_optimizer = Adam(self.actor.parameters(), config.actor_lr, **how)
        self._critic_optimizer = Adam(self.critic.parameters(), config.critic_lr, **how)
        self._parts |= {
            "actor": self.actor,
            "critic": self.critic,
            "target": self.target,
            "actor_optimizer": self._actor_optimizer,
            "critic_optimizer": self._critic_optimizer,
            "exploration": self._exploration,
        }
        self._schedule = Schedule(
            [self._actor_optimizer, self._critic_optimizer],
            config.entropy_weight,
            config.anneal_updates,
            config.final_lr_fraction,
            device,
            static=self._static,
        )

    @property
    def _epsilon(self) -> Tensor:
        """The share of uniform random actions, a scalar."""
        return self._exploration.epsilon

    def update(self, batch: Batch) -> dict[str, Tensor]:
        """One COMA update: targets once, then passes of critic and actor minibatches.

        Returns:
            critic_loss, q_mean, actor_loss, entropy, advantage_std, critic_grad_norm,
            actor_grad_norm, target_mean, target_std, explained_variance, epsilon: means over the
            update. All but epsilon are 0 if no agent acted.
        """
        c = self._config
        self._schedule.set(self._counts["updates"])
        number = number_of_minibatches(c.batch_number, batch.times, self._group)
        scalars = self._captured(batch.arrays, number=number)["scalars"].clone()
        self._schedule.restore()
        self._counts["updates"] += 1
        if c.target_update == "soft":
            polyak_update(self.target, self.critic, c.target_tau)
        elif self._counts["updates"] % c.target_every_updates == 0:
            polyak_update(self.target, self.critic, 1.0)
        return dict(zip((*_OF_STEPS, *_OF_THE_BATCH), scalars.unbind(), strict=True))

    def _learn(self, arrays: Mapping[str, Tensor], *, number: int) -> dict[str, Tensor]:
        """The update but for the target critic, on the device from end to end.

        Args:
            arrays: of a Batch.
            number: of minibatches in each pass.
        """
        self._exploration.anneal()
        batch = Batch(dict(self._frozen.hidden(arrays)), [])
        rows, count = self._prepare(batch), self._config.data_passes
        log: list[tuple[Pass, _Log, _Log]] = []
        single = not (self._joint or rows.actor_past)
        how = batch, self.augment, self._generator, self._fed, single
        for seen in passes(rows, count, *how):
            shuffled = seen.shuffled(number, self._generator)
            if shuffled.parts:
                rates = self._schedule.rates(shuffled.parts)
                critic = self._critic_pass(shuffled, rates)
                log.append((shuffled, critic, self._actor_pass(shuffled, rates)))
        scalars = self._means(log)
        target, weight = rows.columns["target"], rows.weight
        counted, mean, env_steps = weight.sum(), (target * weight).sum(), batch.env_steps()
        self._group.sum_([counted, mean, env_steps])
        counted = counted.clamp_min(1)
        mean = mean / counted
        squares = ((target - mean).square() * weight).sum()
        self._group.sum_([squares])
        variance = squares / counted
        explained = 1 - scalars[0] / variance.clamp_min(1e-8)
        once = torch.stack([mean, variance.sqrt(), explained, self._epsilon])
        self._exploration.advance(env_steps)
        return {"scalars": torch.cat([scalars, once])}

    @torch.no_grad()
    def _prepare(self, batch: Batch) -> Rows:
        """Everything that is computed once per update, as joint rows."""
        c, arrays = self._config, batch.arrays
        action = arrays["action"].long()  # [L + 1, B, A]
        length, num_unrolls, num_agents = action.shape
        observation = {k: v.flatten(0, 1) for k, v in batch.observation().items()}
        actor_inputs = self._actor_inputs(observation)
        actor_past, critic_past = pasts(batch)
        mask = observation.get(ACTION_MASK)
        rows_mask = None if mask is None else mask.flatten(0, 1)
        self._choose_last(batch, action, actor_inputs, rows_mask, actor_past)
        critic_inputs = self._critic_inputs(observation, action.flatten(0, 1))
        t = transitions(batch)
        columns = {
            "action": action[:-1].flatten(0, 1),
            "target": self._targets(t, critic_inputs, action, critic_past).flatten(0, 1),
        }
        if mask is not None:
            legal = mask[: (length - 1) * num_unrolls]
            columns |= {"penalty": penalties(legal), "floor": self._epsilon * uniform(legal)}
        weight = t.valid.unsqueeze(-1).expand(-1, -1, num_agents).float()
        alive = arrays.get(OBSERVATION + AGENT_MASK)
        if alive is not None:
            weight = weight * (alive[:-1] != 0)
        weight = weight.flatten(0, 1)
        if c.clip_ratio:
            logits = self._forward(self.actor, actor_inputs, actor_past)
            pi = policy_probabilities(logits, rows_mask, self._epsilon)
            log_prob = taken(bounded_log(pi).view(*action.shape, -1), action)
            log_prob = log_prob[:-1].flatten(0, 1)
            columns["log_prob"] = uncounted_never_taken(log_prob, weight)
        return Rows(
            actor_inputs,
            critic_inputs,
            columns,
            weight,
            self._sharing,
            self._static,
            actor_past and actor_past.without_last(),
            critic_past and critic_past.without_last(),
            self._group,
        )

    def _fed(self, observation: dict[str, Tensor], action: Tensor) -> tuple[Inputs, Inputs]:
        """Inputs of actor and critic."""
        return self._actor_inputs(observation), self._critic_inputs(observation, action)

    def _choose_last(
        self, batch: Batch, action: Tensor, inputs: Inputs, mask: Tensor | None, past: Past | None
    ) -> None:
        """Set the actions [L + 1, B, A] of the unrolls' last rows to what the policy would do.

        An unroll's last row has no action yet. In an unroll that was closed before it was full,
        the last row is the one before the padding.
        """
        length, num_unrolls, num_agents = action.shape
        written = batch.arrays["step_type"] != int(StepType.VOID)
        row = torch.arange(length, device=action.device).unsqueeze(1)
        last = (written * row).amax(0), torch.arange(num_unrolls, device=action.device)
        joint = last[0] * num_unrolls + last[1]  # [B] of the (L + 1) * B joint rows
        if past is None:
            logits = self._forward(self.actor, inputs.rows(joint))
        else:
            every = self._forward(self.actor, inputs, past)
            logits = every.view(-1, num_agents, every.shape[-1])[joint].flatten(0, 1)
        if mask is not None:
            mask = mask.view(-1, num_agents, mask.shape[-1])[joint].flatten(0, 1)
        pi = policy_probabilities(logits, mask, self._epsilon)
        action[last] = sample(pi, self._generator).view(num_unrolls, num_agents)

    def _targets(self, t: Transitions, inputs: Inputs, action: Tensor, past: Past | None) -> Tensor:
        """[L, B, A] TD(lambda) targets from the target critic's values of rows 1 to L."""
        length, num_unrolls, num_agents = action.shape
        if past is None:
            q = self._forward(self.target, inputs.rows(slice(num_unrolls, None)))
        else:
            q = self._forward(self.target, inputs, past)[num_unrolls * num_agents :]
        value = q.gather(-1, action[1:].flatten().unsqueeze(-1))
        return lambda_returns(
            t.reward,
            t.discount,
            value.view(length - 1, num_unrolls, num_agents),
            t.next_is_last,
            self._config.gamma,
            self._config.td_lambda,
        )

    def _forward(self, network: nn.Module, inputs: Inputs, past: Past | None = None) -> Tensor:
        """[R, K] for all agent-rows."""
        agents = self._spec.num_agents
        return forward_rows(network, inputs, self._precision, agents, past).flatten(0, 1)

    def _critic_pass(self, shuffled: Pass, rates: Sequence[_Rates]) -> _Log:
        """Fit the critic; returns squared errors and values of the actions taken, and norms.

        With g = 2 share of the action taken and 0 of the others, the gradient of
        sum share (q - target)^2 is g (q - target).
        """
        action, target = shuffled.columns["action"], shuffled.columns["target"]
        g = one_hot(action, self._num_actions) * (2 * shuffled.share).flatten(0, 1).unsqueeze(-1)
        values, norms = [], []
        for part, rate, goal, of_error in zip(
            shuffled.parts,
            rates,
            target.unsqueeze(-1).chunk(len(rates)),
            g.chunk(len(rates)),
            strict=True,
        ):
            self._schedule.step(rate)
            with cast_weights(self._precision, self.critic):
                out, _ = forward(self.critic, part.critic, part.critic_past)
            q = out.float()
            norms += self._precision.step_together(
                [(q, (q.detach() - goal) * of_error)],
                [(self._critic_optimizer, self.critic)],
                self._config.max_grad_norm,
                self._num_slices,
            )
            values.append(q.detach())
        q_taken = taken(torch.cat(values), action).view_as(shuffled.share)
        return (q_taken - target.view_as(q_taken)).square(), q_taken, torch.stack(norms)

    @torch.no_grad()
    def _values(self, shuffled: Pass) -> Tensor:
        """[n * M, A, K] the critic's values of all minibatches."""
        parts = shuffled.parts
        if parts[0].critic_past is None:
            agents = shuffled.critic.agents
            return forward_rows(self.critic, shuffled.critic, self._precision, agents)
        found = []
        with cast_weights(self._precision, self.critic):
            for part in parts:
                q, _ = forward(self.critic, part.critic, part.critic_past)
                found.append(q.float())
        return torch.cat(found)

    def _actor_pass(self, shuffled: Pass, rates: Sequence[_Rates]) -> _Log:
        """Improve the policy; returns gains, their weights, entropies, advantages, and norms."""
        q = self._values(shuffled)
        q_taken = taken(q, shuffled.columns["action"])
        of_order = shuffled.share * self._schedule.entropy_weight
        log = []
        for part, rate, *values in zip(
            shuffled.parts,
            rates,
            q.chunk(len(rates)),
            q_taken.chunk(len(rates)),
            of_order,
            strict=True,
        ):
            self._schedule.step(rate)
            log.append(self._actor_step(part, *values))
        gain, cost, order, advantage, norm = (torch.stack(x) for x in zip(*log, strict=True))
        return gain, cost, -order, advantage, norm

    def _actor_step(
        self, part: Minibatch, q: Tensor, q_taken: Tensor, of_order: Tensor
    ) -> tuple[Tensor, ...]:
        """Gains, their weights, minus entropies and advantages [M, A]; the gradient's norm."""
        c, columns = self._config, part.columns
        with cast_weights(self._precision, self.actor):
            logits, _ = forward(self.actor, part.actor, part.actor_past)
        floor = columns.get("floor", self._exploration.floor)
        pi = mixture(logits.float(), columns.get("penalty"), self._exploration.keep, floor)
        log_pi = bounded_log(pi)
        log_prob = taken(log_pi, columns["action"])
        advantage = scaled = counterfactual_advantage(q, pi, q_taken)
        if c.normalize_advantage:
            deviation = deviations(advantage, part.share, part.sharing, self._group) + 1e-6
            scaled = advantage / of_agents(deviation, part.sharing)
        if c.clip_ratio:
            gain = clipped_surrogate(log_prob - columns["log_prob"], scaled, c.clip_ratio)
            cost = part.cost
        else:
            gain, cost = log_prob, part.cost * scaled
        order = (pi * log_pi).sum(-1)  # minus the entropy
        terms = [(gain, cost)]
        if c.entropy_weight:
            terms.append((order, of_order))
        (norm,) = self._precision.step_together(
            terms, [(self._actor_optimizer, self.actor)], c.max_grad_norm, self._num_slices
        )
        return gain.detach(), cost, order.detach(), advantage, norm

    @torch.no_grad()
    def _means(self, log: list[tuple[Pass, _Log, _Log]]) -> Tensor:
        """`_OF_STEPS`: means over the minibatches in which anything counts."""
        if not log:
            return self._sharing.new_zeros(len(_OF_STEPS))
        every = [(shuffled.share, *critic, *actor) for shuffled, critic, actor in log]
        share, error, q, critic_norm, gain, cost, entropy, advantage, actor_norm = (
            torch.cat(x) for x in zip(*every, strict=True)
        )  # [N, M, A], and norms [N]
        sharing = log[0][0].parts[0].sharing
        deviation = deviations(advantage, share, sharing, self._group).sum()
        error, q, entropy = torch.stack([error, q, entropy]).flatten(1) @ share.flatten()
        loss = (gain * cost).sum() - self._schedule.entropy_weight * entropy
        counts = [part.counts for shuffled, _, _ in log for part in shuffled.parts]
        number = torch.stack(counts).sum().clamp_min(1)
        summed = torch.stack([error, q, entropy, loss, deviation]) / self._num_slices
        norms = torch.stack([critic_norm, actor_norm]).sum(1)
        return torch.cat([summed, norms]) / number

    def make_policy(self) -> ComaPolicy:
        """See Algorithm."""
        return ComaPolicy(self.actor, self._actor_inputs, self._epsilon, self._precision)

    @torch.no_grad()
    def publish(self, policy: Policy) -> None:
        """See Algorithm."""
        assert isinstance(policy, ComaPolicy)
        publish(self.actor, policy.actor)
        policy.epsilon.copy_(self._epsilon)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See Algorithm."""
        counts, parts = state["counts"], state["parts"]
        if "exploration" not in parts:  # older checkpoints have it among the numbers
            names = ("env_steps", "epsilon")
            exploration = {name: torch.tensor(float(counts[name])) for name in names}
            parts = {**parts, "exploration": exploration}
        super().load_state_dict({**state, "parts": parts})
        self._counts = {"updates": counts["updates"]}


build = Coma

"""COMA: counterfactual multi-agent policy gradients.

Foerster, Farquhar, Afouras, Nardelli, Whiteson 2018, "Counterfactual Multi-Agent Policy Gradients"
(arXiv:1705.08926), as set up for terrain monitoring by Westheider, Rueckin, Popovic 2023,
"Multi-UAV Adaptive Path Planning Using Deep Reinforcement Learning" (arXiv:2303.01150): one actor
shared by all agents (or one for each), one centralised critic that gives a Q value to each own
action while the others' actions are held fixed, TD(lambda) targets from a target critic, and
several passes over each rollout in minibatches, critic first.
"""

import copy
from collections.abc import Mapping
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from learner_service.algorithms.base import (
    SHARING,
    Algorithm,
    OnPolicyConfig,
    Policy,
    require_discrete,
)
from learner_service.algorithms.minibatches import Minibatch, Rows
from learner_service.algorithms.returns import (
    annealed,
    clipped_surrogate,
    lambda_returns,
    polyak_update,
    sharing_agents,
)
from learner_service.networks.building import build_network, input_options, is_stacked
from learner_service.networks.distributions import explore, over_actions, sample
from learner_service.networks.forward import forward, forward_rows
from learner_service.networks.inputs import ActorInputs, CriticInputs, Inputs
from learner_service.networks.recurrent import Past, memory_size, pasts
from learner_service.networks.snapshot import publish, snapshot
from learner_service.networks.stacked import Sharing, count_slices, resolve_sharing
from learner_service.runtime.adam import Adam
from learner_service.runtime.precision import Precision
from learner_service.storage.rollout import Batch, Transitions, transitions
from shared.config import PluginConfig
from shared.spec import ACTION_MASK, AGENT_MASK, EnvSpec
from shared.timestep import StepType


class Config(OnPolicyConfig):
    """Options of COMA; the defaults are those of the terrain system's authors."""

    share_parameters: Sharing = Field(
        True,
        description="false: each agent has networks of its own; or the number of each agent's "
        "networks: [0, 0, 1] lets the first two share",
    )
    batch_size: int = Field(
        60, ge=0, description="agent-transitions in a minibatch; 0: as many as fit the memory"
    )
    batch_number: int = Field(
        5,
        ge=1,
        description="minibatches; an update starts at batch_size * batch_number rows; it "
        "has more minibatches where more environments act than give so many",
    )
    data_passes: int = Field(5, ge=1, description="passes over each rollout")
    unroll_steps: int = Field(
        0,
        ge=0,
        description="transitions of an unroll; 0: so many that one unroll of every environment "
        "makes an update, 16 to 128; in the async pipeline of every one that the learner can use",
    )
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


def policy_probabilities(logits: Tensor, mask: Tensor | None, epsilon: Tensor | float) -> Tensor:
    """Behaviour policy: (1 - epsilon) softmax over legal actions + epsilon uniform over them.

    Args:
        logits: [R, K].
        mask: [R, K] 1 = legal, or None if all are; every row has a legal action.
        epsilon: scalar.

    Returns:
        [R, K] probabilities, exactly zero where illegal.
    """
    if mask is not None:
        logits = logits.masked_fill(mask == 0, float("-inf"))
    return explore(over_actions(torch.softmax, logits), mask, epsilon)


def counterfactual_advantage(q: Tensor, pi: Tensor, action: Tensor) -> Tensor:
    """How much better the action taken was than this agent's average, the others held fixed.

    A = Q(s, u) - sum_k pi(k) Q(s, (u_without_a, k)). No gradient reaches q or pi.
    Foerster et al. 2018, section 4 (arXiv:1705.08926).

    Args:
        q: [R, K] critic's value of each own action, the other agents' actions held fixed.
        pi: [R, K] probabilities of the acting policy.
        action: [R] int64, the action taken.

    Returns:
        [R] advantage.
    """
    q, pi = q.detach(), pi.detach()
    taken = q.gather(-1, action.unsqueeze(-1)).squeeze(-1)
    return taken - (pi * q).sum(-1)


class ComaPolicy(Policy):
    """The actor and its epsilon, frozen."""

    def __init__(
        self, actor: nn.Module, inputs: ActorInputs, epsilon: Tensor, precision: Precision
    ) -> None:
        self.actor = snapshot(actor, precision)
        self.epsilon = epsilon.clone()
        self.memory_size = memory_size(actor)
        self._inputs, self._precision = inputs, precision

    @torch.inference_mode()
    def act(
        self,
        observation: Mapping[str, Tensor],
        generator: torch.Generator | None,
        memory: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """See Policy."""
        inputs = self._inputs(observation)
        with self._precision.autocast():
            past = None if memory is None else Past(memory)
            logits, remembered = forward(self.actor, inputs, past)
        logits = logits.float().flatten(0, 1)
        mask = observation.get(ACTION_MASK)
        rows_mask = None if mask is None else mask.flatten(0, 1)
        batch = next(iter(observation.values())).shape[0]
        if generator is not None:
            action = sample(policy_probabilities(logits, rows_mask, self.epsilon), generator)
        else:
            if rows_mask is not None:
                logits = logits.masked_fill(rows_mask == 0, float("-inf"))
            action = logits.argmax(-1)
        acted = {"action": action.view(batch, -1).int()}
        if remembered is not None:
            acted["memory"] = remembered
        if generator is None:
            acted["logits"] = logits.view(batch, -1, logits.shape[-1])
        return acted


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
            ConfigError: if share_parameters does not fit the number of agents.
        """
        num_actions = require_discrete("coma", spec)
        super().__init__(precision, device, seed)
        self._config, self._spec = config, spec
        self.unroll_length = config.unroll_steps
        self.unrolls_per_update = config.unrolls_per_update
        self.rows_per_update = config.batch_size * config.batch_number
        options = input_options(network, spec)
        self._actor_inputs = ActorInputs(spec, options)
        self._critic_inputs = CriticInputs(spec, options)
        slices = resolve_sharing(config.share_parameters, spec.num_agents, SHARING)
        self._num_slices = count_slices(slices)
        self._sharing = sharing_agents(slices, device)
        # Minibatches are of single agents' rows only where each is learned from by itself.
        images = self._actor_inputs.shape.image is not None
        self._joint = self._num_slices > 1 or not is_stacked(network, images)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            # What a critic is fed for one agent holds what the others did: agents stay apart.
            self.actor, self.critic = (
                build_network(
                    network, inputs.shape, num_actions, slices, may_remember=True, apart=apart
                ).to(device)
                for inputs, apart in ((self._actor_inputs, False), (self._critic_inputs, True))
            )
        self.memory_size = memory_size(self.actor)
        self.target = copy.deepcopy(self.critic).requires_grad_(False)
        self._actor_optimizer = Adam(self.actor.parameters(), config.actor_lr, fused=True)
        self._critic_optimizer = Adam(self.critic.parameters(), config.critic_lr, fused=True)
        self._parts |= {
            "actor": self.actor,
            "critic": self.critic,
            "target": self.target,
            "actor_optimizer": self._actor_optimizer,
            "critic_optimizer": self._critic_optimizer,
        }
        self._counts = {"updates": 0, "env_steps": 0, "epsilon": config.epsilon_start}
        self._epsilon = torch.tensor(config.epsilon_start, device=device)

    def update(self, batch: Batch) -> dict[str, Tensor]:
        """One COMA update: targets once, then passes of critic and actor minibatches.

        Returns:
            critic_loss, actor_loss, entropy, advantage_std, q_mean, target_mean, target_std,
            explained_variance, critic_grad_norm, actor_grad_norm, epsilon: means over the update;
            epsilon alone if there was nobody who acted.
        """
        c = self._config
        self._anneal()
        rows = self._prepare(batch)
        log: dict[str, list[Tensor]] = {}
        for _ in range(c.data_passes):
            number = round(c.batch_number * batch.times)  # of equal size: an update may have more
            minibatches = rows.minibatches(number, self._sharing, self._joint, self._generator)
            for part in minibatches:
                self._critic_step(rows, part, log)
            for part in minibatches:
                self._actor_step(rows, part, log)
        self._counts["updates"] += 1
        self._counts["env_steps"] += rows.env_steps
        if c.target_update == "soft":
            polyak_update(self.target, self.critic, c.target_tau)
        elif self._counts["updates"] % c.target_every_updates == 0:
            polyak_update(self.target, self.critic, 1.0)
        scalars = {name: torch.stack(values).mean() for name, values in log.items()}
        if log:
            target = rows.target[rows.index]
            variance = target.var(correction=0)
            scalars["target_mean"], scalars["target_std"] = target.mean(), variance.sqrt()
            scalars["explained_variance"] = 1 - scalars["critic_loss"] / variance.clamp_min(1e-8)
        scalars["epsilon"] = self._epsilon.clone()
        return scalars

    def _anneal(self) -> None:
        """Set epsilon and the learning rates for this update."""
        c = self._config
        steps = self._counts["env_steps"]
        epsilon = annealed(c.epsilon_start, c.epsilon_end, steps, c.epsilon_env_steps)
        self._counts["epsilon"] = epsilon
        self._epsilon.fill_(epsilon)
        share = 1 - (1 - c.final_lr_fraction) * self._annealed()
        self._actor_optimizer.param_groups[0]["lr"] = c.actor_lr * share
        self._critic_optimizer.param_groups[0]["lr"] = c.critic_lr * share

    def _annealed(self) -> float:
        """0 at the start, 1 once anneal_updates have been made."""
        return annealed(0.0, 1.0, self._counts["updates"], self._config.anneal_updates)

    @torch.no_grad()
    def _prepare(self, batch: Batch) -> Rows:
        """Everything that is computed once per update: inputs and targets of all rows."""
        c = self._config
        observation = {k: v.flatten(0, 1) for k, v in batch.observation().items()}
        action = batch.arrays["action"].long()  # [L + 1, B, A]
        mask = observation.get(ACTION_MASK)
        mask = None if mask is None else mask.flatten(0, 1)
        actor_inputs = self._actor_inputs(observation)
        actor_past, critic_past = pasts(batch)
        self._choose_last(batch, action, actor_inputs, mask, actor_past)
        critic_inputs = self._critic_inputs(observation, action.flatten(0, 1))
        flat_action = action.flatten()
        t = transitions(batch)
        target = self._targets(t, critic_inputs, action, critic_past)
        valid = t.valid.unsqueeze(-1).expand_as(target)
        env_steps = int(t.valid.sum())
        if AGENT_MASK in batch.observation():  # nobody chose what a dead agent did
            valid = valid & (batch.observation()[AGENT_MASK][:-1] != 0)
        index = valid.flatten().nonzero().squeeze(-1)
        units = index
        if actor_past is not None:
            units = valid.any(-1).any(0).nonzero().squeeze(-1)
        elif self._joint:
            units = valid.any(-1).flatten().nonzero().squeeze(-1)
        log_prob = None
        if c.clip_ratio:
            logits = self._forward(self.actor, actor_inputs, actor_past)
            pi = policy_probabilities(logits, mask, self._epsilon)
            log_prob = _log_probability(pi, flat_action)
        return Rows(
            actor_inputs,
            critic_inputs,
            flat_action,
            mask,
            target.flatten(),
            log_prob,
            index,
            env_steps,
            units,
            valid.flatten().float(),
            actor_past and actor_past.without_last(),
            critic_past and critic_past.without_last(),
        )

    def _choose_last(
        self,
        batch: Batch,
        action: Tensor,
        inputs: Inputs,
        mask: Tensor | None,
        past: Past | None,
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

    def _critic_step(self, rows: Rows, part: Minibatch, log: dict[str, list[Tensor]]) -> None:
        index = part.index
        with self._precision.autocast():
            q, _ = forward(self.critic, part.of(rows.critic), part.critic_past)
        q = q.float().flatten(0, 1).gather(-1, rows.action[index].unsqueeze(-1)).squeeze(-1)
        loss = part.means((q - rows.target[index]).square())
        norm = self._precision.step(
            loss.sum(),
            self._critic_optimizer,
            self.critic.parameters(),
            self._config.max_grad_norm,
            self._num_slices,
        )
        _note(log, critic_loss=loss, q_mean=part.means(q), critic_grad_norm=norm)

    def _actor_step(self, rows: Rows, part: Minibatch, log: dict[str, list[Tensor]]) -> None:
        c, index = self._config, part.index
        action = rows.action[index]
        with torch.no_grad(), self._precision.autocast():
            q, _ = forward(self.critic, part.of(rows.critic), part.critic_past)
        with self._precision.autocast():
            logits, _ = forward(self.actor, part.of(rows.actor), part.actor_past)
        mask = None if rows.mask is None else rows.mask[index]
        pi = policy_probabilities(logits.float().flatten(0, 1), mask, self._epsilon)
        log_prob = _log_probability(pi, action)
        advantage = counterfactual_advantage(q.float().flatten(0, 1), pi, action)
        deviation = part.deviations(advantage)
        if c.normalize_advantage:
            advantage = part.scaled(advantage, deviation + 1e-6)
        if rows.log_prob is None:
            gain = advantage * log_prob
        else:
            gain = clipped_surrogate(log_prob - rows.log_prob[index], advantage, c.clip_ratio)
        # The clamp keeps the gradient of an illegal action's 0 log 0 at zero.
        entropy = part.means(-(pi * pi.clamp_min(1e-12).log()).sum(-1))
        weight = c.entropy_weight * (1 - self._annealed())
        loss = -part.means(gain) - weight * entropy
        norm = self._precision.step(
            loss.sum(),
            self._actor_optimizer,
            self.actor.parameters(),
            c.max_grad_norm,
            self._num_slices,
        )
        _note(log, actor_loss=loss, entropy=entropy, advantage_std=deviation, actor_grad_norm=norm)

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
        super().load_state_dict(state)
        self._epsilon.fill_(self._counts["epsilon"])


def _log_probability(pi: Tensor, action: Tensor) -> Tensor:
    """Logarithm of pi(action), [R]; bounded where a saturated policy underflows to zero."""
    return pi.gather(-1, action.unsqueeze(-1)).squeeze(-1).clamp_min(1e-8).log()


def _note(log: dict[str, list[Tensor]], **scalars: Tensor) -> None:
    """Keep means over sets of weights, on the device; they are read once per update."""
    for name, value in scalars.items():
        log.setdefault(name, []).append(value.detach().mean())


build = Coma

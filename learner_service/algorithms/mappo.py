"""MAPPO and IPPO: proximal policy optimisation for teams.

Yu, Velu, Vinitsky, Gao, Wang, Bayen, Wu 2022, "The Surprising Effectiveness of PPO in Cooperative
Multi-Agent Games" (arXiv:2103.01955): each agent's clipped policy gradient, with a value function
that sees the global state while learning (MAPPO) or only what the agent sees (IPPO, de Witt et al.
2020, arXiv:2011.09533), advantages by GAE, values normalised by running statistics, several passes
over each rollout. Discrete or continuous actions, parameters shared or one set for each agent, with
memory or without.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from learner_service.algorithms.augmented import passes
from learner_service.algorithms.base import (
    Algorithm,
    Policy,
)
from learner_service.algorithms.frozen import FrozenAgents
from learner_service.algorithms.mappo_policy import Actor, MappoPolicy, policy_outputs
from learner_service.algorithms.minibatches import (
    Minibatch,
    Rows,
    number_of_minibatches,
    uncounted_never_taken,
)
from learner_service.algorithms.options import CriticConfig, OnPolicyConfig
from learner_service.algorithms.returns import (
    clipped_surrogate,
    lambda_returns,
    moments_of_sets,
    of_agents,
    sharing_agents,
    vtrace_returns,
)
from learner_service.algorithms.schedule import Schedule
from learner_service.algorithms.value_norm import ValueNorm
from learner_service.networks.building import (
    build_network,
    input_options,
    is_stacked,
    shared_encoder,
)
from learner_service.networks.casting import cast_weights
from learner_service.networks.distributions import Categorical, Normal
from learner_service.networks.encoded import learned_parameters
from learner_service.networks.forward import forward, forward_both, forward_rows
from learner_service.networks.inputs import ActorInputs, CriticInputs, Inputs
from learner_service.networks.recurrent import Past, memory_size, pasts
from learner_service.networks.snapshot import publish
from learner_service.networks.stacked import count_slices
from learner_service.runtime.adam import Adam
from learner_service.runtime.precision import Precision
from learner_service.storage.rollout import Batch, transitions
from learner_service.storage.storage import OBSERVATION
from shared.config import PluginConfig
from shared.errors import ConfigError
from shared.spec import ACTION_MASK, AGENT_MASK, Continuous, EnvSpec


class Config(CriticConfig, OnPolicyConfig):
    """Options of MAPPO; the defaults are those that EPyMARL found good on small tasks."""

    centralised: bool = Field(True, description="false: IPPO, values from own observations alone")
    share_trunk: bool = Field(
        False,
        description="with centralised: false, one network gives the policy and the value in its "
        "last layer; actor_lr is its learning rate",
    )
    share_encoder: bool = Field(
        False,
        description="images: policy and critic share the convolutions, which the critic's gradient "
        "alone trains (DrQ)",
    )
    value_weight: float = Field(
        0.5, gt=0, description="share_trunk: weight of the value function's loss"
    )
    batch_size: int = Field(
        1024,
        ge=0,
        description="agent-transitions in a minibatch, of all learners together; 0: as many as fit "
        "the memory",
    )
    batch_number: int = Field(
        4,
        ge=1,
        description="minibatches; an update starts at batch_size * batch_number rows; it "
        "has more minibatches where more environments act than give so many",
    )
    data_passes: int = Field(4, ge=1, description="passes over each rollout")
    gamma: float = Field(0.99, ge=0, le=1, description="discount factor")
    gae_lambda: float = Field(0.95, ge=0, le=1, description="0: one-step TD, 1: Monte Carlo")
    vtrace_clip: float = Field(
        0.0,
        ge=0,
        description="correct targets and advantages of rows that older policies acted, by V-trace "
        "with importance ratios up to this (IMPALA: 1); 0: no correction. Costs a forward pass",
    )
    actor_lr: float = Field(5e-4, gt=0, description="Adam's learning rate of the policy")
    critic_lr: float = Field(5e-4, gt=0, description="Adam's learning rate of the value function")
    final_lr_fraction: float = Field(
        1.0, gt=0, le=1, description="learning rates fall linearly to this share of themselves"
    )
    anneal_updates: int = Field(
        0, ge=0, description="updates over which learning rates and entropy weight fall; 0: never"
    )
    clip_ratio: float = Field(0.2, gt=0, description="bound on the policy's change in an update")
    entropy_weight: float = Field(0.01, ge=0, description="weight of the entropy, per nat")
    max_grad_norm: float = Field(10.0, ge=0, description="gradient norm is clipped; 0: never")
    normalize_values: bool = Field(True, description="learn values in units of their deviation")
    initial_log_std: float = Field(-0.5, description="continuous: log deviation at the start")


_BY_ROW = ("critic_loss", "entropy", "clip_fraction", "kl")
_OF_THE_BATCH = ("return_mean", "advantage_std", "explained_variance")


def _check_trunk(config: Config, network: PluginConfig, inputs: ActorInputs) -> None:
    """Check that a policy and its values can come of one network.

    Raises:
        ConfigError: if the value function sees something else than the policy.
    """
    if config.centralised:
        raise ConfigError(
            "algorithm.share_trunk = true: a centralised value function sees the state, the policy "
            "does not; set algorithm.centralised=false, or share_trunk=false"
        )
    if config.share_encoder:
        raise ConfigError(
            "algorithm.share_trunk = true: policy and values share everything already; set "
            "algorithm.share_encoder=false"
        )
    if config.critic_network:
        raise ConfigError(
            "algorithm.share_trunk = true: policy and values come of one network; leave out "
            "algorithm.critic_network, or set share_trunk=false"
        )
    if not is_stacked(network, inputs.shape.image):
        raise ConfigError(
            f"algorithm.share_trunk = true: network '{network.name}' mixes agents, and an agent's "
            "value must come of its own observation; use a network that declares STACKED, or set "
            "share_trunk=false"
        )


class Mappo(Algorithm[Batch]):
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
        """Build actor, value function and optimisers.

        Raises:
            ConfigError: if share_parameters or frozen_agents do not fit the agents.
        """
        super().__init__(precision, device, seed)
        self._config, self._spec = config, spec
        self._static = device.type != "cpu"  # no shape depends on what rows hold
        self.unroll_length = config.unroll_steps
        self.unrolls_per_update = config.unrolls_per_update
        self.rows_per_update = config.batch_size * config.batch_number
        self.extras = {"log_prob": ()}
        if isinstance(spec.action, Continuous):
            self.extras["raw_action"] = (spec.action.size,)
        options = input_options(network, spec)
        self._actor_inputs = ActorInputs(spec, options)
        self._critic_inputs: ActorInputs | CriticInputs = (
            CriticInputs(spec, options, actions=False) if config.centralised else self._actor_inputs
        )
        slices = config.slices(spec.num_agents)
        self._frozen = FrozenAgents(config.frozen_agents, slices, device)
        self._num_slices = count_slices(slices)
        self._sharing = sharing_agents(slices, device)
        self.critic: nn.Module | None = None
        if config.share_trunk:
            _check_trunk(config, network, self._actor_inputs)
        outputs = policy_outputs(spec) + int(config.share_trunk)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            encoder = None
            if config.share_encoder:
                shapes = self._actor_inputs.shape, self._critic_inputs.shape
                encoder = shared_encoder(network, *shapes, slices, "algorithm.share_encoder")
            make = partial(build_network, slices=slices, may_remember=True, encoder=encoder)
            net = make(network, self._actor_inputs.shape, outputs, trains=False)
            self.actor = Actor(net, spec, slices, config.initial_log_std).to(device)
            if not config.share_trunk:
                # Without the state each agent's value is of what it sees alone.
                of_critic = config.network_of_critic(network, shares_encoder=config.share_encoder)
                critic = make(of_critic, self._critic_inputs.shape, 1, apart=not config.centralised)
                self.critic = critic.to(device)
        self.memory_size = memory_size(self.actor.network)
        self.value_norm = ValueNorm(self._sharing).to(device)
        self._prepare_learning()
        self._captured = self._capture("update", self._learn)
        self._counts = {"updates": 0.0}

    def _prepare_learning(self) -> None:
        """Make what changes the networks, and note what a checkpoint holds of it."""
        config = self._config
        self._parts |= {"actor": self.actor, "value_norm": self.value_norm}
        self._learned: list[tuple[Adam, nn.Module]] = [
            (self._adam("actor", self.actor, config.actor_lr), self.actor)
        ]
        self._logged: tuple[str, ...] = ("actor_loss", *_BY_ROW, "actor_grad_norm")
        if self.critic is not None:
            self._parts["critic"] = self.critic
            self._learned.append((self._adam("critic", self.critic, config.critic_lr), self.critic))
            self._logged += ("critic_grad_norm",)
        self._logged += _OF_THE_BATCH
        self._schedule = Schedule(
            [optimizer for optimizer, _ in self._learned],
            config.entropy_weight,
            config.anneal_updates,
            config.final_lr_fraction,
            self._device,
            static=self._static,
        )

    def _adam(self, name: str, network: nn.Module, rate: float) -> Adam:
        """An optimiser, and a part of the state."""
        capturable = self._device.type == "cuda"
        learned = learned_parameters(network)
        optimizer = Adam(learned, rate, eps=1e-5, fused=True, capturable=capturable)
        self._parts[f"{name}_optimizer"] = optimizer
        return optimizer

    def update(self, batch: Batch) -> dict[str, Tensor]:
        """Advantages once, then passes over shuffled minibatches.

        A minibatch is some of the joint rows; with memory some of the environments, whole: from
        what was remembered at the unroll's first row to its end.

        Returns:
            actor_loss, critic_loss, entropy, clip_fraction, kl, actor_grad_norm,
            critic_grad_norm (not with a shared trunk), return_mean, advantage_std,
            explained_variance: means over the update and over sets of weights.
        """
        self._schedule.set(self._counts["updates"])
        number = number_of_minibatches(self._config.batch_number, batch.times, self._group)
        scalars = self._captured(batch.arrays, number=number)["scalars"].clone()
        self._schedule.restore()
        self._counts["updates"] += 1
        return dict(zip(self._logged, scalars.unbind(), strict=True))

    def _learn(self, arrays: Mapping[str, Tensor], *, number: int) -> dict[str, Tensor]:
        """The update, on the device from end to end.

        Args:
            arrays: of a Batch.
            number: of minibatches in each pass.
        """
        batch, c = Batch(dict(self._frozen.hidden(arrays)), []), self._config
        rows, scalars = self._prepare(batch)
        steps: list[_Step] = []
        for seen in passes(rows, c.data_passes, batch, self.augment, self._generator, self._fed):
            parts = seen.shuffled(number, self._generator).parts
            for part, rates in zip(parts, self._schedule.rates(parts), strict=True):
                self._schedule.step(rates)
                steps.append(self._minibatch(part))
        return {"scalars": torch.cat([self._means(steps), scalars])}

    def _fed(self, observation: dict[str, Tensor], *_: Tensor) -> tuple[Inputs, Inputs]:
        """Inputs of the policy and of the value function; whatever the actions."""
        actor = self._actor_inputs(observation)
        same = self._critic_inputs is self._actor_inputs
        return actor, actor if same else self._critic_inputs(observation)

    @torch.no_grad()
    def _prepare(self, batch: Batch) -> tuple[Rows, Tensor]:
        """Everything that is computed once per update; return_mean and what follows it."""
        c = self._config
        arrays = batch.arrays
        observation = {k: v.flatten(0, 1) for k, v in batch.observation().items()}
        actor, critic = self._fed(observation)
        actor_past, critic_past = pasts(batch)
        t = transitions(batch)
        # A row counts if its action was taken, for those agents that were alive to take it.
        alive = arrays.get(OBSERVATION + AGENT_MASK)
        weight = t.valid.unsqueeze(-1).expand_as(arrays["log_prob"][:-1]).float()
        if alive is not None:
            weight = weight * (alive[:-1] != 0)
        action = arrays["raw_action" if "raw_action" in arrays else "action"][:-1].flatten(0, 1)
        action = action if action.is_floating_point() else action.long()
        value, pi = self._value_and_policy(batch, (actor, critic), (actor_past, critic_past))
        if pi is None:
            target = lambda_returns(
                t.reward, t.discount, value[1:], t.next_is_last, c.gamma, c.gae_lambda
            )
            advantage = target - value[:-1]
        else:
            log_prob = pi.log_prob(action).view_as(weight)
            log_ratio = (log_prob - arrays["log_prob"][:-1]).where(weight > 0, 0)
            target, advantage = vtrace_returns(
                *(t.reward, t.discount, value, t.next_is_last, log_ratio),
                *(c.gamma, c.gae_lambda, c.vtrace_clip),
            )
        target, advantage, weight = (x.flatten(0, 1) for x in (target, advantage, weight))
        if c.normalize_values:
            self.value_norm.update(target, weight, self._group)
        over = weight, self._sharing, self._group
        target_mean, target_variance = moments_of_sets(target, *over)
        mean, variance = moments_of_sets(advantage, *over)
        std = variance.sqrt()
        explained = 1 - variance / target_variance.clamp_min(1e-8)
        centre, scale = of_agents(mean, self._sharing), of_agents(std, self._sharing) + 1e-8
        advantage = (advantage - centre) / scale
        if c.normalize_values:
            target = self.value_norm.normalize(target)
        columns = {
            "action": action,
            "log_prob": uncounted_never_taken(arrays["log_prob"][:-1].flatten(0, 1), weight),
            "advantage": advantage,
            "target": target,
        }
        if ACTION_MASK in observation:
            columns["mask"] = observation[ACTION_MASK]
        rows = Rows(
            actor,
            critic,
            columns,
            weight,
            self._sharing,
            self._static,
            actor_past and actor_past.without_last(),
            critic_past and critic_past.without_last(),
            self._group,
        )
        return rows, torch.stack([target_mean, std, explained]).mean(1)

    def _value_and_policy(
        self, batch: Batch, inputs: tuple[Inputs, Inputs], pasts: tuple[Past | None, Past | None]
    ) -> tuple[Tensor, Categorical | Normal | None]:
        """[T + 1, B, A] values of all rows, in units of the reward; V-trace: pi of those but last.

        Args:
            batch: of T + 1 rows.
            inputs: of the policy and of the value function.
            pasts: the same.
        """
        config, agents, observation = self._config, self._spec.num_agents, batch.observation()
        length, num_unrolls = batch.arrays["step_type"].shape

        def outputs(network: nn.Module, of: int) -> Tensor:
            return forward_rows(network, inputs[of], self._precision, agents, pasts[of])

        correct = config.vtrace_clip > 0
        out = outputs(self.actor.network, 0) if correct or self.critic is None else None
        value = out if self.critic is None else outputs(self.critic, 1)
        assert value is not None
        value = value[..., -1].view(length, num_unrolls, agents)
        if config.normalize_values:
            value = self.value_norm.denormalize(value)
        if not correct or out is None:
            return value, None
        acted = (length - 1) * num_unrolls  # joint rows with an action; time is outermost
        mask = (
            observation[ACTION_MASK].flatten(0, 1)[:acted] if ACTION_MASK in observation else None
        )
        return value, self.actor.distribution(out[:acted], mask)

    def _minibatch(self, part: Minibatch) -> "_Step":
        """One step of the policy and of the value function."""
        c, columns = self._config, part.columns
        learned = [network for _, network in self._learned]
        with cast_weights(self._precision, *learned):
            pi, value = self._evaluate(part)
        log_ratio = pi.log_prob(columns["action"]) - columns["log_prob"]
        gain = clipped_surrogate(log_ratio, columns["advantage"], c.clip_ratio)
        entropy = pi.entropy()
        error = F.mse_loss(value.float(), columns["target"], reduction="none")
        of_error = part.share if self.critic is not None else c.value_weight * part.share
        terms = [(gain, part.cost), (error, of_error)]
        if c.entropy_weight:
            terms.append((entropy, part.cost * self._schedule.entropy_weight))
        norms = self._precision.step_together(
            terms, self._learned, c.max_grad_norm, self._num_slices
        )
        rows = gain, log_ratio, entropy, error
        return _Step([x.detach() for x in rows], part.share, part.counts, norms)

    def _evaluate(self, part: Minibatch) -> tuple[Categorical | Normal, Tensor]:
        """The policy's distribution and values [M, A]."""
        mask = part.columns.get("mask")
        if self.critic is None:
            out, _ = forward(self.actor.network, part.actor, part.actor_past)
            return self.actor.distribution(out, mask), out[..., -1]
        out, value = forward_both(
            (self.actor.network, self.critic),
            (part.actor, part.critic),
            (part.actor_past, part.critic_past),
        )
        return self.actor.distribution(out, mask), value.squeeze(-1)

    @torch.no_grad()
    def _means(self, steps: list["_Step"]) -> Tensor:
        """`_logged` up to return_mean: means over the minibatches in which anything counts."""
        if not steps:
            return self._sharing.new_zeros(len(self._logged) - len(_OF_THE_BATCH))
        by_row = zip(*(step.by_row for step in steps), strict=True)
        gain, log_ratio, entropy, error = (torch.stack(x) for x in by_row)  # [N, M, A]
        share = torch.stack([step.share for step in steps]).flatten()
        grown = torch.expm1(log_ratio)  # r - 1
        clipped = (grown.abs() > self._config.clip_ratio).float()
        loss = -torch.addcmul(gain, entropy, self._schedule.entropy_weight)
        # Schulman 2020, "Approximating KL divergence": (r - 1) - log r is unbiased, never < 0.
        rows = torch.stack([loss, error, entropy, clipped, grown - log_ratio]).flatten(1)
        norms = torch.stack([norm for step in steps for norm in step.norms])
        number = torch.stack([step.counts for step in steps]).sum().clamp_min(1)
        means = [rows @ share / self._num_slices, norms.view(len(steps), -1).sum(0)]
        return torch.cat(means) / number

    def make_policy(self) -> MappoPolicy:
        """See Algorithm."""
        return MappoPolicy(self.actor, self._actor_inputs, self._spec, self._precision)

    @torch.no_grad()
    def publish(self, policy: Policy) -> None:
        """See Algorithm."""
        assert isinstance(policy, MappoPolicy)
        publish(self.actor, policy.actor)


@dataclass
class _Step:
    """What a minibatch leaves to be logged.

    Attributes:
        by_row: four of [M, A]: gains, logarithms of the ratio, entropies, the values' squared
            errors.
        share: [M, A] of Minibatch.
        counts: scalar of Minibatch.
        norms: of the gradients.
    """

    by_row: list[Tensor]
    share: Tensor
    counts: Tensor
    norms: list[Tensor]


build = Mappo

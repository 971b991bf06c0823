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

import torch
from pydantic import Field
from torch import Tensor, nn

from learner_service.algorithms.base import SHARING, Algorithm, OnPolicyConfig, Policy
from learner_service.algorithms.returns import (
    annealed,
    clipped_surrogate,
    lambda_returns,
    mean_of_sets,
    moments_of_sets,
    sharing_agents,
)
from learner_service.networks.building import build_network, input_options
from learner_service.networks.distributions import Categorical, Normal
from learner_service.networks.forward import forward, forward_rows
from learner_service.networks.inputs import ActorInputs, CriticInputs, Inputs
from learner_service.networks.recurrent import Past, memory_size, pasts
from learner_service.networks.snapshot import publish, snapshot
from learner_service.networks.stacked import Sharing, count_slices, per_agent, resolve_sharing
from learner_service.runtime.adam import Adam
from learner_service.runtime.precision import Precision
from learner_service.storage.rollout import Batch, transitions
from learner_service.storage.storage import OBSERVATION
from shared.config import PluginConfig
from shared.spec import ACTION_MASK, AGENT_MASK, Continuous, Discrete, EnvSpec


class Config(OnPolicyConfig):
    """Options of MAPPO; the defaults are those that EPyMARL found good on small tasks."""

    centralised: bool = Field(True, description="false: IPPO, values from own observations alone")
    share_parameters: Sharing = Field(
        True,
        description="false: each agent has networks of its own; or the number of each agent's "
        "networks: [0, 0, 1] lets the first two share",
    )
    batch_size: int = Field(
        1024, ge=0, description="agent-transitions in a minibatch; 0: as many as fit the memory"
    )
    batch_number: int = Field(
        4,
        ge=1,
        description="minibatches; an update starts at batch_size * batch_number rows; it "
        "has more minibatches where more environments act than give so many",
    )
    data_passes: int = Field(4, ge=1, description="passes over each rollout")
    unroll_steps: int = Field(
        0,
        ge=0,
        description="transitions of an unroll; 0: so many that one unroll of every environment "
        "makes an update, 16 to 128; in the async pipeline of every one that the learner can use",
    )
    gamma: float = Field(0.99, ge=0, le=1, description="discount factor")
    gae_lambda: float = Field(0.95, ge=0, le=1, description="0: one-step TD, 1: Monte Carlo")
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


class Actor(nn.Module):
    """A policy network and, for continuous actions, each dimension's log deviation."""

    def __init__(
        self, network: nn.Module, spec: EnvSpec, slices: tuple[int, ...], log_std: float
    ) -> None:
        super().__init__()
        self.network, self._slices = network, slices
        self.log_std = None
        if isinstance(spec.action, Continuous):
            shape = (count_slices(slices), spec.action.size)
            self.log_std = nn.Parameter(torch.full(shape, log_std))

    def forward(
        self, inputs: Inputs, mask: Tensor | None, past: Past | None
    ) -> tuple[Categorical | Normal, Tensor | None]:
        """The policy's distribution for inputs [R, A, ...], shaped [R, A]; and its memory."""
        out, memory = forward(self.network, inputs, past)
        if self.log_std is None:
            return Categorical(out, mask), memory
        return Normal(out, per_agent(self.log_std, self._slices)), memory


class ValueNorm(nn.Module):
    """Running mean and deviation of returns, with the bias of the first steps taken out.

    Each set of weights has its own: agents with networks of their own may be paid differently.
    Yu et al. 2022, section 5.1, in the manner of PopArt without its rescaling of weights.
    """

    mean: Tensor
    square: Tensor
    weight: Tensor
    _sharing: Tensor

    def __init__(self, sharing: Tensor, decay: float = 0.99) -> None:
        """`sharing` [S, A] is of `sharing_agents`; `decay` what the past weighs at every update."""
        super().__init__()
        self._decay = decay
        self.register_buffer("_sharing", sharing, persistent=False)
        for name in ("mean", "square", "weight"):
            self.register_buffer(name, torch.zeros(len(sharing)))

    def update(self, returns: Tensor, counted: Tensor) -> None:
        """Take in returns [R, A] where they are counted (1, else 0); no set forgets for nothing."""
        any_counted = (self._sharing @ counted.sum(0) > 0).float()
        fresh = (1 - self._decay) * any_counted
        self.mean.lerp_(mean_of_sets(returns, counted, self._sharing), fresh)
        self.square.lerp_(mean_of_sets(returns.square(), counted, self._sharing), fresh)
        self.weight.lerp_(torch.ones_like(self.weight), fresh)

    def _statistics(self) -> tuple[Tensor, Tensor]:
        """Each agent's mean and deviation, [A]."""
        weight = self.weight.clamp_min(1e-8)
        mean = self.mean / weight
        variance = self.square / weight - mean.square()
        started = self.weight > 0
        std = torch.where(started, variance.clamp_min(1e-4).sqrt(), 1.0)
        return mean @ self._sharing, std @ self._sharing

    def normalize(self, x: Tensor) -> Tensor:
        """[..., A] to units of the deviation."""
        mean, std = self._statistics()
        return (x - mean) / std

    def denormalize(self, x: Tensor) -> Tensor:
        """Back again."""
        mean, std = self._statistics()
        return x * std + mean

    def _load_from_state_dict(self, state: dict[str, Tensor], prefix: str, *rest: object) -> None:
        for name in ("mean", "square", "weight"):  # older checkpoints have one for all sets
            if prefix + name in state:
                state[prefix + name] = state[prefix + name].expand_as(getattr(self, name))
        super()._load_from_state_dict(state, prefix, *rest)


class MappoPolicy(Policy):
    """The actor, frozen."""

    def __init__(
        self, actor: Actor, inputs: ActorInputs, spec: EnvSpec, precision: Precision
    ) -> None:
        self.actor = snapshot(actor, precision)
        self.memory_size = memory_size(actor.network)
        self._inputs, self._spec, self._precision = inputs, spec, precision

    @torch.inference_mode()
    def act(
        self,
        observation: Mapping[str, Tensor],
        generator: torch.Generator | None,
        memory: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """See Policy; with the log probability and, if continuous, the action before clipping."""
        inputs = self._inputs(observation)
        with self._precision.autocast():
            past = None if memory is None else Past(memory)
            pi, remembered = self.actor(inputs, observation.get(ACTION_MASK), past)
        action = pi.mode() if generator is None else pi.sample(generator)
        acted = {"log_prob": pi.log_prob(action)}
        if remembered is not None:
            acted["memory"] = remembered
        if generator is None:
            acted |= {"logits": pi.logits} if isinstance(pi, Categorical) else {"mean": action}
        if isinstance(self._spec.action, Discrete):
            return {"action": action.int(), **acted}
        low, high = self._spec.action.low, self._spec.action.high
        return {"action": action.clamp(low, high), "raw_action": action, **acted}


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
            ConfigError: if share_parameters does not fit the number of agents.
        """
        super().__init__(precision, device, seed)
        self._config, self._spec = config, spec
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
        slices = resolve_sharing(config.share_parameters, spec.num_agents, SHARING)
        self._num_slices = count_slices(slices)
        self._sharing = sharing_agents(slices, device)
        outputs = spec.action.num_actions if isinstance(spec.action, Discrete) else spec.action.size
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            net = build_network(
                network, self._actor_inputs.shape, outputs, slices, may_remember=True
            )
            self.actor = Actor(net, spec, slices, config.initial_log_std).to(device)
            # Without the state each agent's value is of what it sees alone.
            apart = not config.centralised
            self.critic = build_network(
                network, self._critic_inputs.shape, 1, slices, may_remember=True, apart=apart
            )
        self.critic.to(device)
        self.memory_size = memory_size(self.actor.network)
        self.value_norm = ValueNorm(self._sharing).to(device)
        self._actor_optimizer = Adam(self.actor.parameters(), config.actor_lr, eps=1e-5, fused=True)
        self._critic_optimizer = Adam(
            self.critic.parameters(), config.critic_lr, eps=1e-5, fused=True
        )
        self._parts |= {
            "actor": self.actor,
            "critic": self.critic,
            "value_norm": self.value_norm,
            "actor_optimizer": self._actor_optimizer,
            "critic_optimizer": self._critic_optimizer,
        }
        self._counts = {"updates": 0.0}

    def update(self, batch: Batch) -> dict[str, Tensor]:
        """Advantages once, then passes over shuffled minibatches.

        A minibatch is some of the joint rows; with memory some of the environments, whole: from
        what was remembered at the unroll's first row to its end.

        Returns:
            actor_loss, critic_loss, entropy, clip_fraction, kl, actor_grad_norm,
            critic_grad_norm, return_mean, advantage_std, explained_variance: means over the
            update and over sets of weights.
        """
        c = self._config
        share = 1 - (1 - c.final_lr_fraction) * self._annealed()
        self._actor_optimizer.param_groups[0]["lr"] = c.actor_lr * share
        self._critic_optimizer.param_groups[0]["lr"] = c.critic_lr * share
        rows = self._prepare(batch)
        log: dict[str, list[Tensor]] = {}
        for _ in range(c.data_passes):
            shuffled = rows.index[
                torch.randperm(len(rows.index), device=self._device, generator=self._generator)
            ]
            for index in torch.tensor_split(shuffled, round(c.batch_number * batch.times)):
                if len(index):
                    self._minibatch(rows, index, log)
        self._counts["updates"] += 1
        scalars = {name: torch.stack(values).mean() for name, values in log.items()}
        return scalars | rows.scalars

    def _annealed(self) -> float:
        """0 at the start, 1 once anneal_updates have been made."""
        return annealed(0.0, 1.0, self._counts["updates"], self._config.anneal_updates)

    @torch.no_grad()
    def _prepare(self, batch: Batch) -> "_Rows":
        """Everything that is computed once per update."""
        c, spec = self._config, self._spec
        arrays = batch.arrays
        observation = {k: v.flatten(0, 1) for k, v in batch.observation().items()}
        actor, critic = self._actor_inputs(observation), self._critic_inputs(observation)
        length, num_unrolls = arrays["step_type"].shape
        actor_past, critic_past = pasts(batch)
        value = forward_rows(self.critic, critic, self._precision, spec.num_agents, critic_past)
        value = value.view(length, num_unrolls, spec.num_agents)
        if c.normalize_values:
            value = self.value_norm.denormalize(value)
        t = transitions(batch)
        target = lambda_returns(
            t.reward, t.discount, value[1:], t.next_is_last, c.gamma, c.gae_lambda
        )
        advantage = target - value[:-1]
        # A row counts if its action was taken, for those agents that were alive to take it.
        alive = arrays.get(OBSERVATION + AGENT_MASK)
        weight = t.valid.unsqueeze(-1).expand_as(target).float()
        if alive is not None:
            weight = weight * (alive[:-1] != 0)
        target, advantage, weight = (x.flatten(0, 1) for x in (target, advantage, weight))
        if c.normalize_values:
            self.value_norm.update(target, weight)
        target_mean, target_variance = moments_of_sets(target, weight, self._sharing)
        mean, variance = moments_of_sets(advantage, weight, self._sharing)
        std = variance.sqrt()
        advantage = (advantage - mean @ self._sharing) / (std @ self._sharing + 1e-8)
        units = weight.sum(1)
        if actor_past:
            units = units.view(length - 1, num_unrolls).sum(0)
        action = arrays["raw_action" if "raw_action" in arrays else "action"]
        mask = observation.get(ACTION_MASK)
        return _Rows(
            actor=actor,
            critic=critic,
            mask=mask,
            action=action.flatten(0, 1)
            if action.is_floating_point()
            else action.flatten(0, 1).long(),
            log_prob=arrays["log_prob"].flatten(0, 1),
            advantage=advantage,
            target=target,
            weight=weight,
            index=units.nonzero().squeeze(-1),
            actor_past=actor_past and actor_past.without_last(),
            critic_past=critic_past and critic_past.without_last(),
            scalars={
                "return_mean": target_mean.mean(),
                "advantage_std": std.mean(),
                "explained_variance": (1 - variance / target_variance.clamp_min(1e-8)).mean(),
            },
        )

    def _minibatch(self, rows: "_Rows", index: Tensor, log: dict[str, list[Tensor]]) -> None:
        """One step of the policy and one of the value function."""
        joint, actor_past, critic_past = index, None, None
        if rows.actor_past is not None and rows.critic_past is not None:
            joint = rows.actor_past.rows(index)
            actor_past, critic_past = (
                rows.actor_past.columns(index),
                rows.critic_past.columns(index),
            )
        scalars = self._actor_step(rows, joint, actor_past)
        scalars |= self._critic_step(rows, joint, critic_past)
        for name, scalar in scalars.items():
            log.setdefault(name, []).append(scalar.detach().mean())

    def _mean(self, x: Tensor, weight: Tensor) -> Tensor:
        """Of each set of weights, [S]."""
        return mean_of_sets(x, weight, self._sharing)

    def _actor_step(self, rows: "_Rows", joint: Tensor, past: Past | None) -> dict[str, Tensor]:
        c, weight = self._config, rows.weight[joint]
        with self._precision.autocast():
            mask = None if rows.mask is None else rows.mask[joint]
            pi, _ = self.actor(rows.actor.rows(joint), mask, past)
        log_ratio = pi.log_prob(rows.action[joint]) - rows.log_prob[joint]
        gain = clipped_surrogate(log_ratio, rows.advantage[joint], c.clip_ratio)
        entropy = self._mean(pi.entropy(), weight)
        entropy_weight = c.entropy_weight * (1 - self._annealed())
        loss = -self._mean(gain, weight) - entropy_weight * entropy
        norm = self._precision.step(
            loss.sum(),
            self._actor_optimizer,
            self.actor.parameters(),
            c.max_grad_norm,
            self._num_slices,
        )
        with torch.no_grad():
            ratio = log_ratio.exp()
            clipped = ((ratio - 1).abs() > c.clip_ratio).float()
            # Schulman 2020, "Approximating KL divergence": (r - 1) - log r is unbiased, never < 0.
            kl = ratio - 1 - log_ratio
            return {
                "actor_loss": loss,
                "entropy": entropy,
                "clip_fraction": self._mean(clipped, weight),
                "kl": self._mean(kl, weight),
                "actor_grad_norm": norm,
            }

    def _critic_step(self, rows: "_Rows", joint: Tensor, past: Past | None) -> dict[str, Tensor]:
        with self._precision.autocast():
            value, _ = forward(self.critic, rows.critic.rows(joint), past)
        target = rows.target[joint]
        if self._config.normalize_values:
            target = self.value_norm.normalize(target)
        error = (value.float().reshape_as(target) - target).square()
        loss = self._mean(error, rows.weight[joint])
        norm = self._precision.step(
            loss.sum(),
            self._critic_optimizer,
            self.critic.parameters(),
            self._config.max_grad_norm,
            self._num_slices,
        )
        return {"critic_loss": loss, "critic_grad_norm": norm}

    def make_policy(self) -> MappoPolicy:
        """See Algorithm."""
        return MappoPolicy(self.actor, self._actor_inputs, self._spec, self._precision)

    @torch.no_grad()
    def publish(self, policy: Policy) -> None:
        """See Algorithm."""
        assert isinstance(policy, MappoPolicy)
        publish(self.actor, policy.actor)


@dataclass
class _Rows:
    """A batch as joint rows, [R, A, ...]; so are the inputs.

    `index` are what minibatches are made of: joint rows, or environments if there is a past.
    """

    actor: Inputs
    critic: Inputs
    mask: Tensor | None
    action: Tensor
    log_prob: Tensor
    advantage: Tensor
    target: Tensor
    weight: Tensor
    index: Tensor
    actor_past: Past | None
    critic_past: Past | None
    scalars: dict[str, Tensor]


build = Mappo

"""MADDPG, its own-critic form DDPG, and MATD3.

Lowe, Wu, Tamar, Harb, Abbeel, Mordatch 2017, "Multi-Agent Actor-Critic for Mixed
Cooperative-Competitive Environments" (arXiv:1706.02275): each agent has a deterministic policy over
its own observations and a critic that, while learning, sees the state and what all agents do. An
agent's policy climbs its own critic with respect to its own action; the others' actions are those
of the batch. With `centralized: false` the critic sees only what its agent sees and does (DDPG,
Lillicrap et al. 2016, arXiv:1509.02971). MATD3 (Ackermann et al. 2019, arXiv:1910.01465) takes from
TD3 (Fujimoto et al. 2018, arXiv:1802.09477) twin critics, delayed policies and noise on the target
actions.

Continuous actions are tanh of the policy's outputs, with Gaussian noise while training. Discrete
ones are samples of a softmax, passed to the critic as one-hot vectors, with the gradient of
Gumbel-softmax (Jang et al. 2017, arXiv:1611.01144, section 2.2, straight-through), or with that of
the mean over all actions, which asks the critic nothing between the actions it has learned: target
actions are samples already, so TD3's noise is of continuous ones alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from typing_extensions import override

from murmur.learner_service.layers.building import weight_slices
from murmur.learner_service.layers.casting import frozen
from murmur.learner_service.layers.distributions import (
    ActionDistribution,
    explore,
    legal_alone,
    one_hot,
    sample,
)
from murmur.learner_service.layers.encoded import learned_parameters
from murmur.learner_service.layers.forward import forward
from murmur.learner_service.layers.inputs import Inputs, JointInputs, with_action
from murmur.learner_service.layers.recurrent import RecurrentState
from murmur.learner_service.learning import options
from murmur.learner_service.learning.base import require_bounds
from murmur.learner_service.learning.off_policy import (
    PRIORITY,
    OffPolicyAlgorithm,
    OffPolicyConfig,
    agents_loss,
    alive_mask,
    alive_rows,
    mean_of_alive,
    of_alive,
)
from murmur.learner_service.learning.policies import SnapshotPolicy
from murmur.learner_service.learning.returns import polyak_update, target_of
from murmur.learner_service.learning.sequences import Sequences
from murmur.learner_service.storage.storage import NEXT, observed
from murmur.shared.process.errors import ConfigError
from murmur.shared.wire.spec import ACTION_MASK, AGENT_MASK, Discrete, EnvSpec

_TD3_TARGET_NOISE = 0.2  # section 6.1
_FEW_ACTIONS = 16  # passes of the critics that an actor update may cost by default
OfAgents = tuple[Tensor | None, Tensor | None, Tensor]  # what `agents_loss` takes beside the loss


class Config(options.CriticConfig, OffPolicyConfig):
    """Options of MADDPG, DDPG and MATD3."""

    BEFORE: ClassVar[Mapping[str, Any]] = {"actor_gradient": "gumbel", "averaged_policy": False}

    gamma: options.Gamma = 0.95
    centralized: bool = Field(
        True, description="false: DDPG, a critic sees its own agent's observation and action alone"
    )
    share_encoder: options.ShareEncoder = False
    actor_lr: options.ActorRate = 5e-4
    critic_lr: options.CriticRate = 1e-3
    target_tau: options.TargetTau = 0.01
    averaged_policy: options.AveragedPolicy = False
    output_penalty: float = Field(
        1e-3, ge=0, description="weight of the policy's squared outputs, against saturation"
    )
    twin_critics: bool = Field(False, description="two critics, the lesser target counts (TD3)")
    policy_delay: int = Field(
        1, ge=1, description="critic updates per update of the policy and the targets (TD3: 2)"
    )
    target_noise: float | None = Field(
        0.0,
        ge=0,
        description="continuous: deviation of target noise, in half ranges; null: TD3's 0.2 where "
        "actions are continuous",
    )
    target_noise_clip: float = Field(0.5, ge=0, description="bound on that noise, same unit")
    noise_start: float = Field(
        0.3, ge=0, description="continuous: deviation of exploration, in halves of the range"
    )
    noise_end: float = Field(0.1, ge=0, description="the deviation once annealed")
    gumbel_temperature: float = Field(1.0, gt=0, description="discrete: of the Gumbel-softmax")
    actor_gradient: Literal["gumbel", "exact"] | None = Field(
        None,
        description="discrete: how policies climb their critics: by the critic's slope at a "
        "Gumbel-softmax sample, or by its values of all own actions, each a pass of the critics; "
        f"null: exact where there are at most {_FEW_ACTIONS} actions",
    )
    epsilon_start: options.EpsilonStart = 0.0
    epsilon_end: options.EpsilonEnd = 0.0
    exploration_env_steps: int = Field(
        50_000, ge=1, description="rows after the first update over which noise and epsilon fall"
    )

    @property
    @override
    def about(self) -> options.About:
        return replace(super().about, trial={"policy_delay": 1})  # policies move in every update


def gumbel_softmax(
    logits: Tensor, mask: Tensor | None, temperature: float, generator: torch.Generator
) -> Tensor:
    """A sample of the softmax as a one-hot vector, with the gradient of the relaxed sample.

    y = softmax((logits + g) / temperature), g standard Gumbel; forward one_hot(argmax y), backward
    dy. Jang et al. 2017, arXiv:1611.01144. The argmax of logits + g is distributed as the softmax
    whatever the temperature.

    Args:
        logits: [..., K]; carries the gradient.
        mask: [..., K] 1 = legal, or None if all are.
        temperature: small: gradient nearer to the sample's, and of larger variance.
        generator: random generator of g.

    Returns:
        [..., K], exactly zero and without gradient where illegal.
    """
    logits = legal_alone(logits, mask)
    clock = torch.empty_like(logits).exponential_(generator=generator)
    gumbel = -clock.clamp_min(1e-30).log()  # a clock of exactly zero would make it infinite
    soft = ((logits + gumbel) / temperature).softmax(-1)
    hard = one_hot(soft.argmax(-1), logits.shape[-1]).to(soft.dtype)
    return hard + (soft - soft.detach())


class Actions:
    """Between the environment's actions and the critics', which are vectors of about unit size.

    Continuous actions are mapped from [low, high] to [-1, 1], discrete ones to one-hot vectors.

    Attributes:
        discrete: whether there are K of them.
        size: numbers in a critic's action: U or K.
    """

    def __init__(self, spec: EnvSpec) -> None:
        """Raises SpecError for a continuous action without finite bounds."""
        self.discrete = isinstance(spec.action, Discrete)
        if isinstance(spec.action, Discrete):
            self.size = spec.action.num_actions
            return
        self.size = spec.action.size
        (self._low, self._high) = require_bounds(spec)
        self._middle = (self._low + self._high) / 2
        self._half = (self._high - self._low) / 2

    def encode(self, action: Tensor) -> Tensor:
        """[B, A] int or [B, A, U] of the environment -> [B, A, size]."""
        if self.discrete:
            return one_hot(action, self.size)
        return (action - self._middle) / self._half

    def decode(self, unit: Tensor) -> Tensor:
        """[B, A, U] in [-1, 1] -> the environment's."""
        return (self._middle + self._half * unit).clamp(self._low, self._high)


@dataclass
class Noisy(ActionDistribution):
    """Actions with Gaussian noise, or uniform random ones with probability epsilon.

    Attributes:
        unit: [B, A, U] actions in [-1, 1].
        noise: scalar deviation of the noise.
        epsilon: scalar share of uniform random actions.
    """

    unit: Tensor
    noise: Tensor
    epsilon: Tensor

    @override
    def sample(self, generator: torch.Generator) -> Tensor:
        noise = torch.empty_like(self.unit).normal_(generator=generator)
        unit = self.unit + self.noise * noise
        uniform = torch.empty_like(unit).uniform_(-1, 1, generator=generator)
        chance = torch.empty_like(unit[..., :1]).uniform_(generator=generator)
        return torch.where(chance < self.epsilon, uniform, unit.clamp(-1, 1))

    @override
    def mode(self) -> Tensor:
        return self.unit


@dataclass
class ExploringSoftmax(ActionDistribution):
    """A softmax over legal actions, mixed with uniform random ones.

    Attributes:
        logits: [B, A, K] float32, those of illegal actions below all others.
        mask: [B, A, K] 1 = legal, or None if all are.
        epsilon: scalar share of uniform random actions.
        even: scalar 1 / K.
    """

    logits: Tensor
    mask: Tensor | None
    epsilon: Tensor
    even: Tensor

    @override
    def sample(self, generator: torch.Generator) -> Tensor:
        pi = explore(self.logits.softmax(-1), self.mask, self.epsilon, self.even)
        return sample(pi, generator)

    @override
    def mode(self) -> Tensor:
        return self.logits.argmax(-1)


class MaddpgPolicy(SnapshotPolicy):
    """The actor with epsilon and, if continuous, the noise, frozen.

    Greedy actions are tanh of the outputs, or the largest of them that is legal.
    """

    def __init__(self, *how: Any) -> None:  # noqa: ANN401 - those of SnapshotPolicy
        super().__init__(*how)
        self._actions = Actions(self._spec)
        self._even = self.exploration.new_tensor(1 / self._actions.size)

    @override
    def distribution(self, out: Tensor, mask: Tensor | None) -> ActionDistribution:
        epsilon = self.exploration[0]
        if not self._actions.discrete:
            return Noisy(out.tanh(), self.exploration[1], epsilon)
        return ExploringSoftmax(legal_alone(out, mask), mask, epsilon, self._even)

    @override
    def in_bounds(self, action: Tensor) -> dict[str, Tensor]:
        return {"action": self._actions.decode(action)}


class Maddpg(OffPolicyAlgorithm):
    """Algorithm of deterministic actors and their critics. Used by the thread that learns."""

    POLICY, REMEMBERS = MaddpgPolicy, True
    _config: Config

    def _build(self) -> None:
        """mu(o) and Q(x, u) of each agent, and their targets mu' and Q'.

        Raises:
            SpecError: if continuous actions have no finite bounds.
        """
        c, spec = self._config, self._spec
        self._actions, self._critics = Actions(spec), 2 if c.twin_critics else 1
        discrete, noise = self._actions.discrete, c.target_noise
        if noise is None:
            noise = 0.0 if discrete else _TD3_TARGET_NOISE
        if discrete and noise:
            raise ConfigError(
                f"algorithm.target_noise={noise} is for continuous actions; "
                f"'{spec.name}' has discrete ones; set it to 0"
            )
        self._target_noise = noise
        gradient = c.actor_gradient or ("exact" if self._actions.size <= _FEW_ACTIONS else "gumbel")
        self._exact_gradient = discrete and gradient == "exact"
        self._joint_inputs = JointInputs(spec, self._options, centralized=c.centralized)
        shape = self._joint_inputs.with_action_shape
        encoder = self._shared_encoder(shape)
        self.actor = self._make_actor(self._actions.size, encoder)
        self.critic = self._make_twins(shape, 1, self._critics, encoder, self._slices)
        self.target_actor, self.target_critic = target_of(self.actor), target_of(self.critic)
        self._actor_optimizer = self._adam(self.actor, c.actor_lr)
        self._critic_optimizer = self._adam(self.critic, c.critic_lr)

    def _learn_options(self) -> dict[str, bool]:
        return {"moves_policies": self._counts["updates"] % self._config.policy_delay == 0}

    @property
    @override
    def _average(self) -> nn.Module | None:
        return self.target_actor if self._config.averaged_policy else None

    def _explores(self) -> dict[str, tuple[float, float, int]]:
        c = self._config
        falls = {"epsilon": (c.epsilon_start, c.epsilon_end, c.exploration_env_steps)}
        if not self._actions.discrete:
            falls["noise"] = (c.noise_start, c.noise_end, c.exploration_env_steps)
        return falls

    def _learn(self, rows: Mapping[str, Tensor], *, moves_policies: bool) -> dict[str, Tensor]:
        """The update, on the device from end to end; with and without the policies' turn."""
        rows, alive, sequences = self._transitions(rows)  # alive: [B, A], or None
        tau = self._config.target_tau
        obs = observed(rows)  # o: name -> [B, A, ...] or [B, ...]
        counted = None
        if alive is not None:
            counted = alive_rows(alive, obs, self._group, masked=sequences is not None)
        of_agents = alive, counted, self._shares
        action = self._actions.encode(rows["action"])  # u: [B, A, U or K]
        joint = self._joint_inputs(obs, action)  # x and the others' actions, from each agent
        # 1. and 2. Critics: y, and a step towards it.
        played = with_action(joint, action)
        scalars = self._critic_step(rows, sequences, played, of_agents)
        if moves_policies:
            # 3. Policies: a step up their critics.
            scalars |= self._actor_step(obs, sequences, joint, played, of_agents)
            # 4. Targets: theta' += tau (theta - theta').
            polyak_update(self.target_actor, self.actor, tau)
            polyak_update(self.target_critic, self.critic, tau)
        return scalars

    @torch.no_grad()
    def _target(
        self, rows: Mapping[str, Tensor], sequences: Sequences | None, played: Inputs
    ) -> Tensor:
        """[B, A] reward + discount * Q'(x', u'); who is dead then has nothing to come."""
        # 1. y = r + gamma^n min Q'(x', mu'(o')) by the lesser of twins (Lowe et al., equation 6).
        c, next_obs, reward = self._config, observed(rows, NEXT), rows["reward"]
        state: RecurrentState | None = None  # of the critic before the row
        if sequences is None:
            out = self._outputs(self.target_actor, next_obs)  # [B, A, U or K]
        else:
            out = sequences.following(
                self._outputs(self.target_actor, sequences.obs, sequences.hidden)
            )
            state = sequences.next_state(self.target_critic, played, self._precision)
        if self._target_noise:  # TD3, section 5.3
            noise = torch.empty_like(out).normal_(generator=self._generator) * self._target_noise
            noise = noise.clamp(-c.target_noise_clip, c.target_noise_clip)
            next_action = (out.tanh() + noise).clamp(-1, 1)
        else:
            next_action = self._choose(out, next_obs)
        joint = with_action(self._joint_inputs(next_obs, next_action), next_action)
        next_q = self._q(self.target_critic, joint, state).amin(-1)  # [B, A]
        return reward + of_alive(rows["discount"], alive_mask(next_obs.get(AGENT_MASK))) * next_q

    def _critic_step(
        self,
        rows: Mapping[str, Tensor],
        sequences: Sequences | None,
        played: Inputs,
        of_agents: OfAgents,
    ) -> dict[str, Tensor]:
        target = self._target(rows, sequences, played)  # [B, A]
        # 2. L = E[w (Q(x, u) - y)^2]; twins add: each has its own loss.
        if sequences is None:
            q = self._q(self.critic, played)  # [B, A, C]
        else:
            q, _ = sequences.values(self.critic, played, self._precision)
        error = q - target.unsqueeze(-1)
        squares = rows["weight"].unsqueeze(1) * error.square().sum(-1)  # [B, A]
        loss = agents_loss(squares, *of_agents)
        norm = self._precision.step(
            loss,
            self._critic_optimizer,
            self.critic.parameters(),
            self._config.max_grad_norm,
            weight_slices(self.critic, self._num_slices * self._critics),
        )
        td_error = mean_of_alive(error.detach().abs().mean(-1), of_agents[0])  # [B]
        return {
            "critic_loss": loss.detach() / (self._num_slices * self._critics),
            "q_mean": q.detach().mean(),
            "target_mean": target.mean(),
            "td_error": td_error.mean(),
            "critic_grad_norm": norm,
            PRIORITY: td_error,
        }

    def _actor_step(
        self,
        obs: Mapping[str, Tensor],
        sequences: Sequences | None,
        joint: Inputs,
        played: Inputs,
        of_agents: OfAgents,
    ) -> dict[str, Tensor]:
        # 3. J = E[Q(x, u)], u_a = mu_a(o_a), the others' of the batch (Lowe et al., equation 5).
        state: RecurrentState | None = None  # of the critic before the row
        if sequences is None:
            out = self._outputs(self.actor, obs)  # [B, A, U or K]
        else:
            out = sequences.now(self._outputs(self.actor, sequences.obs, sequences.hidden))
            with torch.no_grad():
                _, states = sequences.values(self.critic, played, self._precision)
            state = sequences.state_now(states)
        if self._exact_gradient:
            q = self._expected(joint, out, obs, state)  # [B, A]
        else:
            own = self._choose(out, obs)
            with frozen(self.critic):  # only the way through it is wanted
                q = self._q(self.critic, with_action(joint, own), state)[..., 0]
        loss = self._config.output_penalty * out.square().mean(-1) - q
        loss = agents_loss(loss, *of_agents)
        norm = self._precision.step(
            loss,
            self._actor_optimizer,
            learned_parameters(self.actor),
            self._config.max_grad_norm,
            self._num_slices,
        )
        return {"actor_loss": loss.detach() / self._num_slices, "actor_grad_norm": norm}

    def _expected(
        self, joint: Inputs, out: Tensor, obs: Mapping[str, Tensor], state: RecurrentState | None
    ) -> Tensor:
        """Return the mean of the first critics' values, sum_k pi(k) Q(x, k); [B, A]."""
        logits = legal_alone(out, obs.get(ACTION_MASK))
        with torch.no_grad():
            values = [
                self._q(self.critic, with_action(joint, own.expand_as(out)), state)[..., 0]
                for own in torch.eye(out.shape[-1], device=out.device)
            ]
        return (logits.softmax(-1) * torch.stack(values, -1)).sum(-1)

    def _choose(self, out: Tensor, obs: Mapping[str, Tensor]) -> Tensor:
        """[B, A, size] actions as the critics see them, differentiable."""
        if not self._actions.discrete:
            return out.tanh()
        mask = obs.get(ACTION_MASK)
        return gumbel_softmax(out, mask, self._config.gumbel_temperature, self._generator)

    def _q(self, critic: nn.Module, inputs: Inputs, state: RecurrentState | None = None) -> Tensor:
        """[B, A, C] float32 of inputs with own actions: a twin is one more slice, fed alike."""
        return forward(critic, inputs, state, self._precision)[0]


build = Maddpg

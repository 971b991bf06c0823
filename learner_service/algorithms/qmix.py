"""QMIX, VDN and independent Q-learning.

Rashid, Samvelyan, Schroeder de Witt, Farquhar, Foerster, Whiteson 2018, "QMIX: Monotonic Value
Function Factorisation for Deep Multi-Agent Reinforcement Learning" (arXiv:1803.11485): each agent
has a Q network over its own observations; a mixing network, whose weights the global state
determines and none of which is negative, joins the values of the actions taken to the team's. So
what is best for each agent alone is best for the team. VDN (Sunehag et al. 2018,
arXiv:1706.05296) joins them by a sum; independent Q-learning (IQL) does not join them.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from learner_service.algorithms.base import Policy, require_discrete
from learner_service.algorithms.frozen import FrozenAgents
from learner_service.algorithms.off_policy import (
    NEXT,
    PRIORITY,
    OffPolicyAlgorithm,
    OffPolicyConfig,
    agent_shares,
    agents_loss,
    living,
    living_rows,
    observed,
)
from learner_service.algorithms.options import SharingConfig
from learner_service.algorithms.returns import mean_over, polyak_update
from learner_service.networks.building import build_network, input_options
from learner_service.networks.casting import cast_weights
from learner_service.networks.distributions import explore, one_hot, sample
from learner_service.networks.forward import forward, forward_agents
from learner_service.networks.inputs import ActorInputs, StateInputs
from learner_service.networks.recurrent import Past, memory_size
from learner_service.networks.snapshot import publish, snapshot
from learner_service.networks.stacked import count_slices
from learner_service.runtime.adam import Adam
from learner_service.runtime.precision import Precision
from learner_service.storage.replay_batch import ReplayBatch
from shared.config import PluginConfig
from shared.spec import ACTION_MASK, AGENT_MASK, EnvSpec
from shared.timestep import StepType

_ILLEGAL = -1e9  # a value that no legal action comes near
_FIRST_SHARE = 0.1  # of the usual first weights that hang on the state


class Config(SharingConfig, OffPolicyConfig):
    """Options of QMIX, VDN and IQL."""

    mixer: Literal["qmix", "vdn", "none"] = Field(
        "qmix",
        description="how the agents' values make the team's: a monotonic network over the state, "
        "a sum, or not at all: each agent learns its own reward (IQL)",
    )
    mixer_hidden: int = Field(32, ge=1, description="qmix: width of the mixing network")
    double_q: bool = Field(True, description="the online network picks what the target values")
    gamma: float = Field(0.99, ge=0, le=1, description="discount factor")
    lr: float = Field(5e-4, gt=0, description="Adam's learning rate")
    target_tau: float = Field(
        0.01, gt=0, le=1, description="share by which the target follows per update"
    )
    max_grad_norm: float = Field(10.0, ge=0, description="gradient norm is clipped; 0: never")
    epsilon_start: float = Field(1.0, ge=0, le=1, description="share of uniform random actions")
    epsilon_end: float = Field(0.05, ge=0, le=1, description="the share once annealed")
    epsilon_env_steps: int = Field(
        50_000, ge=1, description="rows after the first update over which epsilon falls linearly"
    )

    def reward_sets(self, num_agents: int) -> tuple[int, ...]:
        """See SharingConfig: a team that mixes has one reward."""
        return (0,) * num_agents if self.mixer != "none" else self.slices(num_agents)


class Mixer(nn.Module):
    """The mixing network of Rashid et al. 2018, figure 2: monotonic in every agent's value.

    Q_tot = |w_2(s)| . f(|W_1(s)| q + b_1(s)) + b_2(s). Their f is elu, which is bounded below:
    where rewards are costs, no gradient comes through, and a value that rises gets ever more of it.
    Here that is f of the first half of the hidden units; of the others it is -elu(-x), bounded
    above and as monotonic (Runje and Shankaranarayana 2023, "Constrained Monotonic Neural
    Networks", arXiv:2205.11775, section 3), so that some half always passes the gradient on.

    Runs in fp32, like all losses. It starts close to the sum of the agents' values, VDN, and far
    from zero to half of it: with weights of any size, of which the state's units decide, the first
    targets would be tens of rewards away and take long to come down.
    """

    def __init__(self, num_agents: int, state_size: int, hidden: int) -> None:
        super().__init__()
        self._hidden = hidden
        self.first_weight = nn.Linear(state_size, num_agents * hidden)
        self.first_bias = nn.Linear(state_size, hidden)
        self.second_weight = nn.Linear(state_size, hidden)
        layers = nn.Linear(state_size, hidden), nn.ReLU(), nn.Linear(hidden, 1)
        self.second_bias = nn.Sequential(*layers)
        with torch.no_grad():
            for layer in (self.first_weight, self.second_weight):
                layer.weight.mul_(_FIRST_SHARE)
                layer.bias.fill_(hidden**-0.5)
            self.first_bias.weight.mul_(_FIRST_SHARE)
            layers[-1].weight.mul_(_FIRST_SHARE)

    def forward(self, q: Tensor, state: Tensor) -> Tensor:
        """[B, A] values of the actions taken and [B, S] state -> [B, 1]."""
        weight = self.first_weight(state).abs().view(*q.shape, self._hidden)  # [B, A, H]
        sums = (q.unsqueeze(-1) * weight).sum(1) + self.first_bias(state)
        first, second = sums.tensor_split([(self._hidden + 1) // 2], 1)
        hidden = torch.cat([F.elu(first), -F.elu(-second)], 1)
        total = (hidden * self.second_weight(state).abs()).sum(1, keepdim=True)
        out: Tensor = total + self.second_bias(state)
        return out


class Values(nn.Module):
    """The agents' Q networks and what joins them; online or target.

    Attributes:
        rewards: [2] lowest and highest sum of a transition's rewards so far, and 0.
    """

    rewards: Tensor

    def __init__(self, agents: nn.Module, mixer: nn.Module | None) -> None:
        super().__init__()
        self.agents, self.mixer = agents, mixer
        self.register_buffer("rewards", torch.zeros(2))


def legal_values(q: Tensor, mask: Tensor | None) -> Tensor:
    """[B, A, K] values with those of illegal actions below all others."""
    return q if mask is None else q.masked_fill(mask == 0, _ILLEGAL)


class QmixPolicy(Policy):
    """The agents' networks and epsilon, frozen."""

    def __init__(
        self,
        agents: nn.Module,
        inputs: ActorInputs,
        spec: EnvSpec,
        epsilon: Tensor,
        precision: Precision,
    ) -> None:
        self.agents = snapshot(agents, precision)
        self.epsilon = epsilon.clone()
        self.memory_size = memory_size(agents)
        self._inputs, self._spec, self._precision = inputs, spec, precision

    @torch.inference_mode()
    def act(
        self,
        observation: Mapping[str, Tensor],
        generator: torch.Generator | None,
        memory: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """See Policy: epsilon-greedy over legal actions."""
        inputs, remembered = self._inputs(observation), None
        if memory is None:
            q = forward_agents(self.agents, inputs, self._precision, self._spec.num_agents)
        else:
            with cast_weights(self._precision, self.agents):
                out, remembered = forward(self.agents, inputs, Past(memory))
            q = out.float()
        mask = observation.get(ACTION_MASK)
        action = legal_values(q, mask).argmax(-1)
        if generator is not None:
            greedy = one_hot(action, q.shape[-1])
            action = sample(explore(greedy, mask, self.epsilon), generator)
        acted = {"action": action.int()}
        return acted if remembered is None else acted | {"memory": remembered}


class Qmix(OffPolicyAlgorithm):
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
        """Build the networks, their targets and the optimiser.

        Raises:
            SpecError: if the actions are not discrete.
            ConfigError: if share_parameters or frozen_agents do not fit the agents.
        """
        num_actions = require_discrete("iql" if config.mixer == "none" else config.mixer, spec)
        team = config.mixer != "none"
        super().__init__(config.replay, config.gamma, precision, device, seed, team=team)
        self._config, self._spec = config, spec
        self._inputs = ActorInputs(spec, input_options(network, spec))
        self._state = StateInputs(spec)
        slices = config.slices(spec.num_agents)
        self._frozen = FrozenAgents(config.frozen_agents, slices, device)
        # Who mixes learns from one loss: its gradient is one vector, clipped as a whole.
        apart = slices if config.mixer == "none" else (0,)
        self._num_slices, self._shares = count_slices(apart), agent_shares(apart, device)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            agents = build_network(
                network, self._inputs.shape, num_actions, slices, may_remember=True
            )
            mixer = None
            if config.mixer == "qmix":
                mixer = Mixer(spec.num_agents, self._state.size, config.mixer_hidden)
        self.memory_size = memory_size(agents)
        self.values = Values(agents, mixer).to(device)
        self.target = copy.deepcopy(self.values).requires_grad_(False)
        self._optimizer = Adam(
            self.values.parameters(), config.lr, fused=True, capturable=device.type == "cuda"
        )
        self._parts |= {
            "values": self.values,
            "target": self.target,
            "optimizer": self._optimizer,
        }
        self._epsilon = torch.zeros((), device=device)
        self._set_epsilon()
        self._captured = self._capture("update", self._learn)

    def update(self, batch: ReplayBatch) -> dict[str, Tensor]:
        """One step of double Q-learning on the joined value.

        Returns:
            loss, q_mean, target_mean, td_error (mean absolute), grad_norm, epsilon, and
            beyond_rewards: share of next values that were clipped, see `_allowed`.
        """
        rows = batch.arrays if self.memory_size else self._rows_of(batch)
        scalars = self._captured(rows)
        batch.td_error = scalars.pop(PRIORITY)
        self._count_update()
        self._set_epsilon()
        return {**scalars, "epsilon": self._epsilon.clone()}

    def _learn(self, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The update, on the device from end to end."""
        c = self._config
        step = self._of_sequences(rows) if self.memory_size else self._of_rows(rows)
        alive = living(step.observation, step.reward)
        target, beyond = self._target(step)
        q = step.q.gather(-1, step.action.long().unsqueeze(-1)).squeeze(-1)
        total = self._mix(self.values, q, alive, step.observation)  # [B, A], mixed: [B, 1]
        counted = alive if c.mixer == "none" else alive.amax(1, keepdim=True)
        masked = self.memory_size > 0
        if masked:  # rows of a sequence that are no transitions
            counted = counted * step.weight.unsqueeze(1)
        error = total - target
        weighted = step.weight.unsqueeze(1) * error.square()
        rows_counted = living_rows(counted, step.observation, self._group, masked=masked)
        loss = agents_loss(weighted, counted, rows_counted, self._shares)
        norm = self._precision.step(
            loss, self._optimizer, self.values.parameters(), c.max_grad_norm, self._num_slices
        )
        polyak_update(self.target, self.values, c.target_tau)
        td_error = mean_over(error.detach().abs(), counted, 1)
        return {
            "loss": loss.detach() / self._num_slices,
            "q_mean": total.detach().mean(),
            "target_mean": target.mean(),
            "td_error": td_error.mean(),
            "grad_norm": norm,
            "beyond_rewards": beyond,
            PRIORITY: td_error,
        }

    def _of_rows(self, rows: Mapping[str, Tensor]) -> "_Step":
        """Values of both ends of transitions that were drawn one by one."""
        rows = self._augmented(rows)
        observation, following = observed(rows), observed(rows, NEXT)
        with torch.no_grad():
            value = self._q(self.target.agents, following)
            chooser = self._q(self.values.agents, following) if self._config.double_q else value
        return _Step(
            observation,
            following,
            self._q(self.values.agents, observation),
            value,
            chooser,
            *(rows[name] for name in ("action", "reward", "discount", "weight")),
        )

    def _of_sequences(self, arrays: Mapping[str, Tensor]) -> "_Step":
        """Values of all transitions of sequences [L + 1, S, ...], from the stored state on."""
        arrays = self._frozen.hidden(arrays)
        kinds, flat = arrays["step_type"], {k: v.flatten(0, 1) for k, v in arrays.items()}
        observation = observed(flat)  # name -> [(L + 1) * S, ...]
        past = Past(arrays["memory"][0], kinds == int(StepType.FIRST))
        q = self._q(self.values.agents, observation, past)
        with torch.no_grad():
            value = self._q(self.target.agents, observation, past)
        starts = kinds.shape[1]  # joint rows from one step to the next
        before, after = slice(None, -starts), slice(starts, None)
        following = {name: x[after] for name, x in observation.items()}
        discount = self._config.gamma * flat["discount"][after].unsqueeze(1)
        if self._config.mixer == "none" and AGENT_MASK in following:
            discount = discount * (following[AGENT_MASK] != 0)
        last, void = int(StepType.LAST), int(StepType.VOID)
        valid = (kinds[:-1] < last) & (kinds[1:] != void)
        return _Step(
            {name: x[before] for name, x in observation.items()},
            following,
            q[before],
            value[after],
            q.detach()[after] if self._config.double_q else value[after],
            flat["action"][before],
            flat["reward"][after],
            discount,
            valid.flatten().float(),
        )

    @torch.no_grad()
    def _target(self, step: "_Step") -> tuple[Tensor, Tensor]:
        """Reward + discount * value of the best next actions; see `_allowed` for the second.

        The first is the team's [B, 1], or each agent's [B, A].
        """
        observation, reward = step.next_observation, step.reward
        alive = living(observation, reward)
        mask = observation.get(ACTION_MASK)
        best = legal_values(step.next_chooser, mask).argmax(-1, keepdim=True)
        value = step.next_value.gather(-1, best).squeeze(-1)
        following = self._mix(self.target, value, alive, observation)
        if self._config.mixer != "none":
            reward = reward.sum(1, keepdim=True)
        allowed, beyond = self._allowed(following, reward)
        return reward + step.discount * allowed, beyond

    def _allowed(self, values: Tensor, reward: Tensor) -> tuple[Tensor, Tensor]:
        """Values clipped to what rewards like those seen so far can add up to; the share clipped.

        No policy earns more than the highest reward for ever, max R / (1 - gamma^n), and none less
        than the lowest; an episode's end earns 0. A target beyond that would teach the next one to
        go further. Andrychowicz et al. 2017, "Hindsight Experience Replay" (arXiv:1707.01495),
        appendix A, clip theirs so.
        """
        lowest, highest = self.values.rewards.unbind()
        torch.minimum(lowest, reward.min(), out=lowest)
        torch.maximum(highest, reward.max(), out=highest)
        if self._group.size > 1:
            self._group.largest_([lowest.neg_(), highest])
            lowest.neg_()
        remaining = 1 - self._config.gamma**self._config.replay.n_step
        if remaining == 0:  # there is no bound
            return values, torch.zeros_like(lowest)
        allowed = values.clamp(lowest / remaining, highest / remaining)
        return allowed, (allowed != values).float().mean()

    def _q(
        self, agents: nn.Module, observation: Mapping[str, Tensor], past: Past | None = None
    ) -> Tensor:
        """[B, A, K] float32; with a past of joint rows B = T * S, time outermost."""
        inputs = self._inputs(observation)
        if past is None:
            return forward_agents(agents, inputs, self._precision, self._spec.num_agents)
        with cast_weights(self._precision, agents):
            out, _ = forward(agents, inputs, past)
        return out.float()

    def _mix(
        self, values: Values, q: Tensor, alive: Tensor, observation: Mapping[str, Tensor]
    ) -> Tensor:
        """[B, A] values of actions -> [B, 1] of the team, or as they are; the dead are worth 0."""
        q = q * alive
        if self._config.mixer == "none":
            return q
        if values.mixer is None:
            return q.sum(1, keepdim=True)
        out: Tensor = values.mixer(q, self._state(observation))
        return out

    def _set_epsilon(self) -> None:
        c = self._config
        self._epsilon.fill_(self._annealed(c.epsilon_start, c.epsilon_end, c.epsilon_env_steps))

    def make_policy(self) -> QmixPolicy:
        """See Algorithm."""
        return QmixPolicy(
            self.values.agents, self._inputs, self._spec, self._epsilon, self._precision
        )

    @torch.no_grad()
    def publish(self, policy: Policy) -> None:
        """See Algorithm."""
        assert isinstance(policy, QmixPolicy)
        publish(self.values.agents, policy.agents)
        policy.epsilon.copy_(self._epsilon)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See Algorithm."""
        super().load_state_dict(state)
        self._set_epsilon()


@dataclass
class _Step:
    """What one update learns from: B transitions from row t to row t + k.

    Attributes:
        observation: name -> [B, ...] of row t.
        next_observation: the same of row t + k.
        q: [B, A, K] values of the actions at row t; they carry the gradient.
        next_value: [B, A, K] the target networks' values at row t + k.
        next_chooser: [B, A, K] values by which the action at row t + k is chosen.
        action: [B, A] taken at row t.
        reward: [B, A] of ReplayBatch.
        discount: [B, A] or [B, 1] of ReplayBatch.
        weight: [B] importance weight; of sequences 1 for a transition, else 0.
    """

    observation: dict[str, Tensor]
    next_observation: dict[str, Tensor]
    q: Tensor
    next_value: Tensor
    next_chooser: Tensor
    action: Tensor
    reward: Tensor
    discount: Tensor
    weight: Tensor


build = Qmix

"""QMIX, QPLEX, VDN and independent Q-learning.

Rashid, Samvelyan, Schroeder de Witt, Farquhar, Foerster, Whiteson 2018, "QMIX: Monotonic Value
Function Factorisation for Deep Multi-Agent Reinforcement Learning" (arXiv:1803.11485): each agent
has a Q network over its own observations; a mixing network, whose weights the global state
determines and none of which is negative, joins the values of the actions taken to the team's. So
what is best for each agent alone is best for the team. VDN (Sunehag et al. 2018,
arXiv:1706.05296) joins them by a sum; QPLEX (Wang et al. 2021, arXiv:2008.01062) by what each
action lacks of the agent's best, too: see DuplexMixer. Independent Q-learning (IQL) does not join
them.
"""

from collections.abc import Mapping
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from typing_extensions import override

from murmur.learner_service.layers.distributions import legal_alone
from murmur.learner_service.layers.duplex import DuplexMixer
from murmur.learner_service.layers.inputs import StateInputs
from murmur.learner_service.learning import options
from murmur.learner_service.learning.base import require_discrete
from murmur.learner_service.learning.exploration import EpsilonGreedy
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
from murmur.shared.wire.spec import ACTION_MASK, AGENT_MASK

_DECAYS = 0.9, 0.999  # of Adam's moments, as usual
# The second as of the RMSprop with which QPLEX was published. A value that moves by a step moves
# Q_tot by importance times as much, of which its gradient knows nothing. Where all payoffs are
# learned, 0.999 lets steps grow until they overshoot, and too late makes them small again.
_QPLEX_DECAYS = 0.9, 0.99
_FIRST_SHARE = 0.1  # of the usual first weights that hang on the state


class Config(OffPolicyConfig):
    """Options of QMIX, QPLEX, VDN and IQL."""

    # By 0.99 values of endless costs, as on spread, fall to a hundred steps' worth before they are
    # learned, and their errors hide what an action is worth.
    gamma: options.Gamma = 0.95
    mixer: Literal["qmix", "qplex", "vdn", "none"] = Field(
        "qmix",
        description="how the agents' values make the team's: a monotonic network over the state, "
        "one that can tell any payoff, a sum, or not at all: each agent learns its own reward "
        "(IQL)",
    )
    mixer_hidden: int = Field(32, ge=1, description="qmix, qplex: width of the mixing network")
    heads: int = Field(10, ge=1, description="qplex: summands of an action's importance")
    double_q: bool = Field(True, description="the online network picks what the target values")
    lr: float = Field(5e-4, gt=0, description="Adam's learning rate")
    target_tau: options.TargetTau = 0.01
    averaged_policy: options.AveragedPolicy = True
    epsilon_start: options.EpsilonStart = 1.0
    epsilon_end: options.EpsilonEnd = 0.05
    epsilon_env_steps: int = Field(
        50_000, ge=1, description="rows after the first update over which epsilon falls linearly"
    )

    def reward_sets(self, num_agents: int) -> tuple[int, ...]:
        """Return the reward sets: one for a team that mixes, else those of SharingConfig."""
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
        first, last = nn.Linear(state_size, hidden), nn.Linear(hidden, 1)
        self.second_bias = nn.Sequential(first, nn.ReLU(), last)
        with torch.no_grad():
            for layer in (self.first_weight, self.second_weight):
                layer.weight.mul_(_FIRST_SHARE)
                layer.bias.fill_(hidden**-0.5)
            self.first_bias.weight.mul_(_FIRST_SHARE)
            last.weight.mul_(_FIRST_SHARE)

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


class QmixPolicy(SnapshotPolicy):
    """The agents' networks and epsilon, frozen."""

    @override
    def distribution(self, out: Tensor, mask: Tensor | None) -> EpsilonGreedy:
        return EpsilonGreedy(legal_alone(out, mask), mask, self.exploration[0])


class Qmix(OffPolicyAlgorithm):
    """Algorithm of Q networks, mixed or independent. Used by the thread that learns."""

    POLICY, REMEMBERS = QmixPolicy, True
    _config: Config

    def _build(self) -> None:
        """Q(o, u) of each agent, what joins them to Q_tot, and their targets.

        Raises:
            SpecError: if the actions are not discrete.
        """
        c, spec = self._config, self._spec
        self._team, self._state = c.mixer != "none", StateInputs(spec)
        num_actions = require_discrete(spec)
        agents = self._make_actor(num_actions)
        shape = spec.num_agents, self._state.size, c.mixer_hidden
        mixer: nn.Module | None = None
        if c.mixer == "qmix":
            mixer = Mixer(*shape)
        elif c.mixer == "qplex":
            mixer = DuplexMixer(*shape, num_actions, c.heads)
        self.values = Values(agents, mixer).to(self._device)
        self.target = target_of(self.values)
        decays = _QPLEX_DECAYS if c.mixer == "qplex" else _DECAYS
        self._optimizer = self._adam(self.values, c.lr, betas=decays)

    @property
    def _acts(self) -> nn.Module:
        return self.values.agents

    @property
    @override
    def _average(self) -> nn.Module | None:
        return self.target.agents if self._config.averaged_policy else None

    def _explores(self) -> dict[str, tuple[float, float, int]]:
        c = self._config
        return {"epsilon": (c.epsilon_start, c.epsilon_end, c.epsilon_env_steps)}

    def _learn(self, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The update, on the device from end to end."""
        c = self._config
        rows, counted, sequences = self._transitions(rows)
        obs = observed(rows)
        # 1. Q(o, u) and Q'(o', u') of all actions, [B, A, K].
        q, next_value, next_chooser = self._ends(rows, sequences)
        # 2. Targets y, [B, A]; mixed: [B, 1].
        target, beyond = self._target(rows, next_value, next_chooser)
        # 3. Q_tot of the actions taken, and a step down E[w (Q_tot - y)^2] (equation 6).
        total = self._mix(self.values, q, rows["action"].long(), obs)
        error = total - target
        weighted = rows["weight"].unsqueeze(1) * error.square()
        rows_counted = None
        if counted is not None:
            counted = counted.amax(1, keepdim=True) if self._team else counted
            masked = sequences is not None
            rows_counted = alive_rows(counted, obs, self._group, masked=masked)
        loss = agents_loss(weighted, counted, rows_counted, self._shares)
        norm = self._precision.step(
            loss, self._optimizer, self.values.parameters(), c.max_grad_norm, self._num_slices
        )
        # 4. Targets: theta' += tau (theta - theta').
        polyak_update(self.target, self.values, c.target_tau)
        td_error = mean_of_alive(error.detach().abs(), counted)  # [B]
        return {
            "loss": loss.detach() / self._num_slices,
            "q_mean": total.detach().mean(),
            "target_mean": target.mean(),
            "td_error": td_error.mean(),
            "grad_norm": norm,
            "beyond_rewards": beyond,
            PRIORITY: td_error,
        }

    def _ends(
        self, rows: Mapping[str, Tensor], sequences: Sequences | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return values of all actions at both ends of transitions, each [B, A, K].

        Returns:
            values at row t, which carry the gradient; the target's at row t + k; and those by which
            the action at row t + k is chosen.
        """
        agents, target, double = self.values.agents, self.target.agents, self._config.double_q
        if sequences is not None:
            every = self._outputs(agents, sequences.obs, sequences.hidden)
            with torch.no_grad():
                value = sequences.following(self._outputs(target, sequences.obs, sequences.hidden))
            chooser = sequences.following(every.detach()) if double else value
            return sequences.now(every), value, chooser
        next_obs = observed(rows, NEXT)
        with torch.no_grad():
            value = self._outputs(target, next_obs)
            chooser = self._outputs(agents, next_obs) if double else value
        return self._outputs(agents, observed(rows)), value, chooser

    @torch.no_grad()
    def _target(
        self, rows: Mapping[str, Tensor], next_value: Tensor, next_chooser: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Reward + discount * value of the best next actions; see `_allowed` for the second.

        The first is the team's [B, 1], or each agent's [B, A]; arguments are those of `_ends`.
        """
        next_obs, reward = observed(rows, NEXT), rows["reward"]
        # 2. y = r + gamma Q_tot'(s', argmax_u Q(o', u)), no further than rewards reach.
        best = legal_alone(next_chooser, next_obs.get(ACTION_MASK)).argmax(-1)
        value = self._mix(self.target, next_value, best, next_obs)
        if self._team:
            reward = reward.sum(1, keepdim=True)
        allowed, beyond = self._allowed(value, reward)
        return reward + rows["discount"] * allowed, beyond

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

    def _mix(self, values: Values, q: Tensor, action: Tensor, obs: Mapping[str, Tensor]) -> Tensor:
        """Return the team's values [B, 1] of joint actions, or each agent's [B, A].

        Args:
            values: networks, online or target.
            q: [B, A, K] the agents' values of all actions.
            action: [B, A] int64 joint actions.
            obs: name -> [B, ...] observations; the dead are worth 0.
        """
        alive = alive_mask(obs.get(AGENT_MASK))  # [B, A]
        taken = q.gather(-1, action.unsqueeze(-1)).squeeze(-1)  # [B, A]
        if isinstance(values.mixer, DuplexMixer):
            best = legal_alone(q, obs.get(ACTION_MASK)).amax(-1)
            duplex: Tensor = values.mixer(taken, best, action, alive, self._state(obs))
            return duplex
        taken = of_alive(taken, alive)
        if not self._team:
            return taken
        if values.mixer is None:
            return taken.sum(1, keepdim=True)
        out: Tensor = values.mixer(taken, self._state(obs))
        return out


build = Qmix

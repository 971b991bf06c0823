"""Mixing network of QPLEX: any payoff can be told, and the team's best is each agent's own best.

Wang, Ren, Liu, Yu, Zhang 2021, "QPLEX: Duplex Dueling Multi-Agent Q-Learning" (arXiv:2008.01062):
each agent's value is split in its best one and what the action played lacks of it, and joined by

    Q_i' = w_i(s) Q_i + b_i(s), w_i > 0,    A_i' = Q_i' - max Q_i'    (transformation, equation 8)
    Q_tot = sum_i Q_i' + sum_i (lambda_i(s, u) - 1) A_i', lambda_i > 0    (equations 9 to 11)

which is the team's best value plus sum_i lambda_i A_i'.
"""

import torch
from torch import Tensor, nn

from murmur.learner_service.layers.distributions import one_hot
from murmur.learner_service.layers.stacked import StackedLinear

_LEAST = 1e-10  # of weights, as published


class Heads(nn.Module):
    """Networks of three layers side by side, one a head: [B, I] -> [B, H, O]."""

    def __init__(self, heads: int, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        each = tuple(range(heads))
        self._heads = heads
        self.first = nn.Linear(inputs, heads * hidden)  # all see the same
        self.second = StackedLinear(each, hidden, hidden, relu=True)
        self.last = StackedLinear(each, hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, H, O] of [B, I]."""
        first = self.first(x).relu().view(len(x) * self._heads, -1)
        out: Tensor = self.last(self.second(first))
        return out.view(len(x), self._heads, -1)


class DuplexMixer(nn.Module):
    """The mixing network of Wang et al. 2021, figure 1, with the sizes of the authors' code.

    Gradient of the agents' values passes by the first sum alone, as in their code: an importance of
    almost 0 says that a joint action lacks little of the best one. Were its advantage to have the
    gradient, too, nothing could raise the values of actions that belong to a better one still, and
    the team would stay with what it holds for the best.

    Each head has networks of its own, as theirs have: with a common hidden layer the importances of
    different joint actions move together, and the best one can stay hidden behind its neighbors.

    Runs in fp32, like all losses.
    """

    def __init__(
        self, num_agents: int, state_size: int, hidden: int, num_actions: int, heads: int
    ) -> None:
        super().__init__()
        self._num_actions = num_actions
        self.weight, self.bias = (
            nn.Sequential(nn.Linear(state_size, hidden), nn.ReLU(), nn.Linear(hidden, num_agents))
            for _ in range(2)
        )
        self.key = Heads(heads, state_size, hidden, 1)
        self.agents = Heads(heads, state_size, hidden, num_agents)
        self.actions = Heads(heads, state_size + num_agents * num_actions, hidden, num_agents)

    def importance(self, state: Tensor, action: Tensor, alive: Tensor | None) -> Tensor:
        """Return lambda [B, A] > 0 of [B, S] states and [B, A] joint actions; see `forward`.

        lambda_i = sum_h |v_h(s)| sigmoid(phi_hi(s)) sigmoid(l_hi(s, u)), equation 12.
        """
        played = one_hot(action, self._num_actions)  # [B, A, K]
        played = (played if alive is None else played * alive.unsqueeze(2)).flatten(1)
        of_actions = self.actions(torch.cat([state, played], 1)).sigmoid()  # [B, H, A]
        key = self.key(state).abs() + _LEAST  # [B, H, 1]
        out: Tensor = (key * self.agents(state).sigmoid() * of_actions).sum(1)
        return out

    def forward(
        self, taken: Tensor, best: Tensor, action: Tensor, alive: Tensor | None, state: Tensor
    ) -> Tensor:
        """Return Q_tot [B, 1].

        Args:
            taken: [B, A] the agents' values of the joint action.
            best: [B, A] highest value of each agent's legal actions.
            action: [B, A] int64 the joint action.
            alive: [B, A] 1 for an agent that is alive, or None.
            state: [B, S].
        """
        weight = self.weight(state).abs() + _LEAST
        value = weight * taken + self.bias(state)  # [B, A]
        advantage = (weight * (taken - best)).detach()
        parts = value + advantage * (self.importance(state, action, alive) - 1)
        out: Tensor = (parts if alive is None else parts * alive).sum(1, keepdim=True)
        return out

"""Minibatches of agent-rows: of single agents, of joint rows, or of whole pasts."""

from dataclasses import dataclass

import torch
from torch import Tensor

from learner_service.algorithms.returns import mean_of_sets, moments_of_sets
from learner_service.networks.inputs import Inputs
from learner_service.networks.recurrent import Past


@dataclass
class Rows:
    """All agent-rows of a batch, [R, ...] with agents innermost; `index` are those that count.

    `units` are what minibatches are made of: agent-rows where one network without memory serves
    all; joint rows where agents have networks of their own; environments where there is a past.
    """

    actor: Inputs
    critic: Inputs
    action: Tensor
    mask: Tensor | None
    target: Tensor
    log_prob: Tensor | None
    index: Tensor
    env_steps: int
    units: Tensor
    valid: Tensor
    actor_past: Past | None
    critic_past: Past | None

    def minibatches(
        self, number: int, sharing: Tensor, joint: bool, generator: torch.Generator
    ) -> list["Minibatch"]:
        """Shuffled units in `number` parts of equal size (give or take one): none is lost.

        Args:
            number: of minibatches.
            sharing: [S, A] of `sharing_agents`.
            joint: whether agents must stay together in their joint rows.
            generator: draws the order.
        """
        count, agents = len(self.units), sharing.shape[1]
        if count == 0:  # environments that fail at once, or unrolls of an episode's end alone
            return []
        order = torch.randperm(count, device=self.units.device, generator=generator)
        found = []
        for part in self.units[order].tensor_split(min(number, count)):
            if self.actor_past is None and not joint:
                found.append(Minibatch(part, None, None, None, None, sharing))
                continue
            actor_past, critic_past = self.actor_past, self.critic_past
            rows = part if actor_past is None else actor_past.rows(part)
            agent = torch.arange(agents, device=part.device)
            index = (rows.unsqueeze(-1) * agents + agent).flatten()
            found.append(
                Minibatch(
                    index,
                    rows,
                    self.valid[index],
                    actor_past and actor_past.columns(part),
                    critic_past and critic_past.columns(part),
                    sharing,
                )
            )
        return found


@dataclass
class Minibatch:
    """Some agent-rows, [R], how much each counts (None: all the same), and what came before.

    If all count the same, one set of weights serves all agents; else the rows are whole joint ones,
    and `joint` says which.
    """

    index: Tensor
    joint: Tensor | None
    weight: Tensor | None
    actor_past: Past | None
    critic_past: Past | None
    sharing: Tensor

    def of(self, inputs: Inputs) -> Inputs:
        """These rows' inputs: joint rows [b, A, ...], or single agents' [R, 1, ...]."""
        return inputs.agent_rows(self.index) if self.joint is None else inputs.rows(self.joint)

    def means(self, x: Tensor) -> Tensor:
        """Over the rows that count, for each set of weights, [S]."""
        if self.weight is None:
            return x.mean().unsqueeze(0)
        agents = self.sharing.shape[1]
        return mean_of_sets(x.view(-1, agents), self.weight.view(-1, agents), self.sharing)

    def deviations(self, x: Tensor) -> Tensor:
        """Of the rows that count, for each set of weights, [S]."""
        if self.weight is None:
            return x.std(correction=0).unsqueeze(0)
        agents = self.sharing.shape[1]
        counted = self.weight.view(-1, agents)
        _, variance = moments_of_sets(x.view(-1, agents), counted, self.sharing)
        return variance.sqrt()

    def scaled(self, x: Tensor, scale: Tensor) -> Tensor:
        """Each row divided by its set's scale [S]."""
        if self.weight is None:
            return x / scale
        agents = self.sharing.shape[1]
        return (x.view(-1, agents) / (scale @ self.sharing)).flatten()

"""HAPPO: agents with networks of their own improve a team's policy one after the other.

Kuba, Chen, Wen, Wen, Sun, Wang, Yang 2022, "Trust Region Policy Optimisation in Multi-Agent
Reinforcement Learning" (arXiv:2109.11251), section 4.2 and algorithm 4. All agents have the team's
advantage A. Each update draws an order of agents i_1 ... i_n. Agent i_m makes all its passes with

    M = A pi_1 / pi_old_1 ... pi_{m-1} / pi_old_{m-1}

in place of A: the change of those before it is accounted for, and the team's return does not fall
because two agents moved at once. Losses and networks are those of MAPPO; agents that share networks
by `share_parameters` move together.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from typing_extensions import override

from murmur.learner_service.algorithms import mappo
from murmur.learner_service.algorithms.mappo import Mappo, Trained
from murmur.learner_service.device.adam import Adam
from murmur.learner_service.device.cuda_graph import Outputs
from murmur.learner_service.layers.forward import forward_rows
from murmur.learner_service.layers.inputs import Inputs
from murmur.learner_service.layers.recurrent import RecurrentState
from murmur.learner_service.layers.stacked import Sharing
from murmur.learner_service.learning.minibatches import Pass, Rows
from murmur.learner_service.learning.on_policy import Round
from murmur.learner_service.learning.options import SharingConfig
from murmur.learner_service.learning.policies import Actor
from murmur.learner_service.learning.returns import mean_over
from murmur.learner_service.learning.teams import Teams
from murmur.learner_service.storage.rollout import Rollout, Transitions
from murmur.shared.wire.dataset import OBSERVATION
from murmur.shared.wire.spec import AGENT_MASK


class Config(mappo.Config):
    """Options of HAPPO: those of MAPPO, but agents have networks of their own."""

    share_parameters: Sharing = Field(
        False, description=SharingConfig.model_fields["share_parameters"].description
    )

    @override
    def reward_sets(self, num_agents: int) -> tuple[int, ...]:
        """Return one number for all agents: they learn from the team's reward."""
        return (0,) * num_agents


@dataclass(frozen=True)
class Member:
    """The agents of one parameter group, which move together.

    Attributes:
        group: index of the parameter group.
        agents: [n] int64 their numbers.
        networks: networks and optimisers of these agents alone.
    """

    group: int
    agents: Tensor
    networks: Trained

    def of(self, x: Tensor) -> Tensor:
        """Select the agents' part [R, n, ...] of [R, A, ...]."""
        return x.index_select(1, self.agents)

    def state(self, state: RecurrentState | None) -> RecurrentState | None:
        """Select the agents' part of a recurrent state."""
        return state and RecurrentState(self.of(state.memory), state.first)

    def rows(self, minibatches: Pass) -> Pass:
        """Select the agents' part of minibatches."""
        actor, same = minibatches.actor.each(self.of), minibatches.critic is minibatches.actor
        share = minibatches.share.index_select(2, self.agents)
        return replace(
            minibatches,
            actor=actor,
            critic=actor if same else minibatches.critic.each(self.of),
            columns={name: self.of(x) for name, x in minibatches.columns.items()},
            share=share,
            cost=-share,
            sharing=self.of(minibatches.sharing[self.group : self.group + 1]),
            actor_state=self.state(minibatches.actor_state),
            critic_state=self.state(minibatches.critic_state),
        )


class Happo(Mappo):
    """Algorithm of actors that move in turns. Used by the thread that learns.

    Networks of all agents lie in one stack, as those of MAPPO do: it acts, gives values and is
    saved. A member's networks are views of its slice.
    """

    TAKES_TURNS = False
    _config: Config

    @override
    def _make_optimizers(self) -> None:
        """Make optimisers for each parameter group, so that a step leaves the others alone."""
        c = self._config
        self._members: dict[str, Member] = {}
        for group in range(self._num_slices):
            agents = [agent for agent, of in enumerate(self._slices) if of == group]
            actor, critic = self._networks_of(group, agents)
            learned: list[tuple[Adam, nn.Module]] = []
            rates = ("actor", actor, c.actor_lr), ("critic", critic, c.critic_lr)
            for name, network, rate in rates:
                if network is not None:
                    adam = self._adam(network, rate, eps=1e-5)
                    learned.append((adam, network))
                    self.keep(**{f"{name}_optimizer_{group}": adam})
            if not set(agents) <= set(c.frozen_agents):
                numbers = torch.tensor(agents, device=self._device)
                member = Member(group, numbers, Trained(actor, critic, learned, 1))
                self._members[f"agents {group}"] = member

    @override
    def _prepare(self) -> None:
        super()._prepare()
        self._counts["order_seed"] = self._seed

    def _networks_of(self, group: int, agents: list[int]) -> tuple[Actor, nn.Module | None]:
        """Build networks of some agents whose weights are views of the group's slice."""
        if self._num_slices == 1:
            return self.actor, self.critic
        own, whole = self._make_networks((0,) * len(agents)), (self.actor, self.critic)
        if self.actor.counted is not None:
            own[0].counted = self.actor.counted[agents]
        for part, stack in zip(own, whole, strict=True):
            if part is None or stack is None:
                continue
            for view, weight in zip(part.parameters(), stack.parameters(), strict=True):
                view.data = weight.data.narrow(0, group * len(view), len(view))
        return own

    @override
    def _stages(self) -> dict[str, Callable[[Pass], None]]:
        self._ratios = {
            name: self._capture("ratio", partial(self._ratio_of_block, member), in_place=True)
            for name, member in self._members.items()
        }
        return {name: partial(self._member_steps, member) for name, member in self._members.items()}

    def _member_steps(self, member: Member, minibatches: Pass) -> None:
        self._steps(member.rows(minibatches), member.networks)

    @override
    def _rounds(self) -> Sequence[Round]:
        """Draw the order of the update, the same on all ranks and after a resume."""
        names = list(self._members)
        counts = int(self._counts["order_seed"]), int(self._counts["updates"])
        random = np.random.default_rng(counts)
        return [(names[i],) for i in random.permutation(len(names))]

    @override
    def _returns(
        self, batch: Rollout, t: Transitions, value: Tensor, log_ratio: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the team's targets and advantages, the same for all agents; [L, B, A].

        Reward and value are means over the agents that learn, values over those of them alive:
        the paper's joint reward is the team's, and frozen agents belong to its environment. The
        team's episode continues as long as one agent lives. The ratio is that of the joint action.
        """
        agents = t.reward.shape[-1]
        # Rewards of frozen agents are 0 here.
        scale = agents / (agents - len(set(self._config.frozen_agents)))
        alive = batch.arrays.get(OBSERVATION + AGENT_MASK)
        counted = torch.ones_like(value) if alive is None else (alive != 0).float()
        team = replace(
            t,
            reward=(scale * t.reward.mean(-1, keepdim=True)).expand_as(t.reward),
            discount=t.discount.amax(-1, keepdim=True),
        )
        value = mean_over(value, counted, -1).unsqueeze(-1).expand_as(value)
        if log_ratio is not None:
            log_ratio = log_ratio.sum(-1, keepdim=True).expand_as(log_ratio)
        return super()._returns(batch, team, value, log_ratio)

    @override
    @torch.no_grad()
    def _after_round(self, rows: Rows, names: Round) -> Rows:
        member, count = self._members[names[0]], len(rows.weight)
        actor = rows.actor.rows(0, count).each(member.of)
        columns = {name: x[:count] for name, x in rows.columns.items()}
        ratio = self._ratio(member, actor, member.state(rows.actor_state), columns, rows.weight)
        return replace(rows, columns=columns | {"advantage": columns["advantage"] * ratio})

    @override
    def _after_round_in_graphs(
        self, words: Tensor, memory: Tensor | None, number: int, names: Round
    ) -> None:
        fixed = self._fixed
        fixed.add_columns(words)  # those of the last round; nothing stale is gathered
        for start in range(0, number, self._block):
            out = self._call(self._ratios[names[0]], fixed.gather(words, memory, 0, start))
            fixed.scale_column("advantage", start, out["ratio"])

    @torch.no_grad()
    def _ratio_of_block(self, member: Member, given: Mapping[str, Tensor]) -> Outputs:
        """Find the ratios of a block of minibatches; may be captured."""
        minibatches = self._fixed.of_block(given)
        parts = []
        for i in range(minibatches.number):
            rows = minibatches.at(i)
            actor, state = rows.actor.each(member.of), member.state(rows.actor_state)
            parts.append(self._ratio(member, actor, state, rows.columns, rows.share))
        return {"ratio": torch.cat(parts)}

    def _ratio(
        self,
        member: Member,
        inputs: Inputs,
        state: RecurrentState | None,
        columns: Mapping[str, Tensor],
        weight: Tensor,
    ) -> Tensor:
        """Return pi / pi_old of what a member did, 1 where it was absent.

        Args:
            member: the member, after its turn.
            inputs: its inputs [R, n, ...].
            state: its recurrent state before the first row.
            columns: columns of all agents' rows.
            weight: [R, A] 0 where an agent's row does not count.

        Returns:
            [R, 1] the product over the member's agents.
        """
        actor, mask = member.networks.actor, columns.get("mask")
        out = forward_rows(actor.network, inputs, self._precision, state)
        pi = actor.distribution(out, None if mask is None else member.of(mask))
        log_ratio = pi.log_prob(member.of(columns["action"])) - member.of(columns["log_prob"])
        return log_ratio.where(member.of(weight) > 0, 0).sum(1, keepdim=True).exp()

    @override
    def compile(self, backend: str = "inductor") -> None:
        super().compile(backend)
        for member in self._members.values():
            for _, network in member.networks.learned:
                network.compile(backend=backend)


build = Happo
TEAMS = Teams

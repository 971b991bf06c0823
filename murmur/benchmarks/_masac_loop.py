"""MASAC agent by agent, in plain torch: the reference of the stacked update.

Either in the order of Jacobi, all losses of the networks before the update, which the stacked
update must equal; or in that of Gauss and Seidel, the scheme of a published implementation for
leader-follower UAVs: each agent steps its critics, then its actor, then its temperature, before the
next agent's losses are computed, and every agent's target evaluates all actors again: n * n + n
evaluations where 2 n do.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Independent, Normal, TanhTransform, TransformedDistribution

from murmur.learner_service.algorithms.masac import Config, Masac
from murmur.learner_service.device.adam import Adam
from murmur.learner_service.storage.replay import ReplayBatch
from murmur.learner_service.storage.storage import observed


class AgentNetworks:
    """One agent's networks and optimizers, with the weights that the stacked ones have for it."""

    def __init__(self, masac: Masac, agent: int, config: Config) -> None:
        """Copy one agent's networks and optimizers out of the stacks."""
        self.actor = _unstack(masac.actor.network, agent)
        self.twins = [_unstack(masac.critic, 2 * agent + twin) for twin in (0, 1)]
        self.targets = [_unstack(masac.target, 2 * agent + twin) for twin in (0, 1)]
        self.log_temperature = nn.Parameter(masac.temperature.log.detach()[agent, None].clone())
        critic = [p for twin in self.twins for p in twin.parameters()]
        self.critic_optimizer = Adam(critic, config.critic_lr)
        self.actor_optimizer = Adam(self.actor.parameters(), config.actor_lr)
        self.temperature_optimizer = Adam([self.log_temperature], config.temperature_lr)

    def policy(self, observation: Tensor) -> TransformedDistribution:
        """Return the squashed normal distribution for observations [B, F]."""
        mean, raw = self.actor(observation).float().chunk(2, -1)
        return TransformedDistribution(
            Independent(Normal(mean, F.softplus(raw) + 1e-3), 1), TanhTransform(cache_size=1)
        )


def _unstack(network: nn.Module, slice_: int) -> nn.Sequential:
    """Copy a slice of a stacked MLP into plain layers."""
    parameters = [p.detach()[slice_] for p in network.parameters()]
    layers: list[nn.Module] = []
    for weight, bias in zip(parameters[::2], parameters[1::2], strict=True):
        layer = nn.Linear(weight.shape[0], weight.shape[1], device=weight.device)
        layer.weight.data, layer.bias.data = weight.T.clone(), bias[0].clone()
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class MasacLoop:
    """The update of a `Masac` with continuous actions in [-1, 1] and networks for each agent."""

    def __init__(self, masac: Masac, config: Config, *, gauss_seidel: bool) -> None:
        """Start from the stacked algorithm's weights."""
        self._config, self._gauss_seidel = config, gauss_seidel
        self._wanted = masac._wanted
        self._autocast = masac._precision.autocast
        self.agents = [AgentNetworks(masac, a, config) for a in range(masac._spec.num_agents)]

    def update(self, batch: ReplayBatch, generator: torch.Generator) -> None:
        """Make one step of everything. Jacobi: with the noise of the stacked update."""
        view = batch.observation()["observation"]
        after = observed(batch.next_arrays)["observation"]
        action = batch.arrays["action"]
        noise = torch.empty((2, *action.shape), device=action.device).normal_(generator=generator)
        following = None if self._gauss_seidel else self._following(after, noise[1])
        for i, agent in enumerate(self.agents):
            if self._gauss_seidel:
                # Every agent draws again.
                noise = torch.empty((2, *action.shape), device=action.device).normal_(
                    generator=generator
                )
                joint, log_prob = self._following(after, noise[1])
            else:
                assert following is not None
                joint, log_prob = following
            alpha = agent.log_temperature.detach().exp()
            with torch.no_grad(), self._autocast():
                row = _joint(after, joint, i)
                q = torch.minimum(*(target(row) for target in agent.targets)).squeeze(-1).float()
                value = q - alpha * log_prob[:, i]
            target = batch.reward[:, i] + batch.discount[:, 0] * value
            with self._autocast():
                row = _joint(view, action, i)
                qs = [twin(row).squeeze(-1).float() for twin in agent.twins]
            critic_loss = torch.stack([((q - target).square() * batch.weight).mean() for q in qs])
            if self._gauss_seidel:
                self._critic_step(agent, critic_loss)
                agent.critic_optimizer.step()
            with self._autocast():
                own, own_log_prob = _sample(agent.policy(view[:, i]), noise[0][:, i])
                replaced = torch.cat([action[:, :i], own.unsqueeze(1), action[:, i + 1 :]], 1)
                row = _joint(view, replaced, i)
                q = torch.minimum(*(twin(row) for twin in agent.twins)).squeeze(-1).float()
            agent.actor_optimizer.zero_grad()
            torch.autograd.backward((alpha * own_log_prob - q).mean())
            nn.utils.clip_grad_norm_(agent.actor.parameters(), self._config.max_grad_norm)
            agent.temperature_optimizer.zero_grad()
            missing = -own_log_prob.detach() - self._wanted
            torch.autograd.backward((agent.log_temperature * missing).mean())
            if self._gauss_seidel:
                agent.actor_optimizer.step()
                agent.temperature_optimizer.step()
                self._follow(agent)
            else:
                self._critic_step(agent, critic_loss)
        if not self._gauss_seidel:
            for agent in self.agents:
                agent.critic_optimizer.step()
                agent.actor_optimizer.step()
                agent.temperature_optimizer.step()
                self._follow(agent)

    def _critic_step(self, agent: AgentNetworks, losses: Tensor) -> None:
        """Compute gradients of both critics, each clipped by its own norm."""
        agent.critic_optimizer.zero_grad()
        torch.autograd.backward(losses.sum())
        for twin in agent.twins:
            nn.utils.clip_grad_norm_(twin.parameters(), self._config.max_grad_norm)

    @torch.no_grad()
    def _following(self, after: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Sample next actions [B, A, U] of all agents and their log probabilities [B, A]."""
        with self._autocast():
            both = [
                _sample(agent.policy(after[:, i]), noise[:, i])
                for i, agent in enumerate(self.agents)
            ]
        return torch.stack([a for a, _ in both], 1), torch.stack([p for _, p in both], 1)

    @torch.no_grad()
    def _follow(self, agent: AgentNetworks) -> None:
        """Move the targets towards the critics."""
        for target, twin in zip(agent.targets, agent.twins, strict=True):
            for slow, fast in zip(target.parameters(), twin.parameters(), strict=True):
                slow.lerp_(fast, self._config.target_tau)


def _sample(pi: TransformedDistribution, noise: Tensor) -> tuple[Tensor, Tensor]:
    independent = pi.base_dist
    assert isinstance(independent, Independent)
    normal = independent.base_dist
    assert isinstance(normal, Normal)
    action = pi.transforms[0](normal.loc + normal.scale * noise)
    log_prob: Tensor = pi.log_prob(action)  # type: ignore[no-untyped-call]
    return action, log_prob


def _joint(view: Tensor, action: Tensor, agent: int) -> Tensor:
    """Join own view, the others' views and actions in turn, and own action: [B, .]."""
    count = view.shape[1]
    parts = [view[:, agent]]
    for step in range(1, count):
        other = (agent + step) % count
        parts += [view[:, other], action[:, other]]
    return torch.cat([*parts, action[:, agent]], 1)

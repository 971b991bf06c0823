"""Teams that learn apart in one run, each by an algorithm of its own."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from murmur.learner_service.device.cuda_graph import Graphs
from murmur.learner_service.device.device import restore_generator
from murmur.learner_service.device.precision import Precision
from murmur.learner_service.learning.base import Algorithm, Policy
from murmur.learner_service.learning.options import OnPolicyConfig
from murmur.learner_service.learning.team_specs import View, rows_by_agent
from murmur.learner_service.storage.rollout import Rollout

Team = tuple[View, Algorithm[Any], bool]  # view, algorithm, and true if it learns


class TeamsPolicy(Policy):
    """Policies of all teams; used as any policy is.

    An agent's memory is that of its team's policy, filled up with zeros.

    Attributes:
        policies: policy of each team.
    """

    def __init__(self, views: Sequence[View], policies: Sequence[Policy]) -> None:
        """Put them side by side.

        Args:
            views: view of each team.
            policies: policy of each team, for what the environment sends.
        """
        self._views, self.policies = tuple(views), tuple(policies)
        self.memory_size = max(policy.memory_size for policy in policies)
        self._order = rows_by_agent(views)
        for view, policy in zip(views, policies, strict=True):
            for name, part in vars(policy).items():
                if isinstance(part, nn.Module):  # exports look for weights among the attributes
                    setattr(self, f"{view.name}_{name}", part)

    @torch.inference_mode()
    @override
    def act(
        self,
        observation: Mapping[str, Tensor],
        generator: torch.Generator | None,
        memory: Tensor | None = None,
    ) -> dict[str, Tensor]:
        acted = []
        for view, policy in zip(self._views, self.policies, strict=True):
            own = None
            if memory is not None and policy.memory_size:
                own = view.rows(memory, 1)[..., : policy.memory_size]
            found = policy.act(view.observation(observation), generator, own)
            if self.memory_size:
                kept = found.get("memory")
                if kept is None:
                    some = found["action"]
                    kept = torch.zeros((*some.shape[:2], 0), device=some.device)
                found["memory"] = F.pad(kept, (0, self.memory_size - kept.shape[-1]))
            acted.append(found)
        return {name: self._joined([found[name] for found in acted]) for name in acted[0]}

    def _joined(self, parts: list[Tensor]) -> Tensor:
        joined = torch.cat(parts, 1)
        if self._order is None:
            return joined
        return torch.stack([joined[:, row] for row in self._order], 1)


class GraphsOfTeams(Graphs):
    """The CUDA graphs of several algorithms, as one."""

    def __init__(self, every: Sequence[Graphs], device: torch.device) -> None:
        self._every = tuple(every)
        super().__init__(device)

    @property
    def enabled(self) -> bool:
        """Return whether any algorithm captures; setting it to False turns all off."""
        return any(graphs.enabled for graphs in self._every)

    @enabled.setter
    def enabled(self, value: bool) -> None:
        for graphs in self._every:
            graphs.enabled &= value

    @override
    def reset(self) -> None:
        for graphs in self._every:
            graphs.reset()

    @override
    def counts(self) -> dict[str, dict[tuple[str, ...], float]]:
        total = super().counts()
        for graphs in self._every:
            for metric, of_labels in graphs.counts().items():
                for labels, count in of_labels.items():
                    total[metric][labels] = total[metric].get(labels, 0) + count
        return total


class Teams(Algorithm[Rollout]):
    """Lets each team's algorithm learn from the team's rows. Used by the thread that learns."""

    def __init__(
        self,
        config: OnPolicyConfig,
        members: Sequence[Team],
        precision: Precision,
        device: torch.device,
        seed: int,
    ) -> None:
        """Hold the teams' algorithms; they act for all agents together.

        Args:
            config: options of all teams.
            members: view and algorithm of each team, and whether it learns.
            precision: precision of forward passes, that of the teams' algorithms.
            device: device to learn on.
            seed: seed of the run.
        """
        super().__init__(precision, device, seed)
        self._members = tuple(members)
        algorithms = [algorithm for _, algorithm, _ in members]
        self.graphs = GraphsOfTeams([algorithm.graphs for algorithm in algorithms], device)
        self.unroll_length, self.unrolls_per_update = config.unroll_steps, config.unrolls_per_update
        self.rows_per_update = config.batch_size * config.batch_number
        self.extras = algorithms[0].extras
        self.memory_size = max(a.memory_size + a.transforms.memory_size for a in algorithms)
        for view, algorithm, _ in members:
            own = {name: part for name, part in algorithm.parts.items() if name not in self.parts}
            self.keep(**{f"{view.name}.{name}": part for name, part in own.items()})
        self._counts = {"updates": 0}

    @override
    def update(self, batch: Rollout) -> dict[str, Tensor]:
        """Let every team learn; return each one's scalars, and their means over the teams."""
        updates, found = int(self._counts["updates"]), dict[str, dict[str, Tensor]]()
        for view, algorithm, learns in self._members:
            if learns:
                size = algorithm.memory_size + algorithm.transforms.memory_size
                seen = algorithm.transforms.batch(view.batch(batch, size), updates)
                found[view.name] = algorithm.update(seen)
        self._counts["updates"] += 1
        names = dict.fromkeys(name for scalars in found.values() for name in scalars)
        means = {
            name: torch.stack([x[name].float() for x in found.values() if name in x]).mean()
            for name in names
        }
        each = {f"{name}/{team}": x for team, of in found.items() for name, x in of.items()}
        return means | each

    @property
    @override
    def counts(self) -> dict[str, float]:
        return self._counts | {
            f"{view.name}.{name}": count
            for view, algorithm, _ in self._members
            for name, count in algorithm.counts.items()
        }

    @override
    def restore_counts(self, counts: Mapping[str, float]) -> None:
        self._counts = {name: counts[name] for name in self._counts}
        for view, algorithm, _ in self._members:
            own = {name: counts[f"{view.name}.{name}"] for name in algorithm.counts}
            algorithm.restore_counts(own)

    @override
    def precision_scalars(self) -> dict[str, Tensor]:
        """Add what the teams' transforms and statistics clipped, all together."""
        scalars = super().precision_scalars()
        more = dict[str, Tensor]()
        for _, algorithm, learns in self._members:
            if learns:
                own = algorithm.precision_scalars() | algorithm.transforms.scalars()
                for name in (name for name in own if name not in scalars):  # alike on all ranks
                    more[name] = more[name] + own[name] if name in more else own[name]
        return scalars | more

    @override
    def outliers(self) -> dict[str, str]:
        return {
            f"{what} of team '{view.name}'": text
            for view, algorithm, _ in self._members
            for what, text in (algorithm.outliers() | algorithm.transforms.outliers()).items()
        }

    @override
    def graph_bytes(self, rows: int) -> float:
        return sum(algorithm.graph_bytes(rows) for _, algorithm, _ in self._members)

    @override
    def make_policy(self) -> TeamsPolicy:
        views = [view for view, _, _ in self._members]
        return TeamsPolicy(views, [algorithm.snapshot() for _, algorithm, _ in self._members])

    @override
    def publish(self, policy: Policy) -> None:
        assert isinstance(policy, TeamsPolicy)
        for (_, algorithm, _), own in zip(self._members, policy.policies, strict=True):
            algorithm.refresh(own)

    @override
    def state_dict(self) -> dict[str, Any]:
        generators = [algorithm._generator.get_state() for _, algorithm, _ in self._members]
        return {**super().state_dict(), "counts": self.counts, "generator": torch.stack(generators)}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        saved = state["generator"]
        # Copies: torch reads a generator's state from the start of its memory.
        rows = [row.clone() for row in saved] if saved.numel() else []
        states = rows or [saved] * len(self._members)
        super().load_state_dict({**state, "generator": states[0]})
        self._counts = {"updates": 0}
        self.restore_counts(state["counts"])
        for (_, algorithm, _), own in zip(self._members, states, strict=True):
            restore_generator(algorithm._generator, own)

"""Two ranks with halves of a batch make the update of one learner with the whole batch."""

from typing import Any

import pytest
import torch
from torch import Tensor

from murmur.learner_service.learning.base import Algorithm
from tests.ranks import jobs
from tests.ranks.cases import ENVS, LENGTH, Case
from tests.ranks.draws import Draws, Rows
from tests.ranks.pictures import Pictures
from tests.ranks.processes import Ranks

STATES = 50
_MAPPO = {"name": "mappo", "batch_size": 12, "batch_number": 5, "data_passes": 2}
_TEAMS: dict[str, Any] = {
    "many": {"agents": [0, 2], "network": {"hidden": [6]}, "actor_lr": 1e-3},
    "few": {"agents": [1], "gae_lambda": 0.8, "clip_ratio": 0.1},
}
_GRAPH, _ATTENTION = ({"name": name, "width": 8, "heads": 2} for name in ("graph", "attention"))
_COMA = {"name": "coma", "batch_size": 12, "batch_number": 5, "data_passes": 2}
_CLIPPED = {"clip_ratio": 0.2, "normalize_advantage": True, "entropy_weight": 0.01}
_PER = {"replay": {"batch_size": 32, "prioritized": True}}
_MASAC, _MADDPG, _QMIX = ({"name": name, **_PER} for name in ("masac", "maddpg", "qmix"))
_SEQUENCES = {"replay": {"batch_size": 32, "prioritized": False}}
CASES: dict[str, Any] = {
    "segmentation": Pictures(),
    "mappo": Case(_MAPPO),
    "mappo, masked, own": Case(_MAPPO, "masked", sharing=False),
    "mappo, continuous, groups": Case(_MAPPO, "continuous", sharing=(0, 0, 1)),
    "mappo, clipped": Case({**_MAPPO, "max_grad_norm": 0.05}),
    "mappo, clipped, own": Case({**_MAPPO, "max_grad_norm": 0.05}, sharing=False),
    "mappo, recurrent": Case(_MAPPO, recurrent=5),
    "mappo, scaled": Case({**_MAPPO, "max_grad_norm": 0.05}, scaled=True),
    "mappo, one encoder": Case({**_MAPPO, "share_encoder": True, "centralized": False}, image=True),
    "mappo, normalised, groups": Case(
        {**_MAPPO, "normalize_rewards": True}, sharing=(0, 0, 1), normalize=True
    ),
    "mappo, frozen": Case({**_MAPPO, "frozen_agents": [2]}, sharing=(0, 0, 1), mortal=False),
    "ippo": Case({**_MAPPO, "centralized": False}, mortal=False),
    "ippo, one trunk": Case({**_MAPPO, "centralized": False, "share_trunk": True}, recurrent=5),
    "happo": Case({**_MAPPO, "name": "happo"}, sharing=False),
    "mappo, graph": Case(_MAPPO, network=_GRAPH),
    "mappo, attention": Case(_MAPPO, network=_ATTENTION),
    "ippo, attention, messages": Case(
        {**_MAPPO, "centralized": False},
        network={**_ATTENTION, "communication": True, "entities": ("things",)},
        recurrent=5,
    ),
    "mappo, states of agents": Case({**_MAPPO, "max_grad_norm": 0.05}, states=True),
    "mappo, teams": Case({**_MAPPO, "teams": _TEAMS}, normalize=True),
    "mappo, teams, recurrent": Case(
        {**_MAPPO, "teams": {**_TEAMS, "few": {"agents": [1], "network": {"recurrent": 3}}}},
        recurrent=5,
    ),
    "mappo, teams, graph": Case({**_MAPPO, "teams": _TEAMS}, network=_GRAPH),
    "mappo, teams, states, clipped": Case(
        {**_MAPPO, "teams": _TEAMS, "normalize_rewards": True, "max_grad_norm": 0.05}, states=True
    ),
    "mappo, teams, scaled": Case({**_MAPPO, "teams": _TEAMS}, "continuous", scaled=True),
    "mappo, teams, frozen": Case(
        {**_MAPPO, "teams": _TEAMS, "frozen_agents": [1]}, "masked", mortal=False
    ),
    "happo, frozen": Case(
        {**_MAPPO, "name": "happo", "frozen_agents": [2]}, sharing=False, mortal=False
    ),
    "happo, teams": Case({**_MAPPO, "name": "happo", "teams": _TEAMS}, sharing=False),
    "happo, states of agents": Case({**_MAPPO, "name": "happo"}, sharing=False, states=True),
    "happo, recurrent, groups": Case({**_MAPPO, "name": "happo"}, sharing=(0, 0, 1), recurrent=5),
    "coma": Case(_COMA),
    "coma, masked, own": Case(_COMA, "masked", sharing=False),
    "coma, clipped": Case({**_COMA, **_CLIPPED, "max_grad_norm": 0.05}),
    "coma, clipped, groups": Case({**_COMA, **_CLIPPED}, sharing=(0, 0, 1)),
    "coma, recurrent": Case({**_COMA, **_CLIPPED}, recurrent=5),
    "coma, scaled": Case(_COMA, scaled=True),
    "masac": Case(_MASAC, "continuous"),
    "masac, masked, own": Case(_MASAC, "masked", sharing=False),
    "masac, clipped": Case({**_MASAC, "max_grad_norm": 0.05}, mortal=False),
    "masac, one encoder": Case(
        {**_MASAC, "share_encoder": True, "centralized": False}, "continuous", image=True
    ),
    "masac, scaled": Case(_MASAC, "continuous", scaled=True),
    "maddpg": Case(_MADDPG),
    "maddpg, masked, groups": Case(_MADDPG, "masked", sharing=(0, 0, 1)),
    "maddpg, one encoder": Case(
        {**_MADDPG, "share_encoder": True, "centralized": False}, image=True
    ),
    "maddpg, normalised": Case({**_MADDPG, "normalize_rewards": True}, normalize=True),
    "masac, frozen": Case(
        {**_MASAC, "frozen_agents": [2]}, "continuous", sharing=(0, 0, 1), mortal=False
    ),
    "matd3": Case(
        {**_MADDPG, "twin_critics": True, "policy_delay": 2, "target_noise": 0.2}, "continuous"
    ),
    "ddpg, clipped": Case({**_MADDPG, "centralized": False, "max_grad_norm": 0.05}, "continuous"),
    "maddpg, scaled": Case(_MADDPG, scaled=True),
    "matd3, recurrent": Case(
        {**_SEQUENCES, "name": "matd3", "target_noise": 0.0}, "continuous", recurrent=5
    ),
    "qmix, recurrent": Case({**_SEQUENCES, "name": "qmix"}, recurrent=5),
    "qmix": Case(_QMIX),
    "qplex": Case({**_PER, "name": "qplex"}, "masked"),
    "vdn, masked": Case({**_QMIX, "mixer": "vdn"}, "masked"),
    "iql, own, clipped": Case({**_QMIX, "mixer": "none", "max_grad_norm": 0.05}, sharing=False),
    "qmix, scaled": Case(_QMIX, scaled=True),
}
QUICK = ("mappo, clipped, own", "mappo, teams, graph", "happo, teams", "masac")


def alone(algorithm: Algorithm[Any], case: Any, batch: Any, seed: int) -> dict[str, Tensor]:
    """What one learner makes of all rows."""
    total = case.parts(batch)[0][1].total
    with Draws(seed, Rows(0, total, total), 0, case.owners(batch)):
        seen = algorithm.transforms.batch(batch)
        scalars = algorithm.update(seen)
    return jobs.outcome(algorithm, seen, scalars)


def assert_same(one: dict[str, Tensor], two: list[dict[str, Tensor]]) -> None:
    """Weights are equal on both ranks bit for bit, and to one learner's within 1e-6."""
    for name, whole in one.items():
        first, second = (of_rank[name] for of_rank in two)
        if name == "td_error":
            steps = LENGTH if len(whole) == LENGTH * sum(ENVS) else 1  # time is outermost
            together = torch.cat([x.view(steps, -1) for x in (first, second)], 1).flatten()
            torch.testing.assert_close(together, whole, atol=1e-6, rtol=1e-5)
        elif name.startswith("scalar/"):
            mean = (first + second) / 2  # as the learner takes it
            if name != "scalar/beyond_rewards":
                torch.testing.assert_close(mean, whole, atol=1e-5, rtol=1e-5, msg=name)
        else:
            assert torch.equal(first, second), name
            rtol = 1e-4 if "exp_avg" in name or "rewards" in name else 0
            torch.testing.assert_close(first, whole, atol=1e-6, rtol=rtol, msg=f"{name}: ".__add__)


def compare(ranks: Ranks, case: Any, states: int) -> None:
    """Compare one update from each of the states along a run."""
    algorithm = case.build()
    ranks.call(jobs.build, case)
    for seed in range(states):
        batch = case.batch(algorithm, seed)
        state, parts = algorithm.state_dict(), case.parts(batch)
        two = ranks.call(jobs.update, state, seed, parts)
        assert_same(alone(algorithm, case, batch, seed), two)


@pytest.mark.parametrize("name", QUICK)
def test_two_ranks_update_as_one_learner_would(ranks: Ranks, name: str) -> None:
    compare(ranks, CASES[name], 4)


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_update_as_one_along_a_run(ranks: Ranks, name: str) -> None:
    compare(ranks, CASES[name], STATES)

"""HAPPO: by hand, against a plain update agent by agent, as MAPPO for one agent, known answers."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from murmur.learner_service.algorithms.happo import Config, Happo
from murmur.learner_service.algorithms.mappo import Config as MappoConfig
from murmur.learner_service.algorithms.mappo import Mappo
from murmur.learner_service.device.precision import Precision
from murmur.learner_service.preprocess.frozen import HideFrozen
from murmur.learner_service.storage.rollout import Batch
from murmur.shared.config import PluginConfig
from murmur.shared.wire.dataset import OBSERVATION
from murmur.shared.wire.spec import AGENT_MASK, Composite, EnvSpec
from tests.learner_service.algorithms.test_contract import make_spec, rollout
from tests.learner_service.toys import CPU, LAST

NETWORK = PluginConfig(name="mlp", hidden=(8,), agent_id=False)
PASSES: dict[str, Any] = {"batch_number": 1, "data_passes": 3, "actor_lr": 2e-2, "critic_lr": 2e-2}


def make(spec: EnvSpec, seed: int = 3, recurrent: int = 0, **options: Any) -> Happo:
    network = PluginConfig(name="mlp", hidden=(8,), agent_id=False, recurrent=recurrent)
    return Happo(Config(**options), spec, network, Precision("fp32", CPU), CPU, seed)


def weights(algorithm: Mappo) -> list[Tensor]:
    networks = [algorithm.actor, *([algorithm.critic] if algorithm.critic else [])]
    return [p.detach().clone() for network in networks for p in network.parameters()]


# ---------------------------------------------------------------- one agent


@pytest.mark.parametrize("space", ["masked", "continuous"])
@pytest.mark.parametrize("recurrent", [0, 5])
@pytest.mark.parametrize(
    "options", [{}, {"centralized": False, "share_trunk": True}, {"vtrace_clip": 0.9}]
)
def test_one_agent_learns_as_by_mappo_to_the_bit(
    space: str, recurrent: int, options: dict[str, Any]
) -> None:
    spec = replace(make_spec(space), num_agents=1)
    batch = None
    found = []
    for kind, config in ((Happo, Config), (Mappo, MappoConfig)):
        network = PluginConfig(name="mlp", hidden=(8,), recurrent=recurrent)
        algorithm = kind(
            config(**options, batch_number=2), spec, network, Precision("fp32", CPU), CPU, 3
        )
        batch = batch or rollout_of_one(algorithm, spec)
        log = [algorithm.update(copy.deepcopy(batch)) for _ in range(3)]
        found.append((weights(algorithm), log))
    for ours, theirs in zip(*(of[0] for of in found), strict=True):
        assert torch.equal(ours, theirs)
    for ours, theirs in zip(*(of[1] for of in found), strict=True):
        assert {k: float(x) for k, x in ours.items()} == {k: float(x) for k, x in theirs.items()}


def rollout_of_one(algorithm: Mappo, spec: EnvSpec) -> Batch:
    """The first agent's part of a rollout; it is dead here and there."""
    whole = rollout(
        Mappo(
            MappoConfig(),
            make_spec("continuous" if "raw_action" in algorithm.extras else "masked"),
            PluginConfig(name="mlp", hidden=(8,), recurrent=algorithm.memory_size),
            *(Precision("fp32", CPU), CPU, 3),
        ),
        replace(spec, num_agents=3),
        0,
        (0, 1, 2),
    )
    agents = {k: x if x.dim() < 3 else x[:, :, :1].clone() for k, x in whole.arrays.items()}
    agents[OBSERVATION + AGENT_MASK][2, ::3] = 0
    return Batch(agents, list(whole.version))


# ---------------------------------------------------------------- the compound factor


def set_logits(happo: Happo, logits: list[list[float]]) -> None:
    """Make the agents' policies these, whatever they see."""
    with torch.no_grad():
        for p in happo.actor.parameters():
            p.zero_()
        last = list(happo.actor.parameters())[-1]  # [S, 1, K]
        last.copy_(torch.tensor(logits).unsqueeze(1))


def test_the_factor_by_hand() -> None:
    spec = make_spec("discrete")
    happo = make(spec, **PASSES)
    set_logits(happo, [[0.0, 0.0, 0.0]] * 3)
    batch = rollout(happo, spec, 0, (0, 1, 2))
    batch.arrays["action"][:] = torch.tensor([0, 1, 2])
    alive = batch.arrays[OBSERVATION + AGENT_MASK]
    alive[0, 0, 0] = 0  # agent 0 is absent in the first row
    rows = happo._rows(batch)
    before = rows.columns["advantage"].clone()
    counted = rows.weight > 0
    # Agent 0 comes to play 0 with 1/2: it did with 1/3, a ratio of 3/2. Agent 2 comes to play its 2
    # with 1/4: a ratio of 3/4. Agent 1 has not moved.
    half, quarter = [np.log(2.0), 0.0, 0.0], [np.log(1.5), np.log(1.5), 0.0]
    set_logits(happo, [half, [0.0] * 3, quarter])
    rows = happo._after_round(rows, ("agents 0",))
    assert not counted[0, 0]
    factor = torch.where(counted[:, :1], 1.5, 1.0)
    torch.testing.assert_close(rows.columns["advantage"], before * factor)
    rows = happo._after_round(rows, ("agents 2",))
    factor = factor * torch.where(counted[:, 2:], 0.75, 1.0)
    torch.testing.assert_close(rows.columns["advantage"], before * factor)


def test_the_reward_of_the_team_leaves_frozen_agents_out() -> None:
    spec = make_spec("discrete")
    options = {**PASSES, "gamma": 0.0, "normalize_values": False, "frozen_agents": (2,)}
    happo = make(spec, **options)
    batch = rollout(happo, spec, 0, (0, 1, 2))
    hidden = HideFrozen((2,), (0, 1, 2), CPU).batch(batch, 0)
    rows = happo._rows(hidden)
    reward = batch.arrays["reward"][1:, :, :2].mean(-1).flatten()
    counted = rows.weight[:, 0] > 0
    assert counted.any()
    for agent in range(2):
        torch.testing.assert_close(rows.columns["target"][counted, agent], reward[counted])


def test_orders_are_drawn_and_the_same_after_a_resume() -> None:
    spec = make_spec("discrete")
    happo, other = make(spec), make(spec)
    orders = set()
    for update in range(40):
        happo._counts["updates"] = update
        other._counts["updates"] = update
        order = tuple(name for (name,) in happo._rounds())
        assert sorted(order) == ["agents 0", "agents 1", "agents 2"]
        assert [(name,) for name in order] == other._rounds()
        orders.add(order)
    assert len(orders) == 6
    another = make(spec, seed=4)
    another._counts["updates"] = happo._counts["updates"] = 0
    assert any(
        [another._counts.update(updates=k), happo._counts.update(updates=k)]
        and another._rounds() != happo._rounds()
        for k in range(20)
    )


def test_a_turn_moves_its_own_agents_alone() -> None:
    spec = make_spec("discrete")
    happo = make(spec, **PASSES, share_parameters=(0, 1, 0))
    batch = rollout(happo, spec, 0, (0, 1, 2))
    happo.update(copy.deepcopy(batch))  # Adam has moments, which would move what has no gradient
    rows, before = happo._rows(batch), weights(happo)
    minibatches = rows.shuffled(1, happo._generator)
    happo._each_stage["agents 1"](minibatches)
    for old, new in zip(before, weights(happo), strict=True):
        assert torch.equal(old[0], new[0])
        assert not torch.equal(old[1], new[1])


# ---------------------------------------------------------------- a plain update


def plain_network(stack: list[Tensor], agent: int) -> list[Tensor]:
    return [w[agent].detach().clone().requires_grad_() for w in stack]


def plain_forward(w: list[Tensor], x: Tensor) -> Tensor:
    return (x @ w[0] + w[1]).relu() @ w[2] + w[3]


def plain_update(happo: Happo, batch: Batch, order: list[int]) -> list[list[Tensor]]:
    """Return the policies' weights after an update in loops, one agent after the other."""
    c, arrays, agents = happo._config, batch.arrays, 3
    alive, kinds = arrays[OBSERVATION + AGENT_MASK] != 0, arrays["step_type"]
    length, envs = kinds.shape
    assert happo.critic is not None
    critics = [[w[a].detach() for w in happo.critic.parameters()] for a in range(agents)]
    team_value, seen = torch.zeros(length, envs), {}
    for t, b in np.ndindex(length, envs):
        row = {k: x[t, b : b + 1] for k, x in batch.observation().items()}
        seen[t, b] = happo._actor_inputs(row).vector[0], happo._critic_inputs(row).vector[0]
        values = [plain_forward(critics[a], seen[t, b][1][a])[0, 0] for a in range(agents)]
        of_alive = [v for a, v in enumerate(values) if alive[t, b, a]]
        if of_alive:
            team_value[t, b] = sum(of_alive) / len(of_alive)
    advantage, target = torch.zeros(length, envs), torch.zeros(length, envs)
    for t in range(length - 2, -1, -1):
        for b in range(envs):
            lives = alive[t + 1, b].any() * arrays["discount"][t + 1, b]
            reward = arrays["reward"][t + 1, b].mean()
            delta = reward + c.gamma * lives * team_value[t + 1, b] - team_value[t, b]
            on = lives * (kinds[t + 1, b] != LAST)
            advantage[t, b] = delta + c.gamma * c.gae_lambda * on * advantage[t + 1, b]
            target[t, b] = advantage[t, b] + team_value[t, b]
    factor = torch.ones(length, envs)
    stack = list(happo.actor.parameters())
    found = [plain_network(stack, a) for a in range(agents)]
    for a in order:
        rows = [
            (t, b)
            for t, b in np.ndindex(length - 1, envs)
            if kinds[t, b] != LAST and alive[t, b, a]
        ]
        own = torch.stack([advantage[r] for r in rows])
        own = (own - own.mean()) / (own.std(correction=0) + 1e-8)
        m = own * torch.stack([factor[r] for r in rows])
        x = torch.stack([seen[r][0][a] for r in rows])
        action = torch.stack([arrays["action"][r][a] for r in rows]).long()
        old = torch.stack([arrays["log_prob"][r][a] for r in rows])
        adam = torch.optim.Adam(found[a], c.actor_lr, eps=1e-5)
        for _ in range(c.data_passes):
            log_pi = plain_forward(found[a], x).log_softmax(-1)
            ratio = (log_pi.gather(1, action.unsqueeze(1)).squeeze(1) - old).exp()
            clipped = ratio.clamp(1 - c.clip_ratio, 1 + c.clip_ratio)
            entropy = -(log_pi.exp() * log_pi).sum(1)
            gain = torch.minimum(ratio * m, clipped * m) + c.entropy_weight * entropy
            adam.zero_grad()
            (-gain.mean()).backward()
            torch.nn.utils.clip_grad_norm_(found[a], c.max_grad_norm)
            adam.step()
        with torch.no_grad():
            log_pi = plain_forward(found[a], x).log_softmax(-1)
            ratio = (log_pi.gather(1, action.unsqueeze(1)).squeeze(1) - old).exp()
        for r, change in zip(rows, ratio, strict=True):
            factor[r] *= change
    return found


def test_an_update_equals_a_plain_one() -> None:
    spec = make_spec("discrete")
    options = {**PASSES, "gamma": 0.9, "normalize_values": False, "max_grad_norm": 0.3}
    happo, plain = make(spec, **options), make(spec, **options)
    batch = rollout(happo, spec, 0, (0, 1, 2))
    noise = torch.rand(batch.arrays["reward"].shape, generator=torch.Generator().manual_seed(5))
    batch.arrays[OBSERVATION + AGENT_MASK] = (noise < 0.8).to(torch.uint8)
    batch.arrays["log_prob"] += 0.8 * noise - 0.4  # of an older policy
    order = [int(name[-1]) for (name,) in happo._rounds()]
    log = happo.update(copy.deepcopy(batch))
    assert 0.1 < float(log["clip_fraction"]) < 0.9
    found = plain_update(plain, batch, order)
    for a in range(3):
        for ours, theirs in zip(happo.actor.parameters(), found[a], strict=True):
            torch.testing.assert_close(ours[a], theirs, atol=1e-5, rtol=1e-4)
    other = plain_update(plain, batch, order[::-1])
    assert not torch.allclose(other[order[0]][0], found[order[0]][0], atol=1e-4)


@pytest.mark.parametrize("recurrent", [0, 5])
def test_updates_of_fixed_shapes_are_those_of_a_cpu(recurrent: int) -> None:
    """Minibatches are one each, so that the order of rows says nothing."""
    spec = make_spec("masked")
    found = []
    for static in (False, True):
        happo = make(spec, **PASSES, recurrent=recurrent, batch_size=90)
        happo._static = static
        happo.graphs.enabled = False
        batch = rollout(make(spec, **PASSES, recurrent=recurrent), spec, 0, (0, 2))
        batch.arrays["log_prob"] += 0.2
        for _ in range(2):
            happo.update(copy.deepcopy(batch))
        found.append(weights(happo))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- known answers


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_agents_in_turns_do_not_undo_each_other(seed: int) -> None:
    """Two agents earn 1 if they differ. Both play 0 with 4/5, and large steps are allowed.

    The best reply of either alone is 1. If both give it they are equal again: simultaneous updates
    lose what the team had.
    """
    spec = replace(make_spec("discrete"), num_agents=2)
    won = {}
    for kind, config in ((Happo, Config), (Mappo, MappoConfig)):
        algorithm = kind(
            config(
                **{"share_parameters": False, "batch_number": 1, "data_passes": 30},
                **{"actor_lr": 0.1, "clip_ratio": 4.0, "gamma": 0.0, "entropy_weight": 0.0},
            ),
            *(spec, NETWORK, Precision("fp32", CPU), CPU, seed),
        )
        start = [[np.log(8.0), np.log(2.0), -20.0]] * 2
        set_logits(algorithm, start)  # type: ignore[arg-type]
        batch = contest(algorithm, seed, lambda done: (done[:, 0] != done[:, 1]).float())
        algorithm.update(batch)
        pi = list(algorithm.actor.parameters())[-1].detach()[:, 0].softmax(-1)
        won[kind.__name__] = float(pi[0, 0] * pi[1, 1] + pi[0, 1] * pi[1, 0])
    assert won["Happo"] > 0.8
    assert won["Mappo"] < 0.32 < won["Happo"]  # the start's: 2 * 4/5 * 1/5


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_agents_of_different_kinds_find_their_joint_best(seed: int) -> None:
    """One agent chooses among three, the other gives a number: 1 by choice 2 and the number 0.5."""
    action = Composite((3,), (-1.0,), (1.0,), ((True,), (False,)))
    spec = replace(make_spec("discrete"), num_agents=2, action=action)
    happo = make(spec, seed, **PASSES, gamma=0.0)
    counted = [member.networks.actor.counted for member in happo._members.values()]
    assert [x.tolist() for x in counted if x is not None] == [[[0.0]], [[1.0]]]

    def worth(done: Tensor) -> Tensor:
        return (done[:, 0, 0] == 2) * (1 - (done[:, 1, 1] - 0.5).abs())

    for update in range(60):
        happo.update(contest(happo, 100 * seed + update, worth))
    greedy = contest(happo, 0, worth, greedy=True)
    assert float(greedy.arrays["reward"][1].mean()) > 0.9


def contest(
    algorithm: Mappo, seed: int, worth: Callable[[Tensor], Tensor], *, greedy: bool = False
) -> Batch:
    """One decision in each of many environments, with the reward that `worth` says."""
    envs, generator = 400, torch.Generator().manual_seed(seed)
    observation = {"view": torch.zeros(envs, 2, 4), AGENT_MASK: torch.ones(envs, 2)}
    acted = algorithm.make_policy().act(observation, None if greedy else generator)
    reward = worth(acted["action"])
    acted = {k: x for k, x in acted.items() if k in ("action", *algorithm.extras)}
    arrays = {OBSERVATION + k: x.expand(2, *x.shape) for k, x in observation.items()}
    arrays |= {k: x.clone().expand(2, *x.shape) for k, x in acted.items()}
    arrays["reward"] = torch.stack([torch.zeros(envs), reward]).unsqueeze(-1).expand(-1, -1, 2)
    arrays["discount"] = torch.tensor([1.0, 0.0]).view(2, 1).expand(2, envs)
    arrays["step_type"] = torch.tensor([0, LAST], dtype=torch.uint8).view(2, 1).expand(2, envs)
    return Batch({k: x.contiguous() for k, x in arrays.items()}, [0] * envs)

"""MAPPO and IPPO: a whole update against a plain one, resume, and games with known answers."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from murmur.env_service.envs.matrix import Config as MatrixConfig
from murmur.env_service.envs.matrix import MatrixGame
from murmur.learner_service.algorithms.mappo import Config, Mappo
from murmur.learner_service.device.precision import Precision, clip_gradients
from murmur.learner_service.layers.distributions import ILLEGAL, Categorical, Normal, explore
from murmur.learner_service.layers.stacked import sharing_agents
from murmur.learner_service.learning.returns import ValueNorm
from murmur.learner_service.storage.rollout import Batch, RolloutStorage
from murmur.shared.config import PluginConfig
from murmur.shared.process.errors import ConfigError
from murmur.shared.wire.dataset import OBSERVATION
from murmur.shared.wire.spec import ACTION_MASK, AGENT_MASK, STATE, ArraySpec, Continuous, EnvSpec
from tests.learner_service.algorithms.test_contract import make_spec, rollout
from tests.learner_service.toys import CPU, LAST, random_batch, vector_spec


def make(spec: EnvSpec, seed: int = 3, precision: str = "fp32", **options: Any) -> Mappo:
    network = PluginConfig(name="mlp", hidden=(8,))
    return Mappo(Config(**options), spec, network, Precision(precision, CPU), CPU, seed)


def batch_for(mappo: Mappo, spec: EnvSpec, seed: int = 0) -> Batch:
    """Random rows, acted on by the algorithm's own policy."""
    batch = random_batch(spec, 5, 6, seed)
    policy, generator = mappo.make_policy(), torch.Generator().manual_seed(seed)
    acted = [
        policy.act({k: v[t] for k, v in batch.observation().items()}, generator) for t in range(6)
    ]
    for name in acted[0]:
        batch.arrays[name] = torch.stack([a[name] for a in acted])
    return batch


# ---------------------------------------------------------------- distributions


def test_categorical_by_hand() -> None:
    pi = Categorical(torch.tensor([[0.0, 0.0, 5.0]]), torch.tensor([[1, 1, 0]]))
    # Two equal legal actions: log 1/2 each; entropy log 2; the third is never chosen.
    torch.testing.assert_close(pi.log_prob(torch.tensor([1])), torch.tensor([-0.693147]))
    torch.testing.assert_close(pi.entropy(), torch.tensor([0.693147]))
    generator = torch.Generator().manual_seed(0)
    assert {int(pi.sample(generator)) for _ in range(50)} == {0, 1}


def test_illegal_actions_by_a_given_scalar_are_the_same() -> None:
    logits, mask = torch.randn(4, 2, 5), (torch.rand(4, 2, 5) < 0.6).to(torch.uint8)
    plain, fast = Categorical(logits, mask), Categorical(logits, mask, torch.tensor(ILLEGAL))
    assert torch.equal(plain.logits, fast.logits)


def test_exploring_with_a_given_even_choice_is_the_same() -> None:
    pi = torch.randn(4, 5).softmax(-1)
    assert torch.equal(explore(pi, None, 0.3), explore(pi, None, 0.3, torch.tensor(1 / 5)))


def test_normal_equals_torch() -> None:
    mean, log_std = torch.randn(3, 2), torch.tensor([-0.3, 0.2])
    ours, torchs = Normal(mean, log_std), torch.distributions.Normal(mean, log_std.exp())
    x = torch.randn(3, 2)
    torch.testing.assert_close(ours.log_prob(x), torchs.log_prob(x).sum(-1))
    torch.testing.assert_close(ours.entropy(), torchs.entropy().sum(-1))


def test_normal_samples_spread_as_they_should() -> None:
    pi = Normal(torch.tensor([[1.0, -2.0]]).expand(20_000, 2), torch.tensor([0.25, 3.0]).log())
    drawn = pi.sample(torch.Generator().manual_seed(0))
    # Five standard errors of 20 000 draws: 5 / sqrt(20 000) = 0.035 deviations, 0.025 of one.
    torch.testing.assert_close(drawn.mean(0), torch.tensor([1.0, -2.0]), atol=0.1, rtol=0)
    torch.testing.assert_close(drawn.std(0), torch.tensor([0.25, 3.0]), atol=0, rtol=0.025)
    assert torch.equal(pi.mode()[0], torch.tensor([1.0, -2.0]))


def test_distributions_of_bf16_outputs_are_in_fp32() -> None:
    choice = Categorical(torch.zeros(2, 3, dtype=torch.bfloat16), None)
    number = Normal(torch.zeros(2, 3, dtype=torch.bfloat16), torch.zeros(3))
    generator = torch.Generator().manual_seed(0)
    for pi in (choice, number):
        drawn = pi.sample(generator)
        assert pi.log_prob(drawn).dtype == pi.entropy().dtype == torch.float32
    assert drawn.dtype == torch.float32


# ---------------------------------------------------------------- parts


def test_value_norm_by_hand() -> None:
    norm = ValueNorm(sharing_agents((0, 0), CPU), decay=0.5)
    norm.update(torch.tensor([[1.0, 3.0]]), torch.ones(1, 2))
    # One update, debiased: mean 2, variance 5 - 4 = 1.
    assert [x.tolist() for x in norm.statistics()] == [[2], [1]]
    norm.update(torch.tensor([[5.0, 9.0], [5.0, 9.0]]), torch.tensor([[1.0, 0], [1, 0]]))
    # Weights 1/3 and 2/3: mean 4, square (5 + 2*25)/3 = 55/3, variance 7/3.
    torch.testing.assert_close(
        norm.statistics(), (torch.tensor([4.0]), torch.tensor([7 / 3]).sqrt())
    )


@pytest.mark.parametrize("sharing", [(0, 0, 0), (0, 1, 1)])
def test_one_absurd_return_does_not_hide_all_others(sharing: tuple[int, ...]) -> None:
    random = torch.Generator().manual_seed(0)
    counted = torch.ones(256, 3)
    for first in (0, 4):
        norm = ValueNorm(sharing_agents(sharing, torch.device("cpu")))
        for update in range(6):
            returns = torch.randn(256, 3, generator=random)
            if update == first:
                returns[7, 1] = 1e6
            taken = norm.update(returns, counted)
            assert norm.clipped == (update == first)
            assert (taken is returns) == (update not in (0, first))
            assert torch.equal(taken[8:], returns[8:])
        std = norm.statistics()[1]
        assert std.max() < 40, (first, std)  # unclipped 1e4


def test_value_norms_of_sets_by_hand() -> None:
    norm = ValueNorm(sharing_agents((0, 1, 2), CPU), decay=0.5)
    counted = torch.tensor([[1.0, 1, 0], [1, 1, 0]])
    norm.update(torch.tensor([[1.0, 100, 7], [3, 300, 7]]), counted)
    # Means 2 and 200, deviations 1 and 100; the third agent has had nothing: as it is.
    wanted = torch.tensor([2.0, 200, 0]), torch.tensor([1.0, 100, 1])
    torch.testing.assert_close(norm.statistics(), wanted)


def test_clipping_by_agent_equals_a_loop() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(2, 3, 4)), torch.nn.Parameter(torch.zeros(2, 5))]
    grads = [
        torch.randn_like(p) * torch.tensor([0.1, 10.0]).view(2, *[1] * (p.dim() - 1))
        for p in parameters
    ]
    for p, g in zip(parameters, grads, strict=True):
        p.grad = g.clone()
    clip_gradients([parameters], 1.0, 2)
    for agent in range(2):
        alone = [torch.nn.Parameter(torch.zeros_like(g[agent])) for g in grads]
        for p, g in zip(alone, grads, strict=True):
            p.grad = g[agent].clone()
        torch.nn.utils.clip_grad_norm_(alone, 1.0)
        for p, q in zip(parameters, alone, strict=True):
            assert p.grad is not None
            torch.testing.assert_close(p.grad[agent], q.grad)


# ---------------------------------------------------------------- updates


def test_learning_rates_fall_to_their_share() -> None:
    spec = vector_spec()
    mappo = make(spec, actor_lr=1.0, critic_lr=2.0, anneal_updates=4, final_lr_fraction=0.2)
    rates = []
    for _ in range(6):
        mappo.update(batch_for(make(spec), spec))
        groups = [group for adam, _ in mappo._learned for group in adam.param_groups]
        rates.append([g["lr"] for g in groups])
    # 1 - 0.8 n / 4 for n = 0 ... 4, then no further
    for rate, share in zip(rates, (1.0, 0.8, 0.6, 0.4, 0.2, 0.2), strict=True):
        assert rate == pytest.approx([share, 2 * share])


def mortal_spec() -> EnvSpec:
    """Masked actions, and agents that die."""
    spec = vector_spec(masked=True)
    return replace(spec, observations=(*spec.observations, ArraySpec(AGENT_MASK, "uint8", ())))


def mortal_batch(mappo: Mappo, spec: EnvSpec) -> Batch:
    """Rows of an older policy: most ratios are not 1, some are clipped; some agents are dead."""
    batch = batch_for(mappo, spec)
    alive = torch.rand(batch.arrays["reward"].shape, generator=torch.Generator().manual_seed(5))
    batch.arrays[OBSERVATION + AGENT_MASK] = (alive < 0.8).to(torch.uint8)
    random = torch.Generator().manual_seed(6)
    batch.arrays["log_prob"] += 0.3 * torch.randn(alive.shape, generator=random)
    return batch


def one_row(batch: Batch, t: int, b: int) -> dict[str, Tensor]:
    return {k: v[t, b : b + 1] for k, v in batch.observation().items()}


def plain_advantages(
    mappo: Mappo, batch: Batch, mean: Tensor, std: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """[L, B, A] targets, advantages, and which count; row by row and agent by agent.

    A_t = delta_t + gamma lambda d x_{t+1}, delta_t = r + gamma d V_{t+1} - V_t, target V_t + x_t.
    By GAE x is A. By V-trace x_t = rho_t A_t with rho_t = min(clip, pi(a_t) / mu(a_t)).
    """
    c, arrays = mappo._config, batch.arrays
    alive, reward = arrays[OBSERVATION + AGENT_MASK], arrays["reward"]
    value, advantage = torch.zeros_like(reward), torch.zeros_like(reward)
    correction, rho = torch.zeros_like(reward), torch.ones_like(reward)
    counted = torch.zeros_like(reward, dtype=torch.bool)
    length, n, a = reward.shape
    with torch.no_grad():
        for t, b in np.ndindex(length, n):
            x = mappo._critic_inputs(one_row(batch, t, b))
            value[t, b] = mappo.critic(x.image, x.vector)[0, :, 0] * std + mean
            if c.vtrace_clip:
                ratio = current_log_prob(mappo, batch, t, b) - arrays["log_prob"][t, b]
                rho[t, b] = ratio.exp().clamp(max=c.vtrace_clip)
    for t in range(length - 2, -1, -1):
        for b, i in np.ndindex(n, a):
            d = c.gamma * arrays["discount"][t + 1, b] * alive[t + 1, b, i]
            delta = reward[t + 1, b, i] + d * value[t + 1, b, i] - value[t, b, i]
            continues = arrays["step_type"][t + 1, b] != LAST  # row L has an advantage of 0
            advantage[t, b, i] = delta + c.gae_lambda * d * continues * correction[t + 1, b, i]
            counted[t, b, i] = arrays["step_type"][t, b] != LAST and alive[t, b, i] != 0
            correction[t, b, i] = advantage[t, b, i] * (rho[t, b, i] if counted[t, b, i] else 1)
    return (value + correction)[:-1], advantage[:-1], counted[:-1]


def current_log_prob(mappo: Mappo, batch: Batch, t: int, b: int) -> Tensor:
    """[A] of the actions taken, by the policy as it is now."""
    row = one_row(batch, t, b)
    x = mappo._actor_inputs(row)
    logits = mappo.actor.network(x.image, x.vector)[0].masked_fill(row[ACTION_MASK][0] == 0, -1e9)
    action = batch.arrays["action"][t, b].long().unsqueeze(-1)
    return logits.log_softmax(-1).gather(-1, action).squeeze(-1)


def plain_update(mappo: Mappo, batch: Batch, seen: Tensor) -> dict[str, float]:
    """The whole update in loops over rows and agents; `seen` [R, A] is what the norm has had."""
    c, a, generator = mappo._config, 2, mappo._generator
    arrays = batch.arrays
    sets = [0, 0] if c.share_parameters is True else [0, 1]

    def statistics(x: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and mean square of each agent's set, [A]: of [..., A]."""
        mine = [[i for i in range(a) if sets[i] == sets[k]] for k in range(a)]
        of = [torch.cat([x[..., i][counted[..., i]] for i in m]) for m in mine]
        return torch.stack([y.mean() for y in of]), torch.stack([y.square().mean() for y in of])

    first = statistics(seen, torch.ones_like(seen, dtype=torch.bool))
    target, advantage, counted = plain_advantages(
        mappo, batch, first[0], (first[1] - first[0].square()).sqrt()
    )
    returns, squares = statistics(target, counted)
    variance = squares - returns.square()
    # The second of two updates of the norm: weights 0.9 and 1, and 1.9 in all.
    mean, square = ((0.9 * x + y) / 1.9 for x, y in zip(first, (returns, squares), strict=True))
    target = (target - mean) / (square - mean.square()).sqrt()
    middle, square = statistics(advantage, counted)
    unexplained = (square - middle.square()) / variance
    advantage = (advantage - middle) / ((square - middle.square()).sqrt() + 1e-8)
    actor_adam = torch.optim.Adam(mappo.actor.parameters(), c.actor_lr, eps=1e-5)
    critic_adam = torch.optim.Adam(mappo.critic.parameters(), c.critic_lr, eps=1e-5)
    joint = [(t, b) for t, b in np.ndindex(*counted.shape[:2]) if counted[t, b].any()]
    for _ in range(c.data_passes):
        order = torch.randperm(len(joint), generator=generator)
        for part in (order[k :: c.batch_number] for k in range(c.batch_number)):
            gains: dict[int, list[Tensor]] = {}
            errors: dict[int, list[Tensor]] = {}
            for t, b in (joint[r] for r in part.tolist()):
                row = one_row(batch, t, b)
                x, y = mappo._actor_inputs(row), mappo._critic_inputs(row)
                logits = mappo.actor.network(x.image, x.vector)[0]
                values = mappo.critic(y.image, y.vector)[0, :, 0]
                for i in range(a):
                    if not counted[t, b, i]:
                        continue
                    legal = row[ACTION_MASK][0, i].nonzero().squeeze(-1)
                    log_pi = logits[i][legal].log_softmax(-1)
                    taken = log_pi[legal.tolist().index(int(arrays["action"][t, b, i]))]
                    ratio = (taken - arrays["log_prob"][t, b, i]).exp()
                    gain = advantage[t, b, i]
                    within = 1 - c.clip_ratio < ratio < 1 + c.clip_ratio
                    bound = 1 + c.clip_ratio if ratio > 1 else 1 - c.clip_ratio
                    kept = within or bound * gain > ratio * gain
                    surrogate = (ratio if kept else bound) * gain
                    entropy = -(log_pi.exp() * log_pi).sum()
                    gains.setdefault(sets[i], []).append(
                        surrogate + 0.75 * c.entropy_weight * entropy
                    )
                    errors.setdefault(sets[i], []).append((values[i] - target[t, b, i]) ** 2)
            actor_adam.zero_grad()
            critic_adam.zero_grad()
            (-sum(sum(g) / len(g) for g in gains.values())).backward()  # type: ignore[union-attr]
            sum(sum(e) / len(e) for e in errors.values()).backward()  # type: ignore[union-attr]
            for network in (mappo.actor, mappo.critic):
                plain_clip(network, c.max_grad_norm, max(sets) + 1)
            actor_adam.step()
            critic_adam.step()
    explained = 1 - unexplained.mean()
    return {"return_mean": float(returns.mean()), "explained_variance": float(explained)}


def plain_clip(network: torch.nn.Module, max_norm: float, num_slices: int) -> None:
    grads = [p.grad for p in network.parameters() if p.grad is not None]
    for s in range(num_slices):
        mine = [g.view(num_slices, -1)[s] for g in grads]
        norm = float(torch.cat(mine).norm())
        for g in mine:
            g *= min(1.0, max_norm / (norm + 1e-6))


@pytest.mark.parametrize("centralized", [True, False], ids=["mappo", "ippo"])
@pytest.mark.parametrize("share", [True, False], ids=["shared", "own"])
@pytest.mark.parametrize("vtrace_clip", [0.0, 0.9], ids=["gae", "vtrace"])
def test_an_update_equals_a_plain_one(vtrace_clip: float, share: bool, centralized: bool) -> None:
    spec = mortal_spec()
    options: dict[str, Any] = {
        "centralized": centralized,
        "share_parameters": share,
        "gamma": 0.9,
        "gae_lambda": 0.7,
        "vtrace_clip": vtrace_clip,
        "batch_number": 3,
        "data_passes": 2,
        "entropy_weight": 0.1,
        "max_grad_norm": 0.2,
        "anneal_updates": 4,
        "actor_lr": 1e-2,
        "critic_lr": 2e-2,
    }
    fast, plain = make(spec, **options), make(spec, **options)
    seen = torch.tensor([[2.0, 10.0], [6.0, 20.0]])
    for mappo in (fast, plain):
        mappo.value_norm.update(seen, torch.ones(2, 2))
        mappo._counts["updates"] = 1  # of 4: a quarter of the entropy's weight has gone
    batch = mortal_batch(fast, spec)
    log = fast.update(copy.deepcopy(batch))
    assert 0.1 < float(log["clip_fraction"]) < 0.9
    assert float(log["critic_grad_norm"]) > 0.2 < float(log["actor_grad_norm"])
    for name, number in plain_update(plain, batch, seen).items():
        assert float(log[name]) == pytest.approx(number, rel=1e-4)
    for name in ("actor", "critic"):
        pairs = zip(
            getattr(fast, name).parameters(), getattr(plain, name).parameters(), strict=True
        )
        for ours, theirs in pairs:
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("space", "recurrent", "options"),
    [
        ("masked", 0, {}),
        ("masked", 4, {"share_parameters": False}),
        ("continuous", 4, {}),
        ("discrete", 0, {"centralized": False, "share_trunk": True}),
    ],
    ids=["masked", "recurrent", "continuous", "trunk"],
)
def test_vtrace_of_the_newest_rows_is_gae(
    space: str, recurrent: int, options: dict[str, Any]
) -> None:
    """Rows of the policy as it is now: each ratio is 1, whichever network it comes from."""
    spec = make_spec(space)
    network = PluginConfig(name="mlp", hidden=(16,), recurrent=recurrent)
    weights = []
    for clip in (0.0, 1.0):
        mappo = Mappo(
            Config(vtrace_clip=clip, batch_size=20, batch_number=2, **options),
            *(spec, network, Precision("fp32", CPU), CPU, 0),
        )
        mappo.update(rollout(mappo, spec, 3, (0, 1)))
        weights.append(torch.cat([p.detach().flatten() for p in mappo.actor.parameters()]))
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("centralized", [True, False], ids=["mappo", "ippo"])
def test_only_a_central_value_function_sees_the_state(centralized: bool) -> None:
    spec = vector_spec()
    state = ArraySpec(STATE, "float32", (5,), per_agent=False)
    mappo = make(replace(spec, observations=(*spec.observations, state)), centralized=centralized)
    assert mappo._actor_inputs.shape.vector == 4 + 2  # the view, and who looks
    assert mappo._critic_inputs.shape.vector == 4 + 2 + (5 if centralized else 0)


# ---------------------------------------------------------------- continuous actions


def arm(low: float, high: float) -> EnvSpec:
    return EnvSpec("arm", 2, (ArraySpec("view", "float32", (4,)),), Continuous(1, low, high))


def test_continuous_acting_by_hand() -> None:
    mappo = make(arm(-1.0, 2.0), share_parameters=False)
    with torch.no_grad():
        for p in mappo.actor.network.parameters():
            p.zero_()
        p[:, 0, 0] = torch.tensor([0.5, 1.5])  # the last bias: the agents' means
        assert mappo.actor.log_std is not None
        mappo.actor.log_std.copy_(torch.tensor([[0.25], [1.0]]).log())
    policy, observation = mappo.make_policy(), {"view": torch.randn(20_000, 2, 4)}
    greedy = policy.act(observation, None)
    assert greedy["action"].unique(dim=0).tolist() == [[[0.5], [1.5]]]
    acted = policy.act(observation, torch.Generator().manual_seed(0))
    raw = acted["raw_action"]
    torch.testing.assert_close(raw.std(0).flatten(), torch.tensor([0.25, 1.0]), atol=0, rtol=0.03)
    # P(N(1.5, 1) > 2) = 0.3085: those are cut, but what is learned from is what was drawn.
    assert float((acted["action"][:, 1] == 2).float().mean()) == pytest.approx(0.3085, abs=0.02)
    torch.testing.assert_close(acted["action"], raw.clamp(-1, 2))
    means, deviations = torch.tensor([0.5, 1.5]), torch.tensor([0.25, 1.0])
    wanted = torch.distributions.Normal(means, deviations).log_prob(raw.squeeze(-1))
    torch.testing.assert_close(acted["log_prob"], wanted)


def test_continuous_learning_uses_drawn_not_clipped_actions() -> None:
    """A policy that has not changed since it acted has ratios of 1: nothing is clipped."""
    spec = arm(-0.1, 0.1)  # most actions are cut
    mappo = make(spec, batch_number=1, data_passes=1)
    random = torch.Generator().manual_seed(0)
    policy, view = mappo.make_policy(), torch.randn(6, 5, 2, 4, generator=random)
    acted = [policy.act({"view": view[t]}, random) for t in range(6)]
    arrays = {name: torch.stack([a[name] for a in acted]) for name in acted[0]}
    arrays |= {OBSERVATION + "view": view, "reward": torch.randn(6, 5, 2, generator=random)}
    arrays |= {"step_type": torch.ones(6, 5, dtype=torch.uint8), "discount": torch.ones(6, 5)}
    log = mappo.update(Batch(arrays, [0] * 5))
    assert float(log["kl"]) == pytest.approx(0, abs=1e-6)
    assert float(log["clip_fraction"]) == 0


def test_bf16_stays_near_fp32() -> None:
    spec = vector_spec()
    full = make(spec)
    batch = batch_for(full, spec)
    half = make(spec, precision="bf16")
    a, b = full.update(copy.deepcopy(batch)), half.update(copy.deepcopy(batch))
    for name in ("actor_loss", "critic_loss", "entropy"):
        assert float(b[name]) == pytest.approx(float(a[name]), rel=0.05, abs=0.02)


# ---------------------------------------------------------------- known answers


def greedy_payoff(mappo: Mappo, game: MatrixGame) -> float:
    acted = mappo.make_policy().act({"observation": torch.ones(1, 2, 1)}, None)["action"][0]
    return 25 * float(game.payoffs[tuple(acted.tolist())])


def play_and_learn(
    mappo: Mappo, game: MatrixGame, steps: int, done: Callable[[], bool] = lambda: False
) -> None:
    """Until it is done, looked at after every update, or this number of steps has been taken."""
    storage = RolloutStorage(
        game.spec, mappo.unroll_length, mappo.rows_per_update, None, CPU, mappo.extras
    )
    policy, generator = mappo.make_policy(), torch.Generator().manual_seed(0)
    seeds, taken = np.zeros(game.num_envs, np.uint64), 0
    timestep = game.reset(seeds)
    unroll = storage.begin(game.num_envs, 0, 0)
    while taken < steps:
        rows = {
            "step_type": timestep.step_type,
            "reward": timestep.reward,
            "discount": timestep.discount,
            OBSERVATION + "observation": timestep.observation["observation"],
        }
        while True:
            for name, x in rows.items():
                unroll.arrays[name][unroll.cursor] = torch.from_numpy(x)
            unroll.cursor += 1
            if not unroll.full:
                break
            storage.add(unroll)
            while storage.ready:
                batch = storage.sample(0, 0.0)
                assert batch is not None
                mappo.update(batch)
                mappo.publish(policy)
                storage.done(batch)
                if done():
                    return
            unroll = storage.begin(game.num_envs, 0, 0)
        observation = {k: torch.from_numpy(v) for k, v in timestep.observation.items()}
        acted = policy.act(observation, generator)
        for name, value in acted.items():
            unroll.arrays[name][unroll.cursor - 1] = value
        taken += game.num_envs
        restart = timestep.step_type == LAST
        timestep = game.step(acted["action"].numpy(), restart, seeds)


def assert_learns(mappo: Mappo, game: MatrixGame, goal: float) -> None:
    """Learn until the greedy policy has this payoff after 20 updates in a row."""
    reached = 0

    def stays() -> bool:
        nonlocal reached
        reached = reached + 1 if abs(greedy_payoff(mappo, game) - goal) < 1 else 0
        return reached == 20

    play_and_learn(mappo, game, 100_000, stays)
    assert reached == 20


@pytest.mark.parametrize(
    ("options", "goal"),
    [
        pytest.param({"game": "climbing"}, 175, marks=pytest.mark.long),
        ({"game": "penalty", "penalty": -100.0}, 50),
        ({"game": "penalty", "penalty": 0.0}, 250),
    ],
)
@pytest.mark.parametrize(
    "centralized",
    [
        pytest.param(True, id="mappo"),
        pytest.param(False, id="ippo", marks=pytest.mark.long),
    ],
)
def test_matrix_games_reach_their_known_answers(
    options: dict[str, Any], goal: float, centralized: bool
) -> None:
    game = MatrixGame(MatrixConfig(**options), 32)
    mappo = make(
        game.spec,
        centralized=centralized,
        share_parameters=False,
        batch_size=200,
        batch_number=4,
        actor_lr=1e-3,
        critic_lr=1e-3,
        entropy_weight=0.01,
    )
    assert_learns(mappo, game, goal)


# ---------------------------------------------------------------- one trunk


def test_one_network_gives_policy_and_values() -> None:
    spec = vector_spec(num_agents=3)
    apart, shared = (make(spec, centralized=False, share_trunk=x) for x in (False, True))
    assert shared.critic is None
    assert "critic" not in shared.parts
    # 7 inputs (4 and the agent's number), 8 hidden units, 3 actions and a value.
    weights = sum(p.numel() for p in shared.actor.parameters())
    assert weights == 7 * 8 + 8 + 8 * 4 + 4
    batch = batch_for(shared, spec)
    assert set(apart.update(copy.deepcopy(batch))) - set(shared.update(batch)) == {
        "critic_grad_norm"
    }
    assert batch.arrays["action"].max() < 3


def test_the_trunk_learns_from_both_losses() -> None:
    spec = vector_spec()
    moved = []
    for weight in (1e-6, 0.5):
        mappo = make(spec, centralized=False, share_trunk=True, value_weight=weight, gamma=0.0)
        before = copy.deepcopy(mappo.actor.state_dict())
        mappo.update(batch_for(mappo, spec))
        moved.append({k: v - before[k] for k, v in mappo.actor.state_dict().items()})
    first = next(iter(moved[0]))
    assert not torch.allclose(moved[0][first], moved[1][first], rtol=0, atol=1e-6)
    assert float(moved[0][first].abs().max()) > 1e-4


def test_one_trunk_is_refused_where_the_inputs_differ() -> None:
    with pytest.raises(ConfigError, match=r"share_trunk = true: a centralized value function"):
        make(vector_spec(), share_trunk=True)


@pytest.mark.parametrize(
    ("options", "goal"),
    [
        ({"game": "penalty", "penalty": 0.0}, 250),
        pytest.param({"game": "climbing"}, 175, marks=pytest.mark.long),
    ],
)
def test_matrix_games_reach_their_known_answers_with_one_trunk(
    options: dict[str, Any], goal: float
) -> None:
    game = MatrixGame(MatrixConfig(**options), 32)
    mappo = make(
        game.spec,
        centralized=False,
        share_trunk=True,
        share_parameters=False,
        batch_size=200,
        actor_lr=1e-3,
    )
    assert_learns(mappo, game, goal)

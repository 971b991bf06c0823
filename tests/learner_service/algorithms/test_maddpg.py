"""MADDPG, DDPG and MATD3: by hand, against a plain loop, resume, and known answers."""

import copy
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from murmur.env_service.environment import VectorEnvironment
from murmur.env_service.envs.matrix import Config as MatrixConfig
from murmur.env_service.envs.matrix import MatrixGame
from murmur.learner_service.algorithms.maddpg import Actions, Config, Maddpg, gumbel_softmax
from murmur.learner_service.device.precision import Precision
from murmur.learner_service.storage.replay import ReplayBatch
from murmur.learner_service.storage.storage import observed
from murmur.shared.config import PluginConfig
from murmur.shared.process.errors import ConfigError, SpecError
from murmur.shared.wire.dataset import OBSERVATION
from murmur.shared.wire.spec import (
    ACTION_MASK,
    AGENT_MASK,
    STATE,
    ArraySpec,
    Continuous,
    Discrete,
    EnvSpec,
)
from murmur.shared.wire.timestep import Array, StepType, TimeStep
from tests.learner_service.toys import (
    CPU,
    map_spec,
    play_and_learn,
    random_transitions,
    rows_of,
    vector_spec,
)


def make(
    spec: EnvSpec, seed: int = 3, precision: str = "fp32", hidden: int = 8, **options: Any
) -> Maddpg:
    network = PluginConfig(name="mlp", hidden=(hidden,), agent_id=False)
    return Maddpg(Config(**options), spec, network, Precision(precision, CPU), CPU, seed)


def spec_of(space: str) -> EnvSpec:
    """Three agents; `masked` has masks of actions and agents, and a state."""
    if space == "continuous":
        return EnvSpec("toy", 3, (ArraySpec("view", "float32", (4,)),), Continuous(2, -1.0, 3.0))
    spec = vector_spec(num_agents=3, masked=space == "masked")
    if space == "discrete":
        return spec
    more = (ArraySpec(AGENT_MASK, "uint8", ()), ArraySpec(STATE, "float32", (5,), per_agent=False))
    return replace(spec, observations=spec.observations + more)


SPACES = ("discrete", "masked", "continuous")


# ---------------------------------------------------------------- Gumbel-softmax


def test_gumbel_softmax_samples_and_passes_the_relaxed_gradient() -> None:
    logits = torch.tensor([0.0, 1.0, 3.0]).expand(20_000, 3).clone().requires_grad_(True)
    mask = torch.tensor([1, 1, 0])
    y = gumbel_softmax(logits, mask, 0.5, torch.Generator().manual_seed(1))
    assert set(y.unique().tolist()) == {0.0, 1.0}
    # Of two legal actions: 1 / (1 + e) = 0.2689.
    torch.testing.assert_close(y.mean(0), torch.tensor([0.2689, 0.7311, 0.0]), atol=0.01, rtol=0)
    (gradient,) = torch.autograd.grad(y[0, 1], logits)
    # The same numbers by hand: p of the relaxed sample, dp_1/dl_0 = -p_0 p_1 / temperature.
    clock = torch.empty(20_000, 3).exponential_(generator=torch.Generator().manual_seed(1))[0]
    z = (logits[0, :2] - clock[:2].log()) / 0.5
    p = z.softmax(0).detach()
    expected = torch.stack([-p[0] * p[1] / 0.5, p[1] * (1 - p[1]) / 0.5, torch.zeros(())])
    torch.testing.assert_close(gradient[0], expected)


# ---------------------------------------------------------------- actions


def test_critics_see_actions_in_halves_of_their_range() -> None:
    numbers = Actions(spec_of("continuous"))  # actions in [-1, 3]
    assert numbers.encode(torch.tensor([-1.0, 0.0, 1.0, 3.0])).tolist() == [-1, -0.5, 0, 1]
    assert numbers.decode(torch.tensor([-1.0, -0.5, 0.0, 1.0])).tolist() == [-1, 0, 1, 3]
    # The middle -0.9 and the half 1.1 make 0.20000005 in fp32: beyond the bound.
    edge = Actions(replace(spec_of("continuous"), action=Continuous(1, -2.0, 0.2)))
    assert edge.decode(torch.ones(1)) == torch.tensor(0.2)
    choices = Actions(spec_of("discrete"))
    assert choices.encode(torch.tensor([2, 0])).tolist() == [[0, 0, 1], [1, 0, 0]]


# ---------------------------------------------------------------- targets


def constant(network: nn.Module, last_bias: list[float]) -> None:
    """Make a network give these values whatever it sees."""
    with torch.no_grad():
        parameters = list(network.parameters())
        for p in parameters:
            p.zero_()
        parameters[-1].view(-1)[:] = torch.tensor(last_bias)


def test_targets_by_hand() -> None:
    spec = spec_of("masked")
    batch = random_transitions(spec, 2)
    batch.reward = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
    batch.discount = torch.tensor([[0.5], [0.0]])  # the second row's episode has terminated
    batch.next_arrays[OBSERVATION + AGENT_MASK] = torch.tensor(
        [[1, 0, 1], [1, 1, 1]], dtype=torch.uint8
    )
    one = make(spec)
    constant(one.target_critic, [10.0])
    # 1 + 5; the second agent will be dead: 2; 3 + 5.
    assert one._target(rows_of(batch), None, None).tolist() == [[6.0, 2.0, 8.0], [1.0, 2.0, 3.0]]
    twin = make(spec, twin_critics=True)
    constant(twin.target_critic, [10.0, 4.0])  # the lesser counts
    assert twin._target(rows_of(batch), None, None).tolist() == [[3.0, 2.0, 5.0], [1.0, 2.0, 3.0]]


def test_noise_on_target_actions_is_clipped() -> None:
    spec = spec_of("continuous")
    maddpg = make(spec, target_noise=0.2, target_noise_clip=0.3, centralized=False)
    constant(maddpg.target_actor, [0.1, -5.0])
    with torch.no_grad():  # Q' = first number of the own action
        for p in maddpg.target_critic.parameters():
            p.zero_()
        first, _, second, _ = maddpg.target_critic.parameters()
        first[0, 4, 0], second[0, 0, 0] = 1.0, 1.0
    batch = random_transitions(spec, 4000)
    batch.reward, batch.discount = torch.zeros(4000, 3), torch.ones(4000, 1)
    moved = maddpg._target(rows_of(batch), None, None) - torch.tensor(0.1).tanh()
    # tanh 0.1 = 0.0997; noise of deviation 0.2, cut at 0.3; the ReLU hides what is below zero.
    assert float(moved.max()) == pytest.approx(0.3, abs=1e-5)
    assert float((moved > 0.2999).float().mean()) == pytest.approx(0.0668, abs=0.01)  # beyond 1.5
    assert not torch.equal(moved[:, 0], moved[:, 1])  # each agent's is its own
    constant(maddpg.target_actor, [9.0, -5.0])
    assert (
        float(maddpg._target(rows_of(batch), None, None).max()) == 1.0
    )  # no action is out of range


def test_discrete_target_actions_are_samples_without_noise() -> None:
    """MATD3's defaults, which have noise, are for discrete actions, too."""
    targets = []
    for noise in (0.0, None):
        maddpg = make(spec_of("masked"), target_noise=noise, twin_critics=True)
        rows = rows_of(random_transitions(spec_of("masked"), 50))
        targets.append(maddpg._target(rows, None, None))
    torch.testing.assert_close(targets[0], targets[1], rtol=0, atol=0)


# ---------------------------------------------------------------- updates


def test_losses_and_errors_by_hand() -> None:
    spec = spec_of("masked")
    options: dict[str, Any] = {"critic_lr": 1e-9, "output_penalty": 0.3}
    maddpg = make(spec, twin_critics=True, share_parameters=False, **options)
    constant(maddpg.critic, [10.0, 4.0] * 3)
    constant(maddpg.actor, [2.0, 0.0, 1.0] * 3)
    batch = random_transitions(spec, 2)
    alive = torch.tensor([[1, 0, 1], [1, 1, 0]], dtype=torch.uint8)
    batch.arrays[OBSERVATION + AGENT_MASK] = alive
    batch.reward = torch.tensor([[8.0, 99.0, 5.0], [11.0, 7.0, 99.0]])
    batch.discount, batch.weight = torch.zeros(2, 1), torch.tensor([1.0, 0.5])
    log = maddpg.update(batch)
    # Errors of the twins: (2, -4), dead, (5, -1); (-1, -7), (3, -3), dead.
    assert batch.td_error is not None
    assert batch.td_error.tolist() == [3.0, 3.5]
    # Agents' means of squares: (20 + 0.5 * 50) / 2, 0.5 * 18, 26; over three agents' twins.
    assert float(log["critic_loss"]) == pytest.approx((22.5 + 9 + 26) / 6)
    assert float(log["q_mean"]) == 7.0
    # The first twin's value, and 0.3 of (4 + 0 + 1) / 3.
    assert float(log["actor_loss"]) == pytest.approx(0.5 - 10, abs=1e-5)


class PlainAgent:
    """One agent with networks and optimisers of its own."""

    def __init__(self, maddpg: Maddpg, agent: int, critics: int) -> None:
        def cut(network: nn.Module, index: int) -> list[Tensor]:
            return [p[index].detach().clone().requires_grad_(True) for p in network.parameters()]

        twins = range(agent * critics, (agent + 1) * critics)
        self.actor, self.target_actor = cut(maddpg.actor, agent), cut(maddpg.target_actor, agent)
        self.critics = [cut(maddpg.critic, i) for i in twins]
        self.target_critics = [cut(maddpg.target_critic, i) for i in twins]
        self.actor_optimizer = torch.optim.Adam(self.actor, 5e-4)
        self.critic_optimizer = torch.optim.Adam([p for c in self.critics for p in c], 1e-3)


def mlp(weights: list[Tensor], x: Tensor) -> Tensor:
    w1, b1, w2, b2 = weights
    return (x @ w1 + b1).relu() @ w2 + b2


def plain_update(agents: list[PlainAgent], maddpg: Maddpg, batch: ReplayBatch) -> None:
    """An update agent by agent: all critics, then all policies, then the targets.

    Draws the same random numbers as the stacked update does.
    """
    c, a, generator = maddpg._config, len(agents), maddpg._generator
    now, following = batch.observation(), observed(batch.next_arrays)
    discrete = "view" in now and batch.arrays["action"].dtype == torch.int32

    def choose(out: list[Tensor], observation: dict[str, Tensor]) -> list[Tensor]:
        if not discrete:
            return [o.tanh() for o in out]
        both = gumbel_softmax(
            torch.stack(out, 1), observation.get(ACTION_MASK), c.gumbel_temperature, generator
        )
        return list(both.unbind(1))

    def see(i: int, observation: dict[str, Tensor], action: list[Tensor], own: Tensor) -> Tensor:
        """What the critic of agent i sees: itself, the state or the others, what they do, own."""
        parts = [observation["view"][:, i]]
        if c.centralized:
            if STATE in observation:
                parts.append(observation[STATE])
            for other in [*range(i + 1, a), *range(i)]:
                if STATE not in observation:
                    parts.append(observation["view"][:, other])
                parts.append(action[other].detach())
        return torch.cat([*parts, own], 1)

    def alive_mask(observation: dict[str, Tensor], i: int) -> Tensor:
        alive = observation.get(AGENT_MASK)
        return torch.ones(batch.size) if alive is None else alive[:, i].float()

    action = list(maddpg._actions.encode(batch.arrays["action"]).unbind(1))
    with torch.no_grad():
        coming = [mlp(x.target_actor, following["view"][:, i]) for i, x in enumerate(agents)]
        coming = choose(coming, following)
    for i, agent in enumerate(agents):
        with torch.no_grad():
            x = see(i, following, coming, coming[i])
            q = torch.stack([mlp(w, x)[:, 0] for w in agent.target_critics]).amin(0)
            y = batch.reward[:, i] + batch.discount[:, 0] * alive_mask(following, i) * q
        alive = alive_mask(now, i)
        agent.critic_optimizer.zero_grad()
        for critic in agent.critics:
            error = mlp(critic, see(i, now, action, action[i]))[:, 0] - y
            (batch.weight * alive * error.square()).sum().div(alive.sum()).backward()
            torch.nn.utils.clip_grad_norm_(critic, c.max_grad_norm)
        agent.critic_optimizer.step()
    out = [mlp(agent.actor, now["view"][:, i]) for i, agent in enumerate(agents)]
    exact = discrete and c.actor_gradient == "exact"
    own = out if exact else choose(out, now)
    for i, agent in enumerate(agents):
        if exact:
            q = torch.zeros(batch.size)
            legal = torch.ones_like(out[i])
            if ACTION_MASK in now:
                legal = now[ACTION_MASK][:, i].float()
            weights = out[i].exp() * legal
            for k, unit in enumerate(torch.eye(out[i].shape[1])):
                x = see(i, now, action, unit.expand_as(out[i]))
                pi = weights[:, k] / weights.sum(1)
                q = q + pi * mlp(agent.critics[0], x)[:, 0].detach()
        else:
            q = mlp(agent.critics[0], see(i, now, action, own[i]))[:, 0]
        loss = c.output_penalty * out[i].square().mean(-1) - q
        agent.actor_optimizer.zero_grad()
        alive = alive_mask(now, i)
        (loss * alive).sum().div(alive.sum()).backward(retain_graph=True)
        torch.nn.utils.clip_grad_norm_(agent.actor, c.max_grad_norm)
    for agent in agents:
        agent.actor_optimizer.step()
        with torch.no_grad():
            pairs = [(agent.target_actor, agent.actor)]
            pairs += zip(agent.target_critics, agent.critics, strict=True)
            for targets, online in pairs:
                for t, p in zip(targets, online, strict=True):
                    t += c.target_tau * (p - t)


@pytest.mark.parametrize("twin", [False, True], ids=["one critic", "twins"])
@pytest.mark.parametrize("centralized", [True, False])
@pytest.mark.parametrize(
    ("space", "gradient"), [*((space, "gumbel") for space in SPACES), ("masked", "exact")]
)
def test_stacked_updates_equal_a_plain_loop(
    space: str, gradient: str, centralized: bool, twin: bool
) -> None:
    spec = spec_of(space)
    maddpg = make(
        spec,
        centralized=centralized,
        share_parameters=False,
        twin_critics=twin,
        max_grad_norm=0.003,  # always clips
        gumbel_temperature=0.7,
        actor_gradient=gradient,
    )
    loop = copy.deepcopy(maddpg)
    agents = [PlainAgent(loop, i, 2 if twin else 1) for i in range(3)]
    for seed in range(3):
        batch = random_transitions(spec, 16, seed)
        plain_update(agents, loop, copy.deepcopy(batch))
        log = maddpg.update(batch)
        assert min(float(log["critic_grad_norm"]), float(log["actor_grad_norm"])) > 0.003
    for i, agent in enumerate(agents):
        for network, plain in (
            (maddpg.actor, agent.actor),
            (maddpg.target_actor, agent.target_actor),
        ):
            for ours, its in zip(network.parameters(), plain, strict=True):
                torch.testing.assert_close(ours[i], its.detach(), atol=1e-6, rtol=1e-6)
        for j, plain in enumerate(agent.critics):
            index = i * len(agent.critics) + j
            for ours, its in zip(maddpg.critic.parameters(), plain, strict=True):
                torch.testing.assert_close(ours[index], its.detach(), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("num_actions", "gradient"), [(16, "exact"), (17, "gumbel")])
def test_policies_climb_the_values_of_few_actions_by_default(
    num_actions: int, gradient: str
) -> None:
    spec = replace(spec_of("discrete"), action=Discrete(num_actions))
    weights = []
    for options in ({}, {"actor_gradient": "exact"}, {"actor_gradient": "gumbel"}):
        maddpg = make(spec, **options)
        maddpg.update(random_transitions(spec, 16))
        weights.append(torch.cat([p.detach().flatten() for p in maddpg.actor.parameters()]))
    default, exact, gumbel = weights
    assert not torch.equal(exact, gumbel)
    assert torch.equal(default, exact if gradient == "exact" else gumbel)


def test_runs_of_before_an_option_climb_as_they_did() -> None:
    whole = Config(gamma=0.9).model_dump()
    del whole["actor_gradient"]
    assert Config(**whole).actor_gradient == "gumbel"
    del whole["averaged_policy"]  # of 0.2
    earliest = Config(**whole)
    assert (earliest.actor_gradient, earliest.averaged_policy, earliest.gamma) == (
        "gumbel",
        False,
        0.9,
    )
    assert Config(gamma=0.9).actor_gradient is None


@pytest.mark.parametrize("space", SPACES)
def test_agents_gradients_stay_apart(space: str) -> None:
    spec = spec_of(space)
    batch = random_transitions(spec, 16)
    other = copy.deepcopy(batch)
    other.reward[:, 1] += 100  # the second agent's luck
    one, two = (make(spec, share_parameters=False) for _ in range(2))
    for _ in range(2):  # the policies feel the critics' change at once
        one.update(copy.deepcopy(batch))
        two.update(copy.deepcopy(other))
    for name in ("actor", "critic"):
        pairs = list(
            zip(getattr(one, name).parameters(), getattr(two, name).parameters(), strict=True)
        )
        for p, q in pairs:
            torch.testing.assert_close(p[[0, 2]], q[[0, 2]], atol=1e-7, rtol=0)
        assert not torch.equal(pairs[0][0][1], pairs[0][1][1])


@pytest.mark.parametrize("centralized", [True, False])
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("space", SPACES)
def test_learns_and_resumes_to_the_bit(space: str, share: bool, centralized: bool) -> None:
    spec = spec_of(space)
    options: dict[str, Any] = {
        "centralized": centralized,
        "share_parameters": share,
        "critic_lr": 5e-3,
        "epsilon_start": 0.5,
        "exploration_env_steps": 640,
        "replay": {"update_interval": 64},
    }
    if space == "continuous":
        options |= {"twin_critics": True, "policy_delay": 2, "target_noise": 0.2}
    one, other = make(spec, **options), make(spec, 99, **options)
    batches = [random_transitions(spec, 32, s) for s in range(3)]
    first = one.update(batches[0])
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    assert torch.equal(other.make_policy().exploration, one.make_policy().exploration)
    for batch in batches[1:]:
        mine, its = one.update(copy.deepcopy(batch)), other.update(copy.deepcopy(batch))
        assert {k: float(v) for k, v in mine.items()} == {k: float(v) for k, v in its.items()}
    # 3 updates of 64 rows each, of 640 to go: epsilon 0.5 - 0.3 * 0.5, noise 0.3 - 0.3 * 0.2.
    expected = torch.tensor([0.35, 0.24] if space == "continuous" else [0.35])
    torch.testing.assert_close(other.make_policy().exploration, expected)
    for _ in range(150):
        last = one.update(batches[0])
    assert last["critic_loss"] < 0.7 * first["critic_loss"]


@pytest.mark.parametrize("twin", [False, True])
def test_a_group_of_equal_agents_learns_as_one_set(twin: bool) -> None:
    """Agents 0 and 1 see and do the same, so sharing a set is as if agent 0 had it alone."""
    spec = spec_of("continuous")
    batch = random_transitions(spec, 16)
    for arrays in (batch.arrays, batch.next_arrays):
        for x in arrays.values():
            x[:, 1] = x[:, 0]
    batch.reward[:, 1] = batch.reward[:, 0]
    options: dict[str, Any] = {"centralized": False, "twin_critics": twin, "max_grad_norm": 0.05}
    group = make(spec, share_parameters=(0, 0, 1), **options)
    alone = make(spec, share_parameters=False, **options)
    for name in ("actor", "critic", "target_actor", "target_critic"):
        parts = zip(
            getattr(alone, name).parameters(), getattr(group, name).parameters(), strict=True
        )
        for apart, shared in parts:
            n = len(shared) // 2  # a twin is one more slice
            apart.data[:] = torch.cat([shared[:n], shared[:n], shared[n:]]).data
    for _ in range(3):
        group.update(copy.deepcopy(batch))
        alone.update(copy.deepcopy(batch))
    for name in ("actor", "critic"):
        parts = zip(
            getattr(alone, name).parameters(), getattr(group, name).parameters(), strict=True
        )
        for apart, shared in parts:
            n = len(shared) // 2
            torch.testing.assert_close(apart[:n], shared[:n], atol=1e-6, rtol=1e-6)
            torch.testing.assert_close(apart[-n:], shared[n:], atol=1e-6, rtol=1e-6)


def test_policies_wait_for_their_turn() -> None:
    spec = spec_of("continuous")
    maddpg = make(spec, policy_delay=3)
    networks = maddpg.actor, maddpg.target_actor, maddpg.target_critic
    weights = [[next(n.parameters()).detach().clone() for n in networks]]
    for seed in range(6):
        log = maddpg.update(random_transitions(spec, 8, seed))
        assert ("actor_loss" in log) == (seed % 3 == 2)
        weights.append([next(n.parameters()).detach().clone() for n in networks])
    for i in range(len(networks)):
        moved = [not torch.equal(a[i], b[i]) for a, b in pairwise(weights)]
        assert moved == [False, False, True, False, False, True]


def test_weights_scale_the_loss_and_errors_are_priorities() -> None:
    spec = spec_of("discrete")
    maddpg = make(spec)
    batch = random_transitions(spec, 8)
    even = copy.deepcopy(batch)
    even.weight, batch.weight = torch.ones(8), torch.full((8,), 0.25)
    reference = copy.deepcopy(maddpg).update(even)
    assert float(maddpg.update(batch)["critic_loss"]) == pytest.approx(
        0.25 * float(reference["critic_loss"]), rel=1e-5
    )
    assert batch.td_error is not None
    assert batch.td_error.shape == (8,)
    torch.testing.assert_close(batch.td_error.mean(), reference["td_error"])


@pytest.mark.parametrize("twin", [False, True])
@pytest.mark.parametrize("share", [True, False])
def test_maps_are_learned_from(share: bool, twin: bool) -> None:
    network = PluginConfig(name="cnn", channels=(4,), kernels=(5,), strides=(3,), hidden=(8,))
    config = Config(share_parameters=share, twin_critics=twin, critic_lr=5e-3)
    maddpg = Maddpg(config, map_spec(), network, Precision("fp32", CPU), CPU, 1)
    batch = random_transitions(map_spec(), 16)
    losses = [float(maddpg.update(batch)["critic_loss"]) for _ in range(40)]
    assert losses[-1] < 0.5 * losses[0]


def test_bf16_stays_near_fp32() -> None:
    spec = spec_of("continuous")
    batch = random_transitions(spec, 64)
    a, b = (make(spec, precision=p).update(copy.deepcopy(batch)) for p in ("fp32", "bf16"))
    assert float(b["critic_loss"]) == pytest.approx(float(a["critic_loss"]), rel=0.05)
    assert float(b["actor_loss"]) == pytest.approx(float(a["actor_loss"]), rel=0.05, abs=0.02)


# ---------------------------------------------------------------- acting


def test_continuous_acting_by_hand() -> None:
    maddpg = make(spec_of("continuous"))  # actions in [-1, 3]
    constant(maddpg.actor, [0.5, -9.0])
    policy = maddpg.make_policy()
    observation = {"view": torch.zeros(3000, 3, 4)}
    greedy = policy.act(observation, None)["action"]
    # 1 + 2 tanh 0.5 = 1.924234; tanh -9 is -1 but for 3e-8.
    torch.testing.assert_close(greedy[0, 0], torch.tensor([1.924234, -1.0]))
    policy.exploration.copy_(torch.tensor([0.0, 0.1]))
    acted = policy.act(observation, torch.Generator().manual_seed(0))["action"]
    first = acted[..., 0]
    assert float(first.std()) == pytest.approx(0.2, abs=0.01)  # 0.1 halves of a range of 4
    assert float(first.mean()) == pytest.approx(1.924, abs=0.01)
    assert float(acted.min()) >= -1
    louder = acted > greedy
    assert not torch.equal(louder[..., 0], louder[..., 1])  # each number has noise of its own
    assert not torch.equal(louder[:, 0], louder[:, 1])
    policy.exploration.copy_(torch.tensor([1.0, 0.0]))  # all random
    acted = policy.act(observation, torch.Generator().manual_seed(0))["action"]
    assert float(acted.mean()) == pytest.approx(1.0, abs=0.05)
    assert float(acted.std()) == pytest.approx(4 / 12**0.5, abs=0.05)
    policy.exploration.copy_(torch.tensor([0.5, 0.0]))
    acted = policy.act(observation, torch.Generator().manual_seed(0))["action"]
    random = acted != greedy
    assert torch.equal(random[..., 0], random[..., 1])  # an agent's action as a whole
    assert not torch.equal(random[:, 0], random[:, 1])  # but not all agents'
    assert float(random.float().mean()) == pytest.approx(0.5, abs=0.03)


def test_discrete_acting_by_hand() -> None:
    maddpg = make(vector_spec(masked=True))
    constant(maddpg.actor, [0.0, 1.0, 9.0])
    policy = maddpg.make_policy()
    observation = {
        "view": torch.zeros(6000, 2, 4),
        ACTION_MASK: torch.tensor([[1, 1, 0], [1, 1, 1]], dtype=torch.uint8).expand(6000, 2, 3),
    }
    greedy = policy.act(observation, None)["action"]
    assert greedy.unique(dim=0).tolist() == [[1, 2]]
    policy.exploration.fill_(0.5)
    acted = policy.act(observation, torch.Generator().manual_seed(0))["action"][:, 0]
    share = torch.stack([(acted == k).float().mean() for k in range(3)])
    # Half uniform over two legal actions, half softmax 0.2689 and 0.7311.
    expected = torch.tensor([0.3845, 0.6155, 0.0])
    torch.testing.assert_close(share, expected, atol=0.02, rtol=0)
    assert share[2] == 0


# ---------------------------------------------------------------- bad input


def test_target_noise_is_refused_for_discrete_actions() -> None:
    with pytest.raises(
        ConfigError, match=r"target_noise=0\.2 is for continuous actions; 'toy' has"
    ):
        make(vector_spec(), target_noise=0.2)


def test_a_presets_target_noise_is_for_continuous_actions() -> None:
    assert make(spec_of("continuous"), target_noise=None)._target_noise == 0.2
    assert make(vector_spec(), target_noise=None)._target_noise == 0.0


def test_actions_without_bounds_are_refused() -> None:
    spec = EnvSpec("arm", 1, (ArraySpec("view", "float32", (4,)),), Continuous(2, -1, float("inf")))
    with pytest.raises(SpecError, match=r"finite bounds, .*; 'arm' has \[-1, inf\]"):
        make(spec)


# ---------------------------------------------------------------- known answers

REPLAY = {"capacity_rows": 20_000, "start_rows": 500, "batch_size": 128, "update_interval": 16}


@pytest.mark.parametrize(
    ("centralized", "options", "goals"),
    [
        (True, {"game": "penalty", "penalty": -100.0}, {50}),
        pytest.param(True, {"game": "penalty", "penalty": -25.0}, {50}, marks=pytest.mark.long),
        pytest.param(True, {"game": "penalty", "penalty": 0.0}, {250}, marks=pytest.mark.long),
        (True, {"game": "climbing"}, {125, 150, 175, 275}),
        pytest.param(False, {"game": "penalty", "penalty": -100.0}, {50}, marks=pytest.mark.long),
        (False, {"game": "penalty", "penalty": 0.0}, {250}),
    ],
)
def test_matrix_games_reach_their_known_answers(
    centralized: bool, options: dict[str, Any], goals: set[int]
) -> None:
    game = MatrixGame(MatrixConfig(**options), 32)
    maddpg = make(
        game.spec,
        centralized=centralized,
        share_parameters=False,
        actor_lr=2e-3,
        critic_lr=2e-3,
        epsilon_start=0.3,
        epsilon_end=0.05,
        exploration_env_steps=4_000,
        replay=REPLAY,
    )
    policy = play_and_learn(maddpg, game, 12_000)
    acted = policy.act({"observation": torch.ones(1, 2, 1)}, None)["action"][0]
    assert round(25 * float(game.payoffs[tuple(acted.tolist())])) in goals


class Aim(VectorEnvironment):
    """Two agents each pick a number u in [-1, 3]; both get -(u_0 - 1)^2 - (u_0 - u_1 - 0.5)^2.

    The best pair is (1, 0.5). Episodes of four such picks, the last of which terminates.
    """

    def __init__(self, num_envs: int) -> None:
        self.num_envs, self._age = num_envs, np.zeros(num_envs, np.int64)
        self.spec = EnvSpec("aim", 2, (ArraySpec("one", "float32", (1,)),), Continuous(1, -1, 3))

    def step(
        self, action: Array, restart: NDArray[np.bool_], seeds: NDArray[np.uint64]
    ) -> TimeStep:
        u = action[..., 0]
        gain = -((u[:, 0] - 1) ** 2) - (u[:, 0] - u[:, 1] - 0.5) ** 2
        self._age = np.where(restart, 0, self._age + 1)
        last = self._age == 4
        step_type = np.where(restart, StepType.FIRST, np.where(last, StepType.LAST, StepType.MID))
        return TimeStep(
            step_type=step_type.astype(np.uint8),
            reward=np.repeat(np.where(restart, 0, gain)[:, None], 2, 1).astype(np.float32),
            discount=np.where(last, 0, 1).astype(np.float32),
            observation={"one": np.ones((self.num_envs, 2, 1), np.float32)},
            metrics={},
        )


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"centralized": True}, id="maddpg"),
        pytest.param({"centralized": False}, id="ddpg", marks=pytest.mark.long),
        pytest.param({"twin_critics": True, "policy_delay": 2, "target_noise": 0.2}, id="matd3"),
    ],
)
def test_continuous_actions_come_near_the_known_best_pair(options: dict[str, Any]) -> None:
    aim = Aim(32)
    maddpg = make(
        aim.spec,
        hidden=32,
        share_parameters=False,
        actor_lr=2e-3,
        critic_lr=5e-3,
        target_tau=0.05,
        gamma=0.9,
        epsilon_start=0.3,
        replay=REPLAY,
        **options,
    )
    policy = play_and_learn(maddpg, aim, 10_000)
    u, v = policy.act({"one": torch.ones(1, 2, 1)}, None)["action"][0, :, 0].tolist()
    loss = (u - 1) ** 2 + (u - v - 0.5) ** 2
    assert loss < 0.3  # random picks: 4/3 + 8/3 + 1/4 = 4.25

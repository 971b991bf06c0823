"""MASAC: formulas by hand, the stacked update against an agent-by-agent one, known answers."""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import Normal, TanhTransform, TransformedDistribution

from murmur.benchmarks._masac_loop import AgentNetworks, MasacLoop
from murmur.benchmarks.masac_update import count_operations
from murmur.env_service.environment import RandomPolicy, VectorEnvironment
from murmur.env_service.envs.matrix import Config as MatrixConfig
from murmur.env_service.envs.matrix import MatrixGame
from murmur.env_service.envs.spread import AssignmentPolicy, Spread
from murmur.env_service.envs.spread import Config as SpreadConfig
from murmur.learner_service.algorithms.masac import (
    Config,
    Masac,
    Sampled,
    SquashedNormal,
    expected_soft_value,
    soft_value,
    squashed_normal,
)
from murmur.learner_service.device.precision import Precision
from murmur.learner_service.layers.forward import forward
from murmur.learner_service.storage.replay import ReplayBatch, ReplayConfig
from murmur.learner_service.storage.storage import observed
from murmur.shared.config import PluginConfig
from murmur.shared.process.errors import SpecError
from murmur.shared.wire.dataset import OBSERVATION
from murmur.shared.wire.spec import (
    ACTION_MASK,
    AGENT_MASK,
    STATE,
    ActionSpec,
    ArraySpec,
    Continuous,
    Discrete,
    EnvSpec,
)
from murmur.shared.wire.timestep import Array, StepType, TimeStep
from tests.learner_service.toys import CPU

LAST = int(StepType.LAST)


def toy(action: ActionSpec, agents: int = 2, *more: ArraySpec) -> EnvSpec:
    return EnvSpec("toy", agents, (ArraySpec("observation", "float32", (4,)), *more), action, (), 4)


def make(
    spec: EnvSpec,
    seed: int = 3,
    precision: str = "fp32",
    network: dict[str, Any] | None = None,
    device: torch.device = CPU,
    **options: Any,
) -> Masac:
    net = PluginConfig(**{"name": "mlp", "hidden": (8,), "agent_id": False, **(network or {})})
    return Masac(Config(**options), spec, net, Precision(precision, device), device, seed)


def batch_for(spec: EnvSpec, rows: int = 16, seed: int = 0) -> ReplayBatch:
    """Random transitions; a quarter of them end in a terminal state."""
    random = torch.Generator().manual_seed(seed)
    a = spec.num_agents

    def observed() -> dict[str, Tensor]:
        arrays = {}
        for o in spec.observations:
            shape = (rows, a, *o.shape) if o.per_agent else (rows, *o.shape)
            if o.name == ACTION_MASK:
                mask = torch.rand(shape, generator=random) < 0.6
                mask[..., 0] = True
                arrays[o.name] = mask.to(torch.uint8)
            elif o.name == AGENT_MASK:
                arrays[o.name] = (torch.rand(shape, generator=random) < 0.7).to(torch.uint8)
            else:
                arrays[o.name] = torch.randn(shape, generator=random)
        return {OBSERVATION + k: v for k, v in arrays.items()}

    arrays, after = observed(), observed()
    if isinstance(spec.action, Discrete):
        legal = arrays.get(OBSERVATION + ACTION_MASK, torch.ones(rows, a, spec.action.num_actions))
        scores = torch.rand(legal.shape, generator=random) * legal
        arrays["action"] = scores.argmax(-1).int()
    else:
        low, high = spec.action.low, spec.action.high
        drawn = torch.rand((rows, a, spec.action.size), generator=random)
        arrays["action"] = low + (high - low) * drawn
    reward = torch.randn((rows, a), generator=random)
    discount = torch.where(torch.rand((rows, 1), generator=random) < 0.25, 0.0, 0.99)
    weight = torch.rand(rows, generator=random)
    index = torch.arange(rows)
    return ReplayBatch(arrays, after, reward, discount, weight, index, index)


def clone(batch: ReplayBatch) -> ReplayBatch:
    return copy.deepcopy(batch)


def numbers(scalars: Mapping[str, Tensor]) -> dict[str, float]:
    return {k: float(v) for k, v in scalars.items()}


# ---------------------------------------------------------------- formulas


def test_soft_values_by_hand() -> None:
    alpha = torch.tensor([0.5, 2.0])  # two agents
    value = soft_value(torch.tensor([[3.0, 3.0]]), torch.tensor([[-1.0, 2.0]]), alpha)
    assert value.tolist() == [[3.5, -1.0]]  # 3 + 0.5 * 1; 3 - 2 * 2
    # pi = (1/4, 3/4): 1/4 (2 + 0.5 log 4) + 3/4 (4 + 0.5 log 4/3)
    log_probs = torch.tensor([[[0.25, 0.75]]]).log()
    expected = 0.25 * (2 + 0.5 * math.log(4)) + 0.75 * (4 + 0.5 * math.log(4 / 3))
    got = expected_soft_value(torch.tensor([[[2.0, 4.0]]]), log_probs, torch.tensor([0.5]))
    torch.testing.assert_close(got, torch.tensor([[expected]]))


def test_an_illegal_action_adds_nothing_to_a_value() -> None:
    log_probs = torch.tensor([[[0.0, -1e9]]], requires_grad=True)
    value = expected_soft_value(torch.tensor([[[2.0, 1e6]]]), log_probs, torch.tensor([0.5]))
    assert value.tolist() == [[2.0]]
    value.sum().backward()
    assert log_probs.grad is not None
    assert log_probs.grad[0, 0, 1] == 0


def test_squashed_normal_equals_torchs_and_bears_extremes() -> None:
    mean, std, noise = torch.randn(50, 3), torch.rand(50, 3) + 0.1, torch.randn(50, 3)
    action, log_prob = SquashedNormal(mean, std).rsample(noise)
    theirs = TransformedDistribution(Normal(mean.double(), std.double()), TanhTransform())
    x = mean.double() + std.double() * noise.double()
    density = Normal(mean.double(), std.double()).log_prob(x)
    density -= TanhTransform().log_abs_det_jacobian(x, x.tanh())
    torch.testing.assert_close(action.double(), x.tanh(), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(log_prob.double(), density.sum(-1), atol=1e-5, rtol=1e-5)
    inner = action.double().clamp(-1 + 1e-6, 1 - 1e-6)
    torch.testing.assert_close(
        log_prob.double(), theirs.log_prob(inner).sum(-1), atol=1e-2, rtol=1e-3
    )
    far = torch.tensor([[40.0], [-40.0]], requires_grad=True)
    _, log_prob = SquashedNormal(far, torch.ones(2, 1)).rsample(torch.zeros(2, 1))
    # log N(0) - log(4 e^-80) = -0.9189 - 1.3863 + 80
    torch.testing.assert_close(log_prob, torch.full((2,), 80 - 0.9189385 - 1.3862944))
    log_prob.sum().backward()
    assert far.grad is not None
    torch.testing.assert_close(far.grad, torch.tensor([[2.0], [-2.0]]))


def test_gradient_of_samples_equals_autograds() -> None:
    start, noise = 3 * torch.randn(2, 40, 3, 4), torch.randn(2, 40, 3, 2)
    weights = torch.randn(40, 3, 2), torch.randn(40, 3)
    ours, theirs = (start[0].clone().requires_grad_() for _ in range(2))
    action, log_prob, *after = Sampled.apply(ours, start[1], noise)
    torch.autograd.backward((action, log_prob), weights)
    expected = squashed_normal(theirs).rsample(noise[0])
    torch.autograd.backward(expected, weights)
    assert torch.equal(action, expected[0])
    assert torch.equal(log_prob, expected[1])
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6)
    following = squashed_normal(start[1]).rsample(noise[1])
    assert all(torch.equal(a, b) for a, b in zip(after, following, strict=True))
    assert not any(x.requires_grad for x in after)


def test_drawn_action_is_the_sampled_one() -> None:
    mean, std = torch.randn(5, 3), torch.rand(5, 3) + 0.1
    noise = torch.empty(5, 3).normal_(generator=torch.Generator().manual_seed(2))
    sampled, _ = SquashedNormal(mean, std).rsample(noise)
    drawn = SquashedNormal(mean, std).sample(torch.Generator().manual_seed(2))
    assert torch.equal(drawn, sampled)


def test_the_squashed_density_integrates_to_one() -> None:
    x = torch.linspace(-8, 8, 200_001, dtype=torch.float64)
    pi = SquashedNormal(torch.full((200_001, 1), 0.3), torch.full((200_001, 1), 0.8))
    noise = ((x - 0.3) / 0.8).float().unsqueeze(1)
    action, log_prob = pi.rsample(noise)
    area = torch.trapezoid(log_prob.double().exp(), action.double().squeeze(1))
    assert float(area) == pytest.approx(1, abs=1e-4)


# ---------------------------------------------------------------- acting


@pytest.mark.parametrize(("low", "high"), [(0.1, 0.9), (-0.1, 0.2), (-0.2, 0.35), (-1.0, 1.0)])
def test_the_ends_of_the_range_are_the_bounds(low: float, high: float) -> None:
    """In fp32 middle -+ half of the first three are a float beyond: a worker would refuse it."""
    acted = make(toy(Continuous(1, low, high))).make_policy().in_bounds(torch.tensor([-1.0, 1.0]))
    assert acted["action"].tolist() == torch.tensor([low, high]).tolist()


@pytest.mark.parametrize(("low", "high"), [(-1.0, 1.0), (2.0, 6.0)])
def test_actions_keep_the_bounds_and_are_what_is_learned_from(low: float, high: float) -> None:
    spec = toy(Continuous(2, low, high))
    masac = make(spec)
    policy = masac.make_policy()
    observation = {"observation": torch.randn(500, 2, 4)}
    action = policy.act(observation, torch.Generator().manual_seed(0))["action"]
    assert action.shape == (500, 2, 2)
    assert action.dtype == torch.float32
    assert low <= float(action.min()) < float(action.max()) <= high
    pi = squashed_normal(forward(masac.actor.network, masac._actor_inputs(observation))[0])
    noise = torch.empty(500, 2, 2).normal_(generator=torch.Generator().manual_seed(0))
    sampled, _ = pi.rsample(noise)
    torch.testing.assert_close(action, (low + high) / 2 + (high - low) / 2 * sampled)
    greedy = policy.act(observation, None)["action"]
    torch.testing.assert_close(greedy, (low + high) / 2 + (high - low) / 2 * pi.mode())


def test_masked_actions_are_never_chosen() -> None:
    spec = toy(Discrete(3), 2, ArraySpec(ACTION_MASK, "uint8", (3,)))
    policy = make(spec).make_policy()
    mask = torch.tensor([1, 0, 1], dtype=torch.uint8).expand(500, 2, 3)
    observation = {"observation": torch.randn(500, 2, 4), ACTION_MASK: mask}
    for generator in (torch.Generator().manual_seed(0), None):
        action = policy.act(observation, generator)["action"]
        assert action.dtype == torch.int32
        assert set(action.unique().tolist()) <= {0, 2}


def test_unbounded_actions_are_refused() -> None:
    with pytest.raises(SpecError, match=r"finite bounds, .*; 'toy' has \[-inf, 1\]"):
        make(toy(Continuous(2, -math.inf, 1.0)))


# ---------------------------------------------------------------- contract

SPECS: dict[str, Callable[[], EnvSpec]] = {
    "continuous": lambda: toy(Continuous(2, -2.0, 1.0)),
    "continuous, some dead": lambda: toy(Continuous(2), 2, ArraySpec(AGENT_MASK, "uint8", ())),
    "continuous, state": lambda: toy(
        Continuous(2), 2, ArraySpec(STATE, "float32", (3,), per_agent=False)
    ),
    "discrete": lambda: toy(Discrete(3)),
    "discrete, masked": lambda: toy(Discrete(3), 2, ArraySpec(ACTION_MASK, "uint8", (3,))),
    "one agent": lambda: toy(Continuous(2), 1),
}


@pytest.mark.parametrize("centralized", [True, False])
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("space", SPECS)
def test_learns_values_and_resumes_exactly(space: str, share: bool, centralized: bool) -> None:
    spec = SPECS[space]()
    options = {"centralized": centralized, "share_parameters": share, "critic_lr": 1e-2}
    one, other = make(spec, **options), make(spec, 99, **options)
    batches = [batch_for(spec, seed=s) for s in range(3)]
    first = one.update(clone(batches[0]))
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    for batch in batches[1:]:  # the same numbers bit for bit
        mine, its = clone(batch), clone(batch)
        assert numbers(one.update(mine)) == numbers(other.update(its))
        assert mine.td_error is not None
        assert its.td_error is not None
        assert mine.td_error.tolist() == its.td_error.tolist()
    for _ in range(40):
        last = one.update(clone(batches[0]))
    assert last["critic_loss"] < 0.8 * first["critic_loss"]
    assert all(bool(torch.isfinite(v)) for v in last.values())


@pytest.mark.parametrize("space", ["continuous", "discrete"])
def test_an_update_moves_what_it_should(space: str) -> None:
    masac = make(SPECS[space](), share_parameters=False, target_tau=0.25)
    parts = {"actor": masac.actor, "critic": masac.critic, "target": masac.target}
    before = {k: [p.detach().clone() for p in m.parameters()] for k, m in parts.items()}
    masac.update(batch_for(masac._spec))
    for name in ("actor", "critic"):
        for p, old in zip(parts[name].parameters(), before[name], strict=True):
            assert bool((p != old).any(-1).any()), name
    for p, old, online in zip(
        masac.target.parameters(), before["target"], masac.critic.parameters(), strict=True
    ):
        torch.testing.assert_close(p, 0.75 * old + 0.25 * online)
    assert all(p.requires_grad for p in masac.critic.parameters())


@pytest.mark.parametrize("space", ["continuous", "discrete"])
def test_agents_of_their_own_networks_learn_apart(space: str) -> None:
    """With own critics, what one agent observes, does and gets moves no other agent's weights."""
    spec = SPECS[space]()
    options = {"centralized": False, "share_parameters": False, "max_grad_norm": 0.5}
    one, other = make(spec, **options), make(spec, **options)
    batch = batch_for(spec)
    changed = clone(batch)
    changed.reward[:, 1] += 5
    changed.arrays[OBSERVATION + "observation"][:, 1] *= 2
    one.update(batch)
    other.update(changed)
    for network, mine in (("actor", 1), ("critic", 2)):  # slices of the first agent
        pairs = list(
            zip(
                getattr(one, network).parameters(),
                getattr(other, network).parameters(),
                strict=True,
            )
        )
        assert all(p[:mine].tolist() == q[:mine].tolist() for p, q in pairs)
        assert any(p[mine:].tolist() != q[mine:].tolist() for p, q in pairs)


def test_dead_agents_and_what_follows_death_count_for_nothing() -> None:
    spec = toy(Continuous(2), 2, ArraySpec(AGENT_MASK, "uint8", ()))
    options = {"centralized": False, "share_parameters": False}
    batch = batch_for(spec)
    alive = batch.arrays[OBSERVATION + AGENT_MASK]
    lives_on = batch.next_arrays[OBSERVATION + AGENT_MASK]
    other = clone(batch)
    dead = alive == 0
    other.arrays[OBSERVATION + "observation"][dead] += 1
    other.arrays["action"][dead] *= 0.5
    other.reward[dead] += 100
    other.next_arrays[OBSERVATION + "observation"][(lives_on == 0) | dead] += 1
    one, two = make(spec, **options), make(spec, **options)
    assert numbers(one.update(batch)) == pytest.approx(numbers(two.update(other)), rel=1e-6)
    for p, q in zip(one.critic.parameters(), two.critic.parameters(), strict=True):
        torch.testing.assert_close(p, q)
    assert batch.td_error is not None
    assert other.td_error is not None
    torch.testing.assert_close(batch.td_error, other.td_error)
    none_alive = clone(batch)
    none_alive.arrays[OBSERVATION + AGENT_MASK] = torch.zeros_like(alive)
    assert all(math.isfinite(v) for v in numbers(one.update(none_alive)).values())
    assert none_alive.td_error is not None
    assert none_alive.td_error.tolist() == [0.0] * none_alive.size


def test_weights_and_td_errors() -> None:
    spec = toy(Continuous(2))
    options = {"share_parameters": False, "gamma": 0.5}
    masac, unweighted = make(spec, **options), make(spec, **options)
    batch = batch_for(spec)
    batch.discount = torch.zeros(batch.size, 1)  # all terminal: the target is the reward
    with torch.no_grad():
        action = batch.arrays["action"]
        joint = masac._joint_inputs(batch.observation(), action)
        vector = torch.cat([joint.vector, action], 2)  # type: ignore[list-item]
        q, _ = forward(masac.critic, type(joint)(None, vector), None, masac._precision)
    error = (q - batch.reward.unsqueeze(-1)).abs()
    weight = batch.weight.view(-1, 1, 1)
    scalars = masac.update(batch)
    assert batch.td_error is not None
    torch.testing.assert_close(batch.td_error, error.mean((1, 2)))
    assert float(scalars["critic_loss"]) == pytest.approx(
        float((weight * error.square()).sum(-1).mean()), rel=1e-5
    )
    none = clone(batch)
    none.weight = torch.zeros(none.size)
    before = [p.detach().clone() for p in unweighted.critic.parameters()]
    unweighted.update(none)
    for p, old in zip(unweighted.critic.parameters(), before, strict=True):
        assert p.tolist() == old.tolist()


def test_losses_and_errors_are_means_over_alive_agents() -> None:
    spec = toy(Continuous(2), 2, ArraySpec(AGENT_MASK, "uint8", ()))
    masac = make(spec, centralized=False, share_parameters=False)
    batch = batch_for(spec, 4)
    alive = torch.tensor([[1, 1], [0, 1], [1, 0], [0, 0]], dtype=torch.uint8)
    batch.arrays[OBSERVATION + AGENT_MASK] = alive
    batch.reward, batch.discount = torch.zeros(4, 2), torch.zeros(4, 1)  # the targets are 0
    batch.weight = torch.tensor([1.0, 0.5, 0.5, 1.0])
    with torch.no_grad():
        for p in masac.critic.parameters():
            p.zero_()
        p[:, 0, 0] = torch.tensor([1.0, 3.0, 2.0, 6.0])  # the last bias: twins of both agents
    scalars = masac.update(batch)
    # Squares of the twins add to 10 and 40; the weights of two alive rows each are 1 and 0.5.
    assert float(scalars["critic_loss"]) == pytest.approx((10 * 1.5 / 2 + 40 * 1.5 / 2) / 2)
    assert float(scalars["td_error"]) == pytest.approx((2 + 4) / 2)
    assert batch.td_error is not None
    assert batch.td_error.tolist() == [3.0, 4.0, 2.0, 0.0]


def test_discrete_values_by_hand() -> None:
    spec = toy(Discrete(3), 2, ArraySpec(ACTION_MASK, "uint8", (3,)))
    masac = make(spec)
    now, later = batch_for(spec, 1).observation(), observed(batch_for(spec, 1).next_arrays)
    now[ACTION_MASK] = torch.tensor([[[1, 1, 0], [1, 1, 1]]], dtype=torch.uint8)
    later[ACTION_MASK] = torch.tensor([[[1, 0, 1], [0, 0, 1]]], dtype=torch.uint8)
    # Both twins' values of the three actions; and more of them where the other agent does one.
    for critic, twins, seen, more in (
        (masac.critic, [[10.0, 20, 30], [40, 5, 25]], 1, 100.0),
        (masac.target, [[1.0, 2, 3], [3, 0, 5]], 2, 1000.0),
    ):
        with torch.no_grad():
            for p in critic.parameters():
                p.zero_()
            first, _, second, last = critic.parameters()
            last[:, 0] = torch.tensor(twins)
            first[:, 4 + 4 + seen, 0], second[:, 0] = 1.0, more  # own view, the other's, its action
    out = torch.tensor([[[0.25, 0.75, 9.0], [0.25, 0.25, 0.5]]]).log().requires_grad_(True)
    out_after = torch.tensor([[[0.5, 9.0, 0.5], [0.3, 0.3, 0.4]]]).log()
    action, alpha = torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([0.5, 2.0])
    seen, share = (now, later), torch.ones(1, 2)
    inputs = masac._actor_inputs(now), masac._actor_inputs(later)
    q, value, terms, next_value, order, wanted = masac._discrete(
        action, seen, inputs, (out, out_after), alpha, share, None
    )
    # The first agent sees the other do 1: 100 more; the other sees 0. Taken are 0 and 1.
    assert q.tolist() == [[[110.0, 140.0], [20.0, 5.0]]]
    both = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    three = -(0.5 * math.log(0.25) + 0.5 * math.log(0.5))
    # Lesser values 10, 5, 25; of the first agent 100 more, and it has no third action.
    mine, its = 100 + 0.25 * 10 + 0.75 * 5 + 0.5 * both, 0.25 * 10 + 0.25 * 5 + 0.5 * 25 + 2 * three
    torch.testing.assert_close(value, torch.tensor([[mine, its]]))
    torch.testing.assert_close(order, -torch.tensor([[both, three]]))
    # Lesser values 1, 0, 3. The other can do but 2, which the first sees; it sees 0 or 2 itself.
    expected = 1000 + 0.5 * 1 + 0.5 * 3 + 0.5 * math.log(2)
    assert float(next_value[0, 0]) == pytest.approx(expected)
    assert float(next_value[0, 1]) in (3.0, 1003.0)
    torch.testing.assert_close(wanted, 0.2 * torch.tensor([[2.0, 3.0]]).log())
    assert not next_value.requires_grad
    assert not order.requires_grad
    assert not value.requires_grad
    ((loss, weights),) = terms
    assert torch.equal(weights, -share)
    moved = torch.autograd.grad(loss.sum(), [out, *masac.critic.parameters()], allow_unused=True)
    assert moved[0] is not None
    assert all(gradient is None for gradient in moved[1:])  # the actor's loss moves no critic


def test_target_and_gradient_of_the_temperature_by_hand() -> None:
    """Networks of zeros choose evenly of two actions and value all with 0."""
    masac = make(toy(Discrete(2), 1), initial_temperature=0.5, target_entropy_share=0.2)
    with torch.no_grad():
        for parameter in (*masac.actor.parameters(), *masac.target.parameters()):
            parameter.zero_()
    batch = batch_for(toy(Discrete(2), 1), 2)
    batch = replace(batch, reward=torch.tensor([[1.0], [2.0]]), discount=torch.tensor([[0.9], [0]]))
    scalars = numbers(masac.update(batch))
    # 1 + 0.9 V and, after the end, 2 alone; V = 0 + 0.5 log 2.
    assert scalars["target_mean"] == pytest.approx((1 + 0.9 * 0.5 * math.log(2) + 2) / 2)
    # Entropy log 2, 0.2 log 2 of it wanted: descent cools.
    assert float(masac.temperature.log.grad) == pytest.approx(0.8 * math.log(2))


@pytest.mark.parametrize("shared", [True, False])
def test_temperatures_are_learned_each_or_together_or_not_at_all(shared: bool) -> None:
    spec = toy(Continuous(2), 3)
    options = {"initial_temperature": 0.02, "target_entropy": -50.0, "temperature_lr": 0.1}
    masac = make(spec, shared_temperature=shared, **options)
    assert len(masac.temperature.log) == (1 if shared else 3)
    scalars = masac.update(batch_for(spec))
    assert float(scalars["temperature"]) == pytest.approx(0.02)
    # More entropy than wanted: one Adam step cools by its learning rate.
    torch.testing.assert_close(
        masac.temperature.log, torch.full_like(masac.temperature.log, math.log(0.02) - 0.1)
    )
    fixed = make(spec, learn_temperature=False, **options)
    fixed.update(batch_for(spec))
    assert fixed.temperature.log.exp().tolist() == pytest.approx([0.02] * 3)


# ---------------------------------------------------------------- stacked equals the loop


def relative(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """|difference| / |value| of all numbers of a network together.

    Together, because Adam's first step of a gradient near zero is of either sign.
    """
    one, other = (torch.cat([x.detach().flatten() for x in xs]) for xs in (ours, theirs))
    return float((one - other).norm() / other.norm())


def compare(precision: str, updates: int, agents: int = 3) -> tuple[float, float]:
    """Largest relative differences of parameters and of gradients, stacked against a loop."""
    spec = toy(Continuous(2), agents)
    masac = make(
        spec, 3, precision, {"hidden": (16, 16)}, share_parameters=False, max_grad_norm=1.0
    )
    loop = MasacLoop(masac, masac._config, gauss_seidel=False)
    noise = torch.Generator()
    noise.set_state(masac._generator.get_state())
    for seed in range(updates):
        batch = batch_for(spec, 32, seed)
        loop.update(clone(batch), noise)
        masac.update(batch)
    parameters, gradients = [], []
    for i, agent in enumerate(loop.agents):
        stacked = AgentNetworks(masac, i, masac._config)
        for mine, plain in (
            (stacked.actor, agent.actor),
            *zip(stacked.twins, agent.twins, strict=True),
            *zip(stacked.targets, agent.targets, strict=True),
        ):
            parameters.append(relative(list(mine.parameters()), list(plain.parameters())))
        torch.testing.assert_close(stacked.log_temperature, agent.log_temperature)
        for stack, slice_, plain in (
            (masac.actor.network, i, agent.actor),
            (masac.critic, 2 * i, agent.twins[0]),
            (masac.critic, 2 * i + 1, agent.twins[1]),
        ):
            ours = [p.grad[slice_] for p in stack.parameters() if p.grad is not None]
            ours = [g.T if n % 2 == 0 else g.squeeze(0) for n, g in enumerate(ours)]
            theirs = [p.grad for p in plain.parameters() if p.grad is not None]
            gradients.append(relative(ours, theirs))
    return max(parameters), max(gradients)


def test_stacked_equals_a_loop_over_agents() -> None:
    for updates in (1, 100):
        parameters, gradients = compare("fp32", updates)
        assert parameters < 1e-6
        assert gradients < 1e-6
    parameters, _ = compare("bf16", 20)
    assert parameters < 1e-3


def test_bf16_stays_near_a_loop_in_fp32() -> None:
    spec = toy(Continuous(2), 3)
    options = {"share_parameters": False, "network": {"hidden": (16, 16)}}
    full, half = make(spec, **options), make(spec, precision="bf16", **options)
    batch = batch_for(spec, 64)
    a, b = numbers(full.update(clone(batch))), numbers(half.update(clone(batch)))
    for name in ("critic_loss", "actor_loss", "entropy", "target_mean", "actor_grad_norm"):
        assert b[name] == pytest.approx(a[name], rel=0.02, abs=0.02), name
    grads = [
        [p.grad for m in (x.actor, x.critic) for p in m.parameters() if p.grad is not None]
        for x in (half, full)
    ]
    assert relative(*grads) < 0.1


# ---------------------------------------------------------------- the number of operations


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("action", [Continuous(2), Discrete(5)], ids=["continuous", "discrete"])
def test_few_operations_for_any_number_of_agents_and_no_wait(
    action: ActionSpec, share: bool
) -> None:
    counts = []
    for agents in (2, 8):
        spec = toy(action, agents)
        masac = make(spec, network={"hidden": (16, 16)}, share_parameters=share)
        batch = batch_for(spec)
        masac.update(clone(batch))  # the optimiser makes its state
        counted = count_operations(partial(masac.update, batch))
        assert not counted.keys() & {"_local_scalar_dense", "item", "nonzero"}
        counts.append(counted.total())
    assert counts[0] == counts[1]
    assert counts[0] <= 185


# ---------------------------------------------------------------- known answers


class Bandit(VectorEnvironment):
    """One state, one step: reward -(sum of squared distances to the optimum), for all agents."""

    def __init__(self, optimum: tuple[float, ...], num_envs: int) -> None:
        self.num_envs, self._optimum = num_envs, np.array(optimum, np.float32)
        self.spec = EnvSpec(
            "bandit",
            len(optimum),
            (ArraySpec("observation", "float32", (1,)),),
            Continuous(1, -2.0, 2.0),
            (),
            1,
        )
        self._playing = np.zeros(num_envs, np.bool_)

    def step(self, action: Array, restart: Array, seeds: Array) -> TimeStep:
        missed = -np.square(action[..., 0] - self._optimum).sum(1)
        gain = np.where(restart, 0, missed).astype(np.float32)
        step_type = np.where(restart, int(StepType.FIRST), LAST).astype(np.uint8)
        agents = self.spec.num_agents
        return TimeStep(
            step_type=step_type,
            reward=np.repeat(gain[:, None], agents, 1),
            discount=np.where(restart, 1, 0).astype(np.float32),
            observation={"observation": np.ones((self.num_envs, agents, 1), np.float32)},
            metrics={},
        )


def train(masac: Masac, environment: VectorEnvironment, steps: int, seed: int = 0) -> None:
    """Act and learn in turn, for this number of environment steps."""
    storage = masac.make_storage(environment.spec, None)
    policy, generator = masac.make_policy(), torch.Generator().manual_seed(seed)
    n, taken = environment.num_envs, 0
    seeds = np.arange(n, dtype=np.uint64)
    timestep = environment.reset(seeds)
    unroll = storage.begin(n, 0, 0)
    while taken < steps:
        rows: dict[str, Array] = {
            "step_type": timestep.step_type,
            "reward": timestep.reward,
            "discount": timestep.discount,
            **{OBSERVATION + k: v for k, v in timestep.observation.items()},
        }
        while True:
            for name, x in rows.items():
                unroll.arrays[name][unroll.cursor] = torch.from_numpy(np.ascontiguousarray(x))
            unroll.cursor += 1
            if not unroll.full:
                break
            storage.add(unroll)
            while storage.ready:
                batch = storage.sample(0, 0.0)
                assert batch is not None
                masac.update(batch)
                masac.publish(policy)
                storage.done(batch)
            unroll = storage.begin(n, 0, 0)
        observation = {k: torch.from_numpy(v.copy()) for k, v in timestep.observation.items()}
        acted = policy.act(observation, generator)
        unroll.arrays["action"][unroll.cursor - 1] = acted["action"]
        taken += n
        seeds = seeds + np.uint64(n)
        timestep = environment.step(acted["action"].numpy(), timestep.step_type == LAST, seeds)


@pytest.mark.parametrize("temperature", [pytest.param(0.1, marks=pytest.mark.long), 0.5])
def test_bandit_is_solved_with_the_target_entropy(
    temperature: float,
) -> None:
    """The best soft policy is proportional to exp(reward / alpha): about normal, deviation known.

    r = -(a - m)^2 with a = 2 u: in u, -4 (u - m/2)^2, so the variance of u is alpha / 8.
    """
    game = Bandit((0.5, -0.4), 16)
    masac = make(
        game.spec,
        network={"hidden": (32, 32)},
        share_parameters=False,
        learn_temperature=False,
        initial_temperature=temperature,
        actor_lr=3e-3,
        critic_lr=3e-3,
        target_tau=0.05,
        replay=ReplayConfig(
            capacity_rows=20_000, start_rows=500, batch_size=128, update_interval=32
        ),
    )
    train(masac, game, 32_000)
    policy = masac.make_policy()
    state = {"observation": torch.ones(4000, 2, 1)}
    greedy = policy.act(state, None)["action"][0, :, 0]
    torch.testing.assert_close(greedy, torch.tensor([0.5, -0.4]), atol=0.1, rtol=0)
    drawn = policy.act(state, torch.Generator().manual_seed(1))["action"][..., 0]
    assert drawn.std(0).tolist() == pytest.approx([2 * math.sqrt(temperature / 8)] * 2, rel=0.2)


@pytest.mark.long
def test_the_wanted_entropy_is_kept() -> None:
    game = Bandit((0.5, -0.4), 16)
    masac = make(
        game.spec,
        network={"hidden": (32, 32)},
        target_entropy=-1.5,
        actor_lr=3e-3,
        critic_lr=3e-3,
        temperature_lr=3e-3,
        target_tau=0.05,
        replay=ReplayConfig(
            capacity_rows=20_000, start_rows=500, batch_size=128, update_interval=32
        ),
    )
    train(masac, game, 48_000)
    scalars = masac.update(masac_batch(masac, game))
    assert float(scalars["entropy"]) == pytest.approx(-1.5, abs=0.15)


def masac_batch(masac: Masac, game: VectorEnvironment) -> ReplayBatch:
    """Rows to look at the policy with."""
    batch = batch_for(game.spec, 2000)
    batch.arrays[OBSERVATION + "observation"].fill_(1)
    return batch


@pytest.mark.parametrize(
    ("options", "goal"),
    [
        pytest.param(
            {"game": "climbing"}, {125, 150, 175, 275}, marks=pytest.mark.long, id="climbing"
        ),
        pytest.param({"game": "penalty", "penalty": 0.0}, {250}, id="penalty"),
    ],
)
def test_matrix_games_reach_their_plateaus(options: dict[str, Any], goal: set[int]) -> None:
    game = MatrixGame(MatrixConfig(**options), 16)
    masac = make(
        game.spec,
        network={"hidden": (32,)},
        share_parameters=False,
        gamma=0.0,
        initial_temperature=1.0,
        target_entropy_share=0.05,
        actor_lr=3e-3,
        critic_lr=3e-3,
        temperature_lr=3e-3,
        replay=ReplayConfig(
            capacity_rows=20_000, start_rows=1000, batch_size=128, update_interval=32
        ),
    )
    train(masac, game, 32_000)
    acted = masac.make_policy().act({"observation": torch.ones(1, 2, 1)}, None)["action"][0]
    assert round(25 * float(game.payoffs[tuple(acted.tolist())])) in goal


def returns(environment: Spread, act: Callable[[TimeStep], Array]) -> float:
    """Mean return of one episode of each copy."""
    seeds = np.arange(environment.num_envs, dtype=np.uint64) + np.uint64(10_000)
    timestep = environment.reset(seeds)
    none = np.zeros(environment.num_envs, np.bool_)
    while timestep.step_type[0] != LAST:
        timestep = environment.step(act(timestep), none, seeds)
    return float(timestep.metrics["return"].mean())


@pytest.mark.long
def test_spread_with_continuous_actions_is_learned() -> None:
    config = SpreadConfig(num_agents=2, continuous=True)
    masac = make(
        Spread(config, 1).spec,
        network={"hidden": (64, 64), "agent_id": True},
        gamma=0.95,
        initial_temperature=0.02,
        actor_lr=1e-3,
        critic_lr=2e-3,
        target_tau=0.01,
        replay=ReplayConfig(
            capacity_rows=50_000, start_rows=2000, batch_size=256, update_interval=32
        ),
    )
    train(masac, Spread(config, 32), 48_000)
    policy = masac.make_policy()

    def act(timestep: TimeStep) -> Array:
        observation = {k: torch.from_numpy(v.copy()) for k, v in timestep.observation.items()}
        acted: Array = policy.act(observation, None)["action"].numpy()
        return acted

    test = Spread(config, 200)
    random, scripted = (returns(test, P(test).act) for P in (RandomPolicy, AssignmentPolicy))
    learned = returns(test, act)
    assert (learned - random) / (scripted - random) > 0.6, (random, learned, scripted)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_captured_update_equals_an_eager_one() -> None:
    device = torch.device("cuda")
    spec = toy(Continuous(2), 4)
    options = {"share_parameters": False, "device": device}
    captured, eager = make(spec, **options), make(spec, cuda_graph=False, **options)
    for seed in range(8):
        one, two = batch_for(spec, 32, seed), batch_for(spec, 32, seed)
        for batch in (one, two):
            for name in ("reward", "discount", "weight", "index", "age"):
                setattr(batch, name, getattr(batch, name).to(device))
            batch.arrays = {k: v.to(device) for k, v in batch.arrays.items()}
            batch.next_arrays = {k: v.to(device) for k, v in batch.next_arrays.items()}
        a, b = numbers(captured.update(one)), numbers(eager.update(two))
        assert a == pytest.approx(b, rel=1e-3, abs=1e-4)  # libraries may choose other kernels
    state = copy.deepcopy(captured.state_dict())
    captured.load_state_dict(state)
    batch = one
    assert all(math.isfinite(v) for v in numbers(captured.update(batch)).values())

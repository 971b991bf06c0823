"""COMA: formulas by hand, an update against a plain one, and a game with a known answer."""

import copy
import math
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from murmur.learner_service.algorithms.coma import Coma, Config
from murmur.learner_service.device.precision import Precision
from murmur.learner_service.layers.distributions import sample
from murmur.learner_service.layers.inputs import CriticInputs, InputOptions, Inputs
from murmur.learner_service.learning.base import build_algorithm
from murmur.learner_service.learning.exploration import policy_probabilities
from murmur.learner_service.learning.minibatches import Pass
from murmur.learner_service.learning.returns import clipped_surrogate, lambda_returns
from murmur.learner_service.storage.rollout import Batch, RolloutStorage, transitions
from murmur.shared.config import PluginConfig
from murmur.shared.process.errors import ConfigError, SpecError
from murmur.shared.wire.dataset import OBSERVATION
from murmur.shared.wire.spec import ACTION_MASK, AGENT_MASK, ArraySpec, Continuous, EnvSpec
from murmur.shared.wire.timestep import StepType
from tests.learner_service.toys import (
    CPU,
    LAST,
    MatrixGame,
    clone,
    make_coma,
    parameters,
    random_batch,
    vector_spec,
)


class _Added(Config):
    """Options of a plug-in: one more."""

    horizon: int = 3


class _Own(Config):
    """Options of a plug-in: one with a default of its own."""

    advantage: Literal["critic", "return"] = "return"


@pytest.mark.parametrize("model", [Config, _Added, _Own])
def test_only_runs_of_before_an_option_keep_what_they_knew(model: type[Config]) -> None:
    whole = model().model_dump()
    default = whole.pop("advantage")
    without_advantage = model(**whole)
    assert (without_advantage.advantage, without_advantage.normalize_rewards) == ("critic", True)
    del whole["normalize_rewards"]
    whole["gamma"] = 0.99  # a run keeps its whole configuration: the default of then
    earliest = model(**whole)
    assert (earliest.advantage, earliest.normalize_rewards) == ("critic", False)
    assert (earliest.gamma, model().gamma) == (0.99, 0.95)
    for said in ({"td_lambda": 0.5}, {"normalize_rewards": False}, whole | {"advantage": "return"}):
        found = model(**said)
        assert found.advantage == said.get("advantage", default)
        assert found.normalize_rewards == said.get("normalize_rewards", True)


# 3 - (0.5*1 + 0.5*3) = 1.0;  2 - (0.25*2 + 0.75*0) = 1.5; by returns 5 - 2 = 3, 0.5 - 0.5 = 0. The
# ratios are 2 and 0.5; weights of the ratios -0.25 / 0.25 and -0.25 / 0.5. Rows weigh 0.25 each.
@pytest.mark.parametrize(
    ("advantage", "expected", "variance"),
    [
        (
            "critic",
            [[1.0, 2.0, -1.0, 0.5], [1.5, 0.5, -0.75, 0.75]],
            0.25 * (0.375**2 + 0.875**2),  # about the mean 0.625
        ),
        ("return", [[3.0, 2.0, -3.0, 1.5], [0.0, 0.5, 0.0, 0.0]], 0.25 * (2.25**2 + 0.75**2)),
    ],
)
def test_sums_of_probabilities_by_hand(
    advantage: str, expected: list[list[float]], variance: float
) -> None:
    options = {"clip_ratio": 0.2, "normalize_advantage": True, "epsilon_start": 0.0}
    coma = make_coma(vector_spec(), advantage=advantage, **options)
    q = torch.tensor([[1.0, 3.0], [2.0, 0.0]]).unsqueeze(1)
    pi = torch.tensor([[0.5, 0.5], [0.25, 0.75]]).unsqueeze(1)
    action, share = torch.tensor([[1], [0]]), torch.tensor([[0.25], [0.25]])
    columns = {"action": action, "inverse": torch.tensor([[4.0], [2.0]])}
    columns["target"] = torch.tensor([[5.0], [0.5]])
    inputs, share = Inputs(None, torch.zeros(2, 1, 1)), share.unsqueeze(0)
    one = Pass(1, inputs, inputs, columns, share, -share, torch.ones(1), coma._sharing)
    of_pi, _, root = coma._weights(one, q.unsqueeze(0))
    assert root is not None
    sums = (pi.unsqueeze(-2) * of_pi[0]).sum(-1).squeeze(1)
    torch.testing.assert_close(sums, torch.tensor(expected))
    deviation = coma._deviation(sums.unsqueeze(1), share[0], root[0])
    torch.testing.assert_close(deviation, torch.tensor([math.sqrt(variance)]))


def test_policy_probabilities_by_hand() -> None:
    logits = torch.tensor([[0.0, math.log(3.0), 5.0]])
    # softmax over the first two: 1/4, 3/4; with epsilon 0.2: 0.8*p + 0.2/2
    got = policy_probabilities(logits, torch.tensor([[1, 1, 0]]), 0.2)
    torch.testing.assert_close(got, torch.tensor([[0.3, 0.7, 0.0]]))
    assert got[0, 2] == 0
    # unmasked, two actions: 0.5*1/4 + 0.5/2 = 0.375
    free = policy_probabilities(logits[:, :2], None, 0.5)
    torch.testing.assert_close(free, torch.tensor([[0.375, 0.625]]))


def test_masked_actions_give_a_finite_gradient() -> None:
    logits = torch.tensor([[0.3, 1e4, -2.0], [0.0, 0.0, 0.0]], requires_grad=True)
    pi = policy_probabilities(logits, torch.tensor([[1, 0, 1], [0, 1, 0]]), 0.0)
    entropy = -(pi * pi.clamp_min(1e-12).log()).sum()
    (pi[0, 0].log() + pi[1, 1].log() + entropy).backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert logits.grad[0, 1] == 0  # the illegal one
    assert logits.grad[0, 0] != 0


def test_clipped_surrogate_by_hand() -> None:
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.1])
    advantage = torch.tensor([2.0, -2.0, 2.0, -2.0, 3.0])
    # min(1.5*2, 1.2*2)=2.4; min(-3, -2.4)=-3; min(1, 1.6)=1; min(-1, -1.6)=-1.6; 3.3
    got = clipped_surrogate(ratio.log(), advantage, 0.2)
    torch.testing.assert_close(got, torch.tensor([2.4, -3.0, 1.0, -1.6, 3.3]))


# ---------------------------------------------------------------- an update, written plainly


def plain_targets(coma: Coma, spec: EnvSpec, batch: Batch, final_action: Tensor) -> Tensor:
    """Lambda-returns with one batch-1 forward of the target critic for every row."""
    inputs = CriticInputs(spec, InputOptions(agent_id=True))
    action = batch.arrays["action"].long().clone()
    action[-1] = final_action
    length, n, a = action.shape
    value = torch.zeros(length - 1, n, a)
    with torch.no_grad():
        for t in range(1, length):
            for env in range(n):
                one = {k: v[t, env : env + 1] for k, v in batch.observation().items()}
                x = inputs(one, action[t, env : env + 1])
                for agent in range(a):
                    q = coma.target(x.image, x.vector)[0, agent]
                    value[t - 1, env, agent] = q[action[t, env, agent]]
    step = transitions(batch)
    c = coma._config
    return lambda_returns(
        step.reward, step.discount, value, step.next_is_last, c.gamma, c.td_lambda
    )


def final_actions(coma: Coma, batch: Batch, generator: torch.Generator) -> Tensor:
    """What the policy would do in the unroll's last row."""
    observation = {k: v[-1] for k, v in batch.observation().items()}
    x = coma._actor_inputs(observation)
    with torch.no_grad():
        logits = coma.actor(x.image, x.vector).flatten(0, 1)
    mask = observation.get(ACTION_MASK)
    pi = policy_probabilities(logits, None if mask is None else mask.flatten(0, 1), coma._epsilon)
    n, a = batch.arrays["action"].shape[1:]
    return sample(pi, generator).view(n, a)


def test_batched_targets_equal_one_forward_at_a_time() -> None:
    spec = vector_spec(num_agents=3, masked=True)
    coma, batch = make_coma(spec), random_batch(spec, 9, 4)
    twin = copy.deepcopy(coma._generator.get_state())
    rows = coma._rows(batch)
    expected = plain_targets(
        coma, spec, batch, final_actions(coma, batch, torch.Generator().set_state(twin))
    )
    valid = (batch.arrays["step_type"][:-1] != LAST).unsqueeze(-1).expand_as(expected)
    torch.testing.assert_close(
        rows.columns["target"].view_as(expected)[valid], expected[valid], rtol=1e-5, atol=1e-6
    )
    assert rows.weight.flatten().tolist() == valid.flatten().tolist()


@pytest.mark.parametrize("recurrent", [0, 4])
def test_a_closed_unroll_ends_with_an_action_of_the_policy(recurrent: int) -> None:
    spec = vector_spec(masked=True)
    network = {"name": "mlp", "hidden": (8,), "recurrent": recurrent}
    coma = make_coma(
        spec, network=network, unroll_steps=4, batch_size=16, gamma=0.5, batch_number=1
    )
    with torch.no_grad():
        for p in coma.target.parameters():
            p.zero_()
        p.copy_(torch.tensor([0.0, 10.0, -1000.0]))  # the last bias: values of the three actions
    storage = coma.make_storage(spec, None)
    unroll = storage.begin(1, 0, 0)
    unroll.arrays["action"][:] = 2  # of an unroll that is done with: the next one reuses it
    storage.release(unroll)
    assert storage.begin(1, 0, 1) is unroll
    unroll.arrays["step_type"][:3] = 1
    unroll.arrays["discount"][:3] = 1
    unroll.arrays["reward"][2] = 3
    unroll.arrays[OBSERVATION + ACTION_MASK][:2] = 1
    unroll.arrays["action"][:2] = 0
    unroll.arrays[OBSERVATION + ACTION_MASK][2] = torch.tensor([0, 1, 0])
    unroll.cursor = 3  # the third row came, and its session ended before it was acted on
    storage.add_open(unroll)
    full = storage.begin(1, 1, 2)  # another one, which has all four steps
    full.cursor = 5
    storage.add(full)
    both = storage.sample(0, 0)
    assert both is not None
    batch = Batch({k: v[:, :1] for k, v in both.arrays.items()}, [0])
    rows = coma._rows(batch)
    taken = rows.columns["action"].view(5, 1, 2)  # with the last row
    assert taken[:3, 0].tolist() == [[0, 0], [0, 0], [1, 1]]
    assert rows.weight.flatten().tolist() == [1, 1, 1, 1, 0, 0, 0, 0]
    # 3 + 0.5 * 10
    torch.testing.assert_close(rows.columns["target"].flatten()[2:4], torch.tensor([8.0, 8.0]))
    observation = {k: v[2] for k, v in batch.observation().items()}
    seen = coma._critic_inputs(observation, taken[2]).vector
    assert rows.critic.vector is not None
    assert seen is not None
    torch.testing.assert_close(rows.critic.vector.view(-1, *seen.shape[1:])[2:3], seen)


# Adam divides a gradient by its size: where it is 0 but for rounding, only this keeps it small.
_EPS = 1e-6


def plain_update(coma: Coma, spec: EnvSpec, batch: Batch, generator: torch.Generator) -> None:
    """The whole update with loops over rows; draws from the same generator in the same order."""
    c = coma._config
    final = final_actions(coma, batch, generator)
    target = plain_targets(coma, spec, batch, final)
    action = batch.arrays["action"].long().clone()
    action[-1] = final
    length, n, a = action.shape
    # Agents with networks of their own are taken together, row by row.
    together, slices = (1, 1) if c.share_parameters is True else (a, a)
    agent_rows = []
    for t in range(length - 1):
        for env in range(n):
            one = {k: v[t, env : env + 1] for k, v in batch.observation().items()}
            actor, critic = coma._actor_inputs(one), coma._critic_inputs(one, action[t, env][None])
            alive = one[AGENT_MASK][0].tolist() if AGENT_MASK in one else [1] * a
            for i in range(a):
                if batch.arrays["step_type"][t, env] != LAST and (
                    alive[i] if together == 1 else any(alive)
                ):
                    legal = (
                        one[ACTION_MASK][0, i] if ACTION_MASK in one else torch.ones(q_size(spec))
                    )
                    agent_rows.append(
                        (
                            i,
                            actor,
                            critic,
                            int(action[t, env, i]),
                            legal,
                            float(target[t, env, i]),
                            alive[i],
                        )
                    )
    actor_adam = torch.optim.Adam(coma.actor.parameters(), c.actor_lr, eps=_EPS)
    critic_adam = torch.optim.Adam(coma.critic.parameters(), c.critic_lr, eps=_EPS)
    epsilon = float(coma._epsilon)

    def behaviour(logits: Tensor, legal: Tensor) -> Tensor:
        weights = [math.exp(1) ** x if m else 0 * x for x, m in zip(logits, legal, strict=True)]
        total = sum(weights)
        return torch.stack(
            [
                (1 - epsilon) * w / total + epsilon * m / legal.sum()
                for w, m in zip(weights, legal.float(), strict=True)
            ]
        )

    with torch.no_grad():
        before = [
            behaviour(coma.actor(x.image, x.vector)[0, i], legal)[u].log()
            for i, x, _, u, legal, *_ in agent_rows
        ]
    for _ in range(c.data_passes):
        order = torch.randperm(len(agent_rows) // together, generator=generator)
        minibatches = [
            (order[k :: c.batch_number].unsqueeze(1) * together + torch.arange(together)).flatten()
            for k in range(c.batch_number)
        ]
        for part in minibatches:
            errors: dict[int, list[Tensor]] = {}  # of each parameter group
            for r in part.tolist():
                i, _, x, u, _, goal, alive = agent_rows[r]
                if not alive:
                    continue
                error = (coma.critic(x.image, x.vector)[0, i, u] - goal) ** 2
                errors.setdefault(i % slices, []).append(error)
            critic_adam.zero_grad()
            sum(sum(e) / len(e) for e in errors.values()).backward()
            plain_clip(coma.critic, c.max_grad_norm, slices)
            critic_adam.step()
        for part in minibatches:
            acted: dict[int, list[tuple[float, Tensor, Tensor, Tensor]]] = {}
            for r in part.tolist():
                i, x, y, u, legal, goal, alive = agent_rows[r]
                if not alive:
                    continue
                with torch.no_grad():
                    q = coma.critic(y.image, y.vector)[0, i]
                pi = behaviour(coma.actor(x.image, x.vector)[0, i], legal)
                baseline = sum(p * float(v) for p, v in zip(pi.tolist(), q, strict=True))
                entropy = -sum(p * p.log() for p in pi if p > 0)
                worth = goal if c.advantage == "return" else float(q[u])
                row = worth - baseline, pi[u].log(), before[r], entropy
                acted.setdefault(i % slices, []).append(row)
            loss = torch.zeros(())
            for mine in acted.values():
                scale = np.std([advantage for advantage, *_ in mine]) + 1e-6
                for advantage, log_pi, log_old, entropy in mine:
                    gain = advantage / scale if c.normalize_advantage else advantage
                    ratio = (log_pi - log_old).exp()
                    if not c.clip_ratio:
                        term = gain * log_pi
                    elif gain > 0:
                        term = gain * (ratio if ratio < 1 + c.clip_ratio else 1 + c.clip_ratio)
                    else:
                        term = gain * (ratio if ratio > 1 - c.clip_ratio else 1 - c.clip_ratio)
                    loss = loss - (term + 0.75 * c.entropy_weight * entropy) / len(mine)
            actor_adam.zero_grad()
            loss.backward()
            plain_clip(coma.actor, c.max_grad_norm, slices)
            actor_adam.step()


def plain_clip(network: torch.nn.Module, max_norm: float, num_slices: int) -> None:
    grads = [p.grad for p in network.parameters() if p.grad is not None]
    for s in range(num_slices):
        mine = [g.view(num_slices, -1)[s] for g in grads]
        norm = math.sqrt(sum(float(g.square().sum()) for g in mine))
        for g in mine:
            g *= min(1.0, max_norm / (norm + 1e-6))  # as torch's clip_grad_norm_


def q_size(spec: EnvSpec) -> int:
    return spec.action.num_actions  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "more",
    [
        {},
        {
            "advantage": "critic",
            "clip_ratio": 0.02,
            "normalize_advantage": True,
            "actor_lr": 3e-3,
        },
        {"advantage": "critic"},
    ],
    ids=["plain", "clipped", "critic"],
)
@pytest.mark.parametrize("share", [True, False], ids=["shared", "own"])
@pytest.mark.parametrize(
    ("masked", "mortal"),
    [(False, False), (True, False), (True, True)],
    ids=["free", "masked", "dead"],
)
def test_an_update_equals_a_plain_one(
    masked: bool, mortal: bool, share: bool, more: dict[str, Any]
) -> None:
    spec = vector_spec(masked=masked)
    if mortal:
        mask = ArraySpec(AGENT_MASK, "uint8", ())
        spec = replace(spec, observations=(*spec.observations, mask))
    options: dict[str, Any] = {
        "share_parameters": share,
        "batch_size": 8,
        "batch_number": 3,
        "data_passes": 2,
        "actor_lr": 1e-3,
        "critic_lr": 1e-2,
        "entropy_weight": 0.01,
        "anneal_updates": 4,
        "max_grad_norm": 0.5,
        "target_every_updates": 100,
        **more,
    }
    fast, plain = make_coma(spec, **options), make_coma(spec, **options)
    for coma in (fast, plain):
        coma._counts["updates"] = 1  # of 4: a quarter of the entropy's weight has gone
    for optimizer in (fast._actor_optimizer, fast._critic_optimizer):
        optimizer.param_groups[0]["eps"] = _EPS
    batch = random_batch(spec, 7, 3)
    if mortal:
        alive = torch.rand(8, 3, 2, generator=torch.Generator().manual_seed(4)) < 0.7
        batch.arrays[OBSERVATION + AGENT_MASK] = alive.to(torch.uint8)
    before = parameters(fast)
    fast.update(clone(batch))
    plain_update(plain, spec, batch, torch.Generator().set_state(plain._generator.get_state()))
    # Larger advantages cancel in some gradients, whose rounding Adam enlarges.
    near = 2e-4 if fast._config.advantage == "return" else 1e-6
    for a, b in zip(parameters(fast), parameters(plain), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=near)
    assert any((a - b).abs().max() > 1e-3 for a, b in zip(before, parameters(fast), strict=True))


def test_data_passes_and_batch_number_count_optimizer_steps() -> None:
    spec = vector_spec()
    coma = make_coma(spec, batch_size=5, batch_number=4, data_passes=3)
    coma.update(random_batch(spec, 7, 3))
    steps = {float(s["step"]) for s in coma._actor_optimizer.state.values()}
    steps |= {float(s["step"]) for s in coma._critic_optimizer.state.values()}
    assert steps == {12.0}
    assert coma.rows_per_update == 20


def test_a_hard_target_is_copied_after_so_many_updates() -> None:
    spec = vector_spec()
    coma = make_coma(spec, target_every_updates=3, critic_lr=1e-2)
    start = [p.clone() for p in coma.target.parameters()]
    for update in range(1, 7):
        coma.update(random_batch(spec, 5, 2, seed=update))
        critic = list(coma.critic.parameters())
        copied = all(
            torch.equal(a, b) for a, b in zip(coma.target.parameters(), critic, strict=True)
        )
        assert copied == (update % 3 == 0)
        if update < 3:
            assert all(
                torch.equal(a, b) for a, b in zip(coma.target.parameters(), start, strict=True)
            )


def test_a_soft_target_moves_by_tau_with_every_update() -> None:
    spec = vector_spec()
    coma = make_coma(spec, target_update="soft", target_tau=0.1, critic_lr=1e-2)
    old = [p.clone() for p in coma.target.parameters()]
    coma.update(random_batch(spec, 5, 2))
    for was, now, online in zip(
        old, coma.target.parameters(), coma.critic.parameters(), strict=True
    ):
        torch.testing.assert_close(now, 0.9 * was + 0.1 * online.detach())


def test_epsilon_falls_with_the_environment_steps_learned_from() -> None:
    spec = vector_spec()
    coma = make_coma(spec, epsilon_start=0.5, epsilon_end=0.1, epsilon_env_steps=40)
    batch = random_batch(spec, 8, 2)
    steps = int((batch.arrays["step_type"][:-1] != LAST).sum())
    assert 0 < steps < 16  # LAST rows are no steps
    for update in range(5):
        scalars = coma.update(clone(batch))
        expected = 0.5 - 0.4 * min(1.0, update * steps / 40)
        assert float(scalars["epsilon"]) == pytest.approx(expected)
    assert float(scalars["epsilon"]) == pytest.approx(0.1)
    policy = coma.make_policy()
    coma.update(clone(batch))
    coma.publish(policy)
    assert float(policy.exploration) == pytest.approx(0.1)


def test_learning_rates_and_entropy_weight_anneal() -> None:
    spec = vector_spec()
    coma = make_coma(spec, actor_lr=1e-3, critic_lr=2e-3, final_lr_fraction=0.2, anneal_updates=4)
    seen = []
    for update in range(6):
        coma.update(random_batch(spec, 5, 2, seed=update))
        seen.append(coma._actor_optimizer.param_groups[0]["lr"])
    assert seen == pytest.approx([1e-3, 0.8e-3, 0.6e-3, 0.4e-3, 0.2e-3, 0.2e-3])
    assert coma._critic_optimizer.param_groups[0]["lr"] == pytest.approx(0.4e-3)
    assert float(coma._schedule.entropy_weight) == 0


def test_entropy_is_reported_in_nats_and_its_weight_raises_it() -> None:
    spec = vector_spec()
    none = make_coma(spec, actor_lr=1e-2, epsilon_start=0.0)
    much = make_coma(spec, actor_lr=1e-2, epsilon_start=0.0, entropy_weight=10.0)
    batch = random_batch(spec, 9, 4)
    for _ in range(15):
        plain, raised = none.update(clone(batch)), much.update(clone(batch))
    assert float(raised["entropy"]) == pytest.approx(math.log(3), abs=0.01)
    assert float(plain["entropy"]) < float(raised["entropy"]) - 0.02


def test_masks_bind_both_greedy_and_sampled_actions() -> None:
    spec = vector_spec(masked=True)
    coma = make_coma(spec, epsilon_start=1.0)
    policy = coma.make_policy()
    observation = {k: v.flatten(0, 1) for k, v in random_batch(spec, 40, 50).observation().items()}
    mask = observation[ACTION_MASK]
    for generator in (None, torch.Generator().manual_seed(1)):
        action = policy.act(observation, generator)["action"]
        assert action.dtype == torch.int32
        assert action.shape == (41 * 50, 2)
        assert mask.gather(-1, action.long().unsqueeze(-1)).all()
    greedy = policy.act(observation, None)["action"]
    assert torch.equal(greedy, policy.act(observation, None)["action"])


def test_a_policy_does_not_change_until_it_is_published_to() -> None:
    spec = vector_spec()
    coma = make_coma(spec, actor_lr=0.1)
    policy = coma.make_policy()
    before = [p.clone() for p in policy.actor.parameters()]
    coma.update(random_batch(spec, 5, 2))
    assert all(torch.equal(a, b) for a, b in zip(before, policy.actor.parameters(), strict=True))
    coma.publish(policy)
    for a, b in zip(policy.actor.parameters(), coma.actor.parameters(), strict=True):
        assert torch.equal(a, b)


def test_dead_agents_teach_nothing() -> None:
    spec = vector_spec()
    alive_spec = EnvSpec(
        spec.name,
        2,
        (*spec.observations, ArraySpec(AGENT_MASK, "uint8", ())),
        spec.action,
        spec.metrics,
        4,
    )
    batch = random_batch(alive_spec, 6, 2)
    alive = torch.ones(7, 2, 2, dtype=torch.uint8)
    alive[3, 1, 0] = 0
    batch.arrays[OBSERVATION + AGENT_MASK] = alive
    batch.arrays["step_type"][:] = 1
    batch.arrays["discount"][:] = 1
    batch.arrays["reward"][3, 1] = torch.tensor([7.0, 7.0])
    coma = make_coma(alive_spec)
    rows = coma._rows(batch)
    dead = (3 * 2 + 1) * 2 + 0
    assert (rows.weight.flatten() == 0).nonzero().flatten().tolist() == [dead]
    # The step into death brings its reward, and nothing comes after; for the other agent it does.
    before = (2 * 2 + 1) * 2
    target = rows.columns["target"].flatten()
    assert target[before] == 7 != target[before + 1]
    coma = make_coma(alive_spec)
    coma.update(batch)
    assert coma.state_dict()["parts"]["exploration"]["env_steps"] == 12


def test_bf16_stays_near_fp32() -> None:
    spec = vector_spec()
    options: dict[str, Any] = {"data_passes": 1, "critic_lr": 1e-3, "actor_lr": 1e-3}
    exact, half = make_coma(spec, **options), make_coma(spec, precision="bf16", **options)
    batch = random_batch(spec, 9, 4)
    a, b = exact.update(clone(batch)), half.update(clone(batch))
    # bf16 keeps 8 bits: 1 part in 256 of each number that goes through a layer
    for name in ("critic_loss", "entropy", "target_mean", "advantage_std"):
        assert float(b[name]) == pytest.approx(float(a[name]), rel=0.05, abs=0.02), name
    for x, y in zip(parameters(exact), parameters(half), strict=True):
        assert x.dtype == y.dtype == torch.float32
        # Adam moves every weight by at most the learning rate in each of 5 steps
        torch.testing.assert_close(x, y, rtol=0, atol=2 * 5 * 1e-3)


def test_fp16_overflow_lowers_the_scale_and_is_no_reason_to_stop() -> None:
    spec = vector_spec()
    coma = make_coma(spec, precision="fp16", max_grad_norm=0.5)
    coma._precision.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    scalars = coma.update(random_batch(spec, 9, 4))
    assert all(v.isfinite() for v in scalars.values()), scalars
    assert coma._precision.scaler.get_scale() < 2.0**40
    assert all(p.isfinite().all() for p in parameters(coma))


def test_a_resumed_run_makes_the_same_next_update_to_the_bit() -> None:
    spec = vector_spec(masked=True)
    coma = make_coma(spec, critic_lr=1e-3, target_every_updates=2, clip_ratio=0.2)
    for i in range(3):
        coma.update(random_batch(spec, 6, 3, seed=i))
    state = copy.deepcopy(coma.state_dict())
    other = make_coma(spec, seed=99, critic_lr=1e-3, target_every_updates=2, clip_ratio=0.2)
    other.load_state_dict(state)
    for i in (3, 4):
        a = coma.update(random_batch(spec, 6, 3, seed=i))
        b = other.update(random_batch(spec, 6, 3, seed=i))
        assert {k: float(v) for k, v in a.items()} == {k: float(v) for k, v in b.items()}
    assert all(torch.equal(x, y) for x, y in zip(parameters(coma), parameters(other), strict=True))


def test_seed_decides_weights_without_the_global_generator() -> None:
    spec = vector_spec()
    torch.manual_seed(5)
    state = torch.get_rng_state()
    a, b, c = (parameters(make_coma(spec, seed=s)) for s in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert not all(torch.equal(x, y) for x, y in zip(a, c, strict=True))


def test_continuous_actions_are_refused() -> None:
    spec = EnvSpec("push", 1, (ArraySpec("x", "float32", (1,)),), Continuous(2))
    with pytest.raises(SpecError, match=r"needs discrete actions; 'push'.*; use mappo,"):
        make_coma(spec)


def test_an_unknown_option_is_refused_with_a_hint() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.data_pases.*did you mean 'data_passes'"):
        build_algorithm(
            PluginConfig(name="coma", data_pases=3),
            vector_spec(),
            PluginConfig(name="auto"),
            Precision("fp32", CPU),
            CPU,
            0,
        )


# ---------------------------------------------------------------- learning


def play_and_learn(coma: Coma, game: MatrixGame, updates: int) -> tuple[list[float], list[float]]:
    """Fill unrolls from the game without a network between; returns returns and critic losses."""
    storage = RolloutStorage(game.spec, coma.unroll_length, coma.rows_per_update, None, CPU)
    policy, generator = coma.make_policy(), torch.Generator().manual_seed(0)
    seeds = np.zeros(game.num_envs, np.uint64)
    timestep = game.reset(seeds)
    unroll = storage.begin(game.num_envs, 0, 0)
    returns: list[float] = []
    losses: list[float] = []
    while len(losses) < updates:
        observation = {k: torch.from_numpy(v) for k, v in timestep.observation.items()}
        action = policy.act(observation, generator)["action"]
        rows = {
            "step_type": timestep.step_type,
            "reward": timestep.reward,
            "discount": timestep.discount,
            OBSERVATION + "one": timestep.observation["one"],
        }
        for again in range(2):
            for name, x in rows.items():
                unroll.arrays[name][unroll.cursor] = torch.from_numpy(x)
            unroll.arrays["action"][unroll.cursor] = action
            unroll.cursor += 1
            if not unroll.full:
                break
            assert again == 0
            storage.add(unroll)
            while storage.ready:
                batch = storage.sample(0, 0)
                assert batch is not None
                losses.append(float(coma.update(batch)["critic_loss"]))
                storage.done(batch)
            coma.publish(policy)
            unroll = storage.begin(game.num_envs, 0, 0)
        last = timestep.step_type == StepType.LAST
        returns += timestep.metrics["return"][last].tolist()
        timestep = game.step(action.numpy(), last, seeds)
    return returns, losses


def test_learns_the_penalty_game_to_its_optimum() -> None:
    game = MatrixGame(MatrixGame.PENALTY_ZERO, num_envs=16, rounds=25)
    coma = make_coma(
        game.spec,
        network={"name": "mlp", "hidden": (32,)},
        batch_size=200,
        batch_number=4,
        data_passes=2,
        actor_lr=3e-3,
        critic_lr=1e-2,
        epsilon_start=0.3,
        epsilon_end=0.01,
        epsilon_env_steps=20_000,
    )
    returns, losses = play_and_learn(coma, game, updates=90)
    assert np.mean(returns[:16]) < 100  # random play: 61
    policy = coma.make_policy()
    joint = policy.act({"one": torch.ones(1, 2, 1)}, None)["action"][0].tolist()
    assert joint in ([0, 2], [2, 0])  # payoff 10 a round, 250 an episode
    assert np.mean(returns[-32:]) > 235
    assert np.isfinite(losses).all()


def test_the_critic_fits_a_batch_it_sees_again_and_again() -> None:
    spec = vector_spec()
    coma = make_coma(spec, network={"name": "mlp", "hidden": (64,)}, gamma=0.0, critic_lr=1e-2)
    batch = random_batch(spec, 9, 4)
    scalars = [coma.update(clone(batch)) for _ in range(30)]
    assert float(scalars[-1]["critic_loss"]) < 0.2 * float(scalars[0]["critic_loss"])
    assert float(scalars[-1]["explained_variance"]) > 0.8


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_an_update_on_cuda_equals_one_on_the_cpu() -> None:
    spec = vector_spec()
    device = torch.device("cuda")
    options: dict[str, Any] = {"data_passes": 1, "batch_number": 1, "critic_lr": 1e-3}
    cpu, cuda = make_coma(spec, **options), make_coma(spec, device=device, **options)
    half = make_coma(spec, device=device, precision="bf16", **options)
    # One minibatch, so that the generators, which differ, do not matter but for the last row.
    batch = random_batch(spec, 9, 4)
    batch.arrays["discount"][-1] = 0
    there = Batch({k: v.to(device) for k, v in batch.arrays.items()}, batch.version)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        a, b = cpu.update(clone(batch)), cuda.update(clone(there))
        c = half.update(there)
    finally:
        torch.set_float32_matmul_precision(precision)
    for name in ("critic_loss", "actor_loss", "entropy", "target_mean", "critic_grad_norm"):
        assert float(b[name]) == pytest.approx(float(a[name]), rel=1e-4, abs=1e-4), name
        assert float(c[name]) == pytest.approx(float(a[name]), rel=0.1, abs=0.05), name
    # Adam's first step is as long as the learning rate whatever the gradient: where that is nearly
    # 0, rounding decides on its sign.
    for x, y in zip(parameters(cpu), parameters(cuda), strict=True):
        assert ((x - y).abs() > 1e-4).float().mean() < 0.02


# Errors of the critic in units of their deviation.
_ENLARGED = {"normalize_advantage": True}


@pytest.mark.parametrize(("options", "undecided"), [({}, True), (_ENLARGED, False)])
def test_a_policy_stays_undecided_until_a_reward_is_found(
    options: dict[str, Any], undecided: bool
) -> None:
    spec = vector_spec()
    coma = make_coma(spec, network={"name": "mlp"}, batch_size=32, **options)
    for seed in range(20):
        batch = random_batch(spec, 16, 8, seed)
        batch.arrays["reward"].zero_()
        entropy = float(coma.update(batch)["entropy"])
    assert (entropy > 0.9 * math.log(3)) == undecided

"""QMIX, VDN and IQL: by hand, against plain loops, resume, and games with known answers."""

import copy
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from murmur.env_service.envs.matrix import Config as MatrixConfig
from murmur.env_service.envs.matrix import MatrixGame
from murmur.learner_service.algorithms.maddpg import Maddpg
from murmur.learner_service.algorithms.qmix import Config, Mixer, Qmix
from murmur.learner_service.device.precision import Precision
from murmur.learner_service.layers.inputs import StateInputs
from murmur.learner_service.learning.base import build_algorithm
from murmur.learner_service.storage.replay import ReplayBatch
from murmur.learner_service.storage.storage import observed
from murmur.shared.config import PluginConfig
from murmur.shared.process.errors import SpecError
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
from tests.learner_service.toys import (
    CPU,
    map_spec,
    play_and_learn,
    random_transitions,
    rows_of,
    step_plainly,
    vector_spec,
)

MIXERS = ("qmix", "vdn", "none")
MASKS = (ACTION_MASK, AGENT_MASK)


def make(spec: EnvSpec, seed: int = 3, precision: str = "fp32", **options: Any) -> Qmix:
    network = PluginConfig(name="mlp", hidden=(8,), agent_id=False)
    return Qmix(Config(**options), spec, network, Precision(precision, CPU), CPU, seed)


def mortal_spec() -> EnvSpec:
    """Masked actions, agents that die, and a global state."""
    more = (ArraySpec(AGENT_MASK, "uint8", ()), ArraySpec(STATE, "float32", (5,), per_agent=False))
    spec = vector_spec(masked=True)
    return replace(spec, observations=spec.observations + more)


# ---------------------------------------------------------------- the mixer


def test_mixer_by_hand() -> None:
    mixer = Mixer(num_agents=2, state_size=1, hidden=2)
    with torch.no_grad():
        for p in mixer.parameters():
            p.zero_()
        # |.| of state 1: 2 and 3 for the one hidden unit, half of that for the other.
        mixer.first_weight.weight[:, 0] = torch.tensor([2.0, -1.0, -3.0, 1.5])
        mixer.first_bias.bias.copy_(torch.tensor([1.0, 0.5]))
        mixer.second_weight.bias.copy_(torch.tensor([-0.5, 2.0]))
        mixer.second_bias[2].bias.fill_(4.0)  # type: ignore[union-attr, operator]
    q, state = torch.tensor([[1.0, 2.0], [-1.0, -2.0]]), torch.ones(2, 1)
    # 2*1 + 3*2 + 1 = 9: elu is 9; 4.5: -elu(-4.5) = 1 - e^-4.5 = 0.988891.
    # -2 - 6 + 1 = -7: elu is e^-7 - 1 = -0.999088; -1 - 3 + 0.5 = -3.5 stays.
    expected = [[9 * 0.5 + 0.988891 * 2 + 4], [-0.999088 * 0.5 - 3.5 * 2 + 4]]
    torch.testing.assert_close(mixer(q, state), torch.tensor(expected))


def test_a_mixer_of_one_unit_is_bounded_below() -> None:
    mixer = Mixer(num_agents=1, state_size=1, hidden=1)
    with torch.no_grad():
        for p in mixer.parameters():
            p.zero_()
        mixer.first_weight.bias.fill_(1.0)
        mixer.second_weight.bias.fill_(1.0)
    q = torch.tensor([[2.0], [-2.0]])  # elu: 2, e^-2 - 1
    torch.testing.assert_close(mixer(q, torch.ones(2, 1)), torch.tensor([[2.0], [-0.864665]]))


def test_the_mixer_listens_to_costs_as_to_rewards() -> None:
    mixer, state = Mixer(num_agents=3, state_size=6, hidden=32), torch.randn(100, 6)
    for value in (-30.0, -10.0, 10.0, 30.0):
        q = torch.full((100, 3), value, requires_grad=True)
        (gradient,) = torch.autograd.grad(mixer(q, state).sum(), q)
        assert 0.4 < float(gradient.mean()) < 1.1  # the sum's is 1


def test_mixer_never_falls_with_an_agents_value() -> None:
    mixer = Mixer(num_agents=3, state_size=6, hidden=32)
    q = (torch.randn(500, 3) * 5).requires_grad_(True)
    (gradient,) = torch.autograd.grad(mixer(q, torch.randn(500, 6) * 3).sum(), q)
    assert gradient.min() >= 0
    assert gradient.mean() > 0.1  # it does listen


def test_mixer_starts_close_to_the_sum_of_the_values() -> None:
    mixer = Mixer(num_agents=3, state_size=12, hidden=32)
    state = torch.rand(500, 12) * 3  # of cells, say
    q = torch.randn(500, 3)
    with torch.no_grad():
        joint, nothing = mixer(q, state), mixer(torch.zeros(500, 3), state)
    total = q.sum(1, keepdim=True)
    assert (joint - nothing - total).abs().mean() < 0.15 * total.abs().mean()  # found: 0.08
    assert nothing.abs().mean() < 0.2  # found: 0.08; with first biases of any size 0.6


def test_mixer_state_is_the_environments_or_all_observations() -> None:
    view = ArraySpec("view", "float32", (2,))
    maps = ArraySpec("maps", "uint8", (1, 2, 2))
    mask = ArraySpec(AGENT_MASK, "uint8", ())
    state = ArraySpec(STATE, "float32", (3,), per_agent=False)
    observation = {
        "view": torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]),
        "maps": torch.full((1, 2, 1, 2, 2), 255, dtype=torch.uint8),
        AGENT_MASK: torch.ones(1, 2, dtype=torch.uint8),
        STATE: torch.tensor([[7.0, 8.0, 9.0]]),
    }
    with_state = StateInputs(EnvSpec("toy", 2, (view, maps, mask, state), Discrete(2)))
    assert with_state.size == 3
    assert with_state(observation).tolist() == [[7, 8, 9]]
    without = StateInputs(EnvSpec("toy", 2, (view, maps, mask), Discrete(2)))
    assert without.size == 2 * 2 + 2 * 4
    assert without(observation).tolist() == [[1, 2, 3, 4, *[1] * 8]]


# ---------------------------------------------------------------- targets


def constant(values: nn.Module, last_bias: list[float]) -> None:
    """Make a Q network give these values whatever it sees."""
    with torch.no_grad():
        parameters = list(values.parameters())
        for p in parameters:
            p.zero_()
        parameters[-1].view(-1)[:] = torch.tensor(last_bias)


def two_rows(next_mask: list[list[int]], next_alive: list[int]) -> ReplayBatch:
    """Rewards 1 and 2 of two agents; the first row continues with discount 0.5, the second ends."""
    spec = mortal_spec()
    batch = random_transitions(spec, 2)
    batch.reward = torch.tensor([[1.0, 2.0], [1.0, 2.0]])
    batch.discount = torch.tensor([[0.5], [0.0]])
    batch.next_arrays[OBSERVATION + ACTION_MASK] = torch.tensor([next_mask] * 2, dtype=torch.uint8)
    batch.next_arrays[OBSERVATION + AGENT_MASK] = torch.tensor([next_alive] * 2, dtype=torch.uint8)
    return batch


def target_of(qmix: Qmix, batch: ReplayBatch) -> tuple[Tensor, Tensor]:
    """The targets of a batch, and the share of values beyond what rewards allow."""
    rows = rows_of(batch)
    _, *following = qmix._ends(rows, None)
    return qmix._target(rows, *following)


def test_double_q_targets_by_hand() -> None:
    every = [[1, 1, 1], [1, 1, 1]]

    def target(mixer: str, double_q: bool, batch: ReplayBatch) -> list[list[float]]:
        qmix = make(mortal_spec(), mixer=mixer, double_q=double_q)
        constant(qmix.values.agents, [0.0, 9.0, 5.0])  # picks action 1, then 2
        constant(qmix.target.agents, [7.0, 4.0, 6.0])
        found: list[list[float]] = target_of(qmix, batch)[0].tolist()
        return found

    # VDN: team reward 3; both agents' action 1 is worth 4 to the target: 3 + 0.5 * 8 = 7.
    assert target("vdn", True, two_rows(every, [1, 1])) == [[7.0], [3.0]]
    # The target's own best is 7 each: 3 + 0.5 * 14 = 10.
    assert target("vdn", False, two_rows(every, [1, 1])) == [[10.0], [3.0]]
    # The second agent may not play 1, so plays 2: 3 + 0.5 * (4 + 6) = 8.
    assert target("vdn", True, two_rows([[1, 1, 1], [1, 0, 1]], [1, 1])) == [[8.0], [3.0]]
    # The second agent will be dead: 3 + 0.5 * 4 = 5.
    assert target("vdn", True, two_rows(every, [1, 0])) == [[5.0], [3.0]]
    # IQL: each its own reward, 1 + 0.5 * 4 and 2; the dead one has nothing to come.
    assert target("none", True, two_rows(every, [1, 0])) == [[3.0, 2.0], [1.0, 2.0]]


def test_targets_promise_no_more_than_the_rewards_seen_allow() -> None:
    every = [[1, 1, 1], [1, 1, 1]]
    qmix = make(mortal_spec(), mixer="vdn", gamma=0.5)
    beyond: list[float] = []

    def target(value: float, reward: float) -> list[list[float]]:
        batch = two_rows(every, [1, 1])
        batch.reward = torch.full((2, 2), reward / 2)
        for values in (qmix.values, qmix.target):
            constant(values.agents, [value / 2] * 3)
        targets, clipped = target_of(qmix, batch)
        beyond.append(float(clipped))
        found: list[list[float]] = targets.tolist()
        return found

    # Of -3 a step no more is lost than 3 + 3 / 2 + 3 / 4 ... = 6, and nothing is won.
    assert target(-5.0, -3.0) == [[-3 + 0.5 * -5], [-3.0]]
    assert target(-100.0, -3.0) == [[-3 + 0.5 * -6], [-3.0]]
    assert beyond == [0, 1]
    assert target(100.0, -3.0) == [[-3.0], [-3.0]]
    # A reward of 4 was seen once: up to 8; and losses of 6 stay possible.
    assert target(100.0, 4.0) == [[4 + 0.5 * 8], [4.0]]
    assert target(100.0, 1.0) == [[1 + 0.5 * 8], [1.0]]
    assert target(-100.0, 1.0) == [[1 + 0.5 * -6], [1.0]]
    # What follows three steps is bounded by three steps' rewards: 7 / (1 - 0.5^3) = 8.
    three = make(mortal_spec(), mixer="vdn", gamma=0.5, replay={"n_step": 3})
    three._allowed(torch.zeros(1, 1), torch.tensor([[7.0]]))
    nothing = torch.tensor([[0.0]])
    assert three._allowed(torch.tensor([[9.0]]), nothing)[0].tolist() == [[8.0]]
    without_end = make(mortal_spec(), mixer="vdn", gamma=1.0)
    assert without_end._allowed(torch.tensor([[9.0]]), nothing)[0].tolist() == [[9.0]]


@pytest.mark.parametrize("mixer", MIXERS)
def test_only_who_mixes_learns_of_rewards_after_an_agents_death(mixer: str) -> None:
    replay = {"capacity_rows": 4, "start_rows": 4, "batch_size": 1, "unroll_steps": 4, "n_step": 4}
    qmix = make(mortal_spec(), mixer=mixer, gamma=0.5, replay=replay)
    constant(qmix.target.agents, [2.0, 2.0, 2.0])
    storage = qmix.make_storage(mortal_spec(), None)
    unroll = storage.begin(1, 0, 0)
    for name in ("step_type", "discount", "reward", *(OBSERVATION + m for m in MASKS)):
        unroll.arrays[name][:] = 1
    unroll.arrays[OBSERVATION + AGENT_MASK][1:4, 0, 1] = 0  # agent 1 dies at once and comes back
    unroll.cursor = 5
    storage.add(unroll)
    storage._tree.set_range(1, torch.zeros(3))  # row 0 alone is drawn
    batch = storage.sample(0, 0.0)
    assert batch is not None
    target = target_of(qmix, batch)[0].tolist()
    # 1 + 1/2 + 1/4 + 1/8 = 1.875, then 1/16 of the value 2.
    if mixer == "none":
        assert target == [[1.875 + 0.125, 1.0]]
        return
    assert batch.reward.tolist() == [[1.875, 1.875]]
    assert batch.discount.tolist() == [[0.0625]]
    if mixer == "vdn":
        assert target == [[2 * 1.875 + 2 * 0.125]]


# ---------------------------------------------------------------- updates


def plain_loss(qmix: Qmix, batch: ReplayBatch) -> Tensor:
    """The loss row by row and agent by agent, with each agent's weights taken out of the stack."""
    c, rows, agents = qmix._config, batch.size, batch.reward.shape[1]

    def q(values: nn.Module, observation: dict[str, Tensor], b: int, a: int) -> Tensor:
        w1, b1, w2, b2 = (p[a if len(p) > 1 else 0] for p in values.agents.parameters())  # type: ignore[union-attr, operator]
        hidden = (observation["view"][b, a] @ w1 + b1[0]).relu()
        out: Tensor = hidden @ w2 + b2[0]
        return out

    def join(
        values: nn.Module, observation: dict[str, Tensor], b: int, taken: list[Tensor]
    ) -> Tensor:
        alive = observation[AGENT_MASK][b]
        counted = torch.stack([t if alive[a] else torch.zeros(()) for a, t in enumerate(taken)])
        if c.mixer == "vdn":
            return counted.sum()
        mixer, state = values.mixer, observation[STATE][b]
        w1 = (mixer.first_weight.weight @ state + mixer.first_weight.bias).abs()  # type: ignore[union-attr, operator]
        sums = counted @ w1.view(agents, -1) + mixer.first_bias(state)  # type: ignore[union-attr, operator]
        half = (len(sums) + 1) // 2
        hidden = torch.cat([F.elu(sums[:half]), -F.elu(-sums[half:])])
        return hidden @ mixer.second_weight(state).abs() + mixer.second_bias(state)[0]  # type: ignore[union-attr, operator]

    def best(observation: dict[str, Tensor], b: int, a: int) -> int:
        chooser = q(qmix.values, observation, b, a)
        legal = [k for k in range(3) if observation[ACTION_MASK][b, a, k]]
        return max(legal, key=lambda k: float(chooser[k]))

    now, following = batch.observation(), observed(batch.next_arrays)
    losses: list[Tensor] = []
    own: list[list[Tensor]] = [[] for _ in range(agents)]
    for b in range(rows):
        action = batch.arrays["action"][b]
        taken = [q(qmix.values, now, b, a)[int(action[a])] for a in range(agents)]
        with torch.no_grad():
            coming = [q(qmix.target, following, b, a)[best(following, b, a)] for a in range(agents)]
        if c.mixer == "none":
            for a in range(agents):
                if now[AGENT_MASK][b, a]:
                    next_value = coming[a] * following[AGENT_MASK][b, a]
                    y = batch.reward[b, a] + batch.discount[b, 0] * next_value
                    own[a].append(batch.weight[b] * (taken[a] - y) ** 2)
            continue
        with torch.no_grad():
            next_value = join(qmix.target, following, b, coming)
            y = batch.reward[b].sum() + batch.discount[b, 0] * next_value
        losses.append(batch.weight[b] * (join(qmix.values, now, b, taken) - y) ** 2)
    if c.mixer == "none":
        return torch.stack([torch.stack(x).mean() for x in own]).mean() * qmix._num_slices
    return torch.stack(losses).mean()


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("mixer", MIXERS)
def test_stacked_updates_equal_a_plain_loop(mixer: str, share: bool) -> None:
    qmix = make(mortal_spec(), mixer=mixer, share_parameters=share, max_grad_norm=0.0)
    plain = copy.deepcopy(qmix)
    optimizer = torch.optim.Adam(plain.values.parameters(), 5e-4)
    for seed in range(3):
        batch = random_transitions(mortal_spec(), 16, seed)
        loss = plain_loss(plain, batch)
        step_plainly(optimizer, loss, plain.values, plain.target)
        log = qmix.update(batch)
        torch.testing.assert_close(
            log["loss"] * qmix._num_slices, loss.detach(), atol=1e-5, rtol=1e-5
        )
    for ours, theirs in zip(
        [*qmix.values.parameters(), *qmix.target.parameters()],
        [*plain.values.parameters(), *plain.target.parameters()],
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)


def test_only_alive_agents_count_in_losses_and_errors() -> None:
    batch = two_rows([[1, 1, 1], [1, 1, 1]], [1, 1])
    batch = replace(batch, discount=torch.zeros(2, 1), weight=torch.ones(2))

    def learn(mixer: str, alive: list[list[int]], reward: list[list[float]]) -> tuple[Any, Any]:
        qmix = make(mortal_spec(), mixer=mixer)
        constant(qmix.values.agents, [2.0, 2.0, 2.0])
        batch.arrays[OBSERVATION + AGENT_MASK] = torch.tensor(alive, dtype=torch.uint8)
        batch.reward = torch.tensor(reward)
        log = qmix.update(batch)
        assert batch.td_error is not None
        return float(log["loss"]), batch.td_error.tolist()

    # VDN: one lives: 2 - 5; both: 4 - 3. A row on which no agent is alive does not count.
    assert learn("vdn", [[0, 1], [1, 1]], [[4.0, 1.0], [1.0, 2.0]]) == (5.0, [3.0, 1.0])
    assert learn("vdn", [[0, 0], [1, 1]], [[4.0, 1.0], [1.0, 2.0]]) == (1.0, [0.0, 1.0])
    # IQL: -, 2 - 3; 2 - 4, 2 - 0: the first agent's mean is 4, the second's (1 + 4) / 2.
    assert learn("none", [[0, 1], [1, 1]], [[9.0, 3.0], [4.0, 0.0]]) == (3.25, [1.0, 2.0])


@pytest.mark.parametrize("mixer", [*MIXERS, "qplex"])
def test_who_mixes_is_clipped_as_a_whole_and_others_each(mixer: str) -> None:
    qmix = make(mortal_spec(), mixer=mixer, share_parameters=False, max_grad_norm=0.01)
    log = qmix.update(random_transitions(mortal_spec(), 16))
    grads = [p.grad for p in qmix.values.parameters() if p.grad is not None]
    sets = 2 if mixer == "none" else 1
    norms = torch.cat([g.view(sets, -1) for g in grads], 1).norm(dim=1)
    torch.testing.assert_close(norms, torch.full((sets,), 0.01), rtol=1e-3, atol=0)
    assert float(log["grad_norm"]) > 0.01


@pytest.mark.parametrize("prioritised_weight", [1.0, 0.25])
def test_weights_scale_the_loss_and_errors_are_priorities(prioritised_weight: float) -> None:
    qmix = make(vector_spec(), mixer="vdn")
    batch = random_transitions(vector_spec(), 8)
    even = copy.deepcopy(batch)
    even.weight = torch.ones(8)
    batch.weight = torch.full((8,), prioritised_weight)
    reference = copy.deepcopy(qmix).update(even)
    assert float(qmix.update(batch)["loss"]) == pytest.approx(
        prioritised_weight * float(reference["loss"]), rel=1e-5
    )
    assert batch.td_error is not None
    torch.testing.assert_close(batch.td_error.square().mean(), reference["loss"])


def test_independent_agents_gradients_stay_apart() -> None:
    spec = vector_spec()
    batch = random_transitions(spec, 16)
    other = copy.deepcopy(batch)
    other.reward[:, 1] += 100  # the second agent's luck
    one, two = (make(spec, mixer="none", share_parameters=False) for _ in range(2))
    one.update(batch)
    two.update(other)
    for p, q in zip(one.values.parameters(), two.values.parameters(), strict=True):
        torch.testing.assert_close(p[0], q[0], atol=0, rtol=0)
        assert not torch.equal(p[1], q[1])


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("mixer", [*MIXERS, "qplex"])
def test_learns_and_resumes_to_the_bit(mixer: str, share: bool) -> None:
    spec = mortal_spec()
    options = {"mixer": mixer, "share_parameters": share, "lr": 5e-3, "epsilon_env_steps": 640}
    options["replay"] = {"update_interval": 64}
    one, other = make(spec, **options), make(spec, 99, **options)
    batches = [random_transitions(spec, 32, s) for s in range(3)]
    first = one.update(batches[0])
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    assert torch.equal(other.values.rewards, one.values.rewards)
    for batch in batches[1:]:
        mine, its = one.update(copy.deepcopy(batch)), other.update(copy.deepcopy(batch))
        assert {k: float(v) for k, v in mine.items()} == {k: float(v) for k, v in its.items()}
    # 3 updates of 64 rows each, of 640 to go: 1 - 0.3 * 0.95
    assert float(other.make_policy().exploration) == pytest.approx(1 - 0.3 * 0.95)
    for _ in range(150):
        last = one.update(batches[0])
    assert last["loss"] < 0.5 * first["loss"]


def at_rate(interval: int, updates: int) -> Qmix:
    """Epsilon falls from 1 to 0 over 1000 rows."""
    replay = {"update_interval": interval, "updates_per_interval": updates}
    schedule = {"epsilon_start": 1.0, "epsilon_end": 0.0, "epsilon_env_steps": 1000}
    return make(mortal_spec(), replay=replay, **schedule)


def test_epsilon_continues_at_another_rate_of_updates() -> None:
    batch = random_transitions(mortal_spec(), 4)

    def after(qmix: Qmix, updates: int) -> float:
        for _ in range(updates):
            qmix.update(copy.deepcopy(batch))
        return float(qmix._exploration)

    one = at_rate(64, 3)
    assert after(one, 4) == pytest.approx(1 - 4 * 64 / 3 / 1000)
    other = at_rate(10, 7)
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    assert float(other._exploration) == float(one._exploration)
    assert float(other.make_policy().exploration) == float(one._exploration)
    assert after(other, 2) == pytest.approx(1 - (4 * 64 / 3 + 2 * 10 / 7) / 1000)
    back = at_rate(64, 3)
    back.load_state_dict(copy.deepcopy(other.state_dict()))
    # 6 updates of 64/3 rows are 128: with fractions no rounding adds up.
    assert after(back, 2) == pytest.approx(1 - (6 * 64 / 3 + 2 * 10 / 7) / 1000)
    assert back._rows() == 128 + Fraction(20, 7)


def test_a_policy_acts_by_its_epsilon_until_it_is_published_to() -> None:
    qmix = at_rate(250, 1)
    policy = qmix.make_policy()
    qmix.update(random_transitions(mortal_spec(), 4))
    assert float(policy.exploration) == 1.0
    qmix.publish(policy)
    assert float(policy.exploration) == 0.75


@pytest.mark.parametrize("share", [True, False])
def test_maps_are_learned_from(share: bool) -> None:
    network = PluginConfig(name="cnn", channels=(4,), kernels=(5,), strides=(3,), hidden=(8,))
    config = Config(share_parameters=share)
    qmix = Qmix(config, map_spec(), network, Precision("fp32", CPU), CPU, 1)
    batch = random_transitions(map_spec(), 16)
    losses = [float(qmix.update(batch)["loss"]) for _ in range(40)]
    assert losses[-1] < 0.5 * losses[0]


def test_bf16_stays_near_fp32() -> None:
    batch = random_transitions(mortal_spec(), 64)
    a, b = (make(mortal_spec(), precision=p).update(copy.deepcopy(batch)) for p in ("fp32", "bf16"))
    assert float(b["loss"]) == pytest.approx(float(a["loss"]), rel=0.05)


# ---------------------------------------------------------------- acting


def test_epsilon_greedy_honours_masks() -> None:
    spec = vector_spec(masked=True)
    qmix = make(spec)
    constant(qmix.values.agents, [1.0, 2.0, 3.0])
    policy = qmix.make_policy()
    observation = {
        "view": torch.zeros(6000, 2, 4),
        ACTION_MASK: torch.tensor([[1, 1, 0], [1, 1, 1]], dtype=torch.uint8).expand(6000, 2, 3),
    }
    greedy = policy.act(observation, None)["action"]
    assert greedy.unique(dim=0).tolist() == [[1, 2]]
    policy.exploration.fill_(0.3)
    acted = policy.act(observation, torch.Generator().manual_seed(0))["action"]
    share = torch.stack([(acted == k).float().mean(0) for k in range(3)], 1)
    # First: two legal actions, 0.15 each, and 0.7 more for the best; second: 0.1 each and 0.7.
    expected = torch.tensor([[0.15, 0.85, 0.0], [0.1, 0.1, 0.8]])
    torch.testing.assert_close(share, expected, atol=0.02, rtol=0)
    assert share[0, 2] == 0


def test_continuous_actions_are_refused() -> None:
    spec = EnvSpec("arm", 2, (ArraySpec("view", "float32", (4,)),), Continuous(2))
    with pytest.raises(SpecError, match="needs discrete actions; 'arm' has Continuous"):
        make(spec)


# ---------------------------------------------------------------- known answers


@pytest.mark.parametrize(
    ("mixer", "options", "goals"),
    [
        *(("qmix", {"game": "penalty", "penalty": float(k)}, {50}) for k in (-25, -100)),
        ("qmix", {"game": "penalty", "penalty": 0.0}, {250}),
        ("qmix", {"game": "climbing"}, {125, 150, 175, 275}),
        ("vdn", {"game": "penalty", "penalty": -100.0}, {50}),
        ("vdn", {"game": "penalty", "penalty": 0.0}, {250}),
        ("none", {"game": "penalty", "penalty": 0.0}, {250}),
    ],
)
def test_matrix_games_reach_their_known_answers(
    mixer: str, options: dict[str, Any], goals: set[int]
) -> None:
    game = MatrixGame(MatrixConfig(**options), 32)
    replay = {"capacity_rows": 20_000, "start_rows": 500, "batch_size": 128, "update_interval": 16}
    qmix = make(
        game.spec,
        mixer=mixer,
        share_parameters=False,
        lr=2e-3,
        epsilon_env_steps=4_000,
        replay=replay,
    )
    policy = play_and_learn(qmix, game, 8_000)
    acted = policy.act({"observation": torch.ones(1, 2, 1)}, None)["action"][0]
    assert round(25 * float(game.payoffs[tuple(acted.tolist())])) in goals


# ---------------------------------------------------------------- averaged policies


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("name", ["qmix", "maddpg"])
def test_averaged_policies_act_by_the_target_network(name: str, normalized: bool) -> None:
    spec = vector_spec()
    network = PluginConfig(name="mlp", hidden=(8,), normalize_observations=normalized)
    acts = []
    for averaged in (True, False):
        config = PluginConfig(name=name, averaged_policy=averaged)
        algorithm = build_algorithm(config, spec, network, Precision("fp32", CPU), CPU, 3)
        assert isinstance(algorithm, Qmix | Maddpg)
        generator = torch.Generator().manual_seed(1)
        target = algorithm.target.agents if isinstance(algorithm, Qmix) else algorithm.target_actor
        for parameter in target.parameters():
            parameter.data.normal_(generator=generator)
        seen = observed(random_transitions(spec, 200).arrays)
        policies = algorithm.snapshot(), algorithm.evaluated()
        acts += [policy.act(seen, None)["action"] for policy in policies]
        if isinstance(algorithm, Qmix):
            algorithm.values.agents.load_state_dict(target.state_dict())
        else:
            algorithm.actor.load_state_dict(target.state_dict())
        acts.append(algorithm.snapshot().act(seen, None)["action"])
    latest, average, by_target, *without = acts
    assert torch.equal(average, by_target)
    assert not torch.equal(average, latest)
    assert torch.equal(torch.stack(without[:2]), torch.stack([latest, latest]))

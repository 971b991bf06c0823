"""QPLEX: the mixing network by hand, an update against a plain one, and its published game."""

import copy
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from murmur.learner_service.algorithms.qmix import Qmix
from murmur.learner_service.device.precision import Precision
from murmur.learner_service.layers.duplex import DuplexMixer, Heads
from murmur.learner_service.layers.stacked import StackedLinear
from murmur.learner_service.learning.base import build_algorithm
from murmur.learner_service.storage.replay import ReplayBatch
from murmur.learner_service.storage.storage import OBSERVATION, observed
from murmur.shared.config import PluginConfig
from murmur.shared.process.errors import SpecError
from murmur.shared.wire.spec import (
    ACTION_MASK,
    AGENT_MASK,
    STATE,
    ArraySpec,
    Continuous,
    EnvSpec,
)
from tests.learner_service.toys import (
    CPU,
    MatrixGame,
    play_and_learn,
    random_transitions,
    rows_of,
    step_plainly,
    vector_spec,
)


def make(spec: EnvSpec, seed: int = 3, **options: Any) -> Qmix:
    network = PluginConfig(name="mlp", hidden=(8,), agent_id=False)
    config = PluginConfig(**{"name": "qplex", "mixer_hidden": 4, "heads": 3, **options})
    algorithm = build_algorithm(config, spec, network, Precision("fp32", CPU), CPU, seed)
    assert isinstance(algorithm, Qmix)
    return algorithm


def mortal_spec() -> EnvSpec:
    """Masked actions, agents that die, and a global state."""
    more = (ArraySpec(AGENT_MASK, "uint8", ()), ArraySpec(STATE, "float32", (5,), per_agent=False))
    spec = vector_spec(masked=True)
    return replace(spec, observations=spec.observations + more)


# ---------------------------------------------------------------- the mixer


def biases(net: nn.Module) -> Tensor:
    """The last layer's."""
    layer = net.last if isinstance(net, Heads) else list(net.children())[-1]
    assert isinstance(layer, StackedLinear | nn.Linear)
    return layer.bias


def fixed_mixer() -> DuplexMixer:
    """w = 2 and 3, b = 0.5 and -1, lambda = (1, 3) / 2 * (1/2 or 3/4) of two heads added up."""
    mixer = DuplexMixer(num_agents=2, state_size=1, hidden=2, num_actions=2, heads=2)
    three = torch.tensor(3.0).log()  # sigmoid(log 3) = 3/4
    with torch.no_grad():
        for p in mixer.parameters():
            p.zero_()
        biases(mixer.weight).copy_(torch.tensor([2.0, -3.0]))
        biases(mixer.bias).copy_(torch.tensor([0.5, -1.0]))
        biases(mixer.key).copy_(torch.tensor([[[1.0]], [[-3.0]]]))
        biases(mixer.actions)[:, 0, 1] = three
    return mixer


def mix(
    mixer: DuplexMixer,
    q: Tensor,
    action: Tensor,
    state: Tensor,
    legal: Tensor | None = None,
    alive: Tensor | None = None,
) -> Tensor:
    """Q_tot of [B, A, K] values and [B, A] joint actions."""
    best = (q if legal is None else q.masked_fill(legal == 0, -1e9)).amax(-1)
    out: Tensor = mixer(q.gather(-1, action.unsqueeze(-1)).squeeze(-1), best, action, alive, state)
    return out


def test_mixer_by_hand() -> None:
    mixer, state = fixed_mixer(), torch.ones(3, 1)
    q = torch.tensor([[[1.0, 4.0], [5.0, 2.0]]]).expand(3, 2, 2)
    action = torch.tensor([[1, 0], [0, 0], [0, 1]])
    # lambda = (1 + 3) * 1/2 * (1/2, 3/4) = 1 and 1.5.
    importance = mixer.importance(state, action, None)
    torch.testing.assert_close(importance, torch.tensor([[1.0, 1.5]] * 3))
    # Best: 2*4 + 0.5 + 3*5 - 1 = 22.5; the first agent lacks 2*3 = 6, the second 3*3 * 1.5 = 13.5.
    total = mix(mixer, q, action, state)
    torch.testing.assert_close(total, torch.tensor([[22.5], [16.5], [22.5 - 6 - 13.5]]))
    # The first agent's second action is illegal: its first one lacks nothing, 2 + 0.5 + 14.
    legal = torch.tensor([[1, 0], [1, 1]]).expand(3, 2, 2)
    assert mix(mixer, q, action, state, legal)[1].item() == pytest.approx(16.5)
    # A dead agent is worth 0, whatever it does.
    alive = torch.tensor([[0.0, 1.0]]).expand(3, 2)
    torch.testing.assert_close(
        mix(mixer, q, action, state, None, alive), torch.tensor([[14.0], [14.0], [14 - 13.5]])
    )


def test_the_importance_is_not_in_the_agents_gradient() -> None:
    mixer = fixed_mixer()
    q = torch.tensor([[[1.0, 4.0], [5.0, 2.0]]], requires_grad=True)
    mix(mixer, q, torch.tensor([[0, 1]]), torch.ones(1, 1)).sum().backward()
    assert q.grad is not None
    assert q.grad.tolist() == [[[2.0, 0.0], [0.0, 3.0]]]  # w of the actions taken
    for net in (mixer.key, mixer.agents, mixer.actions):
        grad = biases(net).grad
        assert grad is not None
        assert grad.abs().sum() > 0


def test_a_head_is_a_network_of_its_own() -> None:
    heads, x = Heads(3, 5, 4, 2), torch.randn(7, 5)
    for h in range(3):
        first = (
            x @ heads.first.weight[4 * h : 4 * h + 4].T + heads.first.bias[4 * h : 4 * h + 4]
        ).relu()
        second = (first @ heads.second.weight[h] + heads.second.bias[h]).relu()
        expected = second @ heads.last.weight[h] + heads.last.bias[h]
        torch.testing.assert_close(heads(x)[:, h], expected)
    assert Heads(1, 5, 4, 2)(x).shape == (7, 1, 2)


@pytest.mark.parametrize("masked", [False, True])
def test_the_best_of_the_team_is_each_agents_best(masked: bool) -> None:
    mixer = DuplexMixer(num_agents=3, state_size=5, hidden=16, num_actions=4, heads=4)
    with torch.no_grad():
        for p in mixer.parameters():
            p.copy_(torch.randn(p.shape) / 2)
    mixer = mixer.double()
    q, state = torch.randn(200, 3, 4).double() * 3, torch.randn(200, 5).double()
    legal = (torch.rand(200, 3, 4) < 0.6).float()
    legal[..., 0] = 1
    legal = legal if masked else torch.ones_like(legal)
    best = q.masked_fill(legal == 0, -1e9).argmax(-1)
    with torch.no_grad():
        highest = mix(mixer, q, best, state, legal)
        for joint in itertools.product(range(4), repeat=3):
            action = torch.tensor(joint).expand(200, 3)
            played = legal.gather(-1, action.unsqueeze(-1)).amin((1, 2)) > 0  # all of it legal
            other = mix(mixer, q, action, state, legal)
            # What is worse for some agent is worse for the team.
            differs = (action != best).any(1)
            assert ((other < highest).squeeze(1) == differs)[played].all()


# ---------------------------------------------------------------- updates


def plain_total(qplex: Qmix, values: Any, obs: dict[str, Tensor], b: int, do: list[int]) -> Tensor:
    """Q_tot of a row by loops over agents and heads."""
    mixer, state = values.mixer, obs[STATE][b]
    agents, heads = len(do), qplex._config.heads
    done = torch.zeros(agents, 3)
    for a in range(agents):
        if obs[AGENT_MASK][b, a]:
            done[a, do[a]] = 1
    joint = torch.cat([state, done.flatten()])
    nets = (mixer.key, state), (mixer.agents, state), (mixer.actions, joint)
    key, own, acts = (net(x.unsqueeze(0))[0] for net, x in nets)  # [H, 1], [H, A], [H, A]
    total = torch.zeros(())
    for a in range(agents):
        if not obs[AGENT_MASK][b, a]:
            continue
        q = plain_q(values, obs, b, a)
        w = mixer.weight(state)[a].abs()
        best = max(float(q.detach()[k]) for k in range(3) if obs[ACTION_MASK][b, a, k])
        importance = sum(
            key[h, 0].abs() * own[h, a].sigmoid() * acts[h, a].sigmoid() for h in range(heads)
        )
        advantage = float((w * (q[do[a]] - best)).detach())
        total = total + w * q[do[a]] + mixer.bias(state)[a] + (importance - 1) * advantage
    return total


def plain_q(values: Any, obs: dict[str, Tensor], b: int, a: int) -> Tensor:
    w1, b1, w2, b2 = (p[0] for p in values.agents.parameters())
    out: Tensor = (obs["view"][b, a] @ w1 + b1[0]).relu() @ w2 + b2[0]
    return out


def plain_loss(qplex: Qmix, batch: ReplayBatch) -> Tensor:
    now, following = batch.observation(), observed(batch.next_arrays)
    losses = []
    for b in range(batch.size):
        do = batch.arrays["action"][b].tolist()
        with torch.no_grad():
            best = []
            for a in range(2):
                chooser = plain_q(qplex.values, following, b, a)
                legal = [k for k in range(3) if following[ACTION_MASK][b, a, k]]
                best.append(max(legal, key=lambda k, q=chooser: float(q[k])))
            coming = plain_total(qplex, qplex.target, following, b, best)
            y = batch.reward[b].sum() + batch.discount[b, 0] * coming
        losses.append(batch.weight[b] * (plain_total(qplex, qplex.values, now, b, do) - y) ** 2)
    return torch.stack(losses).mean()


def test_updates_equal_a_plain_loop() -> None:
    qplex = make(mortal_spec(), max_grad_norm=0.0)
    plain = copy.deepcopy(qplex)
    optimizer = torch.optim.Adam(plain.values.parameters(), 5e-4, betas=(0.9, 0.99))
    for seed in range(3):
        batch = random_transitions(mortal_spec(), 16, seed)
        loss = plain_loss(plain, batch)
        step_plainly(optimizer, loss, plain.values, plain.target)
        log = qplex.update(batch)
        torch.testing.assert_close(log["loss"], loss.detach(), atol=1e-5, rtol=1e-5)
    for ours, theirs in zip(qplex.values.parameters(), plain.values.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_what_a_dead_agent_did_changes_nothing() -> None:
    qplex = make(mortal_spec())
    batch = random_transitions(mortal_spec(), 16)
    batch.arrays[OBSERVATION + AGENT_MASK][:, 1] = 0
    batch.arrays[OBSERVATION + ACTION_MASK][:, 1] = 0  # not even one action is legal
    found = []
    for action in (0, 2):
        batch.arrays["action"][:, 1] = action
        rows = rows_of(batch)
        obs = observed(rows)
        q, _, _ = qplex._ends(rows, None)
        found.append(qplex._mix(qplex.values, q, rows["action"].long(), obs))
    assert torch.equal(*found)
    assert found[0].isfinite().all()


def test_continuous_actions_are_refused() -> None:
    spec = EnvSpec("arm", 2, (ArraySpec("view", "float32", (4,)),), Continuous(2))
    with pytest.raises(SpecError, match="needs discrete actions; 'arm' has Continuous"):
        make(spec)


# ---------------------------------------------------------------- known answers

QTRAN = ((8.0, -12.0, -12.0), (-12.0, 0.0, 0.0), (-12.0, 0.0, 0.0))


def after_playing(name: str, seed: int, updates: int) -> tuple[float, Tensor]:
    """The payoff of greedy play, and all values, after an update for each random episode."""
    game = MatrixGame(QTRAN, 16, 1)
    replay = {"capacity_rows": 10_000, "start_rows": 64, "update_interval": 2, "batch_size": 32}
    replay["unroll_steps"] = 2
    options: dict[str, Any] = {"lr": 1e-3, "epsilon_end": 1.0, "gamma": 0.0, "replay": replay}
    network = PluginConfig(name="mlp", hidden=(64, 64))
    config, precision = PluginConfig(name=name, **options), Precision("fp32", CPU)
    algorithm = build_algorithm(config, game.spec, network, precision, CPU, seed)
    assert isinstance(algorithm, Qmix)
    policy = play_and_learn(algorithm, game, 2 * updates)
    joint = torch.cartesian_prod(torch.arange(3), torch.arange(3))
    obs = {"one": torch.ones(9, 2, 1)}
    first, second = policy.act(obs, None)["action"][0].tolist()
    with torch.no_grad():
        q = algorithm._outputs(algorithm.values.agents, obs)
        values = algorithm._mix(algorithm.values, q, joint, obs).view(3, 3)
    return QTRAN[first][second], values


def test_plays_the_best_that_is_hidden_behind_punishments() -> None:
    greedy, values = after_playing("qplex", 1, 700)
    assert greedy == 8
    torch.testing.assert_close(values, torch.tensor(QTRAN), atol=2, rtol=0)


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_keeps_playing_what_qmix_cannot_find(seed: int) -> None:
    assert after_playing("qplex", seed, 3000)[0] == 8
    assert after_playing("qmix", seed, 1000)[0] == 0

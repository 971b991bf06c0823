"""QMIX that remembers: sequences from the replay, and an update by hand."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from murmur.learner_service.algorithms.qmix import Qmix
from murmur.learner_service.device.precision import Precision
from murmur.learner_service.layers.recurrent import Recurrent, RecurrentState
from murmur.learner_service.learning.base import build_algorithm
from murmur.learner_service.preprocess.transform import Transforms
from murmur.learner_service.storage.replay import ReplayBatch, SequenceReplay
from murmur.shared.config import PluginConfig
from murmur.shared.process.errors import ConfigError
from murmur.shared.wire.dataset import OBSERVATION
from murmur.shared.wire.spec import ACTION_MASK, AGENT_MASK, ArraySpec, Discrete, EnvSpec
from tests.learner_service.layers.test_recurrent import ragged, random_row
from tests.learner_service.serving_learner import Serving
from tests.learner_service.toys import (
    ABORTED,
    CPU,
    FIRST,
    LAST,
    MID,
    learn,
    random_batch,
    vector_spec,
)

WIDTH = 5


def make(spec: EnvSpec, replay: dict[str, Any] | None = None, **options: Any) -> Qmix:
    settings = {"capacity_rows": 400, "start_rows": 8, "batch_size": 16, "unroll_steps": 4}
    config = PluginConfig(**{"name": "qmix", "replay": settings | (replay or {}), **options})
    network = PluginConfig(name="mlp", hidden=(8,), recurrent=WIDTH)
    algorithm = build_algorithm(config, spec, network, Precision("fp32", CPU), CPU, 1)
    assert isinstance(algorithm, Qmix)
    return algorithm


# ---------------------------------------------------------------- the replay


def sequences(qmix: Qmix, rows: int) -> tuple[SequenceReplay, ReplayBatch]:
    """The replay after `rows` rows of five environments in ragged episodes, and a batch of it."""
    random = np.random.default_rng(0)
    with Serving(qmix, vector_spec(), learns=False) as serving:
        player = serving.session(5)
        for t in range(rows):
            kinds = [ragged(e, t) for e in range(5)]
            serving.exchange((player, random_row(random, serving.spec, kinds)))
        storage = serving.storage
        assert isinstance(storage, SequenceReplay)
        batch = storage.sample(0, 0.0)
        assert batch is not None
        return storage, batch


def test_a_batch_has_whole_sequences_with_their_stored_state() -> None:
    storage, batch = sequences(make(vector_spec()), rows=41)
    assert batch.size == 16
    assert batch.arrays["step_type"].shape == (5, 4)  # 16 rows in sequences of 4
    assert batch.arrays["memory"].shape == (1, 4, 2, WIDTH)
    column = batch.index.view(4, 4)[0] // 4
    for name, array in batch.arrays.items():
        torch.testing.assert_close(array, storage._arrays[name][column].transpose(0, 1))


def test_the_stored_state_is_what_the_rows_before_leave() -> None:
    """From one column's state, its four rows lead to the state of the next column."""
    qmix = make(vector_spec())
    storage, _ = sequences(qmix, rows=41)
    kept = {name: array.transpose(0, 1) for name, array in storage._arrays.items()}
    forgotten = 0.0
    for column in range(0, 40, 5):  # ten unrolls of five environments
        now, then = (slice(c, c + 5) for c in (column, column + 5))
        hidden = RecurrentState(kept["memory"][0, now], kept["step_type"][:4, now] == FIRST)
        observation = {"view": kept[OBSERVATION + "view"][:4, now].flatten(0, 1)}
        inputs = qmix._actor_inputs(observation)
        assert isinstance(qmix.values.agents, Recurrent)
        with torch.no_grad():
            _, left = qmix.values.agents(inputs.image, inputs.vector, hidden)
        begins = kept["step_type"][0, then] == FIRST
        expected = left.masked_fill(begins.view(5, 1, 1), 0)
        torch.testing.assert_close(kept["memory"][0, then], expected, rtol=0, atol=1e-6)
        forgotten += float(expected.abs().sum())
    assert forgotten > 1  # some sequence does begin within an episode


# ---------------------------------------------------------------- an update by hand


def mortal_spec() -> EnvSpec:
    arrays = (
        ArraySpec("view", "float32", (4,)),
        ArraySpec(ACTION_MASK, "uint8", (3,)),
        ArraySpec(AGENT_MASK, "uint8", ()),
    )
    return EnvSpec("toy", 2, arrays, Discrete(3), (), 6)


def some_sequences(spec: EnvSpec) -> ReplayBatch:
    """Five rows of six sequences: ends of episodes, an ABORTED row, dead agents, stored states."""
    torch.manual_seed(3)
    arrays = random_batch(spec, 4, 6, seed=2).arrays
    arrays["step_type"][0, ::2] = MID
    arrays["step_type"][3, 4] = ABORTED
    arrays[OBSERVATION + AGENT_MASK] = (torch.rand(5, 6, 2) < 0.8).to(torch.uint8)
    arrays["memory"] = torch.randn(1, 6, 2, WIDTH)
    none = torch.zeros(0)
    index = torch.zeros(24, dtype=torch.long)
    return ReplayBatch(arrays, {}, none, none, none, index, index)


def plain_values(qmix: Qmix, net: nn.Module, batch: ReplayBatch) -> Tensor:
    """[L + 1, S, A, K], one step after the other, by torch's own GRU cell."""
    assert isinstance(net, Recurrent)
    cell = nn.GRUCell(WIDTH, WIDTH)
    kinds, values = batch.arrays["step_type"], []
    state = batch.arrays["memory"][0]
    gates = net.gru.input.weight[0].T, net.gru.weight[0].T
    biases = net.gru.input.bias[0, 0], net.gru.bias[0, 0]
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    for t in range(len(kinds)):
        state = state * (kinds[t] != FIRST).view(-1, 1, 1)
        row = {
            k.removeprefix(OBSERVATION): v[t] for k, v in batch.arrays.items() if OBSERVATION in k
        }
        inputs = qmix._actor_inputs(row)
        features = F.relu(net.body(inputs.image, inputs.vector)).flatten(0, 1)
        weights = dict(zip(names, (*gates, *biases), strict=True))
        flat = torch.func.functional_call(cell, weights, (features, state.flatten(0, 1)))
        state = flat.view(state.shape)
        values.append((flat @ net.head.weight[0] + net.head.bias[0]).view(*state.shape[:2], -1))
    return torch.stack(values)


def plain_loss(qmix: Qmix, batch: ReplayBatch) -> Tensor:
    """Transition by transition and agent by agent."""
    c, arrays = qmix._config, batch.arrays
    kinds, alive = arrays["step_type"], arrays[OBSERVATION + AGENT_MASK].float()
    q = plain_values(qmix, qmix.values.agents, batch)
    following = plain_values(qmix, qmix.target.agents, batch).detach()
    chooser = (q if c.double_q else following).detach()
    state = arrays[OBSERVATION + "view"].flatten(2)
    losses: list[list[Tensor]] = [[], []]
    for t in range(4):
        for s in range(6):
            if kinds[t, s] >= LAST or kinds[t + 1, s] == ABORTED:
                continue
            legal = arrays[OBSERVATION + ACTION_MASK][t + 1, s] != 0
            best = chooser[t + 1, s].masked_fill(~legal, -1e9).argmax(-1)
            taken, then = torch.zeros(2), torch.zeros(2)
            for a in range(2):
                action = int(arrays["action"][t, s, a])
                taken = taken + alive[t, s, a] * q[t, s, a, action] * torch.eye(2)[a]
                then[a] = alive[t + 1, s, a] * following[t + 1, s, a, best[a]]
            reward, discount = arrays["reward"][t + 1, s], c.gamma * arrays["discount"][t + 1, s]
            if c.mixer == "none":
                for a in range(2):
                    if alive[t, s, a]:
                        end = reward[a] + discount * alive[t + 1, s, a] * then[a]
                        losses[a].append((taken[a] - end) ** 2)
                continue
            if not alive[t, s].any():
                continue
            if c.mixer == "vdn":
                total, ahead = taken.sum(), then.sum()
            else:
                mixers = qmix.values.mixer, qmix.target.mixer
                assert mixers[0] is not None
                assert mixers[1] is not None
                now, coming = [taken], [then]
                if c.mixer == "qplex":
                    illegal = arrays[OBSERVATION + ACTION_MASK] == 0
                    highest = [x.masked_fill(illegal, -1e9).amax(-1) for x in (q, following)]
                    now += [highest[0][t, s], arrays["action"][t, s], alive[t, s]]
                    coming += [highest[1][t + 1, s], best, alive[t + 1, s]]
                total = mixers[0](*(x.unsqueeze(0) for x in (*now, state[t, s])))[0, 0]
                ahead = mixers[1](*(x.unsqueeze(0) for x in (*coming, state[t + 1, s])))[0, 0]
            losses[0].append((total - (reward.sum() + discount * ahead.detach())) ** 2)
    if c.mixer == "none":
        return sum(torch.stack(of_agent).mean() for of_agent in losses) / 2
    return torch.stack(losses[0]).mean()


@pytest.mark.parametrize("mixer", ["qmix", "qplex", "vdn", "none"])
@pytest.mark.parametrize("double_q", [True, False], ids=["double", "single"])
def test_an_update_equals_a_plain_one(mixer: str, double_q: bool) -> None:
    spec = mortal_spec()
    options = {"mixer": mixer, "double_q": double_q, "lr": 1e-2, "max_grad_norm": 0.0}
    fast, batch = make(spec, gamma=0.9, **options), some_sequences(spec)
    with torch.no_grad():
        for p in fast.target.parameters():
            p += 0.1 * torch.randn_like(p)
    fast.values.rewards += torch.tensor([-1e3, 1e3])  # so that no bound clips
    plain = copy.deepcopy(fast)
    found = fast.update(batch)
    loss = plain_loss(plain, batch)
    assert float(found["loss"]) == pytest.approx(float(loss.detach()), rel=1e-4)
    betas = 0.9, 0.99 if mixer == "qplex" else 0.999
    adam = torch.optim.Adam(plain.values.parameters(), 1e-2, betas=betas)
    loss.backward()
    adam.step()
    pairs = zip(fast.values.parameters(), plain.values.parameters(), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


# ---------------------------------------------------------------- what does not go together


@pytest.mark.parametrize(
    ("replay", "message"),
    [
        ({"prioritized": True}, r"replay\.prioritized=true is not supported with a recurrent"),
        ({"n_step": 3}, r"replay\.n_step=3 .*whole sequences; set it to 1"),
    ],
)
def test_options_of_single_rows_are_refused(replay: dict[str, Any], message: str) -> None:
    qmix = make(vector_spec(), replay)
    with pytest.raises(ConfigError, match=message):
        qmix.make_storage(vector_spec(), None)


def test_augmented_sequences_are_refused() -> None:
    qmix = make(vector_spec())
    augmented = Transforms()
    augmented.draws = True
    qmix.transforms = augmented
    with pytest.raises(ConfigError, match=r"augment: .* set network\.recurrent=0"):
        qmix.make_storage(vector_spec(), None)


@pytest.mark.parametrize("mixer", ["qmix", "none"])
def test_sequences_teach_frozen_agents_nothing(mixer: str) -> None:
    qmix = make(vector_spec(), mixer=mixer, share_parameters=False, frozen_agents=[1])
    _, batch = sequences(qmix, rows=41)
    before = [p.detach().clone() for p in qmix.values.agents.parameters()]
    for _ in range(3):
        learn(qmix, batch)
    changes = [
        (now - then).view(2, -1).abs().amax(1)
        for now, then in zip(qmix.values.agents.parameters(), before, strict=True)
    ]
    assert all(agent_0 > 0 and agent_1 == 0 for agent_0, agent_1 in changes)

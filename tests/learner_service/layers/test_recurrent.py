"""Memory: what was acted with is what is learned from, and it solves what nothing else can."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from murmur.env_service.envs.memory import Config as MemoryConfig
from murmur.env_service.envs.memory import Memory
from murmur.learner_service.algorithms.coma import Coma
from murmur.learner_service.algorithms.mappo import Mappo
from murmur.learner_service.device.precision import Precision
from murmur.learner_service.layers.building import build_network
from murmur.learner_service.layers.forward import forward
from murmur.learner_service.layers.inputs import InputShape
from murmur.learner_service.layers.recurrent import (
    CELLS,
    CellKind,
    Recurrent,
    RecurrentState,
    StackedGRU,
    StackedLSTM,
    gru_cell,
    reset_by_inputs,
)
from murmur.learner_service.learning.base import Algorithm, build_algorithm
from murmur.learner_service.learning.exploration import policy_probabilities
from murmur.learner_service.learning.minibatches import recurrent_states
from murmur.learner_service.learning.policies import ComaPolicy
from murmur.learner_service.storage.rollout import Batch
from murmur.shared.config import PluginConfig
from murmur.shared.process.errors import ConfigError
from murmur.shared.wire.spec import EnvSpec
from murmur.shared.wire.timestep import TimeStep
from tests.learner_service.reference_layers import as_loop, torch_gates
from tests.learner_service.serving_learner import Serving
from tests.learner_service.toys import CPU, FIRST, LAST, MID, vector_spec


def make(
    name: str, spec: EnvSpec, recurrent: int = 8, precision: str = "fp32", **options: Any
) -> Algorithm:
    network = PluginConfig(name="mlp", hidden=(16,), recurrent=recurrent)
    config = PluginConfig(name=name, **options)
    return build_algorithm(config, spec, network, Precision(precision, CPU), CPU, 1)


# ---------------------------------------------------------------- the layers


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("slices", [(0, 0, 0), (0, 1, 2), (0, 0, 1), (1, 0, 0)])
def test_a_stacked_unit_equals_torchs_cells_in_a_loop(
    slices: tuple[int, ...], kind: CellKind
) -> None:
    unit = CELLS[kind](slices, 4, 5)
    loop = as_loop(unit)
    assert loop is not None
    state = torch.randn(6, 5 * unit.STATES, requires_grad=True)
    for steps, kept in ((7, (torch.rand(7, 6) < 0.7).float()), (1, None)):
        x = torch.randn(steps * 6, 4, requires_grad=True)
        ours, theirs = unit(x, state, kept), loop(x, state, kept)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
        weight = torch.randn_like(ours)
        parameters = [x, state, unit.weight, unit.input.bias]
        mine = torch.autograd.grad((ours * weight).sum(), parameters)
        cells = list(loop.each)
        its = torch.autograd.grad(
            (theirs * weight).sum(),
            [x, state, *(c.weight_hh for c in cells), *(c.bias_ih for c in cells)],
        )
        torch.testing.assert_close(mine[0], its[0], rtol=0, atol=1e-6)
        torch.testing.assert_close(mine[1], its[1], rtol=0, atol=1e-6)
        hidden = torch.stack(its[2 : 2 + len(cells)])
        ordered = torch.stack([torch_gates(unit, w) for w in mine[2]])
        torch.testing.assert_close(ordered, hidden, rtol=1e-6, atol=1e-5)
        biases = torch.stack(its[2 + len(cells) :])
        ordered = torch.stack([torch_gates(unit, b[0]) for b in mine[3]])
        torch.testing.assert_close(ordered, biases, rtol=1e-6, atol=1e-5)


def test_an_lstm_by_hand() -> None:
    unit = StackedLSTM((0,), 1, 1)
    with torch.no_grad():
        for parameter in unit.parameters():
            parameter.zero_()
        unit.input.weight[..., 3] = 1.0  # the candidate is tanh(x)
    # Gates of zero are 1/2: c = tanh 1 / 2, then forgotten, then (tanh 1 / 2 + tanh 1) / 2.
    keep = torch.tensor([[0.0], [0.0], [1.0]])
    states = unit(torch.ones(3, 1), torch.full((1, 2), 8.0), keep)
    cell = torch.tensor([0.380797, 0.380797, 0.571196])
    torch.testing.assert_close(states[:, 0, 1], cell, rtol=0, atol=1e-6)
    torch.testing.assert_close(states[:, 0, 0], cell.tanh() / 2, rtol=0, atol=1e-6)
    torch.testing.assert_close(unit.read(states), states[..., :1])


@pytest.mark.parametrize("slices", [(0, 0, 0), (0, 1, 2), (0, 0, 1)])
def test_a_step_by_the_fused_cell_equals_a_plain_one(slices: tuple[int, ...]) -> None:
    gru, x, state = StackedGRU(slices, 4, 5), torch.randn(6, 4), torch.randn(6, 5)
    with torch.no_grad():
        weight, bias = gru.by_agent()
        fast = gru._step(x.view(-1, len(weight), 4), state, weight, bias)
        torch.testing.assert_close(fast, gru(x, state, None), rtol=0, atol=1e-6)


def test_a_gru_by_hand() -> None:
    gru = StackedGRU((0,), 1, 1)
    with torch.no_grad():
        for parameter in gru.parameters():
            parameter.zero_()
        gru.input.weight[..., 2] = 1.0  # the candidate is tanh(x)
    # Gates of zero are 1/2: h = (0 + tanh 1) / 2, then forgotten, then (tanh 1 / 2 + tanh 1) / 2.
    states = gru(torch.ones(3, 1), torch.full((1, 1), 8.0), torch.tensor([[0.0], [0.0], [1.0]]))
    tanh = 0.761594
    torch.testing.assert_close(
        states.flatten(), torch.tensor([tanh / 2, tanh / 2, 0.75 * tanh]), rtol=0, atol=1e-6
    )


def test_gru_keeps_features_above_zero_and_the_head_reads_it() -> None:
    network = Recurrent(torch.nn.Identity(), (0,), 1, 1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
        network.gru.input.weight[..., 2] = 1.0
        network.head.weight.fill_(10.0)
    # Two environments, one row each, as above: h = (0 + tanh x) / 2.
    out, memory = network.remember(
        torch.tensor([[[1.0]], [[-1.0]]]), RecurrentState(torch.zeros(2, 1, 1))
    )
    torch.testing.assert_close(memory.flatten(), torch.tensor([0.380797, 0.0]))
    torch.testing.assert_close(out.flatten(), torch.tensor([3.80797, 0.0]))


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_an_unroll_equals_step_by_step(kind: str, cell: CellKind) -> None:
    image = (2, 5, 5) if kind == "cnn" else None
    options: dict[str, Any] = {"hidden": (6,), "recurrent": 7, "recurrent_cell": cell}
    if kind == "cnn":
        options |= {"channels": (4,), "kernels": (3,), "strides": (2,)}
    config = PluginConfig(name=kind, **options)
    network = build_network(config, InputShape(image, 3), 4, (0, 1), may_remember=True)
    assert isinstance(network, Recurrent)
    steps, envs = 5, 3
    vector = torch.randn(steps, envs, 2, 3)
    maps = torch.randn(steps, envs, 2, 2, 5, 5) if image else None
    first = torch.rand(steps, envs) < 0.3
    start = torch.randn(envs, 2, network.memory_size)
    whole, memory_after = network(
        None if maps is None else maps.flatten(0, 1),
        vector.flatten(0, 1),
        RecurrentState(start, first),
    )
    memory = start
    for t in range(steps):
        memory = memory.masked_fill(first[t].view(-1, 1, 1), 0)
        out, memory = network(None if maps is None else maps[t], vector[t], RecurrentState(memory))
        torch.testing.assert_close(whole.view(steps, envs, 2, 4)[t], out, rtol=0, atol=1e-6)
    torch.testing.assert_close(memory_after, memory, rtol=0, atol=1e-6)


def test_rows_of_columns_by_hand() -> None:
    first = torch.tensor([[True, False, False], [False, False, True]])
    hidden = RecurrentState(torch.arange(3.0).view(3, 1, 1), first)
    # Rows of 3 environments over 2 steps are 0 1 2 / 3 4 5.
    some, all_but_one = (
        hidden.columns(torch.tensor([2, 0])),
        hidden.without_last(),
    )
    assert some.memory.flatten().tolist() == [2, 0]
    assert some.first is not None
    assert some.first.tolist() == [[False, True], [True, False]]
    assert all_but_one.memory is hidden.memory
    assert all_but_one.first is not None
    assert all_but_one.first.tolist() == [[True, False, False]]


def test_an_algorithm_without_use_for_memory_refuses_it() -> None:
    config = PluginConfig(name="mlp", recurrent=64)
    with pytest.raises(ConfigError, match=r"network\.recurrent = 64, but this algorithm learns"):
        build_network(config, InputShape(None, 4), 2)


# ---------------------------------------------------------------- acting and learning


def random_row(random: np.random.Generator, spec: EnvSpec, step_type: list[int]) -> TimeStep:
    n = len(step_type)
    return TimeStep(
        step_type=np.array(step_type, np.uint8),
        reward=np.zeros((n, spec.num_agents), np.float32),
        discount=np.ones(n, np.float32),
        observation={"view": random.normal(size=(n, spec.num_agents, 4)).astype(np.float32)},
        metrics={m: np.zeros(n, np.float32) for m in spec.metrics},
    )


def ragged(env: int, t: int) -> int:
    """Episodes of 3, 4, 5, ... rows in environments 0, 1, 2, ..."""
    length = env + 3
    return FIRST if t % length == 0 else LAST if t % length == length - 1 else MID


def two_sessions(serving: Serving, rows: int) -> list[Batch]:
    """Environments 0-1 and 2-4 in two sessions, sometimes in one batch and sometimes not."""
    random = np.random.default_rng(0)
    a, b = serving.session(2), serving.session(3, first_slot=2)
    for t in range(rows):
        mine = (a, random_row(random, serving.spec, [ragged(e, t) for e in (0, 1)]))
        its = (b, random_row(random, serving.spec, [ragged(e, t) for e in (2, 3, 4)]))
        if t % 3:
            serving.exchange(mine, its)
        else:
            serving.exchange(its)
            serving.exchange(mine)
    batches = []
    while serving.storage.ready:
        batch = serving.storage.sample(0, 0.0)
        assert batch is not None
        batches.append(batch)
    return batches


def recomputed(mappo: Mappo, batch: Batch, hidden: RecurrentState | None) -> Tensor:
    """[L + 1, B, A] log-probabilities of the recorded actions."""
    observation = {k: v.flatten(0, 1) for k, v in batch.observation().items()}
    with torch.no_grad(), mappo._precision.autocast():
        pi, _ = mappo.actor(mappo._actor_inputs(observation), None, hidden)
    action = batch.arrays["action"].long()
    return pi.log_prob(action.flatten(0, 1)).view_as(action)


@pytest.mark.parametrize("share", [True, False, (0, 0, 1)], ids=["shared", "own", "groups"])
@pytest.mark.parametrize("unroll", [15, 4], ids=["whole episodes", "cut episodes"])
def test_recomputed_log_probabilities_are_those_acted_with(unroll: int, share: Any) -> None:
    spec = vector_spec(num_agents=3)
    mappo = make(
        "mappo", spec, share_parameters=share, unroll_steps=unroll, batch_size=1, batch_number=1
    )
    assert isinstance(mappo, Mappo)
    with torch.no_grad():  # far from the start, where every action is as good as another
        for p in mappo.actor.parameters():
            p *= 3
    with Serving(mappo, spec) as serving:
        batches = two_sessions(serving, rows=33)
    columns = sum(len(b.version) for b in batches)
    assert columns == 5 * (32 // unroll)
    forgotten = 0.0
    for batch in batches:
        hidden, critics = recurrent_states(batch)
        assert hidden is not None
        assert critics is not None
        recorded = batch.arrays["log_prob"]
        torch.testing.assert_close(
            recomputed(mappo, batch, hidden)[:-1], recorded[:-1], rtol=0, atol=1e-6
        )
        without = recomputed(mappo, batch, critics)[:-1]
        forgotten = max(forgotten, float((without - recorded[:-1]).abs().max()))
    assert forgotten > 0.01  # some unroll began in mid-episode: what came before does matter


def test_comas_actor_is_unrolled_from_what_it_acted_with() -> None:
    spec = vector_spec(num_agents=3)
    coma = make("coma", spec, unroll_steps=4, batch_size=1, batch_number=1, clip_ratio=0.2)
    assert isinstance(coma, Coma)
    with Serving(coma, spec) as serving:
        batches = two_sessions(serving, rows=33)
        assert isinstance(serving.policy, ComaPolicy)
        policy = serving.policy
    for batch in batches:
        rows = coma._rows(batch)
        memory = batch.arrays["memory"][0]
        for t in range(4):
            now = batch.arrays["step_type"][t] == FIRST
            memory = memory.masked_fill(now.view(-1, 1, 1), 0)
            inputs = policy._inputs({k: v[t] for k, v in batch.observation().items()})
            with torch.no_grad():
                logits, after = forward(policy.actor, inputs, RecurrentState(memory))
            assert after is not None
            memory = after
            pi = policy_probabilities(logits.flatten(0, 1), None, policy.exploration)
            action = batch.arrays["action"][t].flatten().long()
            want = pi.gather(1, action.unsqueeze(1)).squeeze(1).log()
            got = -rows.columns["inverse"].view(4, -1)[t].log()
            counts = rows.weight.view(4, -1)[t] > 0
            torch.testing.assert_close(got[counts], want[counts], rtol=0, atol=1e-6)


def test_evaluation_resets_its_state_where_episodes_begin() -> None:
    spec = vector_spec(num_agents=3)
    mappo = make("mappo", spec)
    random = np.random.default_rng(0)
    with Serving(mappo, spec) as serving:
        session, memory = serving.session(2, evaluates=True), torch.zeros(2, 3, 8)
        for t in range(9):
            row = random_row(random, spec, [ragged(e, t) for e in (0, 1)])
            (action,) = serving.exchange((session, row))
            first = torch.from_numpy(row.step_type == FIRST)
            memory = memory.masked_fill(first.view(-1, 1, 1), 0)
            observation = {"view": torch.from_numpy(row.observation["view"])}
            acted = serving.policy.act(observation, None, memory)
            memory = acted["memory"].clone()
            assert np.array_equal(action, acted["action"].numpy())
            assert session.memory is not None
            torch.testing.assert_close(session.memory, memory, rtol=0, atol=0)


def test_a_policy_without_memory_is_given_none() -> None:
    spec = vector_spec(num_agents=3)
    mappo = make("mappo", spec, recurrent=0, unroll_steps=4, batch_size=1, batch_number=1)
    with Serving(mappo, spec) as serving:
        (batch, *_) = two_sessions(serving, rows=6)
        assert "memory" not in batch.arrays
        assert set(mappo.update(batch)) == set(mappo._logged)


def test_memory_in_bf16_stays_near_that_in_fp32() -> None:
    spec = vector_spec(num_agents=3)
    full, half = make("mappo", spec), make("mappo", spec, precision="bf16")
    observation = {"view": torch.randn(50, 3, 4)}
    a = full.make_policy().act(observation, None, torch.zeros(50, 3, 8))["memory"]
    b = half.make_policy().act(observation, None, torch.zeros(50, 3, 8))["memory"]
    assert a.dtype == b.dtype == torch.float32
    torch.testing.assert_close(a, b, rtol=0, atol=0.02)


# ---------------------------------------------------------------- a known answer


LEARNERS: dict[str, dict[str, Any]] = {
    "mappo": {"critic_lr": 5e-3, "gae_lambda": 0.9},
    "coma": {
        "critic_lr": 1e-2,
        "target_every_updates": 1,
        "epsilon_start": 0.3,
        "epsilon_env_steps": 8000,
        "clip_ratio": 0.2,
        "normalize_advantage": True,
    },
    "qmix": {
        "mixer": "vdn",
        "lr": 5e-3,
        "epsilon_env_steps": 4000,
        "target_tau": 0.05,
        "replay": {
            **{"capacity_rows": 20_000, "start_rows": 500, "batch_size": 160, "unroll_steps": 5},
            **{"update_interval": 160, "updates_per_interval": 10},
        },
    },
}


@pytest.mark.parametrize(
    ("name", "recurrent"),
    [
        *((name, 16) for name in LEARNERS),
        ("mappo", 0),
        *(pytest.param(name, 0, marks=pytest.mark.long) for name in ("coma", "qmix")),
    ],
)
def test_only_memory_recalls_a_cue(name: str, recurrent: int) -> None:
    config = MemoryConfig(num_cues=2, delay=4)
    game, fresh = Memory(config, 32), Memory(config, 300)
    common: dict[str, Any] = {"gamma": 0.9}
    if name != "qmix":
        common |= {"batch_size": 128, "batch_number": 3, "data_passes": 4}
        common |= {"actor_lr": 5e-3, "entropy_weight": 0.03}
    algorithm = make(name, game.spec, recurrent, **common, **LEARNERS[name])
    rows = 700 if name == "mappo" else 300  # with 300 half of twelve seeds know it
    with Serving(algorithm, game.spec, learns=True) as serving:
        serving.play(serving.session(32), game, rows)
        correct = serving.play(serving.session(300, evaluates=True), fresh, 6, seed=1)
    if recurrent:
        assert correct >= 0.95
    else:  # one half, give or take five standard deviations of 600 answers
        assert correct == pytest.approx(0.5, abs=0.1)


def test_a_reset_by_inputs_gives_the_state_after_zeros() -> None:
    x, state, bias = 3 * torch.randn(2, 3, 40, 15), torch.randn(3, 40, 5), torch.randn(3, 1, 15)
    weight, keep = torch.randn(3, 5, 15), (torch.rand(2, 3, 40, 1) < 0.6).float()
    changed, cells = reset_by_inputs(x, keep, bias)

    def step(inputs: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        s = torch.baddbmm(bias, h, weight)
        after, cell = gru_cell(inputs.reshape(-1, 15), s.view(-1, 15), h.reshape(-1, 5))
        return after.view(3, 40, 5), cell.view(3, 40, 25)

    for t in range(2):
        got, _ = step(changed[t], state)  # whose states are not zero
        expected, cell = step(x[t], state * keep[t])
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
        reset = keep[t, ..., 0] == 0
        torch.testing.assert_close(cells[t][reset], cell[reset], rtol=1e-6, atol=1e-6)

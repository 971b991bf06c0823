"""What every algorithm must do, whatever it is: one line in ENTRIES adds another."""

import copy
import io
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from murmur.learner_service.algorithms.mappo import Mappo
from murmur.learner_service.device.precision import Precision
from murmur.learner_service.layers.stacked import Sharing, count_slices, resolve_sharing
from murmur.learner_service.learning.base import Algorithm, Policy, build_algorithm
from murmur.learner_service.storage.replay import ReplayBatch
from murmur.learner_service.storage.rollout import Batch
from murmur.shared.config import PluginConfig
from murmur.shared.config.plugins import resolve_plugin
from murmur.shared.wire.dataset import OBSERVATION
from murmur.shared.wire.spec import (
    ACTION_MASK,
    AGENT_MASK,
    ArraySpec,
    Continuous,
    Discrete,
    EnvSpec,
)
from tests.learner_service.reference_layers import looped, stacked_layers
from tests.learner_service.toys import (
    ABORTED,
    CPU,
    FIRST,
    LAST,
    MID,
    random_batch,
    random_transitions,
)

AGENTS = 3
ALIVE = (0, 1, 2)
SHARING: dict[str, Sharing] = {"shared": True, "own": False, "groups": (0, 0, 1)}


def make_spec(space: str) -> EnvSpec:
    observations = [ArraySpec("view", "float32", (4,)), ArraySpec(AGENT_MASK, "uint8", ())]
    if space == "masked":
        observations.append(ArraySpec(ACTION_MASK, "uint8", (3,)))
    action = Continuous(2) if space == "continuous" else Discrete(3)
    return EnvSpec("toy", AGENTS, tuple(observations), action, (), 6)


def rollout(algorithm: Algorithm, spec: EnvSpec, seed: int, alive: tuple[int, ...]) -> Batch:
    """Random rows acted on by the algorithm's own policy; half of the unrolls begin mid-episode."""
    length, envs = 6, 6
    discrete = EnvSpec("toy", AGENTS, spec.observations, Discrete(3), (), 6)
    batch = random_batch(discrete, length, envs, seed)
    batch.arrays["step_type"][0, ::2] = MID
    batch.arrays[OBSERVATION + AGENT_MASK].zero_()[..., list(alive)] = 1
    policy, generator = algorithm.make_policy(), torch.Generator().manual_seed(seed)
    memory = torch.randn(envs, AGENTS, policy.memory_size, generator=generator)
    rows: list[dict[str, Tensor]] = []
    for t in range(length + 1):
        memory = memory * (batch.arrays["step_type"][t] != FIRST).view(-1, 1, 1)
        if t == 0 and policy.memory_size:
            batch.arrays["memory"] = memory.clone().unsqueeze(0)
        observation = {k: v[t] for k, v in batch.observation().items()}
        acted = policy.act(observation, generator, memory if policy.memory_size else None)
        memory = acted.pop("memory", memory).clone()
        rows.append(acted)
    for name in rows[0]:
        batch.arrays[name] = torch.stack([row[name] for row in rows]).clone()
    return batch


@dataclass(frozen=True)
class Entry:
    """An algorithm under test.

    Attributes:
        options: its section of a configuration; learning rates so that 12 updates show.
        spaces: of "discrete", "masked", "continuous".
        recurrent: values of network.recurrent.
        batch: makes a batch of the kind that it learns from: of its policy's actions in an
            environment of that spec, with that seed, in which these agents are alive.
        loss: the logged scalar that must fall on a batch seen again and again.
        layers: each parameter group has layers of its own shape, agents innermost. Where critics
            are stacked in pairs or mixed, the algorithm's own tests compare it with a loop.
    """

    options: dict[str, Any]
    spaces: tuple[str, ...]
    recurrent: tuple[int, ...] = (0,)
    batch: Callable[[Algorithm, EnvSpec, int, tuple[int, ...]], Any] = rollout
    loss: str = "critic_loss"
    layers: bool = True


def sample(algorithm: Algorithm, spec: EnvSpec, seed: int, alive: tuple[int, ...]) -> ReplayBatch:
    """Random transitions, or sequences if the policy remembers, as a replay gives them."""
    if algorithm.memory_size:
        arrays = rollout(algorithm, spec, seed, alive).arrays
        none, index = torch.zeros(0), torch.zeros(36, dtype=torch.long)
        return ReplayBatch(arrays, {}, arrays["reward"], none, none, index, index)
    batch = random_transitions(spec, 32, seed)
    for arrays in (batch.arrays, batch.next_arrays):
        arrays[OBSERVATION + AGENT_MASK].zero_()[..., list(alive)] = 1
    return batch


_MASAC = {"name": "masac", "gamma": 0.0, "critic_lr": 1e-2}
_MADDPG = {"name": "maddpg", "gamma": 0.0, "critic_lr": 3e-2, "epsilon_start": 0.5}
_QMIX = {"name": "qmix", "gamma": 0.0, "lr": 1e-2}
_MAPPO = {"name": "mappo", "gamma": 0.0, "normalize_values": False, "batch_number": 2}
_MAPPO |= {"data_passes": 2, "critic_lr": 1e-2, "max_grad_norm": 0.5}
_COMA = {"name": "coma", "gamma": 0.0, "batch_number": 2, "data_passes": 2, "critic_lr": 1e-2}
ENTRIES: dict[str, Entry] = {
    "mappo": Entry(_MAPPO, ("discrete", "masked", "continuous"), (0, 5)),
    "ippo": Entry({**_MAPPO, "centralized": False}, ("discrete", "continuous"), (0, 5)),
    "ippo, one trunk": Entry(
        {**_MAPPO, "centralized": False, "share_trunk": True, "actor_lr": 1e-2},
        ("discrete", "continuous"),
        (0, 5),
    ),
    "happo": Entry(
        {**_MAPPO, "name": "happo"}, ("discrete", "masked", "continuous"), (0, 5), layers=False
    ),
    "coma": Entry({**_COMA, "max_grad_norm": 0.5}, ("discrete", "masked"), (0, 5)),
    "coma, clipped": Entry(
        {**_COMA, "clip_ratio": 0.2, "normalize_advantage": True, "entropy_weight": 0.01},
        ("discrete",),
        (0, 5),
    ),
    "masac": Entry(_MASAC, ("discrete", "masked", "continuous"), batch=sample, layers=False),
    "maddpg": Entry(_MADDPG, ("discrete", "masked", "continuous"), batch=sample, layers=False),
    "ddpg": Entry(
        {**_MADDPG, "centralized": False}, ("discrete", "continuous"), batch=sample, layers=False
    ),
    "masac, recurrent": Entry(_MASAC, ("continuous",), (5,), sample, layers=False),
    "maddpg, recurrent": Entry(_MADDPG, ("continuous",), (5,), sample, layers=False),
    "qmix": Entry(_QMIX, ("discrete", "masked"), batch=sample, loss="loss", layers=False),
    "qplex": Entry(
        {**_QMIX, "name": "qplex"}, ("discrete", "masked"), (0,), sample, "loss", layers=False
    ),
    "vdn": Entry({**_QMIX, "mixer": "vdn"}, ("discrete",), batch=sample, loss="loss", layers=False),
}


@dataclass(frozen=True)
class Case:
    """An algorithm, a space, who shares networks, and whether they remember."""

    entry: Entry
    space: str
    sharing: Sharing
    recurrent: int

    @property
    def spec(self) -> EnvSpec:
        return make_spec(self.space)

    @property
    def slices(self) -> tuple[int, ...]:
        return resolve_sharing(self.sharing, AGENTS, "sharing")

    def build(self, seed: int = 3, precision: str = "fp32") -> Algorithm:
        options = {**self.entry.options, "share_parameters": self.sharing}
        network = PluginConfig(name="mlp", hidden=(8,), recurrent=self.recurrent)
        half = Precision(precision, CPU)
        return build_algorithm(PluginConfig(**options), self.spec, network, half, CPU, seed)

    def batch(self, algorithm: Algorithm, seed: int = 0, alive: tuple[int, ...] = ALIVE) -> Any:
        return self.entry.batch(algorithm, self.spec, seed, alive)

    def observation(self) -> dict[str, Tensor]:
        """One row of six environments."""
        random = torch.Generator().manual_seed(0)
        mask = torch.randint(2, (6, AGENTS, 3), generator=random, dtype=torch.uint8)
        mask[..., 1] = 1
        rows = {
            "view": torch.randn(6, AGENTS, 4, generator=random),
            AGENT_MASK: torch.ones(6, AGENTS, dtype=torch.uint8),
        }
        return rows | ({ACTION_MASK: mask} if self.space == "masked" else {})

    def memory(self) -> Tensor | None:
        if not self.recurrent:
            return None
        generator = torch.Generator().manual_seed(1)
        return torch.randn(6, AGENTS, self.recurrent, generator=generator)


CASES = {
    f"{name}-{space}-{who}-{'recurrent' if width else 'plain'}": Case(entry, space, sharing, width)
    for name, entry in ENTRIES.items()
    for space in entry.spaces
    for who, sharing in SHARING.items()
    for width in entry.recurrent
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
# Groups lie between networks for all and networks of one's own: those of trainings are long.
trained_case = pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=[pytest.mark.long] * isinstance(case.sharing, tuple))
        for name, case in CASES.items()
    ],
)
_LAYERED = {name: case for name, case in CASES.items() if case.entry.layers}
layered_case = pytest.mark.parametrize("case", _LAYERED.values(), ids=_LAYERED.keys())


def networks(algorithm: Algorithm) -> dict[str, nn.Module]:
    return {n: p for n, p in algorithm._parts.items() if isinstance(p, nn.Module)}


def numbers(scalars: dict[str, Tensor]) -> dict[str, float]:
    return {name: float(value) for name, value in scalars.items()}


def parameters_of(policy: Policy) -> list[nn.Parameter]:
    modules = [part for part in vars(policy).values() if isinstance(part, nn.Module)]
    return [p for module in modules for p in module.parameters()]


@trained_case
def test_the_loss_falls_on_a_batch_seen_again_and_again(case: Case) -> None:
    algorithm = case.build()
    batch = case.batch(algorithm)
    log = [numbers(algorithm.update(copy.deepcopy(batch))) for _ in range(12)]
    assert log[-1][case.entry.loss] < 0.9 * log[0][case.entry.loss]
    assert all(value == value for scalars in log for value in scalars.values())  # no NaN


@pytest.mark.parametrize("name", ENTRIES)
def test_seed_alone_decides_the_first_weights(name: str) -> None:
    case = Case(ENTRIES[name], ENTRIES[name].spaces[0], True, 0)

    def weights(seed: int) -> list[Tensor]:
        parts = networks(case.build(seed)).values()
        return [p for part in parts for p in part.parameters() if p.dim() > 1]

    outside = torch.get_rng_state()
    one, other = weights(1), weights(2)
    assert torch.equal(torch.get_rng_state(), outside)
    torch.rand(1)
    assert all(torch.equal(a, b) for a, b in zip(one, weights(1), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", [n for n, entry in ENTRIES.items() if entry.batch is sample])
def test_a_replay_is_given_the_runs_discount_lag_and_seed(name: str) -> None:
    entry = ENTRIES[name]
    options = {**entry.options, "gamma": 0.5, "replay": {"capacity_rows": 1000}}
    case = Case(replace(entry, options=options), entry.spaces[0], True, 0)
    replays = [case.build(seed).make_storage(case.spec, 5) for seed in (1, 1, 2)]
    assert {(r._gamma, r._max_unrolls_ahead) for r in replays} == {(0.5, 5)}  # type: ignore[attr-defined]
    drawn = [float(torch.rand((), generator=r._generator)) for r in replays]  # type: ignore[attr-defined]
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize("name", ENTRIES)
def test_what_an_update_logged_stays(name: str) -> None:
    """Logs are read later, many at once."""
    case = Case(ENTRIES[name], ENTRIES[name].spaces[-1], True, 0)
    algorithm = case.build()
    batch = case.batch(algorithm)
    log = algorithm.update(copy.deepcopy(batch))
    then = numbers(log)
    algorithm.update(batch)
    assert numbers(log) == then


@every_case
def test_a_policy_acts_as_declared(case: Case) -> None:
    algorithm = case.build()
    policy = algorithm.make_policy()
    observation = case.observation()
    assert policy.memory_size == case.recurrent
    acted = policy.act(observation, torch.Generator().manual_seed(0), case.memory())
    shapes: dict[str, tuple[int, ...]] = dict(algorithm.extras)
    shapes["action"] = (2,) if case.space == "continuous" else ()
    if case.recurrent:
        shapes["memory"] = (case.recurrent,)
    assert {name: tuple(x.shape) for name, x in acted.items()} == {
        name: (6, AGENTS, *shape) for name, shape in shapes.items()
    }
    if case.space == "masked":
        legal = observation[ACTION_MASK].gather(-1, acted["action"].long().unsqueeze(-1))
        assert legal.all()


@layered_case
def test_agents_learn_apart_unless_they_share(case: Case) -> None:
    algorithm = case.build()
    batch = case.batch(algorithm, alive=(1,))
    before = copy.deepcopy(networks(algorithm))
    algorithm.update(batch)
    moved: set[int] = set()
    for name, network in networks(algorithm).items():
        for old, new in zip(before[name].parameters(), network.parameters(), strict=True):
            change = (new - old).detach().view(count_slices(case.slices), -1).abs().amax(1)
            moved |= set(change.nonzero().flatten().tolist())
    assert moved == {case.slices[1]}


@pytest.mark.parametrize("recurrent", [0, 5])
@pytest.mark.parametrize("name", ["mappo", "ippo", "happo", "coma", "coma, clipped"])
def test_rows_on_which_nobody_acted_teach_nothing(name: str, recurrent: int) -> None:
    """Environments that fail at once bring nothing else: that is no reason for a run to end."""
    case = Case(ENTRIES[name], "discrete", True, recurrent)
    algorithm = case.build()
    batch = case.batch(algorithm)
    failing = copy.deepcopy(batch)
    failing.arrays["step_type"][::2], failing.arrays["step_type"][1::2] = FIRST, ABORTED
    before = copy.deepcopy(networks(algorithm))
    scalars = numbers(algorithm.update(failing))
    assert all(map(math.isfinite, scalars.values()))
    assert scalars
    for part, network in networks(algorithm).items():
        for now, then in zip(network.parameters(), before[part].parameters(), strict=True):
            assert torch.equal(now, then)
    assert algorithm.update(batch).keys() >= scalars.keys()


def weights_after(case: Case, kind: int, value: float) -> list[Tensor]:
    """Learn from what the algorithm's own storage makes of rows with some between two episodes.

    Args:
        case: the algorithm.
        kind: of the row between LAST and FIRST.
        value: what that row holds.
    """
    algorithm = case.build()
    storage = algorithm.make_storage(case.spec, None)
    batch = rollout(algorithm, case.spec, 0, ALIVE)
    kinds = batch.arrays["step_type"]
    for env, t in enumerate((2, 3, 4, 2, 3, 4)):
        assert kinds[t - 1 : t + 1, env].tolist() == [LAST, FIRST]
        kinds[t, env], kinds[t + 1, env] = kind, FIRST
        for name, array in batch.arrays.items():
            if name.startswith(OBSERVATION) or name == "reward":
                array[t, env] = value
    unroll = storage.begin(6, 0, 0)
    for name, array in unroll.arrays.items():
        array.copy_(batch.arrays[name])
    unroll.cursor = 7
    storage.add(unroll)
    for _ in range(3):
        taken = storage.sample(0, 0)
        if taken is not None:
            algorithm.update(taken)
            storage.done(taken)
    return [p.detach() for part in networks(algorithm).values() for p in part.parameters()]


@pytest.mark.parametrize(
    ("name", "recurrent"), [(n, r) for n in ENTRIES for r in ENTRIES[n].recurrent]
)
def test_aborted_row_in_place_of_first_changes_no_weight(name: str, recurrent: int) -> None:
    """It changes no more than another LAST row would, on which no agent acts either."""
    entry = ENTRIES[name]
    if entry.batch is sample:
        replay = {"capacity_rows": 36, "start_rows": 36, "batch_size": 16, "unroll_steps": 6}
        options = {**entry.options, "gamma": 0.9, "replay": {**replay, "updates_per_interval": 3}}
    else:
        options = {**entry.options, "gamma": 0.9, "unroll_steps": 6, "batch_size": 54}
    case = Case(replace(entry, options=options), entry.spaces[0], True, recurrent)
    learned = weights_after(case, ABORTED, 0)
    before = [p for part in networks(case.build()).values() for p in part.parameters()]
    assert not all(torch.equal(a, b) for a, b in zip(learned, before, strict=True))
    for kind, value in ((ABORTED, 1), (LAST, 0)):
        other = weights_after(case, kind, value)
        assert all(torch.equal(a, b) for a, b in zip(learned, other, strict=True))


@pytest.mark.parametrize("recurrent", [0, 5])
@pytest.mark.parametrize("name", ["mappo", "ippo", "coma"])
def test_alive_agent_learns_as_much_whoever_else_is_alive(name: str, recurrent: int) -> None:
    """Each parameter group has the mean of its own rows: by plain steps it moves alike."""
    entry = ENTRIES[name]
    options = {**entry.options, "batch_number": 1, "data_passes": 1, "max_grad_norm": 0.0}
    case = Case(replace(entry, options=options), "discrete", SHARING["own"], recurrent)

    def change(alive: tuple[int, ...]) -> list[Tensor]:
        algorithm = case.build()
        critic = networks(algorithm)["critic"]
        plain = torch.optim.SGD(critic.parameters(), 1.0)
        if isinstance(algorithm, Mappo):
            algorithm._learned[1] = plain, critic  # type: ignore[assignment, call-overload]
        else:
            algorithm._critic_optimizer = plain  # type: ignore[attr-defined]
        before = copy.deepcopy(critic)
        algorithm.update(case.batch(algorithm, alive=alive))
        return [
            (new - old).detach().view(AGENTS, -1)[1]
            for old, new in zip(before.parameters(), critic.parameters(), strict=True)
        ]

    alone = change((1,))
    torch.testing.assert_close(change(ALIVE), alone, rtol=1e-4, atol=1e-6)
    assert max(x.abs().max() for x in alone) > 1e-3


@pytest.mark.parametrize("name", [n for n in ENTRIES if n not in ("happo", "qmix", "qplex", "vdn")])
def test_own_rewards_do_not_change_other_agents_networks(name: str) -> None:
    entry = ENTRIES[name]
    options = {**entry.options, "actor_lr": 1e-2}
    if name in ("mappo", "ippo"):
        options["normalize_values"] = True
    twice = "mappo", "ippo", "masac", "masac, recurrent"  # then others act otherwise
    updates = 2 if name in twice else 1
    for recurrent in entry.recurrent:
        case = Case(replace(entry, options=options), entry.spaces[0], SHARING["groups"], recurrent)
        weights = []
        for paid in (1.0, 100.0):
            algorithm = case.build()
            for seed in range(updates):
                batch = case.batch(case.build(), seed)
                (batch.reward if entry.batch is sample else batch.arrays["reward"])[..., 2] *= paid
                algorithm.update(batch)
            weights.append([p.detach() for p in parameters_of(algorithm.make_policy())])
        for alike, unlike in zip(*weights, strict=True):
            torch.testing.assert_close(alike[0], unlike[0], rtol=1e-5, atol=1e-7)
        assert any(not torch.equal(a[1], b[1]) for a, b in zip(*weights, strict=True))


@layered_case
def test_stacked_networks_learn_as_a_loop_over_agents_does(case: Case) -> None:
    algorithm = case.build()
    for part in algorithm._parts.values():
        if isinstance(part, torch.optim.Adam):  # else it makes much of a gradient that is rounding
            part.param_groups[0]["eps"] = 1e-5
    batch = case.batch(algorithm)
    loop = looped(algorithm, count_slices(case.slices))
    ours, theirs = algorithm.update(copy.deepcopy(batch)), loop.update(copy.deepcopy(batch))
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-5, atol=1e-6)
    twin = copy.deepcopy(algorithm)
    # Stacked again, the loop's weights must be ours: turn ours into loops, compare layer by layer.
    unstacked = networks(looped(twin, count_slices(case.slices)))
    compared = 0
    for name, network in networks(loop).items():
        layers = zip(stacked_layers(network), stacked_layers(unstacked[name]), strict=True)
        for its, mine in layers:
            for a, b in zip(its.parameters(), mine.parameters(), strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
                compared += 1
    assert compared > 0


@trained_case
def test_a_resumed_run_is_the_same_to_the_bit(case: Case) -> None:
    one, other = case.build(), case.build(seed=99)
    batches = [case.batch(one, seed) for seed in range(3)]
    one.update(copy.deepcopy(batches[0]))
    file = io.BytesIO()
    torch.save(one.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    for batch in batches[1:]:
        assert numbers(one.update(copy.deepcopy(batch))) == numbers(
            other.update(copy.deepcopy(batch))
        )
    for name, network in networks(one).items():
        twins = zip(network.parameters(), networks(other)[name].parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in twins)


@pytest.mark.parametrize("name", ENTRIES)
def test_a_resumed_run_takes_the_configurations_learning_rates(name: str) -> None:
    def optimizers(algorithm: Algorithm) -> dict[str, torch.optim.Optimizer]:
        parts = algorithm._parts.items()
        return {n: p for n, p in parts if isinstance(p, torch.optim.Optimizer)}

    entry = ENTRIES[name]
    case = Case(entry, entry.spaces[0], True, 0)
    one = case.build()
    groups = [group for part in optimizers(one).values() for group in part.param_groups]
    options = resolve_plugin("algorithm", PluginConfig(**entry.options)).options
    rates = {key for key in type(options).model_fields if key.endswith("lr")}
    if entry.options.get("share_trunk"):
        rates.remove("critic_lr")
    assert len(rates) == len(groups)
    wanted = [0.5**i for i in range(len(groups))]
    changed = entry.options | dict(zip(sorted(rates), wanted, strict=True))
    other = replace(case, entry=replace(entry, options=changed)).build(seed=99)
    batch = case.batch(one)
    one.update(copy.deepcopy(batch))
    saved = copy.deepcopy(one.state_dict())
    other.load_state_dict(copy.deepcopy(saved))
    for part, optimizer in optimizers(other).items():
        steps = optimizer.state_dict()["state"]
        assert steps.keys() == saved["parts"][part]["state"].keys()
        for key, values in saved["parts"][part]["state"].items():
            assert all(torch.equal(steps[key][k], v) for k, v in values.items())
    other.update(copy.deepcopy(batch))
    found = [group["lr"] for part in optimizers(other).values() for group in part.param_groups]
    assert found == wanted


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", ENTRIES)
def test_a_state_from_another_device_or_precision_continues(name: str, precision: str) -> None:
    entry = ENTRIES[name]
    case = Case(entry, entry.spaces[0], True, 0)
    one, other = case.build(), case.build(seed=99, precision=precision)
    batch = case.batch(one)
    one.update(copy.deepcopy(batch))
    state = one.state_dict()
    state["generator"] = torch.zeros(16, dtype=torch.uint8)  # a GPU's: seed and offset
    for part in state["parts"].values():
        for group in part.get("param_groups", ()):
            group["capturable"] = True
    other.load_state_dict(state)
    for kind, network in networks(one).items():
        twins = zip(network.parameters(), networks(other)[kind].parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in twins)
    for part in other._parts.values():
        if isinstance(part, torch.optim.Optimizer):
            assert not any(group["capturable"] for group in part.param_groups)
    other.update(copy.deepcopy(batch))


@trained_case
def test_a_policy_is_a_snapshot_until_it_is_published_to(case: Case) -> None:
    algorithm = case.build()
    policy, batch = algorithm.make_policy(), case.batch(algorithm)

    def act(policy: Policy) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(1)
        return policy.act(case.observation(), generator, case.memory())

    before, weights = act(policy), [w.clone() for w in parameters_of(policy)]
    for _ in range(3):
        algorithm.update(copy.deepcopy(batch))
    still = act(policy)
    assert all(torch.equal(before[name], still[name]) for name in before)
    algorithm.publish(policy)
    moved = [not torch.equal(a, b) for a, b in zip(weights, parameters_of(policy), strict=True)]
    assert any(moved)
    assert not any(w.requires_grad for w in parameters_of(policy))
    published, fresh = act(policy), act(algorithm.make_policy())
    assert all(torch.equal(published[name], fresh[name]) for name in fresh)


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of torch
@pytest.mark.parametrize("name", ["masac-continuous-own-plain"])
def test_compiled_networks_learn_the_same(name: str) -> None:
    plain, compiled = CASES[name].build(), CASES[name].build()
    compiled.compile(backend="aot_eager")
    for seed in range(2):
        batch = CASES[name].batch(plain, seed)
        expected, got = (numbers(a.update(copy.deepcopy(batch))) for a in (plain, compiled))
        assert got == pytest.approx(expected, rel=1e-3, abs=1e-5)
    policy = compiled.make_policy()
    compiled.publish(policy)
    action = policy.act(CASES[name].observation(), None, CASES[name].memory())["action"]
    assert action.shape[:2] == (6, AGENTS)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_torch_compile_itself() -> None:
    algorithm = CASES["ippo-discrete-shared-plain"].build()
    before = copy.deepcopy(algorithm.state_dict()["parts"])
    algorithm.compile()
    algorithm.update(CASES["ippo-discrete-shared-plain"].batch(algorithm))
    after = algorithm.state_dict()["parts"]
    assert before["actor"].keys() == after["actor"].keys()
    assert any(not torch.equal(v, after["actor"][k]) for k, v in before["actor"].items())

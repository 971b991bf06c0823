"""Rows in are transitions out: n steps, ends of episodes, priorities, rate, saved and restored."""

import io
import math
from typing import Any

import psutil
import pytest
import torch

from murmur.learner_service.storage.replay import ReplayBatch, ReplayConfig, ReplayStorage
from murmur.learner_service.storage.storage import Unroll
from murmur.shared.process.errors import ConfigError, ResourceError
from murmur.shared.wire.dataset import OBSERVATION
from murmur.shared.wire.spec import AGENT_MASK, ArraySpec, Discrete, EnvSpec
from tests.learner_service.toys import ABORTED, CPU, FIRST, LAST, MID

VIEW = OBSERVATION + "view"
SPEC = EnvSpec("toy", 2, (ArraySpec("view", "float32", (1,)),), Discrete(7))
GAMMA = 0.5


def replay(ahead: int | None = None, seed: int = 0, **options: Any) -> ReplayStorage:
    settings = {
        "capacity_rows": 24,
        "start_rows": 1,
        "batch_size": 1,
        "update_interval": 1,
        "unroll_steps": 4,
        **options,
    }
    return ReplayStorage(
        ReplayConfig(**settings), SPEC, GAMMA, ahead, CPU, {}, seed, section="algorithm.replay"
    )


def put(
    storage: ReplayStorage,
    value: float,
    num_envs: int = 1,
    step_types: tuple[int, ...] = (MID,) * 5,
    discounts: tuple[float, ...] = (1,) * 5,
) -> None:
    """Row t of environment i: view value + t + 100 i, reward of agent 1 that + 0.5, action t."""
    unroll: Unroll = storage.begin(num_envs, 0, 0)
    for t in range(storage.length + 1):
        view = value + t + 100.0 * torch.arange(num_envs)
        unroll.arrays[VIEW][t] = view.view(-1, 1, 1)
        unroll.arrays["reward"][t] = torch.stack([view, view + 0.5], 1)
        unroll.arrays["action"][t] = t
        unroll.arrays["step_type"][t] = step_types[t]
        unroll.arrays["discount"][t] = discounts[t]
    unroll.cursor = storage.length + 1
    storage.add(unroll)


def take(storage: ReplayStorage) -> ReplayBatch:
    batch = storage.sample(0, 0.0)
    assert batch is not None
    return batch


def views(storage: ReplayStorage, draws: int) -> set[float]:
    """The views of this number of sampled batches."""
    return {float(v) for _ in range(draws) for v in storage._sample().arrays[VIEW][:, 0, 0]}


# ---------------------------------------------------------------- what comes out


def test_rows_in_are_transitions_out() -> None:
    s = replay(batch_size=8)
    put(s, 0, num_envs=3)
    assert s.ready_rows == s.inserted == 12
    batch = take(s)
    t = batch.arrays["action"][:, 0].float()
    view, after = batch.arrays[VIEW][:, 0, 0], batch.next_arrays[VIEW][:, 0, 0]
    assert (view % 100).tolist() == t.tolist()
    assert after.tolist() == (view + 1).tolist()
    # The reward is that of the following row, the result of this row's action.
    assert batch.reward.tolist() == torch.stack([view + 1, view + 1.5], 1).tolist()
    assert batch.discount[:, 0].tolist() == [GAMMA] * 8
    assert batch.weight.tolist() == [1.0] * 8
    assert views(s, 100) == {100.0 * i + t for i in range(3) for t in range(4)}


def test_ends_of_episodes() -> None:
    # Row 2 is LAST, row 3 begins an episode: row 2's action was never played.
    for terminated in (True, False):
        s = replay(batch_size=3)
        put(
            s,
            0,
            step_types=(FIRST, MID, LAST, FIRST, MID),
            discounts=(1, 1, 0 if terminated else 1, 1, 1),
        )
        batch = take(s)
        assert views(s, 50) == {0, 1, 3}
        by_view = dict(
            zip(batch.arrays[VIEW][:, 0, 0].tolist(), batch.discount[:, 0].tolist(), strict=True)
        )
        # A cut episode bootstraps from its last row, a terminated one does not.
        assert by_view == {0: GAMMA, 1: 0 if terminated else GAMMA, 3: GAMMA}


def test_three_steps_by_hand() -> None:
    s = replay(batch_size=6, unroll_steps=6, n_step=3, start_rows=6)
    unroll = s.begin(1, 0, 0)
    unroll.arrays["reward"][:, 0] = torch.tensor([9, 1, 2, 4, 8, 16, 32.0]).unsqueeze(1)
    unroll.arrays[VIEW][:, 0, :, 0] = torch.arange(7.0).unsqueeze(1)
    unroll.arrays["step_type"][:, 0] = torch.tensor([FIRST, MID, MID, LAST, FIRST, MID, MID])
    unroll.arrays["discount"][:, 0] = torch.tensor([1, 1, 1, 0, 1, 1, 1.0])
    unroll.cursor = 7
    s.add(unroll)
    batch = s._sample()
    rows = zip(
        batch.arrays[VIEW][:, 0, 0].tolist(),
        batch.reward[:, 0].tolist(),
        batch.discount[:, 0].tolist(),
        batch.next_arrays[VIEW][:, 0, 0].tolist(),
        strict=True,
    )
    # Episode one: r = 1, 2, 4, then terminated. Episode two: r = 16, 32, then the column ends.
    assert {row[0]: row[1:] for row in rows} == {
        0: (1 + 0.5 * 2 + 0.25 * 4, 0, 3),
        1: (2 + 0.5 * 4, 0, 3),
        2: (4, 0, 3),
        4: (16 + 0.5 * 32, 0.25, 6),
        5: (32, 0.5, 6),
    }


@pytest.mark.parametrize("team", [False, True])
def test_an_agents_steps_end_with_its_life_but_not_a_teams(team: bool) -> None:
    seen = (*SPEC.observations, ArraySpec(AGENT_MASK, "uint8", ()))
    mortal = EnvSpec("toy", 2, seen, Discrete(7))
    config = ReplayConfig(
        capacity_rows=6, start_rows=6, batch_size=6, update_interval=1, unroll_steps=6, n_step=3
    )
    s = ReplayStorage(config, mortal, GAMMA, None, CPU, {}, 0, team=team)
    unroll = s.begin(1, 0, 0)
    unroll.arrays["step_type"][:] = MID
    unroll.arrays["discount"][:] = 1
    unroll.arrays["reward"][:, 0] = torch.tensor([9, 1, 2, 4, 8, 16, 32.0]).unsqueeze(1)
    alive = unroll.arrays[OBSERVATION + AGENT_MASK][:, 0]
    alive[:] = 1
    alive[2:4, 1] = 0  # agent 1 dies in the second step and is back from row 4 on
    unroll.cursor = 7
    s.add(unroll)
    batch = s._sample()
    found = {}
    for i, reward, discount in zip(batch.index, batch.reward, batch.discount, strict=True):
        found[int(i)] = (reward.tolist(), discount.tolist())
    whole = {
        0: (1 + 0.5 * 2 + 0.25 * 4, 0.125),
        1: (2 + 0.5 * 4 + 0.25 * 8, 0.125),  # three steps on agent 1 is back
        4: (16 + 0.5 * 32, 0.25),  # the column ends
    }
    if team:  # is paid for the dead, too, and continues
        assert {i: found[i] for i in whole} == {i: ([r, r], [d]) for i, (r, d) in whole.items()}
        return
    # Agent 1: the step in which it dies is the last that counts. On rows 2 and 3 it is dead.
    own = {0: (1 + 0.5 * 2, 0), 1: (2, 0), 4: whole[4]}
    assert {i: found[i] for i in whole} == {
        i: ([whole[i][0], own[i][0]], [whole[i][1], own[i][1]]) for i in whole
    }


def test_the_oldest_rows_go() -> None:
    s = replay(batch_size=8)  # room for six columns
    for i in range(5):
        put(s, 1000 * i, num_envs=2)
    assert s.ready_rows == 24
    assert s.inserted == 40
    kept = {1000.0 * i + 100 * e + t for i in (2, 3, 4) for e in (0, 1) for t in range(4)}
    assert views(s, 100) == kept


def test_what_an_ended_session_leaves_is_put_too() -> None:
    s = replay()
    unroll = s.begin(2, 0, 0)
    for t in range(3):  # of five rows
        unroll.arrays[VIEW][t] = 10.0 + t
        unroll.arrays["step_type"][t] = MID if t else FIRST
    unroll.cursor = 3
    assert s.add_open(unroll) == 2
    assert s.inserted == 2 * 2
    assert views(s, 40) == {10, 11}  # the row that came last led to nothing


def test_an_unroll_may_wrap_around_the_ring() -> None:
    s = replay(batch_size=8)
    put(s, 0, num_envs=4)
    put(s, 1000, num_envs=4)
    kept = {200.0 + t for t in range(4)} | {300.0 + t for t in range(4)}
    assert views(s, 100) == kept | {1000.0 + 100 * e + t for e in range(4) for t in range(4)}


# ---------------------------------------------------------------- how often


def test_uniform_sampling_is_uniform() -> None:
    s = replay(batch_size=24)
    put(s, 0, num_envs=6)
    counts = torch.zeros(24)
    for _ in range(100):
        counts += torch.bincount(s._sample().index, minlength=24)
    assert counts.tolist() == [100.0] * 24  # strata as wide as rows
    s = replay(batch_size=5)
    put(s, 0, num_envs=6)
    counts = torch.zeros(24)
    for _ in range(1500):
        counts += torch.bincount(s._sample().index, minlength=24)
    torch.testing.assert_close(counts / 7500, torch.full((24,), 1 / 24), atol=0.01, rtol=0)


def test_frequencies_and_weights_follow_errors() -> None:
    s = replay(batch_size=4, prioritized=True, alpha=0.5, beta=0.5, beta_updates=10**9)
    put(s, 0)
    batch = take(s)
    assert sorted(batch.index.tolist()) == [0, 1, 2, 3]  # all new: alike
    assert batch.weight.tolist() == [1.0] * 4
    batch.td_error = (batch.index.float() + 1) ** 2  # to the power alpha: 1, 2, 3, 4
    s.done(batch)
    counts = torch.zeros(4)
    for _ in range(1000):
        drawn = s._sample()
        counts += torch.bincount(drawn.index, minlength=4)
        # (N P)^-beta over the largest of the batch: P = 1/10 ... 4/10.
        expected = (drawn.index + 1.0) ** -0.5
        torch.testing.assert_close(drawn.weight, expected / expected.max(), atol=1e-4, rtol=0)
    torch.testing.assert_close(counts / 4000, torch.tensor([0.1, 0.2, 0.3, 0.4]), atol=0.03, rtol=0)
    put(s, 1000)  # new rows at the largest priority so far: 4 of 10 + 4 * 4
    counts = torch.zeros(8)
    for _ in range(1000):
        counts += torch.bincount(s._sample().index, minlength=8)
    expected = torch.tensor([1, 2, 3, 4, 4, 4, 4, 4]) / 26
    torch.testing.assert_close(counts / 4000, expected, atol=0.03, rtol=0)


def test_beta_grows_to_one() -> None:
    s = replay(batch_size=15, prioritized=True, alpha=1.0, beta=0.4, beta_updates=3)
    put(s, 0, num_envs=5)
    s._tree.set_range(0, torch.tensor([1.0, 2.0, 4.0, 8.0] + [0.0] * 16))
    weights = []
    for _ in range(5):
        batch = take(s)
        weights.append(round(float(batch.weight.min()), 4))
        batch.td_error = s._tree.leaves[batch.index] - 1e-5
        s.done(batch)
    # 0.4, then a third of the 0.6 that are left with each update, and no further than 1.
    assert weights == pytest.approx([8**-0.4, 8**-0.6, 8**-0.8, 1 / 8, 1 / 8], rel=1e-2)


def test_a_row_without_error_is_not_lost() -> None:
    s = replay(batch_size=4, prioritized=True, alpha=0.5)
    put(s, 0)
    batch = take(s)
    batch.td_error = torch.zeros(4)
    s.done(batch)
    assert (s._tree.leaves[:4] > 0).all()
    assert views(s, 50) == {0, 1, 2, 3}


def test_a_row_overwritten_meanwhile_keeps_its_new_priority() -> None:
    s = replay(batch_size=8, capacity_rows=8, start_rows=8, prioritized=True, alpha=1.0)
    put(s, 0, num_envs=2)
    batch = take(s)
    put(s, 1000)  # over the first column
    batch.td_error = torch.full((8,), 5.0)
    s.done(batch)
    assert s._tree.leaves.tolist() == pytest.approx([1.0] * 4 + [5.0] * 4, abs=1e-4)


def test_errors_that_are_not_finite_set_no_priority() -> None:
    s = replay(batch_size=4, prioritized=True, alpha=1.0)
    put(s, 100)
    batch = s.sample(0, 0)
    assert batch is not None
    before, largest = s._tree.leaves.clone(), s._max_priority.clone()
    batch.td_error = torch.full((4,), math.nan)
    s.done(batch)
    assert torch.equal(s._tree.leaves, before)
    batch.td_error = torch.tensor([math.inf, math.nan, math.inf, math.nan])
    s.done(batch)
    assert torch.equal(s._tree.leaves, before)
    assert torch.equal(s._max_priority, largest)


def test_a_prioritised_replay_needs_errors() -> None:
    s = replay(prioritized=True)
    put(s, 0)
    with pytest.raises(ValueError, match="to set td_error"):
        s.done(take(s))


@pytest.mark.parametrize("interval", [1, 5, 10, 20])
@pytest.mark.parametrize("burst", [1, 3])
def test_updates_per_rows(interval: int, burst: int) -> None:
    s = replay(
        capacity_rows=400,
        start_rows=40,
        batch_size=4,
        update_interval=interval,
        updates_per_interval=burst,
    )
    updates = 0
    for i in range(25):
        put(s, 1000 * i, num_envs=2)
        while s.ready:
            s.done(take(s))
            updates += 1
        rows = 8 * (i + 1)
        # The first burst once 40 rows are there, then one every `interval` rows.
        assert updates == (0 if rows < 40 else (1 + (rows - 40) // interval) * burst)
    assert s.sample(0, 0.01) is None


def test_acting_waits_where_updates_fall_behind() -> None:
    s = replay(ahead=1, capacity_rows=400, start_rows=8, batch_size=4, update_interval=4)
    put(s, 0, num_envs=2)  # 8 rows: the first update is due
    assert s.may_begin()  # one unroll of both environments brings two
    put(s, 0, num_envs=2)
    assert not s.may_begin()  # three are due
    s.done(take(s))
    assert s.may_begin()
    free = replay(ahead=None, update_interval=1)
    put(free, 0, num_envs=6)
    assert free.may_begin()


# ---------------------------------------------------------------- size


def test_capacity_in_bytes() -> None:
    # A row of two agents: 1 + 8 + 4 + 8 + 8 bytes; a column of four transitions holds five rows.
    s = replay(capacity_bytes=29 * 5 * 3 + 10)
    put(s, 0, num_envs=6)
    assert s.ready_rows == 12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_step": 5}, r"replay\.n_step=5 is more than unroll_steps=4"),
        ({"start_rows": 25}, r"room for 24 rows, fewer than algorithm\.replay\.start_rows=25"),
        ({"batch_size": 30}, r"room for 24 rows, fewer than algorithm\.replay\.batch_size=30"),
        ({"capacity_bytes": 100}, r"room for 0 rows, .* raise capacity_rows or capacity_bytes"),
    ],
)
def test_options_that_contradict_each_other(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replay(**options)


def test_a_replay_larger_than_memory_is_refused() -> None:
    rows = psutil.virtual_memory().total // 29
    message = r"GiB that cpu has free; set algorithm\.replay\.capacity_rows to"
    with pytest.raises(ResourceError, match=message):
        replay(capacity_rows=rows)


# ---------------------------------------------------------------- saved and restored


def test_saved_and_restored_gives_the_same_samples() -> None:
    options = {"capacity_rows": 400, "batch_size": 16, "prioritized": True, "n_step": 2}
    one, other = replay(**options), replay(seed=99, **options)
    saved: dict[int, dict[str, torch.Tensor]] = {}
    for i in range(30):  # more than fits
        put(one, 1000 * i, num_envs=4)
        batch = take(one)
        batch.td_error = batch.reward[:, 0].abs() + 0.1
        one.done(batch)
        if i in (20, 29):
            saved |= {number: chunk() for number, chunk in one.chunks().items()}
    state = one.state_dict()
    other.load_state_dict(state)
    for number, arrays in saved.items():
        other.load_chunk(number, arrays)
    assert (other.inserted, other.ready_rows) == (one.inserted, one.ready_rows)
    for i in range(5):
        put(one, 5 * i, num_envs=4)
        put(other, 5 * i, num_envs=4)
        mine, its = take(one), take(other)
        for name in mine.arrays:
            assert mine.arrays[name].tolist() == its.arrays[name].tolist()
        for name in ("reward", "discount", "weight", "index"):
            assert getattr(mine, name).tolist() == getattr(its, name).tolist(), name
        for s, batch in ((one, mine), (other, its)):
            batch.td_error = batch.reward[:, 0].abs()
            s.done(batch)


@pytest.mark.parametrize(
    "other",
    [
        {"update_interval": 1},
        {"update_interval": 64},
        {"updates_per_interval": 1},
        {"updates_per_interval": 50},
        {"start_rows": 300},  # more than are there: it waits for them
        {"start_rows": 1},
        {"batch_size": 64},
    ],
    ids=lambda other: "{}={}".format(*next(iter(other.items()))),
)
def test_another_rate_of_updates_counts_from_the_checkpoint(other: dict[str, int]) -> None:
    options = {"capacity_rows": 400, "start_rows": 40, "batch_size": 4, "update_interval": 8}
    options |= {"updates_per_interval": 5}
    one = replay(**options)
    for i in range(25):
        put(one, i, num_envs=2)
        while one.ready and i < 20:  # in the end updates are behind
            one.done(take(one))
    resumed, updates = replay(ahead=1, **(options | other)), 0
    resumed.load_state_dict(one.state_dict())
    config = resumed._config
    first = max(config.start_rows, config.batch_size, one.inserted)
    for i in range(26):
        while resumed.ready:
            resumed.done(take(resumed))
            updates += 1
        bursts = 1 + (resumed.inserted - first) // config.update_interval
        assert updates == max(0, bursts) * config.updates_per_interval
        assert resumed.may_begin()
        if i == 12:  # once more, as it is now
            again = replay(ahead=1, **(options | other))
            again.load_state_dict(resumed.state_dict())
            resumed = again
        put(resumed, i, num_envs=2)


def test_the_same_rate_of_updates_counts_on() -> None:
    options = {"capacity_rows": 400, "start_rows": 40, "batch_size": 4, "update_interval": 10}
    one, other = replay(**options), replay(**options)
    for i in range(25):
        put(one, i, num_envs=2)
        while one.ready and i < 20:
            one.done(take(one))
    other.load_state_dict(one.state_dict())
    assert one._due() == other._due() == 4
    put(one, 0)
    put(other, 0)
    assert one._due() == other._due()


def test_rows_during_a_checkpoint_join_no_two_episodes() -> None:
    # Acting continues: what is written of a column may be newer than the priorities saved before.
    one, other = replay(), replay(batch_size=8)
    for i in range(6):  # full
        put(one, 10 * i)
    state, chunks = one.state_dict(), one.chunks()
    put(one, 100, step_types=(MID, LAST, FIRST, MID, ABORTED))
    other.load_state_dict(state)
    for number, chunk in chunks.items():
        other.load_chunk(number, chunk())
    old = {10.0 * i + t for i in range(1, 6) for t in range(4)}
    # 101 is LAST, before the first row of another episode; what 103 led to is ABORTED.
    assert views(other, 200) == {100, 102} | old


def prefetching(seed: int = 0, device: torch.device = CPU) -> ReplayStorage:
    """A prioritized replay that draws ahead on a CPU too: the stream alone is CUDA's."""
    config = ReplayConfig(
        capacity_rows=80,
        start_rows=1,
        batch_size=16,
        update_interval=4,
        unroll_steps=4,
        prioritized=True,
        n_step=2,
    )
    storage = ReplayStorage(config, SPEC, GAMMA, None, device, {}, seed)
    storage._prefetches = True
    return storage


def learn(storage: ReplayStorage) -> ReplayBatch:
    """Take, set errors, done: an update."""
    batch = take(storage)
    batch.td_error = batch.reward[:, 0].abs() + 0.1
    storage.done(batch)
    return batch


def test_a_batch_drawn_ahead_has_the_rows_and_priorities_of_then() -> None:
    s = prefetching()
    put(s, 0, num_envs=4)
    first = take(s)  # and the second is drawn
    put(s, 1000, num_envs=4)
    first.td_error = torch.where(first.index == 3, 100.0, 0.0)
    s.done(first)
    second, third = learn(s), take(s)
    assert second.arrays[VIEW].max() < 1000
    assert second.weight.tolist() == [1.0] * 16  # all alike, as before the first update
    # The third was drawn with the second: of the new rows too, and of row 3 above all.
    assert third.arrays[VIEW].max() >= 1000
    assert (third.index == 3).sum() > (second.index == 3).sum()


@pytest.mark.parametrize(
    "device",
    [
        CPU,
        pytest.param(
            torch.device("cuda"),
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
            ],
        ),
    ],
    ids=["cpu", "cuda"],
)
def test_resumed_run_learns_from_the_prefetched_batch(device: torch.device) -> None:
    one, other = prefetching(device=device), prefetching(seed=99, device=device)
    for i in range(6):  # more than fits
        put(one, 1000 * i, num_envs=4)
        learn(one)
    put(one, 7000, num_envs=4)  # over rows of the batch that is drawn already
    file = io.BytesIO()
    chunks = {number: chunk() for number, chunk in one.chunks().items()}
    torch.save({"chunks": chunks, "state": one.state_dict()}, file)
    saved = torch.load(io.BytesIO(file.getvalue()), map_location="cpu", weights_only=True)
    other.load_state_dict(saved["state"])
    for number, arrays in saved["chunks"].items():
        other.load_chunk(number, arrays)
    for i in range(5):
        mine, its = learn(one), learn(other)
        if i == 0:
            assert mine.arrays[VIEW].max() < 7000
        for part in ("arrays", "next_arrays"):
            for name, array in getattr(mine, part).items():
                assert array.tolist() == getattr(its, part)[name].tolist(), name
        for name in ("reward", "discount", "weight", "index"):
            assert getattr(mine, name).tolist() == getattr(its, name).tolist(), name
        assert one._tree.leaves.tolist() == other._tree.leaves.tolist()
        put(one, 100 * i, num_envs=4)
        put(other, 100 * i, num_envs=4)


def test_errors_of_a_prefetched_batch_raise_no_newer_row() -> None:
    one, other = prefetching(), prefetching()
    put(one, 0, num_envs=20)
    learn(one)
    state, chunks = one.state_dict(), one.chunks()
    put(one, 1000, num_envs=20, step_types=(MID, LAST, FIRST, MID, ABORTED))  # over all of them
    other.load_state_dict(state)
    for number, chunk in chunks.items():
        other.load_chunk(number, chunk())
    assert {int(i) % 4 for i in learn(other).index} == {0, 1, 2, 3}
    acted = other._tree.leaves.view(20, 4) > 0
    assert acted.tolist() == [[True, False, True, False]] * 20


def test_a_batch_drawn_ahead_in_another_size_is_drawn_anew() -> None:
    one, other = prefetching(), replay(capacity_rows=80, batch_size=8)
    put(one, 0, num_envs=4)
    learn(one)
    other.load_state_dict(one.state_dict())
    assert take(other).size == 8


@pytest.mark.parametrize(
    ("options", "old_file", "expected"),
    [
        ({"prioritized": True, "alpha": 0.5}, False, [0, 2, 3, 4]),
        ({"prioritized": True, "alpha": 1.0}, False, [0, 4, 9, 16]),
        ({"prioritized": True, "alpha": 0.0}, False, [0, 1, 1, 1]),
        ({"prioritized": False, "alpha": 0.5}, False, [0, 1, 1, 1]),
        ({"prioritized": True, "alpha": 1.0}, True, [0, 2, 3, 4]),  # taken as its own
        ({"prioritized": False}, True, [0, 1, 1, 1]),
    ],
)
def test_priorities_follow_the_alpha_of_the_resumed_run(
    options: dict[str, Any], old_file: bool, expected: list[float]
) -> None:
    one = replay(batch_size=3, prioritized=True, alpha=0.5)
    put(one, 0, step_types=(LAST, FIRST, MID, MID, MID))
    batch = take(one)
    batch.td_error = (batch.index + 1.0) ** 2  # 4, 9, 16
    one.done(batch)
    state, other = one.state_dict(), replay(**options)
    if old_file:
        del state["alpha"]
    other.load_state_dict(state)
    for number, chunk in one.chunks().items():
        other.load_chunk(number, chunk())
    put(other, 0)  # at the largest so far
    largest = [expected[-1]] * 4
    assert other._tree.leaves[:8].tolist() == pytest.approx(expected + largest, rel=1e-4)


def test_priorities_begin_alike_where_there_were_none() -> None:
    one, other = replay(), replay(prioritized=True, alpha=0.5)
    put(one, 0)
    other.load_state_dict(one.state_dict())
    put(other, 0)
    assert other._tree.leaves[:8].tolist() == [1.0] * 8


@pytest.mark.parametrize("change", [{"alpha": 0.5}, {"discount": torch.ones(16)}])
def test_a_batch_drawn_ahead_by_other_rules_is_drawn_anew(change: dict[str, Any]) -> None:
    one, other = prefetching(), prefetching(seed=99)
    put(one, 0, num_envs=4)
    learn(one)
    state = one.state_dict()
    part = state["prefetched"] if "discount" in change else state
    part |= change
    other.load_state_dict(state)
    assert other._prefetched is None


def test_a_replay_continues_on_another_kind_of_device() -> None:
    one, other = replay(), replay()
    put(one, 0)
    state = one.state_dict()
    state["generator"] = torch.zeros(16, dtype=torch.uint8)  # as CUDA has them
    other.load_state_dict(state)
    assert take(other).size == 1


def test_only_what_changed_is_saved_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "murmur.learner_service.storage.replay._CHUNK_BYTES", 29 * 5 * 2
    )  # two columns
    s = replay(capacity_rows=32)
    put(s, 0, num_envs=8)
    assert list(s.chunks()) == [0, 1, 2, 3]
    assert not s.chunks()
    put(s, 0, num_envs=3)
    assert list(s.chunks()) == [0, 1]
    put(s, 0)
    assert list(s.chunks()) == [1]


def test_another_size_cannot_be_resumed() -> None:
    one, other = replay(), replay(capacity_rows=48)
    put(one, 0)
    with pytest.raises(ConfigError, match="the checkpoint's replay has 6 columns, this one 12"):
        other.load_state_dict(one.state_dict())

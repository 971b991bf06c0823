"""Rows in are rows out; the shift by one; when acting must wait; what is dropped is counted."""

import pytest
import torch

from murmur.learner_service.learning.returns import lambda_returns
from murmur.learner_service.storage.flight import unroll_length
from murmur.learner_service.storage.rollout import Batch, RolloutStorage, transitions
from murmur.learner_service.storage.storage import Unroll
from murmur.shared.wire.dataset import OBSERVATION
from murmur.shared.wire.spec import AGENT_MASK, ArraySpec, Discrete, EnvSpec
from tests.learner_service.toys import ABORTED, CPU, FIRST, LAST, MID

VIEW = OBSERVATION + "view"
SPEC = EnvSpec("toy", 2, (ArraySpec("view", "float32", (1,)),), Discrete(2))  # unbounded episodes


def storage(length: int = 3, rows: int = 6, lag: int | None = 1) -> RolloutStorage:
    """`rows` agent-transitions make an update: 6 of one environment with 2 agents and L = 3."""
    return RolloutStorage(SPEC, length, rows, lag, CPU)


def fill(unroll: Unroll, value: float, version: int = 0) -> Unroll:
    """Row t of environment i holds value + t + i / 10."""
    while not unroll.full:
        rows = value + unroll.cursor + torch.arange(unroll.num_envs) / 10
        unroll.arrays[VIEW][unroll.cursor] = rows.view(-1, 1, 1)
        unroll.arrays["step_type"][unroll.cursor] = MID
        if unroll.cursor == 0:
            unroll.first_version = version
        unroll.cursor += 1
    return unroll


def taken(batch: Batch | None) -> list[list[float]]:
    """Per environment, the observed rows of agent 0."""
    assert batch is not None
    return [[round(x, 3) for x in column] for column in batch.arrays[VIEW][:, :, 0, 0].T.tolist()]


def test_rows_in_are_rows_out() -> None:
    s = storage(rows=12)
    s.add(fill(s.begin(2, 0, 0), 100))
    assert s.ready
    assert s.ready_rows == 2 * 3  # two environments, three transitions each
    batch = s.sample(0, 0)
    assert taken(batch) == [[100, 101, 102, 103], [100.1, 101.1, 102.1, 103.1]]
    assert batch is not None
    assert batch.version == [0, 0]
    assert s.dropped == 0
    assert not s.ready
    assert s.ready_rows == 0


def test_there_is_no_batch_before_there_are_enough_rows() -> None:
    s = storage(rows=7)  # a second environment is needed
    s.add(fill(s.begin(1, 0, 0), 0))
    assert s.sample(0, 0.01) is None
    s.add(fill(s.begin(1, 0, 1), 10))
    assert taken(s.sample(0, 0)) == [[0, 1, 2, 3], [10, 11, 12, 13]]


def test_last_rows_count_as_no_transition() -> None:
    bounded = EnvSpec("toy", 2, SPEC.observations, SPEC.action, (), 2)
    s = RolloutStorage(bounded, 3, 5, 1, CPU)  # of 3 rows one is LAST: 4 agent-transitions
    s.add(fill(s.begin(1, 0, 0), 0))
    assert not s.ready
    s.add(fill(s.begin(1, 0, 1), 0))
    assert s.ready
    # Of 4 rows one at least is LAST too, an episode of 2 steps having 3 rows: 6 agent-transitions.
    assert RolloutStorage(bounded, 4, 12, 1, CPU).envs_per_update == 2


def test_environments_in_flight_are_limited_by_the_lag() -> None:
    # Two unrolls of 3 * 2 agent-transitions for an update, that of now and two to come.
    assert RolloutStorage(SPEC, 3, 12, 2, CPU).environments_limit == 2 * 3
    assert RolloutStorage(SPEC, 3, 12, None, CPU).environments_limit == 0


def test_transitions_by_hand() -> None:
    batch = Batch(
        {
            "step_type": torch.tensor([[FIRST], [MID], [LAST], [FIRST], [MID]]),
            "reward": torch.tensor([0.0, 1, 2, 0, 4]).view(5, 1, 1),
            "discount": torch.tensor([1.0, 1, 0, 1, 1]).view(5, 1),
        },
        [0],
    )
    t = transitions(batch)
    assert t.reward.flatten().tolist() == [1, 2, 0, 4]
    assert t.discount.flatten().tolist() == [1, 0, 1, 1]
    assert t.next_is_last.flatten().tolist() == [False, True, False, False]
    # the action answered to the LAST row was never played
    assert t.valid.flatten().tolist() == [True, True, False, True]


def test_what_follows_an_agents_death_is_nothing_to_it() -> None:
    batch = Batch(
        {
            "step_type": torch.tensor([[FIRST], [MID], [MID], [MID]]),
            "reward": torch.tensor([[0.0, 0], [1, 1], [2, 2], [4, 4]]).view(4, 1, 2),
            "discount": torch.ones(4, 1),
            OBSERVATION + AGENT_MASK: torch.tensor([[1, 1], [1, 1], [1, 0], [1, 0]]).view(4, 1, 2),
        },
        [0],
    )
    t = transitions(batch)
    assert t.discount.squeeze(1).tolist() == [[1, 1], [1, 0], [1, 0]]
    value = torch.full((3, 1, 2), 10.0)
    target = lambda_returns(t.reward, t.discount, value, t.next_is_last, 0.5, 1.0).squeeze(1)
    # Alive: G_2 = 4 + 5 = 9, G_1 = 2 + 4.5, G_0 = 1 + 3.25. Dead from row 2: G_1 = 2, G_0 = 2.
    assert target[:, 0].tolist() == [4.25, 6.5, 9]
    assert target[:2, 1].tolist() == [2, 2]


def test_transitions_into_an_aborted_row_do_not_count() -> None:
    types = [FIRST, MID, MID, ABORTED, FIRST, ABORTED, FIRST, MID]
    batch = Batch(
        {
            "step_type": torch.tensor(types, dtype=torch.uint8).unsqueeze(1),
            "reward": torch.tensor([0.0, 1, 2, 0, 0, 0, 0, 7]).view(8, 1, 1),
            "discount": torch.ones(8, 1),
        },
        [0],
    )
    t = transitions(batch)
    assert t.valid.flatten().tolist() == [True, True, False, False, False, False, True]
    # Row 2 is the last that there is of the first episode: what came after is its own value.
    assert t.next_is_last.flatten().tolist()[:2] == [False, True]
    value = torch.tensor([10.0, 20, 0, 0, 0, 0, 30]).view(7, 1, 1)  # of rows 1 to 7
    target = lambda_returns(t.reward, t.discount, value, t.next_is_last, 0.5, 1.0).flatten()
    # G_1 = 2 + 0.5 V_2 = 12;  G_0 = 1 + 0.5 G_1 = 7;  G_6 = 7 + 0.5 V_7 = 22
    assert target[t.valid.flatten()].tolist() == [7, 12, 22]


def test_a_failed_start_belongs_to_no_episode() -> None:
    """ABORTED after LAST, twice, and ABORTED after ABORTED: each cuts nothing that was not cut "
    "already."""
    types = [FIRST, MID, LAST, ABORTED, ABORTED, FIRST, MID, ABORTED, ABORTED, FIRST]
    batch = Batch(
        {
            "step_type": torch.tensor(types, dtype=torch.uint8).unsqueeze(1),
            "reward": torch.tensor([0.0, 1, 2, 90, 90, 0, 4, 90, 90, 0]).view(10, 1, 1),
            "discount": torch.tensor([1.0, 1, 0, 1, 1, 1, 1, 1, 1, 1]).unsqueeze(1),
        },
        [0],
    )
    t = transitions(batch)
    assert t.valid.flatten().nonzero().flatten().tolist() == [0, 1, 5]
    value = torch.tensor([10.0, 90, 90, 90, 90, 30, 90, 90, 90]).view(9, 1, 1)  # of rows 1 to 9
    target = lambda_returns(t.reward, t.discount, value, t.next_is_last, 0.5, 1.0).flatten()
    # G_1 = 2: terminated;  G_0 = 1 + 0.5 G_1 = 2;  G_5 = 4 + 0.5 V_6 = 19: row 6 led to nothing.
    assert target[t.valid.flatten()].tolist() == [2, 2, 19]


def test_an_unroll_in_use_again_leaves_a_taken_batch_alone() -> None:
    s = storage()
    first = s.begin(1, 0, 0)
    s.add(fill(first, 0))
    batch = s.sample(0, 0)
    again = s.begin(1, 0, 1)
    assert again is first  # reused
    assert again.cursor == 0
    fill(again, 500)
    assert taken(batch) == [[0, 1, 2, 3]]


def test_one_unroll_may_feed_several_updates() -> None:
    s = storage(rows=12, lag=5)  # two environments an update
    s.add(fill(s.begin(5, 0, 0), 0))
    assert [row[0] for row in taken(s.sample(0, 0))] == [0.0, 0.1]
    assert s.ready_rows == 3 * 3
    assert [row[0] for row in taken(s.sample(1, 0))] == [0.2, 0.3]
    assert not s.ready
    s.add(fill(s.begin(1, 5, 0), 7))
    batch = s.sample(2, 0)
    assert [row[0] for row in taken(batch)] == [0.4, 7.0]


@pytest.mark.parametrize(
    ("ready", "opened", "learning", "lag", "may"),
    [
        (0, 0, False, 0, True),  # acts at once, is learned from at once
        (0, 0, True, 0, False),  # the running update will end before its turn comes
        (0, 0, True, 1, True),
        (1, 0, False, 0, True),  # half an update's rows wait; these complete it
        (2, 0, False, 0, False),  # an update waits: it comes first
        (2, 0, False, 1, True),
        (2, 0, True, 1, False),
        (0, 2, False, 0, False),  # begun earlier: they come first as well
        (1, 1, False, 0, False),
        (3, 4, True, 3, False),
        (3, 4, True, 4, True),
        (9, 9, True, None, True),  # lockstep bounds it
    ],
)
def test_when_acting_may_begin(
    ready: int, opened: int, learning: bool, lag: int | None, may: bool
) -> None:
    s = storage(rows=12, lag=lag)  # two environments an update
    for i in range(ready):
        s.add(fill(s.begin(1, i, 0), 0))
    for i in range(opened):
        s.begin(1, ready + i, 0)
    s.updating = learning
    assert s.may_begin() == may


def test_what_may_begin_is_never_dropped_if_sessions_fit_updates() -> None:
    """Acting as far ahead as is allowed, every row is young enough when its turn comes."""
    for lag in (0, 1, 2):
        s, learned, begun = storage(rows=12, lag=lag), 0, 0
        for version in range(20):
            while s.may_begin():
                s.add(fill(s.begin(2, 0, begun), 0, version))
                begun += 1
            batch = s.sample(version, 0)
            assert batch is not None
            learned += len(batch.version)
            assert version - min(batch.version) <= lag
            while s.may_begin():  # during the update
                s.add(fill(s.begin(2, 0, begun), 0, version))
                begun += 1
            s.done(batch)
        assert s.dropped == 0
        assert learned == 40


def test_stale_unrolls_are_dropped_whole_and_counted() -> None:
    s = storage(rows=6, lag=1)
    s.add(fill(s.begin(3, 0, 0), 0, version=0))
    s.add(fill(s.begin(1, 3, 0), 50, version=2))
    batch = s.sample(2, 0)
    assert s.dropped == 3 * 3
    assert taken(batch) == [[50, 51, 52, 53]]


def test_no_batch_if_all_unrolls_are_stale() -> None:
    s = storage(rows=6, lag=0)
    s.add(fill(s.begin(2, 0, 0), 0, version=0))
    assert s.sample(1, 0) is None
    assert s.dropped == 6
    assert not s.updating
    assert s.may_begin()


def test_lockstep_takes_by_slot_whatever_the_order_of_arrival() -> None:
    orders = []
    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        s = storage(rows=18, lag=None)
        unrolls = [s.begin(1, slot, 0) for slot in range(3)]
        for slot in order:
            s.add(fill(unrolls[slot], 100 * slot))
        orders.append(taken(s.sample(0, 0)))
    assert orders[0] == orders[1] == orders[2]
    assert [column[0] for column in orders[0]] == [0, 100, 200]


def test_free_running_takes_in_order_of_arrival() -> None:
    s = storage(rows=12)
    a, b = s.begin(1, 0, 0), s.begin(1, 1, 0)
    s.add(fill(b, 100))
    s.add(fill(a, 0))
    assert [column[0] for column in taken(s.sample(0, 0))] == [100, 0]


def test_room_is_announced() -> None:
    s, told = storage(), []
    s.on_room = lambda: told.append(s.may_begin())
    s.add(fill(s.begin(1, 0, 0), 0))
    assert told == []
    batch = s.sample(0, 0)
    assert batch is not None
    s.done(batch)
    assert told == [True, True]


def test_released_unroll_is_used_again() -> None:
    s = storage(rows=6, lag=0)
    unroll = s.begin(1, 0, 0)
    assert not s.may_begin()
    s.release(unroll)
    assert s.may_begin()
    assert s.begin(1, 0, 0) is unroll


def part(s: RolloutStorage, num_envs: int, kinds: list[int], slot: int = 0) -> Unroll:
    """An unroll with only the first few of its rows."""
    unroll = s.begin(num_envs, slot, 0)
    unroll.first_version = 0
    for kind in kinds:
        unroll.arrays["step_type"][unroll.cursor] = kind
        unroll.arrays[VIEW][unroll.cursor] = 100.0 + unroll.cursor
        unroll.cursor += 1
    return unroll


def test_what_an_ended_session_leaves_is_learned_from() -> None:
    s = storage(length=4, rows=16)  # two environments an update
    s.add(fill(s.begin(1, 0, 0), 0))
    assert s.add_open(part(s, 1, [FIRST, MID, MID])) == 1  # row 2, which led to nothing
    assert s.ready_rows == 4 + 2
    batch = s.sample(0, 0)
    assert batch is not None
    assert batch.size == 4 + 2
    assert batch.arrays["step_type"][:, 1].tolist() == [FIRST, MID, MID, ABORTED, ABORTED]
    assert batch.arrays["discount"][3:, 1].tolist() == [1, 1]
    t = transitions(batch)
    assert t.valid[:, 1].tolist() == [True, True, False, False]
    assert t.next_is_last[:2, 1].tolist() == [False, True]  # cut there, as at an unroll's end
    # In use again, it counts in full again.
    s.add(fill(s.begin(1, 0, 0), 0))
    assert s.ready_rows == 4


@pytest.mark.parametrize("kinds", [[FIRST], [LAST, FIRST], [MID, ABORTED, FIRST]])
def test_what_holds_no_step_is_given_back(kinds: list[int]) -> None:
    s = storage(lag=0)
    unroll = part(s, 1, kinds)
    assert not s.may_begin()
    assert s.add_open(unroll) == len(kinds)
    assert s.may_begin()
    assert s.ready_rows == 0


def test_one_environment_between_episodes_delays_no_other() -> None:
    s = storage(length=4, rows=16)  # two environments an update
    unroll = part(s, 2, [FIRST, MID])
    unroll.arrays["step_type"][:2, 1] = torch.tensor([LAST, FIRST], dtype=torch.uint8)
    assert s.add_open(unroll) == 2  # the newest row of each
    batch = s.sample(0, 0)
    assert batch is not None
    assert batch.size == 2
    assert transitions(batch).valid.sum(0).tolist() == [1, 0]


@pytest.mark.parametrize("lag", [None, 5])
def test_waiting_unrolls_are_saved_for_the_next_process(lag: int | None) -> None:
    batches = []
    for restarted in (False, True):
        s = storage(rows=12, lag=lag)  # two environments an update
        s.add(fill(s.begin(3, 0, 0), 0))
        s.sample(0, 0)
        s.add_open(part(s, 1, [FIRST, MID, MID], slot=3))
        if restarted:
            saved, s = s.state_dict(), storage(rows=12, lag=lag)
            assert saved["ready"][0]["arrays"][VIEW].untyped_storage().nbytes() == 4 * 2 * 4
            s.load_state_dict(saved)
        assert s.waiting_rows == 1 * 3 + 1 * 2
        s.add(fill(s.begin(3, 0, 1), 50))
        got = [s.sample(0, 0) for _ in range(2)]
        batches.append(got)
        assert taken(got[0]) == [[0.2, 1.2, 2.2, 3.2], [100, 101, 102, 0]]
        assert [b.size for b in got if b] == [3 + 2, 6]
        assert s.waiting_rows == 3
    assert taken(batches[0][1]) == taken(batches[1][1])


def test_waiting_unrolls_of_another_length_are_kept() -> None:
    s = storage(rows=12)
    s.add(fill(s.begin(1, 0, 0), 0))
    other = storage(length=5, rows=20, lag=1)  # two environments an update
    other.load_state_dict(s.state_dict())
    assert other.waiting_rows == 3
    other.add(fill(other.begin(1, 1, 0), 50))
    batch = other.sample(0, 0)
    assert taken(batch) == [[0, 1, 2, 3, 0, 0], [50, 51, 52, 53, 54, 55]]
    assert batch is not None
    assert batch.size == 3 + 5


def write(unroll: Unroll, value: float, version: int, memory: float | None = None) -> None:
    """One more row, acted on by a policy version."""
    unroll.arrays[VIEW][unroll.cursor] = value
    unroll.arrays["step_type"][unroll.cursor] = MID
    remembered = None if memory is None else torch.full((unroll.num_envs, 2, 1), memory)
    if remembered is not None and unroll.cursor == 0:
        unroll.arrays["memory"][0] = remembered
    unroll.cursor += 1
    unroll.act(version, remembered)


def test_update_takes_what_the_next_would_find_too_old() -> None:
    s = storage(length=4, rows=8, lag=1)  # one environment an update
    slow = s.begin(1, 0, 0)
    for value, version in ((0, 3), (1, 4), (2, 5)):
        write(slow, value, version)
    s.add(fill(s.begin(1, 1, 0), 50, 4))
    batch = s.sample(4, 0)  # at version 5 the first action of `slow` is too old
    assert s.dropped == 0
    assert taken(batch) == [[0, 1, 2, 0, 0], [50, 51, 52, 53, 54]]
    assert batch is not None
    assert (batch.version, batch.size, batch.times) == ([3, 4], 2 + 4, 1.5)
    # The row that ended the first part begins the second: no transition is lost, none comes twice.
    write(slow, 3, 5)
    write(slow, 4, 5)
    s.add(slow)
    assert s.ready_rows == 2
    batch = s.sample(6, 0)
    assert (taken(batch), s.dropped) == ([[2, 3, 4]], 0)


@pytest.mark.parametrize("lag", [1, 2])
def test_due_update_is_sampled_though_environments_connect(lag: int) -> None:
    s = storage(length=0, rows=64, lag=lag)
    s.connect(2)
    unroll = s.begin(2, 0, 0)
    s.add(fill(unroll, 0, version=3))
    assert s.due(3, 0.0)
    s.connect(40)  # an update wants an unroll of each from now on
    assert not s.ready
    stale = s.begin(1, 2, 0)
    s.add(fill(stale, 50, version=0))
    assert s.due(3, 0.0)
    batch = s.sample(3, 0.0)
    assert batch is not None
    assert batch.version == [3, 3]
    assert s.dropped == stale.length
    assert not s.due(3, 0.0)


def test_what_is_dropped_makes_room_before_the_ranks_agree() -> None:
    s, told = storage(rows=6, lag=0), []
    s.on_room = lambda: told.append(s.may_begin())
    s.add(fill(s.begin(2, 0, 0), 0, version=0))
    assert not s.may_begin()
    assert not s.due(1, 0.0)
    assert told == [True]


def test_cut_unroll_continues_from_its_memory() -> None:
    s = RolloutStorage(SPEC, 4, 8, 1, CPU, memory_size=1)
    slow = s.begin(1, 0, 0)
    for row in range(3):
        write(slow, row, row, memory=10.0 + row)
    s.add(fill(s.begin(1, 1, 0), 50, 4))
    batch = s.sample(1, 0)
    assert batch is not None
    assert batch.arrays["memory"][0, :, 0, 0].tolist() == [10, 0]
    assert slow.arrays["memory"].flatten().tolist() == [12, 12]
    assert (slow.start, slow.first_version) == (2, 2)


def test_only_steps_longer_than_the_lag_are_dropped() -> None:
    s = storage(length=4, rows=8, lag=1)
    slow = s.begin(2, 0, 0)
    write(slow, 0, 0)  # no transition yet: it cannot be cut
    for version in (0, 1, 2):
        s.add(fill(s.begin(1, 1, version), 50, version))
        assert s.sample(version, 0) is not None
        assert s.dropped == 0
    for value in range(1, 5):
        write(slow, value, 3)
    s.add(slow)
    batch = s.sample(3, 0)
    assert s.dropped == 2  # the first transition of either environment
    assert taken(batch)[0] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("rows", "environments", "episode", "steps"),
    [
        (4096, 32, 500, 128),  # CartPole: one unroll of each environment makes an update
        (4096, 64, 500, 64),
        (75, 5, 15, 16),  # whole episodes: 15 transitions and the step from LAST to FIRST
        (1600, 64, 25, 26),
        (4096, 1, 10_000, 128),  # an update takes 32 of the only environment
        (4096, 512, 5, 9),
        (300, 32, 0, 16),
        (300, 512, 3, 4),  # whole episodes, and more rows than are asked for
        (4096, 0, 500, 501),  # the number that act is not known
        (4096, 0, 0, 128),
    ],
)
def test_unroll_length_fits_the_environments(
    rows: int, environments: int, episode: int, steps: int
) -> None:
    assert unroll_length(rows, environments, episode) == steps


def test_unroll_of_a_policy_with_memory_holds_an_episode() -> None:
    assert unroll_length(300, 512, 50, remembers=True) == 51
    assert unroll_length(300, 512, 5000, remembers=True) == 128
    assert unroll_length(300, 512, 0, remembers=True) == 128


def test_update_takes_one_unroll_of_each_environment() -> None:
    s = RolloutStorage(SPEC, 0, 2 * 320, 1, CPU)  # 320 joint transitions
    s.expect(4)
    assert (s.length, s.envs_per_update, s.environments_limit) == (80, 4, 0)
    s.connect(40)  # more came than were expected: shorter unrolls, then larger updates
    assert (s.length, s.envs_per_update) == (16, 40)
    s.connect(2)  # most have left: two unrolls of each
    assert (s.length, s.envs_per_update) == (80, 4)


def test_faster_and_slower_sessions_lose_no_row() -> None:
    """Sessions of very different pace, acting as far ahead as they may: every row is learned."""
    for recurrent in (0, 1):
        s = RolloutStorage(SPEC, 16 * recurrent, 2 * 64, 1, CPU, memory_size=recurrent)
        s.connect(4)  # two sessions of two
        unrolls: list[Unroll | None] = [None, None]
        version = sent = learned = 0
        for turn in range(2000):
            for i, every in enumerate((1, 9)):  # the second steps nine times as slowly
                if turn % every:
                    continue
                unroll = unrolls[i]
                if unroll is None:
                    if not s.may_begin():
                        continue
                    unroll = unrolls[i] = s.begin(2, 2 * i, 0)
                else:
                    sent += 2
                write(unroll, 0, version, 0.0 if recurrent else None)
                if unroll.full:
                    s.add(unroll)
                    unrolls[i] = None
            batch = s.sample(version, 0)
            if batch is not None:
                assert version - min(batch.version) <= 1
                learned += batch.size
                version += 1
                s.done(batch)
        open_rows = sum(2 * (u.cursor - 1 - u.start) for u in unrolls if u)
        assert version > 30
        assert s.dropped == 0
        assert learned + s.ready_rows + open_rows == sent


def test_the_oldest_are_learned_from_first() -> None:
    s = storage(rows=6, lag=1)  # one environment an update
    for value, version in ((0, 5), (10, 4), (20, 5), (30, 4)):
        s.add(fill(s.begin(1, 0, 0), value, version))
    got = [taken(s.sample(version, 0))[0][0] for version in (4, 5, 5, 6)]
    assert got == [10, 30, 0, 20]
    s.add(fill(s.begin(3, 0, 0), 50, 7))
    assert taken(s.sample(7, 0))[0][0] == 50
    s.add(fill(s.begin(1, 0, 0), 40, 6))
    assert [taken(s.sample(7, 0))[0][0] for _ in range(3)] == [40, 50.1, 50.2]


def test_a_session_that_begins_later_does_not_push_in_between() -> None:
    """Else its rows would be skipped, and those that an update has had be learned from twice."""
    s = storage(rows=12, lag=None)  # two environments an update
    s.add(fill(s.begin(3, 0, 7), 0))  # the eighth unroll of an old session
    assert taken(s.sample(0, 0)) == [[0, 1, 2, 3], [0.1, 1.1, 2.1, 3.1]]
    s.add(fill(s.begin(3, 3, 0), 50))  # the first one of a new session
    assert taken(s.sample(0, 0)) == [[0.2, 1.2, 2.2, 3.2], [50, 51, 52, 53]]
    assert taken(s.sample(0, 0)) == [[50.1, 51.1, 52.1, 53.1], [50.2, 51.2, 52.2, 53.2]]

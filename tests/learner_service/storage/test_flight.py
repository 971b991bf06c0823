"""What is chosen to be in flight, by hand; and that it keeps the slower station busy."""

import heapq
from dataclasses import replace

import pytest

from murmur.learner_service.storage.flight import Demand, Flight, Speed, plan, useful_environments
from murmur.learner_service.storage.rollout import RolloutStorage
from murmur.shared.wire.spec import ArraySpec, Discrete, EnvSpec
from tests.learner_service.toys import CPU, MID

OPEN = Flight(0, 0, None)
SPEC = EnvSpec("toy", 1, (ArraySpec("view", "float32", (1,)),), Discrete(2))


def test_useful_environments_by_hand() -> None:
    # A turn takes 2 ms, a row 0.1 ms of learning: 20 environments feed the learner, 25 to be sure.
    speed = Speed(2e-3, 1e-4)
    assert useful_environments(speed, 1000) == 25
    assert useful_environments(speed, 1000, session=16) == 32  # two whole sessions
    assert useful_environments(speed, 10) == 10  # all there are: the learner waits for them


@pytest.mark.parametrize(
    ("turn_s", "learn_s", "given", "expected"),
    [
        # 100 environments bring 50 k rows/s, the learner takes 100 k: all act, 3200 rows are 32 of
        # each, and rows one update old suffice.
        (2e-3, 1e-5, OPEN, Flight(32, 100, 1)),
        # The learner takes 10 k rows/s, which 20 environments bring, 25 to be sure: 128 of each.
        (2e-3, 1e-4, OPEN, Flight(128, 25, 1)),
        # 50 k rows/s both: neither is to wait for the other's jitter.
        (2e-3, 2e-5, OPEN, Flight(32, 100, 2)),
        # 64 steps are given: 50 unrolls are the rows of an update, 100 are needed for all to act.
        (2e-3, 1e-5, Flight(64, 0, None), Flight(64, 100, 1)),
        # Two updates of 50 have room for all.
        (2e-3, 1e-5, Flight(64, 0, 2), Flight(64, 50, 2)),
        (2e-3, 1e-5, Flight(64, 50, None), Flight(64, 50, 2)),
        # No more than 4 is chosen; what is given stays, enough or not.
        (2e-3, 1e-5, Flight(128, 25, None), Flight(128, 25, 4)),
        (2e-3, 1e-5, Flight(128, 25, 1), Flight(128, 25, 1)),
        (2e-3, 1e-5, Flight(128, 10, 0), Flight(128, 25, 0)),  # 25 hold the 3200 rows
    ],
)
def test_plan_by_hand(turn_s: float, learn_s: float, given: Flight, expected: Flight) -> None:
    assert plan(Speed(turn_s, learn_s), Demand(3200, 100), given) == expected


def test_update_has_room_for_a_whole_session() -> None:
    # snakes: 100 rows, sessions of 16; a learner so slow that one environment would feed it.
    demand = Demand(100, 32, session=16, max_episode_steps=200)
    assert plan(Speed(1e-3, 1e-2), demand, OPEN) == Flight(16, 16, 1)


def simulate(
    storage: RolloutStorage, sessions: int, size: int, speed: Speed, updates: int = 30
) -> tuple[float, float]:
    """Virtual time: sessions fill unrolls, one learner takes them.

    Returns:
        the share of time the learner learns, over the second half; environment rows a second.
    """
    storage.connect(sessions * size)
    now = learning_until = busy = rows = since = 0.0
    events: list[tuple[float, int, int]] = []  # (time, 0: update ends, 1: unroll full; session)
    open_unrolls = {}
    waiting, version, batch = list(range(sessions)), 0, None
    while version < updates:
        while waiting and storage.may_begin():
            i = waiting.pop(0)
            unroll = open_unrolls[i] = storage.begin(size, i * size, 0)
            unroll.first_version = version
            jitter = 1 + 0.1 * ((7919 * (i + 3 * version)) % 101 / 50 - 1)
            took = storage.length * speed.turn_s * jitter
            heapq.heappush(events, (now + took, 1, i))
        if batch is None and storage.ready:
            batch = storage.sample(version, 0.0)
            assert batch is not None
            assert storage.dropped == 0
            took = batch.size * speed.learn_s
            heapq.heappush(events, (now + took, 0, -1))
            if version >= updates // 2:
                since = since or now
                busy, rows = busy + took, rows + batch.size
            continue
        now, kind, i = heapq.heappop(events)
        if kind == 0:
            assert batch is not None
            storage.done(batch)
            batch, version = None, version + 1
            learning_until = now
        else:
            unroll = open_unrolls.pop(i)
            unroll.arrays["step_type"].fill_(MID)
            unroll.cursor = unroll.length + 1
            storage.add(unroll)
            waiting.append(i)
    return busy / (learning_until - since), rows / (learning_until - since)


def test_storage_keeps_to_what_was_chosen() -> None:
    s = RolloutStorage(SPEC, 0, 3200, 1, CPU)
    s.begin(10, 0, 0)  # a session of 10
    s.connect(100)
    assert s.measured(Speed(2e-3, 2e-5), any_lag=True) == Flight(32, 100, 2)
    assert s.chosen == {
        "environments": 100,
        "unroll_steps": 32,
        "unrolls_per_update": 100,
        "max_policy_lag": 2,
    }
    assert s.environments_limit == 0
    s.connect(200)  # unrolls follow the environments; the lag stays
    assert (s.length, s.envs_per_update, s.chosen["max_policy_lag"]) == (25, 130, 2)
    s.connect(0)
    assert s.length == 128


FORMATION = {"rows": 4096, "learn_s": 20e-3 / 4096, "turn_s": 0.6e-3}  # as on an H200


def test_limit_of_today_leaves_the_learner_waiting() -> None:
    """An unroll of 64 steps takes 38 ms, an update 20 ms, and 128 environments act at once."""
    s = RolloutStorage(SPEC, 64, 4096, 1, CPU, unrolls_per_update=64)
    speed = Speed(FORMATION["turn_s"], FORMATION["learn_s"])
    busy, _ = simulate(s, 44, 16, speed)
    assert 0.6 < busy < 0.7


@pytest.mark.parametrize("length", [0, 64])
@pytest.mark.parametrize(
    ("turn_s", "learn_s"), [(0.6e-3, 5e-6), (6e-3, 5e-6), (3.5e-3, 5e-6), (0.6e-3, 1e-7)]
)
def test_chosen_flight_keeps_the_slower_station_busy(
    length: int, turn_s: float, learn_s: float
) -> None:
    speed, sessions, size = Speed(turn_s, learn_s), 44, 16
    s = RolloutStorage(SPEC, length, 4096, 1, CPU)
    s.release(s.begin(size, 0, 0))
    s.connect(sessions * size)
    s.measured(speed, any_lag=True)
    _, rate = simulate(s, sessions, size, speed)
    possible = min(1 / learn_s, sessions * size / turn_s)
    assert rate > 0.85 * possible


def test_lag_of_two_gains_where_both_are_as_fast() -> None:
    speed = Speed(44 * 16 * 5e-6, 5e-6)
    rates = []
    for given in (Flight(0, 0, 1), OPEN):
        s = RolloutStorage(SPEC, 0, 4096, 1, CPU)
        s.release(s.begin(16, 0, 0))
        s.connect(44 * 16)
        s.measured(speed, any_lag=given.max_policy_lag is None)
        rates.append(simulate(s, 44, 16, speed)[1])
    assert rates[1] > 1.03 * rates[0]


def test_given_numbers_are_not_overridden() -> None:
    given = Flight(40, 0, 3)
    demand = Demand(3200, 100)
    for speed in (Speed(1e-3, 1e-6), Speed(1e-3, 1e-3)):
        chosen = plan(speed, demand, given)
        assert (chosen.unroll_steps, chosen.max_policy_lag) == (40, 3)
        chosen = plan(speed, demand, replace(given, unroll_steps=0, unrolls_per_update=90))
        assert chosen.unrolls_per_update == 90

"""The simulation's rates, by hand: costs are round and do not vary."""

from dataclasses import replace

import pytest

from murmur.learner_service.storage.flight import Flight
from murmur.plan.model import Costs, Outcome, Replays, System
from murmur.plan.simulate import Limits, Simulation

COSTS = Costs(step_s=1e-3, message_s=1e-4, batch_s=1e-4, act_s=2e-4, update_s=0.0)
NEVER = Flight(unroll_steps=16, unrolls_per_update=10**9, max_policy_lag=10**6)
ONE = System(cores=8, workers=1, sessions=1, envs=4, learning=NEVER, costs=COSTS)
SHORT = Limits(messages=2_000, warm=200, least=500, updates=4)


def run(system: System) -> Outcome:
    return Simulation(system, SHORT).run()


def test_one_session_goes_round_in_the_sum_of_its_costs() -> None:
    # 1 ms step + 0.1 message + 0.1 batch + 0.2 act = 1.4 ms for 4 rows.
    seen = run(ONE)
    assert seen.rows == pytest.approx(4 / 1.4e-3)
    assert seen.turn_s == pytest.approx(1.4e-3)
    assert seen.busy["workers"] == pytest.approx(1 / 1.4)
    assert seen.busy["cores"] == pytest.approx(1 / 8)


def test_time_on_the_way_counts_twice() -> None:
    # 1.4 ms + 2 x 0.3 ms
    seen = run(replace(ONE, costs=replace(COSTS, hop_s=3e-4)))
    assert seen.rows == pytest.approx(4 / 2e-3)


def test_two_sessions_keep_their_worker_busy() -> None:
    # While one steps for 1 ms, the other's message travels and is answered in 0.4 ms.
    seen = run(replace(ONE, sessions=2))
    assert seen.rows == pytest.approx(4 / 1e-3)
    assert seen.busy["workers"] == pytest.approx(1)


def test_an_interpreter_limits_many_workers() -> None:
    # Each message takes 0.1 ms of the interpreter, and each batch 0.1 ms.
    seen = run(replace(ONE, cores=256, workers=128, sessions=2))
    assert seen.busy["interpreter"] > 0.9
    messages = seen.busy["interpreter"] / (1e-4 + 1e-4 / seen.batch)
    assert seen.rows == pytest.approx(4 * messages, rel=0.02)


def test_copies_and_grpc_need_no_interpreter() -> None:
    # A session goes round in 1.4 + 0.5 + 0.3 ms; many share the interpreter for 0.1 ms a message.
    costs = replace(COSTS, io_message_s=5e-4, copy_message_s=3e-4)
    assert run(replace(ONE, costs=costs)).rows == pytest.approx(4 / 2.2e-3)
    many = replace(ONE, cores=256, workers=64, costs=replace(costs, copy_message_s=0.0))
    assert run(many).rows == pytest.approx(run(replace(many, costs=COSTS)).rows, rel=0.1)


def test_one_processor_shares_all_work() -> None:
    # Nothing waits but for the processor: 1 ms + 0.1 + (0.1 + 0.2) / batch of it for each message.
    seen = run(replace(ONE, cores=1, workers=4))
    assert seen.busy["cores"] == pytest.approx(1)
    assert seen.rows == pytest.approx(4 / (1.1e-3 + 3e-4 / seen.batch), rel=0.01)


def test_other_programs_take_their_share() -> None:
    alone = run(replace(ONE, cores=1, workers=4))
    beside = run(replace(ONE, cores=1, workers=4, others=0.5))
    assert beside.rows == pytest.approx(alone.rows * 0.5, rel=0.1)


def test_a_slow_learner_sets_the_rate() -> None:
    # 2 x 4 rows x 16 steps = 8 unrolls an update; one takes 100 ms: 128 rows each 100 ms.
    slow = replace(COSTS, update_s=0.1)
    learning = Flight(unroll_steps=16, unrolls_per_update=8, max_policy_lag=1)
    seen = run(replace(ONE, sessions=2, learning=learning, costs=slow))
    assert seen.updates == pytest.approx(10, rel=0.01)
    assert seen.rows == pytest.approx(1280, rel=0.01)
    assert seen.busy["learning"] == pytest.approx(1, abs=0.01)
    assert seen.blocked > 0.5


def test_updates_cost_what_their_rows_do() -> None:
    # 8 unrolls of 16 rows: 128 rows x 1 ms.
    slow = replace(COSTS, update_row_s=1e-3)
    learning = Flight(unroll_steps=16, unrolls_per_update=8, max_policy_lag=1)
    seen = run(replace(ONE, sessions=2, learning=learning, costs=slow))
    assert seen.update_rows == 128
    assert seen.update_s == pytest.approx(0.128)


def test_no_lag_means_taking_turns() -> None:
    # One session: 16 turns of 1.4 ms fill an unroll, then 50 ms of learning, then again.
    costs = replace(COSTS, update_s=0.05)
    learning = Flight(unroll_steps=16, unrolls_per_update=4, max_policy_lag=0)
    seen = run(replace(ONE, learning=learning, costs=costs))
    # The update begins 0.2 ms before the row that fills the unroll would have been acted on.
    assert 1 / seen.updates == pytest.approx(16 * 1.4e-3 + 0.05, rel=0.02)
    assert seen.lag == 0


def test_lag_one_hides_the_shorter_of_acting_and_learning() -> None:
    costs = replace(COSTS, update_s=0.05)
    learning = Flight(unroll_steps=16, unrolls_per_update=4, max_policy_lag=1)
    seen = run(replace(ONE, learning=learning, costs=costs))
    assert 1 / seen.updates == pytest.approx(0.05, rel=0.02)
    assert seen.lag == pytest.approx(1, abs=0.01)


def test_rows_that_a_slow_worker_brings_too_late_are_dropped() -> None:
    # Unrolls of one step: while a worker takes long, the others bring more updates than the lag.
    costs = replace(COSTS, update_s=1e-5, jitter=1.0)
    learning = Flight(unroll_steps=1, unrolls_per_update=8, max_policy_lag=2)
    simulation = Simulation(replace(ONE, workers=4, learning=learning, costs=costs), SHORT)
    seen = simulation.run()
    assert simulation.ranks[0].storage.dropped > 0
    assert 0 < seen.updates * 8 < seen.rows


def test_sync_takes_turns_and_waits_for_all() -> None:
    # 2 workers step at once: 1 ms + 2 messages 0.2 + batch 0.1 + act 0.2 = 1.5 ms for 8 rows;
    # after 16 of them 50 ms of learning.
    costs = replace(COSTS, update_s=0.05)
    learning = Flight(unroll_steps=16, unrolls_per_update=8, max_policy_lag=None)
    seen = run(replace(ONE, workers=2, learning=learning, costs=costs, sync=True))
    assert seen.batch == 2
    assert 1 / seen.updates == pytest.approx(16 * 1.5e-3 + 0.05, rel=0.02)


def test_replay_updates_come_at_their_interval() -> None:
    # An update for every 64 rows, at 4 rows each 1.4 ms: one each 22.4 ms, though it takes 1 ms.
    learning = Replays(8, 64, 64, 1, 32, 1)
    seen = run(replace(ONE, learning=learning, costs=replace(COSTS, update_s=1e-3)))
    assert 1 / seen.updates == pytest.approx(22.4e-3, rel=0.02)
    assert seen.update_rows == 32


def test_replay_lets_acting_wait_for_updates_due() -> None:
    # An update a row, 10 ms each: 100 rows a second, however fast the environments are.
    learning = Replays(8, 8, 1, 1, 32, 1)
    seen = run(replace(ONE, learning=learning, costs=replace(COSTS, update_s=1e-2)))
    assert seen.updates == pytest.approx(100, rel=0.02)
    assert seen.rows == pytest.approx(100, rel=0.1)


def test_ranks_learn_at_the_same_time() -> None:
    # Two ranks, each as ONE with lag 1 and updates of 50 ms and 10 ms of exchange.
    costs = replace(COSTS, update_s=0.05)
    learning = Flight(unroll_steps=16, unrolls_per_update=4, max_policy_lag=1)
    seen = run(replace(ONE, workers=2, learning=learning, costs=costs, ranks=2, exchange_s=0.01))
    assert 1 / seen.updates == pytest.approx(0.06, rel=0.02)
    assert seen.rows == pytest.approx(2 * 64 / 0.06, rel=0.02)
    assert seen.peers == pytest.approx(0.01 / 0.06, rel=0.05)


def test_many_ranks_are_so_many_times_as_fast_as_few() -> None:
    learning = Flight(unroll_steps=16, unrolls_per_update=4, max_policy_lag=1)
    four = replace(ONE, cores=32, workers=4, learning=learning, costs=replace(COSTS, update_s=0.05))
    few, many = (run(replace(four, cores=8 * n, workers=n, ranks=n)) for n in (4, 64))
    assert many.rows == pytest.approx(16 * few.rows)
    assert many.updates == pytest.approx(few.updates)


def test_a_gpu_leaves_processors_free() -> None:
    # Acting and updates do not need processors: 1 ms + 0.1 + 0.1 of them a message.
    costs = replace(COSTS, update_s=0.05, device=True)
    learning = Flight(unroll_steps=16, unrolls_per_update=4, max_policy_lag=1)
    seen = run(replace(ONE, learning=learning, costs=costs))
    messages = seen.rows / 4
    assert seen.busy["cores"] == pytest.approx(messages * 1.2e-3 / 8, rel=0.01)
    assert seen.busy["device"] > 0.99


def test_more_rows_are_more_minibatches_on_a_gpu() -> None:
    # 50 ms for 32 rows; an update takes 64: 100 ms.
    costs = replace(COSTS, update_s=0.05, device=True, update_rows=32)
    learning = Flight(unroll_steps=16, unrolls_per_update=4, max_policy_lag=1)
    assert run(replace(ONE, learning=learning, costs=costs)).update_s == pytest.approx(
        0.1, rel=0.05
    )


def test_eager_updates_share_the_interpreter() -> None:
    # Every fourth update takes 250 ms of the interpreter, in turns of 0.5 ms with serving, which
    # needs 0.2 ms a message: 200 ms on average, or a little more.
    costs = replace(COSTS, update_s=0.02, device=True, update_eager_s=0.25, eager=0.25)
    learning = Flight(unroll_steps=16, unrolls_per_update=4, max_policy_lag=1)
    seen = run(replace(ONE, learning=learning, costs=costs))
    assert 0.75 * 0.02 + 0.25 * 0.25 < seen.update_s < 1.3 * (0.75 * 0.02 + 0.25 * 0.25)
    assert seen.busy["device"] < 0.5 < seen.busy["learning"]


def test_a_narrow_link_sets_the_rate() -> None:
    # Messages of 1 MB over 100 MB/s: 100 a second.
    costs = replace(COSTS, message_bytes=1e6)
    seen = run(replace(ONE, workers=8, cores=32, costs=costs, link_bytes_per_s=1e8))
    assert seen.rows == pytest.approx(4 * 100, rel=0.01)
    assert seen.busy["network"] == pytest.approx(1, abs=0.01)


def test_the_same_seed_gives_the_same_forecast() -> None:
    system = replace(ONE, workers=3, costs=replace(COSTS, jitter=0.3))
    assert run(system) == run(system)

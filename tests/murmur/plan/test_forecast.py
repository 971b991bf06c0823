"""What a forecast is made of, by hand: costs of records, sizes, exchanges, bottlenecks, hours."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from murmur.cli import app
from murmur.learner_service.storage.flight import Flight, Speed
from murmur.plan import setup, stated
from murmur.plan.costs import Window, costs_of, line, load_costs, run_window, window
from murmur.plan.forecast import (
    Basis,
    Size,
    bottleneck,
    forecast,
    gains,
    learning_of,
    of_outcome,
    sizes_up_to,
    system_of,
    workers_for,
)
from murmur.plan.model import Costs, Outcome, Replays
from murmur.plan.setup import calibrated, plan_config
from murmur.plan.show import show
from murmur.plan.simulate import Limits
from murmur.runs.run_folder import RunFolder
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.config.files import load
from murmur.shared.process.errors import ConfigError
from murmur.shared.process.files import write_json
from murmur.shared.wire.spec import ArraySpec, Discrete, EnvSpec

SPEC = EnvSpec("spread", 3, (ArraySpec("x", "float32", (18,)),), Discrete(5), max_episode_steps=25)
COSTS = Costs(step_s=1e-3, message_s=1e-4, batch_s=1e-4, act_s=2e-4, update_s=0.01, parameters=1000)
SHORT = Limits(messages=1_000, warm=100, least=200, updates=2)


def spread(*changes: str) -> ExperimentConfig:
    return plan_config(load("spread", ["env_server.envs_per_worker=8", *changes], {}))


def basis(*changes: str, costs: Costs = COSTS) -> Basis:
    return Basis(spread(*changes), costs, SPEC, stated.network("nvlink"))


def record(at: float, times: float) -> dict[str, Any]:
    """After `times` times the same work."""
    states = {"wait_environments": 5.0, "store": 2.0, "reply": 1.0, "act": 1.0}
    return {
        "kind": "progress",
        "time": at,
        "updates": 10 * times,
        "rows_received": 8000 * times,
        "rows_trained": 7000 * times,
        "env_steps_received": 7600 * times,
        "ledger": {
            "inference": {k: v * times for k, v in states.items()},
            "learner": {"forward": 3.0 * times, "wait_rows": 6.0 * times},
        },
        "work": {
            "requests": 1000.0 * times,
            "batches": 500.0 * times,
            "received_bytes": 4e6 * times,
            "cpu_s": 6.5 * times,
            "cpu_s/grpc": 0.4 * times,
            "cpu_s/inference": 2.0 * times,
            "cpu_s/learner": 3.5 * times,
        },
    }


def test_window_splits_processor_time_by_ledger_states() -> None:
    seen = window(record(0.0, 1), record(10.0, 2))
    assert (seen.seconds, seen.messages, seen.batch, seen.updates) == (10, 1000, 2, 10)
    # Of 4 s at work the policy has 1, so a quarter of 2 CPU seconds; gRPC's own threads have
    # 6.5 - 0.4 - 2.0 - 3.5 = 0.6.
    assert (seen.act_s, seen.host_s, seen.learn_s) == pytest.approx((0.5, 1.5, 3.5))
    assert (seen.grpc_s, seen.io_s, seen.copy_s) == pytest.approx((0.4, 0.6, 0.0))


def test_copies_are_told_from_what_holds_the_interpreter() -> None:
    later = record(10.0, 2)
    later["ledger"]["inference"] |= {"transfer": 4.0}  # of 8 s at work, in 2 CPU seconds
    seen = window(record(0.0, 1), later)
    assert (seen.act_s, seen.host_s, seen.copy_s) == pytest.approx((0.25, 0.75, 1.0))
    assert costs_of([replace(seen, workers_s=1.0)]).copy_message_s == pytest.approx(1e-3)


def test_costs_are_per_message_batch_and_row() -> None:
    seen = replace(window(record(0.0, 1), record(10.0, 2)), workers_s=0.7)
    costs = costs_of([seen])
    assert costs.step_s == pytest.approx(0.7e-3)
    assert (costs.message_s, costs.io_message_s) == pytest.approx((0.4e-3, 0.6e-3))
    # 1.5 s / 500 batches = 3 ms for 2 messages: 0.7 of it by the message.
    assert (costs.batch_s, costs.batch_message_s) == pytest.approx((0.9e-3, 1.05e-3))
    assert (costs.act_s, costs.act_message_s) == pytest.approx((1e-3, 0))
    assert costs.update_row_s == pytest.approx(3.5 / 7000)
    assert costs.steps_per_row == pytest.approx(0.95)
    assert costs.message_bytes == 4000


def test_two_windows_tell_a_batch_from_its_messages() -> None:
    # 1 message: 3, 3 messages: 7, so 1 + 2 a message.
    assert line([(1, 3), (3, 7)], 0.5) == pytest.approx((1, 2))
    assert line([(1, 3), (3, 2)], 0.5) == pytest.approx((2.5, 0))  # never negative
    assert line([(2, 3), (2, 3)], 0.5) == pytest.approx((1.5, 0.75))


def test_a_window_without_rows_says_so() -> None:
    with pytest.raises(ConfigError, match="no environment row came in 10 s"):
        window(record(0.0, 1), record(10.0, 1))


def test_costs_of_a_run_leave_out_its_warm_up(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("environment: {name: spread}")
    lines = [record(float(t), t) for t in range(1, 31)]
    (tmp_path / "progress.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    assert run_window(RunFolder.open(tmp_path)).seconds == pytest.approx(20, abs=1)


def test_costs_of_a_run_are_its_own_but_for_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "_STEP_S", 0.02)
    (tmp_path / "config.yaml").write_text("environment: {name: spread}")
    lines = [record(float(t), t) for t in range(1, 31)]
    (tmp_path / "progress.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    costs, source = setup.costs_of_run(spread(), RunFolder.open(tmp_path))
    assert costs.message_s + costs.io_message_s == pytest.approx(1e-3)
    assert costs.update_row_s == pytest.approx(3.5 / 7000)
    assert 107e-6 < costs.step_s < 0.1  # a worker's message, and the step beside it
    assert source.startswith(f"measured: 20 s of '{tmp_path.name}'")


def test_costs_of_an_older_run_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("environment: {name: spread}")
    old = record(1.0, 1)
    del old["work"]
    (tmp_path / "progress.jsonl").write_text(json.dumps(old) + "\n")
    with pytest.raises(ConfigError, match="no record of its work"):
        run_window(RunFolder.open(tmp_path))


def test_kept_costs_come_back(tmp_path: Path) -> None:
    write_json(tmp_path / "costs.json", vars(COSTS))
    assert load_costs(tmp_path / "costs.json") == COSTS
    (tmp_path / "costs.json").write_text('{"stepping_s": 1}')
    with pytest.raises(ConfigError, match="stepping_s"):
        load_costs(tmp_path / "costs.json")


def test_all_reduce_by_hand() -> None:
    net = stated.Network("test", step_s=1e-5, bytes_per_s=1e9)
    # 4 ranks, 4 MB: 6 steps of 10 us and 1 MB / 1 GB/s.
    assert stated.all_reduce_s(net, 4, 4e6) == pytest.approx(6 * (1e-5 + 1e-3))
    assert stated.all_reduce_s(net, 1, 4e6) == 0
    # spread: 4 minibatches x 4 passes, policy and critic: 32, half of the weights each.
    expected = stated.AGREE_S + 32 * stated.all_reduce_s(net, 4, 4 * 500)
    assert stated.exchange_s(spread(), net, 4, 1000) == pytest.approx(expected)


def test_an_unknown_network_names_those_there_are() -> None:
    with pytest.raises(ConfigError, match="nvlink"):
        stated.network("string")


def test_a_gpu_takes_counted_launches() -> None:
    # spread: 32 optimiser steps of 1,739 / 32 launches; 4 minibatches of 4 passes are a graph.
    launches, act = stated.COUNTED["spread", "mappo"]
    assert launches == pytest.approx(1739 / 32)
    costs = stated.on_gpu(replace(COSTS, update_row_s=1e-4), spread(), 3)
    assert costs.device
    assert costs.update_s == pytest.approx(1739 * 4e-6)
    assert costs.update_eager_s == pytest.approx(1739 * 30e-6)
    assert costs.update_replays_s == pytest.approx(8 * (7.5e-6 + 4 * 30e-6))
    assert costs.update_rows == 1600  # 4 x 1200 rows of 3 agents
    assert costs.act_s == pytest.approx(90e-6 + act * 4e-6)
    assert costs.update_row_s == pytest.approx(1e-4 * 87e9 / 60e12)
    twice = stated.on_gpu(COSTS, spread("algorithm.data_passes=8"), 3)
    assert twice.update_s == pytest.approx(2 * 1739 * 4e-6)
    replay = stated.on_gpu(COSTS, spread("algorithm.name=qmix"), 3)
    assert (replay.update_s, replay.update_rows) == (pytest.approx(220 * 4e-6), 0)


def test_a_run_on_a_gpu_tells_its_share_of_eager_updates() -> None:
    graphs = {"graph_replays": {"update": 25.0, "act": 900.0}, "eager_calls": {"update": 8.0}}
    later = {**record(10.0, 2), "graphs": graphs}
    assert costs_of([replace(window(record(0.0, 1), later), workers_s=1.0)]).eager == 8 / 33
    cpu = {**record(10.0, 2), "graphs": {"eager_calls": {"update": 8.0}}}
    assert window(record(0.0, 1), cpu).eager == 0


def test_sizes_of_a_group_are_halves() -> None:
    sizes = sizes_up_to(Size(8, 512), scale_batch=True)
    assert [(s.learners, s.cores, s.batch) for s in sizes] == [
        (1, 64, 1),
        (2, 128, 2),
        (4, 256, 4),
        (8, 512, 8),
    ]
    assert [s.cores for s in sizes_up_to(Size(1, 16))] == [4, 8, 16]


def test_workers_are_what_learners_leave_and_sessions_allow() -> None:
    assert workers_for(Size(1, 16), spread()) == 13
    assert workers_for(Size(2, 512), spread()) == 2 * 32  # learner.max_sessions 64, two each
    assert workers_for(Size(1, 16, workers=4), spread()) == 4


def test_a_rank_has_its_share_of_the_batch() -> None:
    # 4 x 1200 agent-rows of 3 agents are 1600 rows: 800 of each of two ranks. 40 environments,
    # unrolls of 21 rows (20 transitions and the row after an episode).
    config = spread("learner.pipeline=sync")
    assert learning_of(config, SPEC, 2, 40, 4) == Flight(20, 40, None)
    config = spread("algorithm.unroll_steps=25", "algorithm.unrolls_per_update=64")
    assert learning_of(config, SPEC, 2, 40, 4) == Flight(25, 32, 1)


def test_grown_minibatches_are_of_the_same_updates() -> None:
    for environments in (64, 512, 960):
        config = spread("algorithm.max_batch_size=16384")
        one, whole = learning_of(config, SPEC, 1, environments, 4), spread()
        assert one == learning_of(whole, SPEC, 1, environments, 4)


def test_what_is_in_flight_follows_the_first_updates() -> None:
    # 64 environments bring 64 / 10 ms, the learner takes 1000 rows/s: 1.25 x 10 are of use, in
    # sessions of 4: 16, so 800 / 16 = 50 steps and one row after an episode of 25.
    seen = learning_of(spread(), SPEC, 2, 64, 4, Speed(10e-3, 1e-3))
    assert seen == Flight(51, 16, 1)


def test_a_rank_of_a_replay_has_its_share() -> None:
    config = spread("algorithm.name=qmix")
    seen = learning_of(config, SPEC, 4, 40, 4)
    replay = config.algorithm.options["replay"]
    assert isinstance(seen, Replays)
    assert seen.interval == replay["update_interval"] / 4
    assert seen.batch_rows == replay["batch_size"] / 4
    often = learning_of(
        spread("algorithm.name=qmix", "algorithm.replay.update_interval=1"), SPEC, 4, 40, 4
    )
    assert isinstance(often, Replays)
    assert often.interval == 1


def test_scaled_batches_are_learned_from_as_often() -> None:
    size = Size(4, 64, batch=4)
    system = system_of(basis("algorithm.name=qmix"), size)
    alone = system_of(basis("algorithm.name=qmix"), Size(1, 16))
    assert isinstance(system.learning, Replays)
    assert isinstance(alone.learning, Replays)
    assert system.learning.interval == alone.learning.interval
    assert system.learning.batch_rows == alone.learning.batch_rows


def outcome(**busy: float) -> Outcome:
    full = dict.fromkeys(("cores", "workers", "interpreter", "acting", "learning"), 0.1) | busy
    return Outcome(1.0, 1000.0, 1.0, full, 0.0, 0.0, 0.0, 1.0, 0.01, 0.01, 100.0)


def test_the_fullest_resource_is_the_bottleneck() -> None:
    assert bottleneck(outcome(cores=0.95, learning=1.0)) == "cores"
    assert bottleneck(outcome(learning=0.99, acting=0.95)) == "learning"
    assert bottleneck(replace(outcome(learning=0.99), peers=0.5)) == "all-reduce"
    assert bottleneck(outcome(workers=1.0)) == "workers"
    assert bottleneck(replace(outcome(), blocked=0.5)) == "policy lag"
    assert bottleneck(outcome()) == "round trips"


def test_hours_of_a_million_by_hand() -> None:
    # 1000 rows/s x 3 agents: 1e6 / 3000 / 3600 h of each of 2 learners and 8 cores.
    system = system_of(basis(), Size(2, 8))
    seen = of_outcome(system, outcome(), SPEC, Size(2, 8))
    assert seen.rate == 3000
    assert seen.device_hours == pytest.approx(2 * 1e6 / 3000 / 3600)
    assert seen.core_hours == pytest.approx(8 * 1e6 / 3000 / 3600)


def test_calibration_finds_the_time_on_the_way() -> None:
    # One worker with two sessions of 4 environments; 40 messages/s are far below what costs allow.
    slow = Window(
        seconds=100.0,
        messages=20000,
        batches=20000,
        updates=10,
        rows=80000,
        trained=80000,
        env_steps=80000,
        grpc_s=2.0,
        host_s=2.0,
        act_s=4.0,
        learn_s=0.8,
        bytes=1e6,
        workers_s=20.0,
    )
    # 200 messages/s of two sessions: 10 ms a turn, of which 1.4 ms are processor time.
    costs = calibrated(spread("algorithm.unroll_steps=16"), SPEC, {1: slow})
    assert 2 * costs.hop_s == pytest.approx(8.6e-3, rel=0.1)


def test_twice_the_learning_speed_helps_where_learning_limits() -> None:
    here = basis(costs=replace(COSTS, update_row_s=1e-3))
    seen = forecast(here, Size(1, 16), SHORT)
    assert seen.bottleneck == "learning"
    better = gains(here, seen)
    assert better["learning speed"] == pytest.approx(2, rel=0.1)
    assert better["cores and workers"] == pytest.approx(1, rel=0.1)


def test_a_forecast_fits_80_columns() -> None:
    here = basis(costs=stated.on_gpu(COSTS, spread(), 3))
    seen = [forecast(here, size, SHORT) for size in sizes_up_to(Size(2, 32))]
    out = io.StringIO()
    console = Console(file=out, width=80)
    show(seen, {"learning speed": 1.5}, ["measured: a run"], console, network="NVLink")
    assert max(map(len, out.getvalue().splitlines())) <= 80
    assert "limited by" in out.getvalue()
    rows = [line.split() for line in out.getvalue().splitlines()[-2:]]
    assert [row[:2] for row in rows] == [["1", "16"], ["2", "32"]]  # nothing is wrapped


def test_the_command_prints_json(tmp_path: Path) -> None:
    write_json(tmp_path / "costs.json", vars(replace(COSTS, update_s=0.1)))
    command = ["plan", "spread", "--cores", "4", "--costs", str(tmp_path / "costs.json"), "--json"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    data = json.loads(done.output)
    assert data["forecasts"][0]["size"]["cores"] == 4
    assert data["sources"] == [f"kept: {tmp_path / 'costs.json'}"]


def test_a_run_with_a_source_is_refused() -> None:
    with pytest.raises(ConfigError, match="learns from the source 'faces'"):
        plan_config(load("faces", [], {}))

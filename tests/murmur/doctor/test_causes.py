"""Causes of a slow run: each from hand-made counters of a learner, its servers and its machine."""

import io
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from murmur.doctor.causes import CAUSES
from murmur.doctor.diagnosis import Diagnosis, diagnose
from murmur.doctor.measured import Machine, measure, steps_per_row
from murmur.doctor.page import examine, show
from murmur.learner_service.learning.base import algorithm_config
from murmur.live_page.alerts import doctors_finding
from murmur.runs.run_folder import RunFolder
from murmur.runs.servers import EVERY_S, Servers, recorded, samples_of, servers_of
from murmur.runs.snapshots import Snapshot
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.config.files import load, save

SPAN = 10.0
# Env-bound: acting waits nine tenths of the time, learning takes one.
WAITING = ({"wait_environments": 9.0, "act": 1.0}, {"wait_rows": 9.0, "forward": 1.0})
# Learning-bound: sessions wait until the learner has caught up.
LEARNING = ({"wait_learning": 9.0, "act": 1.0}, {"forward": 9.8, "wait_rows": 0.2})
STEPPING = {"step": 9.6, "wait": 0.4}


def config(**env_server: int) -> ExperimentConfig:
    server = {"num_workers": 1, "envs_per_worker": 32, **env_server}
    options = ["algorithm={name: mappo, batch_size: 300, batch_number: 2, data_passes: 2}"]
    return load("spread", [*options, *(f"env_server.{k}={v}" for k, v in server.items())], {})


def look(
    threads: tuple[dict[str, float], dict[str, float] | None] = WAITING,
    workers: dict[str, float] | None = None,
    *,
    busy: float = 0.5,
    updates: int = 10,
    rows: float = 1000,
    learner: dict[str, Any] | None = None,
    **of_servers: float,
) -> tuple[Snapshot, Snapshot]:
    """Return counters over 10 s on a machine of 2 cores.

    Args:
        threads: seconds of the threads inference and learner; the latter None: sync.
        workers: seconds of the workers by state; None: unknown.
        busy: processors in use by any program.
        updates: updates made.
        rows: rows that came, all of them trained.
        learner: further fields of the learner's counters.
        of_servers: further fields of the servers' counters.
    """
    found = []
    for share in (0.0, 1.0):
        names = {"inference": threads[0]} | ({"learner": threads[1]} if threads[1] else {})
        more = {
            name: {k: share * v for k, v in value.items()} if isinstance(value, dict) else value
            for name, value in (learner or {}).items()
        }
        servers = None
        if workers is not None:
            counts = {name: share * value for name, value in of_servers.items() if name != "here"}
            servers = Servers(
                share * SPAN,
                {state: share * s for state, s in workers.items()},
                **counts,
                here=bool(of_servers.get("here", True)),
            )
        found.append(
            Snapshot(
                share * SPAN,
                share * rows,
                share * updates,
                0.0,
                {thread: {s: share * v for s, v in of.items()} for thread, of in names.items()},
                3,
                machine_busy=busy / 2,
                rows_trained=share * rows,
                machine_busy_s=100.0 + share * SPAN * busy,
                cores=2.0,
                servers=servers,
                **{name: share * v if name == "batches" else v for name, v in more.items()},
            )
        )
    return found[0], found[1]


def said(seen: Diagnosis) -> str:
    out = io.StringIO()
    show(seen, Console(file=out, width=400))
    return out.getvalue()


def test_sleeping_environments_need_workers_on_a_full_machine() -> None:
    """9.6 of 10 s in steps, 0.3 s of CPU: no processor is what they wait for."""
    before, after = look(workers=STEPPING, busy=2.0, cpu_s=0.3, tree_cpu_s=0.4, messages=300)
    seen = diagnose(before, after, config())
    assert seen.bottleneck == "environments wait"
    assert seen.causes[0].score == pytest.approx(0.93)
    best = seen.remedies[-1]
    assert best.settings == ("env_server.num_workers=10",)
    assert best.rate == pytest.approx(950)  # acting and learning let no more through
    assert "fewer steps of each" in best.cost
    text = said(seen)
    assert text.startswith("waits for   environments that wait (sleep, network, subprocess): more")
    assert "(state step 9.600 s, CPU 0.300 s)" in text
    assert "--set env_server.num_workers=10" in text
    assert "this run uses 0.0 of 2 cores, others 2.0" in text


def test_environments_that_compute_need_more_cores() -> None:
    before, after = look(workers=STEPPING, busy=1.2, cpu_s=9.5, tree_cpu_s=9.6, messages=300)
    seen = diagnose(before, after, config())
    assert seen.bottleneck == "environments compute"
    assert {r.limit for r in seen.remedies} == {"processors"}  # 1.04 of 1.76 cores
    assert "start environment servers on other machines" in said(seen)


def test_subprocesses_that_compute_are_waited_for() -> None:
    """The worker's own processor is idle; its tree's is not, and it bounds more workers."""
    before, after = look(workers=STEPPING, busy=1.2, cpu_s=0.3, tree_cpu_s=9.6, messages=300)
    seen = diagnose(before, after, config())
    assert seen.bottleneck == "environments wait"
    assert {r.limit for r in seen.remedies} == {"processors"}


def test_others_load_is_named_as_theirs() -> None:
    """The worker is ready to run 6 of 10 s and has no processor; others use 1.5 of 2."""
    before, after = look(
        workers=STEPPING, busy=2.0, cpu_s=3.5, cpu_wait_s=6.0, tree_cpu_s=3.6,
        learner={"cpu_s": {"": 1.4}},
    )  # fmt: skip
    seen = diagnose(before, after, config())
    assert [c.name for c in seen.causes[:2]] == ["others", "environments compute"]
    assert "others use 1.5 of 2 cores, this run 0.5" in seen.causes[0].evidence


def test_own_processes_that_fill_the_machine_are_not_others() -> None:
    """They use all there is, and would use 1.2 cores more."""
    before, after = look(
        workers={"step": 29.0, "wait": 1.0}, busy=2.0, cpu_s=15.0, cpu_wait_s=14.0,
        tree_cpu_s=15.0, learner={"cpu_s": {"": 4.9}},
    )  # fmt: skip
    names = {c.name: c.score for c in diagnose(before, after, config()).causes}
    assert "others" not in names
    assert names["processors"] == pytest.approx(14 / 30, abs=0.01)


def test_the_machines_lack_is_divided_between_others_and_the_run() -> None:
    assert Machine(2.0, busy=2.0, own=0.5, lacking=1.0).by_others == 1.0
    assert Machine(2.0, busy=2.0, own=1.5, lacking=1.0).by_others == pytest.approx(0.5)
    assert Machine(2.0, busy=2.0, own=2.0, lacking=1.0).by_others == 0.0


def test_a_slow_network_keeps_both_sides_waiting() -> None:
    """200 messages of 16, each 80 ms from answer to answer of two sessions, 0.5 s of it work."""
    before, after = look(
        workers={"step": 0.5, "wait": 9.5}, cpu_s=0.9, tree_cpu_s=1.0, messages=200
    )
    seen = diagnose(before, after, config())
    assert seen.bottleneck == "network"
    (more,) = seen.remedies
    assert more.settings == ("env_server.sessions_per_worker=4", "env_server.envs_per_worker=64")
    assert "on their way for about" in seen.causes[0].evidence


def test_messages_held_up_by_full_processors_are_no_network() -> None:
    """The learner's thread of messages is kept from running 8 of the 9 s that workers wait."""
    before, after = look(
        workers={"step": 0.5, "wait": 9.5}, busy=2.0, cpu_s=0.9, tree_cpu_s=1.0, messages=200,
        learner={"cpu_s": {"": 0.5}, "cpu_wait_s": {"grpc": 8.0}},
    )  # fmt: skip
    seen = diagnose(before, after, config())
    assert seen.bottleneck == "others"
    assert {c.name: c.score for c in seen.causes}["network"] < 0.2


def test_tiny_messages_cost_both_sides_calls() -> None:
    """Both threads work all the time on messages of one environment, 1 ms of CPU each."""
    before, after = look(
        ({"wait_environments": 0.4, "act": 8.6, "reply": 1.0}, {"wait_rows": 9.0, "forward": 1.0}),
        {"step": 0.5, "wait": 9.5},
        busy=1.9,
        learner={"cpu_s": {"": 11.0, "inference": 9.0}, "batches": 8000},
        cpu_s=7.0, tree_cpu_s=7.0, messages=10_000,
    )  # fmt: skip
    assert after.servers is not None
    after = replace(after, servers=replace(after.servers, rows=10_000))
    seen = diagnose(before, after, config(envs_per_worker=2))
    assert seen.bottleneck == "messages"
    assert "1,000 messages a second of 1.000 environments each" in seen.causes[0].evidence
    assert seen.remedies[-1].settings == ("env_server.envs_per_worker=32",)


def test_tiny_messages_that_wake_threads_are_not_the_networks() -> None:
    """A worker waits 7 of 10 s for 10,000 answers of one environment: 0.7 ms each."""
    before, after = look(workers={"step": 0.5, "wait": 9.5}, cpu_s=3.0, tree_cpu_s=3.0,
                         messages=10_000)  # fmt: skip
    assert after.servers is not None
    tiny = replace(after, servers=replace(after.servers, rows=10_000))
    seen = diagnose(before, tiny, config(envs_per_worker=2))
    assert seen.bottleneck == "messages"
    far = replace(after, servers=replace(after.servers, messages=300, rows=300))
    assert diagnose(before, far, config(envs_per_worker=2)).bottleneck == "network"


def learning(steps_ms: float) -> tuple[Snapshot, Snapshot]:
    """A learner that works all the time, a number of CPU ms for each step on a minibatch."""
    rows = 9.8 / (steps_ms / 1e3) / (3 * 2 / 300)  # 3 agents, 2 passes, 300 transitions
    return look(
        LEARNING, {"step": 1.0, "wait": 9.0}, rows=rows, learner={"cpu_s": {"learner": 9.8}},
        cpu_s=1.0, tree_cpu_s=1.0,
    )  # fmt: skip


def test_small_batches_and_large_networks_are_told_apart() -> None:
    spread = config()
    assert steps_per_row(spread, 3) == pytest.approx(3 * 2 / 300)
    assert diagnose(*learning(5.0), spread).bottleneck == "small batches"
    assert diagnose(*learning(40.0), spread).bottleneck == "large network"
    m = measure(*learning(10.0), steps_per_row(spread, 3))
    assert m.learn_computes == pytest.approx(0.5)


def test_a_replays_steps_are_its_batches() -> None:
    assert steps_per_row(load("formation-masac", [], {}), 3) is not None
    replay = load("spread", ["algorithm={name: maddpg, replay: {batch_size: 64}}"], {})
    assert steps_per_row(replay, 3) == 1 / 64


def test_cheaper_learning_says_what_it_costs() -> None:
    spread = config()
    about = algorithm_config(spread.algorithm).about
    seen = diagnose(*learning(6.25), spread, about)
    costs = {r.settings[0]: r for r in seen.remedies}
    assert set(costs) == {"algorithm.batch_size=600", "algorithm.data_passes=1"}
    # Calls are 80 % of the time: half as many save 40 %; half the passes save 50 %.
    assert costs["algorithm.batch_size=600"].rate / seen.rate == pytest.approx(1 / 0.6, rel=0.05)
    assert costs["algorithm.data_passes=1"].rate / seen.rate == pytest.approx(1.94, rel=0.05)
    assert all("learns less per row" in r.cost and not r.timed for r in seen.remedies)
    assert "--probe times updates" in said(seen)
    replay = load("spread", ["algorithm={name: qmix, replay: {update_interval: 8}}"], {})
    (change,) = algorithm_config(replay.algorithm).about.cheaper_learning
    assert change.cost == "half the updates: learns less per row"


def test_lock_step_is_named_unless_one_side_takes_most() -> None:
    def sync(act: float, learn: float, wait: float) -> Diagnosis:
        states = {"act": act, "forward": learn, "wait_environments": wait}
        workers = {"step": wait, "wait": 10 - wait}
        return diagnose(*look((states, None), workers, cpu_s=0.1, tree_cpu_s=0.1), config())

    seen = sync(2.0, 4.0, 4.0)
    assert (seen.bottleneck, seen.causes[0].score) == ("turns", pytest.approx(0.6))
    assert "rows are up to learner.max_policy_lag updates old" in seen.remedies[0].cost
    assert sync(0.2, 0.3, 9.5).bottleneck == "environments wait"
    assert sync(0.2, 9.5, 0.3).bottleneck == "learning"


def test_workers_that_wait_for_the_slowest_are_in_lock_step() -> None:
    """Four workers step 3 of 10 s on average; acting waits 8 s until the last has answered."""
    states = {"act": 1.0, "forward": 1.0, "wait_environments": 8.0}
    asked = {"idle": {0.05: 0.0, 0.1: 400.0, float("inf"): 400.0}}  # 400 requests of 75 ms
    before, after = look(
        (states, None), {"step": 12.0, "wait": 28.0}, busy=1.5,
        cpu_s=12.0, tree_cpu_s=12.0, messages=400,
    )  # fmt: skip
    seen = diagnose(before, replace(after, latency=asked), config(num_workers=4))
    assert (seen.bottleneck, seen.causes[0].score) == ("turns", pytest.approx(0.7, abs=0.06))
    assert "waiting for the slowest worker" in seen.causes[0].evidence
    assert "network" not in [c.name for c in seen.causes if c.score > 0.1]


def test_evaluations_that_take_acting_and_processors_are_named() -> None:
    threads = ({"wait_environments": 1.0, "act": 2.0, "evaluate": 7.0}, {"wait_rows": 9.0,
               "forward": 1.0})  # fmt: skip
    before, after = look(threads, {"step": 2.0, "wait": 8.0}, busy=2.0, cpu_s=2.0, tree_cpu_s=2.0,
                         evaluator_cpu_s=9.0, learner={"cpu_s": {"": 9.0}})  # fmt: skip
    seen = diagnose(before, after, config())
    assert seen.bottleneck == "evaluation"
    assert "evaluators 0.9 cores" in seen.causes[0].evidence
    assert "coarser curves" in said(seen)


def test_without_the_servers_ledgers_no_processor_is_blamed() -> None:
    seen = diagnose(*look(busy=2.0), config())
    assert seen.bottleneck == "environments"
    assert "name the servers' metrics ports" in said(seen)


def test_servers_elsewhere_are_not_others_load() -> None:
    before, after = look(workers=STEPPING, busy=2.0, cpu_s=9.5, tree_cpu_s=9.6)
    assert before.servers is not None
    assert after.servers is not None
    before = replace(before, servers=replace(before.servers, here=False))
    after = replace(after, servers=replace(after.servers, here=False))
    seen = diagnose(before, after, config())
    assert (seen.bottleneck, seen.machine) == ("environments compute", None)


def test_every_cause_has_a_remedy_that_names_its_cost() -> None:
    of_gpu = {"shapes", "captures", "eager", "eager acts", "acts"}  # theirs come with the wait
    of_settings = {"environments wait", "turns"}  # and theirs with a number
    for name, cause in CAUSES.items():
        assert cause.words
        if name not in of_gpu | of_settings:
            assert all((cause.advice, cause.cost)), name


PAGE = """\
# TYPE murmur_env_info gauge
murmur_env_info{{run="r",environment="e",mode="{mode}"}} 1.0
# TYPE murmur_env_seconds counter
murmur_env_seconds_total{{state="step"}} {step}
murmur_env_seconds_total{{state="wait"}} 1.0
# TYPE murmur_env_messages counter
murmur_env_messages_total{{direction="sent"}} 5.0
murmur_env_messages_total{{direction="received"}} 7.0
# TYPE murmur_env_steps counter
murmur_env_steps_total{{mode="{mode}"}} 40.0
# TYPE murmur_env_tree_cpu_seconds counter
murmur_env_tree_cpu_seconds_total 3.0
"""


def test_counters_of_servers_are_summed_evaluators_apart() -> None:
    pages = {
        "http://a:1/metrics": samples_of(PAGE.format(mode="train", step=2.0)),
        "http://b:1/metrics": samples_of(PAGE.format(mode="train", step=4.0)),
        "http://a:2/metrics": samples_of(PAGE.format(mode="evaluate", step=8.0)),
    }
    seen = servers_of(9.0, pages, "http://a:9101/metrics")
    assert seen is not None
    assert (seen.states, seen.messages, seen.rows) == ({"step": 6.0, "wait": 2.0}, 10.0, 80.0)
    assert (seen.tree_cpu_s, seen.evaluator_cpu_s, seen.here) == (6.0, 3.0, False)
    pages.pop("http://b:1/metrics")
    assert servers_of(9.0, pages, "http://a:9101/metrics").here  # type: ignore[union-attr]
    assert servers_of(9.0, {"http://a:2": pages["http://a:2/metrics"]}) is None


def test_a_finished_runs_servers_are_read_from_its_folder(tmp_path: Path) -> None:
    """The record of the servers makes the verdict, in the command and on the live page."""
    run = RunFolder(tmp_path)
    save(config(), run.path / "config.yaml")
    lines = [
        {
            "kind": "progress", "time": 1000.0 + t, "env_steps": 100 * t, "agent_steps": 300 * t,
            "rows_received": 100 * t, "rows_trained": 100 * t, "updates": t,
            "device_busy_s": 0.1 * t, "machine_busy": 1.0, "machine_busy_s": 50 + 2.0 * t,
            "cores": 2.0, "environments_limit": 0, "work": {"cpu_s": 0.1 * t},
            "ledger": {
                "inference": {"wait_environments": 0.9 * t, "act": 0.1 * t},
                "learner": {"wait_rows": 0.9 * t, "forward": 0.1 * t},
            },
        }
        for t in range(1, 61)
    ]  # fmt: skip
    run.progress_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert examine(run, None, None, None, False, Console()).bottleneck == "environments"
    records = [
        Servers(1000.0 + t, {"step": 0.95 * t, "wait": 0.05 * t}, 0.03 * t, 0.0, 0.04 * t, t)
        for t in range(0, 60, round(EVERY_S))
    ]
    (tmp_path / "servers.jsonl").write_text(
        "".join(json.dumps(asdict(r)) + "\n" for r in records) + '{"torn'
    )
    seen = examine(run, None, None, None, False, Console())
    assert seen.bottleneck == "environments wait"
    assert seen.machine is not None
    assert seen.machine.others == pytest.approx(2.0 - 0.14)
    alert = doctors_finding(run, run.config())
    assert alert is not None
    assert alert.what.startswith("Waits for environments that wait")
    assert " times as fast: " in alert.fix
    assert "num_workers" in alert.fix


def test_counters_of_servers_started_again_are_not_mixed(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    steps = [(0, 100.0), (5, 104.0), (10, 1.0), (15, 5.0), (20, 9.0)]
    (tmp_path / "servers.jsonl").write_text(
        "".join(json.dumps(asdict(Servers(t, {"step": s}))) + "\n" for t, s in steps)
    )
    both = recorded(run, 0.0, 20.0)
    assert both is not None
    assert (both[0].time, both[1].time) == (10.0, 20.0)
    assert recorded(run, 30.0, 60.0) is None  # long before the window


def test_counters_of_another_version_are_read_as_far_as_known(tmp_path: Path) -> None:
    lines = [asdict(Servers(t, {"step": t})) | {"unknown": 1.0} for t in (0.0, 5.0, 10.0)]
    (tmp_path / "servers.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in [*lines, {"time": 12.0}])
    )
    both = recorded(RunFolder(tmp_path), 0.0, 10.0)
    assert both is not None
    assert (both[0].time, both[1].time) == (0.0, 10.0)


def test_no_share_of_the_time_is_negative() -> None:
    """Threads that wait for a processor for longer than they work."""
    m = measure(*look(LEARNING, STEPPING), steps_per_row(config(), 3))
    m = replace(m, act=0.1, act_lack=0.104, learn=0.2, learn_lack=0.21)
    for computes in (0.5, None):
        m = replace(m, act_computes=computes, learn_computes=computes)
        for cause in CAUSES.values():
            if cause.measure is not None:
                score, evidence = cause.measure(m)
                assert score >= 0, evidence
                assert "-" not in evidence, evidence

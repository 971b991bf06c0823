"""The GPU benchmark: its plan, its arithmetic, its runner; the smoke form runs in test_smoke."""

import json
import math
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from benchmarks import _launch_counts
from benchmarks.launches import PRESETS
from murmur.bench import run_benchmark
from murmur.benchmarks import gpu
from murmur.benchmarks._processes import Scrape
from murmur.benchmarks.effort import Effort
from murmur.benchmarks.gpu_topics import figures as figures_module
from murmur.benchmarks.gpu_topics.alone import rate_alone
from murmur.benchmarks.gpu_topics.catalogue import SESSIONS, TOPICS
from murmur.benchmarks.gpu_topics.figures import (
    CASES,
    OF_A_RUN,
    SMALL,
    SMALL_REPLAY,
    Case,
    Count,
    Figure,
    Value,
    rows,
    saved_launches,
)
from murmur.benchmarks.gpu_topics.parts import Trial, quantile
from murmur.benchmarks.gpu_topics.runner import (
    LEAST_S,
    Outcome,
    Store,
    run_all,
    run_topic,
    topic_command,
)
from murmur.benchmarks.gpu_topics.suite import files, outcome
from murmur.benchmarks.gpu_topics.topics import Context, calls_of, is_error, without_errors
from murmur.benchmarks.gpu_topics.training import (
    figures,
    graphs,
    launched,
    longest,
    overlap,
    waits,
)
from murmur.cli import app
from murmur.doctor.machine import ROOT
from murmur.learner_service.app import _SWITCH_INTERVAL_S
from murmur.learner_service.layers.building import resolve_network
from murmur.learner_service.storage.rollout import RolloutStorage
from murmur.runs.child import child_environment
from murmur.shared.config.files import load
from murmur.shared.config.plugins import resolve_plugin
from murmur.shared.process.errors import ConfigError
from tests.pretend_cuda import Kind, pretend_cuda

SYNTHETIC = [sys.executable, "-c"]


def test_a_table_holds_goal_measured_and_expected() -> None:
    planned = [
        Figure("a, ms", 5.0, expected=2.0, before=9.0, old_goal="<= 1"),
        Figure("b", 0.9, ">="),
        Figure("c", True, "="),
    ]
    table = rows(planned, {"a, ms": 4.0, "b": 0.8, "d": 7})

    def row(measured: Value, goal: str, met: str, *rest: Value) -> dict[str, Value]:
        columns = ("measured", "goal", "met", "predicted", "before", "goal before")
        return dict(zip(columns, (measured, goal, met, *(rest or ("", "", ""))), strict=True))

    assert table == {
        "a, ms": row(4.0, "<= 5.0", "yes", 2.0, 9.0, "<= 1"),
        "b": row(0.8, ">= 0.9", "NO"),
        "c": row("", "True", ""),
        "d": row(7, "", ""),
    }


@pytest.mark.parametrize("value", [math.nan, "error: none was measured"])
def test_what_is_no_number_reaches_no_goal(value: Value) -> None:
    assert Figure("a, ms", 5.0).met(value) is False


def test_prediction_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,000 nodes of 4.2 µs and 10 launches of 30 µs; 320 GFLOP take 10 ms at 32 TFLOP/s."""
    counts = {f"x: {OF_A_RUN}": Count(10, 1000, 4, 320)}
    monkeypatch.setattr(figures_module, "saved_launches", lambda: counts)
    small = Case("s", "spread", preset="x")
    large = Case("l", "spread", preset="x", mflop_per_row=1000.0)
    assert (small.captured_ms, small.arithmetic_bound) == (pytest.approx(4.5), False)
    assert (large.captured_ms, large.arithmetic_bound) == (pytest.approx(10.0), True)
    assert Case("none", "spread", preset="y").captured_ms is None


@pytest.mark.parametrize("case", [*CASES, SMALL, SMALL_REPLAY], ids=lambda case: case.name)
def test_every_case_is_a_configuration(case: Case) -> None:
    config = load(case.config, list(case.changes), {})
    assert case.workers == (0 if case in (SMALL, SMALL_REPLAY) else 15)
    assert config.algorithm.name in case.name
    resolve_plugin("algorithm", config.algorithm)
    resolve_network(config.network, None)


def test_two_calls_have_time_for_all_topics() -> None:
    """Each topic at most 90 s, each half within the time of a call."""
    assert all(topic.likely_s <= topic.limit_s <= 90 for topic in TOPICS.values())
    assert [*SESSIONS[0], *SESSIONS[1]] == list(TOPICS)
    for session in SESSIONS:
        assert sum(TOPICS[name].likely_s for name in session) <= gpu._BUDGET_S <= 360


def test_the_plan_names_every_goal() -> None:
    plan = gpu.dry_run()["figures"]
    goals = {name: row["goal"] for name, row in plan.items() if row["goal"]}
    run, published = "run of terrain-reference", "run of terrain-published"
    assert goals[f"{run}: agent-steps a second / those of the environments alone"] == ">= 0.9"
    assert goals[f"{run}: arrival to actions, update: p99, ms"] == "<= 5.0"
    assert f"{run}: device busy by NVML, share" not in goals
    assert goals[f"{published}: agent-steps a second"] == ">= 40000.0"
    assert goals[f"{published}: device busy by NVML, share"] == ">= 0.85"
    for name in ("maddpg, snakes-ddpg", "masac, formation, 2x256", "qmix, spread"):
        assert goals[f"{name}: update of a run, ms"] == "<= 0.7"
    assert goals["MASAC 16 agents: captured, ms"] == "<= 0.9"
    assert goals["MASAC 8 agents: eager / captured"] == ">= 5.7"
    assert goals["MASAC 4 agents: sequential / captured"] == ">= 10.0"
    assert goals["coma, terrain-reference: update of a run, ms"] == "<= 150.0"
    assert goals["acting, 64 environments in 1 session: p99 during updates, ms"] == "<= 5.0"
    assert goals["augment standard: one core / graph"] == ">= 12.0"
    update = plan["coma, terrain-reference: update of a run, ms"]
    assert (update["before"], update["goal before"]) == (228.0, "<= 20 for 1,024 rows")
    chosen = gpu.dry_run(("masac", "costs"))
    assert list(chosen["topics"]) == ["masac", "costs"]
    with pytest.raises(ConfigError, match="no topic 'mosac'"):
        gpu.dry_run(("mosac",))
    result = CliRunner().invoke(app, ["bench", "gpu", "--dry-run"])
    assert result.exit_code == 0
    with pytest.raises(ConfigError, match="'replay' has no plan"):
        run_benchmark("replay", Effort.SMOKE, Console(), dry_run=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_without_a_gpu_it_says_so_in_one_line() -> None:
    with pytest.raises(ConfigError, match=r"no GPU to measure: .*--dry-run") as error:
        gpu.run(Effort.FULL)
    assert "\n" not in str(error.value)


# ---------------------------------------------------------------- topics in processes


def test_a_topic_gives_its_figures(tmp_path: Path) -> None:
    write = "import json, sys; json.dump({'figures': {'x': 1}}, open(sys.argv[2], 'w'))"
    found = run_topic([*SYNTHETIC, write], 60)
    assert (found.figures, found.error) == ({"x": 1}, "")


def test_a_topic_that_fails_keeps_its_error_and_its_figures() -> None:
    write = "import json, sys; json.dump({'figures': {'x': 1}}, open(sys.argv[2], 'w')); sys.exit"
    found = run_topic([*SYNTHETIC, f"{write}('CUDA error: out of luck')"], 60)
    assert found.figures == {"x": 1}
    assert found.error == "exit code 1; it said: CUDA error: out of luck"


def test_a_topic_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    hang = (
        "import pathlib, subprocess, sys, time; "
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
        f"pathlib.Path({str(pid)!r}).write_text(str(child.pid)); "
        "print('at it', flush=True); time.sleep(600)"
    )
    found = run_topic([*SYNTHETIC, hang], 1.5, {"known": 2})
    assert found.error == "not done within 2 s; it said: at it"
    assert found.figures == {"known": 2}
    child, deadline = int(pid.read_text()), time.monotonic() + 10
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_a_topic_has_measured_is_kept_while_it_runs(tmp_path: Path) -> None:
    """After the benchmark is killed, the file and its copy hold it."""
    store = Store(tmp_path / "results.json", tmp_path / "out" / "topics.json")
    mark = tmp_path / "mark"
    write = (
        "import json, os, sys, time; "
        "record = {'figures': {'x': 1}, 'settings': {'y': 2}}; "
        "json.dump(record, open(sys.argv[2] + '.new', 'w')); "
        "os.replace(sys.argv[2] + '.new', sys.argv[2])\n"
        f"while not os.path.exists({str(mark)!r}): time.sleep(0.01)\n"
        "sys.exit('no luck')"
    )
    seen: list[dict[str, Outcome]] = []

    def keep(found: Outcome) -> None:
        store.keep("a", found)
        seen.append(store.load())
        mark.touch()

    found = run_topic([*SYNTHETIC, write], 60, keep=keep)
    assert found.error == "exit code 1; it said: no luck"
    assert seen[0]["a"].figures == {"x": 1}
    assert seen[0]["a"].settings == {"y": 2}
    assert store.missing(["a"]) == ["a"]
    assert Store(tmp_path / "out" / "topics.json").load() == seen[-1]


def test_a_topic_that_has_all_may_be_ended_while_it_stops() -> None:
    write = (
        "import json, os, signal, sys; file = open(sys.argv[2], 'w'); "
        "json.dump({'figures': {'x': 1}, 'whole': True}, file); file.close(); "
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    found = run_topic([*SYNTHETIC, write], 60)
    assert (found.figures, found.error) == ({"x": 1}, "")


def test_another_call_continues_with_what_is_missing(tmp_path: Path) -> None:
    store = Store(tmp_path / "results" / "all.json")
    assert store.missing(["a", "b", "c"]) == ["a", "b", "c"]
    store.keep("a", Outcome({"x": 1}, 2.0))
    store.keep("b", Outcome({}, 2.0, "it failed"))
    assert store.missing(["a", "b", "c"]) == ["b", "c"]
    assert store.load()["a"] == Outcome({"x": 1}, 2.0)
    for name in "bc":
        store.keep(name, Outcome())
    store.keep("d", Outcome())
    assert store.missing(["a", "b", "c"]) == ["a", "b", "c"]  # it begins again
    assert list(store.load()) == ["d"]
    store.file.write_text("{")  # cut short
    assert store.missing(["a"]) == ["a"]


def test_a_call_that_was_cut_short_is_gone_on_with(tmp_path: Path) -> None:
    """The second topic fails once; the third one has no time in the first call."""
    store = Store(tmp_path / "results.json")
    said: list[str] = []
    mark = tmp_path / "mark"
    code = (
        "import json, pathlib, sys; name, mark = sys.argv[1], pathlib.Path(sys.argv[2]); "
        "name == 'b' and not mark.exists() and (mark.touch() or sys.exit('no luck')); "
        "json.dump({'figures': {name: 1}}, open(sys.argv[4], 'w'))"
    )

    def command(name: str) -> list[str]:
        return [*SYNTHETIC, code, name, str(mark)]

    first = run_all(store, {"a": 30, "b": 30, "c": LEAST_S / 2}, command, 300, said.append)
    assert first["a"].figures == {"a": 1}
    assert first["b"].error == "exit code 1; it said: no luck"
    assert first["c"].error.startswith("not begun: the time is over")
    said.clear()
    second = run_all(store, {"a": 30, "b": 30, "c": 30}, command, 300, said.append)
    assert [line.split(":")[0] for line in said] == ["b", "b", "c", "c"]  # not a
    assert {name: o.figures for name, o in second.items()} == {n: {n: 1} for n in "abc"}
    assert not any(outcome.error for outcome in second.values())


def test_what_a_call_has_measured_the_next_one_leaves_out() -> None:
    known: dict[str, Value] = {
        "mappo, spread: eager update, ms": 3.0,
        "coma, snakes: eager update, ms": 4.0,
        "coma, snakes: update": "error: RuntimeError: no memory",
    }
    context = Context("cpu", Effort.SMOKE, without_errors(known))
    assert context.has("mappo, spread")
    assert not context.has("coma, snakes")
    assert not context.has("mappo")


@pytest.mark.system
def test_a_topic_has_a_learners_process_and_skips_what_is_known(tmp_path: Path) -> None:
    known = {f"{case.name}: launches of an act, not captured": 1 for case in (SMALL, SMALL_REPLAY)}
    found = run_topic(topic_command("launches", "smoke", "cpu"), 120, known)
    assert (found.figures, found.error) == (known, "")
    assert found.settings["switch interval, ms"] == pytest.approx(1e3 * _SWITCH_INTERVAL_S)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_topic_on_a_gpu_multiplies_in_tf32() -> None:
    """`masac` builds its algorithm without a run's configuration."""
    found = run_topic(topic_command("masac", "smoke", "cuda"), 120)
    assert found.error == ""
    assert found.settings["products in fp32"] == "high"
    assert found.settings["cudnn.benchmark"] is True


@pytest.mark.long
@pytest.mark.system
def test_a_session_keeps_its_files_after_each_topic(tmp_path: Path) -> None:
    """As on a machine with a GPU, in miniature: a whole run, then costs; a second call resumes."""
    script = ROOT / "benchmarks" / "gpu_session.sh"
    command = ["bash", str(script), "1", "--smoke", "--topics", "terrain-reference,costs"]
    environment = child_environment() | {"OUT": str(tmp_path), "PYTHON": sys.executable}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    files = [file for file in tmp_path.iterdir() if file.is_file()]
    assert len(files) <= 8
    outcomes = Store(tmp_path / "topics-session-1.json").load()
    assert {name: found.error for name, found in outcomes.items()} == {
        "terrain-reference": "",
        "costs": "",
    }
    figures = outcomes["terrain-reference"].figures
    for name in ("agent-steps a second", "update, ms, p99", "eager calls before, update"):
        assert figures[f"run of terrain-reference: {name}"] is not None
    (page,) = tmp_path.glob("gpu-session-1-*.md")
    assert "run of terrain-reference: agent-steps a second" in page.read_text()


@pytest.mark.parametrize(
    "topic",
    [
        *("costs", "equality"),
        *(pytest.param(t, marks=pytest.mark.long) for t in ("acting", "augment", "updates")),
    ],
)
def test_a_topic_is_in_order_on_a_pretended_gpu(topic: str) -> None:
    """No mixed devices, races or illegal captures; waiting is what a benchmark does."""
    with pretend_cuda() as cuda:
        found = TOPICS[topic].measure(Context("cuda", Effort.SMOKE))
    assert [fault for fault in cuda.report.faults if fault.kind is not Kind.SYNC] == []
    assert not [value for value in found.values() if is_error(value)]


# ---------------------------------------------------------------- arithmetic of the topics


def test_overlap_of_streams_by_hand() -> None:
    """Stream 7: [0, 10] and [12, 14]; stream 9: [8, 13]: 7 works 3 of the 5 µs of 9."""

    def span(stream: int, begin: float, end: float) -> dict[str, object]:
        return {"ts": begin, "dur": end - begin, "args": {"stream": stream}, "tid": stream}

    found = overlap([span(7, 0, 10), span(9, 8, 13), span(7, 12, 14)])
    assert found == {
        "stream 1: busy of the union, share": pytest.approx(12 / 14),
        "stream 2: busy of the union, share": pytest.approx(5 / 14),
        "streams with kernels": 2,
        "sum of streams' busy time / their union": pytest.approx(17 / 14),
        "acting's kernels that ran beside learning's, share": pytest.approx(3 / 5),
    }
    assert overlap([]) == {"streams with kernels": 0}
    alone = overlap([span(7, 0, 10)])
    assert alone["sum of streams' busy time / their union"] == 1


def test_longest_kernels_by_hand() -> None:
    spans = [{"name": n, "dur": d} for n, d in (("a", 1.0), ("b", 5.0), ("a", 2.0))]
    assert longest(spans) == {"kernel 1": "62.5%, 1 times: b", "kernel 2": "37.5%, 2 times: a"}
    assert longest([]) == {}


def test_figures_of_a_training_by_hand() -> None:
    first = {
        "update_seconds_count": 10.0,
        "update_seconds_sum": 1.0,
        "device_busy_seconds_total": 5.0,
        "agent_steps_total": 0.0,
        "gpu_utilization_ratio": 0.8,
        "gpu_throttled": 1.0,
        "gpu_throttled:power_cap": 1.0,
        "gpu_clock_hertz:sm": 1.5e9,
    }
    last = first | {
        "update_seconds_count": 20.0,
        "update_seconds_sum": 1.1,
        "device_busy_seconds_total": 9.0,
        "agent_steps_total": 5000.0,
        "gpu_utilization_ratio": 1.0,
        "gpu_throttled": 2.0,
        "gpu_memory_used_bytes": 2.0**31,
    }
    looks = [Scrape(metrics, {}, {}, 0, {}) for metrics in (first, last)]
    found = figures(looks, 5.0)
    assert found["device busy by NVML, share"] == pytest.approx(0.9)
    assert found["device busy by CUDA events, share"] == pytest.approx(0.8)
    assert found["update, ms, mean"] == pytest.approx(10.0)
    assert found["throttled, share of looks"] == 0.5  # not by the power limit alone
    assert found["sm clock, MHz, mean"] == pytest.approx(1500)
    assert found["GPU memory in use, GiB, most"] == 2.0
    assert found["agent-steps a second"] == 1000
    assert found["power, W, mean"] is None


def test_graphs_of_a_window_by_hand() -> None:
    """10 updates of 12 replays; one eager call and one capture of `act` meanwhile."""
    first = {"update_seconds_count": 2.0, "update_seconds_sum": 1.0, "graph_captures_total": 3.0}
    first |= {"graph_captures_total:act": 3.0, "graph_capture_seconds_total": 0.5}
    first |= {"eager_calls_total": 4.0, "eager_calls_total:update": 4.0}
    last = first | {"update_seconds_count": 12.0, "graph_replays_total": 150.0}
    last |= {"graph_replays_total:act": 30.0, "graph_captures_total": 4.0}
    last |= {"graph_captures_total:act": 4.0, "eager_calls_total": 5.0}
    last |= {"eager_calls_total:act": 1.0, "graph_signatures_total": 6.0}
    found = graphs(*(Scrape(metrics, {}, {}, 0, {}) for metrics in (first, last)))
    assert found["graph replays an update"] == 12
    assert found["the first updates, with captures: ms, mean"] == 500
    assert (found["eager calls before"], found["eager calls meanwhile"]) == (4, 1)
    assert found["eager calls meanwhile, act"] == 1
    assert found["eager calls meanwhile, update"] == 0
    assert (found["graph captures before"], found["graph captures meanwhile"]) == (3, 1)
    assert (found["graph signatures meanwhile"], found["seconds of captures"]) == (6, 0.5)


def test_launches_of_the_learner_in_a_trace_by_hand() -> None:
    def call(name: str, thread: int, kind: str = "cuda_runtime") -> dict[str, object]:
        return {"name": name, "cat": kind, "tid": thread, "ph": "X"}

    names = [
        {"name": "thread_name", "tid": thread, "args": {"name": name}}
        for thread, name in ((1, "learner"), (2, "inference"))
    ]
    calls = [call("cudaGraphLaunch", 1)] * 6 + [call("cudaLaunchKernel", 1)] * 4
    calls += [call("cudaMemcpyAsync", 1), call("cuLaunchKernel", 1, "cuda_driver")]
    calls += [call("cudaGraphLaunch", 2), call("cudaEventRecord", 1), call("aten::mm", 1, "cpu_op")]
    assert launched([*names, *calls], 2) == {
        "launches outside graphs an update": 3,
        "graph launches an update, by the trace": 3,
    }
    assert launched(calls, 2) == {}  # no thread is named


def test_environments_alone_begin_together() -> None:
    """Each prints that it is warm and waits; then its rate and its processor's share."""
    changes = ("env_server.num_workers=2", "env_server.envs_per_worker=4")
    found = rate_alone(load("spread", changes, {}), 0.2)
    assert found.rate > 0
    assert 0 < found.cores <= 2.2


def test_acting_is_told_apart_by_what_the_learner_did() -> None:
    """Between the looks: 10 acts in the first bucket while idle, none during updates."""
    at = ("acting_seconds", "idle")
    first = Scrape({}, {}, {}, 0, {at: {0.001: 5.0, math.inf: 5.0}})
    last = Scrape({}, {}, {}, 0, {at: {0.001: 15.0, math.inf: 15.0}})
    assert waits(first, last) == {
        "arrival to actions, idle: p50, ms": pytest.approx(0.5),
        "arrival to actions, idle: p99, ms": pytest.approx(0.99),
        "arrival to actions, update: p50, ms": None,
        "arrival to actions, update: p99, ms": None,
    }


def test_quantiles_are_values_that_were_measured() -> None:
    values = [float(i) for i in range(1, 101)]
    assert (quantile(values, 0.5), quantile(values, 0.99), quantile([3.0], 0.99)) == (50, 99, 3)


def test_launches_and_waits_among_cudas_calls() -> None:
    counted = {
        **{"cudaLaunchKernel": 40, "cudaLaunchKernelExC": 3, "cuLaunchKernel": 2},
        **{"cudaGraphLaunch": 1, "cudaMemcpyAsync": 4, "cudaMemsetAsync": 5},
        **{"cudaStreamSynchronize": 1, "cudaEventSynchronize": 1, "cudaDeviceSynchronize": 1},
        **{"aten::mm": 9, "cudaEventRecord": 7, "cudaStreamWaitEvent": 6},
    }
    assert calls_of(counted) == (40 + 3 + 2 + 1 + 4 + 5, 1)


def test_predictions_follow_the_newest_saved_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, day, count in (("launches-compared", "02", 600), ("launches", "01", 900)):
        rows = {"spread (MAPPO): update, fp32": {"launches": count, "syncs": 1}}
        rows |= {f"spread (MAPPO): {name}": {"launches": 1, "nodes": 7, "rows": 3}}
        text = json.dumps({"date": f"2026-01-{day}T00:00", "result": {"launches": rows}})
        (tmp_path / f"{name}-202601{day}-2-core-cpu.json").write_text(text)
    (tmp_path / "launches-20260103-2-core-cpu.json").write_text("{")  # cannot be read
    monkeypatch.setattr(figures_module, "RESULTS", tmp_path)
    saved_launches.cache_clear()
    try:
        case = Case("mappo, spread", "spread", preset="spread (MAPPO)")
        assert case.counted("update, fp32") == Count(600)
        assert case.counted("launches") == Count(1, 7, 0, 3)  # the older one alone has it
        assert case.counted("act, 1 sessions") is None
    finally:
        saved_launches.cache_clear()


def test_every_case_is_counted_by_the_launch_benchmark() -> None:
    """Their configurations and what is changed in them are the same."""
    assert {case.preset for case in CASES} == set(PRESETS)
    assert _launch_counts.OF_A_RUN == OF_A_RUN
    for case in CASES:
        config, changes = PRESETS[case.preset]
        assert config == case.config
        assert case.changes == _launch_counts.AS_A_RUN.get(case.preset, changes)


def test_files_with_tests_of_the_gpu_are_found() -> None:
    found = files()
    assert "tests/learner_service/telemetry/test_device_clock.py" in found
    assert "tests/murmur/test_cli.py" not in found


def test_pytests_last_line_is_read() -> None:
    printed = "..F\nFAILED tests/a.py::test_b - assert 1\n1 failed, 2 passed, 3 deselected in 1s"
    assert outcome(printed) == {
        "tests of the GPU: passed": 2,
        "tests of the GPU: failed": 1,
        "test 1 that failed": "FAILED tests/a.py::test_b",
    }
    assert outcome("4 passed, 1 skipped in 2s")["tests of the GPU: failed"] == 0
    assert "did not run" in str(outcome("", "no module")["tests of the GPU: failed"])


def test_a_case_learns_from_the_batches_of_a_run() -> None:
    """15 workers of 64 environments bring 960 unrolls of 16 steps, with GRUs of 128."""
    shapes = {}
    for case in CASES:
        if case.name in ("coma, terrain-reference", "mappo, formation, GRU 64"):
            storage = Trial(case, "cpu").probe.storage
            assert isinstance(storage, RolloutStorage)
            shapes[case.name] = storage.length, storage.envs_per_update
    assert shapes["coma, terrain-reference"] == (16, 960)
    assert shapes["mappo, formation, GRU 64"] == (128, 960)


def test_terrain_published_has_the_minibatches_of_its_preset() -> None:
    (case,) = (case for case in CASES if case.name == "coma, terrain-published")
    config = load(case.config, list(case.changes), {})
    assert resolve_plugin("algorithm", config.algorithm).options.batch_size == 600


def test_results_are_json() -> None:
    json.dumps(gpu.dry_run())

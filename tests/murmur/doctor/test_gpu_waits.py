"""What keeps a GPU waiting: a recorded run, and planted causes, each by its name."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from murmur.cli import app
from murmur.doctor.device_report import device_lines
from murmur.doctor.diagnosis import Diagnosis, diagnose
from murmur.doctor.gpu_waits import failed_captures, gpu_waits
from murmur.doctor.page import show
from murmur.live_page.alerts import doctors_finding
from murmur.runs.run_folder import RunFolder
from murmur.runs.snapshots import Snapshot, from_run
from murmur.shared.config.files import load, save
from tests.murmur.recorded_h100 import (
    DURING_UPDATES,
    IDLE,
    PROMPT,
    REPLAYED,
    SPAN_S,
    counters,
    learner,
    look,
    recorded,
    tiny_kernels,
)

ENVIRONMENTS_ALONE = 65_000  # agent-steps/s of 15 cores, at 0.92 ms an environment step


def said(seen: Diagnosis) -> str:
    out = io.StringIO()
    show(seen, Console(file=out, width=400))
    return out.getvalue()


def test_the_recorded_run_waits_for_eager_updates() -> None:
    seen = diagnose(*look())
    assert seen.bottleneck == "shapes"
    text = said(seen)
    assert "waits for   updates run eagerly because shapes of their inputs change\n" in text
    assert "8 of 33 calls of 'update' launched their kernels one by one, about 59 % of the" in text
    assert "sessions wait about" in text
    assert "99 % of acts take up to 242 ms while updates run, 9.41 ms between them" in text
    assert "works 49 % of the time by CUDA events, 28 % by NVML" in text
    assert "learning: environments wait" not in text
    most = ENVIRONMENTS_ALONE / recorded()["agent-steps a second"]  # times as fast
    for cure in seen.remedies:
        assert "resume the run with this version of murmur" in cure.what
        assert "costs a restart" in cure.cost
        assert 1.02 < cure.rate / seen.rate < most
    assert {wait.kind for wait in seen.waits} == {"shapes", "acts"}


def test_the_recorded_run_without_eager_updates_waits_in_acting() -> None:
    seen = diagnose(*look(**learner(33 * 0.228), **REPLAYED))
    assert seen.bottleneck == "acts"
    (cure,) = seen.remedies
    assert "events and pinned memory" in cure.what
    assert cure.rate / seen.rate == pytest.approx(1.2, abs=0.15)
    assert "waits for   acting waits for updates\n" in said(seen)


def test_late_acts_look_like_slow_environments() -> None:
    states = learner(8.0)["state_seconds_total"]
    states[("inference", "wait_environments")] = 25.0
    states[("inference", "wait_learning")] = 2.0
    assert diagnose(*look(state_seconds_total=states, **REPLAYED)).bottleneck == "acts"
    seen = diagnose(*look(state_seconds_total=states, **REPLAYED, **PROMPT))
    assert seen.bottleneck == "environments"


def test_a_learner_that_always_learns_waits_for_tiny_kernels() -> None:
    """NVML sees kernels 28 % of the time, events see work 49 %."""
    seen = diagnose(*tiny_kernels())
    assert (seen.bottleneck, seen.waits) == ("kernels", ())
    assert "kernels run 28 % of the time by NVML" in seen.causes[0].evidence
    assert "learns less per row" in said(seen)
    late = diagnose(*look(**learner(43.0), **REPLAYED))  # acts are late beside it
    assert late.bottleneck == "kernels"


def test_kernels_that_run_all_the_time_are_not_tiny() -> None:
    before, after = tiny_kernels()
    seen = diagnose(before, replace(after, device={**after.device, "utilization_ratio": 0.47}))
    assert seen.bottleneck == "learning"


def test_few_eager_calls_are_no_cause() -> None:
    """4 of 4,704 calls with 40 s of learning: the first ones of a shape."""
    calls = {
        "eager_calls_total": {("critic",): 4.0},
        "graph_replays_total": {("critic",): 4700.0},
    }
    seen = diagnose(*look(**learner(40.0), **calls, **PROMPT))
    assert (seen.bottleneck, seen.waits) == ("kernels", ())


def test_first_calls_of_a_run_that_begins_are_no_cause() -> None:
    """3 eager calls and a capture before the first replay took 25 of 40 s."""
    calls = {
        "eager_calls_total": {("critic",): 3.0, ("act",): 9.0},
        "graph_replays_total": {("critic",): 20.0, ("act",): 10.0},
        "graph_captures_total": {("critic",): 1.0, ("act",): 3.0},
        "graph_capture_seconds_total": {("critic",): 15.0, ("act",): 5.0},
        "eager_seconds_total": {("critic",): 10.0, ("act",): 4.0},
    }
    seen = diagnose(*look(**learner(40.0), **calls, **PROMPT))
    assert (seen.bottleneck, seen.waits) == ("kernels", ())


def test_eager_calls_on_a_cpu_are_none() -> None:
    """Where there are no graphs all calls are eager."""
    calls = {"eager_calls_total": {("update",): 33.0}, "graph_replays_total": {}}
    seen = diagnose(*look(cuda=False, **learner(40.0), **calls))
    assert (seen.bottleneck, seen.waits, seen.kernels_busy) == ("learning", (), None)
    assert "works 49 % of the time\n" in said(seen)


TIMED = {
    "eager_calls_total": {("critic",): 200.0},
    "graph_replays_total": {("critic",): 4000.0},
    "graph_captures_total": {("critic",): 12.0},
    "graph_capture_seconds_total": {("critic",): 6.0},
    "eager_seconds_total": {("critic",): 20.0},
}


def test_timed_calls_tell_how_long_eager_ones_took() -> None:
    """Of 40 s 26 are eager or captures; 4,212 replays of 14 s / 4,000 would take 14.7 s."""
    before, after = look(**learner(40.0), **TIMED, **PROMPT)
    seen = diagnose(before, after)
    assert seen.bottleneck == "shapes"
    (wait,) = seen.waits
    assert wait.lost_s == pytest.approx(26 - 212 * 14 / 4000)
    assert "12 captures meanwhile" in wait.found
    assert "unrolls_per_update" in wait.remedy
    lines = device_lines(before, after, seen.device_busy)
    assert lines[-2:] == [
        "eager calls meanwhile: critic 200",
        "graphs captured meanwhile: critic 12 (6 s)",
    ]


@pytest.mark.parametrize(
    ("left", "again"),
    [
        (1792.0, "it is tried again after 1,792 more calls"),
        (-1.0, "it is not tried again before the learner restarts"),
    ],
)
def test_a_failed_capture_is_named_with_its_next_try(left: float, again: str) -> None:
    failed = {
        **TIMED,
        "graph_replays_total": {},
        "graph_captures_total": {},
        "graph_fallbacks_total": {("critic", "memory"): 2.0},
        "graph_retry_calls": {("critic",): left},
    }
    before, after = look(**learner(43.0), **failed, **PROMPT)
    assert diagnose(before, after).bottleneck == "captures"
    lines = failed_captures(after)
    assert lines == [
        "the CUDA graph of 'critic' could not be captured 2 times: the device is out of memory; "
        + again
    ]
    (wait,) = gpu_waits(before, after, 43.0)
    assert "algorithm.batch_size" in wait.remedy
    assert "noisier gradients" in wait.cost


def test_a_capture_that_succeeded_later_explains_nothing() -> None:
    failed = {
        **TIMED,
        "graph_fallbacks_total": {("critic", "memory"): 1.0},
        "graph_retry_calls": {("critic",): 0.0},
    }
    before, after = look(**learner(43.0), **failed, **PROMPT)
    assert diagnose(before, after).bottleneck == "shapes"
    assert failed_captures(after)[0].endswith("; it was captured since")


def test_a_failure_elsewhere_does_not_explain_eager_updates() -> None:
    failed = {**TIMED, "graph_fallbacks_total": {("act", "capture"): 1.0}}
    before, after = look(**learner(43.0), **failed, **PROMPT)
    assert diagnose(before, after).bottleneck == "shapes"
    (line,) = failed_captures(after)
    assert line.startswith("the CUDA graph of 'act' could not be captured: the learner's log")


def test_graphs_that_are_off_are_named_with_their_option() -> None:
    off = {**TIMED, "graph_replays_total": {}, "graph_captures_total": {}}
    seen = diagnose(*look(**learner(43.0), **off, **PROMPT))
    assert seen.bottleneck == "eager"
    assert seen.remedies[-1].settings == ("learner.cuda_graph=true",)
    assert "    --set learner.cuda_graph=true\n" in said(seen)


def test_acts_without_a_graph_are_named_so() -> None:
    """Of 40 s of acting 30 are eager: batches that are larger than any graph."""
    states = learner(5.0)["state_seconds_total"]
    states |= {
        ("inference", "wait_learning"): 0.5,
        ("inference", "wait_environments"): 1.5,
        ("inference", "act"): 40.0,
        ("inference", "store"): SPAN_S - 42.0,
    }
    calls = {
        "eager_calls_total": {("act",): 3000.0},
        "graph_replays_total": {("act",): 5000.0, ("update",): 33.0},
        "graph_captures_total": {("act",): 0.0, ("update",): 0.0},
        "eager_seconds_total": {("act",): 30.0},
    }
    seen = diagnose(*look(state_seconds_total=states, **calls, **PROMPT))
    assert seen.bottleneck == "eager acts"
    assert "3000 of 8000 calls of 'act' launched" in seen.waits[0].found
    assert seen.waits[0].settings == ("learner.batcher.max_batch_envs=1024",)


def test_eager_updates_of_the_sync_pipeline_are_named() -> None:
    """Of 45.4 s learning takes 30, of which eager calls are 20: 25.6 s would be enough."""
    states = {
        ("inference", "wait_environments"): 8.0,
        ("inference", "act"): SPAN_S - 38.0,
        ("inference", "forward"): 30.0,
    }
    seen = diagnose(*look(state_seconds_total=states, **TIMED, **PROMPT))
    assert seen.bottleneck == "shapes"
    lost = seen.waits[0].lost_s
    best = next(cure for cure in seen.remedies if "one shape" in cure.what)
    assert best.rate / seen.rate == pytest.approx(SPAN_S / (SPAN_S - lost))


def test_acts_that_waited_are_counted() -> None:
    """Of 45.4 s acting waits 9: a fifth."""
    waited = {
        "acts_waited_total": {("update",): 66.0},
        "acts_waited_seconds_total": {("update",): 9.0},
    }
    seen = diagnose(*look(**learner(8.0), **REPLAYED, **waited, eager_seconds_total={}))
    assert seen.bottleneck == "acts"
    assert "66 acts waited, 20 % of the time; 99 % of acts take up to 242 ms" in seen.waits[0].found
    assert "py-spy" in seen.waits[0].remedy
    waited["acts_waited_seconds_total"] = {("update",): 1.0}
    seen = diagnose(*look(**learner(8.0), **REPLAYED, **waited, **PROMPT))
    assert seen.waits == ()


def test_unknown_sessions_are_those_of_the_configuration() -> None:
    config = load("terrain-reference", ["env_server.num_workers=15"], {})
    before, after = look(sessions=0, **learner(8.0), **REPLAYED)
    known = gpu_waits(*look(**learner(8.0), **REPLAYED), 8.0)
    assert gpu_waits(before, after, 8.0, config) == known
    (unknown,) = gpu_waits(before, after, 8.0)
    assert unknown.lost_s == 0
    assert unknown.found.startswith("acts are late; 99 % of acts take up to 242 ms")


def records() -> list[dict[str, Any]]:
    """The recorded run as its log holds it, over 60 s."""

    def at(share: float) -> dict[str, Any]:
        of = counters(share)
        phases: dict[str, dict[str, float]] = {}
        for (phase, le), count in of["acting_seconds_bucket"].items():
            phases.setdefault(phase, {})[le] = count
        ledger: dict[str, dict[str, float]] = {}
        for (thread, state), seconds in of["state_seconds_total"].items():
            ledger.setdefault(thread, {})[state] = seconds
        names = ("graph_replays", "eager_calls")
        graphs = {n: {k[0]: v for k, v in of[f"{n}_total"].items()} for n in names}
        return {
            **{"kind": "progress", "time": 100 + SPAN_S * share, "environments_limit": 0},
            "env_steps": of["env_steps_total"][()],
            "agent_steps": of["agent_steps_total"][()],
            "rows_received": of["rows_received_total"][()],
            "updates": of["updates_total"][()],
            "device_busy_s": of["device_busy_seconds_total"][()],
            **{"machine_busy": 0.8, "ledger": ledger, "latency": phases, "graphs": graphs},
            "device": {"utilization_ratio": recorded()["device busy by NVML, share"]},
        }

    return [at(0.0), at(0.2), at(1.0)]


def test_a_runs_folder_tells_the_same(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    config = load("terrain-reference", ["env_server.num_workers=15"], {})
    save(config, run.path / "config.yaml")
    run.progress_file.write_text("".join(json.dumps(line) + "\n" for line in records()))
    assert diagnose(*from_run(run, None), config).bottleneck == "shapes"
    alert = doctors_finding(run, config)
    assert alert is not None
    assert alert.what.startswith("Updates run eagerly because shapes of their inputs change: ")
    assert "costs a restart" in alert.fix
    done = CliRunner().invoke(app, ["doctor", str(tmp_path), "--no-probe"])
    assert "updates run eagerly because shapes of their inputs change" in done.output
    assert done.exit_code == 1


def test_nothing_is_said_of_a_learner_of_before() -> None:
    before, after = look(**learner(43.0), **PROMPT)
    bare: tuple[Snapshot, Snapshot] = replace(before, graphs={}), replace(after, graphs={})
    assert gpu_waits(*bare, 43.0) == []
    assert DURING_UPDATES[5] == IDLE[5] == 1.0

"""What limits a run, by hand-computed arithmetic, and the same answer from every source."""

import io
import json
import tracemalloc
import urllib.parse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from murmur.cli import app
from murmur.doctor.diagnosis import diagnose
from murmur.doctor.page import examine, show
from murmur.learner_service.learning.base import algorithm_config
from murmur.learner_service.tuning.probe import seconds_per_row
from murmur.runs.run_folder import RunFolder
from murmur.runs.snapshots import UPDATES, Snapshot, from_metrics, from_prometheus, from_run
from murmur.shared.config import PluginConfig
from murmur.shared.config.files import load, save
from murmur.shared.config.plugins import resolve_plugin
from murmur.shared.process.errors import ConfigError
from tests.learner_service.toys import vector_spec

START = Snapshot(1000.0, 0, 0, 0.0, {"inference": {"start": 1.0}, "learner": {"start": 1.0}}, 3)


def after(
    seconds: float,
    rows: float,
    inference: dict[str, float],
    learner: dict[str, float] | None,
    **kw: Any,
) -> Snapshot:
    threads = {"inference": {"start": 1.0, **inference}}
    if learner is not None:
        threads["learner"] = {"start": 1.0, **learner}
    return Snapshot(1000.0 + seconds, rows, 10, kw.pop("device", 0.0), threads, 3, **kw)


def test_environments_too_slow() -> None:
    """10 s, 1000 rows: acting took 1 ms a row, learning 2 ms: it could take 475 rows a second."""
    seen = diagnose(
        START,
        after(
            10, 1000, {"wait_environments": 9.0, "act": 0.6, "store": 0.4},
            {"wait_rows": 8.0, "forward": 1.5, "publish": 0.5}, device=2.0, machine_busy=0.1,
        ),
        load("spread", ["env_server.num_workers=2"], {}),
    )  # fmt: skip
    assert seen.bottleneck == "environments"
    assert seen.rate == 100
    assert seen.device_busy == pytest.approx(0.2)
    assert seen.busy == {"acting": pytest.approx(0.1), "learning": pytest.approx(0.2)}
    twice, four, most = seen.remedies
    assert (twice.rate, twice.limit) == (200, "environments")
    assert (four.rate, four.device_busy) == (400, pytest.approx(0.8))
    # Five times as many would bring 500 rows; learning lets 0.95 / 2 ms through.
    assert (most.rate, most.limit) == (pytest.approx(475), "learning")
    assert most.settings == ("env_server.num_workers=10",)
    assert most.device_busy == pytest.approx(0.95)


def test_supply_servers_too_slow() -> None:
    """10 s, 400 samples: learning took 5 ms a sample, so that it could take 190 a second."""
    learner = {"start": 1.0, "wait_rows": 8.0, "forward": 1.5, "evaluate": 0.5}
    seen = diagnose(
        Snapshot(1000.0, 0, 0, 0.0, {"learner": {"start": 1.0}}, 1, cache="stream"),
        Snapshot(1010.0, 400, 50, 2.0, {"learner": learner}, 1, cache="stream"),
    )
    assert (seen.bottleneck, seen.rate, seen.cache) == ("servers", 40, "stream")
    assert seen.busy == {"learning": pytest.approx(0.2)}
    twice, four, most = seen.remedies
    assert (twice.what, twice.limit) == ("2 times as many supply servers", "servers")
    assert twice.rate == 80
    assert four.rate == 160
    assert (most.rate, most.limit) == (pytest.approx(190), "learning")
    said = io.StringIO()
    show(seen, Console(file=said, width=100))
    assert "the supply servers: the learner waits for samples" in said.getvalue()
    assert "40 samples a second" in said.getvalue()


def test_processors_bound_what_more_environments_give() -> None:
    seen = diagnose(
        START,
        after(10, 1000, {"wait_environments": 9.0, "act": 1.0}, {"wait_rows": 10.0},
              machine_busy=0.8),
    )  # fmt: skip
    assert seen.bottleneck == "environments"
    assert {r.limit for r in seen.remedies} == {"processors"}
    assert {r.rate for r in seen.remedies} == {125.0}  # 100 / 0.8


def test_policy_lag_bounds_what_more_environments_give() -> None:
    """A worker of two sessions of 4; an update takes 10 environments, rows may be 1 update old.

    So 20 may be under way, less the 0 to 9 that wait for the rest of their update: room for 5, 5,
    5, 5, 4, 4, 4, 4, 3 and 3 sessions. Of four workers' eight, 5 leave a worker out in C(6, 5) of
    C(8, 5) cases, 4 in 15 of 70, 3 in 20 of 56: 3.571, 3.143 and 2.571 workers are busy, 3.2 on
    average. Of two workers' four sessions never fewer than 3 are in: both workers are busy.
    """
    seen = diagnose(
        START,
        after(10, 1000, {"wait_environments": 9.5, "act": 0.5}, {"wait_rows": 9.5, "forward": 0.5},
              environments_limit=20),
        load(
            "spread",
            [
                "env_server.num_workers=1",
                "env_server.envs_per_worker=8",
                "env_server.sessions_per_worker=2",
            ],
            {},
        ),
        algorithm_config(PluginConfig(name="mappo", batch_size=64, batch_number=3)).about,
    )  # fmt: skip
    rates = {r.settings: (r.rate, r.limit) for r in seen.remedies}
    two, four = "env_server.num_workers=2", "env_server.num_workers=4"
    assert rates[(two,)] == (200, "environments")
    assert rates[(four,)] == (pytest.approx(320), "policy lag")
    # With more minibatches an update takes in as many as there are: 3 * 32 / (20 - 9 / 2) = 6.2.
    assert rates[four, "algorithm.batch_number=7"] == (400, "environments")


def test_learning_too_slow() -> None:
    """Learning is busy all the time; the probe says: bf16 halves it, fewer passes do more."""
    asked: list[Sequence[str]] = []

    def speedup(settings: Sequence[str]) -> float | None:
        asked.append(settings)
        if "learner.precision=bf16" in settings:
            return 2.0
        return 12.0 if "data_passes" in settings[0] else None

    config = load("spread", ["learner.precision=fp32"], {})
    seen = diagnose(
        START,
        after(10, 1000, {"wait_learning": 9.0, "act": 1.0}, {"forward": 9.9, "wait_rows": 0.1},
              device=9.0),
        config,
        algorithm_config(
            PluginConfig(name="mappo", data_passes=4, batch_size=64, batch_number=8)
        ).about,
        speedup,
    )  # fmt: skip
    assert seen.bottleneck == "learning"
    assert ("algorithm.batch_size=256", "algorithm.batch_number=2") in asked
    half, most = seen.remedies
    assert half.settings == ("learner.precision=bf16",)
    assert half.rate == pytest.approx(0.95 * 2 / 9.9e-3)
    # Twelve times as fast a learner would wait for acting: 1 ms a row.
    assert (most.rate, most.limit) == (pytest.approx(950), "acting")
    said = io.StringIO()
    show(seen, Console(width=20, file=said))
    assert "    --set learner.precision=bf16\n" in said.getvalue()


def test_in_the_sync_pipeline_all_take_turns() -> None:
    """10 s: 2 acting, 5 learning, so 3 for the environments; side by side learning is slowest."""
    start = Snapshot(1000.0, 0, 0, 0.0, {"inference": {"start": 1.0}}, 3)
    seen = diagnose(
        start,
        after(10, 1000, {"wait_environments": 3.0, "act": 2.0, "backward": 4.0, "forward": 1.0},
              None, device=6.0),
    )  # fmt: skip
    assert seen.bottleneck == "turns"
    assert seen.busy == {"acting": pytest.approx(0.2), "learning": pytest.approx(0.5)}
    (overlap,) = seen.remedies
    assert (overlap.rate, overlap.limit) == (pytest.approx(190), "learning")


def test_no_rows_is_an_error_with_the_fix() -> None:
    with pytest.raises(ConfigError, match="are environment servers connected"):
        diagnose(START, after(10, 0, {"wait_environments": 10.0}, {"wait_rows": 10.0}))


METRICS = """\
# HELP murmur_learner_rows_received_total rows
# TYPE murmur_learner_rows_received_total counter
murmur_learner_rows_received_total {rows}
# TYPE murmur_learner_env_steps_total counter
murmur_learner_env_steps_total 10.0
# TYPE murmur_learner_agent_steps_total counter
murmur_learner_agent_steps_total 30.0
# TYPE murmur_learner_sessions gauge
murmur_learner_sessions{{mode="train"}} 4.0
murmur_learner_sessions{{mode="evaluate"}} 1.0
# TYPE murmur_learner_state_seconds counter
murmur_learner_state_seconds_total{{thread="inference",state="act"}} {act}
murmur_learner_state_seconds_total{{thread="learner",state="wait_rows"}} 7.5
"""


def test_two_looks_at_a_metrics_port(serve: Callable[[Callable[[str], str]], str]) -> None:
    rows = iter([100, 250])
    url = serve(lambda path: METRICS.format(rows=next(rows), act=2.5) if path == "/metrics" else "")
    ((first, second),) = from_metrics(url, 0.01)
    assert (first.rows, second.rows) == (100, 250)
    assert first.time < second.time
    assert second.threads == {"inference": {"act": 2.5}, "learner": {"wait_rows": 7.5}}
    assert (second.agents, second.sessions) == (3, 4)


def test_what_prometheus_stored(serve: Callable[[Callable[[str], str]], str]) -> None:
    def answer(path: str) -> str:
        query = urllib.parse.parse_qs(urllib.parse.urlparse(path).query)
        assert "murmur_(learner|env)_.+" in query["query"][0]

        def sample(name: str, value: float, **labels: str) -> dict[str, Any]:
            metric = {"__name__": f"murmur_learner_{name}", "instance": "learner:9101", **labels}
            return {"metric": metric, "value": [0, str(value)]}

        result = [
            sample("rows_received_total", float(query["time"][0])),
            sample("state_seconds_total", 3.0, thread="inference", state="act"),
        ]
        return json.dumps({"status": "success", "data": {"result": result}})

    ((first, second),) = from_prometheus(serve(answer), 60.0)
    assert second.rows - first.rows == pytest.approx(60, abs=0.01)
    assert second.threads == {"inference": {"act": 3.0}}


def slow_updates(cycles: int) -> list[dict[str, Any]]:
    """Updates of 37 s, 8 s apart; the log has lines only between them, every second."""
    lines, learned, waited = [], 0.0, 0.0
    for update in range(1, cycles + 1):
        for _ in range(8):
            waited += 1.0
            t = learned + waited
            lines.append(
                {
                    "kind": "progress", "time": t, "env_steps": 100 * t, "agent_steps": 300 * t,
                    "rows_received": 100 * t, "updates": update, "device_busy_s": learned,
                    "machine_busy": 0.99, "environments_limit": 0,
                    "ledger": {
                        "inference": {"wait_environments": 0.5 * waited, "act": 0.1 * t,
                                      "wait_learning": learned},
                        "learner": {"wait_rows": waited, "forward": 0.4 * learned,
                                    "backward": 0.6 * learned},
                    },
                }
            )  # fmt: skip
        learned += 37.0
    return lines


def test_the_window_covers_several_updates(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    lines = slow_updates(20)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    run.progress_file.write_bytes(b"\xff{garbage\n" + text.encode() + b'{"kind": "progr')
    before, now = from_run(run, None)
    assert now.updates - before.updates == UPDATES
    assert diagnose(before, now).bottleneck == "learning"
    before, now = from_run(run, 30)  # a window within one update sees only what is beside it
    assert now.updates == before.updates
    assert diagnose(before, now).bottleneck != "learning"
    before, now = from_run(run, 150)
    assert now.time - before.time == pytest.approx(150, abs=45)


def test_a_window_too_short_for_updates_is_said(tmp_path: Path) -> None:
    write = RunFolder(tmp_path)
    save(load("spread", [], {}), write.path / "config.yaml")
    lines = slow_updates(3)
    write.progress_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = io.StringIO()
    seen = examine(write, None, None, None, False, Console(file=out, width=300))
    assert seen.bottleneck == "learning"
    assert seen.too_few.startswith("only 2 updates in these 97 s, too few to tell")
    assert "look again in about 3:14" in seen.too_few  # 4 updates at that rate
    assert all(not r.timed and "learns less per row" in r.cost for r in seen.remedies)
    show(seen, Console(file=out, width=300))
    assert out.getvalue().startswith("too few updates yet: only 2 updates")
    within = examine(write, None, None, 30, False, Console(file=out))  # one update
    assert "no update in these 7 s" in within.too_few
    assert "leave --window out" in within.too_few


def test_an_hour_of_progress_is_read_from_its_end(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    line = json.dumps(slow_updates(1)[0] | {"metrics": {"x" * 1000: 1}}) + "\n"
    with run.progress_file.open("w") as file:
        for _ in range(40):
            file.write(line * 1000)  # 50 MB
        file.write("y" * (3 << 20) + "\n")  # a line longer than a block
        file.writelines(json.dumps(x) + "\n" for x in slow_updates(20))
    tracemalloc.start()
    before, now = from_run(run, None)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert now.updates - before.updates == UPDATES
    assert peak < 8 << 20


def test_an_address_that_is_none_is_named(serve: Callable[[Callable[[str], str]], str]) -> None:
    with pytest.raises(ConfigError, match=r"cannot read http://127\.0\.0\.1:1/metrics: .*refused"):
        from_metrics("http://127.0.0.1:1", 1)
    with pytest.raises(ConfigError, match="serves no metrics of a learner"):
        from_metrics(serve(lambda path: "up 1\n"), 1)


def test_an_update_is_timed_for_on_policy_and_replay() -> None:
    config = load("spread", ["algorithm.batch_size=64", "algorithm.batch_number=2"], {})
    assert 0 < seconds_per_row(config, vector_spec(), repeats=1) < 1
    options = resolve_plugin("algorithm", config.algorithm).options
    assert options.batch_size == 64
    assert options.data_passes >= 1  # a default


def test_the_doctor_reads_a_finished_run(tmp_path: Path) -> None:
    config = load("spread", [], {})
    (tmp_path / "config.yaml").write_text(json.dumps(config.model_dump(mode="json")))
    lines = [
        {
            "kind": "progress", "time": 100.0 + t, "env_steps": 100 * t, "agent_steps": 300 * t,
            "rows_received": 100 * t, "updates": t, "device_busy_s": 0.3 * t, "machine_busy": 0.1,
            "environments_limit": 0,
            "ledger": {
                "inference": {"wait_environments": 0.9 * t, "act": 0.1 * t},
                "learner": {"wait_rows": 0.8 * t, "forward": 0.2 * t},
            },
        }
        for t in range(1, 41)
    ]  # fmt: skip
    (tmp_path / "progress.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = CliRunner().invoke(app, ["doctor", str(tmp_path)])
    assert "waits for   the environments" in result.output
    assert "works 30 % of the time" in result.output
    assert "300 agent-steps a second" in result.output
    assert result.exit_code == 1
    result = CliRunner().invoke(app, ["doctor", str(tmp_path), "--json", "--target", "0.2"])
    assert result.exit_code == 0
    assert json.loads(result.output)["bottleneck"] == "environments"


def test_doctor_says_what_is_in_flight(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    chosen = {"environments": 64, "unroll_steps": 32, "unrolls_per_update": 64, "max_policy_lag": 2}
    lines = [line | {"rollout": chosen} for line in slow_updates(20)]
    run.progress_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    before, now = from_run(run, None)
    assert now.environments == 64
    said = io.StringIO()
    show(diagnose(before, now), Console(width=100, file=said))
    words = (
        "an update takes 64 unrolls of 32 steps from 64 environments, rows at most 2 updates old"
    )
    assert words in said.getvalue()

"""What `murmur train` shows."""

import io
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from murmur.runs import supervisor, training
from murmur.runs.child import ChildError, child_environment
from murmur.runs.live_view import LiveView, TrainingView
from murmur.runs.run_folder import RunFolder
from murmur.runs.settings import changed, with_plugin_defaults
from murmur.runs.training import prepare, print_end, train
from murmur.shared.config import PluginConfig
from murmur.shared.config.experiment import RunConfig
from murmur.shared.config.files import load, save
from murmur.text import in_rows

RECORD: dict[str, Any] = {
    "kind": "progress",
    "seconds": 75.0,
    "updates": 123_456,
    "env_steps": 12_345_678,
    "agent_steps_per_s": 12_345.6,
    "policy_lag": 0.75,
    "return": -123.4,
    "metrics": {"success_rate": 0.5, "collisions": 2.0, "leader_distance": 31.0, "steps": 99.0},
}
NAMES = ["updates", "env steps", "agent-steps/s", "policy lag", "return", *RECORD["metrics"]]


def console(width: int, *, terminal: bool) -> tuple[Console, io.StringIO]:
    screen = io.StringIO()
    made = Console(
        file=screen, width=width, force_terminal=terminal, color_system=None, legacy_windows=False
    )
    return made, screen


def test_rows_hold_what_fits() -> None:
    """Widths 3 + 2 + 3 = 8 fit into 8, a fourth of 1 does not; 9 fits nowhere."""
    words = ["abc", "def", "g", "too-long!", "h"]
    assert in_rows(words, len, gap=2, limit=8) == [["abc", "def"], ["g"], ["too-long!"], ["h"]]
    assert in_rows([], len, gap=2, limit=8) == []


GPU = {
    "utilization_ratio": 0.28,
    "memory_used_bytes": 13 * 2.0**30,
    "memory_total_bytes": 79.6 * 2**30,
}


@pytest.mark.parametrize("terminal", [True, False])
def test_a_gpu_is_shown_where_there_is_one(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainingView, "line_every_s", 0.0)
    for device in (GPU, {"memory_bytes": 3e8}):
        made, screen = console(200, terminal=terminal)
        with TrainingView(RunConfig(name="demo", max_updates=200_000), made) as view:
            view.update({**RECORD, "device": device})
        shown = screen.getvalue()
        for text in ("GPU (NVML)", "28 %", "GPU memory", "13.0 of 79.6 GiB"):
            assert (text in shown) == (device is GPU)


@pytest.mark.parametrize("terminal", [True, False])
def test_the_metric_that_chooses_is_always_shown(
    terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrainingView, "line_every_s", 0.0)
    made, screen = console(200, terminal=terminal)
    record = {**RECORD, "metrics": {**RECORD["metrics"], "f1": 0.25}}
    means = {name: {"mean": value} for name, value in record["metrics"].items()}
    with TrainingView(RunConfig(name="demo", max_updates=200_000), made, "f1") as view:
        view.update(record)
        view.update({"kind": "evaluation", "updates": 7, "metrics": means})
        view.update({"kind": "evaluation", "updates": 8, "metrics": {"return": {"mean": 1.0}}})
    shown = screen.getvalue()
    rest = "success_rate 0.500, collisions 2.000, leader_distance 31.000, f1 0.250"
    assert f"evaluation after 7 updates: {rest}\n" in shown
    assert "evaluation after 8 updates: return 1.000\n" in shown
    assert shown.count("f1") == (2 if not terminal else shown.count("leader_distance"))


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_terminal_shows_every_name_whole(width: int) -> None:
    made, screen = console(width, terminal=True)
    with TrainingView(RunConfig(name="demo", max_updates=200_000), made) as view:
        view.update(RECORD)
    shown = screen.getvalue()
    for name in (*NAMES, "123,456", "12,345,678"):
        assert name in shown
    assert "…" not in shown.replace("starting …", "")


def test_a_log_shows_every_figure_in_lines_of_80(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LiveView, "line_every_s", 0.0)
    made, screen = console(80, terminal=False)
    with TrainingView(RunConfig(name="demo", max_updates=200_000), made) as view:
        view.update(RECORD)
    lines = screen.getvalue().splitlines()
    assert lines[0].startswith("1:15  62 %  updates 123,456")
    assert all(len(line) <= 80 for line in lines)
    assert all(line.startswith("      ") for line in lines[1:])
    for name in NAMES:
        assert name in screen.getvalue()


def test_until_rows_come_it_says_that_environments_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LiveView, "line_every_s", 0.0)
    made, screen = console(80, terminal=False)
    with TrainingView(RunConfig(name="demo", max_updates=200_000), made) as view:
        view.update({**RECORD, "rows_received": 0})
        before = screen.getvalue()
        view.update({**RECORD, "rows_received": 64})
    after = screen.getvalue().removeprefix(before)
    assert before == "1:15  environments start; compiling may take minutes\n"
    assert after.startswith("1:15  62 %")


def test_a_replay_that_catches_up_is_seen_to_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rows come while updates that are due are made."""
    monkeypatch.setattr(LiveView, "line_every_s", 0.0)
    made, screen = console(80, terminal=False)
    still = {**RECORD, "agent_steps_per_s": 0.0}
    with TrainingView(RunConfig(name="demo", max_updates=200_000), made) as view:
        view.update(RECORD)
        view.update(still | {"updates": RECORD["updates"] + 50, "seconds": RECORD["seconds"] + 10})
        assert "0.000 agent-steps/s  5.000 updates/s" in screen.getvalue()
        before = screen.getvalue()
        view.update(still | {"updates": RECORD["updates"] + 50, "seconds": RECORD["seconds"] + 20})
    assert "updates/s" not in screen.getvalue().removeprefix(before)


def test_a_run_at_its_limit_is_said_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LiveView, "line_every_s", 0.0)
    made, screen = console(80, terminal=False)
    with TrainingView(RunConfig(name="demo", max_updates=RECORD["updates"]), made) as view:
        view.update(RECORD)
    assert screen.getvalue().startswith("1:15  100 %, ending  updates")


LOG = Path("runs/demo/logs/env-server.log")


def test_a_terminal_shows_the_newest_trouble_below_the_figures() -> None:
    made, screen = console(80, terminal=True)
    with TrainingView(RunConfig(name="demo"), made) as view:
        view.trouble(LOG, "12:00:00 worker-0: ERROR first")
        view.update(RECORD)
        view.trouble(LOG, "12:00:05 worker-0: ERROR the [0, 1]")
    last = screen.getvalue().rpartition("demo ")[2]
    assert last.index("updates") < last.index(f"{LOG} (1 before it): 12:00:05 worker-0: ERROR")
    assert "[0, 1]" in last
    assert "first" not in last


def test_log_shows_the_newest_trouble_every_ten_seconds() -> None:
    made, screen = console(80, terminal=False)
    with TrainingView(RunConfig(name="demo"), made) as view:
        view.trouble(LOG, "12:00:00 worker-0: ERROR first")
        assert screen.getvalue() == f"{LOG}: 12:00:00 worker-0: ERROR first\n"
        for _ in range(3):
            view.trouble(LOG, "12:00:05 worker-0: ERROR " + "long " * 100)
        assert screen.getvalue().count("\n") == 1
    last = screen.getvalue().splitlines()[1]  # and once at the end
    assert last.startswith(f"{LOG} (3 before it): 12:00:05 worker-0: ERROR long long")
    assert last.endswith("…")
    assert len(last) < 300


def test_end_compares_two_evaluations_and_names_their_updates(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    save(load("spread", [], {}), run.path / "config.yaml")
    evaluations = [
        {"kind": "evaluation", "updates": updates, "metrics": {"return": {"mean": mean}}}
        for updates, mean in ((0, 1.25), (1500, 2.5))
    ]
    run.progress_file.write_text(
        "".join(json.dumps(line) + "\n" for line in [RECORD, *evaluations])
    )
    made, screen = console(80, terminal=False)
    print_end(run, 0, made)
    assert "evaluated after 0 updates   evaluated after 1,500 updates" in screen.getvalue()
    assert "return   1.250                       2.500" in screen.getvalue()

    run.progress_file.write_text("".join(json.dumps(x) + "\n" for x in [RECORD, evaluations[0]]))
    made, screen = console(80, terminal=False)
    print_end(run, 0, made)
    assert "evaluated" not in screen.getvalue()
    assert "return of the last episodes: -123" in screen.getvalue()


@pytest.mark.parametrize(("name", "drawn"), [("formation", True), ("matrix", False)])
def test_the_end_recommends_pictures_where_there_are_any(
    name: str, drawn: bool, tmp_path: Path
) -> None:
    run = RunFolder(tmp_path)
    (tmp_path / "x.yaml").write_text(f"environment: {{name: {name}}}")
    save(load(str(tmp_path / "x.yaml"), [], {}), run.path / "config.yaml")
    run.progress_file.write_text(json.dumps(RECORD) + "\n")
    made, screen = console(80, terminal=False)
    print_end(run, 0, made)
    assert ("murmur render" in screen.getvalue()) == drawn
    assert "murmur report" in screen.getvalue()


def test_run_keeps_its_configuration_if_another_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder(tmp_path)
    before = save(load("spread", [], {}), run.path / "config.yaml").read_text()
    fake = tmp_path / "learner.py"  # what it is given, and the exit code of a user's mistake
    fake.write_text(
        "import pathlib, sys; given = pathlib.Path(sys.argv[2]); "
        "given.with_name('given.yaml').write_text(given.read_text()); "
        "print('error: it does not fit', file=sys.stderr); sys.exit(2 * ('--resume' in sys.argv))"
    )
    monkeypatch.setattr(
        supervisor, "murmur_command", lambda *a: [sys.executable, "-S", str(fake), *a]
    )
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "update-000001.pt").touch()
    wider = ["network.name=mlp", "network.hidden=[9]"]
    prepared = prepare(None, wider, run=tmp_path, resume=True, learners=None, command="")
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(ChildError, match="it does not fit"):
        train(prepared, console(80, terminal=False)[0])
    assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert (tmp_path / "config.yaml").read_text() == before
    given = load(str(tmp_path / "given.yaml"), [], {})
    assert given.network.options["hidden"] == [9]
    assert {p.name for p in tmp_path.glob("*.yaml")} == {"config.yaml", "given.yaml"}


@pytest.mark.parametrize(
    ("said", "kept"),
    [(None, "critic"), ("critic", "critic"), ("return", "return")],
    ids=["before-the-option", "critic", "return"],
)
def test_a_resumed_run_keeps_what_coma_advantages_are_of(
    said: str | None, kept: str, tmp_path: Path
) -> None:
    """One of before the option was there had the critic's, and says all other options."""
    new = with_plugin_defaults(load("spread", ["algorithm.name=coma"], {}))
    assert new.algorithm.options["advantage"] == "return"
    options = {k: v for k, v in new.algorithm.options.items() if k != "advantage"}
    options |= {"advantage": said} if said else {}
    old = PluginConfig(name="coma", **options)
    save(new.model_copy(update={"algorithm": old}), tmp_path / "config.yaml")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "update-000001.pt").touch()
    prepared = prepare(None, (), run=tmp_path, resume=True, learners=None, command="")
    assert with_plugin_defaults(prepared.config).algorithm.options["advantage"] == kept
    prepared.folder.lock.release()


OLD_PORTS = {"learner.port": 50051, "learner.metrics_port": 9101, "env_server.metrics_port": 9102}


@pytest.mark.parametrize(
    ("given", "environ", "ports"),
    [
        ([], {}, [None, None, None]),
        (["learner.port=50051", "learner={metrics_port: 9101}"], {}, [None, 9101, None]),
        (["learner.port=50051"], {}, [50051, None, None]),
        ([], {"MURMUR__ENV_SERVER__METRICS_PORT": "9102"}, [None, None, 9102]),
        (["learner.port=50052"], {}, [50052, None, None]),
    ],
)
def test_a_resumed_run_takes_usual_ports_of_its_file_for_auto(
    given: list[str], environ: dict[str, str], ports: list[int | None], tmp_path: Path
) -> None:
    saved = [f"{key}={port}" for key, port in OLD_PORTS.items()]
    save(load("spread", saved, {}), tmp_path / "config.yaml")
    assert not OLD_PORTS.keys() & changed(RunFolder(tmp_path).config()).keys()
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "update-000001.pt").touch()
    prepared = prepare(
        None, given, run=tmp_path, resume=True, learners=None, command="", environ=environ
    )
    prepared.folder.lock.release()
    learner, server = prepared.config.learner, prepared.config.env_server
    assert [learner.port, learner.metrics_port, server.metrics_port] == ports


def test_offline_learners_need_no_worker_each(tmp_path: Path) -> None:
    alone = ["run.offline=true", "imitation.dataset=data", "env_server.num_workers=1"]
    few = [*alone, "env_server.sessions_per_worker=1", "env_server.envs_per_worker=8"]
    run = tmp_path / "run"
    prepared = prepare("spread", few, run=run, resume=False, learners=2, command="", environ={})
    prepared.folder.lock.release()
    assert prepared.learners == 2


def test_servers_leave_processors_to_a_learner_on_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`murmur train` starts both, whatever address the configuration has for other commands."""
    monkeypatch.setattr(training, "available_cores", lambda: 16.0)
    given = ["env_server.learner=gpu-host:50051"]
    run = tmp_path / "run"
    prepared = prepare("spread", given, run=run, resume=False, learners=1, command="", environ={})
    prepared.folder.lock.release()
    chosen = prepared.config.env_server.num_workers, prepared.config.learner.num_threads
    assert chosen == (11, 4)  # and one processor for acting


def test_refused_option_leaves_nothing_and_needs_no_torch_here(tmp_path: Path) -> None:
    """The learner checks the options of its plug-ins; `murmur train` itself imports no torch."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").touch()
    program = (
        "import sys\nfrom murmur.cli import main\ntry:\n    main()\n"
        "finally:\n    print('torch' in sys.modules)"
    )
    command = ["train", "spread", "--run", "mine", "--set", "algorithm.lamda=1"]
    run = subprocess.run(
        [sys.executable, "-c", program, *command],
        cwd=tmp_path,
        env=child_environment() | {"MURMUR_PARENT": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 2, run.stderr
    (line,) = run.stderr.splitlines()
    assert line.startswith("error: ")
    assert "algorithm.lamda" in line
    assert run.stdout.endswith("False\n")
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["notes"]

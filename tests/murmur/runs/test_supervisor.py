"""The supervisor, with real processes that are as small as can be."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

import murmur.runs.supervisor as supervisor
from murmur.runs.child import Child, ChildError, child_environment, exit_message
from murmur.runs.log_errors import last_error
from murmur.runs.run_folder import RunFolder
from murmur.runs.supervisor import Supervisor
from murmur.shared.config.files import load, save
from murmur.shared.process.errors import ResourceError
from murmur.shared.process.process import Backoff
from tests.waiting import wait_until

SERVERS = ("env-server", "evaluator")
# Stands for `python -m murmur`: learner.json, then two progress lines, dying before the second
# unless it was started with --resume; other roles wait to be stopped.
FAKE_MURMUR = """
import json, pathlib, sys, time
role, run = sys.argv[1], pathlib.Path(sys.argv[2]).parent
(run / f"{role}.arguments").open("a").write(json.dumps(sys.argv[1:]) + "\\n")
if role != "learner":
    time.sleep(60)
progress = (run / "progress.jsonl").open("a", buffering=1)
(run / "checkpoints").mkdir(exist_ok=True)
(run / "learner.json").write_text(json.dumps({"pid": 1, "port": 4242, "metrics_port": 1}))
if "--resume" not in sys.argv:
    progress.write(json.dumps({"kind": "progress", "updates": 1}) + "\\n")
    (run / "checkpoints" / "update-000001.pt").touch()
    print("12:00:00 learner: ERROR this one dies\\nTraceback: ERROR \\n12:00:00 learner: INFO end")
    print(json.dumps({"time": "", "level": "WARNING", "message": "again"}), flush=True)
    print("12:00:00 learner: WARNING notice: 5 arrives as 4", flush=True)
    print("12:00:00 learner: INFO cloning 9 transitions of 3 episodes in data", flush=True)
    where = "listening on 127.0.0.1:4242 (port 50051 is in use), metrics on http://127.0.0.1:1"
    print(json.dumps({"level": "INFO", "message": where, "time": ""}), flush=True)
    notice = json.dumps({"kind": "cast", "subject": "x", "text": "5 arrives as 4"}) + "\\n"
    (run / "notices.jsonl").write_text(2 * notice)
    time.sleep(0.6)
    sys.exit(1)
progress.write(json.dumps({"kind": "progress", "updates": 2}) + "\\n")
time.sleep(0.6)
"""


def tiny(code: str, tmp_path: Path, name: str = "tiny") -> Child:
    """A child that runs a line of Python and is restarted at once."""
    command = [sys.executable, "-S", "-c", code]
    backoff = Backoff(0.01, 0.01, lambda: 1.0)
    return Child(name, lambda _: command, tmp_path / f"{name}.log", backoff=backoff)


def tend_until(child: Child, enough: int, said: list[str]) -> None:
    def dead() -> bool:
        child.tend(said.append)
        return child.deaths >= enough

    child.start()
    wait_until(dead)


def test_a_child_that_dies_is_started_again_and_counted(tmp_path: Path) -> None:
    said: list[str] = []
    child = tiny("print('here', flush=True); raise SystemExit(3)", tmp_path)
    tend_until(child, 3, said)
    child.wait(5)
    assert child.deaths == 3
    assert child.log.read_text().count("here") >= 3
    assert "exit code 3" in said[0]


def test_a_child_that_is_told_to_start_again_did_not_die(tmp_path: Path) -> None:
    said: list[str] = []
    child = tiny("import time; print('here', flush=True); time.sleep(60)", tmp_path)
    child.backoff = Backoff(30.0, 30.0, lambda: 1.0)  # of deaths
    child.start()
    try:
        wait_until(lambda: "here" in child.log.read_text())
        child.restart()
        wait_until(lambda: child.tend(said.append) is not None)
        wait_until(lambda: child.log.read_text().count("here") == 2)
    finally:
        child.kill()
    assert (child.deaths, said) == (0, [])


def test_a_child_that_keeps_dying_ends_the_run(tmp_path: Path) -> None:
    child = tiny("raise SystemExit(1)", tmp_path)
    with pytest.raises(ResourceError, match=r"died 5 times in a row .*tiny\.log"):
        tend_until(child, 99, [])


def test_a_users_error_is_shown_in_the_childs_message(tmp_path: Path) -> None:
    code = "import sys; print('error: port 5 is taken', file=sys.stderr); sys.exit(2)"
    with pytest.raises(ChildError, match=r"^port 5 is taken$"):
        tend_until(tiny(code, tmp_path), 1, [])
    code = "import sys; print('12:00:00 worker-0: ERROR no learner', file=sys.stderr); sys.exit(2)"
    with pytest.raises(ChildError, match=r"^no learner$"):
        tend_until(tiny(code, tmp_path), 1, [])


def test_a_child_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); "
    code += "time.sleep(60)"
    child = tiny(code, tmp_path)
    child.start()
    wait_until(child.log.read_text)
    process = child.process
    assert process is not None
    child.signal(signal.SIGTERM)
    child.wait(0.2)
    assert process.returncode == -signal.SIGKILL


def test_child_with_the_same_error_twice_at_start_ends_the_run(tmp_path: Path) -> None:
    code = "raise AttributeError(f'no {object()} agent_id')"
    child, said = tiny(code, tmp_path), list[str]()
    with pytest.raises(
        ChildError, match=r"tiny failed twice at its start: AttributeError: no .*_id"
    ):
        tend_until(child, 9, said)
    assert len(said) == 1  # started again once


def test_other_failures_at_the_start_are_tried_again(tmp_path: Path) -> None:
    file = tmp_path / "count"
    code = (
        f"open({str(file)!r}, 'a').write('x'); raise OSError('x' * len(open({str(file)!r}).read()))"
    )
    child = tiny(code, tmp_path)
    tend_until(child, 3, [])
    assert child.deaths == 3
    killed = tiny("import os; print('error: no'); os.kill(os.getpid(), 9)", tmp_path, "killed")
    tend_until(killed, 3, [])
    assert killed.deaths == 3


def test_the_last_error_is_named_with_what_was_raised(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    lines = ["12:00:00 learner: ERROR the run cannot begin", "Traceback (most recent call last):"]
    lines += ['  File "x.py", line 1', "KeyError: 'lost'", "12:00:01 learner: INFO end"]
    log.write_text("old\n" + "\n".join(lines))
    assert last_error(log) == "the run cannot begin: KeyError: 'lost'"
    log.write_text(json.dumps({"level": "ERROR", "message": "no", "traceback": "\n".join(lines)}))
    assert last_error(log) == "no: KeyError: 'lost'"
    assert last_error(log, log.stat().st_size) == ""


def test_exit_message() -> None:
    assert exit_message(1) == "exit code 1"
    assert exit_message(-9) == "killed by SIGKILL"


def test_children_take_their_settings_from_the_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MURMUR__RUN__SEED", "5")
    environment = child_environment()
    assert "MURMUR__RUN__SEED" not in environment
    assert environment["OMP_WAIT_POLICY"] == "passive"


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    config = load("spread", ["evaluation.every_updates=1"], {})
    folder = RunFolder.create(config, tmp_path / "run")
    save(config, folder.path / "config.yaml")
    return folder


def test_a_run_survives_its_learners_death(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = tmp_path / "fake.py"
    fake.write_text(FAKE_MURMUR)

    def fake_command(*arguments: str) -> list[str]:
        return [sys.executable, "-S", str(fake), *arguments]

    monkeypatch.setattr(supervisor, "murmur_command", fake_command)
    said: list[str] = []
    records: list[dict[str, Any]] = []
    run.logs.joinpath("learner.log").write_text("1:00:00 learner: ERROR of an earlier start\n")
    troubles: list[tuple[str, str]] = []
    trainer = Supervisor(
        run,
        resume=False,
        host="127.0.0.1",
        servers=SERVERS,
        say=said.append,
        on_progress=records.append,
        on_trouble=lambda log, line: troubles.append((log.name, line)),
    )
    others = trainer.others
    trainer.run()

    assert [r["updates"] for r in records] == [1, 2]
    assert trainer.deaths == 1
    assert sorted(said)[0] == "! 5 arrives as 4"
    assert "learner ended (exit code 1)" in sorted(said)[1]
    assert sorted(said)[2:] == [
        "learner: cloning 9 transitions of 3 episodes in data",
        "learner: listening on 127.0.0.1:4242 (port 50051 is in use)",
    ]
    assert troubles == [
        ("learner.log", "12:00:00 learner: ERROR this one dies"),
        ("learner.log", '{"time": "", "level": "WARNING", "message": "again"}'),
    ]
    first, second = map(json.loads, (run.path / "learner.arguments").read_text().splitlines())
    assert "--resume" not in first
    assert "--resume" in second
    servers = (run.path / "env-server.arguments").read_text().splitlines()
    assert all('env_server.learner=\\"127.0.0.1:4242' in line for line in servers)
    assert sum("--evaluate" in line for line in servers) == 1
    assert all(child.process is None for child in others)  # and all were stopped


def test_a_complete_run_needs_no_other_process(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = tmp_path / "fake.py"
    fake.write_text(
        "import sys; print('12:00:00 learner: WARNING nothing to do: all done', file=sys.stderr)"
    )
    monkeypatch.setattr(supervisor, "murmur_command", lambda *_: [sys.executable, str(fake)])
    said: list[str] = []
    run.path.joinpath("notices.jsonl").write_text('{"text": "said before it was resumed"}\n')
    trainer = Supervisor(
        run,
        resume=True,
        host="127.0.0.1",
        servers=SERVERS,
        say=said.append,
        on_progress=print,
        on_trouble=lambda log, line: said.append(line),
    )
    trainer.run()
    assert said == ["nothing to do: all done"]
    assert all(child.process is None for child in trainer.others)


def test_an_interrupt_is_answered_before_the_learner_has_ended(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = tmp_path / "fake.py"
    fake.write_text(FAKE_MURMUR + "time.sleep(60)\n")
    monkeypatch.setattr(
        supervisor, "murmur_command", lambda *a: [sys.executable, "-S", str(fake), *a]
    )
    said: list[tuple[str, bool]] = []

    def say(line: str) -> None:
        process = trainer.learner.process
        said.append((line, process is not None and process.poll() is None))

    def interrupt(record: dict[str, Any]) -> None:
        if record["updates"] == 2:
            raise KeyboardInterrupt

    trainer = Supervisor(
        run,
        resume=True,
        host="127.0.0.1",
        servers=SERVERS,
        say=say,
        on_progress=interrupt,
        on_trouble=lambda log, line: None,
    )
    with pytest.raises(KeyboardInterrupt):
        trainer.run()
    ((line, learner_lives),) = said
    assert line.startswith("stopping: the learner")
    assert learner_lives
    assert trainer.learner.process is None


# Stands for it too: each process notes its end, for which the learner takes a moment.
FAKE_STOPPED = """
import json, pathlib, signal, sys, time
role, run = sys.argv[1], pathlib.Path(sys.argv[2]).parent
name = "evaluator" if "--evaluate" in sys.argv else role
def end(*_):
    time.sleep(0.5 if name == "learner" else 0)
    (run / "ended").open("a").write(name + "\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
(run / f"{name}.begun").touch()
if name == "learner":
    (run / "learner.json").write_text(json.dumps({"port": 4242}))
    while len(list(run.glob("*.begun"))) < 3:
        time.sleep(0.02)
    (run / "progress.jsonl").write_text(json.dumps({"kind": "progress"}) + "\\n")
while True:
    time.sleep(60)
"""


def test_the_learner_ends_before_those_that_bring_it_rows(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = tmp_path / "fake.py"
    fake.write_text(FAKE_STOPPED)
    monkeypatch.setattr(
        supervisor, "murmur_command", lambda *a: [sys.executable, "-S", str(fake), *a]
    )

    def interrupt(record: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    trainer = Supervisor(
        run,
        resume=False,
        host="127.0.0.1",
        servers=SERVERS,
        say=lambda line: None,
        on_progress=interrupt,
        on_trouble=lambda log, line: None,
    )
    with pytest.raises(KeyboardInterrupt):
        trainer.run()
    first, *others = (run.path / "ended").read_text().splitlines()
    assert first == "learner"
    assert sorted(others) == ["env-server", "evaluator"]


def test_children_die_with_a_killed_supervisor(tmp_path: Path) -> None:
    child_code = (
        "from murmur.runs.child import join_supervisor; import time; join_supervisor(); "
        "print('joined', flush=True); time.sleep(60)"
    )
    log = tmp_path / "child.log"
    code = f"""
import sys, time
from pathlib import Path
from murmur.runs.child import Child
child = Child("child", lambda _: [sys.executable, "-c", {child_code!r}], Path({str(log)!r}))
child.start()
print(child.process.pid, flush=True)
time.sleep(60)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        wait_until(lambda: log.exists() and "joined" in log.read_text())
        os.kill(parent.pid, signal.SIGKILL)
    wait_until(
        lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE,
        "the child dies with its supervisor",
    )

"""The live page over HTTP: a real server on a real port, a run's folder that grows."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from murmur.doctor.causes import CAUSES
from murmur.doctor.machine import ROOT
from murmur.live_page import curves as curves_module
from murmur.live_page import view
from murmur.live_page.ledger_states import STATES
from murmur.live_page.server import LivePage, served
from murmur.runs.child import child_environment
from murmur.runs.run_folder import EPISODE, RunFolder
from murmur.shared.config.files import load, save
from murmur.shared.process.errors import ConfigError
from tests.murmur.runs_on_disk import write_run


def progress(step: int, **more: Any) -> dict[str, Any]:
    return {
        "kind": "progress",
        "time": 1000.0 + step,
        "seconds": float(step),
        "updates": step,
        "env_steps": 100 * step,
        "rows_received": 5000 * step,
        "return": -50.0 + step,
        "agent_steps_per_s": 2000.0,
        "policy_lag": 1.0,
        "metrics": {"success": 0.5},
        "losses": {"loss": 1.0 / step},
        "ledger": {"learner": {"wait_rows": 0.75 * step, "forward": 0.25 * step}},
        **more,
    }


def append(run: RunFolder, *records: dict[str, Any]) -> None:
    with run.progress_file.open("a") as file:
        file.write("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    made = write_run(tmp_path / "run", [])
    made.progress_file.write_text("")
    return made


@pytest.fixture
def page(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> Iterator[LivePage]:
    monkeypatch.setattr(view, "LOOK_S", 0.0)
    with contextlib.closing(LivePage(run, 0)) as made:
        yield made


def ask(
    page: LivePage, path: str, method: str = "GET", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    connection = HTTPConnection("127.0.0.1", page.port, timeout=10)
    with contextlib.closing(connection):
        connection.request(
            method, path, headers={k.replace("_", "-"): v for k, v in headers.items()}
        )
        answer = connection.getresponse()
        return answer.status, dict(answer.headers), answer.read()


def state(page: LivePage, cursor: str = "") -> dict[str, Any]:
    status, _, body = ask(page, f"/state.json?since={cursor}")
    assert status == 200
    return dict(json.loads(body))


def whole_state(page: LivePage) -> dict[str, Any]:
    """Return the state once all records are read; a slow machine needs several answers."""
    while (answer := state(page))["behind"]:
        pass
    return answer


def test_a_configuration_that_cannot_be_read_yet_is_read_later(run: RunFolder) -> None:
    file = run.path / "config.yaml"
    text, shown = file.read_text(), view.RunView(run)
    file.write_text("environment: {")
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"config\.yaml"):
            shown.state()
    file.write_text(text)
    assert shown.state()["state"]


def test_page_is_whole_without_another_host(page: LivePage) -> None:
    for path, kind in (
        ("/", "text/html"),
        ("/page.css", "text/css"),
        ("/page.js", "text/javascript"),
        ("/charts.js", "text/javascript"),
        ("/ledger.js", "text/javascript"),
        ("/scales.js", "text/javascript"),
    ):
        status, headers, body = ask(page, path)
        assert status == 200
        assert headers["Content-Type"] == f"{kind}; charset=utf-8"
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"
        links = body.replace(b"http://www.w3.org/2000/svg", b"")
        assert b"http://" not in links
        assert b"https://" not in links


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:6106", "127.0.0.1.evil.example:80", ""]
)
def test_other_names_of_this_machine_are_refused(host: str, page: LivePage) -> None:
    """A name that another site made to mean 127.0.0.1 (DNS rebinding)."""
    status, _, body = ask(page, "/state.json", Host=host)
    assert status == 403
    assert b"run" not in body


@pytest.mark.parametrize("host", ["localhost:8080", "127.0.0.1:9", "localhost"])
def test_a_tunnel_may_lead_to_the_page(host: str, page: LivePage) -> None:
    assert ask(page, "/", Host=host)[0] == 200


def test_other_sites_read_nothing(page: LivePage) -> None:
    for site in ("cross-site", "same-site"):
        assert ask(page, "/state.json", Sec_Fetch_Site=site)[0] == 403
        assert ask(page, "/episode.png?newest=1", Sec_Fetch_Site=site)[0] == 403
    assert ask(page, "/state.json", Sec_Fetch_Site="same-origin")[0] == 200
    assert ask(page, "/", Sec_Fetch_Site="cross-site")[0] == 200  # a link


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE"])
def test_only_get_is_answered(method: str, page: LivePage) -> None:
    assert ask(page, "/state.json", method)[0] == 405


@pytest.mark.parametrize(
    "path", ["/config.yaml", "/../config.yaml", "/%2e%2e/config.yaml", "//page.html", "/server.py"]
)
def test_no_other_file_is_served(path: str, page: LivePage) -> None:
    assert ask(page, path)[0] == 404


def test_page_listens_on_loopback_alone(page: LivePage) -> None:
    assert page.url == f"http://127.0.0.1:{page.port}"
    with (
        pytest.raises(ConnectionRefusedError),
        socket.create_connection((_own_address(), page.port), timeout=2),
    ):
        pass


def _own_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this machine has no other address than loopback")
        return str(probe.getsockname()[0])


def test_a_port_in_use_costs_another_port_and_no_training(run: RunFolder) -> None:
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with served(run, port, said.append):
            (line,) = said
            address = line.split()[2]
            assert "in use" in line
            assert str(port) not in address
            assert urllib.request.urlopen(address, timeout=10).status == 200
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(address, timeout=10)


def test_a_gpu_is_shown_where_there_is_one(run: RunFolder, page: LivePage) -> None:
    def on_gpu(step: int) -> dict[str, Any]:
        used = {"utilization_ratio": 0.28, "memory_used_bytes": 2.0**30}
        device = {**used, "memory_total_bytes": 80 * 2.0**30}
        return progress(step, device=device, device_busy_s=0.49 * step)

    append(run, progress(1, device={"memory_bytes": 3e8}), progress(2, device_busy_s=2.0))
    assert not [name for name in state(page)["figures"] if "GPU" in name]
    append(run, on_gpu(3), on_gpu(4))
    shown = state(page)["figures"]
    assert {name: text for name, text in shown.items() if "GPU" in name} == {
        "GPU (NVML)": "28 %",
        "GPU (CUDA events)": "49 %",
        "GPU memory": "1.0 of 80.0 GiB",
    }


def test_a_reader_gets_what_is_new(run: RunFolder, page: LivePage) -> None:
    assert state(page)["curves"]["points"] == []
    append(run, progress(1), progress(2))
    first = state(page)
    assert [p["updates"] for p in first["curves"]["points"]] == [1, 2]
    assert first["curves"]["points"][1]["values"]["return"] == [-48.0, -48.0, -48.0]
    # 2 s in all, of which the second record adds one: 0.75 s and 0.25 s
    assert first["curves"]["points"][1]["ledger"]["learner"] == {"wait_rows": 0.75, "forward": 0.25}
    assert first["figures"]["environment steps"] == "200"
    evaluation = {"kind": "evaluation", "env_steps": 250, "metrics": {"return": {"mean": 1.5}}}
    append(run, progress(3), evaluation)
    with run.progress_file.open("a") as file:
        file.write('{"kind": "progress", "torn')
    second = state(page, first["curves"]["cursor"])["curves"]
    assert second["from"] == 1  # the last point that was there may have grown
    assert [p["updates"] for p in second["points"]] == [2, 3]
    assert second["evaluations"][0]["metrics"] == {"return": [1.5, None, None]}
    third = state(page, second["cursor"])["curves"]
    assert len(third["points"]) == 1
    assert third["evaluations"] == []


def test_a_run_started_anew_in_its_folder_begins_again(run: RunFolder, page: LivePage) -> None:
    append(run, progress(1), progress(2))
    cursor = state(page)["curves"]["cursor"]
    run.progress_file.unlink()
    append(run, progress(7))
    curves = state(page, cursor)["curves"]
    assert curves["from"] == 0
    assert [p["updates"] for p in curves["points"]] == [7]


def test_a_day_of_progress_is_a_few_hundred_points(run: RunFolder, page: LivePage) -> None:
    steps = 3000
    append(
        run, *(progress(i, **{"return": 9.0 if i == 1234 else 0.0}) for i in range(1, steps + 1))
    )
    answer = state(page)
    points = answer["curves"]["points"]
    for _ in range(200):
        if not answer["behind"]:
            break
        answer = json.loads(ask(page, "/state.json")[2])
        points = answer["curves"]["points"]
    assert 200 <= len(points) <= 512
    assert max(p["values"]["return"][2] for p in points) == 9.0  # a spike is not lost
    seconds = sum(sum(p["ledger"]["learner"].values()) for p in points)
    assert seconds == pytest.approx(steps, rel=1e-3)  # nor a second
    assert points[-1]["updates"] == steps


def test_figures_that_are_not_finite_reach_the_page_as_an_alert(
    run: RunFolder, page: LivePage
) -> None:
    append(run, progress(1, losses={"actor_loss": float("nan")}, updates_skipped=3))
    answer = state(page)
    severities = [alert["severity"] for alert in answer["alerts"]]
    assert severities[:2] == ["error", "warning"]
    assert "actor_loss" in answer["alerts"][0]["what"]
    assert "3 updates were skipped" in answer["alerts"][1]["what"]
    assert "losses.actor_loss" not in answer["curves"]["points"][0]["values"]


def test_drops_and_troubles_of_logs_are_alerts(run: RunFolder, page: LivePage) -> None:
    append(run, progress(1, rows_received=10_000, rows_dropped={"lag": 500}))
    run.logs.mkdir()
    lines = [
        "12:00:00 learner: INFO fine",
        "12:00:01 learner: ERROR first",
        "12:00:02 learner: ERROR x",
    ]
    (run.logs / "learner.log").write_text("\n".join(lines) + "\n")
    alerts = state(page)["alerts"]
    assert [alert["severity"] for alert in alerts] == ["error", "warning"]
    assert alerts[0]["what"] == "logs/learner.log (1 before it): 12:00:02 learner: ERROR x"
    assert alerts[1]["what"].startswith("5 % of the rows received were dropped")
    assert "max_policy_lag" in alerts[1]["fix"]


def test_a_run_that_stands_still_is_an_alert(run: RunFolder, page: LivePage) -> None:
    """A process of this machine is at work, and no row has come for a minute."""
    now = time.time()
    still = [progress(i, time=now - 70 + i, rows_received=5000) for i in range(1, 70)]
    append(run, *still)
    learner = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        (run.path / "learner.json").write_text(json.dumps({"pid": learner.pid}))
        answer = whole_state(page)
        assert answer["state"] == "running"
        assert "no row came from an environment server for 1:08" in answer["alerts"][0]["what"]
        append(run, progress(70, time=now - 90))
        assert "the learner writes nothing" in whole_state(page)["alerts"][0]["what"]
    finally:
        learner.communicate()


def test_a_page_that_is_behind_calls_no_run_silent(
    run: RunFolder, page: LivePage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The records read so far are old, the newest is not."""
    now = time.time()
    append(run, *[progress(i, time=now - 700 + i) for i in range(1, 700)])
    learner = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        (run.path / "learner.json").write_text(json.dumps({"pid": learner.pid}))
        with monkeypatch.context() as slow:
            slow.setattr(view, "READ_S", -1.0)
            answer = state(page)
        assert (answer["state"], answer["behind"], answer["alerts"]) == ("running", True, [])
        assert whole_state(page)["alerts"] == []
    finally:
        learner.communicate()


@pytest.mark.parametrize("offline", [False, True])
def test_a_dataset_explains_missing_rows_only_while_updates_come(
    run: RunFolder, page: LivePage, offline: bool
) -> None:
    """Cloning is over after 9 updates, and no server ever delivers; offline none has to."""
    if offline:
        given = ["run.offline=true", "imitation.dataset=data"]
        save(load(str(run.path / "config.yaml"), given, {}), run.path / "config.yaml")
    now = time.time()
    cloned = [
        progress(min(i, 9), time=now - 700 + i, rows_received=0, env_steps=0) for i in range(1, 700)
    ]
    append(run, *cloned)
    learner = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        (run.path / "learner.json").write_text(json.dumps({"pid": learner.pid}))
        answer = whole_state(page)
        assert answer["state"] == "running"
        (what,) = [alert["what"] for alert in answer["alerts"]]
    finally:
        learner.communicate()
    if offline:
        assert what.startswith("there was no update for 11:")
    else:
        assert what.startswith("no row came from an environment server for 11:")


@pytest.mark.parametrize("counts", [{"rows_received": 0}, {"rows_received": 64, "env_steps": 0}])
def test_updates_of_a_dataset_need_no_rows(
    run: RunFolder, page: LivePage, counts: dict[str, int]
) -> None:
    now = time.time()
    append(run, *[progress(i, time=now - 70 + i, **counts) for i in range(1, 70)])
    learner = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        (run.path / "learner.json").write_text(json.dumps({"pid": learner.pid}))
        answer = whole_state(page)
        assert (answer["state"], answer["alerts"]) == ("running", [])
    finally:
        learner.communicate()


def test_states_of_the_page_are_those_of_the_documents() -> None:
    text = (ROOT / "docs" / "idle-gpu.md").read_text()
    (table,) = re.findall(r"^\| thread \| state \|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    told: dict[str, set[str]] = {}
    thread = ""
    for row in table.splitlines():
        names, states = (re.findall(r"`(\w+)`", cell) for cell in row.split("|")[1:3])
        thread = names[0] if names else "both" if "both" in row.split("|")[1] else thread
        told.setdefault(thread, set()).update(states)
    both = told.pop("both")
    for name in ("learner", "inference"):
        told[name] |= both
    assert {thread: set(states) for thread, states in STATES.items()} == told


def test_a_resumed_run_draws_over_what_it_makes_again(run: RunFolder, page: LivePage) -> None:
    append(run, progress(1), progress(2), progress(3), progress(2, seconds=2.5, ledger={}))
    points = state(page)["curves"]["points"]
    assert [(p["env_steps"], p["seconds"]) for p in points] == [(100, 1.0), (200, 2.5)]


def test_the_state_says_what_has_become_of_the_run(run: RunFolder, page: LivePage) -> None:
    append(run, progress(1))
    assert state(page)["state"] == "begun"
    (run.path / "checkpoints" / "update-000001.pt").touch()
    answer = state(page)
    assert answer["state"] == "stopped"
    assert f"--resume --run {run.path}" in answer["words"]
    append(run, progress(2, time=time.time()))
    assert state(page)["state"] == "running"  # written by another machine
    append(run, progress(3, env_steps=1000))
    assert state(page)["state"] == "complete"


def test_without_an_episode_words_say_why(run: RunFolder, page: LivePage) -> None:
    assert state(page)["episode"]["words"].startswith("No episode is recorded yet")
    assert ask(page, "/episode.png?newest=1")[0] == 404
    (run.path / EPISODE).write_bytes(b"no zip")
    assert ask(page, "/episode.png?newest=1")[0] == 404
    episode = state(page)["episode"]
    assert "cannot be drawn" in episode["words"]
    assert episode["recorded"] > 0 == episode["shown"]  # the page does not ask again and again
    shutil.rmtree(run.path)
    assert ask(page, "/state.json")[0] == 200  # a run that was deleted meanwhile


def test_figures_have_at_most_four_digits(run: RunFolder, page: LivePage) -> None:
    large = {"env_steps": 1_234_567, "return": -53.0567, "agent_steps_per_s": 38829.4}
    append(run, progress(123_456, **large, updates_skipped=123_456))
    answer = state(page)
    shown = {n: t for n, t in answer["figures"].items() if n != "training time"}
    assert shown == {
        "updates": "123.5k",
        "environment steps": "1.235M",
        "agent-steps/s": "38.83k",
        "episodes": "–",
        "policy lag": "1",
        "return": "-53.06",
    }
    assert answer["alerts"][0]["what"].startswith("123.5k updates were skipped")


def test_a_long_line_of_a_log_is_shown_whole(run: RunFolder, page: LivePage) -> None:
    run.logs.mkdir()
    line = "12:00:00 learner: ERROR " + "words " * 300 + "the cause"
    (run.logs / "learner.log").write_text(f"{line}\n")
    assert state(page)["alerts"][0]["what"] == f"logs/learner.log: {line}"


@pytest.mark.parametrize("cause", sorted(CAUSES))
def test_a_hint_of_the_doctor_stands_alone(cause: str) -> None:
    """The page shows it below nothing, where no remedy was found."""
    hint = CAUSES[cause].advice.lower()
    assert not re.search(r"\b(above|below|beside|also|else)\b", hint)


def test_losses_come_with_their_meaning(run: RunFolder, page: LivePage) -> None:
    append(run, progress(1, losses={"critic_loss": 1.0, "critic_2_loss": 1.0, "own": 2.0}))
    readings = state(page)["readings"]
    assert readings["critic_loss"].startswith("How far the critic's predictions")
    assert readings["critic_2_loss"] == readings["critic_loss"]
    assert readings["own"] == ""


def test_the_runs_own_files_are_linked(run: RunFolder, page: LivePage) -> None:
    assert state(page)["files"]["report"] is False
    assert ask(page, "/report")[0] == 404
    run.logs.mkdir()
    (run.logs / "learner.log").write_bytes(b"x" * (view.MOST_LOG - 1) + b"\nthe end\n")
    (run.logs / "notes.txt").write_text("no log")
    (run.path / "report.html").write_text("<p>report</p>")
    files = state(page)["files"]
    assert (files["report"], files["logs"]) == (True, ["learner.log"])
    status, headers, body = ask(page, "/log?name=learner.log")
    assert (status, headers["Content-Type"]) == (200, "text/plain; charset=utf-8")
    assert body.startswith(b"(the first 8 bytes are left out")
    assert body.endswith(b"the end\n")
    for name in ("notes.txt", "../config.yaml", "", "/etc/passwd"):
        assert ask(page, f"/log?name={name}")[0] == 404
    assert b"algorithm:" in ask(page, "/configuration")[2]
    status, headers, body = ask(page, "/report")
    assert (status, body) == (200, b"<p>report</p>")
    assert "default-src 'none'; script-src 'sha256-" in headers["Content-Security-Policy"]
    assert ask(page, "/report", Sec_Fetch_Site="cross-site")[0] == 403


def test_secrets_are_not_in_the_configuration(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [], "environment.api_key=s3cret")
    with contextlib.closing(LivePage(run, 0)) as page:
        body = ask(page, "/configuration")[2]
    assert b"api_key" in body
    assert b"s3cret" not in body


def test_a_page_opens_once_its_configuration_can_be_read(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [])
    file = run.path / "config.yaml"
    whole = file.read_text()
    file.write_text("run: {nam: x}\n")
    shown = view.RunView(run)
    for _ in range(2):  # also within LOOK_S of the first
        with pytest.raises(ConfigError, match="nam"):
            shown.state()
    file.write_text(whole)
    assert shown.state()["name"] == run.config().run.name


def test_another_run_is_read_beside_this_one(
    run: RunFolder, page: LivePage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(curves_module, "_LIST_S", 0.0)
    assert state(page)["others"] == []
    append(run, progress(1))
    second = write_run(run.path.parent / "second", [])
    of_sweep = write_run(run.path.parent / "sweep-x" / "one", [])
    write_run(run.path / "begun-1", [])  # a start of this run that was put aside
    for other in (second, of_sweep):
        other.progress_file.write_text("")
        append(other, progress(1), progress(2))
    assert set(state(page)["others"]) == {"second", "sweep-x/one"}

    def curves(name: str, cursor: str = "") -> dict[str, Any]:
        status, _, body = ask(page, f"/curves.json?run={name}&since={cursor}")
        assert status == 200
        return dict(json.loads(body)["curves"])

    first = curves("second")
    assert [p["updates"] for p in first["points"]] == [1, 2]
    append(second, progress(3))
    assert [p["updates"] for p in curves("second", first["cursor"])["points"]] == [2, 3]
    assert len(curves("sweep-x/one")["points"]) == 2
    second.progress_file.unlink()
    append(second, progress(7))  # it was started again
    assert [p["updates"] for p in curves("second", first["cursor"])["points"]] == [7]
    for name in ("..", "run", "/etc", "second/../run", ""):
        assert ask(page, f"/curves.json?run={name}")[0] == 404
    shutil.rmtree(second.path)
    assert ask(page, "/curves.json?run=second")[0] == 404


def test_half_a_request_blocks_no_other(page: LivePage) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(100):  # more than there are places
            slow = stack.enter_context(socket.create_connection(("127.0.0.1", page.port)))
            slow.sendall(b"GET / HTTP/1.1\r\nHost: ")
        assert ask(page, "/")[0] == 200


def test_watch_serves_a_run_until_it_is_stopped(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [(500, 3.0)])
    command = [sys.executable, "-m", "murmur", "watch", str(run.path), "--port", "0"]
    environment = child_environment() | {"MURMUR_PARENT": "", "COLUMNS": "200"}
    watch = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert watch.stdout is not None
    with watch, watch.stdout:
        line = watch.stdout.readline()
        address = next(word for word in line.split() if "http://" in word).rstrip(";")
        with urllib.request.urlopen(f"{address}/state.json", timeout=10) as answer:
            assert json.load(answer)["name"] == load("spread", [], {}).run.name
        os.kill(watch.pid, signal.SIGINT)
        assert watch.wait(20) == 130

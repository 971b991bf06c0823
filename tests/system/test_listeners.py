"""No way to run on one machine opens a socket that another machine reaches."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from murmur.runs.run_folder import RunFolder
from tests.listeners import Listeners, is_loopback
from tests.system.conftest import SPREAD, Training
from tests.waiting import wait_until

pytestmark = pytest.mark.system

_TWO = SPREAD.replace("num_workers: 1", "num_workers: 2")


def murmur(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "murmur", *arguments]


@contextlib.contextmanager
def watched(command: list[str], log: Path) -> Iterator[tuple[subprocess.Popen[bytes], Listeners]]:
    """A process whose sockets are looked at; told to stop at the end if it still runs."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MURMUR")}
    with (
        log.open("wb") as out,
        subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment) as process,
    ):
        try:
            with Listeners(process.pid) as found:
                yield process, found
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(90)


def listening(run: Path, count: int) -> Callable[[], bool]:
    """Whether `count` learners of a run listen."""
    names = ["learner.json", *(f"learner-{rank}.json" for rank in range(1, count))]
    return lambda: all(RunFolder(run).process(name) for name in names)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "two.yaml"
    file.write_text(_TWO)
    return file


def test_open_sockets_of_each_kind_are_found(tmp_path: Path) -> None:
    code = """
        import socket as s, time
        open_ = s.create_server(("0.0.0.0", 0)), s.create_server(("127.0.0.1", 0))
        udp = s.socket(type=s.SOCK_DGRAM); udp.bind(("0.0.0.0", 0))
        six = s.create_server(("::", 0), family=s.AF_INET6)
        unix = s.socket(s.AF_UNIX); unix.bind("\\0murmur-test"); unix.listen()
        time.sleep(60)
    """
    child = [sys.executable, "-c", textwrap.dedent(code)]
    parent = [sys.executable, "-c", f"import subprocess; subprocess.run({child})"]
    with watched(parent, tmp_path / "log") as (_, found):
        wait_until(lambda: len(found.beyond) == 4 and found.loopback, lambda: str(found.beyond))
    kinds = ("SOCK_STREAM 0.0.0.0", "SOCK_STREAM ::", "SOCK_DGRAM 0.0.0.0", "abstract Unix socket")
    assert all(any(kind in text for text in found.beyond) for kind in kinds)


def test_addresses_of_this_machine_alone_are_known() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "::ffff:10.0.0.1", "fe80::1")))


def test_ranks_of_one_machine_listen_on_loopback_alone(config: Path, tmp_path: Path) -> None:
    """Their store and their exchange too."""
    run = tmp_path / "run"
    command = murmur("learner", str(config), "--run", str(run), "--learners", "2")
    with watched(command, tmp_path / "log") as (process, found):
        ready = listening(run, 2)
        # Ports and metrics of both, at least.
        wait_until(lambda: ready() and len(found.loopback) >= 4, (tmp_path / "log").read_text)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert not found.beyond


@pytest.mark.long
@pytest.mark.parametrize("learners", [1, 2])
def test_training_with_its_live_page_listens_on_loopback_alone(
    config: Path, tmp_path: Path, learners: int
) -> None:
    arguments = ["--learners", str(learners), "--page", "--page-port", "0"]
    arguments += ["--set=run.max_updates=8", "--set=evaluation.every_updates=2"]
    training = Training(config, tmp_path / "run", [*arguments, "--set=evaluation.episodes=2"])
    try:
        with Listeners(training.process.pid) as found:
            assert training.wait() == 0, training.output()
    finally:
        training.close()
    assert found.loopback
    assert not found.beyond


@pytest.mark.long
def test_sweep_and_what_reads_its_runs_listen_on_loopback_alone(
    config: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "sweep"
    sweep = murmur("sweep", str(config), "--seeds", "2", "--folder", str(folder))
    sweep += ["--set", "run.max_updates=4"]
    log = tmp_path / "log"
    with watched(sweep, log) as (process, found):
        assert process.wait(240) == 0, log.read_text()
    assert found.loopback
    assert not found.beyond
    run = str(next(path.parent for path in folder.rglob("config.yaml")))
    for command in (
        ("evaluate", run, "--checkpoint", "latest", "--episodes", "2"),
        ("report", run, "--checkpoint", "latest"),
        ("export", run, "--checkpoint", "latest", "--output", str(tmp_path / "policy.onnx")),
    ):
        with watched(murmur(*command), log) as (process, found):
            assert process.wait(240) == 0, log.read_text()
        assert not found.beyond, command


@pytest.mark.long
@pytest.mark.parametrize("learners", [1, 2])
def test_services_by_hand_listen_on_loopback_alone(
    config: Path, tmp_path: Path, learners: int
) -> None:
    """Learners, an environment server and an evaluator, with the default hosts."""
    run = tmp_path / "run"
    learner = murmur("learner", str(config), "--run", str(run), "--learners", str(learners))
    settings = ["--set", "evaluation.every_updates=1", "--set", "evaluation.episodes=2"]
    with contextlib.ExitStack() as stack:

        def start(name: str, command: list[str]) -> Listeners:
            return stack.enter_context(watched([*command, *settings], tmp_path / name))[1]

        all_found = [start("learner", learner)]
        wait_until(listening(run, learners))
        names = ["learner.json", *(f"learner-{rank}.json" for rank in range(1, learners))]
        ports = [json.loads((run / name).read_text())["port"] for name in names]
        settings += ["--set", "env_server.learner=" + ",".join(f"127.0.0.1:{p}" for p in ports)]
        all_found.append(start("server", murmur("env-server", str(config))))
        all_found.append(start("evaluator", murmur("env-server", str(config), "--evaluate")))
        wait_until(lambda: '"evaluation"' in _text(run / "progress.jsonl"), timeout_s=120)
    assert all(found.loopback for found in all_found)
    assert not set[str]().union(*(found.beyond for found in all_found))


def _text(file: Path) -> str:
    return file.read_text() if file.exists() else ""


_ELSEWHERE = """
ip link set lo up && ip addr add 10.9.9.9/24 dev lo && hostname elsewhere || exit 77
printf '10.9.9.9 elsewhere\\n127.0.0.1 localhost\\n' > "$1/hosts"
mount --bind "$1/hosts" /etc/hosts || exit 77
shift
exec "$@"
"""


@pytest.mark.long
@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs util-linux")
def test_ranks_stay_on_loopback_whatever_the_hostname(config: Path, tmp_path: Path) -> None:
    """gloo listens where the name of the host leads, by default."""
    run = tmp_path / "run"
    train = murmur("train", str(config), "--run", str(run), "--learners", "2", "--no-page")
    train += ["--set", "run.max_updates=4"]
    file = tmp_path / "sockets.json"
    command = [sys.executable, "-m", "tests.listeners", str(file), *train]
    space = ["unshare", "-rnmu", "bash", "-c", _ELSEWHERE, "-", str(tmp_path)]
    with watched([*space, *command], tmp_path / "log") as (process, _):
        if process.wait(240) == 77 or not file.exists():
            pytest.skip("no namespaces here")
    assert process.returncode == 0, (tmp_path / "log").read_text()
    found = json.loads(file.read_text())
    assert found["loopback"]
    assert not found["beyond"]

"""`make test-compose`: the committed Dockerfiles and docker-compose.yml, built and run.

Grafana is left out: it takes minutes to download and nothing of murmur runs in it. With SAVE=1 the
figures go to benchmarks/results.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from murmur.results import provenance, require_clean_source, result_tables, save_result

pytestmark = [pytest.mark.containers, pytest.mark.timeout(1800)]
ROOT = Path(__file__).parents[2]
SETTINGS = {
    "COMPOSE_PROJECT_NAME": "murmur-test",
    "MURMUR_CONFIG": "spread",
    "LEARNER_METRICS_PORT": "19101",
    "PROMETHEUS_PORT": "19090",
    "LEARNER_METRICS_SUBNET": "172.31.249.0/24",
    "ENV_METRICS_SUBNET": "172.31.250.0/24",
}
# For a second stack beside the first.
APART = {
    "LEARNER_METRICS_PORT": "19111",
    "PROMETHEUS_PORT": "19091",
    "LEARNER_METRICS_SUBNET": "172.31.247.0/24",
    "ENV_METRICS_SUBNET": "172.31.248.0/24",
}
SERVICES = ("learner", "env", "prometheus")
BASE_MB = 130  # python:3.11.15-slim-bookworm as Docker's official images list it: 129.96
MAX_ENV_MB = 570  # unpacked, with the base image; OpenCV's wheel alone is 159
MAX_ENV_PULL_MB = 160  # compressed, as it is pulled, without it
ALONE = "murmur-env-alone:0.2.0"  # without OpenCV
MAX_ALONE_MB = 400
MAX_ALONE_PULL_MB = 100
IMAGE_OF = {"env": "murmur-env:0.2.0", "env alone": ALONE, "learner": "murmur-learner:0.2.0"}
OWN = ("-f", "docker-compose.yml", "-f", "docker-compose.own.yml")


class Stack:
    """The services of docker-compose.yml."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = environment | SETTINGS

    @contextmanager
    def settings(self, **changes: str) -> Iterator[None]:
        """With other variables of docker-compose.yml."""
        before = self._environment
        self._environment = before | changes
        try:
            yield
        finally:
            self._environment = before

    def docker(
        self, *arguments: str, check: bool = True, input: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        result = subprocess.run(
            ["docker", *arguments],
            cwd=ROOT,
            env=self._environment,
            input=input,
            capture_output=True,
            text=True,
            check=False,
        )
        assert not check or result.returncode == 0, f"{arguments}\n{result.stdout}\n{result.stderr}"
        return result

    def compose(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.docker("compose", *arguments, check=check)

    def containers(self, service: str) -> list[str]:
        return self.compose("ps", "-q", service).stdout.split()

    def inspect(self, container: str, what: str) -> str:
        return self.docker("inspect", "-f", what, container).stdout.strip()

    def limit(self, service: str, cpus: float) -> None:
        """Change how many cores each of its containers may use."""
        self.docker("update", f"--cpus={cpus}", *self.containers(service))

    def crash(self, container: str) -> None:
        """Kill its main process from outside, as the kernel would."""
        os.kill(int(self.inspect(container, "{{.State.Pid}}")), signal.SIGKILL)

    def learner(self, metric: str) -> float:
        """A sample of the learner's /metrics, by the published port; 0 while it is not there."""
        try:
            url = f"http://127.0.0.1:{SETTINGS['LEARNER_METRICS_PORT']}/metrics"
            text = urllib.request.urlopen(url, timeout=5).read().decode()
        except OSError:
            return 0.0
        found = re.search(rf"^{re.escape(metric)} (\S+)$", text, re.M)
        return float(found[1]) if found else 0.0

    def prometheus(self, query: str) -> dict[str, float]:
        """Instance -> value; nothing while Prometheus is not there."""
        url = f"http://127.0.0.1:{self._environment['PROMETHEUS_PORT']}/api/v1/query?"
        url += urllib.parse.urlencode({"query": query})
        try:
            result = json.load(urllib.request.urlopen(url, timeout=5))["data"]["result"]
        except OSError:
            return {}
        return {r["metric"].get("instance", ""): float(r["value"][1]) for r in result}

    def until(self, what: str, condition: Callable[[], bool], timeout_s: float = 180) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                logs = self.compose("logs", "--tail", "20", check=False).stdout
                raise AssertionError(f"not within {timeout_s:.0f} s: {what}\n{logs}")
            time.sleep(0.5)

    def rate(self, seconds: float) -> float:
        """Environment steps a second, over some seconds."""
        start, steps = time.monotonic(), self.learner("murmur_learner_env_steps_total")
        time.sleep(seconds)  # a measurement, not a synchronisation
        steps = self.learner("murmur_learner_env_steps_total") - steps
        return steps / (time.monotonic() - start)


SESSIONS = 'murmur_learner_sessions{mode="train"}'


@pytest.fixture(scope="module")
def figures(pytestconfig: pytest.Config) -> Iterator[dict[str, Any]]:
    """What the tests measure; printed at the end."""
    measured: dict[str, Any] = {}
    saves = os.environ.get("SAVE") == "1"
    if saves:
        require_clean_source(os.environ.get("DIRTY") == "1")
    origin = provenance() | {"command": "SAVE=1 make test-compose"}
    yield measured
    measured["load_average"] = os.getloadavg()[0]
    with pytestconfig.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        for table in result_tables(measured, width=120):
            Console(width=120).print("", table)
    if saves:
        save_result("compose", measured, origin)


@pytest.fixture(scope="module")
def stack(engine: dict[str, str]) -> Iterator[Stack]:
    stack = Stack(engine)
    try:
        stack.compose("build", "learner", "env")
        yield stack
    finally:
        stack.compose("--profile", "*", "down", "--volumes", "--timeout", "20", check=False)


def test_compose_knows_every_key(stack: Stack) -> None:
    more = ("docker-compose.gpu.yml", "docker-compose.own.yml")
    for files in ([], more[:1], more[1:], more):
        options = [o for file in ("docker-compose.yml", *files) for o in ("-f", file)]
        with stack.settings(OWN_FOLDER="/anywhere"):
            assert not stack.compose(*options, "--profile", "*", "config", "-q").stderr
    refused = stack.compose(*OWN, "config", "-q", check=False)
    assert "OWN_FOLDER is missing a value: the folder of your environment" in refused.stderr


def test_sizes(stack: Stack, figures: dict[str, Any]) -> None:
    """The base image may be a stand-in, so the real one's size is added."""
    base = re.findall(r"^FROM (\S+)", (ROOT / "env_service/Dockerfile").read_text(), re.M)[0]
    extras = ["--build-arg", "EXTRAS=env"]
    stack.docker("build", "-f", "env_service/Dockerfile", *extras, "-t", ALONE, ".")
    for name, image in IMAGE_OF.items():
        count = ["--entrypoint", "sh", image, "-c", "tar c -C /opt murmur | gzip | wc -c"]
        added = _megabytes(stack, image) - _megabytes(stack, base)
        figures.setdefault(f"image, added to {base}", {})[name] = {
            "unpacked_mb": added,
            "with_the_base_mb": added + BASE_MB,
            "to_pull_mb": int(stack.docker("run", "--rm", *count).stdout) / 1e6,
        }
    env, alone = (figures[f"image, added to {base}"][name] for name in ("env", "env alone"))
    assert env["with_the_base_mb"] <= MAX_ENV_MB
    assert env["to_pull_mb"] <= MAX_ENV_PULL_MB
    assert alone["with_the_base_mb"] <= MAX_ALONE_MB
    assert alone["to_pull_mb"] <= MAX_ALONE_PULL_MB


def _megabytes(stack: Stack, image: str) -> float:
    return int(stack.docker("image", "inspect", "-f", "{{.Size}}", image).stdout) / 1e6


def test_each_image_has_the_libraries_that_work_in_it(stack: Stack) -> None:
    """kornia augments on the learner's device, OpenCV decodes on servers that supply images."""
    expected = {"env": "cv2", "env alone": "", "learner": "torch kornia"}
    for name, there in expected.items():
        find = (
            "import importlib.util as u; "
            "print(*(n for n in ('torch', 'kornia', 'cv2', 'pip') if u.find_spec(n)))"
        )
        run = ["run", "--rm", "--entrypoint", "python", IMAGE_OF[name], "-c", find]
        assert set(stack.docker(*run).stdout.split()) == set(there.split()), name


def test_images_are_supplied_by_the_image_that_has_opencv(stack: Stack) -> None:
    check = ["check-source", "faces", "--set", "size=128", "--samples", "4"]
    options = ["--rm", "--read-only", "--cap-drop", "ALL", "--tmpfs", "/tmp"]  # noqa: S108
    result = stack.docker("run", *options, IMAGE_OF["env"], *check)
    assert "image: uint8 [3, 128, 128]" in result.stdout + result.stderr
    refused = stack.docker("run", *options, ALONE, *check, check=False)
    assert refused.returncode == 2
    assert "murmur-marl[images]" in refused.stdout + refused.stderr


@pytest.mark.parametrize("name", ["terrain", "formation", "snakes", "spread", "matrix", "memory"])
def test_every_environment_runs_in_it(stack: Stack, name: str) -> None:
    """What the image leaves out, none of them misses."""
    options = ["--read-only", "--cap-drop", "ALL", "--tmpfs", "/tmp"]  # noqa: S108
    result = stack.docker("run", "--rm", *options, "murmur-env:0.2.0", "check-env", name)
    assert f"'{name}' keeps the contract" in result.stdout + result.stderr


@pytest.mark.parametrize(
    ("suffix", "compression"),
    [("png", None), *(("tif", c) for c in ("raw", "tiff_lzw", "tiff_adobe_deflate", "zstd"))],
)
def test_it_reads_rasters(stack: Stack, suffix: str, compression: str | None) -> None:
    """Pillow without fonts, colour profiles, AVIF and WebP still reads terrain."""
    code = (
        "import numpy as np; from PIL import Image; "
        "from murmur.env_service.envs.terrain.world import load_raster; "
        "values = np.arange(200, dtype=np.uint8).reshape(10, 20); "
        f"name = '/tmp/raster.{suffix}'; "
        f"Image.fromarray(values).save(name, compression={compression!r}); "
        "assert (load_raster(name) == values).all()"
    )
    stack.docker("run", "--rm", "--entrypoint", "python", "murmur-env:0.2.0", "-c", code)


def test_it_trains(stack: Stack) -> None:
    stack.compose("up", "-d", *SERVICES)  # not --wait: `certs` is to end
    stack.until("ten updates", lambda: stack.learner("murmur_learner_updates_total") >= 10)
    stack.until(
        "Prometheus sees learner and environment server",
        lambda: sum(stack.prometheus('up{job=~"learner|env"}').values()) == 2,
    )


def test_only_prometheus_reaches_the_metrics(stack: Stack) -> None:
    """Not environment server and learner each other's; that Prometheus does was seen above."""

    def reaches(service: str, host: str, port: int) -> bool:
        code = f"import socket; socket.create_connection(({host!r}, {port}), 3)"
        return (
            stack.compose("exec", "-T", service, "python", "-c", code, check=False).returncode == 0
        )

    addresses = "{{range .NetworkSettings.Networks}}{{.IPAddress}} {{end}}"
    learner, env = (
        stack.inspect(stack.containers(name)[0], addresses).split() for name in ("learner", "env")
    )
    assert len(learner) == len(env) == 2
    assert reaches("env", "learner", 50051)
    assert not any(reaches("env", address, 9101) for address in learner)
    assert not any(reaches("learner", address, 9102) for address in env)


def test_the_root_is_read_only_and_the_user_nobody(stack: Stack) -> None:
    for service in ("learner", "env"):
        user = stack.compose("exec", "-T", service, "id", "-u").stdout.strip()
        assert user == "10001"
        written = stack.compose("exec", "-T", service, "touch", "/opt/murmur/x", check=False)
        assert written.returncode != 0
        assert "Read-only" in written.stderr


def test_four_servers_are_faster_than_one(stack: Stack, figures: dict[str, Any]) -> None:
    """Each server is held to a fiftieth of a core, so that the learner has time for four."""
    states = 'thread="learner",state=~"forward|backward|optimize|synchronize"'
    learning = f"sum(rate(murmur_learner_state_seconds_total{{{states}}}[1m]))"
    rates, busy = [], []
    for servers in (1, 4):
        stack.compose("up", "-d", "--no-recreate", "--scale", f"env={servers}", *SERVICES)
        stack.until("all sessions", lambda n=servers: stack.learner(SESSIONS) == 2 * n)  # type: ignore[misc]
        stack.limit("env", 0.02)
        rates.append(stack.rate(75))  # longer than the minute that the ledger is averaged over
        busy.append(sum(stack.prometheus(learning).values()))
        stack.limit("env", 1.0)
        figures.setdefault("environment servers, a fiftieth of a core each", {})[str(servers)] = {
            "env_steps_per_s": rates[-1],
            "learning_share_of_time": busy[-1],
        }
    assert rates[1] > 1.5 * rates[0]  # four times would be perfect; other work shares the cores
    # The ledger shows why: there is more to learn from. Its share of wall time also depends on what
    # else ran during either window: 1.56 and 2.1 times as much at loads of 14 and 9 on two cores.
    assert busy[1] > 1.3 * busy[0]
    stack.until("all scraped", lambda: sum(stack.prometheus('up{job="env"}').values()) == 4)


@pytest.mark.parametrize("service", ["env", "learner", "prometheus"])
def test_a_crashed_container_comes_back(
    stack: Stack, service: str, figures: dict[str, Any]
) -> None:
    container = stack.containers(service)[0]
    before = stack.inspect(container, "{{.State.StartedAt}}")
    if service == "learner":  # there is something to resume
        stack.until("checkpoint", lambda: stack.learner("murmur_learner_checkpoints_total") > 0)
    since = time.monotonic()
    stack.crash(container)
    stack.until("started again", lambda: stack.inspect(container, "{{.State.StartedAt}}") != before)
    stack.until("all sessions", lambda: stack.learner(SESSIONS) == 8)
    if service == "learner":
        assert "resumed" in stack.docker("logs", container).stderr
    if service == "prometheus":
        stack.until(
            "it scrapes", lambda: sum(stack.prometheus('up{job=~"learner|env"}').values()) == 5
        )
    took = time.monotonic() - since
    figures.setdefault("killed", {})[service] = {"seconds_until_all_is_back": took}
    updates = stack.learner("murmur_learner_updates_total")
    stack.until("updates", lambda: stack.learner("murmur_learner_updates_total") > updates + 5)


def _updates_of(stack: Stack, run: str) -> float:
    query = f'murmur_learner_updates_total * on (instance) murmur_learner_info{{run="{run}"}}'
    return sum(stack.prometheus(query).values())


def test_faces_are_learned_by_name(stack: Stack) -> None:
    """A mission of images needs no other file and no other image."""
    with stack.settings(MURMUR_CONFIG="faces", COMPOSE_PROJECT_NAME="murmur-test-faces", **APART):
        try:
            stack.compose("up", "-d", "learner", "env", "prometheus")
            stack.until("updates", lambda: _updates_of(stack, "faces") > 0, 600)
        finally:
            stack.compose("down", "--volumes", "--timeout", "20", check=False)


def test_pixel_tasks_run_with_further_extras(stack: Stack) -> None:
    image = "murmur-test-butterfly:1"
    with stack.settings(ENV_EXTRAS="env,butterfly", MURMUR_ENV_IMAGE=image):
        stack.compose("build", "env")
    options = ["--rm", "--read-only", "--cap-drop", "ALL", "--tmpfs", "/tmp"]  # noqa: S108
    pistons = ["pettingzoo.butterfly.pistonball_v6:parallel_env", "--set", "resize=84"]
    pistons += ["--set", "arguments.n_pistons=5", "--set", "arguments.render_mode=rgb_array"]
    result = stack.docker("run", *options, image, "check-env", *pistons)
    assert "keeps the contract" in result.stdout + result.stderr


def test_an_environment_outside_the_repository(stack: Stack, tmp_path: Path) -> None:
    """docs/own-environment.md: its files beside code and configuration in another folder."""
    tmp_path.chmod(0o755)  # the containers' user is another one
    page = (ROOT / "docs/your-environment.md").read_text()
    for language, name in (("python", "meet.py"), ("yaml", "meet.yaml")):
        found = re.search(rf"```{language}\n(.*?)```", page, re.DOTALL)
        assert found is not None
        (tmp_path / name).write_text(found[1])
    for file in (ROOT / "examples/own-environment").iterdir():
        (tmp_path / file.name).write_text(file.read_text())
    own = {"OWN_FOLDER": str(tmp_path), "OWN_ENV_IMAGE": "murmur-test-own-env:1"}
    with stack.settings(COMPOSE_PROJECT_NAME="murmur-test-own", **own, **APART):
        try:
            stack.compose(*OWN, "build", "env")
            stack.compose(*OWN, "up", "-d", "learner", "env", "prometheus")
            stack.until("updates", lambda: _updates_of(stack, "meet") > 0, 600)
            # Its run, copied out, needs none of the containers' networks and folders.
            stack.compose(*OWN, "stop", "learner")
            stack.compose(*OWN, "cp", "learner:/runs/.", str(tmp_path / "runs"))
            evaluate = [sys.executable, "-P", "-m", "murmur", "evaluate", "runs/meet"]
            done = subprocess.run(
                [*evaluate, "--episodes", "2"],
                cwd=tmp_path,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            # A change of the code needs no new image.
            (tmp_path / "meet.py").write_text("raise RuntimeError('changed here')\n")
            run = ["run", "--rm", "--no-deps", "env", "check-env", "meet:Meet"]
            changed = stack.compose(*OWN, *run, check=False)
            assert "changed here" in changed.stdout + changed.stderr
        finally:
            stack.compose(*OWN, "down", "--volumes", "--timeout", "20", check=False)


def test_a_mission_beside_it(stack: Stack) -> None:
    """A profile's learner and environment server find each other, and Prometheus finds them."""
    mission = ("learner-formation", "env-formation")
    stack.compose("up", "-d", "--no-recreate", *mission)
    stack.until("updates", lambda: _updates_of(stack, "formation") > 0)
    stack.compose("stop", *mission)


RANKS = ("learner-rank-0", "learner-rank-1")


def _counted(stack: Stack, metric: str) -> list[float]:
    """A metric of both ranks, the smaller first."""
    return sorted(stack.prometheus(f'murmur_learner_{metric}{{rank=~"0|1"}}').values())


def _both_update(stack: Stack) -> None:
    most = max(_counted(stack, "updates_total"), default=0)
    stack.until(
        "both update", lambda: sum(n > most + 5 for n in _counted(stack, "updates_total")) == 2
    )


def test_two_ranks_train_and_come_back_together(stack: Stack) -> None:
    """Profile ranks: both update together; one is killed, and both resume from a whole set."""
    stack.compose("up", "-d", "--no-recreate", *RANKS, "env-ranks", "prometheus")
    stack.until("both have saved", lambda: _counted(stack, "checkpoints_total")[1:] > [0.0])
    first, second = (stack.containers(name)[0] for name in RANKS)
    psutil.Process(int(stack.inspect(second, "{{.State.Pid}}"))).kill()
    for container in (first, second):
        stack.until("it resumes", lambda c=container: "resumed" in stack.docker("logs", c).stderr)  # type: ignore[misc]
    _both_update(stack)
    assert "another rank is gone" in stack.docker("logs", first).stderr
    stack.compose("stop", *RANKS, "env-ranks")
    for container in (first, second):
        assert stack.inspect(container, "{{.State.Running}}") == "false"


def test_another_release_is_named_in_both_logs(stack: Stack) -> None:
    """An environment image that speaks another version of the protocol."""
    change = (
        'FROM murmur-env:0.2.0\nUSER root\nRUN python -c "import pathlib, murmur.shared.rpc as r; '
        "f = pathlib.Path(r.__file__); f.write_text(f.read_text().replace("
        "'PROTOCOL_VERSION = 6', 'PROTOCOL_VERSION = 7'))\"\nUSER 10001:10001\n"
    )
    stack.docker("build", "-t", "murmur-env:other", "-", input=change)
    other = ["--name", "murmur-test-other", "env"]
    with stack.settings(MURMUR_ENV_IMAGE="murmur-env:other"):
        result = stack.compose("run", "--rm", "--no-deps", *other, check=False)
    assert result.returncode == 2
    for log in (result.stdout + result.stderr, stack.compose("logs", "learner").stdout):
        assert "speaks protocol version 7, this learner 6; use the same release" in log


def test_stopping_drains(stack: Stack) -> None:
    """SIGTERM: all services leave in order, in time, and the learner has saved."""
    containers = {name: stack.containers(name) for name in ("env", "learner")}
    started = time.monotonic()
    stack.compose("stop", "env")
    assert time.monotonic() - started < 15
    stack.compose("stop", "learner")
    for name, found in containers.items():
        for container in found:
            assert stack.inspect(container, "{{.State.ExitCode}}") == "0", name
    runs = (
        "import json, pathlib as p; print([str(f) for f in p.Path('/runs').rglob('update-*.pt')])"
    )
    listed = stack.compose(
        "run", "--rm", "--no-deps", "--entrypoint", "python", "learner", "-c", runs
    )
    assert "update-" in listed.stdout


def test_what_the_user_can_mend_is_one_line(stack: Stack) -> None:
    image = "murmur-learner:0.2.0"
    result = stack.docker("run", "--rm", image, "learner", "spread", "--run=/runs/x", check=False)
    assert result.returncode == 2
    assert "learner.host=0.0.0.0 reaches beyond this machine" in result.stderr

    here = "--set=learner.host=127.0.0.1"
    insist = ["learner", "spread", "--run=/runs/x", here, "--set=learner.device=cuda"]
    result = stack.docker("run", "--rm", "--read-only", image, *insist, check=False)
    assert result.returncode == 2
    assert "learner.device is cuda, but" in result.stderr

    unwritable = ["--mount", "type=tmpfs,destination=/runs,tmpfs-mode=0555"]
    result = stack.docker(
        "run", "--rm", *unwritable, image, "learner", "spread", "--run=/runs/x", here, check=False
    )
    assert result.returncode == 2
    assert "cannot make run folder" in result.stderr
    assert "Traceback" not in result.stderr

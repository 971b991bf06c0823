"""Peers that take more than their share of the learner's memory, places, log or threads."""

import contextlib
import re
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from murmur.shared.rpc import METHOD
from murmur.shared.rpc import rollout_pb2 as pb
from murmur.shared.wire.channel import MAX_HELLO_BYTES
from murmur.shared.wire.spec import ArraySpec, Discrete, EnvSpec
from tests.chaos.cases import Case
from tests.chaos.raw_http2 import RawClient
from tests.waiting import wait_until
from tests.wire import hello_message

_MIB = 1024 * 1024
SMALL = EnvSpec("e", 1, (ArraySpec("x", "float32", (2,)),), Discrete(2))

_SCRIPT = """
import sys, threading
from pathlib import Path
from murmur.learner_service.app import run_learner
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.config.section import validate
from murmur.shared.process.process import configure_logging
configure_logging("learner")
learner = {"port": 0, "metrics_port": 0, "device": "cpu"}
learner.update(a.split("=") for a in sys.argv[2:])
algorithm = {"name": "coma", "unroll_steps": 4, "batch_size": 4, "batch_number": 2}
config = validate(ExperimentConfig, {"environment": {"name": "toy"}, "algorithm": algorithm,
    "network": {"name": "mlp", "hidden": [8]}, "learner": learner})
run_learner(config, Path(sys.argv[1]), resume=False, stop=threading.Event(),
            on_ready=lambda port, metrics: print(port, metrics, flush=True))
"""


class Victim:
    """A learner in a process of its own, and what it costs."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        assert process.stdout is not None
        self.process, self.log = process, log
        self.port, self.metrics_port = map(int, process.stdout.readline().split())
        self._ps = psutil.Process(process.pid)

    @property
    def mib(self) -> float:
        """Resident memory."""
        return float(self._ps.memory_info().rss) / _MIB

    @property
    def threads(self) -> int:
        return int(self._ps.num_threads())

    def metric(self, pattern: str) -> float:
        """Sum of the samples that begin with this regular expression."""
        with urllib.request.urlopen(self._url("metrics"), timeout=10) as response:
            text = response.read().decode()
        return sum(float(v) for v in re.findall(rf"^{pattern}\S* (\S+)$", text, re.MULTILINE))

    def healthy(self) -> bool:
        with urllib.request.urlopen(self._url("healthz"), timeout=10) as response:
            return bool(response.status == 200)

    def _url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.metrics_port}/{path}"


@contextlib.contextmanager
def victim(folder: Path, **learner: object) -> Iterator[Victim]:
    """A learner that runs while the context lasts."""
    log = folder / "log"
    options = [f"{name}={value}" for name, value in learner.items()]
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [sys.executable, "-c", _SCRIPT, str(folder / "run"), *options],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        try:
            yield Victim(process, log)
        finally:
            process.kill()


def messages_that_never_end(folder: Path) -> dict[str, Any]:
    """64 streams each announce 64 MiB and send what the learner takes of it; then nothing more."""
    with victim(folder) as learner:
        before = learner.mib
        with contextlib.ExitStack() as stack:
            took = 0
            for _ in range(64):
                client = stack.enter_context(RawClient(learner.port))
                stream = client.stream(METHOD)
                took += client.message(stream, bytes(MAX_HELLO_BYTES), 64 * _MIB)
            # The same by streams that keep to the part: all but the last byte of a Hello.
            for _ in range(64):
                client = stack.enter_context(RawClient(learner.port))
                stream = client.stream(METHOD)
                took += client.message(stream, bytes(MAX_HELLO_BYTES - 1), MAX_HELLO_BYTES)
            grown = learner.mib - before
            assert grown < 400, f"{grown:.0f} MiB"
            assert learner.healthy()
    return {"MiB sent": round(took / _MIB), "MiB grown": round(grown)}


def evaluators_that_fill_every_place(folder: Path) -> dict[str, Any]:
    """More evaluators than there are places wait; a training session is still admitted."""
    with victim(folder, max_sessions=4, max_evaluation_sessions=3) as learner:
        with RawClient(learner.port) as client:
            for i in range(12):
                waiting = hello_message(SMALL, 1, mode=pb.MODE_EVALUATE, worker_id=f"evaluator-{i}")
                client.message(client.stream(METHOD), waiting)
            wait_until(lambda: learner.metric(r"murmur_learner_sessions_refused_total") >= 9)
            training = client.stream(METHOD)
            client.message(training, hello_message(SMALL, 1, mode=pb.MODE_TRAIN))
            wait_until(lambda: learner.metric(r'murmur_learner_sessions\{mode="train"') == 1)
        text = learner.log.read_text()
        assert "the limit is learner.max_evaluation_sessions=3" in text
    return {"refused": 9}


def evaluators_of_huge_sessions(folder: Path) -> dict[str, Any]:
    """Sessions whose messages would take more memory than evaluations have are refused."""
    spec = EnvSpec("e", 1, (ArraySpec("x", "float32", (1000,)),), Discrete(2))
    with victim(folder, max_evaluation_in_flight_mib=70) as learner, RawClient(learner.port) as c:
        c.message(c.stream(METHOD), hello_message(spec, 1, mode=pb.MODE_TRAIN))
        wait_until(lambda: learner.metric(r'murmur_learner_sessions\{mode="train"') == 1)
        before = learner.mib
        for i in range(8):
            c.message(
                c.stream(METHOD),
                hello_message(spec, 16_000, mode=pb.MODE_EVALUATE, worker_id=f"e{i}"),
            )
        wait_until(lambda: learner.metric(r"murmur_learner_sessions_refused_total\S*memory") == 7)
        assert learner.metric(r"murmur_learner_in_flight_bytes\S*evaluate") < 70 * _MIB
        assert learner.mib - before < 50
    return {"refused": 7}


def half_sent_requests_to_the_metrics_port(folder: Path) -> dict[str, Any]:
    """900 connections never finish their request; the probe is answered all the same."""
    with victim(folder) as learner, contextlib.ExitStack() as stack:
        before = learner.threads
        for _ in range(900):
            peer = socket.create_connection(("127.0.0.1", learner.metrics_port), timeout=10)
            stack.enter_context(peer).sendall(b"GET /metrics HTTP/1.1\r\n")
        assert learner.healthy()
        assert learner.metric("murmur_learner_info") == 1
        threads = learner.threads - before
        assert threads < 8, threads
    return {"threads more": threads}


def a_storm_of_refused_streams(folder: Path) -> dict[str, Any]:
    """Hundreds of refused streams are all counted; the log names few, and says how many more."""
    storm = 400
    with victim(folder, max_audit_lines=5) as learner, RawClient(learner.port) as client:
        before = learner.log.stat().st_size
        for _ in range(storm):
            client.message(client.stream(METHOD), b"\xff")
        refused = r"murmur_learner_sessions_refused_total"
        wait_until(lambda: learner.metric(refused) >= storm)
        suppressed = learner.metric("murmur_learner_audit_lines_suppressed_total")
        assert suppressed >= storm - 3 * 5
        wait_until(lambda: "more like this in the last 10 s" in learner.log.read_text())
        written = learner.log.stat().st_size - before
        assert written < 20_000, written
    return {"streams": storm, "bytes of log": written}


CASES = [
    Case("storm of refused streams", a_storm_of_refused_streams),
    Case("half-sent requests to the metrics port", half_sent_requests_to_the_metrics_port),
    Case("messages that never end", messages_that_never_end),
    Case("evaluators fill every place", evaluators_that_fill_every_place),
    Case("evaluators of huge sessions", evaluators_of_huge_sessions),
]

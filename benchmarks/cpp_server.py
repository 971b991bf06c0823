"""The environment server in C++ beside the one in Python: steps a second, and a run that it feeds.

    cmake -S examples/cpp -B build && cmake --build build
    python -m benchmarks.cpp_server build/server --seeds 1 2 3

Both play `spread` in two sessions against a learner that answers at once, in turns. Steps of one
CPU-second of the server survive a busy machine, steps of a second do not. Then learners train on
the server in C++ alone, which also plays their evaluations. The results are
benchmarks/results/cpp-server.json, tables (.md) and the learning curve (.svg).
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil

from benchmarks.figures import Panel, draw, mean_and_range
from benchmarks.learning import curve
from murmur.doctor.machine import RESULTS
from murmur.kit.conformance.play import welcome
from murmur.results import origin_text, provenance, require_clean_source, run_command
from murmur.runs.run_folder import RunFolder
from murmur.shared.rpc import rollout_pb2 as pb
from murmur.shared.wire.channel import SERVER_OPTIONS, stream_handler
from murmur.shared.wire.codec import ActionCodec, ObservationCodec
from murmur.shared.wire.spec import spec_from_proto

DESCRIPTION = "environment steps of the server in C++ beside the one in Python, and a learning run"

_ENVS, _SESSIONS, _TURNS, _SECONDS = (32, 256), 2, 3, 3.0
_CONFIG = """
environment: {{name: spread}}
algorithm: {{name: mappo}}
network: {{name: mlp, hidden: [64, 64]}}
learner: {{port: 0, metrics_port: 0}}
evaluation: {{every_env_steps: 10000, episodes: 100}}
run: {{seed: {seed}, max_env_steps: {steps}}}
"""


class Answering:
    """A learner that answers every observation at once, always by the action 0.

    Attributes:
        port: port on which it listens.
    """

    def __init__(self) -> None:
        """Listen."""
        self._steps: list[int] = []  # of each stream
        self._server = grpc.server(ThreadPoolExecutor(8), options=SERVER_OPTIONS)
        self._server.add_generic_rpc_handlers((stream_handler(self._play),))
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    @property
    def steps(self) -> int:
        """Return the number of environment steps of all streams."""
        return sum(self._steps)

    def close(self) -> None:
        """End all streams."""
        self._server.stop(None).wait()

    def _play(self, messages: Iterator[bytes], _: grpc.ServicerContext) -> Iterator[bytes]:
        hello = pb.WorkerMessage.FromString(next(messages)).hello
        spec, n, stream = spec_from_proto(hello.spec), hello.num_envs, len(self._steps)
        self._steps.append(0)
        observations, actions = ObservationCodec(spec, n), ActionCodec(spec, n)
        action = np.zeros((n, spec.num_agents), np.int32)
        yield welcome(n)
        for message in messages:
            received = observations.receive(message)
            if received is not None:
                self._steps[stream] += n
                yield actions.pack(received[0], 1, action)


def commands(server: str, port: int, envs: int) -> dict[str, list[str]]:
    """Return the command of each server by its language, for sessions of `envs` environments."""
    address = f"127.0.0.1:{port}"
    settings = [f"env_server.learner={address}", "env_server.metrics_port=0"]
    settings += ["env_server.num_workers=1", f"env_server.envs_per_worker={_SESSIONS * envs}"]
    settings += [f"env_server.sessions_per_worker={_SESSIONS}"]
    python = [sys.executable, "-m", "murmur", "env-server", "spread"]
    for setting in settings:
        python += ["--set", setting]
    cpp = [server, address, "--envs", str(envs), "--sessions", str(_SESSIONS)]
    return {"C++": cpp, "Python": python}


def cpu_s(process: psutil.Process) -> float:
    """Return the CPU-seconds of a process and all that it has started."""
    times = [p.cpu_times() for p in (process, *process.children(recursive=True))]
    return sum(t.user + t.system for t in times)


def rates(server: str, language: str, envs: int) -> tuple[float, float]:
    """Measure one turn of one server: environment steps of a CPU-second, and of a second."""
    learner = Answering()
    command = commands(server, learner.port, envs)[language]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        found = psutil.Process(process.pid)
        while learner.steps < 100 * envs:  # it starts
            time.sleep(0.05)
        steps, cpu, began = learner.steps, cpu_s(found), time.monotonic()
        time.sleep(_SECONDS)
        steps, cpu, took = learner.steps - steps, cpu_s(found) - cpu, time.monotonic() - began
        return steps / cpu, steps / took
    finally:
        process.terminate()
        learner.close()
        process.wait(60)


def all_rates(server: str) -> dict[str, dict[str, float]]:
    """Measure all servers in turns; return medians."""
    found: dict[str, dict[str, float]] = {}
    for envs in _ENVS:
        turns: dict[str, list[tuple[float, float]]] = {"C++": [], "Python": []}
        for _ in range(_TURNS):
            for language, of in turns.items():
                of.append(rates(server, language, envs))
        for language, of in turns.items():
            by_cpu, by_time = (statistics.median(x) for x in zip(*of, strict=True))
            found[f"{language}, {envs} environments a message"] = {
                "steps_per_cpu_s": by_cpu,
                "steps_per_s": by_time,
            }
    return found


def train(server: str, seed: int, steps: int) -> list[dict[str, float]]:
    """Train one seed on the server in C++ alone; return its evaluations."""
    with tempfile.TemporaryDirectory(prefix="murmur-cpp-") as name:
        folder = Path(name)
        config, run = folder / "spread.yaml", RunFolder(folder / "run")
        config.write_text(_CONFIG.format(seed=seed, steps=steps))
        command = [sys.executable, "-m", "murmur", "learner", str(config), "--run", str(run.path)]
        learner = subprocess.Popen(command)
        servers = []
        try:
            while not run.process("learner.json"):
                time.sleep(0.1)
            address = f"127.0.0.1:{json.loads((run.path / 'learner.json').read_text())['port']}"
            for options in ([], ["--evaluate", "100"]):
                servers.append(subprocess.Popen([server, address, *options]))
            if learner.wait():
                raise subprocess.CalledProcessError(learner.returncode, command)
        finally:
            for process in (*servers, learner):
                process.terminate()
                process.wait(60)
        return curve(run)


def table(record: dict[str, Any]) -> str:
    """Return the page of the results."""
    lines = [f"`{record['command']}`", "", f"{origin_text(record)}.", ""]
    lines += ["| server | steps of a CPU-second | steps of a second |", "|---|---|---|"]
    for name, found in record["rates"].items():
        by_cpu, by_time = found["steps_per_cpu_s"], found["steps_per_s"]
        lines.append(f"| {name} | {by_cpu:,.0f} | {by_time:,.0f} |")
    lines += ["", "A step is one of an environment with three agents.", ""]
    lines += ["| seed | steps | return before | return after |", "|---|---|---|---|"]
    for seed, points in record["seeds"].items():
        first, last = points[0], points[-1]
        lines.append(
            f"| {seed} | {last['env_steps']:,.0f} | {first['return']:.1f} | {last['return']:.1f} |"
        )
    return "\n".join([*lines, "", "![return](cpp-server.svg)", ""])


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, train and write the results."""
    parser = argparse.ArgumentParser(description=DESCRIPTION)
    parser.add_argument("server", help="the server in C++, built")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--dirty", action="store_true", help="save from source not committed")
    chosen = parser.parse_args(arguments)
    require_clean_source(chosen.dirty)
    record: dict[str, Any] = provenance("benchmarks.cpp_server")
    record["rates"] = all_rates(chosen.server)
    record["seeds"] = {str(s): train(chosen.server, s, chosen.steps) for s in chosen.seeds}
    lines = {"C++ servers": mean_and_range(list(record["seeds"].values()), "env_steps", "return")}
    file = RESULTS / "cpp-server.json"
    file.write_text(json.dumps(record, indent=1) + "\n")
    file.with_suffix(".md").write_text(table(record))
    draw([Panel("return", "environment steps", lines)], file.with_suffix(".svg"))


if __name__ == "__main__":
    run_command(main)

"""A real Prometheus scrapes a real training: every panel has data, every rule is healthy."""

import http.server
import json
import re
import shutil
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from monitoring.dashboards import FOLDER, panels
from tests.monitoring.names import RULES
from tests.system.conftest import PACED, SPREAD, Training
from tests.waiting import wait_until

pytestmark = pytest.mark.system
_WAIT_S = 90

# What a learner with a GPU serves beyond this one; there is none here.
_GPU = b"""\
murmur_learner_gpu_utilization_ratio 0.87
murmur_learner_gpu_memory_used_bytes 3e10
murmur_learner_gpu_memory_total_bytes 8e10
murmur_learner_gpu_temperature_celsius 61
murmur_learner_gpu_power_watts 340
murmur_learner_gpu_power_limit_watts 700
murmur_learner_gpu_memory_utilization_ratio 0.4
murmur_learner_gpu_clock_hertz{clock="sm"} 1.6e9
murmur_learner_gpu_clock_max_hertz{clock="sm"} 2e9
murmur_learner_gpu_throttled{reason="power_cap"} 1
murmur_learner_gpu_pcie_bytes_per_second{direction="to_device"} 1e9
murmur_learner_eager_seconds_total{graph="step"} 2
murmur_learner_graph_capture_seconds_total{graph="step"} 1
murmur_learner_acts_waited_seconds_total{phase="update"} 1
murmur_learner_device_info{name="H100",driver="570",cuda="12.8",precision="bf16"} 1
murmur_learner_device_busy_ratio 0.9
murmur_learner_graph_replays_total{graph="step"} 9
murmur_learner_eager_calls_total{graph="step"} 2
murmur_learner_graph_fallbacks_total{graph="step"} 0
"""


class _Exporter(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write(_GPU)

    def log_message(self, *_: object) -> None:
        pass


class Watched:
    """A training and the Prometheus that watches it.

    Attributes:
        training: the training.
        address: of the Prometheus.
    """

    def __init__(self, training: Training, address: str) -> None:
        self.training, self.address = training, address

    def until(self, what: object, condition: Callable[[], bool]) -> None:
        """Poll for a condition; fail with what is still missing."""
        wait_until(condition, str(what), _WAIT_S, poll_s=0.2)

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.address}/api/v1/{path}", timeout=10) as reply:
            return json.load(reply)["data"]


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed (Debian, Ubuntu: apt install prometheus)")
    folder = tmp_path_factory.mktemp("live")
    config = folder / "paced.yaml"
    config.write_text(re.sub(r"environment: .*", f"environment: {PACED}", SPREAD))
    training = Training(
        config,
        folder / "run",
        [
            *("--set", "evaluation.every_updates=4", "--set", "evaluation.episodes=8"),
        ],
    )
    exporter = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Exporter)
    threading.Thread(target=exporter.serve_forever, daemon=True).start()
    prometheus = None
    try:
        training.until(lambda: training.updates() > 0)
        ports = {
            "learner": json.loads((training.run / "learner.json").read_text())["metrics_port"],
            "env": _port_in(training.run / "logs/env-server.log"),
            "gpu": exporter.server_address[1],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(_configuration(ports)))
        # No alert waits here: what `for` does is tested by promtool.
        (folder / "rules.yml").write_text(re.sub(r"\bfor: \w+", "for: 0s", RULES.read_text()))
        with (folder / "prometheus.log").open("w") as log:
            prometheus = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    "--web.listen-address=127.0.0.1:0",
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        address = _address_in(folder / "prometheus.log", prometheus)
        yield Watched(training, address)
    finally:
        training.close()
        if prometheus is not None:
            prometheus.terminate()
            prometheus.wait(20)
        exporter.shutdown()
        exporter.server_close()


def _port_in(log: Path) -> int:
    found = re.search(r"http://127\.0\.0\.1:(\d+)", log.read_text())
    assert found is not None
    return int(found[1])


def _address_in(log: Path, process: subprocess.Popen[bytes]) -> str:
    """Where Prometheus listens, once it is ready."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        text = log.read_text()
        found = re.search(r'msg="Listening on" address=127\.0\.0\.1:(\d+)', text)
        if found and "Server is ready" in text:
            return f"http://127.0.0.1:{found[1]}"
        time.sleep(0.1)
    raise AssertionError(log.read_text())


def _configuration(ports: dict[str, int]) -> dict[str, Any]:
    return {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yml"],
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}
            for job, port in ports.items()
        ],
    }


def _queries() -> list[tuple[str, str]]:
    return [
        (f"{file.stem}: {panel['title']}", target["expr"])
        for file in sorted(FOLDER.glob("*.json"))
        for panel in panels(file.read_text())
        for target in panel["targets"]
    ]


def fill(query: str, rate_interval: str) -> str:
    """Fill a query's Grafana variables: all runs, learners, servers, results and scalars."""
    return re.sub(r"\$(run|learner|server|metric|scalar)\b", ".*", query).replace(
        "$__rate_interval", rate_interval
    )


def ask(address: str, query: str) -> list[dict[str, Any]]:
    """Ask Prometheus a query; return its result."""
    url = f"{address}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    with urllib.request.urlopen(url, timeout=30) as reply:
        result: list[dict[str, Any]] = json.load(reply)["data"]["result"]
    return result


def _has_data(address: str, query: str) -> bool:
    result = ask(address, fill(query, "15s"))
    return any(series["value"][1] not in ("NaN", "+Inf", "-Inf") for series in result)


def test_every_panel_and_every_rule_on_a_training(watched: Watched) -> None:
    missing = _queries()
    assert len(missing) > 50

    def all_answered() -> bool:
        missing[:] = [(w, query) for w, query in missing if not _has_data(watched.address, query)]
        return not missing

    watched.until(missing, all_answered)
    for name in ("run", "instance"):
        assert watched.get(f"label/{name}/values?match[]=murmur_learner_info")
    rules = [rule for group in watched.get("rules")["groups"] for rule in group["rules"]]
    assert {(rule["name"], rule["health"]) for rule in rules} == {
        (rule["name"], "ok") for rule in rules
    }
    for series in ask(watched.address, "sum without (state) (murmur:env_state:ratio)"):
        assert float(series["value"][1]) == pytest.approx(1, abs=1e-6)


def test_legends_name_learners_if_there_are_several(watched: Watched) -> None:
    """The hidden variables' own queries, over one instance and over the two that are served."""
    for board in FOLDER.glob("*.json"):
        variables = {v["name"]: v for v in json.loads(board.read_text())["templating"]["list"]}
        for name, info in (
            ("learner_label", "murmur_learner_info"),
            ("server_label", "murmur_env_info"),
        ):
            query = variables[name]["query"].removeprefix("query_result(").removesuffix(")")
            for several, value in (("murmur_learner_device_info", "instance"), (info, "none")):
                asked = fill(query, "15s").replace(info, several)
                (series,) = ask(watched.address, asked)
                shown = "{" + ",".join(f'{k}="{v}"' for k, v in series["metric"].items()) + "}"
                found = re.search(variables[name]["regex"].strip("/"), shown)
                assert found is not None
                assert found[1] == value


def test_a_dead_learner_raises_the_alarm(watched: Watched) -> None:
    watched.training.close()

    def fired() -> list[dict[str, Any]]:
        return [
            a
            for a in watched.get("alerts")["alerts"]
            if a["labels"]["alertname"] == "MurmurLearnerDown" and a["state"] == "firing"
        ]

    watched.until("MurmurLearnerDown never fired", lambda: bool(fired()))
    (alert,) = fired()
    assert "does not answer" in alert["annotations"]["summary"]
    assert "error" not in alert["annotations"]["summary"].lower()

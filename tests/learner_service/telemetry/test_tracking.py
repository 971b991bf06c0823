"""Trackers: real processes and the clients' own stores, read back by the clients."""

import json
import logging
import os
import resource
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from murmur.cli import main
from murmur.learner_service.telemetry.metrics import LearnerMetrics
from murmur.learner_service.telemetry.progress import Progress, ProgressLog
from murmur.learner_service.telemetry.tracker_clients import Point
from murmur.learner_service.telemetry.tracking import (
    Forwarder,
    TrackerProcess,
    flattened,
    require_trackers,
)
from murmur.shared.config.experiment import TrackingConfig
from murmur.shared.config.files import load
from murmur.shared.process.errors import ConfigError, ResourceError
from tests.waiting import wait_until

RETURN = {"mean": -2.5, "std": 1.0, "ci95": [-3.0, -2.0], "episodes": 8}


PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108000000003a7e9b550000000a49444154789c63"
    "6000000002000148afa4710000000049454e44ae426082"
)


def begin(run: Path, tracking: TrackingConfig, *, seed: int = 1) -> tuple[Progress, ProgressLog]:
    """The folder of a run whose log is open."""
    run.mkdir(exist_ok=True)
    config = load("spread", [f"run.seed={seed}"], {}).model_copy(update={"tracking": tracking})
    (run / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    p = Progress()
    trackers = [TrackerProcess(run, name, tracking) for name in tracking.services]
    on_board = "tensorboard" in tracking.loggers
    return p, ProgressLog(run, p, 3, trackers, tensorboard=on_board)


def write(p: Progress, log: ProgressLog, updates: range) -> None:
    """A line of progress for each update, 100 steps apart, and an evaluation."""
    for i in updates:
        p.updates, p.env_steps, p.losses = i, 100 * i, {"entropy": 1.0 / i}
        log.write({"ledger": {"learner": {"log": 1.0}}, "device": {}})
    log.write_evaluation(updates[-1], 100 * updates[-1], {"return": RETURN})


def metric(log: ProgressLog, name: str, **labels: str) -> float:
    """What Prometheus would read."""
    metrics = LearnerMetrics()
    metrics.log = log
    value = metrics.registry.get_sample_value(f"murmur_learner_{name}", labels)
    assert value is not None
    return value


def state_of(run: Path, tracker: str) -> dict[str, Any]:
    try:
        state: dict[str, Any] = json.loads((run / "tracking" / f"{tracker}.json").read_text())
    except FileNotFoundError:
        return {}
    return state


def log_records(content: bytes) -> Iterator[bytes]:
    """Records of a file in LevelDB's log format, behind W&B's header of 7 bytes."""
    assert content[:4] == b":W&B"
    at, parts = 7, b""
    while at + 7 <= len(content):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def wandb_records(run: Path) -> tuple[dict[str, str], list[dict[str, float]]]:
    """Configuration and history in the newest file that W&B wrote offline."""
    from wandb.proto import wandb_internal_pb2

    config: dict[str, str] = {}
    history: list[dict[str, float]] = []
    (file,) = (run / "tracking" / "wandb" / "latest-run").glob("*.wandb")

    def records() -> list[Any]:
        return [wandb_internal_pb2.Record.FromString(x) for x in log_records(file.read_bytes())]

    # W&B's own process closes the file a moment after `finish` returns.
    wait_until(lambda: any(record.HasField("exit") for record in records()))
    for record in records():
        # By itself, or with the run if the run was not written yet.
        for update in (*record.config.update, *record.run.config.update):
            config[update.key or update.nested_key[0]] = update.value_json
        if items := record.history.item:
            history.append({x.key or x.nested_key[0]: json.loads(x.value_json) for x in items})
    return config, history


def no_login(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """As on a machine without a login to W&B."""
    for name in [n for n in os.environ if n.startswith("WANDB")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("NETRC", str(folder / "netrc"))


@pytest.mark.long
def test_a_tracker_that_refuses_ends_nothing_and_is_told_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("wandb")
    no_login(monkeypatch, tmp_path)
    run = tmp_path / "one"
    p, log = begin(run, TrackingConfig(loggers=("wandb",), every_s=0, tags=("try",)))
    write(p, log, range(1, 5))
    wait_until(lambda: state_of(run, "wandb").get("failures", 0) > 0)
    write(p, log, range(5, 7))
    with caplog.at_level(logging.WARNING):
        log.close()
    assert metric(log, "tracker_failures_total", tracker="wandb") >= 1
    said = capfd.readouterr().err
    assert said.count("WARNING wandb: UsageError: No API key configured") == 1
    size = (run / "progress.jsonl").stat().st_size
    assert f"{size} bytes of progress.jsonl are not sent" in caplog.text
    assert not (run / "tensorboard").exists()


@pytest.mark.long
def test_a_run_is_sent_to_wandb_after_its_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("wandb")
    no_login(monkeypatch, tmp_path)
    run = tmp_path / "one"
    p, log = begin(run, TrackingConfig(every_s=0))
    write(p, log, range(1, 5))
    write(p, log, range(5, 7))
    log.close()
    (run / "episode-1.gif").write_bytes(b"GIF89a\x01\x00\x01\x00\x00\x00\x00;")
    command = ["murmur", "track", str(run), "--set", "tracking.loggers=[wandb]"]
    command += ["--set", "tracking.offline=true"]
    again = "wandb: 8 points and 2 pictures sent"  # offline: a folder with all
    for words in ("wandb: 8 points and 1 pictures sent", "wandb: nothing new", again):
        if words is again:
            (run / "masks.png").write_bytes(PIXEL)
        monkeypatch.setattr("sys.argv", command)
        with pytest.raises(SystemExit) as end:
            main()
        assert (end.value.code or 0) == 0
        assert words in capfd.readouterr().out
    config, history = wandb_records(run)
    assert json.loads(config["run.seed"]) == 1
    assert json.loads(config["environment.name"]) == "spread"
    curve = [(h["env_steps"], h["update/entropy"]) for h in history if "update/entropy" in h]
    assert curve == [(100 * i, pytest.approx(1 / i)) for i in range(1, 7)]
    assert [h["evaluation/return"] for h in history if "evaluation/return" in h] == [-2.5, -2.5]
    assert [h["best/return"] for h in history if "best/return" in h] == [-2.5, -2.5]
    assert any("media/episode-1" in h or "media/episode-1.path" in h for h in history)
    assert list(run.glob("tracking/wandb/offline-run-*/files/media/videos/**/*.gif"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of MLflow's use of SQLAlchemy
@pytest.mark.long
def test_a_resumed_run_continues_in_the_same_mlflow_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    mlflow = pytest.importorskip("mlflow")
    run = tmp_path / "one"
    tracking = TrackingConfig(
        loggers=("mlflow",), every_s=0, offline=True, tags=("try", "kind=a"), finish_s=240
    )
    (run).mkdir()
    (run / "masks.png").write_bytes(b"\x89PNG")
    p, log = begin(run, tracking)
    write(p, log, range(1, 4))
    log.close()
    first = state_of(run, "mlflow")["run_id"]
    with (run / "progress.jsonl").open("a") as file:  # as a learner does that is killed in a line
        file.write('{"kind": "progress", "ti\n')
    p, log = begin(run, tracking, seed=2)
    write(p, log, range(3, 6))
    log.close()
    assert metric(log, "tracker_lines_dropped_total", tracker="mlflow", reason="torn") == 1
    assert metric(log, "tracker_unsent_bytes", tracker="mlflow") == 0
    assert metric(log, "tracker_failures_total", tracker="mlflow") == 0
    assert "WARNING" not in capfd.readouterr().err

    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("murmur")
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.run_id == first == state_of(run, "mlflow")["run_id"]
    assert (found.info.run_name, found.info.status) == ("one", "FINISHED")
    assert found.data.params["run.seed"] == "1"
    assert found.data.params["algorithm.name"]
    assert found.data.tags["try"] == "true"
    assert found.data.tags["kind"] == "a"
    assert found.data.tags["changed.run.seed"] == "2"
    assert found.data.metrics["best/return"] == -2.5
    points = [(m.step, m.value) for m in client.get_metric_history(first, "update/entropy")]
    assert points == [(100 * i, pytest.approx(1 / i)) for i in (1, 2, 3, 3, 4, 5)]
    assert [m.step for m in client.get_metric_history(first, "evaluation/return")] == [300, 500]
    (artifact,) = client.list_artifacts(first, "media")
    assert artifact.path == "media/masks.png"


def test_a_server_that_is_down_delays_the_end_by_finish_s(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("mlflow")
    run = tmp_path / "one"
    tracking = TrackingConfig(loggers=("mlflow",), mlflow_uri="http://127.0.0.1:9", finish_s=1)
    p, log = begin(run, tracking)
    began = time.monotonic()
    write(p, log, range(1, 200))
    assert time.monotonic() - began < 30  # takes 20 ms; the client tries for minutes
    began = time.monotonic()
    with caplog.at_level(logging.WARNING):
        log.close()
    assert time.monotonic() - began < 30
    assert "bytes of progress.jsonl are not sent; `murmur track" in caplog.text


def test_what_a_tracker_does_not_get_is_a_metric(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    run, mlflow = tmp_path / "one", {"tracker": "mlflow"}
    tracking = TrackingConfig(loggers=("mlflow",), mlflow_uri="http://127.0.0.1:9", finish_s=0.1)
    p, log = begin(run, tracking)
    write(p, log, range(1, 5))
    size = (run / "progress.jsonl").stat().st_size
    assert metric(log, "tracker_unsent_bytes", **mlflow) == size > 0
    assert metric(log, "tracker_lines_dropped_total", **mlflow, reason="disk") == 0
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, limits[1]))  # as a disk that is full
    try:
        write(p, log, range(5, 6))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert metric(log, "tracker_lines_dropped_total", **mlflow, reason="disk") == 2
    assert metric(log, "tracker_lines_dropped_total", **mlflow, reason="torn") == 0
    assert metric(log, "tracker_unsent_bytes", **mlflow) == size
    log.close()


def test_metrics_of_trackers_have_no_values_without_one(tmp_path: Path) -> None:
    _, log = begin(tmp_path, TrackingConfig())
    names = ("tracker_failures", "tracker_unsent_bytes", "tracker_lines_dropped")
    assert log.counts() == {name: {} for name in names}
    log.close()


def forwarder(run: Path, **options: Any) -> Forwarder:
    return Forwarder(run, "wandb", TrackingConfig(loggers=("wandb",), **options))


def test_curves_are_thinned_and_keep_evaluations(tmp_path: Path) -> None:
    of = forwarder(tmp_path, every_s=10)
    line: dict[str, Any] = {
        **{"kind": "progress", "time": 0.0, "env_steps": 7, "updates": 1, "return": None},
        **{"metrics": {}, "losses": {}, "device": {}, "agent_steps_per_s": 1.0, "policy_lag": 0.0},
    }

    def sent(seconds: float, **more: Any) -> Point | None:
        return of._point({**line, "seconds": seconds, **more})

    found = [sent(s) is not None for s in (0, 4, 9, 10, 15, 3, 8)]  # resumed before 3
    assert found == [True, False, False, True, False, True, False]
    scores = [sent(8, kind="evaluation", metrics={"return": {"mean": m}}) for m in (1, 3, 2)]
    assert [of.values["best/return"] for of in scores if of is not None] == [1, 3, 3]
    assert of._point({"kind": "unknown"}) is None


def test_only_one_process_sends_a_run(tmp_path: Path) -> None:
    with (
        forwarder(tmp_path).holding(wait=False),
        pytest.raises(ResourceError, match="another process sends"),
        forwarder(tmp_path).holding(wait=False),
    ):
        pass


def test_a_configuration_is_flattened_by_dotted_names() -> None:
    tree = {"run": {"seed": 1, "name": "a"}, "league": {}, "tags": ["x", 2], "none": None}
    assert flattened(tree) == {
        **{"run.seed": 1, "run.name": "a", "league": "{}", "tags": '["x", 2]', "none": None}
    }


def test_a_missing_library_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb").mkdir()  # W&B makes such folders: they are no library
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.setattr("sys.meta_path", __import__("sys").meta_path[-1:])
    monkeypatch.delitem(__import__("sys").modules, "wandb", raising=False)
    with pytest.raises(ConfigError, match=r"wandb.*not installed.*\[wandb\]"):
        require_trackers(TrackingConfig(loggers=("tensorboard", "wandb")).services)
    with pytest.raises(ConfigError, match="'wandb' is listed 2 times"):
        load("spread", ["tracking.loggers=[wandb, wandb]"], {})


OWN = """
import json


class Client:
    id_is_ours = True

    def __init__(self, run_dir, config, run_id):
        self.run_id, self.where = run_id or "7", str(run_dir / "own.txt")
        self._file = run_dir / "own.txt"

    @staticmethod
    def store(run_dir, config):
        return "file"

    def configure(self, parameters):
        self._write("seed", parameters["run.seed"])

    def log(self, points):
        for point in points:
            self._write(point.env_steps, sorted(point.values))

    def send_file(self, file, env_steps):
        self._write(file.name, env_steps)

    def finish(self, *, complete):
        self._write("complete", complete)

    def _write(self, *words):
        with self._file.open("a") as file:
            file.write(json.dumps(words) + "\\n")


class Half:
    id_is_ours = True
"""


def test_a_tracker_of_an_installed_package_gets_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    about = site / "own_tracker-1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: own-tracker\nVersion: 1\n")
    (about / "entry_points.txt").write_text(
        "[murmur.trackers]\nown = own_tracker:Client\nhalf = own_tracker:Half\n"
    )
    (site / "own_tracker.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("PYTHONPATH", str(site))
    config = load("spread", ["tracking.loggers=[own]"], {}).tracking
    assert config.services == ("own",)
    require_trackers(config.services)
    with pytest.raises(ConfigError, match=r"tracker 'half' .*lacks store, configure, log"):
        require_trackers(["half"])
    with pytest.raises(ConfigError, match=r"no tracker 'owm'; did you mean 'own'\? known: tensor"):
        load("spread", ["tracking.loggers=[owm]"], {})
    run = tmp_path / "one"
    p, log = begin(run, TrackingConfig(loggers=("own",), every_s=0), seed=5)
    write(p, log, range(1, 3))
    log.close()
    lines = [json.loads(line) for line in (run / "own.txt").read_text().splitlines()]
    assert ["seed", 5] in lines
    assert lines[-1] == ["complete", True]
    steps = [line[0] for line in lines if isinstance(line[0], int)]
    assert steps == [100, 200, 200]


def test_tensorboard_compares_hyper_parameters(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    run = tmp_path / "one"
    p, log = begin(run, TrackingConfig(), seed=4)
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("seed: 4", "seed: 5"))  # the first session came
    write(p, log, range(1, 3))
    log.close()
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    found = [
        HParamsPluginData.FromString(content)
        for content in events.PluginTagToContent("hparams").values()
    ]
    (start,) = (data.session_start_info for data in found if data.HasField("session_start_info"))
    assert start.hparams["run.seed"].number_value == 5
    assert start.hparams["algorithm.name"].string_value == "mappo"
    (experiment,) = (data.experiment for data in found if data.HasField("experiment"))
    judged = {info.name.tag for info in experiment.metric_infos}
    assert judged <= set(events.Tags()["scalars"]) | {"episode/return"}
    assert "evaluation/return" in judged

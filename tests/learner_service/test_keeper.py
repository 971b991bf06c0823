"""What a run's folder says of the run: what was chosen for it, also after it was deleted."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

from murmur.learner_service.app import run_learner
from murmur.learner_service.checkpoint.folder import CheckpointFolder
from murmur.learner_service.context import RunContext
from murmur.learner_service.device.device import select_device
from murmur.learner_service.device.precision import Precision
from murmur.learner_service.storage.flight import Flight
from murmur.learner_service.tuning.resolve import with_flight, with_learner_options
from murmur.shared.config.files import load
from murmur.shared.config.learner import LearnerConfig
from murmur.shared.process.errors import ConfigError
from tests.learner_service.running import experiment, running_learner
from tests.learner_service.toys import FIRST, MID, row, vector_spec
from tests.waiting import wait_until
from tests.wire import Client

SPEC = vector_spec()


def test_sync_run_keeps_device_and_precision_of_auto(tmp_path: Path) -> None:
    auto = {"pipeline": "sync", "device": "auto", "precision": "auto"}
    with running_learner(tmp_path, experiment(learner=auto)):
        pass
    kept = yaml.safe_load((tmp_path / "config.yaml").read_text())["learner"]
    device = select_device(LearnerConfig(num_threads=1))
    assert kept["device"] == device.type
    assert kept["precision"] == Precision.of(LearnerConfig(), device).name


def test_an_async_run_may_move_to_another_device(tmp_path: Path) -> None:
    with running_learner(tmp_path, experiment(learner={"device": "auto"})):
        pass
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["learner"]["device"] == "auto"


@pytest.mark.parametrize(
    ("algorithm", "found", "fix"),
    [
        ({"name": "coma", "batch_size": 0}, None, "algorithm.batch_size=256, or"),
        ({"name": "coma", "batch_size": 0}, 77, "algorithm.batch_size=77, or"),
        ({"name": "qmix", "replay": {"batch_size": 0}}, 9, "algorithm.replay.batch_size=9, or"),
    ],
)
def test_a_sync_run_refuses_a_batch_size_that_is_measured(
    tmp_path: Path, algorithm: dict[str, Any], found: int | None, fix: str
) -> None:
    if found:
        (tmp_path / "batch-size.json").write_text(json.dumps({"batch_size": found}))
    sections = experiment(learner={"pipeline": "sync"}).model_dump() | {"algorithm": algorithm}
    sync = type(experiment()).model_validate(sections)
    with pytest.raises(ConfigError) as caught:
        run_learner(sync, tmp_path, resume=False, stop=threading.Event())
    assert f"set {fix} learner.pipeline=async" in str(caught.value)
    assert not (tmp_path / "config.yaml").exists()


def _writes_a_board(thread: threading.Thread) -> bool:
    return type(thread).__name__ == "_AsyncWriterThread"


# TensorBoard's own thread dies of it, and the log says so.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_folder_deleted_during_training_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    config = experiment(algorithm={"batch_number": 4}, learner={"checkpoint_every_updates": 1})
    with running_learner(folder, config) as learner, Client(learner.port, SPEC, 4) as client:
        client.hello()

        def train(updates: int) -> None:
            while learner.metric("checkpoints_total") < updates:
                client.exchange(row(SPEC, 4, MID))

        client.exchange(row(SPEC, 4, FIRST))
        train(1)
        kept = (folder / "config.yaml").read_text()
        # At once: rmtree would fail where the learner writes meanwhile.
        folder.rename(tmp_path / "gone")
        (tmp_path / "gone" / "run.lock").unlink()  # else the run would continue there
        train(2)
    wait_until(lambda: not any(map(_writes_a_board, threading.enumerate())), "the end of it")
    assert (folder / "config.yaml").read_text() == kept
    # A checkpoint that falls between the two lines above says that the lock alone is gone.
    said = [r.getMessage() for r in caplog.records if "run folder" in r.getMessage()]
    said = [message for message in said if "was deleted" in message]
    assert len(said) == 1
    assert said[0].startswith(f"run folder {folder} was deleted while the run trains")
    assert CheckpointFolder(folder, 1).load_latest()[1]["progress"]["updates"] > 1


def test_what_was_measured_is_kept_apart_from_what_was_given(tmp_path: Path) -> None:
    """Unrolls of an update are configured; their length and the lag are chosen by the speed."""
    config = load("spread", ["algorithm.unrolls_per_update=8"], {})
    context = RunContext(with_learner_options(config), tmp_path, None, False, threading.Event())
    context.keep_measured(with_flight(context.resolved, Flight(22, 8, 2)))
    kept = json.loads((tmp_path / "measured.json").read_text())
    assert kept == {"algorithm.unroll_steps": 22, "learner.max_policy_lag": 2}
    written = load(str(tmp_path / "config.yaml"), [], {})
    assert written.algorithm.options["unroll_steps"] == 22
    assert written.algorithm.options["unrolls_per_update"] == 8

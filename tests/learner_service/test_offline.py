"""Runs that learn from a dataset alone: no environment connects."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from murmur.learner_service import app
from murmur.learner_service.checkpoint.folder import CheckpointFolder
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.config.section import validate
from murmur.shared.config.text import to_yaml
from murmur.shared.process.errors import ConfigError
from murmur.shared.wire.spec import Discrete
from tests.learner_service.running import experiment, running_learner
from tests.learner_service.storage.test_demonstrations import CUES, dataset, spec_of
from tests.waiting import wait_until
from tests.wire import Client, Refused

SPEC = spec_of(Discrete(CUES))
REPLAY = {"capacity_rows": 1000, "batch_size": 16, "start_rows": 900, "update_interval": 1000}


def cloning(folder: str, **run: Any) -> ExperimentConfig:
    """MAPPO, which clones in more updates than imitation.updates says."""
    return experiment(
        run={"offline": True, **run},
        algorithm={"name": "mappo"},
        imitation={"dataset": folder, "updates": 2},
    )


def replaying(folder: str, **run: Any) -> ExperimentConfig:
    """QMIX, whose replay asks for more transitions than there are before the first update."""
    config = experiment().model_dump() | {
        "algorithm": {"name": "qmix", "replay": {**REPLAY, "dataset": folder}},
        "run": {"offline": True, **run},
    }
    return validate(ExperimentConfig, config)


def finished(run_dir: Path, config: ExperimentConfig, **options: Any) -> dict[str, Any]:
    """Run to the end; return the last checkpoint's counters."""
    ended = threading.Event()  # the learner sets it at the end
    with running_learner(run_dir, config, stop=ended, **options):
        assert ended.wait(60)
    folder = CheckpointFolder(run_dir, 1)
    progress: dict[str, Any] = folder.load(folder.find("latest"))["progress"]
    return progress


@pytest.mark.parametrize(("make", "rows"), [(cloning, 1), (replaying, 16)])
def test_a_dataset_alone_is_learned_from_and_the_run_resumes(
    make: Callable[..., ExperimentConfig], rows: int, tmp_path: Path
) -> None:
    folder = dataset(tmp_path / "data", SPEC)
    config, run_dir = make(folder, max_updates=0), tmp_path / "run"
    with running_learner(run_dir, config) as learner:
        wait_until(lambda: learner.metric("updates_total") >= 6, "updates")
        refused = pytest.raises(Refused, match=r"run.offline=true: .* leave the environment server")
        with refused, Client(learner.port, SPEC, 2) as client:
            client.hello()
    folder_of_run = CheckpointFolder(run_dir, 1)
    first = folder_of_run.load(folder_of_run.find("latest"))["progress"]
    assert first["updates"] >= 6
    assert first["env_steps"] % first["updates"] == 0
    assert first["env_steps"] >= first["updates"] * rows
    assert first["rows_received"] == first["episodes"] == 0
    goal = first["updates"] + 4
    second = finished(run_dir, make(folder, max_updates=goal), resume=True)
    assert second["updates"] == goal
    assert second["env_steps"] * first["updates"] == first["env_steps"] * goal
    assert not second["rows_dropped"]


def test_a_resumed_offline_run_names_its_checkpoints_updates(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = cloning(dataset(tmp_path / "data", SPEC), max_updates=5)
    finished(tmp_path / "run", config)
    with caplog.at_level("INFO", "murmur"):
        finished(tmp_path / "run", config.changed({"run.max_updates": 40}), resume=True)
    (line,) = [line for line in caplog.messages if line.startswith("resumed ")]
    assert line.endswith("update-000005.pt: 5 updates")


def test_an_offline_run_without_an_evaluator_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "_REMIND_OF_EVALUATION_S", 0.0)
    monkeypatch.setattr(app, "_LAST_EVALUATION_S", 0.5)
    config = cloning(dataset(tmp_path / "data", SPEC), max_updates=2)
    finished(tmp_path / "run", config.changed({"evaluation.every_updates": 1}))
    said = [line for line in caplog.messages if "evaluation" in line]
    assert len(said) == 2
    assert all("no evaluator has come: start `murmur env-server --evaluate`" in x for x in said)


@pytest.mark.parametrize("make", [cloning, replaying])
def test_a_run_of_environments_does_not_go_on_offline(
    make: Callable[..., ExperimentConfig], tmp_path: Path
) -> None:
    folder, run_dir = dataset(tmp_path / "data", SPEC), tmp_path / "run"
    config = make(folder, max_updates=2)
    finished(run_dir, config)
    checkpoints = CheckpointFolder(run_dir, 1)
    path = checkpoints.find("latest")
    state = checkpoints.load(path)
    state["config"] = to_yaml(config.changed({"run.offline": False}))
    torch.save(state, path)
    more = config.changed({"run.max_updates": 9})
    with pytest.raises(ConfigError, match=r"learned in environments.*run.start_from="):
        finished(run_dir, more, resume=True)


def test_environment_steps_of_a_dataset_are_a_limit(tmp_path: Path) -> None:
    config = replaying(dataset(tmp_path / "data", SPEC), max_updates=0, max_env_steps=64)
    assert finished(tmp_path / "run", config)["updates"] == 4


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"run": {"offline": True}},
            r"nothing to learn from; set imitation.dataset or, if the algorithm has a replay",
        ),
        (
            {"run": {"offline": True, "max_episodes": 3}, "imitation": {"dataset": "d"}},
            r"run.max_episodes=3 and run.offline=true: no episode is played; set it to 0",
        ),
        (
            {"run": {"offline": True}, "imitation": {"dataset": "d"}, "league": {"size": 2}},
            r"league: an offline run plays no games; leave it out",
        ),
        (
            {
                "run": {"offline": True},
                "algorithm": {"name": "qmix", "replay": {"dataset": "d"}},
                "imitation": {"baseline": "greedy"},
            },
            r"imitation.baseline=greedy and run.offline=true: .* murmur record",
        ),
    ],
)
def test_offline_options_that_do_not_fit_are_refused(
    sections: dict[str, Any], message: str
) -> None:
    base = experiment().model_dump() | {"algorithm": {"name": "mappo"}}
    with pytest.raises(ConfigError, match=message):
        validate(ExperimentConfig, base | sections)

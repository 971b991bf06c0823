"""Whole runs of two learners: replay, leagues, teams, evaluation, a source, defaults; resumed."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from murmur.cli.results import record
from murmur.learner_service.checkpoint import files
from murmur.learner_service.checkpoint.folder import CheckpointFolder
from tests.learner_service.algorithms.test_captured_updates import tensors
from tests.system.conftest import Training
from tests.system.test_league import LEAGUE
from tests.system.test_offline_training import CLONING, FILLED
from tests.system.test_offline_training import EXPERIMENT as OFFLINE
from tests.system.test_replay_training import EXPERIMENT
from tests.system.test_segmentation import PORTRAITS

pytestmark = [pytest.mark.long, pytest.mark.system]
WORKERS = "env_server.num_workers=2"
COMPARED = "learner.group_check_every_updates=1"
TAG = """
extends: simple-tag
env_server: {envs_per_worker: 4, metrics_port: 0}
algorithm:
  name: mappo
  batch_size: 80
  batch_number: 2
  share_parameters: true
  teams: {adversary: {actor_lr: 1.0e-3, network: {hidden: [24]}}, agent: {gamma: 0.9}}
network: {hidden: [16]}
learner: {port: 0, metrics_port: 0, log_every_s: 0.000001}
evaluation: {every_updates: 0}
run: {max_env_steps: 0}
"""
DEFAULTS = """
environment: {environment}
algorithm: {{name: {name}}}
env_server: {{envs_per_worker: 4, metrics_port: 0}}
learner: {{port: 0, metrics_port: 0, log_every_s: 0.000001}}
"""


@pytest.fixture
def run_two(tmp_path: Path) -> Iterator[Callable[..., Training]]:
    """Train with two learners, or another number, to the end."""
    started: list[Training] = []

    def finish(
        name: str, config: str, *settings: str, learners: int = 2, **flags: bool
    ) -> Training:
        file = tmp_path / "experiment.yaml"
        file.write_text(config)
        arguments = [flag for s in (WORKERS, *settings) for flag in ("--set", s)]
        arguments += ["--learners", str(learners), *(f"--{flag}" for flag in flags)]
        started.append(Training(file, tmp_path / name, arguments))
        assert started[-1].wait(500) == 0, started[-1].output()
        return started[-1]

    yield finish
    for training in started:
        training.close()


def latest(run: Training) -> dict[str, object]:
    return CheckpointFolder(run.run, 1).load(CheckpointFolder(run.run, 1).find("latest"))


@pytest.mark.parametrize(("name", "continuous"), [("masac", "true"), ("qmix", "false")])
def test_replays_are_dealt_to_one_learner_and_back(
    run_two: Callable[..., Training], name: str, continuous: str
) -> None:
    config = EXPERIMENT.format(name=name, continuous=continuous)
    learners, rows, inserted = 2, [], []
    for updates in (8, 16, 24):
        resume = {"resume": True} if updates > 8 else {}
        settings = [f"run.max_updates={updates}", "learner.checkpoint_every_updates=4"]
        run = run_two("run", config, *settings, learners=learners, **resume)
        folder = run.run / "checkpoints"
        names = [f"update-{updates:06d}.pt", f"rank1-update-{updates:06d}.pt"][:learners]
        states = [files.load(folder / file) for file in names]
        storages = [state["storage"] for state in states]
        inserted.append(sum(state["progress"]["rows_inserted"] for state in states))
        rows.append(sum(s["filled"] for s in storages) * storages[0]["length"])
        assert inserted[-1] <= rows[-1]  # nothing is overwritten; some rows fill up unrolls
        assert sum(s["columns"] for s in storages) == 500
        learners = 3 - learners
    assert rows[0] < rows[1] < rows[2]
    assert inserted[0] < inserted[1] < inserted[2]
    assert len(run.lines()[-1]["ranks"]) == 2


def test_a_sync_run_resumes_to_the_bit(run_two: Callable[..., Training]) -> None:
    config = EXPERIMENT.format(name="masac", continuous="true")
    sync = ("learner.pipeline=sync", COMPARED)
    whole = run_two("whole", config, *sync, "run.max_updates=12")
    run_two("halves", config, *sync, "run.max_updates=6")
    halves = run_two("halves", config, *sync, "run.max_updates=12", resume=True)
    ours, theirs = (tensors(latest(run)["algorithm"]) for run in (whole, halves))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_league_of_two_learners_keeps_one_pool(run_two: Callable[..., Training]) -> None:
    run = run_two("run", LEAGUE, "run.max_updates=8")
    folder = run.run / "checkpoints"
    assert len(list(folder.glob("league-*.pt"))) == 2
    assert latest(run)["league"]["opponents"]  # type: ignore[index]
    parts = [files.load(p) for p in sorted(folder.glob("*update-000008.pt"))]
    pools = [[file for file, _ in part["league"]["opponents"]] for part in parts]
    assert pools[0] == pools[1] != []
    run_two("run", LEAGUE, "run.max_updates=10", learners=1, resume=True)


def test_teams_learn_apart_and_meet_in_a_league_of_two_learners(
    run_two: Callable[..., Training],
) -> None:
    """Both teams learn; then hunters in turns, against the prey of the first run."""
    both = run_two("both", TAG, COMPARED, "run.max_updates=3")
    losses = both.losses()[3]
    assert {"entropy/adversary", "entropy/agent", "entropy"} <= losses.keys()
    alone = ("algorithm.teams={}", "algorithm.name=happo", "algorithm.share_parameters=false")
    prey = both.run / "checkpoints/update-000003.pt"
    league = ("league.agents=[adversary]", f"league.checkpoints=[{prey}]")
    hunters = run_two("hunters", TAG, COMPARED, *alone, *league, "run.max_updates=3")
    metrics = {name for line in hunters.lines() for name in line["metrics"]}
    assert "points_past" in metrics
    assert "points_latest" not in metrics
    assert latest(hunters)["game"]
    run_two("hunters", TAG, "run.max_updates=4", learners=1, resume=True)
    again = run_two("hunters", TAG, COMPARED, "run.max_updates=6", resume=True)
    assert again.updates() == 6


@pytest.mark.parametrize(
    ("name", "environment", "updates", "pace"),
    [
        (
            "sac",
            "{name: gymnasium, factory: 'gymnasium:make', arguments: {id: Pendulum-v1}}",
            20,
            ": INFO replay: 1 update of 256 rows for every 2 new rows of all 2 learners",
        ),
        ("mappo", "{name: spread}", 3, ""),
    ],
)
def test_two_learners_learn_with_the_defaults(
    run_two: Callable[..., Training], name: str, environment: str, updates: int, pace: str
) -> None:
    """An update a row becomes one for a row of each learner, and the log says so."""
    config = DEFAULTS.format(name=name, environment=environment)
    run = run_two("run", config, COMPARED, f"run.max_updates={updates}")
    assert run.updates() == updates
    assert all(rank["rows_received"] > 0 for rank in run.lines()[-1]["ranks"])
    said = (run.run / "logs/learner.log").read_text()
    assert said.count(pace) == 2 or not pace


@pytest.mark.parametrize("clones", [True, False])
def test_two_learners_learn_from_a_dataset_alone(
    run_two: Callable[..., Training], tmp_path: Path, clones: bool
) -> None:
    folder = tmp_path / "data"
    record(out=folder, baseline="assignment", config="spread", episodes=16)
    algorithm = CLONING if clones else FILLED.format(folder=folder)
    config = OFFLINE.format(algorithm=algorithm, cloned=folder if clones else "")
    offline = ("run.offline=true", COMPARED)
    first = run_two("run", config, *offline, "run.max_updates=6")
    steps = first.lines()[-1]["env_steps"]
    second = run_two("run", config, *offline, "run.max_updates=9", resume=True)
    assert second.lines()[-1]["env_steps"] == steps * 9 // 6
    assert [rank["rows_received"] for rank in second.lines()[-1]["ranks"]] == [0, 0]


def test_rank_0_evaluates_and_keeps_the_best(run_two: Callable[..., Training]) -> None:
    config = EXPERIMENT.format(name="qmix", continuous="false")
    settings = ("evaluation.every_updates=6", "evaluation.episodes=4", "run.max_updates=12")
    run = run_two("run", config, *settings)
    assert run.lines("evaluation")
    assert (run.run / "checkpoints/best.pt").is_file()
    assert not list((run.run / "checkpoints").glob("rank1-best*"))


def test_two_learners_share_the_samples_of_a_source(run_two: Callable[..., Training]) -> None:
    """11 portraits: 6 and 5, in batches of 2: three updates an epoch, the last one 2 and 1."""
    config = PORTRAITS.replace("train: 10", "train: 11")
    whole = run_two("whole", config, COMPARED)
    progress = [p["progress"] for p in map(files.load, _last_parts(whole))]
    assert [p["updates"] for p in progress] == [12, 12]
    assert sorted(p["own_env_steps"] for p in progress) == [20, 24]
    assert {p["env_steps"] for p in progress} == {44}
    assert len(whole.lines("evaluation")) == 2
    # 2 -> 1 learner in the middle of an epoch: every sample once all the same.
    run_two("parts", config, COMPARED, "run.max_updates=4")
    alone = run_two("parts", config, "run.max_updates=0", learners=1, resume=True)
    assert latest(alone)["progress"]["env_steps"] == 44  # type: ignore[index]


def _last_parts(run: Training) -> list[Path]:
    name = CheckpointFolder(run.run, 1).find("latest").name
    folder = run.run / "checkpoints"
    return [folder / name, folder / f"rank1-{name}"]

"""Whole runs of what learns from a replay: in turn equal bit for bit, also when resumed."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.conftest import Training

pytestmark = pytest.mark.system

EXPERIMENT = """
environment: {{name: spread, episode_steps: 10, continuous: {continuous}}}
env_server: {{num_workers: 1, envs_per_worker: 8, sessions_per_worker: 2, metrics_port: 0}}
algorithm:
  name: {name}
  replay: {{capacity_rows: 2000, start_rows: 64, batch_size: 32, update_interval: 64,
            updates_per_interval: 2, n_step: 2, unroll_steps: 4, prioritized: true}}
network: {{name: mlp, hidden: [32]}}
learner: {{port: 0, metrics_port: 0, log_every_s: 0.000001, checkpoint_every_updates: 100}}
"""


@pytest.fixture
def started() -> Iterator[list[Training]]:
    runs: list[Training] = []
    yield runs
    for run in runs:
        run.close()


@pytest.mark.parametrize(
    ("name", "continuous"),
    [("masac", "true"), pytest.param("qmix", "false", marks=pytest.mark.long)],
    ids=["masac", "qmix"],
)
def test_runs_in_turn_are_equal_and_resume_to_the_bit(
    name: str, continuous: str, tmp_path: Path, started: list[Training]
) -> None:
    config = tmp_path / "spread.yaml"
    config.write_text(EXPERIMENT.format(name=name, continuous=continuous))

    def train(run: str, updates: int, *arguments: str) -> Training:
        settings = ["learner.pipeline=sync", f"run.max_updates={updates}"]
        flags = [flag for s in settings for flag in ("--set", s)]
        started.append(Training(config, tmp_path / run, [*flags, *arguments]))
        return started[-1]

    whole, halves = train("whole", 12), train("halves", 6)
    for run in (whole, halves):
        assert run.wait() == 0, run.output()
    halves = train("halves", 12, "--resume")
    assert halves.wait() == 0, halves.output()
    losses = whole.losses()
    assert sorted(losses) == list(range(1, 13))
    assert len({loss["td_error"] for loss in losses.values()}) == 12  # it does change
    assert halves.losses() == losses

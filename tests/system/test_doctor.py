"""The doctor beside a real training: it reads the ledgers of the environment servers."""

from collections.abc import Callable

import pytest
from rich.console import Console

from murmur.doctor.page import examine
from murmur.runs.run_folder import RunFolder
from murmur.runs.servers import FILE
from tests.system.conftest import Training

SLEEPS = """
environment:
  name: gymnasium
  factory: "benchmarks.slow_environment:make"
  arguments: {delay_ms: 10.0}
env_server: {num_workers: 1, envs_per_worker: 4, metrics_port: 0}
algorithm: {name: mappo, batch_size: 50, batch_number: 1, data_passes: 1}
network: {name: mlp, hidden: [32]}
learner: {port: 0, metrics_port: 0}
"""


@pytest.mark.long
def test_environments_that_sleep_are_told_from_busy_ones(train: Callable[..., Training]) -> None:
    run = train("sleeps", whole=SLEEPS)
    folder = RunFolder(run.run)

    def lines() -> int:
        return sum(line["rows"] > 0 for line in folder.lines_from_end(FILE))

    run.until(lambda: run.updates() >= 4 and lines() >= 2, 240)
    seen = examine(folder, None, None, 5.0, False, Console(stderr=True))
    named = [cause.name for cause in seen.causes[:2]]
    assert "environments wait" in named, seen.causes  # second if other programs load the machine
    # On an idle machine what the steps compute comes second, far behind.
    scores = {cause.name: cause.score for cause in seen.causes}
    assert scores["environments wait"] > 3 * scores.get("environments compute", 0.0), scores
    assert seen.machine is not None
    assert 0 < seen.machine.own <= seen.machine.busy
    if named[0] == "environments wait":
        assert "env_server.num_workers=2" in seen.remedies[0].settings
        assert "fewer steps of each" in seen.remedies[0].cost

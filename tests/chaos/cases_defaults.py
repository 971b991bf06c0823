"""What defaults must not cost: rows that were received and not learned from."""

from pathlib import Path
from typing import Any

import yaml

from benchmarks.defaults import dropped_share, train
from tests.chaos.cases import Case


def defaults_drop_nothing(folder: Path) -> dict[str, Any]:
    """Episodes far longer than an update's share of an environment: no row becomes too old.

    Nothing is set but environment and algorithm; the run's folder then says what was chosen.
    """
    run = train("CartPole", {"max_updates": 6}, folder)
    last = run.records("progress")[-1]
    assert "lag" not in last["rows_dropped"], last["rows_dropped"]
    assert dropped_share(last) < 0.02, last["rows_dropped"]
    assert last["policy_lag"] <= 1
    # What curves are drawn over is what was learned from, all of which was received.
    assert 0 < last["env_steps"] <= last["env_steps_received"]
    assert last["env_steps"] <= last["rows_trained"]
    whole = yaml.safe_load((run.path / "config.yaml").read_text())
    assert whole["algorithm"]["gamma"] == 0.99
    assert whole["network"] == {"name": "mlp", **whole["network"]}
    assert whole["environment"]["max_episode_steps"] == 0
    assert whole["env_server"]["num_workers"] >= 1
    assert whole["learner"]["num_threads"] >= 1
    return {"dropped": dropped_share(last)}


CASES = [Case("an on-policy run on defaults", defaults_drop_nothing)]

"""Environments that fail to start or return absurd numbers; updates that turn not finite."""

import json
import math
from pathlib import Path
from typing import Any

import yaml

from tests.chaos.cases import Case
from tests.chaos.stack import Service

_END_S = 120.0
_SAID = (
    "raised RuntimeError: no room to start, in the episode with seed",
    "returned a reward of 1e+30 for agent 'agent', beyond ±1e+06 (learner.max_abs_reward), in the",
    "returned a reward of -1e+30 for agent 'agent'",
    "returned inf in reward of agent 'agent'",
    "returned 3e+38 in observation 'observation' of agent 'agent' at index [0], beyond ±1e+18",
    "raised RuntimeError: cannot be closed when it was closed",
    "evaluation: the episode with seed",
    "is skipped: ",
    "the weights stay as they were (skipped so far: 1); the batch is in",
    "; its largest observation is 9e+17, in 'observation' at [",
)


def absurd_numbers(folder: Path) -> dict[str, Any]:
    """Failed starts and absurd rewards cost episodes, absurd observations updates; no run ends."""
    wrongs = ["start", "rich", "poor", "inf", "nan", "close", "far", "beyond", *[""] * 12]
    config = {
        "environment": {
            "name": "gymnasium",
            "factory": "tests.chaos.absurd_environment:Absurd",
            "arguments": {"wrongs": json.dumps(wrongs)},
            "renew": True,
        },
        "algorithm": {
            "name": "mappo",
            "batch_size": 64,
            "batch_number": 1,
            "data_passes": 1,
            "unroll_steps": 16,
        },
        "network": {"name": "mlp", "hidden": [8]},
        "run": {"max_updates": 20},
        "evaluation": {"every_updates": 10, "episodes": 12},
        "env_server": {
            "envs_per_worker": 8,
            "sessions_per_worker": 2,
            "metrics_port": 0,
            "max_faults_per_minute": 100_000,
        },
        "learner": {"port": 0, "metrics_port": 0, "device": "cpu", "log_every_s": 0.000001},
    }
    file, run = folder / "config.yaml", folder / "run"
    file.write_text(yaml.safe_dump(config))
    service = Service(["train", str(file), "--run", str(run)], folder / "log", (), {})
    try:
        code = service.process.wait(_END_S)
    finally:
        service.close()
    text = service.text() + "".join(p.read_text() for p in sorted((run / "logs").glob("*.log")))
    assert code == 0, text
    lines = [json.loads(x) for x in (run / "progress.jsonl").read_text().splitlines()]
    last = [x for x in lines if x["kind"] == "progress"][-1]
    assert last["updates"] == 20, text
    assert last["updates_skipped"] > 0, text
    assert last["rows_dropped"]["skipped"] > 0, last
    assert set(last["rows_dropped"]) <= {"session", "lag", "skipped"}, last
    assert all(math.isfinite(x) for x in last["losses"].values()), last
    for words in _SAID:
        assert words in text, (words, text)
    results = [x["metrics"]["return"] for x in lines if x["kind"] == "evaluation"]
    assert results, text  # 12 episodes, none of them one that failed
    assert all(r["episodes"] == 12 and abs(r["mean"]) <= 10 for r in results), results
    return {
        "counter": "murmur_env_episodes_dropped_total, updates_skipped_total",
        "skipped": last["updates_skipped"],
    }


CASES = [Case("environment fails to start or returns absurd numbers", absurd_numbers)]

"""Counters that survive a restart, and the log files."""

import json
import time
from pathlib import Path

import pytest

from murmur.learner_service.telemetry.progress import Progress, ProgressLog
from tests.waiting import wait_until


def test_a_restart_continues_counting_and_names_what_was_lost() -> None:
    p = Progress()
    p.updates, p.env_steps, p.episodes = 3, 100, 4
    p.rows_received, p.rows_trained = 120, 90
    p.drop("lag", 10)
    p.recent["return"].extend([1.0, 3.0])
    q = Progress()
    q.load_state_dict(p.state_dict())
    q.settle(held=5)  # saved with the checkpoint
    assert (q.updates, q.env_steps, q.episodes, q.rows_trained) == (3, 100, 4, 90)
    assert q.rows_dropped == {"lag": 10, "restart": 15}  # 120 - 90 - 10 - 5
    assert q.rows_received == q.rows_trained + sum(q.rows_dropped.values()) + 5
    assert q.means() == {"return": 2.0}
    assert q.seconds >= p.state_dict()["seconds"] - 0.1


def test_means_are_over_recent_episodes() -> None:
    p = Progress()
    p.recent["return"].extend([0.0] * 100)
    p.recent["return"].extend([1.0] * 50)
    assert p.means() == {"return": 0.5}


def test_the_log_is_one_json_object_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("murmur.learner_service.telemetry.progress._RATE_OVER_S", 0.01)
    p = Progress()
    log = ProgressLog(tmp_path, p, num_agents=3)
    p.env_steps, p.env_steps_received = 10, 12
    p.updates, p.losses = 2, {"critic_loss": 0.5}
    p.recent["return"].append(4.0)
    p.recent["score"].append(1.0)
    began = time.monotonic()
    wait_until(lambda: time.monotonic() - began > 0.05)
    device = {"update_ms": 3.5, "memory_bytes": 2.0**20}
    ledger = {"learner": {"wait_rows": 1.5}}
    log.write({"ledger": ledger, "rows_waiting": 7, "device": device})
    log.write_evaluation(2, 10, {"return": {"mean": 4.0}})
    log.close()
    first, second = map(json.loads, (tmp_path / "progress.jsonl").read_text().splitlines())
    assert first["kind"] == "progress"
    assert (first["env_steps"], first["agent_steps"], first["updates"]) == (10, 30, 2)
    assert first["env_steps_received"] == 12
    assert first["return"] == 4.0
    assert first["metrics"] == {"score": 1.0}
    assert first["losses"] == {"critic_loss": 0.5}
    assert first["ledger"] == {"learner": {"wait_rows": 1.5}}
    assert first["rows_waiting"] == 7
    assert 5 < first["agent_steps_per_s"] <= 36 / 0.05
    assert second["kind"] == "evaluation"
    assert second["metrics"] == {"return": {"mean": 4.0}}
    assert first["device"] == device
    (curves,) = (tmp_path / "tensorboard").iterdir()
    assert b"device/update_ms" in curves.read_bytes()
    assert first["seconds"] == pytest.approx(0, abs=5)

"""docs/metrics.md is what the code says."""

from pathlib import Path

from env_service.metrics import METRICS as ENV_METRICS
from learner_service.telemetry.metrics import METRICS as LEARNER_METRICS
from murmur.metrics_doc import render

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == render(), "run: python -m murmur.metrics_doc > docs/metrics.md"


def test_every_metric_has_a_row() -> None:
    rows = [line for line in render().splitlines() if line.startswith("| `murmur_")]
    assert len(rows) == len(LEARNER_METRICS) + len(ENV_METRICS)
    assert all(row.count(" | ") == 4 for row in rows)

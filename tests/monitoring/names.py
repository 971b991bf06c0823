"""Which metrics there are, and which a PromQL text names."""

import re
from pathlib import Path
from typing import Any

import yaml

from murmur.env_service.metrics import METRICS as ENV_METRICS
from murmur.env_service.metrics import PREFIX
from murmur.learner_service.telemetry.metric_table import METRICS as LEARNER_METRICS

ROOT = Path(__file__).parents[2]
RULES = ROOT / "monitoring" / "prometheus" / "rules.yml"
# Served by Prometheus itself and by its client library.
FOREIGN = {"up", "ALERTS", "process_cpu_seconds_total", "process_resident_memory_bytes"}
_SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


def rules() -> list[dict[str, Any]]:
    return [r for group in yaml.safe_load(RULES.read_text())["groups"] for r in group["rules"]]


def served() -> set[str]:
    """Every series name that the two services and the recording rules give."""
    tables = {"murmur_learner_": LEARNER_METRICS, PREFIX: ENV_METRICS}
    series = {
        f"{prefix}{m.name}{suffix}"
        for prefix, metrics in tables.items()
        for m in metrics
        for suffix in _SUFFIXES[m.kind]
    }
    return series | {rule["record"] for rule in rules() if "record" in rule}


def named(query: str) -> set[str]:
    """The metrics of a query: names that are no function, keyword, label or number."""
    bare = re.sub(r'"[^"]*"', "", query)  # label values
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]", "", bare)  # selectors, ranges
    bare = re.sub(r"\b(by|without|on|ignoring)\s*\([^)]*\)|\bgroup_left\s*\(\)", "", bare)
    return {
        name
        for name in re.findall(r"[a-zA-Z_:][\w:]*(?!\w|\s*\()", bare)
        if name not in {"and", "or", "unless", "offset", "m"}
    }

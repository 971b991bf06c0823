"""The rules as a PrometheusRule: `python -m monitoring.kubernetes` writes it into k8s/."""

from pathlib import Path

import yaml

HERE = Path(__file__).parent
SOURCE = HERE / "prometheus" / "rules.yml"
TARGET = HERE.parent / "k8s" / "components" / "monitoring" / "rules.yaml"


def prometheus_rule() -> str:
    """Return the YAML of the PrometheusRule."""
    rule = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "murmur"},
        "spec": {"groups": yaml.safe_load(SOURCE.read_text())["groups"]},
    }
    head = "# Written by python -m monitoring.kubernetes from monitoring/prometheus/rules.yml.\n"
    return head + yaml.safe_dump(rule, sort_keys=False, width=100)


if __name__ == "__main__":
    TARGET.write_text(prometheus_rule())
    print(f"written: {TARGET.relative_to(HERE.parent)}")

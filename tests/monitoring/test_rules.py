"""The rules: what promtool says, and whether every metric in them exists."""

import re
import shutil
import subprocess

import pytest
import yaml

from tests.monitoring.names import FOREIGN, ROOT, RULES, named, rules, served

TESTS = RULES.with_name("rules_test.yml")


def promtool(*arguments: str) -> str:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian, Ubuntu: apt install prometheus)")
    result = subprocess.run(
        ["promtool", *arguments], cwd=RULES.parent, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_promtool_accepts_rules_and_configuration() -> None:
    output = promtool("check", "rules", "--lint-fatal", RULES.name)
    assert f"{len(rules())} rules found" in output
    promtool("check", "config", "--syntax-only", "prometheus.yml")


def test_every_alert_fires_and_keeps_quiet() -> None:
    promtool("test", "rules", TESTS.name)


def test_every_rule_has_a_test() -> None:
    tested = yaml.safe_load(TESTS.read_text())["tests"]
    alerts = {rule["alert"] for rule in rules() if "alert" in rule}
    assert {t["name"] for t in tested} == alerts | {"records by hand"}
    text = TESTS.read_text()
    for name in alerts:
        assert f'alertname="{name}", instance="bad"' in text, name
    records = {rule["record"] for rule in rules() if "record" in rule}
    assert {r for r in records if f"{r}{{" in text or f"({r}," in text} == records


def test_every_metric_exists() -> None:
    known = served() | FOREIGN
    for rule in rules():
        assert named(rule["expr"]) <= known, rule["expr"]
        assert named(rule["expr"]), rule["expr"]


def test_every_alert_says_what_to_do_and_is_documented() -> None:
    page = (ROOT / "docs" / "reference" / "alerts.md").read_text()
    for rule in rules():
        if "alert" in rule:
            assert rule["labels"]["severity"] in ("warning", "critical")
            assert set(rule["annotations"]) == {"summary", "description"}
            assert f"`{rule['alert']}`" in page, rule["alert"]
    documented = set(re.findall(r"`(Murmur\w+)`", page))
    assert documented == {rule["alert"] for rule in rules() if "alert" in rule}

"""docs/reference is what the code says."""

import ast
from pathlib import Path

import pytest

from murmur.doctor.machine import ROOT
from murmur.env_service.metrics import METRICS as ENV_METRICS
from murmur.learner_service.telemetry.metric_table import KEPT
from murmur.learner_service.telemetry.metric_table import METRICS as LEARNER_METRICS
from murmur.reference import FOLDER, pages, write


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reference")
    write(folder)
    return folder


@pytest.mark.parametrize("name", pages())
def test_reference_page_equals_the_code(written: Path, name: str) -> None:
    committed = (FOLDER / f"{name}.md").read_text()
    assert committed == (written / f"{name}.md").read_text(), "run: python -m murmur.reference"


def test_every_file_of_the_reference_is_generated() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(pages())


def test_every_metric_that_the_learner_names_exists() -> None:
    """Its metrics are looked up by strings, when they are used."""
    known = {(m.kind, m.name, frozenset(m.labels)) for m in KEPT}
    kinds = {kind for kind, _, _ in known}
    used = {
        (node.func.attr, node.args[0].value, frozenset(k.arg for k in node.keywords))
        for path in (ROOT / "learner_service").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in kinds
        and node.args
        and isinstance(node.args[0], ast.Constant)
        and all(k.arg for k in node.keywords)  # no **labels
    }
    assert len(used) > len(known) / 2
    assert used - known == set()


def test_every_metric_has_a_row_with_five_cells(written: Path) -> None:
    lines = (written / "metrics.md").read_text().splitlines()
    rows = [line for line in lines if line.startswith("| `murmur_")]
    assert len(rows) == len(LEARNER_METRICS) + len(ENV_METRICS)
    assert all(row.count(" | ") == 4 for row in rows)


def test_every_option_says_what_it_means(written: Path) -> None:
    for name in ("configuration", "algorithms", "networks", "environments", "sources"):
        lines = (written / f"{name}.md").read_text().splitlines()
        options = [line for line in lines if line.startswith("| `")]
        assert options
        assert not [line for line in options if line.endswith("|  |")], name

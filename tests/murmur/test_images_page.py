"""docs/images.md, done as it says: its own source, its configurations, its table of reasons."""

import re
import sys
from importlib import import_module
from pathlib import Path

import pytest

from murmur.doctor.machine import ROOT
from murmur.kit.check_source import examine
from murmur.runs.settings import resolved_data, source_config
from murmur.shared.config.files import load

PAGE = (ROOT / "docs" / "images.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (code,) = blocks("python")
    (tmp_path / "discs.py").write_text(code)
    for text in blocks("yaml"):
        name = re.match(r"# (\w+\.yaml):", text)
        assert name is not None
        (tmp_path / name[1]).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("here")
def test_source_of_the_page_can_be_used() -> None:
    found = examine(source_config("discs:Discs", ["size=32"]), 20)
    assert (found.read, found.broken, found.changed) == (20, {}, [])
    assert (found.samples_with[: len(found.spec.classes)] == 20).all()
    sys.modules.pop("discs")


def test_configurations_of_the_page_are_complete(here: Path) -> None:
    discs, road = load(str(here / "discs.yaml")), load(str(here / "road.yaml"))
    options = {"size": 32, "train": 200, "valid": 50}
    assert resolved_data(discs)["source"] == {"name": "discs:Discs", **options}
    assert resolved_data(road)["source"]["size"] == [128, 160]


def test_reasons_of_the_page_are_those_of_the_code() -> None:
    rows = PAGE.split("| reason | the file |")[1].split("\n\n")[0]
    named = {n for row in rows.splitlines()[2:] for n in re.findall(r"`(\w+)`", row.split("|")[1])}
    raised = set()
    for module in ("decode", "folder", "source"):
        file = import_module(f"murmur.env_service.sources.{module}").__file__
        raised |= set(re.findall(r'BrokenSample\(\s*"(\w+)"', Path(str(file)).read_text()))
    assert named == raised

"""The dashboards: equal to their source, whole, and about metrics that exist."""

import json

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from monitoring.dashboards import BOARDS, FOLDER, files, panels
from tests.monitoring.names import FOREIGN, named, served

FILES = sorted(FOLDER.glob("*.json"))


def test_the_files_are_up_to_date() -> None:
    expected = files()
    assert set(FILES) == set(expected)
    for path, text in expected.items():
        assert path.read_text() == text, "run: python -m monitoring.dashboards"


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_grafana_knows_every_key(file: object) -> None:
    """Read into Grafana's model and written again, nothing is lost: an unknown key would be."""
    assert hasattr(file, "read_text")
    raw = json.loads(file.read_text())
    again = json.loads(JSONEncoder().encode(Dashboard.from_json(raw)))
    assert again == raw


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_every_panel_is_whole(file: object) -> None:
    assert hasattr(file, "read_text")
    raw = json.loads(file.read_text())
    ids = [panel["id"] for panel in raw["panels"]]
    assert len(ids) == len(set(ids))
    known = served() | FOREIGN
    variables = {v["name"] for v in raw["templating"]["list"]}
    assert {"run", "learner", "server"} <= variables
    for panel in panels(file.read_text()):
        assert len(panel["description"]) > 10, panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "prometheus"}
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24, panel["title"]
        for target in panel["targets"]:
            query = target["expr"]
            assert named(query), query
            assert named(query) <= known, query
            if "murmur_learner" in query:
                assert '=~"$learner"' in query, query
            if "murmur_env_" in query and "label_values" not in query:
                assert '=~"$server"' in query, query


def test_uids_are_unique() -> None:
    assert len({board.uid for board in BOARDS}) == len(BOARDS) == len(FILES)

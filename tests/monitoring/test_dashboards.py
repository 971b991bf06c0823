"""The dashboards: equal to their source, whole, and about metrics that exist."""

import json

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from monitoring.dashboards import BOARDS, FOLDER, build, files, panels
from monitoring.panel import Board, Panel
from murmur.shared.process.errors import MurmurError
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


def test_all_queries_of_a_panel_are_drawn() -> None:
    def board(queries: int) -> Board:
        panel = Panel(
            "Many lines", "One for each letter.", [("up", str(i)) for i in range(queries)]
        )
        return Board("murmur-x", "X", "Of a test.", [("Row", [panel])])

    for queries in (1, 6, 7, 26):
        (panel,) = panels(build(board(queries)))
        assert [target["legendFormat"] for target in panel["targets"]] == list(
            map(str, range(queries))
        )
        assert len({target["refId"] for target in panel["targets"]}) == queries
    with pytest.raises(MurmurError, match=r"'Many lines' has 27 queries.*split it"):
        build(board(27))


def test_uids_are_unique() -> None:
    assert len({board.uid for board in BOARDS}) == len(BOARDS) == len(FILES)

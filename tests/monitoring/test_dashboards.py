"""The dashboards: equal to their source, whole, and about metrics that exist."""

import json
import re
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from monitoring.boards.learning import SCALES
from monitoring.dashboards import BOARDS, FOLDER, build, files, panels
from monitoring.panel import Board, Panel
from murmur.env_service.metrics import WorkerMetrics
from murmur.live_page.ledger_states import STATES
from murmur.shared.process.errors import MurmurError
from tests.monitoring.names import FOREIGN, ROOT, named, served

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
    ids = [part["id"] for row in raw["panels"] for part in (row, *row.get("panels", []))]
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


def all_panels() -> list[dict[str, Any]]:
    return [panel for file in FILES for panel in panels(file.read_text())]


def unit(panel: dict[str, Any]) -> str:
    return str(panel["fieldConfig"]["defaults"]["unit"])


def test_shares_end_at_one() -> None:
    """A rate of seconds reaches 1.15 between two scrapes: above the axis, its line has a hole."""
    shares = [panel for panel in all_panels() if unit(panel) == "percentunit"]
    assert len(shares) > 10
    for panel in shares:
        assert panel["fieldConfig"]["defaults"]["max"] == 1, panel["title"]
        for target in panel["targets"]:
            assert re.fullmatch(r"clamp_max\(.*, 1\)", target["expr"]), panel["title"]


def test_a_rate_says_what_it_counts() -> None:
    """Grafana's `ops` shows "2.56K ops/s" of whatever it is."""
    for panel in all_panels():
        assert unit(panel) not in {"ops", "reqps", "rps", "wps", "iops", "cps"}, panel["title"]
        counted = [
            target
            for target in panel["targets"]
            if re.search(r"_total\{|_count\{|rate1m", target["expr"])
            and not re.search(r"increase\(| / |seconds|bytes", target["expr"])
        ]
        if counted:
            assert re.fullmatch(r"count:\w+/s", unit(panel)), panel["title"]


def test_waiting_is_gray_and_work_is_not() -> None:
    of_threads = {s: kind for states in STATES.values() for s, (kind, _) in states.items()}
    known = of_threads | {state: "work" for state in WorkerMetrics.STATES if state != "wait"}
    stacks = [
        panel
        for panel in all_panels()
        if panel["fieldConfig"]["defaults"].get("custom", {}).get("stacking")
    ]
    assert len(stacks) >= 3
    for panel in stacks:
        colors = {
            override["matcher"]["options"]: prop["value"]["fixedColor"]
            for override in panel["fieldConfig"]["overrides"]
            for prop in override["properties"]
            if prop["id"] == "color"
        }
        for state, kind in known.items():
            found = [c for p, c in colors.items() if re.fullmatch(p.strip("/"), state)]
            gray = [c for c in found if len({c[1:3], c[3:5], c[5:7]}) == 1]
            assert len(found) == len(gray) == (kind == "wait"), state
    for states in STATES.values():  # what one thread waits for has different shades
        waits = [state for state, (kind, _) in states.items() if kind == "wait"]
        shades = {c for w in waits for p, c in colors.items() if re.fullmatch(p.strip("/"), w)}
        assert len(shades) == len(waits)


def test_panels_of_a_gpu_are_closed_and_about_learners_with_one() -> None:
    closed = [
        panel
        for file in FILES
        for row in json.loads(file.read_text())["panels"]
        if row.get("collapsed")
        for panel in row["panels"]
    ]
    gpu = re.compile(r"murmur_learner_gpu_|murmur:gpu_|graph|CUDA", re.I)
    assert {panel["title"] for panel in closed} == {
        panel["title"]
        for panel in all_panels()
        if panel["type"] != "stat" and any(gpu.search(t["expr"]) for t in panel["targets"])
    }
    for panel in closed:
        for target in panel["targets"]:
            only = 'and on (instance) murmur_learner_device_info{instance=~"$learner", cuda!=""}'
            assert re.search(r"murmur_learner_gpu_|murmur:gpu_", target["expr"]) or (
                only in target["expr"]
            ), panel["title"]


def test_a_panel_of_learning_has_one_scale() -> None:
    """Each scalar of an update is in one panel, with those of its scale or alone."""
    text = (ROOT / "docs" / "algorithms.md").read_text()
    table = text[text.index("## What an update logs") :]
    documented = set(re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`.*?) \|", table, re.M))))
    assert {"entropy", "q_mean", "temperature"} <= documented
    logged = documented | {"actor_loss", "critic_loss", "loss", "imitation_loss", "dice"}
    logged |= {"actor_grad_norm", "grad_norm", "of_a_plug_in"}
    board = panels((FOLDER / "learning.json").read_text())
    together = {
        panel["title"]: re.search(r'murmur_learner_loss\{.*name=~"([^$"]+)"', t["expr"])
        for panel in board
        for t in panel["targets"]
    }
    patterns = {title: found[1] for title, found in together.items() if found}
    assert set(patterns) == set(SCALES)
    (alone,) = [p for p in board if p.get("repeat") == "scalar"]
    (rest,) = re.findall(r'name!~"([^"]+)"', alone["targets"][0]["expr"])
    for name in logged:
        places = [title for title, names in patterns.items() if re.fullmatch(names, name)]
        assert len(places) + (re.fullmatch(rest, name) is None) == 1, name
    for title, names in patterns.items():
        assert sum(re.fullmatch(names, name) is not None for name in logged) <= 5, title
    (results,) = [p for p in board if "episode_metric" in p["targets"][0]["expr"]]
    assert results["repeat"] == "metric"


def test_legends_name_the_instance_only_of_several() -> None:
    for panel in all_panels():
        for target in panel["targets"]:
            legend = target["legendFormat"]
            assert "{{instance}}" not in legend, panel["title"]
            # Of one there is still a word: Grafana writes all labels in place of an empty legend.
            assert re.sub(r"\{\{\$\w+\}\}", "", legend).strip(), panel["title"]

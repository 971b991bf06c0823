"""The Grafana dashboards of monitoring.boards, written by `python -m monitoring.dashboards`.

A test compares the files with this module, another one asks every query of a Prometheus that has
scraped a training. Grafana's own library builds the JSON.
"""

import json
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard as dashboards
from grafana_foundation_sdk.builders import prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common, dashboard

from monitoring.boards import env_servers, learning, overview, queues, resources
from monitoring.panel import LEARNER, Board, Panel
from murmur.shared.process.errors import MurmurError

FOLDER = Path(__file__).parent / "grafana" / "dashboards"
_SOURCE = dashboard.DataSourceRef(type_val="prometheus", uid="prometheus")
BOARDS = (overview.BOARD, queues.BOARD, learning.BOARD, env_servers.BOARD, resources.BOARD)


def _thresholds(panel: Panel) -> dashboards.ThresholdsConfig:
    """Return the steps green, yellow, red in the order of the values."""
    steps = [(None, "green"), (panel.warn, "yellow"), (panel.bad, "red")]
    if panel.warn is not None and panel.bad is not None and panel.bad < panel.warn:
        steps = [(None, "red"), (panel.bad, "yellow"), (panel.warn, "green")]
    return (
        dashboards.ThresholdsConfig()
        .mode(dashboard.ThresholdsMode.ABSOLUTE)
        .steps(
            [
                dashboard.Threshold(value=value, color=color)
                for i, (value, color) in enumerate(steps)
                if i == 0 or value is not None
            ]
        )
    )


def _panel(panel: Panel) -> stat.Panel | timeseries.Panel:
    built: stat.Panel | timeseries.Panel
    if panel.kind == "stat":
        built = stat.Panel().height(4)
    else:
        built = (
            timeseries.Panel()
            .height(8)
            .legend(
                common_builders.VizLegendOptions()
                .display_mode(common.LegendDisplayMode.LIST)
                .placement(common.LegendPlacement.BOTTOM)
                .show_legend(True)
            )
            .tooltip(
                common_builders.VizTooltipOptions()
                .mode(common.TooltipDisplayMode.MULTI)
                .sort(common.SortOrder.DESCENDING)
            )
        )
        if panel.warn is not None:
            built.thresholds_style(
                common_builders.GraphThresholdsStyleConfig().mode(
                    common.GraphThresholdsStyleMode.DASHED
                )
            )
        if panel.kind == "stack":
            built.fill_opacity(60).line_width(0).stacking(
                common_builders.StackingConfig().mode(common.StackingMode.NORMAL).group("A")
            )
    built.title(panel.title).description(panel.description).unit(panel.unit)
    built.datasource(_SOURCE).span(panel.width).thresholds(_thresholds(panel))
    if panel.unit != "short" or panel.kind != "lines":
        built.min(0)
    if panel.top is not None:
        built.max(panel.top)
    if len(panel.queries) > len(ascii_uppercase):
        raise MurmurError(
            f"panel '{panel.title}' has {len(panel.queries)} queries, one for each letter at "
            f"most: {len(ascii_uppercase)}; split it into two panels"
        )
    for letter, (expression, legend) in zip(ascii_uppercase, panel.queries, strict=False):
        built.with_target(
            prometheus.Dataquery()
            .datasource(_SOURCE)
            .expr(expression)
            .legend_format(legend or "__auto")
            .ref_id(letter)
        )
    return built


def _variable(name: str, label: str, query: str) -> dashboards.QueryVariable:
    """Return a variable with values from Prometheus; several or all can be chosen."""
    return (
        dashboards.QueryVariable(name)
        .label(label)
        .datasource(_SOURCE)
        .query(query)
        .refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(dashboard.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .current(dashboard.VariableOption(selected=True, text="All", value="$__all"))
    )


def build(board: Board) -> str:
    """Build the JSON of a dashboard."""
    built = (
        dashboards.Dashboard(f"murmur: {board.title}")
        .uid(board.uid)
        .description(board.description)
        .tags(["murmur"])
        .refresh("5s")
        .time("now-15m", "now")
        .timezone("browser")
        .tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
        .editable()
        .link(
            dashboards.DashboardLink("murmur")
            .type(dashboard.DashboardLinkType.DASHBOARDS)
            .tags(["murmur"])
            .include_vars(True)
            .keep_time(True)
        )
        .with_variable(_variable("run", "run", "label_values(murmur_learner_info, run)"))
        .with_variable(
            _variable(
                "learner", "learner", 'label_values(murmur_learner_info{run=~"$run"}, instance)'
            )
        )
        .with_variable(
            _variable(
                "server",
                "environment server",
                'label_values(murmur_env_info{run=~"$run"}, instance)',
            )
        )
    )
    if board.uid == "murmur-learning":
        built.with_variable(
            _variable(
                "metric",
                "result",
                f"label_values(murmur_learner_episode_metric{{{LEARNER}}}, name)",
            )
        )
    number = 0
    for title, panels in board.rows:
        number += 1
        built.with_row(dashboards.Row(title).id(number))
        for panel in panels:
            number += 1
            built.with_panel(_panel(panel).id(number))
    return JSONEncoder(sort_keys=True, indent=1).encode(built.build()) + "\n"


def files() -> dict[Path, str]:
    """Return the content of every file by path."""
    return {FOLDER / f"{b.uid.removeprefix('murmur-')}.json": build(b) for b in BOARDS}


def panels(text: str) -> list[dict[str, Any]]:
    """Return the panels of a dashboard's JSON, without its rows' headings."""
    found: list[dict[str, Any]] = []
    for panel in json.loads(text)["panels"]:
        found += [panel] if panel["type"] != "row" else panel.get("panels", [])
    return found


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text)
        print(f"written: {path.relative_to(FOLDER.parents[2])}")

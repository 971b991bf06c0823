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
from monitoring.panel import LEARNER, SERVER, Board, Panel, Variable
from murmur.shared.process.errors import MurmurError

FOLDER = Path(__file__).parent / "grafana" / "dashboards"
_SOURCE = dashboard.DataSourceRef(type_val="prometheus", uid="prometheus")
# Time that a thread waits is gray, so that what has a color is work: a shade for each group of
# states that are never waited in by the same thread.
WAITING = {
    "start": "#595959",
    "wait|wait_rows|wait_environments": "#8c8c8c",
    "wait_ranks|wait_learning": "#b3b3b3",
}
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
            for states, gray in WAITING.items():
                color = {"mode": "fixed", "fixedColor": gray}
                built.override_by_regexp(
                    f"/^({states})$/", [dashboard.DynamicConfigValue(id_val="color", value=color)]
                )
    built.title(panel.title).description(panel.description).unit(panel.unit)
    built.datasource(_SOURCE).span(panel.width).thresholds(_thresholds(panel))
    if panel.unit != "short" or panel.kind != "lines":
        built.min(0)
    share = panel.unit == "percentunit"
    top = 1 if share else panel.top
    if top is not None:
        built.max(top)
    if panel.repeat is not None:
        built.repeat(panel.repeat)
        built.max_per_row(24 // panel.width)
    if len(panel.queries) > len(ascii_uppercase):
        raise MurmurError(
            f"panel '{panel.title}' has {len(panel.queries)} queries, one for each letter at "
            f"most: {len(ascii_uppercase)}; split it into two panels"
        )
    for letter, (expression, legend) in zip(ascii_uppercase, panel.queries, strict=False):
        built.with_target(
            prometheus.Dataquery()
            .datasource(_SOURCE)
            .expr(f"clamp_max({expression}, 1)" if share else expression)
            .legend_format(legend or "__auto")
            .ref_id(letter)
        )
    return built


def _variable(variable: Variable) -> dashboards.QueryVariable:
    """Return a variable with values from Prometheus; several or all can be chosen."""
    return (
        dashboards.QueryVariable(variable.name)
        .label(variable.label)
        .datasource(_SOURCE)
        .query(variable.query)
        .refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(dashboard.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .current(dashboard.VariableOption(selected=True, text="All", value="$__all"))
    )


def _label(name: str, info: str) -> dashboards.QueryVariable:
    """Return a hidden variable: `instance` if the metric `info` has several, else `none`."""

    def named(value: str, query: str) -> str:
        return f'label_replace({query}, "label", "{value}", "__name__", ".*")'

    several = named("instance", f"count(count by (instance) ({info})) > 1")
    return (
        dashboards.QueryVariable(name)
        .hide(dashboard.VariableHide.HIDE_VARIABLE)
        .datasource(_SOURCE)
        .query(f"query_result({several} or on () {named('none', 'vector(1)')})")
        .regex('/label="([a-z]+)"/')
        .refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .current(dashboard.VariableOption(selected=True, text="none", value="none"))
    )


_VARIABLES = (
    Variable("run", "run", "label_values(murmur_learner_info, run)"),
    Variable("learner", "learner", 'label_values(murmur_learner_info{run=~"$run"}, instance)'),
    Variable(
        "server", "environment server", 'label_values(murmur_env_info{run=~"$run"}, instance)'
    ),
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
    )
    for variable in (*_VARIABLES, *board.variables):
        built.with_variable(_variable(variable))
    built.with_variable(_label("learner_label", f"murmur_learner_info{{{LEARNER}}}"))
    built.with_variable(_label("server_label", f"murmur_env_info{{{SERVER}}}"))
    number = 0
    for title, panels in board.rows:
        number += 1
        row = dashboards.Row(title).id(number)
        parts = [_panel(panel).id(number + i) for i, panel in enumerate(panels, 1)]
        number += len(panels)
        if title in board.closed:  # its panels are within it, and ask nothing until it is opened
            row.collapsed(True)
            for part in parts:
                row.with_panel(part)
            built.with_row(row)
            continue
        built.with_row(row)
        for part in parts:
            built.with_panel(part)
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

"""Definitions of panels and dashboards, and the queries that panels share."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

# Every query of a learner's metrics carries LEARNER, every one of a server's SERVER.
LEARNER = 'instance=~"$learner"'
SERVER = 'instance=~"$server"'
RATE_INTERVAL = "[$__rate_interval]"
# A legend's name of the instance: variables whose value is `instance` where several learners, or
# servers, are chosen, and a label that does not exist where there is one.
LEARNER_NAME, SERVER_NAME = "{{$learner_label}}", "{{$server_label}}"
Query = tuple[str, str]  # PromQL, legend


@dataclass(frozen=True)
class Panel:
    """One panel.

    Attributes:
        title: name of the quantity.
        description: explanation of the values, with the remedy if they look wrong.
        queries: (PromQL, legend) of each line.
        unit: Grafana's name of the unit; see `per_second`. A share, "percentunit", is clamped to 1:
            a rate of seconds is a few per cent off between two scrapes, and a value above the end
            of the axis would be a hole in its line.
        kind: "lines", "stack" (areas that add up) or "stat" (the latest value).
        width: columns of 24.
        warn: threshold of yellow: this value and above.
        bad: threshold of red: this value and above, or below it if `bad` < `warn`.
        top: upper end of the axis; of a share always 1.
        repeat: variable of the dashboard; the panel is drawn for each of its values.
    """

    title: str
    description: str
    queries: Sequence[Query]
    unit: str = "short"
    kind: Literal["lines", "stack", "stat"] = "lines"
    width: int = 12
    warn: float | None = None
    bad: float | None = None
    top: float | None = None
    repeat: str | None = None


@dataclass(frozen=True)
class Variable:
    """Values that a dashboard's user chooses from, all at first."""

    name: str
    label: str
    query: str


@dataclass(frozen=True)
class Board:
    """One dashboard: rows of panels.

    Attributes:
        uid: its name in addresses.
        title: its name in lists.
        description: what it is for.
        rows: (title, panels) of each row.
        closed: titles of rows that are collapsed at first.
        variables: choices beside run, learner and environment server.
    """

    uid: str
    title: str
    description: str
    rows: Sequence[tuple[str, Sequence[Panel]]]
    closed: Sequence[str] = ()
    variables: Sequence[Variable] = ()


def per_second(what: str) -> str:
    """Return the unit of a rate: 2560 with `steps` is shown as 2.56K steps/s."""
    return f"count:{what}/s"


def learner_gauge(metric: str, legend: str = f"learner {LEARNER_NAME}") -> Query:
    """Return the query of a learner's metric as it is."""
    return f"{metric}{{{LEARNER}}}", legend


def server_gauge(metric: str, legend: str = f"server {SERVER_NAME}") -> Query:
    """Return the query of an environment server's metric as it is."""
    return f"{metric}{{{SERVER}}}", legend


def rate(metric: str, where: str = LEARNER) -> str:
    """Return the query of a counter's increase per second."""
    return f"rate({metric}{{{where}}}{RATE_INTERVAL})"


def quantiles(metric: str, where: str = "") -> list[Query]:
    """Return the median and 99th percentile of a histogram, over all selected learners."""
    buckets = f"sum by (le) ({rate(metric + '_bucket', LEARNER + where)})"
    return [
        (f"histogram_quantile({q}, {buckets})", name) for q, name in ((0.5, "p50"), (0.99, "p99"))
    ]


def mean(metric: str) -> str:
    """Return the mean of a learner's histogram."""
    return f"sum({rate(metric + '_sum')}) / sum({rate(metric + '_count')})"

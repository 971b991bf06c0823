"""Draw the dashboards from a Prometheus, without Grafana.

python -m monitoring.preview http://localhost:9090 docs/pictures --minutes 10
"""

import argparse
import json
import math
import re
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, MultipleLocator, PercentFormatter

from monitoring.dashboards import FOLDER, panels

_STEPS = 120


def fill(query: str, rate_interval: str) -> str:
    """Fill a query's Grafana variables: all runs, learners, servers and results."""
    return re.sub(r"\$(run|learner|server|metric)\b", ".*", query).replace(
        "$__rate_interval", rate_interval
    )


def ask(address: str, path: str, **parameters: str | float) -> list[dict[str, Any]]:
    """Ask Prometheus a query, at /api/v1/query or /api/v1/query_range; return its result."""
    url = f"{address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
    with urllib.request.urlopen(url, timeout=30) as reply:
        result: list[dict[str, Any]] = json.load(reply)["data"]["result"]
    return result


def _legend(template: str, labels: dict[str, str]) -> str:
    if template == "__auto":
        return ""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: labels.get(match[1], ""), template).strip()


def _number(value: float, unit: str) -> str:
    if unit == "percentunit":
        return f"{100 * value:.0f} %"
    text = EngFormatter(places=1, sep="")(value) if abs(value) >= 1000 else f"{value:.3g}"
    return text + unit.removeprefix("suffix:") * unit.startswith("suffix:")


def _draw(axes: Axes, panel: dict[str, Any], address: str, start: float, end: float) -> None:
    """Draw one panel."""
    unit = panel["fieldConfig"]["defaults"]["unit"]
    custom = panel["fieldConfig"]["defaults"].get("custom", {})
    axes.set_title(panel["title"], fontsize=9, loc="left")
    lines: list[tuple[str, list[float], list[float]]] = []
    for target in panel["targets"]:
        query = fill(target["expr"], "30s")
        step = (end - start) / _STEPS
        for series in ask(address, "query_range", query=query, start=start, end=end, step=step):
            label = _legend(target["legendFormat"], series["metric"])
            points = [(float(t) - start, float(v)) for t, v in series["values"]]
            lines.append((label, [t for t, _ in points], [v for _, v in points]))
    if panel["type"] == "stat":
        value = lines[0][2][-1] if lines else math.nan
        axes.axis("off")
        axes.text(0.5, 0.4, _number(value, unit), ha="center", va="center", fontsize=18)
        return
    if custom.get("stacking", {}).get("mode") == "normal":
        grid = sorted({t for _, times, _ in lines for t in times})
        heights = [[dict(zip(x, y, strict=True)).get(t, 0.0) for t in grid] for _, x, y in lines]
        if grid:
            axes.stackplot(grid, heights, labels=[label for label, _, _ in lines], alpha=0.75)
    else:
        for label, times, values in lines:
            axes.plot(times, values, label=label, linewidth=1)
    if "max" in panel["fieldConfig"]["defaults"]:
        most = panel["fieldConfig"]["defaults"]["max"]
        axes.set_ylim(0, 1.02 * most)  # a line at the top is not to hide behind the frame
    if unit == "percentunit":
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    elif unit != "short":
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    if not lines:
        axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", color="grey")
    axes.set_xlim(0, end - start)
    axes.tick_params(labelsize=7)
    axes.xaxis.set_major_locator(MultipleLocator(60 * math.ceil((end - start) / 360)))
    axes.xaxis.set_major_formatter(lambda x, _: f"{x / 60:.0f} min")
    if any(label for label, _, _ in lines):
        axes.legend(
            fontsize=6, ncols=4, frameon=False, loc="upper left", bbox_to_anchor=(-0.06, -0.12)
        )


def draw(file: Path, address: str, folder: Path, minutes: float, ago: float = 0.0) -> Path:
    """Draw one dashboard over some minutes that ended `ago` minutes ago."""
    text = file.read_text()
    found = panels(text)
    bottom = max(p["gridPos"]["y"] + p["gridPos"]["h"] for p in found)
    figure = plt.figure(figsize=(12, bottom * 0.34), dpi=90, layout=None)
    end = time.time() - 60 * ago
    for row in json.loads(text)["panels"]:
        if row["type"] == "row":
            low = 1 - (row["gridPos"]["y"] + 0.9) / bottom
            figure.text(0.01, low, row["title"], fontsize=11, weight="bold")
    for panel in found:
        at = panel["gridPos"]
        left, low = at["x"] / 24, 1 - (at["y"] + at["h"]) / bottom
        stat = panel["type"] == "stat"
        box = (
            left + (0.005 if stat else 0.045),
            low + (0.2 if stat else 2.0) / bottom,
            at["w"] / 24 - 0.06,
            (at["h"] - (1.2 if stat else 3.0)) / bottom,
        )
        _draw(figure.add_axes(box), panel, address, end - 60 * minutes, end)
    out = folder / f"dashboard-{file.stem}.png"
    figure.savefig(out)
    plt.close(figure)
    return out


def main() -> None:
    """Draw all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address", help="of the Prometheus, e.g. http://localhost:9090")
    parser.add_argument("folder", type=Path, help="where the pictures go")
    parser.add_argument("--minutes", type=float, default=10.0, help="how far back")
    parser.add_argument("--ago", type=float, default=0.0, help="minutes since its end")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for file in sorted(FOLDER.glob("*.json")):
        print(
            f"written: {draw(file, options.address, options.folder, options.minutes, options.ago)}"
        )


if __name__ == "__main__":
    main()

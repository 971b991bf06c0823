"""A curriculum on the live page, in the report and in TensorBoard."""

from typing import Any

from murmur.comparison.report_charts import learning_charts
from murmur.learner_service.telemetry.tracking import scalars_of
from murmur.live_page.curves import Curves
from murmur.live_page.view import _figures


def line(env_steps: int, level: int) -> dict[str, Any]:
    course = {"value": ["calm", "gale"][level], "number": level, "level": level}
    return {
        "kind": "progress",
        "env_steps": env_steps,
        "return": 1.0,
        "metrics": {},
        "losses": {},
        "device": {},
        "agent_steps_per_s": 1.0,
        "policy_lag": 0.0,
        "curriculum": {
            "wind": {"value": 2.5, "number": 2.5},
            "weather": {**course, "episodes": [3, 0]},
        },
    }


def test_pages_and_curves_show_where_options_stand() -> None:
    lines = [line(1000, 0), line(5000, 1)]
    figures = _figures(lines[1])
    assert figures["curriculum: wind"] == "2.5"
    assert figures["curriculum: weather"] == "gale (level 2 of 2)"
    found = scalars_of(lines[1])
    assert (found["curriculum/wind"], found["curriculum/weather"]) == (2.5, 1.0)
    curves = Curves()
    for each in lines:
        curves.take(each)
    points = curves.since("")["points"]
    assert [p["values"]["curriculum.weather"][1] for p in points] == [0.0, 1.0]
    charts = {chart.title: chart for chart in learning_charts(lines)}
    assert "gale from 5" in charts["Curriculum: weather"].reading
    assert "2.5" in charts["Curriculum: wind"].reading

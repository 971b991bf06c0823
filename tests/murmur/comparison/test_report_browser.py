"""The report in a real browser: values under the pointer, legible letters, whole intervals."""

from pathlib import Path
from typing import Any

import pytest

from murmur.comparison.report import render_page
from murmur.comparison.report_charts import LEARNED
from murmur.live_page.server import LivePage
from murmur.runs.run_folder import RunFolder
from tests.murmur.browser import CONTRAST
from tests.murmur.comparison.test_report import table_result
from tests.murmur.live_page.test_server import append, progress
from tests.murmur.runs_on_disk import write_run

pytestmark = pytest.mark.long


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run of `spread` with a report."""
    scores = [(0, -153.0), (100, -60.0), (200, -53.0)]
    run = write_run(tmp_path / "run", scores, "run.name=warehouse_of_robots:TheLongestName")
    append(run, *(progress(i) for i in range(1, 10)))
    results = {
        name: table_result({"return": mean, "collisions": 1.0})
        | {"mean_curves": {"return": [0.0, mean]}, "curves_ci95": {"return": [0.0, 1.0]}}
        for name, mean in ((LEARNED, -53.0), ("assignment", -24.5), ("random", -79.0))
    }
    for result in results.values():
        result["summary"]["return"] |= {"low": -1234.5, "high": -1.0}
    results[LEARNED]["key"] = {"checkpoint": "best.pt"}
    (run.path / "report.html").write_text(render_page(run, results))
    return run


# The size in pixels of the smallest letters, as they are shown.
_LETTERS = """() => Math.min(...[...document.querySelectorAll("body *")].filter((e) =>
    [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim()) && e.checkVisibility()
  ).map((e) => {
    const size = parseFloat(getComputedStyle(e).fontSize), svg = e.ownerSVGElement;
    return svg ? size * svg.getBoundingClientRect().width / svg.viewBox.baseVal.width : size;
  }))"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_a_report_is_legible(width: int, scheme: str, run: RunFolder, chromium: Any) -> None:
    made = chromium.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    tab = made.new_page()
    tab.goto(f"file://{run.path / 'report.html'}")
    assert tab.evaluate(_LETTERS) >= 10
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    for small in tab.locator("td small").all():  # an interval is one line
        lines = small.evaluate("e => e.offsetHeight / parseFloat(getComputedStyle(e).fontSize)")
        assert lines < 2
    texts = tab.evaluate(CONTRAST)
    assert {text: ratio for text, ratio in texts.items() if ratio < 4.5} == {}  # WCAG 2.2 AA
    made.close()


def test_values_are_read_by_pointer_and_keyboard(run: RunFolder, chromium: Any) -> None:
    served = LivePage(run, 0)  # whose policy of content lets the report's script run
    try:
        for address in (f"file://{run.path / 'report.html'}", f"{served.url}/report"):
            wrong: list[str] = []
            tab = chromium.new_page()
            tab.on("console", lambda message, wrong=wrong: wrong.append(message.text))
            tab.goto(address)
            chart = tab.locator("svg[data-hover]").first
            chart.scroll_into_view_if_needed()
            box = chart.bounding_box()
            tab.mouse.move(box["x"] + 0.9 * box["width"], box["y"] + 40)
            tip = tab.locator(".tip").first
            words = tip.inner_text()
            assert "step of the episode 1" in words
            for text in ("learned policy -53", "assignment -24.5", "random -79"):
                assert text in words
            tab.mouse.move(0, 0)
            assert not tip.is_visible()
            chart.focus()
            tab.keyboard.press("Home")
            assert "step of the episode 0" in tip.inner_text()
            tab.keyboard.press("Escape")
            assert not tip.is_visible()
            assert [text for text in wrong if "favicon" not in text and "404" not in text] == []
            tab.close()
    finally:
        served.close()

"""The live page in a real browser: Chromium, which Playwright drives.

Needs `pip install playwright` and an installed Chromium; where one is missing the tests are skipped
and say so.
"""

import contextlib
import re
import subprocess
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from murmur.live_page.server import LivePage
from murmur.runs.child import child_environment, murmur_command
from murmur.runs.run_folder import RunFolder
from tests.murmur.browser import CONTRAST
from tests.murmur.live_page.test_server import append, progress
from tests.murmur.runs_on_disk import write_run

sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
pytestmark = pytest.mark.long
EVALUATION = {
    "kind": "evaluation",
    "env_steps": 2000,
    "metrics": {"return": {"mean": -30.0, "ci95": [-32.0, -28.0]}},
}
LEDGER = {"learner": {"wait_rows": 3.0, "forward": 1.0}, "inference": {"act": 4.0}}


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    made = write_run(tmp_path / "run", [], "run.max_env_steps=1000000")
    lines = [progress(i, ledger=_times(i)) for i in range(1, 40)]
    made.progress_file.write_text("")
    append(made, *lines)
    append(made, EVALUATION)
    return made


def _times(step: int) -> dict[str, dict[str, float]]:
    return {thread: {s: step * v for s, v in states.items()} for thread, states in LEDGER.items()}


@contextlib.contextmanager
def opened(chromium: Any, run: RunFolder, **context: Any) -> Iterator[Any]:
    """The page in a tab of its own; nothing may be wrong on its console."""
    wrong: list[str] = []
    with contextlib.closing(LivePage(run, 0)) as page:
        made = chromium.new_context(**context)
        tab = made.new_page()
        tab.on(
            "console", lambda m: wrong.append(m.text) if m.type in ("error", "warning") else None
        )
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.goto(page.url)
        tab.wait_for_selector("#figures div, #gone:not([hidden])")
        tab.wait_for_timeout(300)
        yield tab
        made.close()
    assert wrong == []


def test_a_gpu_comes_and_goes_with_its_figures(chromium: Any, run: RunFolder) -> None:
    gpu = {"utilization_ratio": 0.28, "memory_used_bytes": 2.0**30, "memory_total_bytes": 2.0**36}
    append(run, progress(40, device=gpu, ledger=_times(40)))
    with opened(chromium, run) as tab:
        assert "28 %" in tab.inner_text("#figures")
        assert "1.0 of 64.0 GiB" in tab.inner_text("#figures")
        append(run, progress(41, device={}, ledger=_times(41)))  # resumed on a CPU
        sync_api.expect(tab.locator("#figures")).not_to_contain_text("GPU", timeout=20_000)
        assert "policy lag" in tab.inner_text("#figures").lower()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 768, 1280, 1920])
def test_every_width_and_scheme_fits(
    width: int, scheme: str, chromium: Any, run: RunFolder
) -> None:
    size = {"width": width, "height": 800}
    sibling = run.path.parent / "sweep-a-name-of-some-length-20261127-134519" / "warehouse-seed-1"
    write_run(sibling, [(1000, 1.0)])
    with opened(chromium, run, viewport=size, color_scheme=scheme) as tab:
        assert sibling.name in (tab.text_content("#other") or "")
        for button in tab.locator("button[aria-expanded]").all():
            button.click()  # tables too
        inner, outer = tab.evaluate(
            "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
        )
        assert inner <= outer == width
        colour = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        assert colour == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(20, 24, 27)")
        texts = tab.evaluate(CONTRAST)
        assert texts
        assert {text: ratio for text, ratio in texts.items() if ratio < 4.5} == {}  # WCAG 2.2 AA


def test_the_switch_overrides_the_systems_colours_and_is_kept(
    chromium: Any, run: RunFolder
) -> None:
    with opened(chromium, run, color_scheme="light") as tab:
        tab.select_option("#theme", "dark")
        for _ in range(2):
            colour = tab.evaluate("getComputedStyle(document.body).backgroundColor")
            assert colour == "rgb(20, 24, 27)"
            tab.reload()


def test_the_keyboard_reaches_every_control(chromium: Any, run: RunFolder) -> None:
    with opened(chromium, run, viewport={"width": 1280, "height": 800}) as tab:
        wanted = tab.evaluate(
            """[...document.querySelectorAll("a[href], button, select, input, svg[tabindex]")]
            .filter((e) => e.checkVisibility()).map((e, i) => (e.dataset.number = i))"""
        )
        assert len(wanted) > 10
        reached, rings = [], []
        for _ in range(len(wanted) + 5):
            tab.keyboard.press("Tab")
            number, ring = tab.evaluate(
                """[document.activeElement.dataset.number,
                getComputedStyle(document.activeElement).outlineStyle]"""
            )
            if number is not None:
                reached.append(int(number))
                rings.append(ring)
        assert set(wanted) <= set(reached)
        assert reached[: len(wanted)] == sorted(wanted)  # in the order of reading
        assert set(rings) == {"solid"}


def test_states_and_points_are_read_by_keyboard(chromium: Any, run: RunFolder) -> None:
    with opened(chromium, run) as tab:
        tab.locator(".legend button", has_text="wait_rows 75 %").focus()
        readout = tab.locator(".thread .readout").first
        assert readout.text_content().startswith("wait_rows: no update is due")
        tab.locator("#curve svg.plot").focus()
        tab.keyboard.press("End")
        assert "environment steps 3900: -11" in tab.locator("#curve .readout").text_content()
        tab.keyboard.press("Home")
        assert "environment steps 100: -49" in tab.locator("#curve .readout").text_content()
        tab.locator(".thread svg.plot").first.focus()
        tab.keyboard.press("ArrowRight")
        assert "wait_rows 75 %, forward 25 %" in readout.text_content()


def test_every_chart_has_a_table_and_a_text(chromium: Any, run: RunFolder) -> None:
    with opened(chromium, run) as tab:
        charts = tab.locator("svg.plot").all()
        assert len(charts) == 5  # return, throughput, a loss, two threads
        assert all(len(chart.get_attribute("aria-label")) > 30 for chart in charts)
        tables = tab.locator("button[aria-expanded]").all()
        assert len(tables) == 5
        tables[0].press("Enter")
        assert tables[0].get_attribute("aria-expanded") == "true"
        rows = tab.locator("#curve table tr")
        assert "Evaluation" in tab.locator("#curve table").text_content()
        assert 10 < rows.count() < 40


def test_metrics_and_losses_are_chosen_from_a_list(chromium: Any, run: RunFolder) -> None:
    with opened(chromium, run) as tab:
        options = tab.locator("#metric option").all_text_contents()
        assert options[0] == "return"
        assert {"success", "loss: loss"} <= set(options)
        tab.select_option("#metric", label="loss: loss")
        assert "losses.loss" in tab.locator("#curve svg").get_attribute("aria-label")


def _range(tab: Any) -> list[float]:
    """The ends of the learning curve's axis, by the points at its ends."""
    points = tab.evaluate(
        "[...document.querySelectorAll('#curve table tr')].slice(1).map(r => r.cells[0].innerText)"
    )
    return [float(points[0]), float(points[-1])]


def _across(tab: Any, start: float, end: float) -> None:
    """Drag over the learning curve, from one share of its width to another."""
    box = tab.locator("#curve svg.plot").bounding_box()
    tab.mouse.move(box["x"] + start * box["width"], box["y"] + 60)
    tab.mouse.down()
    tab.mouse.move(box["x"] + end * box["width"], box["y"] + 70, steps=4)
    tab.mouse.up()


def test_the_untrained_policy_does_not_squash_the_curve(chromium: Any, run: RunFolder) -> None:
    untrained = {"return": {"mean": -4000.0, "ci95": [-4100.0, -3900.0]}}
    append(run, {"kind": "evaluation", "env_steps": 0, "updates": 0, "metrics": untrained})
    append(run, *(progress(i, ledger=_times(i)) for i in range(1, 40)))
    with opened(chromium, run) as tab:
        ticks = tab.locator("#curve svg text").all_text_contents()
        assert "-4000" not in ticks
        assert not [t for t in ticks if t.startswith("-") and float(t) < -60]
        assert "Evaluation before training: -4000" in tab.inner_text("#curve .key")
        tab.locator("#curve svg.plot").focus()
        tab.keyboard.press("Home")
        assert "environment steps 100:" in tab.inner_text("#curve .readout")  # the first update
        tab.get_by_role("button", name="Table: Learning curve").click()
        assert "before training" in tab.inner_text("#curve table")


def test_charts_zoom_together_and_double_click_resets(chromium: Any, run: RunFolder) -> None:
    with opened(chromium, run, viewport={"width": 1280, "height": 900}) as tab:
        tab.get_by_role("button", name="Table: Learning curve").click()
        tab.locator("#curve svg.plot").scroll_into_view_if_needed()
        tab.wait_for_timeout(400)
        rate = tab.locator("#rate path.mean").get_attribute("d")
        _across(tab, 0.4, 0.6)
        low, high = _range(tab)
        assert 1200 < low < 2000 < high < 2600
        assert tab.locator("#rate path.mean").get_attribute("d") != rate
        assert tab.locator("#unzoom").is_visible()
        assert "Shown: 1" in tab.inner_text("#zoomed")
        tab.locator("#curve svg.plot").dblclick(position={"x": 300, "y": 60})
        assert _range(tab) == [100, 3900]
        assert tab.locator("#rate path.mean").get_attribute("d") == rate
        assert not tab.locator("#unzoom").is_visible()
        tab.mouse.wheel(0, -300)
        sync_api.expect(tab.locator("#unzoom")).to_be_visible()
        near, far = _range(tab)
        assert far - near < 3000
        tab.locator("#unzoom").click()
        tab.locator("#curve svg.plot").focus()
        tab.keyboard.press("+")
        low, high = _range(tab)
        assert 1800 <= high - low <= 2000


def test_a_narrow_chart_has_two_ticks_that_do_not_touch(chromium: Any, run: RunFolder) -> None:
    ticks = """() => [...document.querySelectorAll(":is(#curve, #panels) svg.plot")].map((plot) => {
      const texts = [...plot.querySelectorAll("text[y]")].map((t) => [+t.getAttribute("y"), t]);
      const below = [...new Set(texts.map(([y]) => y))].sort((a, b) => b - a)[1];
      return texts.filter(([y]) => y === below).map(([, t]) => t.getBoundingClientRect())
        .map((box) => [box.left, box.right]);
    })"""
    with opened(chromium, run, viewport={"width": 360, "height": 800}) as tab:
        for axis in ("env_steps", "seconds", "time"):
            tab.select_option("#axis", axis)
            for boxes in tab.evaluate(ticks):
                assert len(boxes) >= 2, axis
                assert all(a[1] < b[0] for a, b in pairwise(boxes)), axis


def test_the_ledger_is_zoomed_with_the_curves(chromium: Any, run: RunFolder) -> None:
    more = {"learner": {"wait_rows": 60.0, "forward": 0.0}, "inference": {"act": 60.0}}
    late = {t: {s: _times(39)[t][s] + v for s, v in states.items()} for t, states in more.items()}
    append(run, progress(80, ledger=late))  # the second half waits
    with opened(chromium, run, viewport={"width": 1280, "height": 900}) as tab:
        chip = tab.locator(".thread").first.locator(".legend button", has_text="wait_rows")
        assert "wait_rows 82 %" in chip.text_content()
        tab.locator("#curve svg.plot").scroll_into_view_if_needed()
        _across(tab, 0.1, 0.3)
        assert "wait_rows 75 %" in chip.text_content()


def test_a_log_scale_shows_small_values(chromium: Any, run: RunFolder) -> None:
    with opened(chromium, run) as tab:
        place = tab.locator("section[aria-label=loss]")
        heights = tab.locator("section[aria-label=loss] path.mean").get_attribute("d")
        button = place.get_by_role("button", name="Log: loss")
        button.click()
        assert button.get_attribute("aria-pressed") == "true"
        assert place.locator("path.mean").get_attribute("d") != heights
        ticks = place.locator("svg text").all_text_contents()
        assert {"0.1", "1"} <= set(ticks)
        assert "log scale" in place.inner_text()
        negative = tab.get_by_role("button", name="Log: Learning curve")
        negative.click()  # returns are negative
        assert "NaN" not in tab.locator("#curve svg").inner_html()
        assert "log scale of negative values" in tab.inner_text("#curve .key")


def test_curves_are_drawn_over_time_and_wall_clock(chromium: Any, run: RunFolder) -> None:
    with opened(chromium, run, timezone_id="Asia/Shanghai") as tab:
        tab.select_option("#axis", "time")
        tab.locator("#curve svg.plot").focus()
        tab.keyboard.press("Home")
        # 1001 s after 1970 in Shanghai
        assert "wall clock Jan 1, 08:16:41: -49" in tab.inner_text("#curve .readout")
        assert "08:17" in tab.text_content("#curve svg.plot")
        tab.select_option("#axis", "seconds")
        tab.keyboard.press("Tab")
        tab.locator("#curve svg.plot").focus()
        tab.keyboard.press("End")
        assert "training time 0:39: -11" in tab.inner_text("#curve .readout")
        assert tab.locator("#curve circle.dot").count() == 1  # an evaluation after 2000 steps


def test_another_run_is_laid_over(chromium: Any, run: RunFolder) -> None:
    second = write_run(run.path.parent / "second", [])
    second.progress_file.write_text("")
    lines = [progress(i, **{"return": float(i)}, ledger=_times(i)) for i in range(1, 61)]
    append(second, *lines, {**EVALUATION, "env_steps": 5000})
    with opened(chromium, run) as tab:
        assert tab.locator("#other option").all_text_contents() == ["no other run", "second"]
        tab.select_option("#other", "second")
        sync_api.expect(tab.locator("#curve path.mean.other-run")).to_be_visible()
        assert tab.locator("#curve path.mean").count() == 2
        assert tab.locator("#rate path.mean").count() == 2
        assert tab.locator("section[aria-label=loss] path.mean").count() == 2
        assert "second, training" in tab.inner_text("#curve .key")
        tab.locator("#curve svg.plot").focus()
        tab.keyboard.press("End")
        assert "second, training, environment steps 6000: 60" in tab.inner_text("#curve .readout")
        append(second, progress(61, ledger=_times(61)))  # it is still trained
        tab.reload()
        tab.select_option("#other", "second")
        sync_api.expect(tab.locator("#curve path.mean.other-run")).to_be_visible()
        tab.select_option("#other", "")
        assert tab.locator("#curve path.mean").count() == 1


def test_rare_states_are_folded_into_one_chip(chromium: Any, run: RunFolder) -> None:
    states = {"wait_rows": 50.0, "forward": 49.0, "publish": 0.5, "checkpoint": 0.3, "log": 0.2}
    append(run, progress(5000, ledger={"learner": {s: 100 * v for s, v in states.items()}}))
    with opened(chromium, run) as tab:
        chips = tab.locator(".thread").first.locator(".legend button")
        assert len(chips.all()) == 3
        assert "other 1 %" in chips.last.text_content()
        chips.last.focus()
        text = tab.locator(".thread .readout").first.text_content()
        assert text == "other: publish 0.5 %, checkpoint 0.3 %, log 0.2 %"
        tab.get_by_role("button", name="Table: Thread learner").click()
        assert "publish" in tab.locator(".thread table").first.inner_text()  # nothing is lost


def test_links_lead_to_the_runs_files(chromium: Any, run: RunFolder) -> None:
    run.logs.mkdir()
    (run.logs / "learner.log").write_text("12:00:00 learner: ERROR first\n")
    (run.path / "report.html").write_text("<!doctype html><title>the report</title>")
    with opened(chromium, run) as tab:
        names = tab.locator("nav a").all_text_contents()
        assert names == ["Report", "Configuration", "Logs", "States"]
        tab.locator("nav a", has_text="States").click()
        assert tab.get_by_text("no update is due: environments or acting").first.is_visible()
        for link, text in (("#alerts a", "ERROR first"), ("nav a >> nth=1", "algorithm:")):
            with tab.context.expect_page() as made:
                tab.locator(link).first.click()
            assert text in made.value.inner_text("body")
            made.value.close()
        with tab.context.expect_page() as made:
            tab.locator("#report").click()
        assert made.value.title() == "the report"


def test_no_panel_is_half_empty(chromium: Any, run: RunFolder) -> None:
    with opened(chromium, run, viewport={"width": 1280, "height": 900}) as tab:
        assert not tab.locator("#episode").is_visible()  # there is no episode
        assert "No episode is recorded" in tab.inner_text("#no-episode")
        curve, charts = (
            tab.locator(name).bounding_box()["width"] for name in ("#curve", "#charts")
        )
        assert curve > 0.9 * charts


def test_no_number_has_more_than_four_digits(chromium: Any, run: RunFolder) -> None:
    figures = {
        "return": -123.456789,
        "agent_steps_per_s": 1234567.0,
        "losses": {"loss": 1.23456e-5},
    }
    append(run, progress(123456, **figures, ledger=_times(50)))
    with opened(chromium, run) as tab:
        for button in tab.locator("button[aria-expanded]").all():
            button.click()
        text = tab.evaluate(
            "['figures', 'charts', 'panels', 'ledger']"
            ".map((id) => document.getElementById(id).innerText).join('\\n')"
        )
        clocks = re.sub(r"\d+(:\d\d)+", "", text)
        numbers = re.findall(r"\d[\d.,]*", clocks)
        assert len(numbers) > 100
        long = [n for n in numbers if len(re.sub(r"\D", "", n).lstrip("0")) > 4]
        assert long == []


def test_an_alert_appears_and_pausing_stops_the_page(chromium: Any, run: RunFolder) -> None:
    with opened(chromium, run) as tab:
        assert tab.locator("#alerts").text_content() == "Nothing to report."
        now = time.time()
        append(run, progress(41, time=now, rows_dropped={"lag": 50_000}, ledger=_times(41)))
        tab.reload()
        sync_api.expect(tab.locator("#alerts .warning")).to_contain_text("were dropped")
        assert tab.locator("#state").text_content() == "running"
        tab.click("#pause")
        tab.wait_for_timeout(200)
        append(run, progress(43, time=now, ledger=_times(43), losses={"loss": float("nan")}))
        tab.wait_for_timeout(3000)
        assert tab.locator("#alerts .error").count() == 0
        tab.click("#pause")
        sync_api.expect(tab.locator("#alerts .error")).to_contain_text("loss: the value is not")
        first = tab.locator("#alerts li").first
        assert first.get_attribute("class") == "error"


def test_a_server_that_is_gone_is_said(chromium: Any, run: RunFolder) -> None:
    made = chromium.new_context()
    tab = made.new_page()
    append(run, progress(41, time=time.time(), ledger=_times(41)))  # asked every two seconds
    with contextlib.closing(LivePage(run, 0)) as page:
        tab.goto(page.url)
        tab.wait_for_selector("#figures div")
    sync_api.expect(tab.locator("#gone")).to_contain_text("murmur watch", timeout=15_000)
    made.close()


def test_a_training_is_watched_in_the_browser(chromium: Any, tmp_path: Path) -> None:
    """Curves grow while a real training runs, and its newest episode moves."""
    file = tmp_path / "short.yaml"
    file.write_text(
        "extends: spread\nrun: {max_updates: 200}\nevaluation: {every_updates: 5, episodes: 4}\n"
        "env_server: {num_workers: 1, envs_per_worker: 8, metrics_port: 0}\n"
        "learner: {port: 0, metrics_port: 0, log_every_s: 0.2}\n"
        "algorithm: {name: mappo, batch_size: 300, batch_number: 1, data_passes: 1}\n"
    )
    command = murmur_command("train", str(file), "--run", str(tmp_path / "run"), "--page-port", "0")
    environment = child_environment() | {"MURMUR_PARENT": "", "COLUMNS": "200"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as training:
        assert training.stdout is not None
        line = training.stdout.readline()
        assert line.startswith("live page: http://127.0.0.1:")
        made = chromium.new_context(reduced_motion="no-preference")
        tab = made.new_page()
        tab.goto(line.split()[2])
        expect = sync_api.expect
        expect(tab.locator("#state")).to_have_text("running", timeout=120_000)
        expect(tab.locator("#curve path.mean")).to_be_visible(timeout=60_000)
        before = tab.locator("#curve path.mean").get_attribute("d").count("L")
        picture = tab.locator("#picture")
        expect(picture).to_be_visible(timeout=60_000)
        first = picture.get_attribute("aria-label")
        expect(picture).not_to_have_attribute("aria-label", first, timeout=5_000)
        expect(tab.locator("#curve circle.dot").nth(1)).to_be_visible(timeout=60_000)
        assert tab.locator("#curve path.mean").get_attribute("d").count("L") > before
        expect(tab.locator(".thread")).to_have_count(3)
        still = chromium.new_context(reduced_motion="reduce").new_page()
        still.goto(line.split()[2])
        expect(still.locator("#picture")).to_be_visible(timeout=30_000)
        assert still.locator("#play").text_content() == "Play"
        at = still.locator("#picture").get_attribute("aria-label")
        still.wait_for_timeout(1000)
        assert still.locator("#picture").get_attribute("aria-label") == at
        made.close()
        still.context.close()
        training.terminate()
        training.communicate(timeout=120)

"""The page and the pictures, from small recorded inputs."""

import json
import re
from collections.abc import Sequence
from html import unescape
from html.parser import HTMLParser
from inspect import signature
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import imageio.v2 as imageio
import numpy as np
import pytest

from murmur.cli.results import evaluate, report
from murmur.comparison.analysis import learning_curve
from murmur.comparison.charts import Series, line_chart, styles
from murmur.comparison.report import evaluate_all, evaluation_key, render_page
from murmur.comparison.report_charts import (
    LEARNED,
    best_baseline,
    evaluation_charts,
    loss_charts,
    mission_charts,
)
from murmur.env_service.environment import RandomPolicy, make_environment
from murmur.env_service.pictures import DRAWN, Snapshot, find_painter
from murmur.env_service.sessions.evaluate import run_baseline
from murmur.runs.evaluation import Recorder, carried_forward, caveat_of_best, to_record
from murmur.runs.readings import DOWN, UP, best_names, direction
from murmur.runs.render import draw_episode, recorded_movie, write_movie
from murmur.runs.run_folder import LineTail, RunFolder
from murmur.runs.scores import Curve, Metric, completion
from murmur.runs.settings import changed
from murmur.shared.config import PluginConfig
from murmur.shared.config.experiment import RunConfig
from murmur.shared.config.files import config_names, load, save
from murmur.shared.process.errors import CheckpointError, ConfigError
from murmur.shared.process.files import write_json
from murmur.shared.wire.notices import Notice, notice_line
from murmur.text import duration, number, short_number
from tests.murmur.runs_on_disk import write_run


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run of `spread` that has progress and evaluations but no checkpoint."""
    config = load("spread", ["run.seed=7"], {})
    folder = RunFolder.create(config, tmp_path / "spread-1")
    save(config, folder.path / "config.yaml")
    lines: list[dict[str, Any]] = [
        {
            "kind": "progress",
            "time": 1.0e9 + i,
            "seconds": float(i),
            "updates": i,
            "env_steps": 100 * i,
            "agent_steps": 300 * i,
            "episodes": i,
            "agent_steps_per_s": 300.0,
            "return": None if i == 0 else -50.0 + i,
            "metrics": {"occupied": 0.5},
            "losses": {} if i == 0 else {"critic_loss": 1 / i, "policy_entropy": 1.0},
            "policy_lag": 0.5,
        }
        for i in range(1000)
    ]
    lines += [
        {
            "kind": "evaluation",
            "updates": i,
            "env_steps": 100 * i,
            "metrics": {"return": {"mean": -40.0 + i, "std": 1.0, "ci95": [-41.0 + i, -39.0 + i]}},
        }
        for i in (0, 500)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    folder.progress_file.write_text(text + '{"kind": "prog')  # a killed process's last words
    return folder


class Balanced(HTMLParser):
    """Complains about tags that are not closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "img", "br", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_report_of_a_run_without_checkpoint(run: RunFolder) -> None:
    said = list[str]()
    notice = notice_line(Notice("cast", "observation", "2 < 3 arrives as 2"))
    (run.path / "notices.jsonl").write_text(notice + notice + '{"kind": "torn')
    page = render_page(run, evaluate_all(run, "best", 3, 1, fresh=False, say=said.append))
    parser = Balanced()
    parser.feed(page)
    assert parser.open == []
    assert not re.search(r"(?:src|href)=.https?:", page)  # self-contained
    for words in ("spread", "random", "assignment", "Policy lag", "critic loss", "run.seed"):
        assert words in page
    assert page.count("<li>2 &lt; 3 arrives as 2</li>") == 1
    assert "NaN" not in re.sub('base64,[^"]*', "", page)
    assert "currentColor" in page
    assert any("no policy to evaluate" in line for line in said)
    assert sum("evaluating" in line for line in said) == 2
    assert page.count("data:image/png;base64,") == 2  # how an episode of each baseline ended
    assert "crosses are the landmarks" in page

    said.clear()
    page = render_page(run, evaluate_all(run, "best", 3, 1, fresh=False, say=said.append))
    assert not any("evaluating" in line for line in said)  # kept from the first time
    assert page.count("data:image/png;base64,") == 2


def test_what_was_kept_is_not_taken_for_another_environment(run: RunFolder) -> None:
    first = evaluate_all(run, "best", 2, 1, fresh=False, say=lambda line: None)
    save(run.config(["evaluation.environment.num_agents=2"]), run.path / "config.yaml")
    then = evaluate_all(run, "best", 2, 1, fresh=False, say=lambda line: None)
    assert first.keys() == then.keys() == {"random", "assignment"}
    assert all(then[name]["metrics"] != first[name]["metrics"] for name in first)


def test_the_best_is_not_measured_on_the_episodes_that_chose_it(
    run: RunFolder,
) -> None:
    for command in (evaluate, report):
        default = signature(command).parameters
        for name in config_names():
            save(load(name, [], {}), run.path / "config.yaml")
            played = default["episodes"].default, default["first_seed"].default
            assert default["checkpoint"].default == "best"
            assert caveat_of_best(run, "best.pt", *played) == "", name

    save(
        load("spread", ["evaluation.first_seed=11", "evaluation.episodes=5"], {}),
        run.path / "config.yaml",
    )
    assert "seeds 11 to 15 chose it" in caveat_of_best(run, "best.pt", 1, 15)
    assert (
        caveat_of_best(run, "best.pt", 3, 8) == caveat_of_best(run, "best.pt", 3, 16) == ""
    )  # 8 to 10, 16 to 18
    assert caveat_of_best(run, "best.pt", 4, 8) != ""
    assert caveat_of_best(run, "update-000050.pt", 5, 11) == ""


def test_a_best_policy_that_is_untrained_is_said(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [(0, -5.0)])
    line = json.loads(run.progress_file.read_text().splitlines()[0])
    for updates in (0, 300):
        with run.progress_file.open("a") as file:
            file.write(json.dumps(line | {"updates": updates}) + "\n")
        said = caveat_of_best(run, "best.pt", 50, 1)
        assert said.startswith("best.pt is the policy before training") == (updates == 0)
        assert caveat_of_best(run, "update-000300.pt", 50, 1) == ""


def test_a_page_says_that_its_figures_are_optimistic(run: RunFolder) -> None:
    folder, said = run.path / "checkpoints", list[str]()
    folder.mkdir()
    (folder / "best.pt").touch()
    seed = run.config().evaluation.first_seed
    key = evaluation_key(run.config(), 2, seed, folder / "best.pt")
    result = to_record(LEARNED, run_baseline(run.config(), "random", 2, seed))
    kept = run.path / "evaluations"
    kept.mkdir()
    write_json(kept / "learned-policy.json", result | {"key": key, "picture": ""})
    page = render_page(run, evaluate_all(run, "best", 2, seed, fresh=False, say=said.append))
    assert "These figures of best.pt are optimistic" in page
    assert said[-1].startswith("These figures of best.pt are optimistic")


def test_evaluation_is_keyed_by_all_that_its_figures_depend_on(tmp_path: Path) -> None:
    weights = tmp_path / "best.pt"
    weights.touch()

    def keys(*overrides: str, episodes: int = 3, seed: int = 1) -> tuple[object, object]:
        config = load("snakes-greedy", overrides, {})
        return (
            evaluation_key(config, episodes, seed, None),
            evaluation_key(config, episodes, seed, weights),
        )

    baseline, learned = keys()
    assert json.loads(json.dumps(keys())) == [baseline, learned]  # as it is kept
    assert keys("run.max_updates=7", "learner.port=0") == (baseline, learned)
    others = (
        keys(episodes=4),
        keys(seed=2),
        keys("environment.opponent=random"),
        keys("evaluation.environment.opponent=random"),
    )
    assert all(b != baseline and p != learned for b, p in others)
    for only_learned in ("evaluation.sample=true", "league.latest=0", "run.seed=2"):
        b, p = keys(only_learned)
        assert b == baseline
        assert p != learned


def test_what_changed_names_only_what_differs() -> None:
    config = load("spread", ["run.seed=7", "environment.num_agents=4", "learner.port=auto"], {})
    found = changed(config)
    assert found["run.seed"] == 7
    assert found["environment.num_agents"] == 4
    assert "learner.port" not in found
    assert "environment.local_ratio" not in found


def test_what_changed_names_the_environments_factory() -> None:
    factory = "gymnasium:make"
    environment = ["environment.name=gymnasium", f"environment.factory={factory}"]
    found = changed(load("spread", environment, {}))
    assert found["environment.factory"] == factory


def test_progress_tail_gives_each_whole_line_once(tmp_path: Path) -> None:
    file = tmp_path / "progress.jsonl"
    tail = LineTail(file)
    assert list(tail.records()) == []
    file.write_text('{"a": 1}\n{"a": 2')
    assert list(tail.records()) == [{"a": 1}]
    with file.open("a") as more:
        more.write("}\n")
    assert list(tail.records()) == [{"a": 2}]
    assert list(tail.records()) == []


def test_checkpoints_are_found_by_name_and_by_path(run: RunFolder) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        run.checkpoint("best")
    folder = run.path / "checkpoints"
    folder.mkdir()
    for name in ("update-000050.pt", "update-000100.pt"):
        (folder / name).touch()
    assert run.checkpoint("latest").name == "update-000100.pt"
    assert run.checkpoint("best").name == "update-000100.pt"  # there is no best yet
    (folder / "best.pt").touch()
    assert run.checkpoint("best").name == "best.pt"
    assert run.checkpoint(str(folder / "update-000050.pt")).name == "update-000050.pt"
    with pytest.raises(CheckpointError, match="no checkpoint 'other'"):
        run.checkpoint("other")


def test_completion_is_the_nearest_end() -> None:
    record = {"updates": 50, "env_steps": 100, "seconds": 90.0}
    assert completion(RunConfig(), record) is None
    assert completion(RunConfig(max_updates=100), record) == 0.5
    assert completion(RunConfig(max_updates=100, max_minutes=2), record) == 0.75
    assert completion(RunConfig(max_env_steps=10), record) == 1.0


def test_numbers_and_durations() -> None:
    assert [number(v) for v in (None, 3, 12345, 0.5, 123.4, 2e-5)] == [
        *("–", "3", "12,345", "0.500", "123", "2.0e-05")
    ]
    shown = [short_number(v) for v in (None, 3, 9999, 12346, 999_999, 1_234_567, 0.5, -153.277)]
    assert shown == ["–", "3", "9999", "12.35k", "1M", "1.235M", "0.5", "-153.3"]
    assert [short_number(v) for v in (2e-5, 0.0, 0.01234, 1e16)] == [
        "2.0e-05",
        "0",
        "0.0123",
        "1.0e+16",
    ]
    assert [duration(s) for s in (5, 65, 3725)] == ["0:05", "1:05", "1:02:05"]


def test_a_chart_has_gaps_and_bands() -> None:
    line = Series("a", [0, 1, 2], [1.0, None, 3.0], [0.9, None, 2.8], [1.1, None, 3.2])
    svg = line_chart([line], "step", "return")
    assert svg.startswith("<svg")
    assert "currentColor" in svg


def test_an_ended_episode_keeps_its_final_value() -> None:
    nan = np.nan
    curves = np.array([[0.0, 1.0, 5.0], [0.0, nan, nan], [nan, 2.0, nan]])
    # The third has no value at its start, and gets none there.
    expected = [[0.0, 1.0, 5.0], [0.0, 0.0, 0.0], [nan, 2.0, 2.0]]
    np.testing.assert_array_equal(carried_forward(curves), expected)


def evaluated(returns: list[float], length: float) -> dict[str, Any]:
    """A policy's result: the mean return over an episode's steps, and its final metrics."""
    summary = {"return": {"mean": returns[-1]}, "length": {"mean": length}}
    return {
        "mean_curves": {"return": returns},
        "curves_ci95": {"return": [0.0] * len(returns)},
        "summary": summary,
    }


def test_charts_show_the_learned_policy_beside_the_best_baseline() -> None:
    results = {
        LEARNED: evaluated([0.0, 3.0], 1),
        "good": evaluated([0.0, 1.0, 2.0], 2),
        "random": evaluated([0.0, -900.0, -2000.0, -4000.0], 3),
    }
    assert best_baseline(results, Metric("return")) == "good"
    (chart,) = mission_charts(results, Metric("return"))
    assert ">2k<" not in chart.svg
    assert "1000" not in chart.svg  # the axis is that of the first two
    no_learned = {"random": evaluated([0.0, -1.0], 1)}
    assert len(mission_charts(no_learned, Metric("unknown"))) == 1
    means = {"return": 1.0, "length": 4.0}
    metrics = {k: {"mean": v, "ci95": [v - 1, v + 1]} for k, v in means.items()}
    lines = [{"env_steps": 10 * n, "metrics": metrics} for n in (1, 2)]
    found = {c.title: c.svg for c in evaluation_charts(lines, results, Metric("return"))}
    assert "good, the best baseline" in found["Evaluation: return ↑"]
    shortest = evaluation_charts(lines, results, Metric("length", less_is_better=True))
    assert [c.title for c in shortest] == ["Evaluation: return ↑", "Evaluation: length ↓"]
    assert evaluation_charts([], results, Metric("return")) == []


def hovered(svg: str) -> dict[str, Any]:
    """Collect the data that the page's script reads."""
    found = re.search('data-hover="([^"]*)"', svg)
    assert found is not None
    return dict(json.loads(unescape(found[1])))


def test_the_best_of_a_column_is_bold_and_arrows_tell_directions(run: RunFolder) -> None:
    """The learned policy is the best of one metric of two at most."""
    figures = {
        LEARNED: {"return": 2.0, "collisions": 4.0, "own": 1.0},
        "assignment": {"return": 12345.6, "collisions": 1.0, "own": 2.0},
        "random": {"return": 1.0, "collisions": 1.0, "own": 3.0},
    }
    results = {name: table_result(means) for name, means in figures.items()}
    results[LEARNED]["key"] = {"checkpoint": "best.pt"}
    page = render_page(run, results)
    bold = re.findall(r'<td class="best">([^<]*)<', page)
    assert bold == ["12.35k", "1", "1"]  # two share the fewest collisions
    heads = [re.sub("<[^>]*>", "", h) for h in re.findall("<th>(.*?)</th>", page)]
    assert heads[:4] == ["policy", "return ↑", "collisions ↓", "own"]
    assert "bold is the best" in page
    assert "one interval in twenty misses the true mean" in page  # however few there are


def table_result(means: dict[str, float]) -> dict[str, Any]:
    summary = {k: {"mean": v, "low": v - 1, "high": v + 1} for k, v in means.items()}
    return {
        "summary": summary,
        "episodes": 3,
        "first_seed": 1,
        "picture": "",
        "mean_curves": {},
        "curves_ci95": {},
    }


def test_one_value_is_best_of_nothing() -> None:
    assert best_names([("a", 1.0)], UP) == set()
    assert best_names([("a", 1.0), ("b", 2.0)], "") == set()  # no direction
    assert best_names([("a", 1.0), ("b", 2.0), ("c", float("nan"))], DOWN) == {"a"}


def test_directions_follow_the_configuration_and_teams() -> None:
    shorter = Metric("length", less_is_better=True)
    assert [direction(n, shorter) for n in ("length", "return/adversary", "entropy", "x")] == [
        *(DOWN, UP, DOWN, "")
    ]
    assert direction("entropy", Metric("entropy")) == UP


def test_a_policy_has_one_color_in_all_charts() -> None:
    names = [LEARNED, *(f"baseline-{i}" for i in range(9)), "random"]
    results = {name: evaluated([0.0, float(i)], 1) for i, name in enumerate(names)}
    look = styles(results, first=LEARNED)
    assert len({(style.color, style.dashes) for style in look.values()}) >= len(names)
    alone = {look[LEARNED].color, look["random"].color}
    assert len(alone) == 2
    assert not alone & {look[name].color for name in names[1:-1]}
    (chart,) = mission_charts(results, Metric("return"))
    colors = {line["name"]: line["color"] for line in hovered(chart.svg)["lines"]}
    assert colors == {name: look[name].color for name in names}
    metrics = {"return": {"mean": 1.0, "ci95": [0.0, 2.0]}}
    lines = [{"env_steps": 10 * n, "updates": n, "metrics": metrics} for n in (1, 2)]
    only_random = {LEARNED: results[LEARNED], "random": results["random"]}
    (chart,) = evaluation_charts(lines, only_random, Metric("return"))
    drawn = [line["color"] for line in hovered(chart.svg)["lines"]]
    assert drawn == [look[LEARNED].color, look["random"].color]


@pytest.mark.parametrize(
    "names", [("team", "random"), [f"team-{i}" for i in range(11)], ["a" * 30, *"bcdef"]], ids=len
)
def test_a_long_legend_covers_no_line(names: Sequence[str]) -> None:
    svg = line_chart([Series(name, [0, 1], [i, 0]) for i, name in enumerate(names)], "x", "y")
    _, _, width, height = (float(x) for x in re.findall('viewBox="([^"]*)"', svg)[0].split())
    places = re.findall(r'x="([\d.]+)" y="([\d.]+)"[^>]*>([^<]+)</text>', svg)
    legend = {name: (float(x), float(y)) for x, y, name in places if name in names}
    assert set(legend) == set(names)
    below = [y > hovered(svg)["box"][3] * height for _, y in legend.values()]
    assert set(below) == {len(names) > 4}
    assert all(x + 5.5 * len(name) < width for name, (x, _) in legend.items())


def test_the_untrained_policy_makes_no_wedge() -> None:
    def evaluation(updates: int, mean: float) -> dict[str, Any]:
        metrics = {"return": {"mean": mean, "ci95": [mean - 1, mean + 1]}}
        return {"env_steps": 100 * updates, "updates": updates, "metrics": metrics}

    lines = [evaluation(0, -153.0), evaluation(1, -9.0), evaluation(2, -8.0)]
    (chart,) = evaluation_charts(lines, {}, Metric("return"))
    (line,) = hovered(chart.svg)["lines"]
    assert line["x"] == [100, 200]
    assert line["low"] == [-10, -9]
    assert "Before training it was -153." in chart.reading
    (alone,) = evaluation_charts(lines[:1], {}, Metric("return"))
    assert hovered(alone.svg)["lines"][0]["y"] == [-153]


def test_captions_say_what_a_loss_means_and_how_it_went() -> None:
    names = ("actor_loss", "kl", "clip_fraction", "return_mean", "advantage_std", "own")
    progress = [
        {"env_steps": 100 * i, "losses": {n: i + k for k, n in enumerate(names)}}
        for i in range(1, 4)
    ]
    charts = loss_charts(progress, [100, 200, 300], "environment steps")
    readings = [chart.reading for chart in charts]
    assert len({reading.split("\n")[0] for reading in readings}) == len(names)
    assert readings[-1] == "From 6 to 8; least 6 at 100, largest 8 at 300."


def test_letters_of_a_chart_are_legible_on_a_phone() -> None:
    """A page of 360 px leaves 288 px to a chart."""
    svg = line_chart([Series("a", [0, 1], [1.0, 2.0])], "step", "return")
    width = float(re.findall(r'viewBox="0 0 ([\d.]+)', svg)[0])
    sizes = [float(size) for size in re.findall(r"font-size: ([\d.]+)px", svg)]
    assert sizes
    assert min(sizes) * 288 / width >= 10


def test_two_curves_begin_after_the_first_update() -> None:
    curve = Curve(Metric("return"), (0, 100, 200), (-153.0, -9.0, -8.0), evaluated=True)
    run: Any = SimpleNamespace(curve=curve)
    line = learning_curve([run, run])
    assert line.x[0] == 100
    assert line.low.min() >= -9


def snapshot(time: int) -> Snapshot:
    """Two UAVs over a map of 20 × 10 cells of half a metre."""
    truth = np.zeros((20, 10), np.uint8)
    truth[:8] = 1
    path = np.array([[[0, 0, 5], [5, 5, 10]], [[5, 0, 5], [5, 5, 15]]], np.float64)
    return Snapshot(
        {
            "truth": truth,
            "prob": np.full((20, 10), 0.5, np.float32),
            "entropy": np.ones((20, 10), np.float32),
            "positions_m": path[time],
            "paths_m": path[: time + 1],
            "footprints": np.array([[0, 4, 0, 4], [6, 14, 6, 10]]),
            "cell_m": np.array(0.5),
        },
        {"entropy": 0.9, "f1": 0.1},
    )


def played(name: str, rows: int) -> list[Snapshot]:
    """The first rows of a random episode of one of murmur's environments."""
    environment = make_environment(PluginConfig(name=name), 1)
    policy, seeds = RandomPolicy(environment), np.array([3], np.uint64)
    recorder = Recorder()
    row = environment.reset(seeds)
    recorder.take(environment, row)
    for _ in range(rows - 1):
        row = environment.step(policy.act(row), np.zeros(1, np.bool_), seeds)
        recorder.take(environment, row)
    return recorder.snapshots


@pytest.mark.parametrize("name", sorted(DRAWN))
def test_environments_are_drawn_as_they_move(name: str) -> None:
    shown = played(name, 3)
    frames = draw_episode(name, shown, "random")
    assert len(frames) == (7 if name == "terrain" else 3)
    for before, after in pairwise(frames):
        assert before.shape == after.shape
        assert np.any(before != after)
    painter = find_painter(shown)
    assert painter is not None
    assert painter.__name__ == f"murmur.env_service.envs.{name}.pictures"
    assert painter.READING
    assert len([*painter.figures(shown, [len(shown) - 1], "random")]) == 1  # a report's picture


def test_the_board_is_drawn_cell_by_cell() -> None:
    (shown,) = played("snakes", 1)
    colours = []
    for side in (0, 1):
        state = {**shown.state, "side": np.array(side), "lengths": np.zeros(6, np.int64)}
        (frame,) = draw_episode("snakes", [Snapshot(state, {})], "heads are left out")
        column = (0.02 + 0.96 * (np.arange(20) + 0.5) / 20) * frame.shape[1]
        # The board keeps its cells square: 960 · 0.96 / 20 = 46 px wide, in the middle of the axes.
        middle = (1 - 0.03 - 0.84 / 2) * frame.shape[0]
        row = middle + (np.arange(10) - 4.5) * 0.96 * frame.shape[1] / 20
        colours.append(frame[row.astype(int)[:, None], column.astype(int)])
    board = np.asarray(shown.state["board"])
    beans = board == 1
    assert beans.any()
    assert (colours[0][beans] == (0x31, 0xA3, 0x54)).all()
    assert (colours[0][board == 2] == (0xA6, 0x36, 0x03)).all()  # player 0 is the agents' first
    assert (colours[1][board == 2] == (0x08, 0x51, 0x9C)).all()  # player 0 is the opponents' first


def test_long_episodes_are_thinned_but_keep_their_end() -> None:
    snapshots = played("spread", 5)
    frames = draw_episode("spread", snapshots, "random", most=2)
    assert len(frames) == 3  # rows 0, 3 and 4
    every = draw_episode("spread", snapshots, "random")
    assert len(every) == 5
    np.testing.assert_array_equal(frames[-1], every[-1])


def test_pictures_become_a_movie(tmp_path: Path) -> None:
    frames = draw_episode("terrain", [snapshot(0), snapshot(1)], "random")
    assert len(frames) == 4  # the start, two on the way, the end
    assert frames[0].shape == frames[-1].shape
    assert np.any(frames[0] != frames[-1])
    write_movie(tmp_path / "a.gif", frames)
    assert len(imageio.mimread(tmp_path / "a.gif")) > 1
    write_movie(tmp_path / "a.mp4", frames[:2])
    assert (tmp_path / "a.mp4").stat().st_size > 1000
    with (
        pytest.raises(ConfigError, match=r"\.gif or \.mp4"),
        recorded_movie(tmp_path / "a.avi", load("spread"), "random"),
    ):
        pytest.fail("an episode is played")
    with pytest.raises(ConfigError, match="has no pictures"):
        draw_episode("matrix", [], "random")

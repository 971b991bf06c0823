"""`murmur report`: one self-contained page about a run."""

import base64
import json
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jinja2

from env_service.pictures import Snapshot, find_painter
from murmur import settings
from murmur.charts import Series, line_chart
from murmur.device_report import about_text
from murmur.drops import dropped_message
from murmur.evaluation import (
    Recorder,
    baseline_names,
    evaluate_baseline,
    evaluate_run,
    optimism,
    to_record,
)
from murmur.machine import commit, describe_machine, versions
from murmur.run_folder import RunFolder
from murmur.text import duration, number
from shared.config import ExperimentConfig
from shared.errors import CheckpointError
from shared.files import write_json, write_output

Say = Callable[[str], None]
LEARNED = "learned policy"

# What is worth a curve over mission time, if the environment reports it; all others have `return`.
_MISSION_METRICS = ("entropy", "f1", "coverage")
_TEAM = "return/"  # of metrics: the return of a team
_READINGS = {
    "entropy": "How unsure the team is about the cells that matter, in bits: 1 is no idea, 0 is "
    "certain. Lower is better.",
    "f1": "How well the mapped region of interest matches the true one: 1 is exact. Higher is "
    "better.",
    "coverage": "Share of the area that has been seen at least once.",
    "return": "Rewards summed since the episode began. Higher is better.",
}


@dataclass(frozen=True)
class Chart:
    """A figure and how to read it."""

    title: str
    svg: str
    reading: str


@dataclass(frozen=True)
class Row:
    """A policy in the table of results: a cell is (text, whether it is the best of its column)."""

    name: str
    cells: list[tuple[str, str]]


def write_report(
    run: RunFolder,
    out: Path,
    *,
    checkpoint: str,
    episodes: int,
    first_seed: int,
    fresh: bool,
    say: Say,
) -> None:
    """Evaluate what has not been evaluated yet, then write the page.

    Raises:
        MurmurError: if the user can fix the cause.
    """
    results = evaluate_all(run, checkpoint, episodes, first_seed, fresh=fresh, say=say)
    if note := _note(run, results):
        say(note)
    write_output(out, render_page(run, results))


def evaluate_all(
    run: RunFolder, checkpoint: str, episodes: int, first_seed: int, *, fresh: bool, say: Say
) -> dict[str, dict[str, Any]]:
    """Results of the run's policy and of every baseline on the same episodes, by name.

    Each is kept in the run's folder, with a picture of its first episode's end, and taken from
    there if the same was asked before.
    """
    config = run.config()
    folder = run.path / "evaluations"
    folder.mkdir(exist_ok=True)
    results = {}
    try:
        weights = run.checkpoint(checkpoint)
        names = [LEARNED, *baseline_names(config)]
    except CheckpointError as error:
        say(f"no policy to evaluate: {error}")
        names = baseline_names(config)
    for name in names:
        key = evaluation_key(config, episodes, first_seed, weights if name == LEARNED else None)
        file = _file(folder, name)
        kept = run.read_json(f"evaluations/{file.name}")
        if kept.get("key") == key and not fresh:
            results[name] = kept
            continue
        say(f"evaluating: {name}, {episodes} episodes")
        recorder = Recorder()
        if name == LEARNED:
            result = evaluate_run(run, weights, episodes, first_seed, say=say, on_row=recorder.take)
        else:
            result = evaluate_baseline(config, name, episodes, first_seed, recorder.take)
        snapshots = [Snapshot(state, metrics) for state, metrics in recorder.rows]
        painter = find_painter(snapshots)
        if painter:
            (figure,) = painter.figures(snapshots, [len(snapshots) - 1], name)
            figure.savefig(file.with_suffix(".png"), dpi=80)
        results[name] = to_record(name, result) | {
            "key": key,
            "picture": painter.READING if painter else "",
        }
        write_json(file, results[name])  # last: what is kept has its picture
    return share_rows(results)


def evaluation_key(
    config: ExperimentConfig, episodes: int, first_seed: int, weights: Path | None
) -> dict[str, Any]:
    """All that an evaluation's figures depend on, as it comes back from JSON.

    Args:
        config: of the run.
        episodes: how many.
        first_seed: seed of the first.
        weights: the learned policy's; None for a baseline.
    """
    key: dict[str, Any] = {
        "episodes": episodes,
        "first_seed": first_seed,
        "environment": config.for_evaluation().environment.model_dump(mode="json"),
    }
    if weights:
        key |= {
            "checkpoint": weights.name,
            "written": weights.stat().st_mtime,
            "sample": config.evaluation.sample,
            # Who the opponents are, and by the seed which of them plays when.
            "league": config.league.model_dump(mode="json"),
            "run_seed": config.run.seed,
        }
    return key


def _file(folder: Path, name: str) -> Path:
    """Where a policy's result is kept; its picture is beside it."""
    return folder / f"{name.replace(' ', '-')}.json"


def share_rows(results: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Baselines with the same result in every episode under all their names, joined by commas.

    One may be another by a second name, as `lawnmower` is that of the lowest altitude. The learned
    policy has a row of its own, whatever it equals.
    """
    groups: list[tuple[list[str], dict[str, Any]]] = []
    for name, result in results.items():
        for names, other in groups:
            if LEARNED not in names and other["metrics"] == result["metrics"]:
                names.append(name)
                break
        else:
            groups.append(([name], result))
    return {", ".join(names): result for names, result in groups}


def render_page(run: RunFolder, results: Mapping[str, Mapping[str, Any]]) -> str:
    """The page as HTML, from what the run's folder holds."""
    config = run.config()
    progress, evaluations = run.records("progress"), run.records("evaluation")
    last = progress[-1] if progress else {}
    facts = {
        "environment": config.environment.options.get("factory", config.environment.name),
        "algorithm": config.algorithm.name,
        "updates": number(last.get("updates", 0)),
        "environment steps": number(last.get("env_steps", 0)),
        "agent steps": number(last.get("agent_steps", 0)),
        "best checkpoint by": config.evaluation.best_metric,
    }
    return (
        page_environment()
        .get_template("report.html.j2")
        .render(
            **page_parts(run, facts, last),
            summary="A training run of murmur: environment servers that stream to learners.",
            columns=_columns(results),
            rows=_rows(results),
            episodes=max((r["episodes"] for r in results.values()), default=0),
            note=_note(run, results),
            mission=_mission_charts(results),
            pictures=_pictures(run, results),
            picture_reading=next((r["picture"] for r in results.values() if r["picture"]), ""),
            learning=_learning_charts(progress, evaluations),
        )
    )


def page_environment() -> jinja2.Environment:
    """Where pages find their templates."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("murmur", "."), autoescape=True, trim_blocks=True
    )
    environment.filters["number"] = number
    return environment


def page_parts(run: RunFolder, facts: Mapping[str, str], last: Mapping[str, Any]) -> dict[str, Any]:
    """What every page says of a run: facts, configuration, provenance.

    Args:
        run: the run.
        facts: what comes first, by name.
        last: the last line of progress; empty if there is none.
    """
    config, start = run.config(), run.read_json("command.json")
    machine = start.get("machine", {})
    shown = {
        **facts,
        "training time": duration(last.get("seconds", 0)),
        "learners": number(start["learners"]) if start.get("learners", 1) > 1 else "",
        "processor": machine.get("cpu"),
        "GPU": machine.get("gpu") or "none",
    }
    if device := start.get("device"):
        shown["learned on"] = about_text(device)
    return {
        "name": config.run.name,
        "facts": shown,
        "dropped": dropped_message(last),
        "changed": {k: _plain(v) for k, v in settings.changed(config).items()},
        "whole": settings.to_yaml(config),
        "provenance": _provenance(start),
    }


def _note(run: RunFolder, results: Mapping[str, Mapping[str, Any]]) -> str:
    """What to say beside the results if the learned policy's are biased."""
    learned = results.get(LEARNED)
    if learned is None:
        return ""
    checkpoint = learned["key"]["checkpoint"]
    return optimism(run, checkpoint, learned["episodes"], learned["first_seed"])


def _columns(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Metrics, the return first."""
    names = list(dict.fromkeys(name for r in results.values() for name in r["summary"]))
    return sorted(names, key=lambda name: name != "return")


def _rows(results: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    rows = []
    for name, result in results.items():
        cells = []
        for column in _columns(results):
            s = result["summary"].get(column)
            if s is None:
                cells.append(("–", ""))
            else:
                interval = f"{number(s['low'])} … {number(s['high'])}"
                cells.append((number(s["mean"]), interval))
        rows.append(Row(name, cells))
    return rows


def _mission_charts(results: Mapping[str, Mapping[str, Any]]) -> list[Chart]:
    """Each metric over an episode's steps, one line for each policy."""
    known = {name for r in results.values() for name in r["mean_curves"]}
    names = [name for name in _MISSION_METRICS if name in known] or sorted(known & {"return"})
    charts = []
    for name in names:
        series = [
            Series(policy, range(len(curve)), curve, result["curves_ci95"].get(name, ()))
            for policy, result in results.items()
            if (curve := result["mean_curves"].get(name))
        ]
        title = name.replace("f1", "F1")
        svg = line_chart(series, "step of the episode", title, markers=True)
        reading = _READINGS.get(name, "")
        charts.append(Chart(f"{title} over an episode", svg, reading))
    return charts


def _pictures(run: RunFolder, results: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(policy, PNG in base64) of the first episode's end; the learned policy, then by return."""
    found = []
    mean = {name: r["summary"]["return"]["mean"] for name, r in results.items()}
    for name in sorted(results, key=lambda name: (name != LEARNED, -mean[name])):
        file = _file(run.path / "evaluations", results[name]["title"]).with_suffix(".png")
        if results[name]["picture"] and file.is_file():
            found.append((name, base64.b64encode(file.read_bytes()).decode()))
    return found


def _learning_charts(
    progress: list[dict[str, Any]], evaluations: list[dict[str, Any]]
) -> list[Chart]:
    """What changed during training; the x axis is environment steps throughout."""
    charts = []
    x_label = "environment steps"
    if evaluations:
        x = [e["env_steps"] for e in evaluations]
        names = list(dict.fromkeys(name for e in evaluations for name in e["metrics"]))
        preferred = [n for n in ("return", *_MISSION_METRICS) if n in names]
        preferred += [n for n in names if n.startswith(_TEAM)]
        for name in preferred or names[:3]:
            entries = [e["metrics"].get(name) for e in evaluations]
            mean = [m["mean"] if m else None for m in entries]
            half = [(m["ci95"][1] - m["ci95"][0]) / 2 if m else None for m in entries]
            svg = line_chart([Series("", x, mean, half)], x_label, name, markers=True)
            reading = (
                "Greedy episodes with seeds of their own, at intervals during training; the band "
                "is the 95 % interval of the mean. " + _READINGS.get(name, "")
            )
            charts.append(Chart(f"Evaluation: {name}", svg, reading))
    if not progress:
        return charts
    x = [p["env_steps"] for p in progress]

    def column(key: str) -> list[float | None]:
        return [p.get(key) for p in progress]

    if any(v is not None for v in column("return")):
        svg = line_chart([Series("", x, column("return"))], x_label, "return")
        reading = "Mean return of recent training episodes, in which the policy still explores."
        charts.append(Chart("Return while training", svg, reading))
    if teams := [n for n in progress[-1].get("metrics", {}) if n.startswith(_TEAM)]:
        series = [
            Series(n.removeprefix(_TEAM), x, [p["metrics"].get(n) for p in progress]) for n in teams
        ]
        svg = line_chart(series, x_label, "return")
        reading = "The same for each team alone: rewards of its agents, summed over an episode."
        charts.append(Chart("Return of each team while training", svg, reading))
    for name in list(dict.fromkeys(name for p in progress for name in p.get("losses", {}))):
        svg = line_chart([Series("", x, [p["losses"].get(name) for p in progress])], x_label, name)
        charts.append(Chart(name.replace("_", " "), svg, loss_reading(name)))
    svg = line_chart([Series("", x, column("agent_steps_per_s"))], x_label, "agent-steps/s")
    charts.append(
        Chart("Speed", svg, "Decisions of single agents a second; dips are updates or evaluations.")
    )
    svg = line_chart([Series("", x, column("policy_lag"))], x_label, "updates")
    reading = "How many updates old the acting policy was when its rows were learned from."
    charts.append(Chart("Policy lag", svg, reading))
    return charts


def loss_reading(name: str) -> str:
    """How to read a loss's curve."""
    if "grad" in name:
        return "Length of the gradient; spikes hint at an unstable update."
    if "entropy" in name:
        return "How undecided the policy is; it falls as the policy commits itself."
    if "critic" in name or "value" in name:
        return "How far the critic's predictions are off; it should fall, then stay."
    return "As the last update before each moment reported it."


def _provenance(start: Mapping[str, Any]) -> dict[str, str]:
    """Where the run and the page come from."""
    machine = start.get("machine") or describe_machine()
    packages = start.get("versions") or versions()
    return {
        "command": start.get("command", "unknown"),
        "started": start.get("started", "unknown"),
        "commit": start.get("commit", "unknown"),
        "machine": ", ".join(f"{k}: {v}" for k, v in machine.items() if v is not None),
        "packages": ", ".join(f"{k} {v}" for k, v in packages.items()),
        "page written": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC at {commit()}, "
        f"Python {platform.python_version()}",
    }


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)

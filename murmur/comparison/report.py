"""`murmur report`: one self-contained page about a run."""

import base64
import platform
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2

from murmur.comparison.charts import styles
from murmur.comparison.report_charts import (
    LEARNED,
    evaluation_charts,
    learning_charts,
    mission_charts,
)
from murmur.doctor.device_report import about_text, run_busy_text
from murmur.doctor.machine import commit, describe_machine, versions
from murmur.env_service.environment import baselines
from murmur.env_service.pictures import find_painter
from murmur.env_service.sessions.evaluate import run_baseline
from murmur.runs import settings
from murmur.runs.drops import dropped_message
from murmur.runs.evaluation import (
    Recorder,
    caveat_of_best,
    evaluate_run,
    to_record,
)
from murmur.runs.readings import best_names, direction
from murmur.runs.run_folder import RunFolder
from murmur.runs.scores import Metric
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.config.text import comparable, one_line, plain_data, to_yaml, without_secrets
from murmur.shared.process.errors import CheckpointError
from murmur.shared.process.files import write_json
from murmur.shared.wire.notices import FILE as NOTICES
from murmur.shared.wire.notices import read_notices
from murmur.text import duration, number, short_number

Say = Callable[[str], None]


def evaluate_all(
    run: RunFolder, checkpoint: str, episodes: int, first_seed: int, *, fresh: bool, say: Say
) -> dict[str, dict[str, Any]]:
    """Evaluate the run's policy and every baseline on the same episodes; return results by name.

    Each is kept in the run's folder, with a picture of its first episode's end, and taken from
    there if the same was asked before.

    Raises:
        MurmurError: if the user can fix the cause.
    """
    config = run.config()
    folder = run.path / "evaluations"
    folder.mkdir(exist_ok=True)
    results, names = {}, sorted(baselines(config.environment))
    try:
        weights = run.checkpoint(checkpoint)
        names = [LEARNED, *names]
    except CheckpointError as error:
        say(f"no policy to evaluate: {error}")
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
            result = run_baseline(config, name, episodes, first_seed, recorder.take)
        if painter := find_painter(recorder.snapshots):
            last = len(recorder.snapshots) - 1
            (figure,) = painter.figures(recorder.snapshots, [last], name)
            figure.savefig(file.with_suffix(".png"), dpi=80)
        results[name] = to_record(name, result) | {
            "key": key,
            "picture": painter.READING if painter else "",
        }
        write_json(file, results[name])  # last: what is kept has its picture
    if note := _note(run, results):
        say(note)
    return results


def evaluation_key(
    config: ExperimentConfig, episodes: int, first_seed: int, weights: Path | None
) -> dict[str, Any]:
    """Return all that an evaluation's figures depend on, as it comes back from JSON.

    Args:
        config: configuration of the run.
        episodes: number of episodes.
        first_seed: seed of the first episode.
        weights: file of the learned policy; None for a baseline.
    """
    key: dict[str, Any] = {
        "episodes": episodes,
        "first_seed": first_seed,
        "environment": comparable(plain_data(config.for_evaluation().environment)),
        "curves": "carried forward",  # what kept results of 0.2.0 lack
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
    """Return the file of a policy's result; its picture is beside it."""
    return folder / f"{name.replace(' ', '-')}.json"


def render_page(run: RunFolder, results: Mapping[str, Mapping[str, Any]]) -> str:
    """Render the page as HTML, from the content of the run's folder."""
    config = run.config()
    progress, evaluations = run.records("progress"), run.records("evaluation")
    last = progress[-1] if progress else {}
    best = Metric.parse(config.evaluation.best_metric)
    facts = {
        "environment": config.environment.options.get("factory", config.environment.name),
        "algorithm": config.algorithm.name,
        "updates": number(last.get("updates", 0)),
        "environment steps": number(last.get("env_steps", 0)),
        "agent steps": number(last.get("agent_steps", 0)),
        "best checkpoint by": str(best),
    }
    columns = _columns(results)
    arrows = {column: direction(column, best) for column in columns}
    pictures = _pictures(run, results)
    return render_template(
        "report.html.j2",
        **page_parts(run, facts, progress),
        summary="A training run of murmur: environment servers that stream to learners.",
        columns=columns,
        results=results,
        arrows=arrows,
        best={c: best_names(_means(results, c), arrows[c]) for c in columns},
        look=styles(results, first=LEARNED),
        episodes=max((r["episodes"] for r in results.values()), default=0),
        note=_note(run, results),
        mission=mission_charts(results, best),
        pictures=[(name, base64.b64encode(png).decode()) for name, png in pictures.items()],
        # Bytes 16 to 19 of a PNG are its width: letters of the widest are legible.
        picture_width=max(
            (int.from_bytes(png[16:20], "big") for png in pictures.values()), default=0
        ),
        picture_reading=next((r["picture"] for r in results.values() if r["picture"]), ""),
        learning=[*evaluation_charts(evaluations, results, best), *learning_charts(progress)],
    )


def render_template(file: str, /, **values: object) -> str:
    """Render the template of a page as HTML."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("murmur", "."), autoescape=True, trim_blocks=True
    )
    environment.filters["number"] = number
    environment.filters["short"] = short_number
    environment.globals["script"] = (files("murmur") / "report.js").read_text()
    return environment.get_template(file).render(values)


def page_parts(
    run: RunFolder, facts: Mapping[str, str], progress: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the parts of every page on a run: facts, configuration, provenance.

    Args:
        run: run to describe.
        facts: facts to show first, by name.
        progress: lines of progress.
    """
    config, start = run.config(), run.read_json("command.json")
    machine, last = start.get("machine", {}), progress[-1] if progress else {}
    shown = {
        **facts,
        "device": run_busy_text(progress),
        "training time": duration(last.get("seconds", 0)),
        "learners": number(start["learners"]) if start.get("learners", 1) > 1 else "",
        "processor": machine.get("cpu"),
        "GPU": machine.get("gpu") or "none",
        "learned on": about_text(start.get("device") or {}),
    }
    return {
        "name": config.run.name,
        "facts": shown,
        "dropped": dropped_message(last),
        "notices": [notice.text for notice in read_notices(run.path / NOTICES)],
        "changed": {k: _plain(v) for k, v in without_secrets(settings.changed(config)).items()},
        "whole": to_yaml(without_secrets(settings.resolved_data(config))),
        "provenance": _provenance(start),
    }


def _note(run: RunFolder, results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the note beside the results if those of the learned policy are biased."""
    learned = results.get(LEARNED)
    if learned is None:
        return ""
    checkpoint = learned["key"]["checkpoint"]
    return caveat_of_best(run, checkpoint, learned["episodes"], learned["first_seed"])


def _columns(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the metrics, the return first."""
    names = list(dict.fromkeys(name for r in results.values() for name in r["summary"]))
    return sorted(names, key=lambda name: name != "return")


def _means(results: Mapping[str, Mapping[str, Any]], column: str) -> list[tuple[str, float]]:
    """Return each policy's mean of a metric, of those that have it."""
    return [(n, r["summary"][column]["mean"]) for n, r in results.items() if column in r["summary"]]


def _pictures(run: RunFolder, results: Mapping[str, Any]) -> dict[str, bytes]:
    """Return a PNG of the first episode's end for each policy, the learned one first."""
    mean = {name: r["summary"]["return"]["mean"] for name, r in results.items()}
    names = sorted(mean, key=lambda name: (name != LEARNED, -mean[name]))
    files = {name: _file(run.path / "evaluations", name).with_suffix(".png") for name in names}
    return {n: f.read_bytes() for n, f in files.items() if results[n]["picture"] and f.is_file()}


def _provenance(start: Mapping[str, Any]) -> dict[str, str]:
    """Return the provenance of the run and of the page."""
    machine = start.get("machine") or describe_machine()
    packages = start.get("versions") or versions()
    return {
        "command": without_secrets(start.get("command", "unknown")),
        "started": start.get("started", "unknown"),
        "commit": start.get("commit", "unknown"),
        "machine": ", ".join(f"{k}: {v}" for k, v in machine.items() if v is not None),
        "packages": ", ".join(f"{k} {v}" for k, v in packages.items()),
        "page written": written_now(),
    }


def written_now() -> str:
    """Return when a page is written, and by which murmur and Python."""
    now = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    return f"{now} at {commit()}, Python {platform.python_version()}"


def _plain(value: object) -> str:
    return value if isinstance(value, str) else one_line(value)

"""Pages of the acceptance results: one for each test, a list, and a table of all."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.acceptance.scores import with_interval
from benchmarks.acceptance.task import STACKED, WAYS, load_task, task_names
from benchmarks.figures import Panel, mean_and_range
from murmur.doctor.machine import RESULTS
from murmur.results import origin_text

MATRIX = RESULTS / "defaults-matrix.md"


def write(file: Path, results: dict[str, Any]) -> None:
    """Write the JSON file and its page."""
    RESULTS.mkdir(exist_ok=True)
    file.write_text(json.dumps(results, indent=1) + "\n")
    file.with_suffix(".md").write_text(page(results))


def page(results: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    lines = [f"# {results['test']}: {results['title']}", ""]
    built_ones = {k: e for k, e in results["entries"].items() if "date" in e}
    for entry in built_ones.values():
        lines.append(
            f"- {entry['algorithm']}: `{entry['command']}`, {origin_text(entry)}{_begun(entry)}"
        )
        lines += [
            f"- {entry['algorithm']} at {x['env_steps']:,} steps: `{x['origin']['command']}`, "
            f"{origin_text(x['origin'])}"
            for x in entry.get("lines", [])
            if "origin" in x
        ]
    table = _stacked_table if results["test"] == "A9" else _score_table
    lines += ["", *table(results)]
    missing = [name for name in results["entries"] if name not in built_ones]
    if missing:
        lines += ["", f"Not built: {', '.join(missing)}."]
    return "\n".join(lines) + "\n"


def _begun(entry: dict[str, Any]) -> str:
    """Name the commits of runs that were begun at another than the entry's."""
    commits = {c for x in entry.get("lines", []) for c in x.get("trained_at", [])}
    others = sorted(commits - {None, entry.get("commit")})
    return f"; runs begun at {', '.join(others)}" if others else ""


def _stacked_table(results: dict[str, Any]) -> list[str]:
    lines = [
        "| algorithm | updates | largest difference of a weight | goal | |",
        "|---|---|---|---|---|",
    ]
    for name, e in results["entries"].items():
        if "updates" in e:
            lines.append(
                f"| {name} | {e['updates']} | {e['difference']:.1e} | "
                f"<= {e['tolerance']:.0e} | {_verdict(e['passed'])} |"
            )
    return lines


def _score_table(results: dict[str, Any]) -> list[str]:
    anchor = results.get("anchors")
    lines = []
    if anchor:
        lines += [
            f"Greedy policy, {results['episodes']} episodes a seed. Score: {results['unit']} "
            f"(S / {results['divisor']:g}), mean over a seed's episodes, interquartile mean over "
            f"seeds, 95 % interval. Normalised: 0 is random ({anchor['random']:.3g}), 1 is "
            f"{results['scripted_is']} ({anchor['scripted']:.4g}).",
            "",
        ]
    lines += [
        "| algorithm | seeds | environment steps | goal | score | S | normalised "
        "| each seed's mean | CPU-s a seed | |",
        "|---" * 10 + "|",
    ]
    others: dict[str, list[str]] = {way: [] for way in WAYS}
    for name, entry in results["entries"].items():
        for x in entry.get("lines", []):
            assert anchor is not None  # there is one where there are lines
            span = anchor["scripted"] - anchor["random"]
            means = ", ".join(f"{m:.4g}" for m in x["means"])
            lines.append(
                f"| {name} | {len(x['seeds'])} | {x['env_steps']:,} | {x['goal']} | "
                f"{with_interval(x['score'], x['low'], x['high'])} | {x['S']:.4g} | "
                f"{(x['score'] - anchor['random']) / span:.2f} | {means} | "
                f"{'unknown' if None in x['cpu_s'] else format(np.mean(x['cpu_s']), '.0f')} | "
                f"{_verdict(x['passed'])} |"
            )
            for way, found in others.items():
                if other := x.get(way):
                    each = ", ".join(f"{m:.4g}" for m in other["means"])
                    score = with_interval(other["score"], other["low"], other["high"])
                    found.append(f"{name} after {x['env_steps']:,} steps {score} (seeds {each})")
    evaluated = [
        f"{name} {_evaluations(x['evaluations'])}"
        for name, entry in results["entries"].items()
        for x in entry.get("lines", [])
        if "evaluations" in x
    ]
    if evaluated:
        text = "Evaluations during training, by their mean over seeds"
        lines += ["", f"{text}: {'; '.join(evaluated)}."]
    for way, found in others.items():
        if found:
            lines += ["", f"By {WAYS[way].text}: {'; '.join(found)}."]
    return lines


def _evaluations(found: dict[str, Any]) -> str:
    """Describe evaluations during training: the best of them, and the last."""
    best, last = found["best"], found["last"]
    shown = [with_interval(x["score"], x["low"], x["high"]) for x in (best, last)]
    return (
        f"best of {found['number']} {shown[0]}, after {best['env_steps']:,} steps; the last, after "
        f"{last['env_steps']:,}, {shown[1]}"
    )


def _verdict(passed: bool) -> str:
    return "pass" if passed else "**fail**"


def list_tasks() -> None:
    """Print every acceptance test with the state of each algorithm."""
    for name in task_names():
        entries = _entries(name)["entries"]
        algorithms = list(STACKED) if name == "A9" else list(load_task(name).algorithms)
        title = "stacked equals loop" if name == "A9" else load_task(name).title
        parts = []
        for algorithm in algorithms:
            entry = entries.get(algorithm, {})
            lines = entry.get("lines", [entry] if "passed" in entry else [])
            state = (
                "not run" if not lines else "pass" if all(x["passed"] for x in lines) else "FAIL"
            )
            parts.append(f"{algorithm} {'not built' if entry.get('not_built') else state}")
        print(f"{name}  {title}: {', '.join(parts)}")


def _goals(name: str) -> dict[tuple[str, int], str]:
    """Return each goal as text by (algorithm, environment steps); none of A9, which has no file."""
    candidates = {} if name == "A9" else load_task(name).algorithms
    return {
        (algorithm, goal.env_steps): goal.text()
        for algorithm, candidate in candidates.items()
        for goal in candidate.goals
    }


def overview(names: Sequence[str]) -> str:
    """Return the results of tests as one Markdown table.

    Args:
        names: names of the tests.
    """
    lines = [
        "| | task | algorithm | seeds | steps | goal | score | S | normalised | |",
        "|---" * 10 + "|",
    ]
    missing: dict[str, list[str]] = {}
    for name in names:
        results = _entries(name)
        goals = _goals(name)
        for algorithm, entry in results["entries"].items():
            if "difference" in entry:
                lines.append(
                    f"| {name} | {results['title']} | {algorithm} | | {entry['updates']} updates | "
                    f"<= {entry['tolerance']:.0e} | {entry['difference']:.1e} | | | "
                    f"{_verdict(entry['passed'])} |"
                )
            if entry.get("not_built"):
                missing.setdefault(algorithm, []).append(name)
            for x in entry.get("lines", []):
                anchor = results["anchors"]
                span = anchor["scripted"] - anchor["random"]
                goal = goals.pop((algorithm, x["env_steps"]), x["goal"])
                lines.append(
                    f"| {name} | {results['title']} | {algorithm} | {len(x['seeds'])} | "
                    f"{x['env_steps']:,} | {goal} | "
                    f"{with_interval(x['score'], x['low'], x['high'])} | {x['S']:.4g} | "
                    f"{(x['score'] - anchor['random']) / span:.2f} | {_verdict(x['passed'])} |"
                )
        if goals:
            title = load_task(name).title
            lines += [
                f"| {name} | {title} | {algorithm} | | {steps:,} | {goal} | | | | not measured |"
                for (algorithm, steps), goal in goals.items()
            ]
    if missing:
        parts = [f"{algorithm} ({', '.join(names)})" for algorithm, names in missing.items()]
        lines += ["", f"Not built: {', '.join(parts)}."]
    return "\n".join(lines)


def matrix(names: Sequence[str]) -> str:
    """Return what default options reach, before and now, as a page.

    Args:
        names: names of the tests.
    """
    lines = [
        "# Default options: what each algorithm learns",
        "",
        "By `python -m benchmarks.acceptance --matrix`, from acceptance-D*.json and "
        "acceptance-D*-before.json, whose pages name commits, commands and seeds. A row with a "
        "dash in its algorithm is an option beside the default. Greedy policies, interquartile "
        "means over seeds, 95 % intervals; of a single seed the interval is of its episodes. The "
        "floor was fixed before tuning.",
        "",
        f"![Returns during training]({MATRIX.with_suffix('.svg').name})",
        "",
        "Lines are means over the measured seeds, bands their range; a line without a band has one "
        "seed. Returns are those of recent training episodes, which explore; D1 and D2 have long "
        "episodes and show greedy evaluations.",
        "",
        "| | task | algorithm | steps | random | floor | before | now | each seed | CPU-s | |",
        "|---" * 11 + "|",
    ]
    for name in names:
        task = load_task(name)
        now, before = (_entries(f"{name}{suffix}") for suffix in ("", "-before"))
        for algorithm, candidate in task.algorithms.items():
            for goal in candidate.goals:
                x = _line(now, algorithm, goal.env_steps)
                random = f"{now['anchors']['random']:.3g}" if "anchors" in now else ""
                cells = [name, task.title.removesuffix(", defaults"), algorithm]
                cells += [f"{goal.env_steps:,}", random, f"{goal.at_least:g}"]
                cells += [_cell(_line(before, algorithm, goal.env_steps)), _cell(x)]
                if x is None:
                    cells += ["", "", "not measured"]
                else:
                    known = [s for s in x["cpu_s"] if s is not None]
                    cells += [", ".join(f"{m:.4g}" for m in x["means"])]
                    cells += [f"{np.mean(known):.0f}" if known else "unknown"]
                    cells += [_verdict(x["passed"])]
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def curves(names: Sequence[str]) -> list[Panel]:
    """Return a panel for each test: returns during the defaults' training, beside the floors.

    Args:
        names: names of the tests.
    """
    panels = []
    for name in names:
        task, now = load_task(name), _entries(name)
        lines = {}
        for algorithm in task.algorithms:
            seeds = now.get("curves", {}).get(algorithm, {})
            if seeds and "-" not in algorithm:
                points = [
                    [
                        {"steps": x, "return": y}
                        for x, y in zip(seed["env_steps"], seed["returns"], strict=True)
                    ]
                    for seed in seeds.values()
                ]
                lines[algorithm] = mean_and_range(points, "steps", "return")
        floors = [
            goal.at_least
            for candidate in task.algorithms.values()
            for goal in candidate.goals
            if goal.at_least is not None
        ]
        levels = {f"floor {floor:g}": floor for floor in floors}
        levels |= {"random": now["anchors"]["random"]} if "anchors" in now else {}
        title = f"{name}: {task.title.removesuffix(', defaults')}"
        panels.append(Panel(title, "environment steps", lines, levels))
    return panels


def _entries(name: str) -> dict[str, Any]:
    """Return the results of a test as they are kept; without entries if there are none."""
    file = RESULTS / f"acceptance-{name}.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {"entries": {}}
    return found


def _line(results: dict[str, Any], algorithm: str, steps: int) -> dict[str, Any] | None:
    """Return an algorithm's line at a goal of `steps` environment steps; None: there is none."""
    lines = results["entries"].get(algorithm, {}).get("lines", [])
    return next((x for x in lines if x["env_steps"] == steps), None)


def _cell(x: dict[str, Any] | None) -> str:
    return "" if x is None else with_interval(x["score"], x["low"], x["high"])

"""Learning runs: train a configuration from several seeds, evaluate greedily, compare.

    python -m benchmarks.learning terrain-cpu --seeds 1 2 3

trains one seed after another with `murmur train`. An interrupted seed is resumed, a complete one is
not repeated. It evaluates the best checkpoint, or with --last the last one, on the episodes from
--first-seed on, and plays the scripted baselines on the same ones. The results are
benchmarks/results/<topic>-learning.json, a table (.md) and the learning curves (.svg).
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._trainings import children_cpu_s, run_training
from benchmarks.figures import Panel, chosen_baselines, draw, mean_and_range
from murmur.doctor.machine import RESULTS
from murmur.env_service.environment import baselines
from murmur.env_service.sessions.evaluate import run_baseline
from murmur.env_service.sessions.evaluation_result import EvaluationResult
from murmur.results import origin_text, provenance, require_clean_source, run_command
from murmur.runs.evaluation import evaluate_run
from murmur.runs.run_folder import RunFolder
from murmur.runs.scores import Metric
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.config.files import load

DESCRIPTION = "train a configuration from several seeds and compare with the scripted baselines"
# Any free ports: whatever else is trained on this machine meanwhile.
_PORTS = ("learner.port=0", "learner.metrics_port=0", "env_server.metrics_port=0")


def train(
    name: str, topic: str, seed: int, overrides: list[str], learners: int | None = None
) -> RunFolder:
    """Train one seed to its end, or take up where it was left; notes the CPU-seconds it took.

    They are unknown (null) of a run that was begun in another way.
    """
    run = RunFolder(Path("runs") / f"{topic}-seed{seed}")
    command = [sys.executable, "-m", "murmur", "train", name, "--run", str(run.path)]
    for item in [f"run.seed={seed}", *_PORTS, *overrides]:
        command += ["--set", item]
    if learners:
        command += ["--learners", str(learners)]
    note = run.path / "cpu_s.json"
    spent: float | None = 0.0
    if any((run.path / "checkpoints").glob("update-*.pt")):
        command.append("--resume")
        spent = json.loads(note.read_text()) if note.is_file() else None
    before = children_cpu_s()
    run_training(command)
    note.write_text(json.dumps(None if spent is None else spent + children_cpu_s() - before))
    return run


def curve(run: RunFolder) -> list[dict[str, float]]:
    """Return the run's evaluations: minutes, environment steps, mean of every metric.

    `training_return` is that of training episodes since the previous one, exploration included.
    """
    points, training = [], []
    for line in (run.path / "progress.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["kind"] == "progress" and record["return"] is not None:
            training.append(record["return"])
        if record["kind"] == "evaluation":
            means = {k: v["mean"] for k, v in record["metrics"].items()}
            point = {"minutes": record["seconds"] / 60, "env_steps": record["env_steps"]}
            if training:
                point["training_return"] = float(np.mean(training))
                training = []
            points.append({**point, "updates": record["updates"], **means})
    return points


def last_progress(run: RunFolder) -> dict[str, Any]:
    """Return the last line of the run's progress."""
    lines = (run.path / "progress.jsonl").read_text().splitlines()
    progress = [r for r in map(json.loads, lines) if r["kind"] == "progress"]
    line: dict[str, Any] = progress[-1]
    return line


def summary(result: EvaluationResult) -> dict[str, dict[str, float]]:
    """Return the mean, deviation and 95 % interval of every metric."""
    return {
        name: {"mean": s.mean, "std": s.std, "low": s.low, "high": s.high}
        for name, s in result.summary().items()
    }


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=DESCRIPTION)
    parser.add_argument("config")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--episodes", type=int, default=50)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--topic", help="name of the result; default: the configuration's")
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--learners", type=int, help="learners that share the training")
    parser.add_argument(
        "--no-baselines", action="store_true", help="where another result has played them"
    )
    parser.add_argument("--last", action="store_true", help="evaluate the last checkpoint")
    parser.add_argument("--dirty", action="store_true", help="save from source not committed")
    arguments = parser.parse_args()
    require_clean_source(arguments.dirty)
    origin = provenance("benchmarks.learning")
    config = load(arguments.config, arguments.overrides)
    topic = arguments.topic or arguments.config
    seeds: dict[str, Any] = {}
    for seed in arguments.seeds:
        run = train(arguments.config, topic, seed, arguments.overrides, arguments.learners)
        checkpoint = run.checkpoint("latest" if arguments.last else "best")
        result = evaluate_run(run, checkpoint, arguments.episodes, arguments.first_seed, say=print)
        progress = last_progress(run)
        cpu_s = json.loads((run.path / "cpu_s.json").read_text())
        seeds[str(seed)] = {
            "evaluation": summary(result),
            "minutes": progress["seconds"] / 60,
            "cpu_minutes": None if cpu_s is None else cpu_s / 60,
            "updates": progress["updates"],
            "env_steps": progress["env_steps"],
            "episodes": progress["episodes"],
            "mission": {k: np.nanmean(c, 0).tolist() for k, c in result.curves.items()},
            "curve": curve(run),
        }
    names = () if arguments.no_baselines else sorted(baselines(config.environment))
    played = {
        name: summary(run_baseline(config, name, arguments.episodes, arguments.first_seed))
        for name in names
    }
    evaluated = "last" if arguments.last else "best"
    write(topic, config, seeds, played, {**origin, "checkpoint": evaluated})


def write(
    topic: str,
    config: ExperimentConfig,
    seeds: dict[str, Any],
    baselines: dict[str, Any],
    origin: dict[str, Any],
) -> None:
    """Write the JSON file, the table and the picture."""
    record = {
        "benchmark": "learning",
        **origin,
        "config": config.model_dump(),
        "seeds": seeds,
        "baselines": baselines,
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    file = RESULTS / f"{topic}-learning.json"
    file.write_text(json.dumps(record, indent=1) + "\n")
    file.with_suffix(".md").write_text(table(record))
    picture(record, file.with_suffix(".svg"))
    print(f"written: {file}, .md, .svg")


def metrics_of(record: dict[str, Any]) -> list[str]:
    """Return the metrics that get a column: what the missions report, then the return."""
    first = next(iter(record["seeds"].values()))
    wanted = [m for m in first["mission"] if m in first["evaluation"] and m != "return"]
    return [*(wanted or list(first["evaluation"]))[:5], "return"]


def table(record: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    metrics = metrics_of(record)
    lines = [
        f"`{record['command']}`",
        "",
        f"{origin_text(record)}.",
        f"Greedy policy of the {record.get('checkpoint', 'best')} checkpoint; mean over the "
        "episodes, 95 % interval in brackets.",
        "",
        "| policy | minutes | CPU-minutes | episodes | " + " | ".join(metrics) + " |",
        "|---" * (len(metrics) + 4) + "|",
    ]

    def cells(evaluation: dict[str, Any]) -> str:
        parts = (evaluation[m] for m in metrics)
        return " | ".join(f"{v['mean']:.3f} [{v['low']:.3f}, {v['high']:.3f}]" for v in parts)

    for seed, run in record["seeds"].items():
        cpu = run["cpu_minutes"]
        lines.append(
            f"| trained, seed {seed} | {run['minutes']:.1f} | "
            f"{'' if cpu is None else f'{cpu:.1f}'} | {run['episodes']} | "
            f"{cells(run['evaluation'])} |"
        )
    for name, evaluation in record["baselines"].items():
        lines.append(f"| {name} | | | | {cells(evaluation)} |")
    return "\n".join(lines) + "\n"


def picture(record: dict[str, Any], file: Path) -> None:
    """Plot evaluations over environment steps: mean and range of the seeds, baselines as levels."""
    curves = [run["curve"] for run in record["seeds"].values()]
    name = "trained" if len(curves) == 1 else f"{len(curves)} seeds"
    best = Metric.parse(record["config"]["evaluation"]["best_metric"])
    chosen = chosen_baselines(
        {level: found[best.name]["mean"] for level, found in record["baselines"].items()},
        less_is_better=best.less_is_better,
    )
    panels = [
        Panel(
            metric,
            "environment steps",
            {name: mean_and_range(curves, "env_steps", metric)},
            {level: record["baselines"][level][metric]["mean"] for level in chosen},
        )
        for metric in metrics_of(record)
    ]
    draw(panels, file)


if __name__ == "__main__":
    run_command(main)

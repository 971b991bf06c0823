"""Acceptance: do the algorithms learn what is known to be learnable, as well as published?

    python -m benchmarks.acceptance --list
    python -m benchmarks.acceptance A1 [A2 ...] [--algorithms mappo] [--seeds 1 2] [--long]
    python -m benchmarks.acceptance --matrix

A test is a file configs/acceptance/<id>.yaml: an environment, how its score is reported, and for
each algorithm its configuration and what it has to reach after how many environment steps. Each
seed is trained by `murmur train` in the sync pipeline, so that the same seed gives the same run; at
every goal the policy as it is then plays greedily, over gRPC, the same fixed episodes, and where a
test asks for it in other ways, too, which decide nothing. A run that was interrupted is resumed,
one that is complete is not repeated, and each seed is saved as it ends. `--long` continues to the
goals that take an hour.

Everything is reported on one scale, S: the episode's rewards summed over steps and agents (where
the published score is of a number of steps, with further episodes following); and
as published, which is S / divisor. A seed's score is its mean over episodes, that of several seeds
the interquartile mean of theirs, with a 95 % bootstrap interval; normalized, (score - random) /
(scripted - random).

Tests D1 to D8 are of default options: `algorithm: {name}` alone, and what a task needs. `--matrix`
sets them side by side in benchmarks/results/defaults-matrix.md, and draws the returns during their
training beside it (.svg); the file of a test keeps those of each seed.

Results go to benchmarks/results/acceptance-<id>.json with a page (.md) beside it. An algorithm that
is not built yet is reported so; what other algorithms have reached stays in the file.
"""

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks._stacked import stacked_against_loop
from benchmarks._trainings import children_cpu_s, run_training
from benchmarks.acceptance.page import (
    MATRIX,
    curves,
    list_tasks,
    matrix,
    overview,
    page,
    write,
)
from benchmarks.acceptance.scores import (
    Floats,
    bootstrap_interval,
    common_evaluations,
    interquartile_mean,
    scores,
)
from benchmarks.acceptance.task import (
    STACKED,
    WAYS,
    Task,
    built,
    defaults,
    experiment,
    load_task,
    published,
)
from benchmarks.figures import draw
from murmur.doctor.machine import RESULTS
from murmur.env_service.sessions.evaluate import run_baseline
from murmur.results import provenance, require_clean_source
from murmur.runs.evaluation import evaluate_run
from murmur.runs.run_folder import RunFolder
from murmur.runs.scores import Metric, read_curve
from murmur.runs.settings import resolved_data
from murmur.shared.config.cores import available_cores, choose
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.config.files import load
from murmur.shared.config.plugins import plugin_names
from murmur.shared.process.errors import ConfigError

DESCRIPTION = "train the acceptance tests and compare with what they have to reach"

_MODULE = "benchmarks.acceptance"
_COSTS = "costs-by-steps.json"
_CURVE_POINTS = 50  # of a seed's returns during training

Cost = dict[str, float | None]  # minutes, cpu_s


class Run:
    """One seed of one algorithm, trained as far as is needed.

    Attributes:
        folder: folder of the run, runs/acceptance/<name>-<algorithm>-seed<seed>.
    """

    def __init__(self, config: ExperimentConfig) -> None:
        """Find the run's folder.

        Raises:
            ConfigError: if it holds a run with another configuration.
        """
        self._config = config
        path = Path("runs") / "acceptance" / f"{config.run.name}-seed{config.run.seed}"
        self.folder = RunFolder(path)
        self._asked = path.with_suffix(".yaml")  # config.yaml also says what the run chose
        begun = (path / "config.yaml").is_file()
        if begun and _written(load(str(self._asked), environ={})) != _written(config):
            raise ConfigError(
                f"'{path}' was trained with another configuration than the test has now; "
                "remove the folder to start a new run"
            )

    def train(self, env_steps: int) -> Cost:
        """Train on to this number of environment steps.

        Returns:
            minutes and cpu_s until then; None if unknown, after an interruption.
        """
        costs = self._read_costs()
        if env_steps in costs:
            return costs[env_steps]
        unknown: Cost = {"minutes": None, "cpu_s": None}
        reached = max(costs, default=0)
        if reached > env_steps:
            return unknown
        path = self.folder.path
        command = [sys.executable, "-m", "murmur", "train"]
        if any((path / "checkpoints").glob("update-*.pt")):
            command += ["--resume"]
        else:
            self._asked.parent.mkdir(parents=True, exist_ok=True)
            # All values, so that a run of before a default changed is not taken for one of after.
            asked = resolved_data(self._config)
            self._asked.write_text(yaml.safe_dump(asked, sort_keys=False))
            command += [str(self._asked)]
        command += ["--run", str(path), "--set", f"run.max_env_steps={env_steps}"]
        path.mkdir(parents=True, exist_ok=True)
        self._write_costs(costs | {reached + 1: unknown})  # an interruption leaves it so
        before, started = children_cpu_s(), time.monotonic()
        with path.with_suffix(".log").open("a") as log:
            run_training(command, log)
        spent = {
            "minutes": (time.monotonic() - started) / 60,
            "cpu_s": children_cpu_s() - before,
        }
        so_far = costs.get(reached, {"minutes": 0.0, "cpu_s": 0.0})
        costs[env_steps] = {
            name: None if (earlier := so_far[name]) is None else earlier + spent[name]
            for name in spent
        }
        self._write_costs(costs)
        return costs[env_steps]

    def _read_costs(self) -> dict[int, Cost]:
        """Return the cost so far by number of environment steps, as the run's folder keeps it."""
        return {int(steps): cost for steps, cost in self.folder.read_json(_COSTS).items()}

    def _write_costs(self, costs: dict[int, Cost]) -> None:
        (self.folder.path / _COSTS).write_text(json.dumps(costs))

    def commit(self) -> str | None:
        """Return the commit from which the run was started."""
        return self.folder.read_json("command.json").get("commit")

    def evaluate(self, env_steps: int, test: Task, way: str = "") -> list[float]:
        """Evaluate the policy, trained to exactly this goal; return S of each episode.

        Args:
            env_steps: environment steps of the goal.
            test: test with the episodes.
            way: another way to play, a key of WAYS; "": greedily, as a run of this test does.

        Raises:
            ConfigError: if those episodes are to be played and training has continued meanwhile.
        """
        name = f"returns-{env_steps}{way and '-' + way}.json"
        played = {
            "episodes": test.episodes,
            "first_seed": test.first_seed,
            "per_steps": test.score.per_steps,
        }
        there = self.folder.read_json(name)
        if there.get("played") != played:
            trained = max(self._read_costs(), default=0)
            if trained != env_steps:
                raise ConfigError(
                    f"'{self.folder.path}' is trained to {trained} environment steps: what it "
                    f"could do after {env_steps} is not to be seen any more; remove the folder to "
                    "start a new run"
                )
            latest = self.folder.checkpoint("latest")
            result = evaluate_run(
                self.folder,
                latest,
                test.episodes,
                test.first_seed,
                say=print,
                overrides=[
                    "evaluation.sample=false",
                    "evaluation.environment={}",  # that of evaluations during training
                    *([WAYS[way].override] if way else ()),
                ],
            )
            there = {"played": played, "S": scores(result, test.score.per_steps).tolist()}
            (self.folder.path / name).write_text(json.dumps(there))
        returns: list[float] = there["S"]
        return returns

    def evaluations(self, env_steps: int) -> dict[int, float]:
        """Return the mean return of each evaluation during training, by its number from 0."""
        every = self._config.evaluation.every_env_steps
        return {
            number: record["metrics"]["return"]["mean"]
            for record in self.folder.records("evaluation")
            if (number := record["env_steps"] // every) <= env_steps // every
        }

    def curve(self, divisor: float) -> dict[str, Any]:
        """Return mean returns of evaluations, else of episodes; thinned, in published units."""
        found = read_curve(self.folder, Metric.parse("return"))
        steps, returns = np.array(found.env_steps), np.array(found.values) / divisor
        at = np.unique(np.linspace(0, len(steps) - 1, _CURVE_POINTS).round().astype(int))
        return {
            "commit": self.commit(),
            "env_steps": steps[at].tolist(),
            "returns": [float(f"{value:.5g}") for value in returns[at]],
        }


def _written(config: ExperimentConfig) -> dict[str, Any]:
    """Return the whole configuration, as runs of this one write it.

    But for how long they train, and where a file is that names modules.
    """
    run = config.run.model_copy(update={"max_env_steps": 0, "plugin_folders": ()})
    config = config.model_copy(update={"run": run})
    return resolved_data(config.changed(choose(config, available_cores())))


def run_candidate(
    name: str, test: Task, algorithm: str, seeds: tuple[int, ...], long: bool
) -> Iterator[tuple[list[dict[str, Any]], Run]]:
    """Train and evaluate seeds of an algorithm; after each yield a line for each goal, and the run.

    Lines are of all seeds so far, the run is that of the seed.
    """
    candidate = test.algorithms[algorithm]
    goals = [g for g in candidate.goals if long or not g.long]
    seen: dict[tuple[int, str], list[list[float]]] = defaultdict(list)
    costs: dict[int, list[Cost]] = defaultdict(list)
    curves: dict[int, list[dict[int, float]]] = defaultdict(list)
    config = experiment(name, test, algorithm, 1)
    every = config.evaluation.every_env_steps
    unpaid = _unpaid(config, test.score.unpaid_steps) if every else 0.0
    commits: list[str | None] = []
    for number, seed in enumerate(seeds, 1):
        run = Run(experiment(name, test, algorithm, seed))
        for goal in sorted(goals, key=lambda g: g.env_steps):
            steps = goal.env_steps
            costs[steps].append(run.train(steps))
            for way in ("", *candidate.also):
                seen[steps, way].append(run.evaluate(steps, test, way))
            curves[steps].append(run.evaluations(steps) if every else {})
            mean = np.mean(seen[steps, ""][-1]) / test.score.divisor
            print(f"{name} {algorithm} seed {seed} at {steps}: {mean:.3f}", flush=True)
        commits.append(run.commit())
        lines = []
        for goal in goals:
            steps = goal.env_steps
            s = np.array(seen[steps, ""])
            published = s / test.score.divisor
            line = {
                "env_steps": steps,
                "goal": goal.text(),
                "passed": goal.passed(published),
                "seeds": list(seeds[:number]),
                **_scored(published),
                "S": interquartile_mean(s),
                "minutes": [c["minutes"] for c in costs[steps]],
                "cpu_s": [c["cpu_s"] for c in costs[steps]],
                "trained_at": commits,
            }
            for way in candidate.also:
                line[way] = _scored(np.array(seen[steps, way]) / test.score.divisor)
            evaluated = _evaluated(curves[steps], every, unpaid, test.score.divisor)
            if evaluated:
                line["evaluations"] = evaluated
            lines.append(line)
        yield lines, run


def _scored(published: Floats) -> dict[str, Any]:
    """Return the joint score of seeds, its interval and each seed's mean.

    Args:
        published: [seeds, episodes] scores in published units.
    """
    low, high = bootstrap_interval(published)
    means = published.mean(axis=1).tolist()
    return {"score": interquartile_mean(published), "low": low, "high": high, "means": means}


def _unpaid(config: ExperimentConfig, steps: int) -> float:
    """Return what an episode of the evaluations during training brings in its first steps."""
    if not steps:
        return 0.0
    evaluation = config.evaluation
    result = run_baseline(config, "random", evaluation.episodes, evaluation.first_seed)
    return float(result.curves["return"][:, steps].mean())


def _evaluated(
    curves: list[dict[int, float]], every: int, unpaid: float, divisor: float
) -> dict[str, Any]:
    """Return the best of the evaluations during training, as EPyMARL's authors report it.

    It is that of the highest mean over the seeds. Nothing is returned if they share no evaluation.

    Args:
        curves: mean returns of a seed's evaluations by their numbers, for each seed.
        every: number of environment steps from one to the next.
        unpaid: part of these returns that does not count.
        divisor: divisor of returns that gives published units.
    """
    numbers, means = common_evaluations(curves)
    if not numbers:
        return {}
    means = (means - unpaid) / divisor
    best = int(means.mean(axis=0).argmax())
    at = {"best": best, "last": len(numbers) - 1}
    return {"number": len(numbers)} | {
        which: {"env_steps": numbers[i] * every} | _scored(means[:, i : i + 1])
        for which, i in at.items()
    }


def anchors(test: Task, config: ExperimentConfig) -> dict[str, float]:
    """Return random and scripted scores in the evaluated episodes, in published units."""
    config = config.changed({"evaluation.environment": {}})  # that of evaluations during training

    def play(baseline: str) -> float:
        result = run_baseline(config, baseline, test.episodes, test.first_seed)
        return float(scores(result, test.score.per_steps).mean()) / test.score.divisor

    scripted = test.score.scripted
    return {
        "random": play("random"),
        "scripted": play(scripted) if isinstance(scripted, str) else float(scripted),
    }


def run_task(name: str, wanted: list[str], seeds: tuple[int, ...], long: bool) -> bool:
    """Run a test for some algorithms and keep what came out; return whether all goals were met.

    Raises:
        ConfigError: for an unknown test or an algorithm that is not in it.
    """
    test = load_task(name)
    unknown = [a for a in wanted if a not in test.algorithms]
    if unknown:
        raise ConfigError(
            f"{name} is no test of {', '.join(unknown)}; it has {', '.join(test.algorithms)}"
        )
    file = RESULTS / f"acceptance-{name}.json"
    results = _kept(file, test)
    score = test.score
    results |= {"test": name, "title": test.title, "unit": score.unit, "divisor": score.divisor}
    results |= {"scripted_is": score.scripted_is, "episodes": test.episodes}
    good = True
    missing: list[str] = []
    for algorithm in wanted or list(test.algorithms):
        candidate = test.algorithms[algorithm]
        config = experiment(name, test, algorithm, 1)
        if not built(config):
            print(f"{name} {algorithm}: not built")
            missing.append(algorithm)
            continue
        if not long and all(goal.long for goal in candidate.goals):
            print(f"{name} {algorithm}: only with --long")
            continue
        played = test.model_dump(mode="json", include={"score", "episodes", "first_seed"})
        played["environment"] = test.config["environment"]
        if results.get("anchors_of") != played:
            results |= {"anchors": anchors(test, config), "anchors_of": played}
        origin = provenance(_MODULE)
        lines: list[dict[str, Any]] = []
        for lines, run in run_candidate(name, test, algorithm, seeds or candidate.seeds, long):
            if file.is_file():  # another call may have written meanwhile
                kept = _kept(file, test)
                results |= {part: kept[part] for part in ("entries", "curves") if part in kept}
            if name in defaults():
                seen = results.setdefault("curves", {}).setdefault(algorithm, {})
                seen[str(lines[0]["seeds"][-1])] = run.curve(score.divisor)
            earlier = results["entries"].get(algorithm, {})
            if is_partial(lines, earlier, len(candidate.seeds)):
                print(f"{name} {algorithm}: the result kept is of more seeds, so it stays")
            else:
                results["entries"][algorithm] = {"algorithm": algorithm, **origin} | {
                    "config": config.model_dump(mode="json"),
                    "lines": with_earlier(lines, earlier),
                }
            write(file, results)
        good &= all(line["passed"] for line in lines)
    for algorithm in missing:
        results["entries"].setdefault(algorithm, {"not_built": True})
    write(file, results)
    print(page(results))
    return good


def _kept(file: Path, test: Task) -> dict[str, Any]:
    """Return a file's results, without entries that the test has no longer."""
    results: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {"entries": {}}
    results["entries"] = {k: e for k, e in results["entries"].items() if k in test.algorithms}
    return results


def is_partial(lines: list[dict[str, Any]], entry: dict[str, Any], wanted: int) -> bool:
    """Tell whether new lines are of fewer seeds than a test wants and an earlier entry has.

    Args:
        lines: new lines, all of the same seeds.
        entry: earlier entry of the algorithm.
        wanted: number of seeds that the test wants.
    """
    steps, number = [line["env_steps"] for line in lines], len(lines[0]["seeds"])
    before = [len(x["seeds"]) for x in entry.get("lines", []) if x["env_steps"] in steps]
    return number < min(wanted, max(before, default=0))


def with_earlier(lines: list[dict[str, Any]], entry: dict[str, Any]) -> list[dict[str, Any]]:
    """Return new lines, and an earlier entry's at other steps, marked with their origin."""
    steps = [line["env_steps"] for line in lines]
    origin = {key: entry[key] for key in ("date", "machine", "commit", "command") if key in entry}
    kept = [x for x in entry.get("lines", []) if x["env_steps"] not in steps]
    return sorted([*lines, *({"origin": origin} | x for x in kept)], key=lambda x: x["env_steps"])


def run_stacked(wanted: list[str]) -> bool:
    """Run A9: compare weights of stacked networks with those of updates agent by agent."""
    file = RESULTS / "acceptance-A9.json"
    results = json.loads(file.read_text()) if file.is_file() else {"entries": {}}
    results |= {"test": "A9", "title": "stacked networks equal a loop over agents"}
    good = True
    for algorithm, (name, options) in STACKED.items():
        if wanted and algorithm not in wanted:
            continue
        if name not in plugin_names("algorithm"):
            results["entries"].setdefault(algorithm, {"not_built": True})
            continue
        origin = provenance(_MODULE)
        line = stacked_against_loop(name, options)
        results["entries"][algorithm] = {"algorithm": algorithm, **origin} | line
        good &= line["passed"]
    write(file, results)
    print(page(results))
    return good


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=DESCRIPTION)
    parser.add_argument("tests", nargs="*", metavar="TEST", help="A1 ... A9, D1 ... D8")
    parser.add_argument("--list", action="store_true", help="the tests and what was reached")
    parser.add_argument(
        "--table",
        action="store_true",
        help="results as a Markdown table; without TEST those with published figures",
    )
    parser.add_argument("--matrix", action="store_true", help="write the page of D1 ... D8")
    parser.add_argument("--algorithms", nargs="+", default=[], help="default: all of the test")
    parser.add_argument("--seeds", type=int, nargs="+", default=[], help="default: the test's")
    parser.add_argument("--long", action="store_true", help="also the goals that take an hour")
    parser.add_argument("--dirty", action="store_true", help="save from source not committed")
    arguments = parser.parse_args()
    if arguments.table:
        print(overview([name.upper() for name in arguments.tests] or published()))
        return 0
    if arguments.matrix:
        if arguments.tests:
            parser.error(f"--matrix is of {', '.join(defaults())}, all of them: leave out TEST")
        MATRIX.write_text(matrix(defaults()))
        draw(curves(defaults()), MATRIX.with_suffix(".svg"))
        print(f"written: {MATRIX}, {MATRIX.with_suffix('.svg').name}")
        return 0
    if arguments.list or not arguments.tests:
        list_tasks()
        return 0
    require_clean_source(arguments.dirty)
    good = True
    for name in map(str.upper, arguments.tests):
        if name == "A9":
            good &= run_stacked(arguments.algorithms)
        else:
            good &= run_task(name, arguments.algorithms, tuple(arguments.seeds), arguments.long)
    return 0 if good else 1

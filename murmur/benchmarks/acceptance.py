"""Acceptance: do the algorithms learn what is known to be learnable, as well as published?

    python -m murmur.benchmarks.acceptance --list
    python -m murmur.benchmarks.acceptance A1 [A2 ...] [--algorithms mappo] [--seeds 1 2] [--long]

A test is a file configs/acceptance/<id>.yaml: an environment, how its score is reported, and for
each algorithm its configuration and what it has to reach after how many environment steps. Each
seed is trained by `murmur train` in the sync pipeline, so that the same seed gives the same run; at
every goal the policy as it is then plays greedily, over gRPC, the same fixed episodes. A run that
was interrupted is resumed, one that is complete is not repeated. `--long` goes on to the goals that
take an hour.

Everything is reported on one scale, S: the episode's rewards summed over steps and agents (where
the published score is of so many steps, in which further episodes follow: those of that many); and
as published, which is S / divisor. A seed's score is its mean over episodes, that of several seeds
the interquartile mean of theirs, with a 95 % bootstrap interval; normalised, (score - random) /
(scripted - random).

Results go to benchmarks/results/acceptance-<id>.json with a page (.md) beside it. An algorithm that
is not built yet is reported so; what other algorithms have reached stays in the file.
"""

import argparse
import json
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray
from pydantic import Field, model_validator

from env_service.sessions.evaluate import EvaluationResult, run_baseline
from murmur.benchmarks._stacked import stacked_against_loop
from murmur.benchmarks.learning import children_cpu_s
from murmur.evaluation import evaluate_run
from murmur.machine import RESULTS, ROOT, commit, describe_machine, versions
from murmur.run_folder import RunFolder
from murmur.settings import ALGORITHMS
from shared.config import ExperimentConfig, Section, validate
from shared.errors import ConfigError, MurmurError
from shared.registry import plugin_names

DESCRIPTION = "train the acceptance tests A1 to A9 and compare with what they have to reach"

_TESTS = ROOT / "configs" / "acceptance"
_RESULTS = RESULTS
_RESAMPLES = 2000  # of the bootstrap
_PLATEAU = 1.0  # how near to a plateau is on it, in published units
_COSTS = "costs-by-steps.json"

Floats = NDArray[np.float64]
Cost = dict[str, float | None]  # minutes, cpu_s


class Goal(Section):
    """What has to be reached, and when. Scores are in published units.

    Exactly one of `at_least` and `one_of` is given.
    """

    env_steps: int = Field(gt=0, description="environment steps after which it is evaluated")
    at_least: float | None = Field(None, description="lowest score that passes")
    one_of: tuple[float, ...] = Field((), description="every seed ends within 1 of one of these")
    share_of_seeds: float = Field(
        0, ge=0, le=1, description="so many seeds must reach at_least; 0: their joint score must"
    )
    long: bool = Field(False, description="only with --long")

    @model_validator(mode="after")
    def _has_one_condition(self) -> "Goal":
        if (self.at_least is None) == (not self.one_of):
            raise ValueError("give either at_least or one_of")
        return self

    def text(self) -> str:
        """The condition in words."""
        if self.one_of:
            return "each on " + ", ".join(f"{x:g}" for x in self.one_of)
        seeds = f" in {self.share_of_seeds:.0%} of seeds" if self.share_of_seeds else ""
        return f">= {self.at_least:g}{seeds}"

    def passed(self, scores: Floats) -> bool:
        """Whether scores [seeds, episodes] meet it."""
        means = scores.mean(axis=1)
        if self.one_of:
            distance = np.abs(means[:, None] - np.array(self.one_of)).min(axis=1)
            return bool((distance <= _PLATEAU).all())
        assert self.at_least is not None
        if self.share_of_seeds:
            return bool((means >= self.at_least).mean() >= self.share_of_seeds)
        return interquartile_mean(scores) >= self.at_least


class Score(Section):
    """How a test's returns are reported."""

    divisor: float = Field(1, gt=0, description="the published score is S / divisor")
    per_steps: int = Field(
        0, ge=0, description="S is of so many steps, further episodes following; 0: of an episode"
    )
    unit: str = Field("sum over agents", description="what the published score is")
    scripted: float | str = Field(
        description="score of a scripted team, or the bound that stands for it, in published "
        "units; or the name of the environment's baseline that plays it"
    )
    scripted_is: str = Field("scripted", description="what that is")


class Candidate(Section):
    """One algorithm in a test."""

    goals: tuple[Goal, ...] = Field(min_length=1)
    seeds: tuple[int, ...] = (1, 2, 3)
    config: dict[str, Any] = Field(
        default={}, description="sections of its own, over the test's: algorithm, network, ..."
    )


class Task(Section):
    """A file of configs/acceptance."""

    title: str
    score: Score
    episodes: int = Field(100, ge=1)
    first_seed: int = Field(100_001, ge=0, description="seed of the first evaluated episode")
    config: dict[str, Any] = Field(description="sections that all algorithms share")
    algorithms: dict[str, Candidate]


def interquartile_mean(scores: Floats) -> float:
    """Mean of the middle half of the seeds, each of them the mean of its episodes.

    A quarter of the seeds, rounded down, is left out at each end: none if there are fewer than
    four. Agarwal et al. 2021, "Deep Reinforcement Learning at the Edge of the Statistical
    Precipice" (arXiv:2108.13264), section 4.3.

    Args:
        scores: [seeds, episodes].
    """
    ordered = np.sort(scores.mean(axis=1))
    cut = len(ordered) // 4
    return float(ordered[cut : len(ordered) - cut].mean())


def bootstrap_interval(scores: Floats) -> tuple[float, float]:
    """95 % interval of the interquartile mean: seeds are resampled, then each one's episodes.

    Args:
        scores: [seeds, episodes].

    Returns:
        (low, high); the same scores always give the same interval.
    """
    random = np.random.default_rng(0)
    seeds, episodes = scores.shape
    values = []
    for _ in range(_RESAMPLES):
        chosen = scores[random.integers(seeds, size=seeds)]
        which = random.integers(episodes, size=(seeds, episodes))
        values.append(interquartile_mean(np.take_along_axis(chosen, which, axis=1)))
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)


def scores(result: EvaluationResult, steps: int) -> Floats:
    """S of each episode, [E]: its return; or, if steps > 0, what so many bring from its start on.

    Where an episode ends before, the next one follows, after the last one the first.
    """
    if not steps:
        return result.metrics["return"]
    curves = result.curves["return"]  # [E, T + 1] rewards so far; NaN after the end
    lengths = (~np.isnan(curves)).sum(axis=1) - 1
    sums = np.zeros(len(curves))
    for first in range(len(curves)):
        left, episode = steps, first
        while left:
            taken = min(left, lengths[episode])
            sums[first] += curves[episode, taken]
            left -= taken
            episode = (episode + 1) % len(curves)
    return sums


def task_names() -> list[str]:
    """A1, A2, ...: what --list lists."""
    return [*sorted(path.stem.upper() for path in _TESTS.glob("*.yaml")), "A9"]


def load_task(name: str) -> Task:
    """A test's file.

    Raises:
        ConfigError: for an unknown test or a file that is no test.
    """
    file = _TESTS / f"{name.lower()}.yaml"
    if not file.is_file():
        raise ConfigError(f"no acceptance test '{name}'; known: {', '.join(task_names())}")
    return validate(Task, yaml.safe_load(file.read_text()), str(file))


def experiment(name: str, test: Task, algorithm: str, seed: int) -> ExperimentConfig:
    """The configuration of one run."""
    data: dict[str, Any] = {
        "run": {"name": f"{name.lower()}-{algorithm}", "seed": seed},
        "learner": {
            "pipeline": "sync",
            "device": "cpu",
            "checkpoint_every_updates": 100_000,
            "port": 0,
            "metrics_port": 0,
        },
        "env_server": {"sessions_per_worker": 1, "metrics_port": 0},
        "algorithm": {"name": algorithm},
    }
    for top in (test.config, test.algorithms[algorithm].config):
        for section, values in top.items():
            data[section] = {**data.get(section, {}), **values}
    return validate(ExperimentConfig, data)


def built(config: ExperimentConfig) -> bool:
    """Whether the algorithm is there."""
    return config.algorithm.name in plugin_names(*ALGORITHMS)


class Run:
    """One seed of one algorithm, trained as far as is needed.

    Attributes:
        folder: runs/acceptance/<name>-<algorithm>-seed<seed>.
    """

    def __init__(self, config: ExperimentConfig) -> None:
        """Find the run's folder.

        Raises:
            ConfigError: if it holds a run with another configuration.
        """
        self._config = config
        path = Path("runs") / "acceptance" / f"{config.run.name}-seed{config.run.seed}"
        self.folder = RunFolder(path)
        if (path / "config.yaml").is_file():
            there = self.folder.config()
            run = there.run.model_copy(update={"max_env_steps": 0})
            if there.model_copy(update={"run": run}) != config:
                raise ConfigError(
                    f"'{path}' was trained with another configuration than the test has now; "
                    "remove the folder to train anew"
                )

    def train(self, env_steps: int) -> Cost:
        """Train on to so many environment steps.

        Returns:
            minutes and cpu_s that it took to get there; None where that is not known: after an
            interruption.
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
            file = path.with_suffix(".yaml")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(yaml.safe_dump(self._config.model_dump(mode="json"), sort_keys=False))
            command += [str(file)]
        command += ["--run", str(path), "--set", f"run.max_env_steps={env_steps}"]
        path.mkdir(parents=True, exist_ok=True)
        self._write_costs(costs | {reached + 1: unknown})  # an interruption leaves it so
        before, started = children_cpu_s(), datetime.now(UTC)
        with path.with_suffix(".log").open("a") as log:
            subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT)
        spent = {
            "minutes": (datetime.now(UTC) - started).total_seconds() / 60,
            "cpu_s": children_cpu_s() - before,
        }
        so_far = costs.get(reached, {"minutes": 0.0, "cpu_s": 0.0})
        costs[env_steps] = {
            name: None if (past := so_far[name]) is None else past + spent[name] for name in spent
        }
        self._write_costs(costs)
        return costs[env_steps]

    def _read_costs(self) -> dict[int, Cost]:
        """What was spent until so many environment steps."""
        return {int(steps): cost for steps, cost in self.folder.read_json(_COSTS).items()}

    def _write_costs(self, costs: dict[int, Cost]) -> None:
        (self.folder.path / _COSTS).write_text(json.dumps(costs))

    def evaluate(self, env_steps: int, test: Task) -> list[float]:
        """S of each episode that the policy plays greedily, trained to exactly this goal.

        Raises:
            ConfigError: if those episodes are to be played and training has gone on meanwhile.
        """
        name = f"returns-{env_steps}.json"
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
                    "train anew"
                )
            latest = self.folder.checkpoint("latest")
            result = evaluate_run(self.folder, latest, test.episodes, test.first_seed, say=print)
            there = {"played": played, "S": scores(result, test.score.per_steps).tolist()}
            (self.folder.path / name).write_text(json.dumps(there))
        returns: list[float] = there["S"]
        return returns


def run_candidate(
    name: str, test: Task, algorithm: str, seeds: tuple[int, ...], long: bool
) -> list[dict[str, Any]]:
    """Train and evaluate all seeds at every goal of one algorithm; returns a line for each goal."""
    goals = [g for g in test.algorithms[algorithm].goals if long or not g.long]
    seen: dict[int, list[list[float]]] = {g.env_steps: [] for g in goals}
    costs: dict[int, list[Cost]] = {g.env_steps: [] for g in goals}
    for seed in seeds:
        run = Run(experiment(name, test, algorithm, seed))
        for goal in sorted(goals, key=lambda g: g.env_steps):
            costs[goal.env_steps].append(run.train(goal.env_steps))
            returns = run.evaluate(goal.env_steps, test)
            seen[goal.env_steps].append(returns)
            mean = np.mean(returns) / test.score.divisor
            print(f"{name} {algorithm} seed {seed} at {goal.env_steps}: {mean:.3f}", flush=True)
    lines = []
    for goal in goals:
        s = np.array(seen[goal.env_steps])
        published = s / test.score.divisor
        low, high = bootstrap_interval(published)
        lines.append(
            {
                "env_steps": goal.env_steps,
                "goal": goal.text(),
                "passed": goal.passed(published),
                "seeds": list(seeds),
                "score": interquartile_mean(published),
                "low": low,
                "high": high,
                "S": interquartile_mean(s),
                "means": published.mean(axis=1).tolist(),
                "minutes": [c["minutes"] for c in costs[goal.env_steps]],
                "cpu_s": [c["cpu_s"] for c in costs[goal.env_steps]],
            }
        )
    return lines


def anchors(test: Task, config: ExperimentConfig) -> dict[str, float]:
    """Random and scripted scores, in published units; baselines play the evaluated episodes."""

    def play(baseline: str) -> float:
        result = run_baseline(config, baseline, test.episodes, test.first_seed)
        return float(scores(result, test.score.per_steps).mean()) / test.score.divisor

    scripted = test.score.scripted
    return {
        "random": play("random"),
        "scripted": play(scripted) if isinstance(scripted, str) else float(scripted),
    }


def record(algorithm: str) -> dict[str, Any]:
    """Where, when and how an algorithm's lines came to be."""
    return {
        "algorithm": algorithm,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "commit": commit(),
        "command": shlex.join(["python", "-m", "murmur.benchmarks.acceptance", *sys.argv[1:]]),
        "versions": versions(),
    }


def run_task(name: str, wanted: list[str], seeds: tuple[int, ...], long: bool) -> bool:
    """Run a test for some algorithms and keep what came out; returns whether all goals were met.

    Raises:
        ConfigError: for an unknown test or an algorithm that is not in it.
    """
    test = load_task(name)
    unknown = [a for a in wanted if a not in test.algorithms]
    if unknown:
        raise ConfigError(
            f"{name} is no test of {', '.join(unknown)}; it has {', '.join(test.algorithms)}"
        )
    file = _RESULTS / f"acceptance-{name}.json"
    results = json.loads(file.read_text()) if file.is_file() else {"entries": {}}
    score = test.score
    results |= {"test": name, "title": test.title, "unit": score.unit, "divisor": score.divisor}
    results |= {"scripted_is": score.scripted_is, "episodes": test.episodes}
    good = True
    for algorithm in wanted or list(test.algorithms):
        candidate = test.algorithms[algorithm]
        config = experiment(name, test, algorithm, 1)
        if not built(config):
            print(f"{name} {algorithm}: not built")
            results["entries"].setdefault(algorithm, {"not_built": True})
            continue
        if not long and all(goal.long for goal in candidate.goals):
            print(f"{name} {algorithm}: only with --long")
            continue
        played = test.model_dump(mode="json", include={"score", "episodes", "first_seed"})
        played["environment"] = test.config["environment"]
        if results.get("anchors_of") != played:
            results |= {"anchors": anchors(test, config), "anchors_of": played}
        lines = run_candidate(name, test, algorithm, seeds or candidate.seeds, long)
        if file.is_file():  # another call may have written meanwhile
            results["entries"] = json.loads(file.read_text())["entries"]
        before = results["entries"].get(algorithm, {}).get("lines", [])
        steps = [line["env_steps"] for line in lines]
        lines += [line for line in before if line["env_steps"] not in steps]  # long ones, earlier
        lines.sort(key=lambda line: line["env_steps"])
        results["entries"][algorithm] = record(algorithm) | {
            "config": config.model_dump(mode="json"),
            "lines": lines,
        }
        good &= all(line["passed"] for line in lines)
        write(file, results)
    write(file, results)
    print(page(results))
    return good


def run_stacked(wanted: list[str]) -> bool:
    """A9: stacked networks and an update of every agent by itself come to the same weights."""
    file = _RESULTS / "acceptance-A9.json"
    results = json.loads(file.read_text()) if file.is_file() else {"entries": {}}
    results |= {"test": "A9", "title": "stacked networks equal a loop over agents"}
    good = True
    for algorithm, (name, options) in _STACKED.items():
        if wanted and algorithm not in wanted:
            continue
        if name not in plugin_names(*ALGORITHMS):
            results["entries"].setdefault(algorithm, {"not_built": True})
            continue
        line = stacked_against_loop(name, options)
        results["entries"][algorithm] = record(algorithm) | line
        good &= line["passed"]
    write(file, results)
    print(page(results))
    return good


_STACKED: dict[str, tuple[str, dict[str, Any]]] = {
    "mappo": ("mappo", {"share_parameters": False}),
    "ippo": ("mappo", {"share_parameters": False, "centralised": False}),
}


def write(file: Path, results: dict[str, Any]) -> None:
    """The JSON file and its page."""
    _RESULTS.mkdir(exist_ok=True)
    file.write_text(json.dumps(results, indent=1) + "\n")
    file.with_suffix(".md").write_text(page(results))


def page(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = [f"# {results['test']}: {results['title']}", ""]
    built_ones = {k: e for k, e in results["entries"].items() if "date" in e}
    for entry in built_ones.values():
        machine = entry["machine"]
        lines.append(
            f"- {entry['algorithm']}: `{entry['command']}`, {entry['date'][:10]}, "
            f"commit {entry['commit']}, {machine['cores']} cores ({machine['cpu']}), "
            f"GPU: {machine['gpu'] or 'none'}"
        )
    table = _stacked_table if results["test"] == "A9" else _score_table
    lines += ["", *table(results)]
    missing = [name for name in results["entries"] if name not in built_ones]
    if missing:
        lines += ["", f"Not built: {', '.join(missing)}."]
    return "\n".join(lines) + "\n"


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
    for name, entry in results["entries"].items():
        for x in entry.get("lines", []):
            assert anchor is not None  # there is one where there are lines
            span = anchor["scripted"] - anchor["random"]
            means = ", ".join(f"{m:.4g}" for m in x["means"])
            lines.append(
                f"| {name} | {len(x['seeds'])} | {x['env_steps']:,} | {x['goal']} | "
                f"{_with_interval(x)} | {x['S']:.4g} | "
                f"{(x['score'] - anchor['random']) / span:.2f} | {means} | "
                f"{'unknown' if None in x['cpu_s'] else format(np.mean(x['cpu_s']), '.0f')} | "
                f"{_verdict(x['passed'])} |"
            )
    return lines


def _with_interval(line: dict[str, Any]) -> str:
    """The score and its interval, where it is known."""
    known = line["low"] is not None
    return f"{line['score']:.4g}" + (f" [{line['low']:.4g}, {line['high']:.4g}]" if known else "")


def _verdict(passed: bool) -> str:
    return "pass" if passed else "**fail**"


def list_tasks() -> None:
    """What there is and what has been reached."""
    for name in task_names():
        file = _RESULTS / f"acceptance-{name}.json"
        entries = json.loads(file.read_text())["entries"] if file.is_file() else {}
        algorithms = list(_STACKED) if name == "A9" else list(load_task(name).algorithms)
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


def overview() -> str:
    """All results as one table, for docs/results.md."""
    lines = [
        "| | task | algorithm | seeds | steps | goal | score | S | normalised | |",
        "|---" * 10 + "|",
    ]
    missing: dict[str, list[str]] = {}
    for name in task_names():
        file = _RESULTS / f"acceptance-{name}.json"
        results = json.loads(file.read_text()) if file.is_file() else {"entries": {}}
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
                lines.append(
                    f"| {name} | {results['title']} | {algorithm} | {len(x['seeds'])} | "
                    f"{x['env_steps']:,} | {x['goal']} | "
                    f"{_with_interval(x)} | {x['S']:.4g} | "
                    f"{(x['score'] - anchor['random']) / span:.2f} | {_verdict(x['passed'])} |"
                )
    if missing:
        parts = [f"{algorithm} ({', '.join(names)})" for algorithm, names in missing.items()]
        lines += ["", f"Not built: {', '.join(parts)}."]
    return "\n".join(lines)


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=DESCRIPTION)
    parser.add_argument("tests", nargs="*", metavar="TEST", help="A1 ... A9")
    parser.add_argument("--list", action="store_true", help="the tests and what was reached")
    parser.add_argument("--table", action="store_true", help="all results as a Markdown table")
    parser.add_argument("--algorithms", nargs="+", default=[], help="default: all of the test")
    parser.add_argument("--seeds", type=int, nargs="+", default=[], help="default: the test's")
    parser.add_argument("--long", action="store_true", help="also the goals that take an hour")
    arguments = parser.parse_args()
    if arguments.table:
        print(overview())
        return 0
    if arguments.list or not arguments.tests:
        list_tasks()
        return 0
    good = True
    try:
        for name in map(str.upper, arguments.tests):
            if name == "A9":
                good &= run_stacked(arguments.algorithms)
            else:
                seeds = tuple(arguments.seeds)
                good &= run_task(name, arguments.algorithms, seeds, arguments.long)
    except MurmurError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

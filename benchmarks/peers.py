"""Compare committed results of murmur with those of other systems.

    python -m benchmarks.peers

writes benchmarks/results/peers.md: a row for each acceptance test that BenchMARL has run here
(`benchmarks.benchmarl`), or that EPyMARL's authors published, with both budgets; and what
no one published by our budget.
EPyMARL: Papoudakis et al. 2021 (arXiv:2006.07869), table 3, five seeds, the maximum of 41
evaluations, which favors it; ours is the policy at the end of the budget and, where a test
evaluates during training, the maximum of as many evaluations, too. Its values are converted as
docs/results.md says.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks._commands import named_cases
from benchmarks.acceptance.scores import (
    bootstrap_interval,
    interquartile_mean,
    with_interval,
)
from benchmarks.acceptance.task import load_task
from murmur.doctor.machine import RESULTS
from murmur.results import run_command

_M = 1_000_000
_ON_POLICY, _OFF_POLICY = 20 * _M, 2 * _M  # EPyMARL's steps; a tenth or an eighth in matrix games

Published = tuple[str, str, float, float, int]
"""(test, algorithm, score in the test's unit, half its 95 % interval, environment steps); 0: the
interval was not quoted"""

EPYMARL: tuple[Published, ...] = (
    *(("A1", name, 175.0, 0.0, _ON_POLICY // 8) for name in ("mappo", "ippo")),
    ("A1", "coma", 185.0, 0.0, _ON_POLICY // 8),
    ("A1", "maddpg", 170.0, 0.0, _OFF_POLICY // 8),
    *(("A1", name, 175.0, 0.0, _OFF_POLICY // 8) for name in ("qmix", "vdn")),
    *(("A2", name, 50.0, 0.0, _ON_POLICY // 8) for name in ("mappo", "ippo", "coma")),
    *(("A2", name, 50.0, 0.0, _OFF_POLICY // 8) for name in ("maddpg", "qmix", "vdn")),
    *(("A2-K0", name, 250.0, 0.0, _ON_POLICY // 8) for name in ("mappo", "ippo", "coma")),
    *(("A2-K0", name, 250.0, 0.0, _OFF_POLICY // 8) for name in ("maddpg", "qmix", "vdn")),
    ("A4", "mappo", -10.68, 0.3, _ON_POLICY),
    ("A4", "maddpg", -13.6, 1.7, _OFF_POLICY),
    ("A5", "mappo", -29.3, 0.0, _ON_POLICY),
    ("A5", "ippo", -29.4, 0.0, _ON_POLICY),
    ("A5", "coma", -64.7, 0.0, _ON_POLICY),
    ("A5", "maddpg", -33.4, 0.0, _OFF_POLICY),
    ("A5", "qmix", -25.8, 0.0, _OFF_POLICY),
    ("A5", "vdn", -28.0, 0.0, _OFF_POLICY),
    ("A8", "mappo", 1.0, 0.0, _ON_POLICY),
    ("A8", "ippo", 1.0, 0.0, _ON_POLICY),
    ("A8", "coma", 0.61, 0.0, _ON_POLICY),
    ("A8", "maddpg", 0.46, 0.0, _OFF_POLICY),
    ("A8", "qmix", 0.96, 0.0, _OFF_POLICY),
)
BENCHMARL = {"A6": ("balance", "episode"), "A7": ("navigation", "rollout")}
"""Its task, and which of its returns the test counts."""

REASONS: dict[tuple[str, str], str] = {
    ("A1", "coma"): "four of five seeds find the same equilibrium, none the optimum",
    ("A4", "mappo"): "-16.6 is the best possible here",
    ("A5", "mappo"): "half of the steps",
    ("A8", "mappo"): "a quarter of the steps",
    ("A8", "ippo"): "a seventh of the steps",
}

OTHER_DYNAMICS = ("A4", "A5")
"""Tests whose published scores are of the original MPE."""


class Score(NamedTuple):
    """A score with its interval and its budget; without an interval low and high equal it."""

    value: float
    low: float
    high: float
    env_steps: int
    seeds: int


class Row(NamedTuple):
    """One comparison."""

    title: str
    algorithm: str
    ours: Score
    peer: str
    theirs: Score
    reason: str
    other_dynamics: bool = False
    alike: Score | None = None  # ours as the peer measures and in its dynamics
    wanted: int = 0  # number of seeds that the acceptance test wants

    def verdict(self) -> str:
        """Return which score is higher, or that they are equal or that their intervals overlap.

        Nothing is said of a score that lacks seeds.
        """
        if self.ours.seeds < self.wanted:
            return f"not complete: {self.ours.seeds} of {self.wanted} seeds"
        ours = self.alike or self.ours
        if ours.low > self.theirs.high:
            found = "higher"
        elif ours.high < self.theirs.low:
            found = f"lower: {self.reason}" if self.reason else "lower"
        else:
            found = "equal" if ours[:3] == self.theirs[:3] else "intervals overlap"
        other = self.other_dynamics and self.alike is None
        return f"{found} (dynamics differ)" if other else found


def main() -> None:
    """See the module."""
    named_cases(__doc__)
    file = RESULTS / "peers.md"
    file.write_text(page(rows(RESULTS)) + alone(RESULTS))
    print(f"written: {file}")


def rows(folder: Path) -> list[Row]:
    """Return all comparisons that the results in a folder allow."""
    found = []
    for test, algorithm, value, half, steps in EPYMARL:
        theirs = Score(value, value - half, value + half, steps, 5)
        found += _row(folder, test, algorithm, "EPyMARL", theirs)
    for test, (task, counted) in BENCHMARL.items():
        for file in sorted(folder.glob(f"benchmarl-{task}-*.json")):
            record = json.loads(file.read_text())
            returns = np.array([run["returns"][counted] for run in record["seeds"].values()])
            steps = int(next(iter(record["seeds"].values()))["curve"][-1]["frames"])
            low, high = bootstrap_interval(returns)
            theirs = Score(interquartile_mean(returns), low, high, steps, len(returns))
            found += _row(folder, test, record["algorithm"], "BenchMARL", theirs)
    return found


def _row(folder: Path, test: str, algorithm: str, peer: str, theirs: Score) -> list[Row]:
    record = json.loads((folder / f"acceptance-{test}.json").read_text())
    entry = record["entries"].get(algorithm)
    if entry is None:
        return []
    line: dict[str, Any] = entry["lines"][-1]  # the largest budget
    evaluated, seeds = line.get("evaluations"), len(line["seeds"])
    ours, alike = _score(line, seeds), _score(evaluated["best"], seeds) if evaluated else None
    title, reason = f"{test} {record['title']}", REASONS.get((test, algorithm), "")
    differ, wanted = test in OTHER_DYNAMICS, len(load_task(test).algorithms[algorithm].seeds)
    return [Row(title, algorithm, ours, peer, theirs, reason, differ, alike, wanted)]


def _score(line: dict[str, Any], seeds: int) -> Score:
    value = line["score"]
    low, high = (line.get(end) for end in ("low", "high"))
    return Score(
        value,
        value if low is None else low,
        value if high is None else high,
        line["env_steps"],
        seeds,
    )


def page(found: list[Row]) -> str:
    """Return the comparisons as Markdown."""
    lines = [
        "`python -m benchmarks.peers`",
        "",
        "Scores in the unit of each acceptance test (docs/results.md), 95 % intervals in brackets.",
        "Ours resample seeds and episodes. A pass of an acceptance test means its own goal, often",
        "lower than the figures here.",
        "",
        "EPyMARL: as quoted from its paper (not checked once more), the best of 41 evaluations,",
        "agents share parameters; of on-policy algorithms it prints a tenth of the steps. Where it",
        "has no brackets its interval was not quoted, and the verdict asks whether ours holds its",
        "figure. BenchMARL: run here, its policy at the end, by settings chosen for both tasks at",
        "once, not its defaults; a seed of its MASAC has had 0.70 before. Off-policy it has",
        "144,000 steps, murmur 150,000. Settings of murmur were tuned on each of these; on A1 its",
        "MADDPG has `actor_gradient: exact`, which EPyMARL's has not. Where",
        "dynamics differ, theirs is the original MPE: velocities change before positions do,",
        "rewards are converted. On A5 that is worth 2.8 to the scripted team: -22.5 by",
        "`murmur evaluate --config spread --baseline assignment --episodes 4000`; -22.8 with",
        "`--set environment.episode_steps=26`, of which the first step (`=1`) is -3.1. In the 100",
        "episodes of A5 it has -20.5: they are easier than most.",
    ]
    measured_alike = any(row.alike for row in found)
    if measured_alike:
        lines += [
            "As theirs: the best of 41 evaluations during training, each of 400 episodes, and of",
            "what the second to the 26th step pay; intervals resample seeds alone. Where agents do",
            "not touch, the same actions bring that in the 25 steps of the original. Where it is",
            "given the verdict goes by it. QMIX and VDN draw each row 32 times, as EPyMARL does,",
            "for networks of 128 units; drawn 8 times, for 64 units, VDN had -30.85.",
        ]
    column = ["as theirs"] if measured_alike else []
    heads = ["task", "algorithm", "murmur", "steps, seeds", *column, "peer", "score"]
    heads += ["steps, seeds", "murmur is"]
    lines += ["", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in found:
        alike = ["" if row.alike is None else _cells(row.alike)[0]] if measured_alike else []
        cells = [row.title, row.algorithm, *_cells(row.ours), *alike, row.peer]
        cells += _cells(row.theirs)
        lines.append(f"| {' | '.join([*cells, row.verdict()])} |")
    return "\n".join(lines) + "\n"


def alone(folder: Path) -> str:
    """Return the text on RWARE: EPyMARL trains for 40 M steps, so no figure has the same budget."""
    record = json.loads((folder / "rware-tiny-2ag-curves.json").read_text())
    (task,) = record["tasks"].values()
    (group,) = task["groups"].values()
    found, each = group["env_steps"][-1], sorted(group["scores"])
    score = Score(group["iqm"], group["low"], group["high"], found, len(each))
    shown, budget = _cells(score)
    return (
        f"\nRWARE tiny-2ag, MAPPO as EPyMARL sets it: a return of {shown} after {budget} (steps, "
        f"seeds: {each}).\nEPyMARL trains for 40,000,000 steps; no figure of this budget was "
        "found.\n"
    )


def _cells(score: Score) -> tuple[str, str]:
    shown = with_interval(score.value, score.low, score.high)
    return shown, f"{score.env_steps:,}, {score.seeds}"


if __name__ == "__main__":
    run_command(main)

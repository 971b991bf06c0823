"""Time to a score: murmur beside BenchMARL and Stable-Baselines3, by turns on one core.

    python -m benchmarks.time_to_score --save
    python -m benchmarks.time_to_score --tasks pendulum --seeds 1

trains both sides of each task, one seed after another, as processes of their own that share one
core and one thread. Each side keeps its policy at the same interval of environment steps; once the
training has ended, every kept policy plays the same 100 episodes greedily. So no evaluation is on
the clock, which runs from the start of the command and counts the CPU of all its processes.

The score to reach is the peer's at its end, the mean of its seeds; and, as many scores end on a
plateau, 99 % of the way there from random play. A side reaches it at the first evaluation from
which the mean of its seeds is as good twice in a row, or at the last. Ratios are the peer's time by
murmur's, with 95 % intervals over all resamples of seeds, each with a score to reach of its own.

Every seed is kept in runs/time-to-score as it ends; the same command continues with what is
missing. `--save` writes benchmarks/results/time-to-score.json, .md and .svg.

Not part of any extra: what benchmarks.benchmarl needs, and
pip install --no-deps stable-baselines3==2.9.2, and pandas
"""

import argparse
import importlib.metadata
import itertools
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
import psutil
import torch
import yaml

import murmur
from benchmarks._cores import CAN_PIN, started_on
from benchmarks._trainings import SYNC_LEARNER, run_training
from benchmarks.acceptance.scores import Floats, sums
from benchmarks.acceptance.task import experiment, load_task
from benchmarks.benchmarl import EXPERIMENT
from benchmarks.figures import Panel, draw, mean_and_range
from murmur.doctor.machine import RESULTS, commit
from murmur.env_service.environment import (
    RandomPolicy,
    ScriptedPolicy,
    VectorEnvironment,
    make_environment,
)
from murmur.learner_service.checkpoint.files import load as load_checkpoint
from murmur.results import origin_text, provenance, require_clean_source, run_command
from murmur.runs.settings import resolved_data
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.config.files import load
from murmur.shared.process.errors import ConfigError
from murmur.shared.wire.timestep import StepType

DESCRIPTION = "time until murmur, BenchMARL and Stable-Baselines3 reach one score on one core"
FOLDER = Path("runs") / "time-to-score"
FIRST_SEED = 100_001  # of the evaluated episodes
_EPISODES = 100
_POLL_S = 0.1
_SHARES = (1.0, 0.99)  # of the way from random play to the peer's final score
_OWN = "murmur"


@dataclass(frozen=True)
class Task:
    """One task, learned by murmur and by a peer.

    Attributes:
        title: name for tables and pictures.
        peer: name of the peer.
        algorithm: name of the algorithm of both sides.
        settings: the peer's settings.
        source: origin of these settings.
        config: name of murmur's configuration, or of an acceptance test.
        steps: environment steps of a training.
        interval: environment steps between two kept policies.
        updates: murmur's updates in such an interval.
        follow: number of steps that a score is of, further episodes following; 0: of one episode.
    """

    title: str
    peer: str
    algorithm: str
    settings: Mapping[str, Any]
    source: str
    config: str
    steps: int
    interval: int
    updates: int
    follow: int = 0

    def experiment(self, seed: int = 1) -> ExperimentConfig:
        """Return murmur's configuration."""
        if self.config.startswith("A"):
            return experiment(self.config, load_task(self.config), self.algorithm, seed)
        return load(self.config, [f"run.seed={seed}"])

    def game(self) -> str:
        """Return the peer's name of the environment."""
        section = self.experiment().environment.model_dump()
        return str(section.get("scenario") or section["arguments"]["id"])


_SB3 = "Stable-Baselines3"
_ZOO = "those of rl-baselines3-zoo"
_BALANCE = Task(
    title="VMAS balance, MAPPO",
    peer="BenchMARL",
    algorithm="mappo",
    settings=EXPERIMENT["mappo"],
    source="the best found for it, benchmarks/benchmarl.py",
    config="A6",
    steps=420_000,
    interval=30_000,
    updates=5,
)
TASKS = {
    "balance": _BALANCE,
    "navigation": replace(
        _BALANCE, title="VMAS navigation, MAPPO", config="A7", steps=300_000, follow=100
    ),
    "pendulum": Task(
        title="Pendulum, SAC",
        peer=_SB3,
        algorithm="sac",
        settings={"learning_rate": 1e-3},
        source=_ZOO,
        config="pendulum",
        steps=10_000,
        interval=1_000,
        updates=500,
    ),
    "cartpole": Task(
        title="CartPole, PPO",
        peer=_SB3,
        algorithm="ppo",
        settings={
            "n_envs": 8,
            "n_steps": 32,
            "batch_size": 256,
            "gae_lambda": 0.8,
            "gamma": 0.98,
            "n_epochs": 20,
            "ent_coef": 0.0,
            "learning_rate": "lin_0.001",
            "clip_range": "lin_0.2",
        },
        source=_ZOO,
        config="cartpole",
        steps=100_000,
        interval=5_120,
        updates=5,
    ),
}


def play(config: ExperimentConfig, policies: Sequence[ScriptedPolicy], follow: int) -> list[float]:
    """Play 100 episodes with each policy; return their mean returns of an agent.

    Args:
        config: configuration with the environment.
        policies: policies to play.
        follow: number of steps to count, further episodes following; 0: one episode.
    """
    with closing(_episodes_of(config)) as environment:
        return [_mean_return(environment, policy, follow) for policy in policies]


def play_randomly(task: Task) -> float:
    """Play 100 episodes by random actions; return their mean return of an agent."""
    with closing(_episodes_of(task.experiment())) as environment:
        return _mean_return(environment, RandomPolicy(environment), task.follow)


def _episodes_of(config: ExperimentConfig) -> VectorEnvironment:
    """Make a copy of the environment for each evaluated episode."""
    section = config.for_evaluation().environment
    return make_environment(section, _EPISODES, config.algorithm.name)


def _mean_return(environment: VectorEnvironment, policy: ScriptedPolicy, follow: int) -> float:
    seeds = np.arange(_EPISODES, dtype=np.uint64) + np.uint64(FIRST_SEED)
    timestep, playing = environment.reset(seeds), np.ones(_EPISODES, np.bool_)
    so_far = [np.zeros(_EPISODES)]
    for _ in range(environment.spec.max_episode_steps or 10_000):
        restart = timestep.step_type == StepType.LAST
        timestep = environment.step(policy.act(timestep), restart, seeds)
        so_far.append(np.where(playing, so_far[-1] + timestep.reward.mean(1), np.nan))
        playing &= timestep.step_type != StepType.LAST
        if not playing.any():
            break
    return float(sums(np.array(so_far).T, follow).mean())


class CpuClock:
    """CPU-seconds of all descendants of this process over time, read by a thread of its own."""

    def __init__(self) -> None:
        """Prepare to measure."""
        self._times: list[float] = []
        self._cpu_s: list[float] = []
        self._seen: dict[int, float] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> Self:
        """Start at 0."""
        self.started = time.time()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop."""
        self._stop.set()
        self._thread.join()

    def at(self, moment: float) -> float:
        """Return the CPU-seconds until a moment in time.time() seconds."""
        return float(np.interp(moment, self._times, self._cpu_s))

    def _follow(self) -> None:
        this = psutil.Process()
        while not self._stop.wait(_POLL_S):
            for child in this.children(recursive=True):
                try:
                    times = child.cpu_times()
                except psutil.NoSuchProcess:
                    continue
                self._seen[child.pid] = times.user + times.system
            self._times.append(time.time())
            self._cpu_s.append(sum(self._seen.values()))


class Trained(NamedTuple):
    """One side, trained.

    Attributes:
        clock: clock of the training.
        files: kept policies by environment steps.
        scores: score of each of them.
    """

    clock: CpuClock
    files: dict[int, Path]
    scores: list[float]


def train_own(task: Task, seed: int, folder: Path) -> Trained:
    """Train murmur, then play its checkpoints."""
    asked, run = folder / "asked.yaml", folder / "run"
    asked.write_text(yaml.safe_dump(task.experiment(seed).model_dump(mode="json")))
    overrides = {f"learner.{name}": value for name, value in SYNC_LEARNER.items()} | {
        "learner.checkpoint_every_updates": task.updates,
        "learner.keep_checkpoints": 1000,
        "env_server.num_workers": 1,
        "env_server.metrics_port": 0,
        "evaluation.every_updates": 0,
        "run.max_env_steps": task.steps,
    }
    command = [sys.executable, "-m", "murmur", "train", str(asked), "--run", str(run)]
    for name, value in overrides.items():
        command += ["--set", f"{name}={value}"]
    clock = _timed(command, folder)
    files = {
        load_checkpoint(file)["progress"]["env_steps"]: file
        for file in sorted((run / "checkpoints").glob("update-*.pt"))
    }
    policies = [murmur.load(path) for path in files.values()]
    return Trained(clock, files, play(task.experiment(), policies, task.follow))


def train_peer(name: str, task: Task, seed: int, folder: Path) -> Trained:
    """Train the peer and play the policies that it kept, in a process of its own."""
    asked = {
        "task": name,
        "peer": task.peer,
        "game": task.game(),
        "algorithm": task.algorithm,
        "settings": task.settings,
        "steps": task.steps,
        "interval": task.interval,
        "seed": seed,
    }
    (folder / "asked.json").write_text(json.dumps(asked))
    clock = _timed([sys.executable, "-m", "benchmarks._peer_training", str(folder)], folder)
    scores = json.loads((folder / "scores.json").read_text())
    files = {int(steps): folder / f"policy-{steps}.pt" for steps in scores}
    return Trained(clock, files, list(scores.values()))


def _timed(command: Sequence[str], folder: Path) -> CpuClock:
    """Run a command that trains, on one core, to its end."""
    core = sorted(os.sched_getaffinity(0))[-1:] if CAN_PIN else []
    with CpuClock() as clock, started_on(core), (folder / "output.log").open("w") as log:
        run_training(command, log)
    return clock


def measure(name: str, task: Task, side: str, seed: int) -> dict[str, Any]:
    """Train one seed of one side; return its kept policies' steps, times and scores.

    A seed that was measured before is read instead.

    Raises:
        ConfigError: if that had another budget or other settings.
    """
    asked = json.loads(json.dumps(asked_of(task, side)))
    folder = FOLDER / f"{name}-{side}-seed{seed}"
    file = folder.with_suffix(".json")
    if file.is_file():
        record: dict[str, Any] = json.loads(file.read_text())
        if record["asked"] != asked:
            raise ConfigError(
                f"'{file}' was measured with another budget or other settings than this command "
                "asks for; remove it to measure once more"
            )
        return record
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    loads = [os.getloadavg()[0]]
    own = side == _OWN
    trained = train_own(task, seed, folder) if own else train_peer(name, task, seed, folder)
    clock, files = trained.clock, trained.files
    moments = [path.stat().st_mtime for path in files.values()]
    record = {
        "asked": asked,
        "commit": commit(),
        "load": [*loads, os.getloadavg()[0]],
        "points": [
            {
                "env_steps": steps,
                "wall_s": at - clock.started,
                "cpu_s": clock.at(at),
                "score": score,
            }
            for steps, at, score in zip(files, moments, trained.scores, strict=True)
        ],
    }
    file.write_text(json.dumps(record, indent=1) + "\n")
    shutil.rmtree(folder)
    return record


def asked_of(task: Task, side: str) -> dict[str, Any]:
    """Return a side's budget and its settings, with all values that murmur has by default."""
    own = task.experiment().changed({"run.plugin_folders": ()})  # wherever the checkout lies
    return {
        "steps": task.steps,
        "interval": task.interval,
        "settings": resolved_data(own) if side == _OWN else task.settings,
    }


def values(runs: Sequence[Mapping[str, Any]], key: str) -> Floats:
    """Return one value of the points of several runs, [runs, points], as long as the shortest."""
    points = min(len(run["points"]) for run in runs)
    return np.array([[p[key] for p in run["points"][:points]] for run in runs], np.float64)


def reached_at(scores: Floats, target: float) -> int | None:
    """Return the first point from which the mean over runs is at the target twice in a row.

    The last point counts alone.

    Args:
        scores: [runs, points] scores.
        target: score to reach.
    """
    there = scores.mean(0) >= target
    both = there & np.append(there[1:], True)
    return int(both.argmax()) if both.any() else None


def time_to(runs: Sequence[Mapping[str, Any]], target: float, key: str) -> float:
    """Return the mean time of runs until they reach a score together; infinity if they do not."""
    at = reached_at(values(runs, "score"), target)
    return float("inf") if at is None else float(values(runs, key)[:, at].mean())


def score_to_reach(
    peer: Sequence[Mapping[str, Any]], share: float = 1.0, floor: float = 0.0
) -> float:
    """Return the mean score of runs at their ends, or a share of the way there from a floor."""
    final = float(values(peer, "score").mean(0)[-1])  # summed as in reached_at: equal to the bit
    return share * final + (1 - share) * floor


def compare(
    own: Sequence[Mapping[str, Any]],
    peer: Sequence[Mapping[str, Any]],
    key: str,
    share: float = 1.0,
    floor: float = 0.0,
) -> dict[str, float | None]:
    """Return both sides' times to the score to reach, their ratio and its interval.

    The interval is of all resamples of seeds with replacement, on both sides. Where murmur does not
    reach the score its time is None, the ratio 0.

    Args:
        own: runs of murmur.
        peer: runs of the peer.
        key: "wall_s", "cpu_s" or "env_steps".
        share: share of the way from the floor to the peer's final score.
        floor: score of random play.
    """

    def times(
        ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]
    ) -> tuple[float, float]:
        target = score_to_reach(theirs, share, floor)
        return time_to(ours, target, key), time_to(theirs, target, key)

    own_time, peer_time = times(own, peer)
    resampled = [
        times(ours, theirs)
        for theirs in itertools.product(peer, repeat=len(peer))
        for ours in itertools.product(own, repeat=len(own))
    ]
    low, high = np.percentile([b / a for a, b in resampled], [2.5, 97.5])
    return {
        _OWN: own_time if np.isfinite(own_time) else None,
        "peer": peer_time,
        "ratio": peer_time / own_time,
        "low": low,
        "high": high,
    }


def table(record: Mapping[str, Any]) -> list[str]:
    """Return the lines of the Markdown table of all tasks."""
    lines = [
        "| task | peer | score | murmur: steps, wall min, CPU-min | peer: steps, wall "
        "min, CPU-min | wall, peer / murmur | CPU, peer / murmur |",
        "|---" * 7 + "|",
    ]
    for task in record["tasks"].values():
        for share, times in task["times"].items():
            ratios = " | ".join(
                f"{times[key]['ratio']:.2f} [{times[key]['low']:.2f}, {times[key]['high']:.2f}]"
                for key in ("wall_s", "cpu_s")
            )
            lines.append(
                f"| {task['title']} | {task['peer']} | {share}: {times['score']:.4g} | "
                f"{_cells(times, _OWN)} | {_cells(times, 'peer')} | {ratios} |"
            )
    return lines


def _cells(times: Mapping[str, Any], side: str) -> str:
    """Return a side's environment steps, wall and CPU-minutes to the score as text."""
    if times["env_steps"][side] is None:
        return "not reached"
    minutes = (f"{times[key][side] / 60:.2f}" for key in ("wall_s", "cpu_s"))
    return ", ".join((f"{times['env_steps'][side]:,.0f}", *minutes))


def summary(task: Task, runs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return what is reported of one task.

    Args:
        task: the task.
        runs: runs of each side by seed.
    """
    own, peer = (list(runs[side].values()) for side in (_OWN, "peer"))
    floor = play_randomly(task)
    return {
        "title": task.title,
        "peer": f"{task.peer} {importlib.metadata.version(task.peer)}",
        "settings": {k: v for k, v in task.settings.items() if k != "max_n_frames"},
        "source": task.source,
        "config": task.config,
        "steps": task.steps,
        "interval": task.interval,
        "random": floor,
        "times": {
            f"{share:.0%}": {
                "score": score_to_reach(peer, share, floor),
                **{
                    key: compare(own, peer, key, share, floor)
                    for key in ("wall_s", "cpu_s", "env_steps")
                },
            }
            for share in _SHARES
        },
        "runs": runs,
    }


def page(record: Mapping[str, Any]) -> str:
    """Return the results as Markdown."""
    lines = [
        f"`{record['command']}`",
        "",
        f"{origin_text(record)}; trainings: commit {commits(record)}.",
        "One core and one thread for all processes of a side, sides by turns. Times count from the "
        "start of the command, without evaluations: these play 100 episodes greedily once the "
        f"training has ended. The rest of the machine was not idle: load average {loads(record)}.",
        "",
        "![Scores over CPU-seconds](time-to-score.svg)",
        "",
        *table(record),
        "",
        "Score: the peer's final one, the mean of its seeds' returns of an agent, and 99 % of the "
        "way there from random play. Times: until the mean of a side's seeds is as good in two "
        "evaluations, or in the last. Brackets: 95 %, all resamples of seeds; 0: murmur did not "
        "reach it.",
        "",
    ]
    for task in record["tasks"].values():
        lines += [
            f"- {task['title']}: {task['steps']:,} steps, an evaluation each "
            f"{task['interval']:,}. murmur, `{task['config']}`: "
            f"{ends(task['runs'][_OWN])}. {task['peer']}, settings: {task['source']} "
            f"({json.dumps(task['settings'])}): {ends(task['runs']['peer'])}.",
        ]
    return "\n".join(lines) + "\n"


def ends(runs: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the seeds' final scores and CPU-minutes as text."""
    last = [run["points"][-1] for run in runs.values()]
    scores = ", ".join(f"{point['score']:.4g}" for point in last)
    minutes = ", ".join(f"{point['cpu_s'] / 60:.2f}" for point in last)
    return f"{scores} in the end, after {minutes} CPU-minutes"


def loads(record: Mapping[str, Any]) -> str:
    """Return the range of load averages as text."""
    found = [load for run in _all_runs(record) for load in run["load"]]
    return f"{min(found):.1f} to {max(found):.1f}"


def commits(record: Mapping[str, Any]) -> str:
    """Return the commits of the trainings as text."""
    return ", ".join(sorted({run["commit"] for run in _all_runs(record)}))


def _all_runs(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    sides = (runs for task in record["tasks"].values() for runs in task["runs"].values())
    return [run for runs in sides for run in runs.values()]


def picture(record: Mapping[str, Any], file: Path) -> None:
    """Plot scores over CPU-seconds: means and ranges of seeds, and the score to reach."""
    panels = []
    for task in record["tasks"].values():
        lines = {}
        for side, name in ((_OWN, _OWN), ("peer", task["peer"].partition(" ")[0])):
            curves = [run["points"] for run in task["runs"][side].values()]
            lines[name] = mean_and_range(curves, "cpu_s", "score")
        panels.append(
            Panel(task["title"], "CPU-seconds", lines, {"to reach": task["times"]["100%"]["score"]})
        )
    draw(panels, file)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=DESCRIPTION)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--save", action="store_true", help="write the result")
    parser.add_argument("--dirty", action="store_true", help="save from source not committed")
    arguments = parser.parse_args()
    if arguments.save:
        require_clean_source(arguments.dirty)
    origin = provenance("benchmarks.time_to_score")
    torch.set_num_threads(1)
    runs: dict[str, dict[str, dict[str, Any]]] = {
        name: {_OWN: {}, "peer": {}} for name in arguments.tasks
    }
    for seed in arguments.seeds:
        for name in arguments.tasks:
            # Who trains first changes with the seed.
            for side in (_OWN, "peer") if seed % 2 else ("peer", _OWN):
                run = runs[name][side][str(seed)] = measure(name, TASKS[name], side, seed)
                print(
                    f"{name}, {side}, seed {seed}: {run['points'][-1]}", file=sys.stderr, flush=True
                )
    tasks = {name: summary(TASKS[name], found) for name, found in runs.items()}
    record = {"benchmark": "time_to_score", **origin, "tasks": tasks}
    print("\n".join(table(record)))
    if arguments.save:
        file = RESULTS / "time-to-score.json"
        file.write_text(json.dumps(record, indent=1) + "\n")
        file.with_suffix(".md").write_text(page(record))
        picture(record, file.with_suffix(".svg"))
        print(f"written: {file}, .md, .svg")


if __name__ == "__main__":
    run_command(main)

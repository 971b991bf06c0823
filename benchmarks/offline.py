"""Learning that begins with an expert's episodes: a replay filled with them, and cloning.

    python -m benchmarks.offline                    both, three seeds
    murmur bench offline --smoke

`benchmarks.combination_lock` pays only who knows 12 actions in a row: a replay that begins with an
expert's transitions finds them, an empty one does not. Cloned policies are compared with the expert
that they are cloned from, in units of the distance between random play and the expert; no
environment runs while they learn. `spread` is cloned from few episodes and from many: its expert
assigns landmarks to agents once an episode, so an episode is one example of an assignment.
"""

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import murmur
from benchmarks._commands import named_cases, save_run
from benchmarks._trainings import SYNC_LEARNER
from benchmarks.actions import environment_of
from benchmarks.combination_lock import CELLS, Lock
from murmur.benchmarks.effort import Effort
from murmur.env_service.environment import VectorEnvironment
from murmur.env_service.sessions.evaluate import run_baseline
from murmur.env_service.sessions.record_transitions import TransitionRecorder
from murmur.results import run_command
from murmur.shared.config import Section
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.config.section import validate
from murmur.shared.wire.dataset import DatasetWriter
from murmur.shared.wire.spec import Composite
from murmur.shared.wire.timestep import Array, TimeStep

DESCRIPTION = "a replay that begins with an expert's episodes, and cloned experts: 3 seeds"
NEEDS = ("gymnasium",)

FLOOR = 0.9  # share of greedy episodes that open the lock
MARGIN = 0.1  # of the distance between random play and the expert
_STEPS = 2_500  # of a training from an expert's episodes, and from nothing
_RECORDED = 50  # episodes of an expert that is cloned
_UPDATES = 40  # of cloning
_EVALUATED = 64
# Episodes of `spread` -> updates of cloning them.
SPREAD = {_RECORDED: _UPDATES, 4000: 160}
CLONED = "hybrid", "factors", "pair"  # tasks of `benchmarks.actions`


class Opener:
    """An expert of the lock: reads the code."""

    class Config(Section):
        """No options."""

    def __init__(self, config: Config, environment: VectorEnvironment) -> None:
        """Read the code of any lock: all have the same."""
        self._code = Lock()._code

    def act(self, timestep: TimeStep) -> Array:
        """Return the right action of each cell."""
        cell = timestep.observation["observation"].argmax(-1)
        action: Array = self._code[cell].astype(np.int32)
        return action


class Knowing:
    """An expert of the tasks of `benchmarks.actions`: what each cue asks for."""

    class Config(Section):
        """No options."""

    def __init__(self, config: Config, environment: VectorEnvironment) -> None:
        """Keep the kind of actions."""
        self._action = environment.spec.action

    def act(self, timestep: TimeStep) -> Array:
        """Return the best actions for the cues that are shown [N, A]."""
        cue = timestep.observation["observation"].argmax(-1)
        assert isinstance(self._action, Composite)
        if not self._action.size:  # factors: choice f is right if it is cue + f
            several: Array = (cue[..., None] + np.arange(5)) % 8
            return several.astype(np.int32)
        if self._action.size == 1:  # hybrid: the best arm and its parameter
            return np.stack([cue, 3 * cue / 5 - 0.9], -1).astype(np.float32)
        # The pair: a choice of the first agent, numbers in [-2, 2] of the second.
        both = np.zeros((*cue.shape, 3), np.float32)
        both[:, 0, 0] = cue[:, 0]
        both[:, 1, 1:] = np.stack([cue[:, 1] - 1.5, 1.5 - cue[:, 1]], -1) / 2
        return both


_LOCK = {"name": "gymnasium", "factory": f"{Lock.__module__}:Lock", "metrics": ["opened"]}


def _configuration(environment: dict[str, Any], **sections: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration on one core."""
    server = {"num_workers": 1, "envs_per_worker": 16, "metrics_port": 0}
    network = {"name": "mlp", "hidden": [64]}
    learner = SYNC_LEARNER | {"log_every_s": 0.5}
    base = {"env_server": server, "network": network, "learner": learner}
    return {"environment": environment, **base, **sections}


def play(environment: dict[str, Any], baseline: str, episodes: int, folder: Path | None) -> float:
    """Play a baseline, and record it in a folder if one is given; return its mean return."""
    config = validate(ExperimentConfig, _configuration(environment, algorithm={"name": "mappo"}))
    if folder is None:
        result = run_baseline(config, baseline, episodes, 1)
    else:
        with DatasetWriter(folder, {"baseline": baseline}, environment) as writer:
            recorder = TransitionRecorder(writer)
            result = run_baseline(config, baseline, episodes, 1, None, recorder)
    return float(result.metrics["return"].mean())


def lock(dataset: str, seed: int, steps: int) -> dict[str, Any]:
    """Train on the lock; return the share of opened locks, and the steps until the first."""
    replay = {
        "capacity_rows": 8000,
        "start_rows": 200,
        "batch_size": 64,
        "update_interval": 4,
        "dataset": dataset,
    }
    config = _configuration(
        _LOCK,
        run={"seed": seed, "max_env_steps": steps},
        algorithm={"name": "qmix", "mixer": "vdn", "lr": 1e-3, "replay": replay},
    )
    with tempfile.TemporaryDirectory(prefix="murmur-bench-") as folder:
        run = murmur.train(config, run=Path(folder) / "run", progress=False)
        opened = run.evaluate(episodes=_EVALUATED).summary()["opened"].mean
    return {"opened": opened, "reached": opened >= FLOOR}


def clone(
    environment: dict[str, Any],
    dataset: Path,
    seed: int,
    updates: int,
    hidden: tuple[int, ...] = (64,),
) -> float:
    """Clone an expert; return the mean return of the greedy policy."""
    config = _configuration(
        environment,
        run={"seed": seed, "max_updates": updates, "offline": True},
        algorithm={"name": "mappo", "actor_lr": 2e-3, "unroll_steps": 16},
        network={"name": "mlp", "hidden": hidden},
        imitation={"dataset": str(dataset)},
    )
    with tempfile.TemporaryDirectory(prefix="murmur-bench-") as folder:
        run = murmur.train(config, run=Path(folder) / "run", progress=False)
        return run.evaluate(episodes=_EVALUATED, first_seed=10_001).summary()["return"].mean


def compared(best: float, chance: float, returns: list[float]) -> dict[str, Any]:
    """Return the returns of clones beside those of the expert and of random play."""
    below = [(best - one) / (best - chance) for one in returns]
    found = {"expert": best, "random": chance, "cloned": returns, "below_the_expert": below}
    print(found, file=sys.stderr, flush=True)
    return found


def run(effort: Effort = Effort.FULL) -> dict[str, Any]:
    """Train all; return each seed's result beside that of the expert, of nothing and of chance."""
    seeds = range(1, effort.choose(1, 1, 3) + 1)
    result: dict[str, Any] = {"floor": FLOOR, "margin": MARGIN, "lock": {"cells": CELLS}}
    with tempfile.TemporaryDirectory(prefix="murmur-bench-") as name:
        folder = Path(name)
        play(_LOCK, "benchmarks.offline:Opener", 20, folder / "lock")
        steps = effort.choose(300, _STEPS, _STEPS)
        for source, dataset in (("expert", str(folder / "lock")), ("nothing", "")):
            began = time.monotonic()
            result["lock"][source] = [lock(dataset, seed, steps) for seed in seeds]
            print(f"lock, {source}: {result['lock'][source]}", file=sys.stderr, flush=True)
            result["lock"][f"seconds_{source}"] = time.monotonic() - began
        for task in CLONED[: effort.choose(1, 3, 3)]:
            environment, updates = environment_of(task), effort.choose(3, _UPDATES, _UPDATES)
            best = play(environment, "benchmarks.offline:Knowing", _RECORDED, folder / task)
            chance = play(environment, "random", _RECORDED, None)
            returns = [clone(environment, folder / task, seed, updates) for seed in seeds]
            result[task] = compared(best, chance, returns)
        for wanted in SPREAD.items():
            episodes, updates = effort.choose((8, 2), wanted, wanted)
            environment, case = {"name": "spread"}, f"spread, {wanted[0]} episodes"
            best = play(environment, "assignment", episodes, folder / case)
            chance = play(environment, "random", _RECORDED, None)
            returns = [clone(environment, folder / case, s, updates, (128, 128)) for s in seeds]
            result[case] = compared(best, chance, returns)
    return result


def main() -> None:
    """Run all and save the result."""
    named_cases(__doc__)
    save_run("offline", run)


if __name__ == "__main__":
    run_command(main)

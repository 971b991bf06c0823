"""Planted causes of runs that do not learn, and what murmur says of them.

Each is trained by `murmur train` in processes of its own. A cause is found if the notice names its
key among the three likeliest.
"""

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks._commands import named_cases
from benchmarks._trainings import SYNC_LEARNER
from murmur.benchmarks.effort import Effort
from murmur.learner_service.learning.stagnation import KIND
from murmur.results import (
    provenance,
    require_clean_source,
    run_command,
    save_result,
)
from murmur.runs.child import child_environment, murmur_command
from murmur.shared.wire.notices import FILE, read_notices

DESCRIPTION = "runs with a planted mistake: is its key among the three causes that murmur names?"
NEEDS = ("gymnasium",)

_POLL_S = 0.5
_AT_ONCE = 3  # trainings; most of their time is that of starting processes
_PPO = {"name": "ippo", "batch_size": 128, "batch_number": 2, "data_passes": 2}
_REPLAY = {"batch_size": 32, "start_rows": 200, "update_interval": 4}


def _gym(name: str) -> dict[str, Any]:
    arguments = {"id": name}
    return {"name": "gymnasium", "factory": "gymnasium:make", "arguments": arguments}


def _hopeless(kind: str) -> dict[str, Any]:
    factory = "benchmarks.hopeless_environment:make"
    return {"name": "gymnasium", "factory": factory, "arguments": {"kind": kind}}


def _iql(interval: int = 4, **options: Any) -> dict[str, Any]:  # noqa: ANN401 - of any kind
    replay = {**_REPLAY, "update_interval": interval}
    return {"name": "iql", "replay": replay, "epsilon_env_steps": 1000, **options}


_CART, _PENDULUM = _gym("CartPole-v1"), _gym("Pendulum-v1")
# name -> (environment, algorithm, environment steps, key that is to be named)
PLANTED: dict[str, tuple[dict[str, Any], dict[str, Any], int, str]] = {
    "too few updates": (_CART, _iql(800), 6000, "algorithm.replay.update_interval"),
    "learning rate too high": (_CART, _iql(lr=3.0), 6000, "algorithm.lr"),
    "learning rate almost 0": (
        _CART,
        {**_PPO, "actor_lr": 1e-8, "critic_lr": 1e-8},
        6000,
        "algorithm.actor_lr",
    ),
    "learning rate annealed too soon": (
        _CART,
        {**_PPO, "actor_lr": 1e-4, "anneal_updates": 3, "final_lr_fraction": 1e-4},
        8000,
        "algorithm.anneal_updates",
    ),
    "entropy weight too high": (
        _CART,
        {**_PPO, "entropy_weight": 5.0},
        6000,
        "algorithm.entropy_weight",
    ),
    "entropy collapses": (
        _hopeless("even"),
        {**_PPO, "entropy_weight": 0.0, "actor_lr": 0.02},
        12_000,
        "algorithm.entropy_weight",
    ),
    "constant reward": (_hopeless("constant"), _PPO, 4000, "environment.name"),
    "discount 0": (_hopeless("foresight"), {**_PPO, "gamma": 0.0}, 6000, "algorithm.gamma"),
    "saturated actions": (
        _PENDULUM,
        {**_PPO, "initial_log_std": 3.0},
        16_000,
        "algorithm.initial_log_std",
    ),
    "rewards of 100,000": (
        _hopeless("scaled"),
        {"name": "sac", "replay": {**_REPLAY, "update_interval": 8}},
        4000,
        "algorithm.normalize_rewards",
    ),
    "actions without effect": (_hopeless("ignored"), _iql(), 8000, "environment.name"),
    "observations all the same": (_hopeless("blind"), _PPO, 6000, "environment.name"),
    "epsilon stays at 1": (
        _CART,
        _iql(epsilon_env_steps=10_000_000),
        6000,
        "algorithm.epsilon_env_steps",
    ),
}


def train(planted: str, folder: Path) -> str:
    """Run `murmur train` with a planted mistake until murmur says so, or to its end.

    Returns:
        the notice; "" if there was none.
    """
    environment, algorithm, steps, _ = PLANTED[planted]
    config = {
        "run": {"max_env_steps": steps},
        "environment": environment,
        "env_server": {
            "num_workers": 1,
            "envs_per_worker": 8,
            "sessions_per_worker": 1,
            "metrics_port": 0,
        },
        "algorithm": algorithm,
        "network": {"name": "mlp", "hidden": [16]},
        "learner": SYNC_LEARNER | {"log_every_s": 0.2},
    }
    file = folder.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(config))
    found = {**child_environment(), "PYTHONPATH": ":".join(p for p in sys.path if p)}
    command = murmur_command("train", str(file), "--run", str(folder))
    said = ""
    with folder.with_suffix(".out").open("w+") as output:
        child = subprocess.Popen(command, env=found, stdout=output, stderr=subprocess.STDOUT)
        while child.poll() is None and not said:
            time.sleep(_POLL_S)
            said = _notice(folder)
        if said:
            child.send_signal(signal.SIGINT)
        child.wait()
        if not (said := said or _notice(folder)) and child.returncode:
            output.seek(0)
            raise RuntimeError(output.read()[-2000:])
    return said


def _notice(run: Path) -> str:
    """Return what murmur said of a run that does not learn; "" if nothing."""
    notices = (notice.text for notice in read_notices(run / FILE) if notice.kind == KIND)
    return next(notices, "")


def measure(planted: str) -> dict[str, Any]:
    """Train with a planted mistake; return what was said of it."""
    key = PLANTED[planted][3]
    with tempfile.TemporaryDirectory(prefix="murmur-bench-") as folder:
        said = train(planted, Path(folder) / "run")
    causes = said.partition("Likeliest causes: ")[2]
    place = next((i for i in (1, 2, 3) if key in _cause(causes, i)), None)
    return {"key": key, "place": place, "causes": causes}


def _cause(causes: str, number: int) -> str:
    """Return one of the causes of a notice."""
    return causes.partition(f"({number}) ")[2].partition(f"; ({number + 1}) ")[0]


def run(effort: Effort = Effort.FULL, planted: Mapping[str, Any] = PLANTED) -> dict[str, Any]:
    """Plant mistakes; return what was said of each, and how many were found."""
    names = list(planted)[: effort.choose(1, 4, len(planted))]
    started = time.monotonic()
    result: dict[str, Any] = {}
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for name, of in zip(names, pool.map(measure, names), strict=True):
            result[name] = of
            print(f"{name}: {of}", file=sys.stderr, flush=True)
    found = sum(of["place"] is not None for of in result.values())
    return {
        **result,
        "planted": len(names),
        "found": found,
        "seconds": time.monotonic() - started,
        "load_average": psutil.getloadavg()[0],
    }


def main() -> int:
    """Run all and save the result; names of planted mistakes as arguments: only those."""
    chosen = named_cases(__doc__, PLANTED)
    if not chosen:
        require_clean_source(dirty=False)
    origin = provenance("benchmarks.not_learning")
    result = run(planted={name: PLANTED[name] for name in chosen or PLANTED})
    print(result if chosen else save_result("not_learning", result, origin))
    return 0


if __name__ == "__main__":
    run_command(main)

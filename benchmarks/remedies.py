"""The doctor's predictions against what its advice brings.

Three bottlenecks are planted. For each: train, let `murmur doctor`'s arithmetic look, apply one
of its remedies, train again, and compare the rate that came with the rate foretold.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import yaml
from rich.console import Console

from murmur.benchmarks.effort import Effort
from murmur.doctor.diagnosis import Diagnosis
from murmur.doctor.page import examine
from murmur.runs.child import child_environment, murmur_command
from murmur.runs.run_folder import RunFolder

DESCRIPTION = (
    "three planted bottlenecks: what murmur doctor names, what its remedy was to bring and what "
    "it brought (target: within 20 %)"
)
NEEDS = ("gymnasium",)

_HEAVY = "heavy update of small batches"
_MAPPO = {"name": "mappo", "batch_size": 400, "batch_number": 2, "data_passes": 2}


def _slow(delay_ms: float) -> dict[str, Any]:
    factory = "benchmarks.slow_environment:make"
    return {"name": "gymnasium", "factory": factory, "arguments": {"delay_ms": delay_ms}}


PLANTED: dict[str, tuple[dict[str, Any], str, str]] = {
    # name: (configuration, bottleneck to be found, which remedy to apply)
    "slow environments": (
        {
            "environment": _slow(4.0),
            "env_server": {"num_workers": 1, "envs_per_worker": 8},
            "algorithm": _MAPPO,
        },
        "environments wait",
        "4 workers",
    ),
    "too few environment servers": (
        {
            "environment": _slow(0.5),
            "env_server": {"num_workers": 2, "envs_per_worker": 4, "sessions_per_worker": 1},
            "algorithm": _MAPPO,
        },
        "environments wait",
        "4 workers",
    ),
    _HEAVY: (
        {
            "environment": {"name": "spread"},
            "env_server": {"num_workers": 1, "envs_per_worker": 32},
            "algorithm": {
                "name": "mappo",
                "batch_size": 75,
                "batch_number": 32,
                "data_passes": 8,
            },
        },
        "small batches",
        "minibatches",
    ),
}


def train(config: Mapping[str, Any], settings: Sequence[str], seconds: float, folder: Path) -> None:
    """Run `murmur train` for this time [s]."""
    file = folder.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(dict(config)))
    changes = [f"run.max_minutes={seconds / 60}", "learner.device=cpu", *settings]
    arguments = [a for change in changes for a in ("--set", change)]
    environment = {**child_environment(), "PYTHONPATH": ":".join(p for p in sys.path if p)}
    done = subprocess.run(
        murmur_command("train", str(file), "--run", str(folder), *arguments),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])


def plant(name: str, seconds: float) -> dict[str, Any]:
    """Plant a bottleneck and diagnose it."""
    with tempfile.TemporaryDirectory(prefix="murmur-bench-") as folder:
        run = Path(folder) / "before"
        train(PLANTED[name][0], [], seconds, run)
        seen = _examine(run, seconds)
    return {"named": seen.bottleneck, "rows_per_s": seen.rate}


def measure(name: str, seconds: float) -> dict[str, Any]:
    """Plant the cause, measure, apply the remedy, compare."""
    config, expected, wanted = PLANTED[name]
    with tempfile.TemporaryDirectory(prefix="murmur-bench-") as folder:
        before, after = Path(folder) / "before", Path(folder) / "after"
        train(config, [], seconds, before)
        seen = _examine(before, seconds)
        remedy = [r for r in seen.remedies if r.what.startswith(wanted)][-1]  # the best
        train(config, remedy.settings, seconds, after)
        remedied = _examine(after, seconds)
    return {
        "named": seen.bottleneck,
        "right": seen.bottleneck == expected,
        "rows_per_s": seen.rate,
        "remedy": " ".join(remedy.settings),
        "foretold": remedy.rate / seen.rate,
        "came": remedied.rate / seen.rate,
        "off": remedy.rate / remedied.rate - 1,
        "device_busy_foretold": remedy.device_busy,
        "device_busy_came": remedied.device_busy,
    }


def _examine(run: Path, seconds: float) -> Diagnosis:
    """Diagnose the second half of a run."""
    return examine(RunFolder.open(run), None, None, seconds / 2, True, Console(stderr=True))


def run(effort: Effort = Effort.FULL) -> dict[str, Any]:
    """Plant bottlenecks; return the diagnosis and the measured gain of each."""
    seconds = effort.choose(2.0, 20.0, 60.0)
    started = time.monotonic()
    if effort is Effort.SMOKE:  # one diagnosis, and no remedy
        result: dict[str, Any] = {_HEAVY: plant(_HEAVY, seconds)}
    else:
        result = {name: measure(name, seconds) for name in PLANTED}
    result["seconds"] = time.monotonic() - started
    result["load_average"] = psutil.getloadavg()[0]
    return result

"""Launches of acting and of updates, counted on a pretended GPU: here, and of another checkout.

What is counted are ATen operations on the device, except views, allocations and profiler marks;
operations on lists of tensors and fused ones count once, and so does the replay of a graph. What
graphs replayed consist of is counted beside: operations (nodes), and kernels that they are made of
by torch's source; what cuDNN and cuBLAS add for layouts and split sums is not seen. An act is a
whole turn of the inference thread: staging, storing, acting, replying. Matrix products and
convolutions are left out: launches do not depend on their results.

    python -m benchmarks.launches --against CHECKOUT --save

counts another checkout's murmur too, by that checkout's own interpreter, side by side.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks._commands import commit_of
from benchmarks._launch_counts import PRESETS as COUNTED
from murmur.benchmarks.effort import Effort
from murmur.doctor.machine import ROOT
from murmur.results import provenance, require_clean_source, run_command, save_result
from murmur.shared.config.files import config_names
from murmur.shared.process.errors import ResourceError

DESCRIPTION = (
    "launches and synchronisations of an act with 1 and 16 sessions and of an update, by preset, "
    "on a pretended GPU"
)

_PRETEND = ROOT / "tests"
_COUNTER = Path(__file__).with_name("_launch_counts.py")
_SMOKE = ("QMIX, spread",)
# Those whose configuration comes with this murmur.
PRESETS = {name: of for name, of in COUNTED.items() if of[0] in config_names()}

Counts = dict[str, dict[str, dict[str, int]]]  # preset -> what -> launches, graphs, syncs


def count(presets: Sequence[str], checkout: Path | None = None, option: str = "") -> Counts:
    """Count in a process of its own.

    Args:
        presets: names in PRESETS.
        checkout: folder of another murmur; None: this one.
        option: option for a shorter count, "--acts-only", "--runs-only" or "--smoke".

    Raises:
        ResourceError: if the counter fails, with its output.
    """
    root = ROOT if checkout is None else checkout.resolve()
    python = root / ".venv" / "bin" / "python"
    command = [str(python) if checkout and python.exists() else sys.executable, "-P", str(_COUNTER)]
    command += [option] if option else []
    environ = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(_PRETEND), *presets],
        capture_output=True,
        text=True,
        check=False,
        cwd=root,
        env=environ,
    )
    if done.returncode:
        raise ResourceError(f"launches of {root} cannot be counted: {done.stderr[-800:]}")
    counts: Counts = {}
    for line in done.stdout.splitlines():
        counts |= json.loads(line)
    return counts


def table(here: Counts, there: Counts | None = None) -> dict[str, dict[str, Any]]:
    """Return a row for each preset and work: counts here, and those of the other checkout."""
    rows: dict[str, dict[str, Any]] = {}
    for preset, works in here.items():
        for work, found in works.items():
            row: dict[str, Any] = {}
            before = (there or {}).get(preset, {}).get(work)
            if before is not None:
                row["launches there"], row["syncs there"] = before["launches"], before["syncs"]
                row["outside graphs there"] = before["launches"] - before["graphs"]
            row |= {"launches": found["launches"], "of them graphs": found["graphs"]}
            row["outside graphs"] = found["outside"]
            row |= {"nodes": found["nodes"], "kernels in graphs": found["kernels"]}
            row |= {what: found[what] for what in ("syncs", "rows") if what in found}
            if before is not None:
                row["launches / there"] = found["launches"] / before["launches"]
            rows[f"{preset}: {work}"] = row
    return rows


def run(effort: Effort = Effort.FULL) -> dict[str, Any]:
    """Count all presets here; to smoke, the acts of one."""
    smoke = effort is Effort.SMOKE
    counts = count(_SMOKE, option="--smoke") if smoke else count(tuple(PRESETS))
    return {"launches": table(counts)}


def main() -> None:
    """Count launches of acting and updates, here and of another checkout."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--against", type=Path, help="checkout of another murmur")
    parser.add_argument("--presets", nargs="*", choices=PRESETS, default=list(PRESETS))
    less = parser.add_mutually_exclusive_group()
    less.add_argument("--acts-only", action="store_true", help="leave out updates")
    less.add_argument("--runs-only", action="store_true", help="only captured updates of a run")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    parser.add_argument("--dirty", action="store_true", help="save from source not committed")
    arguments = parser.parse_args()
    if arguments.save:
        require_clean_source(arguments.dirty)
    origin = provenance("benchmarks.launches")
    option = "--acts-only" if arguments.acts_only else ""
    option = "--runs-only" if arguments.runs_only else option
    checkouts = [None, *([arguments.against] if arguments.against else [])]
    with ThreadPoolExecutor() as pool:  # counts do not depend on what else runs
        found = list(
            pool.map(lambda checkout: count(arguments.presets, checkout, option), checkouts)
        )
    here, there = found[0], found[1] if arguments.against else None
    result: dict[str, Any] = {"launches": table(here, there)}
    for name, row in result["launches"].items():
        print(f"{name}: {json.dumps(row)}")
    if arguments.against:
        result["against"] = commit_of(arguments.against)
        origin["command"] = origin["command"].replace(str(arguments.against), "CHECKOUT")
    if arguments.save:
        name = "launches-compared" if arguments.against else "launches"
        print(f"written: {save_result(name, result, origin)}")


if __name__ == "__main__":
    run_command(main)

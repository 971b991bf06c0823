"""Count the functions on the way of an observation, and on that of the configuration.

    python -m tests.walk [spread] [formation] [settings] [--root CHECKOUT] [--json] [--save]

trains for four updates with hooks in every process and prints a table and totals. Counted are the
functions that hold an observation's time step, the transition, the batch made of it or the action
that answers it. The table has them in the order in which they first do. tests/walk/trace.py says
what counts. "Lines executed" are those of the bodies that the run needs: the others are for other
algorithms, options and faults. `settings` does the same for the configuration of `murmur train`,
from the text of the YAML file to the first step.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from murmur.results import provenance, require_clean_source, run_command, save_result
from tests.walk.measure import (
    ROOT,
    TASKS,
    Function,
    Stays,
    Walk,
    body_lines,
    executed_lines,
    settings,
    walk,
)

SETTINGS = "settings"


def main() -> int:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help=f"{', '.join(TASKS)}, {SETTINGS}; none: all")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout that trains")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/walk-*")
    parser.add_argument("--dirty", action="store_true", help="save from source not committed, too")
    given = parser.parse_args()
    if unknown := set(given.parts) - {*TASKS, SETTINGS}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(TASKS)}, settings")
    if given.save:
        require_clean_source(given.dirty)
    origin, root, result = provenance("tests.walk"), given.root.resolve(), {}
    seen: set[Function] = set()
    executed: set[tuple[str, int]] = set()
    for name, task in TASKS.items():
        if not given.parts or name in given.parts:
            found = walk(root, task)
            seen |= found.functions.keys()
            executed |= found.executed
            result[name] = way(found)
            _print(given.json, name, result[name])
    if len(result) > 1:
        lines = executed_lines(root, seen, executed)
        result["together"] = {"totals": totals(root, seen) | {"lines executed": lines}}
        _print(given.json, "together", result["together"])
    if not given.parts or SETTINGS in given.parts:
        result[SETTINGS] = stays(settings(root, TASKS["spread"]))
        _print(given.json, SETTINGS, result[SETTINGS])
    if given.json:
        print(json.dumps(result, indent=1))
    if given.save:
        print(save_result("walk", result, origin))
    return 0


def way(found: Walk) -> dict[str, Any]:
    """Return the totals and the rows of an observation's way."""
    threads = {place for places in found.functions.values() for place in places}
    return {
        "totals": {
            **totals(found.root, found.functions),
            "lines executed": executed_lines(found.root, found.functions, found.executed),
            "threads": len(threads),
            "frames from loop to backward": len(found.frames),
            "learner's functions, each update": len(found.bare),
            "their files": len({function.file for function in found.bare}),
        },
        "frames": " > ".join([found.loop, *found.frames]),
        "functions": [
            {
                "function": function.name,
                "file": function.file,
                "lines": body_lines(found.root, [function]),
                "process": ", ".join(sorted({process for process, _thread in places})),
                "thread": ", ".join(sorted({thread for _process, thread in places})),
            }
            for function, places in found.functions.items()
        ],
    }


def stays(found: Stays) -> dict[str, Any]:
    """Return the totals and the rows of the configuration's way."""

    kinds = {"makes": found.makes, "hands on": found.hands, "given": found.given}
    on_the_way = {**found.makes, **found.hands}
    return {
        "totals": {
            **totals(found.root, on_the_way),
            "make settings": len(found.makes),
            "hand settings on": len(found.hands),
            "given settings only": len(found.given),
        },
        "functions": [
            {
                "function": function.name,
                "file": function.file,
                "lines": body_lines(found.root, [function]),
                "process": ", ".join(sorted(roles)),
                "kind": kind,
            }
            for kind, functions in kinds.items()
            for function, roles in sorted(functions.items())
        ],
    }


def totals(root: Path, functions: Any) -> dict[str, int]:
    """Return how many functions, files and lines of bodies."""
    return {
        "functions": len(functions),
        "files": len({function.file for function in functions}),
        "lines of bodies": body_lines(root, functions),
        "lines with docstrings": body_lines(root, functions, prose=True),
    }


def _print(silent: bool, title: str, part: dict[str, Any]) -> None:
    """Print a part as a table."""
    if silent:
        return
    print(f"\n{title}")
    for row in part.get("functions", []):
        place = f"{row['file']}  {row['function']}"
        rest = row.get("thread") or row["kind"]
        print(f"{place:80} {row['lines']:4}  {row['process']}  {rest}")
    if "frames" in part:
        print(part["frames"])
    for name, value in part["totals"].items():
        print(f"{name:34} {value}")


if __name__ == "__main__":
    run_command(main)

"""Commands of benchmarks: their arguments, and what they write."""

import argparse
import subprocess
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from murmur.results import provenance, require_clean_source, save_result


def named_cases(document: str | None, cases: Collection[str] = ()) -> list[str]:
    """Parse the arguments of a benchmark's own command: names of cases, if it has any.

    Args:
        document: text of its module, which `--help` prints.
        cases: names that may be given.

    Returns:
        the given names; none: all cases are meant.
    """
    parser = argparse.ArgumentParser(
        description=document, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if cases:
        known = ", ".join(cases)
        parser.add_argument(
            "cases", nargs="*", metavar="CASE", help=f"only these, without saving: {known}"
        )
    found: list[str] = getattr(parser.parse_args(), "cases", [])
    if unknown := [name for name in found if name not in cases]:  # argparse's choices refuse none
        parser.error(f"unknown: {', '.join(unknown)}; known: {known}")
    return found


def commit_of(checkout: Path) -> str:
    """Return the commit of another checkout, "-dirty" if a tracked file differs."""
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=10"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def save_run(topic: str, run: Callable[[], Mapping[str, Any]]) -> None:
    """Run a benchmark as `python -m benchmarks.<topic>` does: measure, write, print the file.

    Args:
        topic: name of the benchmark and of its module.
        run: function that measures.

    Raises:
        ConfigError: if the source differs from its commit.
    """
    require_clean_source(dirty=False)
    origin = provenance(f"benchmarks.{topic}")
    print(save_result(topic, run(), origin))

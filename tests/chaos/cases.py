"""Faults whose cost is not counted in rows: what is done, and the required result.

Each case is a function of an empty folder that starts real processes, breaks something and raises
AssertionError if the contract does not hold. Modules named `cases_<topic>` hold them in `CASES`; a
test calls the function, and `murmur bench faults` calls all of them.
"""

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Case:
    """One line of the contract.

    Attributes:
        name: its line in docs/faults.md.
        act: makes the fault in an empty folder; returns what is worth a column in the result.
    """

    name: str
    act: Callable[[Path], dict[str, Any]]


def all_cases() -> list[Case]:
    """The cases of every module `tests.chaos.cases_<topic>`."""
    package = import_module("tests.chaos")
    names = [m.name for m in pkgutil.iter_modules(package.__path__) if m.name.startswith("cases_")]
    return [case for name in names for case in import_module(f"tests.chaos.{name}").CASES]

"""The ten planted causes of `murmur bench doctor` while a process for each core computes."""

from typing import Any

from benchmarks import doctor
from murmur.benchmarks.effort import Effort

DESCRIPTION = (
    "the ten planted causes of `doctor` on a loaded machine: a busy process for each core (target: "
    "the planted one first or second)"
)
NEEDS = ("gymnasium",)


def run(effort: Effort = Effort.FULL) -> dict[str, Any]:
    """Plant every cause beside busy processes; return the place at which it is named."""
    return doctor.run(effort, loaded=True)

"""The ten planted causes of `murmur bench doctor` on a machine that is loaded."""

import os
from typing import Any

from benchmarks import doctor
from murmur.benchmarks.effort import Effort

DESCRIPTION = (
    "the ten planted causes of `doctor` on a loaded machine: three trainings at a time beside a "
    "busy process for each core (target: the planted one first or second)"
)
NEEDS = ("gymnasium",)


def run(effort: Effort = Effort.FULL) -> dict[str, Any]:
    """Plant every cause on a loaded machine; return the place at which it is named."""
    with doctor.busy_processes(os.cpu_count() or 1):
        return doctor.run(effort, at_once=3)

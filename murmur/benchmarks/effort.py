"""Extents of a benchmark's measurement."""

from enum import StrEnum
from typing import TypeVar

T = TypeVar("T")


class Effort(StrEnum):
    """Extent of a measurement.

    Attributes:
        SMOKE: one measurement of some seconds that only shows that the benchmark runs.
        QUICK: rough measurement.
        FULL: careful measurement, which may be kept as a result.
    """

    SMOKE = "smoke"
    QUICK = "quick"
    FULL = "full"

    def choose(self, smoke: T, quick: T, full: T) -> T:
        """Return the one of three values that belongs to this effort."""
        return {Effort.SMOKE: smoke, Effort.QUICK: quick, Effort.FULL: full}[self]

"""Processes that are held on one core each."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from murmur.shared.process.errors import ConfigError

CAN_PIN = hasattr(os, "sched_setaffinity")  # Linux


def two_cores() -> tuple[int, int]:
    """Choose two cores that this process may use.

    Raises:
        ConfigError: if there is one.
    """
    if not CAN_PIN:
        return 0, 1
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise ConfigError(
            f"two learners on a core each need two cores; this process may use {len(cores)}: "
            "give it two, or measure on another machine"
        )
    return cores[0], cores[1]


@contextmanager
def started_on(cores: Sequence[int]) -> Iterator[None]:
    """Pin processes that are started in this block to these cores; without Linux to none.

    Children take the cores of the thread that starts them, and so do their threads and children.
    """
    if not CAN_PIN:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)

"""NVTX ranges for Nsight Systems: the ledger's states, drawn beside kernels and graph launches.

`murmur profile --nsys` prints the command that sets NVTX_VARIABLE. Without it nothing is called.
"""

import os
from collections.abc import Callable

import torch

from learner_service.telemetry.profile_files import NVTX_VARIABLE
from shared.process.process import logger


class _Ranges:
    """A thread's present state as an NVTX range. Used by that thread."""

    def __init__(self) -> None:
        self._open = False

    def __call__(self, state: str) -> None:
        if self._open:
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]
        torch.cuda.nvtx.range_push(state)  # type: ignore[no-untyped-call]
        self._open = True


def nvtx_ranges() -> Callable[[str], None] | None:
    """A ledger's watcher that draws its thread's states; None unless NVTX_VARIABLE is set to 1."""
    if os.environ.get(NVTX_VARIABLE) != "1":
        return None
    try:
        torch.cuda.nvtx.mark("murmur")  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        logger.warning("%s=1 has no effect: %s", NVTX_VARIABLE, error)
        return None
    return _Ranges()

"""A pretended CUDA device: arithmetic on the CPU, and a report of what would fail on a GPU.

    with pretend_cuda() as cuda:
        ...  # torch has a CUDA device here, in threads started here too
    assert not cuda.report.faults

Every tensor carries the device that it would be on, every operation the stream that it is issued
on. `Kind` lists what is reported, each with file and line. A graph records its operations and calls
them again at every replay, so that a captured update can be compared with an eager one bit for bit.
"""

from .machine import Machine
from .patches import pretend_cuda
from .report import Fault, Kind, Report

__all__ = ["Fault", "Kind", "Machine", "Report", "pretend_cuda"]

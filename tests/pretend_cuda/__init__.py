"""CUDA, pretended on the CPU: real arithmetic, and a report of what a GPU would not forgive.

    with pretend_cuda() as cuda:
        ...  # code that asks torch for CUDA gets it
    assert not cuda.report.faults

Tensors carry the device that they would be on; every operation carries the stream that it was
issued on. What is reported, each with file and line, is listed in `Kind`. A graph records its
operations and calls them again when it is replayed, so that what a captured update computes can be
compared with the eager one to the bit.
"""

from .machine import Machine
from .patches import pretend_cuda
from .report import Fault, Kind, Report

__all__ = ["Fault", "Kind", "Machine", "Report", "pretend_cuda"]

"""Conversion of NVML's numbers."""


def cuda_version(number: int) -> str:
    """Format NVML's number of a CUDA version: 12040 is 12.4."""
    return f"{number // 1000}.{number % 1000 // 10}"

"""What NVML's numbers mean."""


def cuda_version(number: int) -> str:
    """CUDA's version from NVML's number: 12040 is 12.4."""
    return f"{number // 1000}.{number % 1000 // 10}"

"""What the device is, and which precision suits it."""

import os
import shutil
from importlib.util import find_spec

import torch

from shared.config import LearnerConfig
from shared.errors import ResourceError


def select_device(config: LearnerConfig) -> torch.device:
    """The device to learn on.

    Raises:
        ResourceError: if CUDA is asked for and not to be had, saying why.
    """
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        torch.set_num_threads(config.num_threads or os.cpu_count() or 1)
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ResourceError(
            f"learner.device is cuda, but {why_no_cuda()}; set learner.device=cpu or auto"
        )
    # TF32 and autotuned convolutions: shapes are static here, so the choice is made once.
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    return torch.device("cuda")


def why_no_cuda() -> str:
    """Why torch has no CUDA device, in words."""
    if torch.version.cuda is None:
        return f"this build of torch ({torch.__version__}) has no CUDA"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return f"torch cannot start CUDA: {' '.join(str(error).split())}"
    return "torch sees no CUDA device"


def require_compiler(device: torch.device) -> None:
    """Refuse early what torch.compile would fail at in the first update.

    Raises:
        ResourceError: naming what is missing.
    """
    if device.type == "cuda":
        if find_spec("triton") is None:
            raise ResourceError(
                "learner.compile = true needs the package triton on CUDA; install it, or leave "
                "learner.compile out"
            )
        return
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise ResourceError(
            f"learner.compile = true needs a C++ compiler on the CPU, and '{compiler}' is not on "
            "the path; install one, name it in CXX, or leave learner.compile out"
        )


def resolve_precision(config: LearnerConfig, device: torch.device) -> str:
    """fp32, bf16 or fp16: as asked, or what the device is best at."""
    if config.precision != "auto":
        return config.precision
    if device.type != "cuda":
        return "fp32"
    return "bf16" if torch.cuda.is_bf16_supported() else "fp16"

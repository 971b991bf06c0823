"""Choice of the device, and of the precision that suits it."""

import ctypes
import os
import shutil
import time
import warnings
from importlib.util import find_spec

import torch

from murmur.shared.config.learner import LearnerConfig
from murmur.shared.process.errors import ResourceError

_SIDE, _BUDGET_S = 256, 0.02  # of a product to time: an emulated one takes 0.1 s
_M_ARENA_MAX, _M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -8, -1, -3  # of glibc's malloc.h


def keep_freed_memory() -> None:
    """Let the C library keep what is freed, in pieces up to 32 MiB, for what is allocated next.

    An update frees all its tensors and the next one allocates tensors of the same sizes. By itself
    glibc gives them back to the system in between, and each page that comes again costs a fault and
    is zeroed: 1500 to 4300 in an update of MASAC with eight agents. So nothing at the heap's end is
    given back, and all threads share one heap: a thread's own heap has at most 64 MiB, and glibc
    returns it as soon as it is empty. `malloc_trim` still gives back all that is free.

    Pieces of 32 MiB and more are mapped by themselves, as ever: in the heap they would leave gaps
    that the next ones do not fit, and a batch would take up to twice the memory. More is also
    refused by older versions of glibc.

    It is for the whole process; call it before there are threads. Without glibc it does nothing.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return
    libc.mallopt(_M_ARENA_MAX, 1)
    libc.mallopt(_M_TRIM_THRESHOLD, -1)  # never
    libc.mallopt(_M_MMAP_THRESHOLD, 32 << 20)


def select_device(config: LearnerConfig) -> torch.device:
    """The device to learn on.

    Raises:
        ResourceError: if CUDA is requested but not available, with the reason.
    """
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        torch.set_num_threads(config.num_threads or 1)
        return torch.device("cpu")
    if not torch.cuda.is_available():
        fix = "set learner.device=cpu or auto"
        if config.pipeline == "sync":
            fix = (
                "the config.yaml of a sync run names the device that it began on. To continue or "
                "evaluate it on this machine's CPU, add --set learner.device=cpu "
                "--set learner.precision=fp32: from there its numbers differ from those of the GPU"
            )
        raise ResourceError(f"learner.device is cuda, but {why_no_cuda()}; {fix}")
    # A thread of autograd has no context before its first product; torch makes one, and warns.
    warnings.filterwarnings("ignore", "Attempting to run cuBLAS, but there was no current CUDA")
    # Autotuned convolutions: the choice is made once for each shape. It may differ from run to run,
    # which the sync pipeline promises not to. Without graphs acting batches have any size: then
    # each new size would be tuned while environments wait.
    lockstep = config.pipeline == "sync"
    torch.backends.cudnn.benchmark = not lockstep and config.cuda_graph
    torch.backends.cudnn.deterministic = lockstep
    if lockstep:
        # Our own operations have one order of summation; this is for networks of other packages.
        # Where there is no such algorithm, torch warns and continues.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.set_float32_matmul_precision("high")  # TF32
    return torch.device("cuda")


def choose_own_gpu(config: LearnerConfig) -> None:
    """Let this process see one GPU alone, by LOCAL_RANK, where torchrun has started several.

    Nothing is done if it sees one already, or none. Call it before anything uses CUDA.

    Raises:
        ResourceError: if there are fewer GPUs than learners.
    """
    local_rank = os.environ.get("LOCAL_RANK", "")
    if config.device == "cpu" or not local_rank.isdecimal():
        return
    count = torch.cuda.device_count()
    if count < 2:
        return
    if int(local_rank) >= count:
        raise ResourceError(
            f"learner {local_rank} of this machine has no GPU: there are {count}; start at most "
            f"{count} learners (--nproc-per-node), or set learner.device=cpu"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    own = visible.split(",")[int(local_rank)] if visible else local_rank
    os.environ["CUDA_VISIBLE_DEVICES"] = own


def restore_generator(generator: torch.Generator, state: torch.Tensor) -> bool:
    """Continue with a checkpoint's random numbers; returns whether that was possible.

    It is not, and nothing is done, if they are a CPU's and the generator a GPU's, or the reverse.
    """
    if state.numel() != generator.get_state().numel():
        return False
    generator.set_state(state.cpu())
    return True


def why_no_cuda() -> str:
    """Why torch has no CUDA device, as text."""
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


def product_seconds(side: int, dtype: torch.dtype, device: torch.device, budget_s: float) -> float:
    """Seconds of a matrix product: the best of as many as fit into the budget, after a warm-up.

    Args:
        side: rows and columns of the square matrices.
        dtype: dtype of the matrices.
        device: device that multiplies.
        budget_s: seconds; the warm-up's two products and one more are done in any case.
    """
    a = torch.randn(side, side, device=device).to(dtype)

    def once() -> float:
        start = time.perf_counter()
        a @ a
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    once()
    once()
    end = time.monotonic() + budget_s
    best = once()
    while time.monotonic() < end:
        best = min(best, once())
    return best


def times_as_long_as_fp32(dtype: torch.dtype) -> float:
    """The time of a matrix product on the CPU, as a multiple of that in fp32: 100 if emulated."""
    ours, fp32 = (
        product_seconds(_SIDE, x, torch.device("cpu"), _BUDGET_S) for x in (dtype, torch.float32)
    )
    return ours / fp32


def half_precision() -> str:
    """The current CUDA device's 16-bit precision: bf16 if it has it in hardware, else fp16."""
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"

"""Where to learn, and why not there."""

import ctypes
import subprocess
import sys

import pytest
import torch

from murmur.learner_service.device.device import (
    require_compiler,
    restore_generator,
    select_device,
    why_no_cuda,
)
from murmur.learner_service.device.precision import Precision
from murmur.shared.config.learner import LearnerConfig
from murmur.shared.process.errors import ResourceError

FAULTS = """
import ctypes, resource, sys, threading
from murmur.learner_service.device.device import keep_freed_memory

if sys.argv[1] == "keep":
    keep_freed_memory()

# Tensors' memory without their small parts, of which one at the heap's end keeps all that is below.
libc = ctypes.CDLL(None)
libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]

def write() -> None:
    pieces = [libc.malloc(16 << 20) for _ in range(4)]
    for piece in pieces:
        ctypes.memset(piece, 1, 16 << 20)
    for piece in pieces:
        libc.free(piece)

def count() -> None:
    for _ in range(3):
        write()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        write()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

count()
thread = threading.Thread(target=count)  # a learner's updates are made on one
thread.start()
thread.join()
"""


@pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"),
    reason="needs glibc",
)
def test_memory_that_is_freed_is_taken_again_without_page_faults() -> None:
    def faults(how: str) -> list[int]:
        command = [sys.executable, "-c", FAULTS, how]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        return [int(count) for count in done.stdout.split()]

    given_back = faults("give back")
    assert all(10 * kept < min(given_back) for kept in faults("keep"))


without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")


@pytest.fixture(autouse=True)
def _keep_settings() -> object:
    """What select_device changes for the whole process."""
    threads, cudnn = torch.get_num_threads(), torch.backends.cudnn
    kept = cudnn.benchmark, cudnn.deterministic, torch.get_float32_matmul_precision()
    yield
    torch.set_num_threads(threads)
    cudnn.benchmark, cudnn.deterministic = kept[:2]
    torch.set_float32_matmul_precision(kept[2])


@without_cuda
def test_cuda_that_is_not_there_is_an_error_that_says_why() -> None:
    with pytest.raises(ResourceError, match=r"device is cuda, but .+; set learner\.device=cpu"):
        select_device(LearnerConfig(device="cuda"))
    reason = why_no_cuda()
    assert "CUDA" in reason
    assert "\n" not in reason


@without_cuda
def test_sync_run_of_a_gpu_says_how_to_continue_elsewhere() -> None:
    with pytest.raises(ResourceError, match=r"began on\. To continue .* --set learner\.device=cpu"):
        select_device(LearnerConfig(device="cuda", pipeline="sync"))


@without_cuda
def test_auto_falls_to_the_cpu() -> None:
    assert select_device(LearnerConfig(device="auto", num_threads=1)).type == "cpu"


def test_the_cpu_gets_the_threads_that_are_asked_for() -> None:
    assert select_device(LearnerConfig(device="cpu", num_threads=1)) == torch.device("cpu")
    assert torch.get_num_threads() == 1


def test_compiling_without_a_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", sys.executable)
    require_compiler(torch.device("cpu"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ResourceError, match=r"'no-such-compiler' is not on the path; install one"):
        require_compiler(torch.device("cpu"))


def test_precision_is_as_asked_or_what_suits_the_device() -> None:
    cpu = torch.device("cpu")
    assert Precision.of(LearnerConfig(), cpu).name == "fp32"
    assert Precision.of(LearnerConfig(precision="bf16"), cpu).name == "bf16"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_auto_takes_cuda_and_half_precision() -> None:
    device = select_device(LearnerConfig(device="auto"))
    assert device.type == "cuda"
    assert Precision.of(LearnerConfig(), device).name in ("bf16", "fp16")


def test_random_numbers_continue_only_on_their_kind_of_device() -> None:
    one, other = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    torch.rand(3, generator=one)
    assert restore_generator(other, one.get_state())
    assert torch.equal(torch.rand(2, generator=other), torch.rand(2, generator=one))
    before = other.get_state()
    assert not restore_generator(other, torch.zeros(16, dtype=torch.uint8))  # as CUDA has them
    assert torch.equal(other.get_state(), before)

"""Augmentation of a batch on the device, beside a loop over its images with OpenCV.

32 images of 512 x 512 bytes with masks of 19 classes, two pairs of them swapped by flips. The
device's path takes the batch as it lies on the device; the loop takes images as OpenCV decodes
them, does the same to each with the same parameters, leaves out what a sample was not drawn for,
and stacks what a network is fed. Both on one core, in turns, in CPU time. What the device path
launches and copies is counted on a pretended GPU. Where there is CUDA: the same path eagerly and as
a graph, and kornia's AugmentationSequential with the same bounds.
"""

import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import cv2
import psutil
import torch
from torch import Tensor

from murmur.benchmarks._augment_loop import ImageLoop
from murmur.benchmarks.effort import Effort
from murmur.doctor.machine import ROOT
from murmur.env_service.sources.size import sample_arrays
from murmur.learner_service.device.cuda_graph import CALLS_TO_CAPTURE, Captured, Graphs
from murmur.learner_service.device.device import keep_freed_memory
from murmur.learner_service.preprocess.augment.building import build_augment
from murmur.learner_service.preprocess.augment.presets import (
    STRENGTHS,
    Draws,
    SampleAugment,
)
from murmur.shared.config.experiment import AugmentConfig
from murmur.shared.wire.samples import SampleSpec

DESCRIPTION = (
    "augmentation of 32 images of 512 x 512 on the device beside an OpenCV loop (targets: 40 "
    "launches of standard, no copy; CUDA: 12 times the loop on a core, 2 times kornia's)"
)
NEEDS = ("cv2",)

FLIP_PAIRS = ((4, 5), (6, 7))
_CLASSES, _OUTSIDE = 19, 255
_SPEC = SampleSpec(
    "faces",
    sample_arrays((512, 512)),
    (1, 1),
    "0" * 64,
    tuple(map(str, range(_CLASSES))),
    _OUTSIDE,
    FLIP_PAIRS,
)
_PRESETS = ("minimal", "standard", "strong")
_CPU = torch.device("cpu")
LARGEST_DIFFERENCE = 0.02  # of the two paths' images, on average, as a share of the range


def run(effort: Effort = Effort.FULL) -> dict[str, Any]:
    """Measure both paths by preset."""
    keep_freed_memory()
    count, side = effort.choose((2, 64), (8, 256), (32, 512))
    rounds = effort.choose(1, 5, 15)
    presets = effort.choose(("standard",), _PRESETS, _PRESETS)
    threads = torch.get_num_threads(), cv2.getNumThreads()
    torch.set_num_threads(1)
    cv2.setNumThreads(1)
    try:
        batch = make_batch(count, side)
        result: dict[str, Any] = {
            "images": count,
            "side": side,
            "one core, CPU-ms of a batch": {p: _on_cpu(p, batch, rounds) for p in presets},
            "on a pretended GPU": {p: count_launches(p) for p in presets},
        }
        if torch.cuda.is_available():
            cpu = result["one core, CPU-ms of a batch"]
            result["CUDA, ms of a batch"] = {
                p: _on_cuda(p, batch, effort.choose(3, 50, 200), cpu[p]["OpenCV loop"])
                for p in presets
            }
    finally:
        torch.set_num_threads(threads[0])
        cv2.setNumThreads(threads[1])
    return result | {"load_average": psutil.getloadavg()[0]}


def make_batch(count: int, side: int) -> dict[str, Tensor]:
    """Draw smooth colored images, and masks of blocks."""
    random = torch.Generator().manual_seed(0)
    coarse = torch.rand(count, 3, 9, 9, generator=random)
    image = torch.nn.functional.interpolate(coarse, (side, side), mode="bicubic").clamp(0, 1)
    blocks = torch.randint(_CLASSES, (count, 1, 8, 8), generator=random).float()
    mask = torch.nn.functional.interpolate(blocks, (side, side)).squeeze(1)
    return {"image": image.mul(255).round().to(torch.uint8), "mask": mask.to(torch.uint8)}


def _augment(preset: str, device: torch.device) -> SampleAugment:
    config = AugmentConfig.model_validate({"preset": preset})
    found = build_augment(config, _SPEC, device)
    assert isinstance(found, SampleAugment)
    return found


def both(
    preset: str, batch: Mapping[str, Tensor], seed: int, device: torch.device = _CPU
) -> tuple[Any, Any]:
    """Return both paths, device and loop, as calls without arguments, with the same parameters."""
    drawn = Draws(STRENGTHS[preset], _CPU)(len(batch["image"]), torch.Generator().manual_seed(seed))
    augment, loop = _augment(preset, device), ImageLoop(FLIP_PAIRS, _OUTSIDE)
    there = [{name: x.to(device) for name, x in of.items()} for of in (batch, drawn)]
    images = batch["image"].permute(0, 2, 3, 1).contiguous().numpy()
    numbers = {name: x.numpy() for name, x in drawn.items()}
    return (
        partial(augment.apply, *there),
        partial(loop, images, batch["mask"].numpy(), numbers),
    )


def _on_cpu(preset: str, batch: Mapping[str, Tensor], rounds: int) -> dict[str, float]:
    """Measure medians of both in turns; other parameters in each round."""
    spent: dict[str, list[float]] = {"device path": [], "OpenCV loop": []}
    ratios, difference = [], 0.0
    for turn in range(rounds + 1):
        times, outs = [], []
        for name, call in zip(spent, both(preset, batch, turn), strict=True):
            started = time.process_time()
            outs.append(call())
            times.append((time.process_time() - started) * 1e3)
            if turn:
                spent[name].append(times[-1])
        ratios.append(times[0] / times[1])
        difference = max(difference, _difference(outs[0], outs[1]))
    assert difference < LARGEST_DIFFERENCE, f"the two paths differ by {difference:.3f}"
    medians = {name: statistics.median(times) for name, times in spent.items()}
    return medians | {
        "device path / OpenCV loop": statistics.median(ratios[1:]),
        "mean difference of images": difference,
    }


def _difference(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    return float((ours["image"] - theirs["image"]).abs().mean())


def count_launches(preset: str) -> dict[str, int]:
    """Count launches, synchronizations and copies of a call; without a checkout of murmur none.

    They do not depend on the size of images.
    """
    folder = str(ROOT / "tests")
    if not (ROOT / "tests" / "pretend_cuda").is_dir():
        return {}
    sys.path.append(folder)
    try:
        pretend = import_module("pretend_cuda")
    finally:
        sys.path.remove(folder)
    gpu, copies = torch.device("cuda"), 0
    with pretend.pretend_cuda() as machine:
        batch = {name: x.to(gpu) for name, x in make_batch(2, 16).items()}
        augment, generator = _augment(preset, gpu), torch.Generator(gpu).manual_seed(0)
        augment(batch, generator)  # makes the constants of this size
        transfer = machine.transfer

        def counted(*arguments: Any) -> None:  # noqa: ANN401
            nonlocal copies
            copies += 1
            transfer(*arguments)

        machine.transfer = counted
        machine.launches.clear()
        machine.waits.clear()
        augment(batch, generator)
        launches = machine.launches[threading.current_thread().name].total()
        waits = sum(sum(counts.values()) for counts in machine.waits.values())
    return {"launches": launches, "synchronisations": waits, "copies from or to the host": copies}


def _kornia(preset: str) -> Callable[[Tensor, Tensor], Any]:
    """Return AugmentationSequential with a preset's bounds, for images [B, 3, H, W] and masks."""
    import kornia.augmentation as ka

    s, parts = STRENGTHS[preset], []
    parts.append(ka.RandomHorizontalFlip(p=s.flip_probability))
    if s.rotation_probability:
        parts.append(ka.RandomRotation(s.rotation_degrees, p=s.rotation_probability))
        parts.append(
            ka.RandomAffine(
                0.0,
                translate=(s.shift, s.shift),
                scale=(1 - s.scale, 1 + s.scale),
                p=s.affine_probability,
            )
        )
        parts.append(ka.ColorJitter(s.brightness, s.contrast, s.saturation, p=s.color_probability))
    if s.blur_probability:
        parts.append(ka.RandomGaussianBlur((3, 3), s.blur_sigma, p=s.blur_probability))
    sequence: Callable[[Tensor, Tensor], Any] = ka.AugmentationSequential(
        *parts, data_keys=["input", "mask"]
    )
    return sequence


def _on_cuda(
    preset: str, batch: Mapping[str, Tensor], repeats: int, loop_ms: float
) -> dict[str, float]:
    """Measure means over repeats, in ms of wall time, and the host's waits."""
    calls = device_calls(preset, batch, torch.device("cuda"))
    table = {name: call_ms(call, repeats, torch.device("cuda")) for name, call in calls.items()}
    kornia = calls["kornia's AugmentationSequential"]
    return table | {
        "OpenCV loop on a core / eager": loop_ms / table["eager"],
        "OpenCV loop on a core / graph": loop_ms / table["graph"],
        "kornia's / eager": table["kornia's AugmentationSequential"] / table["eager"],
        "kornia's / graph": table["kornia's AugmentationSequential"] / table["graph"],
        "kornia's on the host: synchronisations": float(_host_waits(kornia)),
        "eager: synchronisations": float(_host_waits(calls["eager"])),
    }


def device_calls(
    preset: str, batch: Mapping[str, Tensor], device: torch.device
) -> dict[str, Callable[[], object]]:
    """Augment the batch on the device: eagerly, as a graph, and by kornia if it is installed."""
    there = {name: x.to(device) for name, x in batch.items()}
    augment, generator = _augment(preset, device), torch.Generator(device).manual_seed(0)
    captured = Captured("augment", lambda x: augment(x, generator), Graphs(device), [generator])
    calls: dict[str, Callable[[], object]] = {
        "eager": lambda: augment(there, generator),
        "graph": lambda: captured(there),
    }
    if find_spec("kornia") is not None:
        sequence = _kornia(preset)
        calls["kornia's AugmentationSequential"] = lambda: sequence(
            there["image"].float() / 255, there["mask"].unsqueeze(1).float()
        )
    return calls


def call_ms(call: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Measure the mean wall time of a captured call, waiting for the device once at the end."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for _ in range(CALLS_TO_CAPTURE + 3):
        call()
    wait()
    started = time.perf_counter()
    for _ in range(repeats):
        call()
    wait()
    return (time.perf_counter() - started) / repeats * 1e3


def loop_ms(preset: str, batch: Mapping[str, Tensor], rounds: int) -> float:
    """Measure the loop's median CPU time over the batch's images, on one core and thread."""
    threads, spent = cv2.getNumThreads(), []
    cv2.setNumThreads(1)
    try:
        for turn in range(rounds + 1):
            _, loop = both(preset, batch, turn)
            started = time.process_time()
            loop()
            spent.append((time.process_time() - started) * 1e3)
    finally:
        cv2.setNumThreads(threads)
    return statistics.median(spent[1:])


def difference_on(preset: str, batch: Mapping[str, Tensor], device: torch.device) -> float:
    """Return the mean difference of the images of both paths, as a share of the range."""
    ours, theirs = (call() for call in both(preset, batch, 1, device))
    return _difference({"image": ours["image"].to(_CPU)}, theirs)


def _host_waits(call: Callable[[], object]) -> int:
    """Count synchronizations and copies between host and device that a profiler sees in a call."""
    kinds = (torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as profile:
        call()
    waits = ("cudaStreamSynchronize", "Memcpy HtoD", "Memcpy DtoH")
    return sum(event.count for event in profile.key_averages() if event.key.startswith(waits))

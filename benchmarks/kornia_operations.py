"""Our operations on images beside kornia's: CPU time in turns, and launches on a pretended GPU.

    python -m benchmarks.kornia_operations --save

Each pair computes the same from the same 32 images of 256 x 256 bytes, with a parameter for each
image; results that differ by more than a pixel's edge stop it. A ratio above 1 means that kornia
costs more.
"""

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any, cast

import kornia.enhance
import kornia.filters
import kornia.geometry.transform
import torch
from torch import Tensor

from murmur.benchmarks.augment import make_batch
from murmur.doctor.machine import ROOT
from murmur.learner_service.layers.resizing import Resize
from murmur.learner_service.preprocess.augment import photometry
from murmur.learner_service.preprocess.augment.shift import RandomShift
from murmur.learner_service.preprocess.augment.warp import (
    coordinates,
    flip_image,
    sources,
    warp_image,
)
from murmur.results import provenance, require_clean_source, run_command, save_result

_LIMITS = {"time": 1.2, "launches": 1.5}
_PAD = 4
_LARGEST_DIFFERENCE = 0.01  # mean, as a share of the range
Pair = tuple[Callable[[], Tensor], Callable[[], Tensor]]


def pairs(images: Tensor) -> dict[str, Pair]:
    """Return our call and kornia's, by operation.

    Args:
        images: [N, 3, H, W] float in [0, 1].
    """
    device, n = images.device, len(images)
    height, width = images.shape[-2:]

    def each(low: float, high: float) -> Tensor:
        return torch.linspace(low, high, n).to(device)

    flip = torch.where(each(0, 1) > 0.5, -1.0, 1.0)
    angle, scale = each(-0.2, 0.2), each(0.9, 1.1)
    right, down = each(-0.1, 0.1), each(0.1, -0.1)
    bright, contrast, saturation = each(0.8, 1.2), each(1.2, 0.8), each(0.9, 1.1)
    sigma = each(0.1, 2.0)
    by = torch.randint(2 * _PAD + 1, (2, n), generator=torch.Generator().manual_seed(0)).to(device)
    one, shift = torch.ones(n).to(device), RandomShift((), _PAD, device)
    pixels = coordinates(device, (height, width))
    half = Resize((height, width), (height // 2, width // 2)).to(device)
    centre = torch.tensor([[(width - 1) / 2, (height - 1) / 2]]).to(device).expand(n, 2)
    both_scales = scale.unsqueeze(1).expand(n, 2)
    degrees = torch.rad2deg(angle)
    move = torch.stack((right * width / 2, down * height / 2), 1)
    shifted = (_PAD - by.flip(0).T).float()
    geometry, enhance, filters = kornia.geometry.transform, kornia.enhance, kornia.filters

    def our_warp() -> Tensor:
        grid = sources(pixels, one, angle, scale, (right, down))
        return warp_image(images, grid)

    def their_warp() -> Tensor:
        matrix = geometry.get_affine_matrix2d(move, centre, both_scales, -degrees)
        return cast(
            Tensor, geometry.warp_affine(images, matrix[:, :2], (height, width), align_corners=True)
        )

    def their_flip() -> Tensor:
        return torch.where(flip.view(-1, 1, 1, 1) < 0, geometry.hflip(images), images)

    def our_colors() -> Tensor:
        return photometry.jitter(images.clone(), bright, contrast, saturation)

    def their_colors() -> Tensor:
        found = enhance.adjust_brightness_accumulative(images, bright)
        found = enhance.adjust_contrast_with_mean_subtraction(found, contrast)
        return cast(Tensor, enhance.adjust_saturation_with_gray_subtraction(found, saturation))

    def their_blur() -> Tensor:
        return cast(Tensor, filters.gaussian_blur2d(images, 3, sigma.unsqueeze(1).expand(n, 2)))

    def their_shift() -> Tensor:
        found = geometry.translate(images, shifted, padding_mode="border", align_corners=True)
        return cast(Tensor, found)

    def their_resize() -> Tensor:
        size = height // 2, width // 2
        return cast(Tensor, geometry.resize(images, size, align_corners=False, antialias=True))

    return {
        "rotation, scale, shift": (our_warp, their_warp),
        "flip": (lambda: flip_image(images, flip), their_flip),
        "brightness, contrast, saturation": (our_colors, their_colors),
        "blur": (lambda: photometry.blur(images, sigma), their_blur),
        "random shift by whole pixels": (lambda: shift.apply(images, by), their_shift),
        "resizing to half": (lambda: half(images), their_resize),
    }


def times(calls: Pair, rounds: int) -> tuple[float, float, float]:
    """Return CPU-ms of both, medians, and the median of the ratios kornia's / ours, in turns."""
    spent: tuple[list[float], list[float]] = [], []
    for _ in range(rounds + 1):
        for call, into in zip(calls, spent, strict=True):
            began = time.process_time()
            call()
            into.append((time.process_time() - began) * 1e3)
    ours, theirs = (of[1:] for of in spent)
    ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
    return statistics.median(ours), statistics.median(theirs), statistics.median(ratios)


def launches() -> dict[str, tuple[int, int]]:
    """Return the launches of both calls on a pretended GPU, by operation."""
    folder = str(ROOT / "tests")
    sys.path.append(folder)
    try:
        pretend = import_module("pretend_cuda")
    finally:
        sys.path.remove(folder)
    found = {}
    with pretend.pretend_cuda() as machine:
        images = torch.rand(4, 3, 16, 16).to(torch.device("cuda"))
        for name, calls in pairs(images).items():
            counts = []
            for call in calls:
                call()  # makes the constants of this size
                machine.launches.clear()
                call()
                counts.append(machine.launches[threading.current_thread().name].total())
            found[name] = counts[0], counts[1]
    return found


def run(rounds: int) -> dict[str, dict[str, float | str]]:
    """Return the table: operation -> times, launches, ratios, whose serves."""
    torch.set_num_threads(1)
    images = make_batch(32, 256)["image"] / 255
    counted, table = launches(), dict[str, dict[str, float | str]]()
    for name, calls in pairs(images).items():
        difference = float((calls[0]() - calls[1]()).abs().mean())
        if difference > _LARGEST_DIFFERENCE:
            raise AssertionError(f"{name}: the two differ by {difference:.3f} on average")
        ours, theirs, ratio = times(calls, rounds)
        mine, other = counted[name]
        serves = ratio <= _LIMITS["time"] and other <= _LIMITS["launches"] * mine
        table[name] = {
            "our CPU-ms": ours,
            "kornia's CPU-ms": theirs,
            "ratio of times": ratio,
            "our launches": mine,
            "kornia's launches": other,
            "ratio of launches": other / mine,
            "mean difference": difference,
            "within both limits": "kornia" if serves else "own",
        }
    return table


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=25, help="pairs of calls of each operation")
    parser.add_argument("--save", action="store_true", help="keep it in benchmarks/results")
    parser.add_argument("--dirty", action="store_true", help="save from source not committed")
    arguments = parser.parse_args()
    if arguments.save:
        require_clean_source(arguments.dirty)
    origin = provenance("benchmarks.kornia_operations")
    table = run(arguments.rounds)
    print(json.dumps(table, indent=2))
    if arguments.save:
        result: dict[str, Any] = {"limits, kornia's / ours": _LIMITS, "operations": table}
        print(f"written: {save_result('kornia-operations', result, origin)}")


if __name__ == "__main__":
    run_command(main)

"""Augmentations on the pretended GPU: no wait, no copy, capturable, as many launches as claimed."""

import threading
from typing import Any

import pytest
import torch

from learner_service.augment import Augment, build_augment, build_rl_augment
from learner_service.runtime.cuda_graph import CALLS_TO_CAPTURE, Captured, Graphs
from shared.augmentation import AugmentConfig
from shared.config import validate
from shared.spec import ArraySpec, Discrete, EnvSpec
from tests.pretend_cuda import Kind, pretend_cuda

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SPEC = EnvSpec("toy", 2, (ArraySpec("image", "uint8", (3, 12, 12)),), Discrete(3))


def build(options: dict[str, Any], device: torch.device) -> Augment:
    config = validate(AugmentConfig, options)
    if config.preset == "random-shift":
        found = build_rl_augment(config, SPEC, device)
        assert found is not None
        return found
    return build_augment(config, device, flip_pairs=[(1, 2)])


def batch(preset: str) -> dict[str, torch.Tensor]:
    agents = (2,) if preset == "random-shift" else ()
    generator = torch.Generator().manual_seed(5)
    return {
        "image": torch.randint(
            0, 256, (6, *agents, 3, 12, 12), dtype=torch.uint8, generator=generator
        ),
        "mask": torch.randint(0, 5, (6, 12, 12), dtype=torch.uint8, generator=generator),
    }


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({"preset": "minimal"}, 20),
        ({"preset": "standard"}, 40),
        ({"preset": "strong", "mixup": 0.3, "cutmix": 0.3}, 80),
        ({"preset": "random-shift"}, 5),
        ({"preset": "random-shift", "colour": True}, 30),
    ],
    ids=str,
)
def test_captured_augmentation_is_clean_and_equals_the_cpus(
    options: dict[str, Any], most: int
) -> None:
    preset = options["preset"]
    given, calls = batch(preset), CALLS_TO_CAPTURE + 3
    generator = torch.Generator().manual_seed(3)
    plain = build(options, CPU)
    expected = [plain(given, generator) for _ in range(calls)]
    with pretend_cuda() as cuda:
        augment, source = build(options, GPU), torch.Generator(GPU).manual_seed(3)
        there = {name: x.pin_memory().to(GPU, non_blocking=True) for name, x in given.items()}
        augment(there, source)  # makes the constants of this size
        cuda.launches.clear()
        cuda.waits.clear()
        augment(there, source)
        launches = cuda.launches[threading.current_thread().name].total()
        augmented = Captured("augment", lambda x: augment(x, source), Graphs(GPU), [source])
        found = [augmented(there) for _ in range(CALLS_TO_CAPTURE + 1)][-1]
        replays = cuda.launches[threading.current_thread().name]["graph replay"]
        waits = {thread: dict(counts) for thread, counts in cuda.waits.items()}
        last = {name: x.cpu() for name, x in found.items()}
        faults = [str(f) for f in cuda.report.faults if f.kind != Kind.SYNC]
    assert not faults
    assert not waits
    assert launches <= most
    assert replays == 2
    assert all(torch.equal(last[name], expected[-1][name]) for name in expected[-1])

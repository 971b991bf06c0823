"""Augmentations on the pretended GPU: no wait, no copy, capturable, as many launches as claimed."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from murmur.env_service.sources.size import sample_arrays
from murmur.learner_service.device.cuda_graph import CALLS_TO_CAPTURE, Captured, Graphs
from murmur.learner_service.preprocess.augment.base import Augment
from murmur.learner_service.preprocess.augment.building import build_augment, build_rl_augment
from murmur.shared.config.experiment import AugmentConfig
from murmur.shared.config.section import validate
from murmur.shared.config.symmetry import ArrayChange, Symmetry
from murmur.shared.wire.samples import SampleSpec
from murmur.shared.wire.spec import AGENT_CELL, STATE, ArraySpec, Discrete, EnvSpec
from tests.pretend_cuda import Kind, pretend_cuda
from tests.pretend_cuda.cases import SIDE, Case, make_spec
from tests.pretend_cuda.driven import DrivenRun
from tests.pretend_cuda.known import ALLOWED, unknown

CPU, GPU = torch.device("cpu"), torch.device("cuda")
TURN = Symmetry("turn", (ArrayChange("image", turns=1),), (1, 2, 0))
SPEC = EnvSpec(
    "toy", 2, (ArraySpec("image", "uint8", (3, 12, 12)),), Discrete(3), symmetries=(TURN,)
)
RL = ("random-shift", "symmetry")

SAMPLES = SampleSpec(
    "toy", sample_arrays((12, 16)), (1, 1), "0" * 64, tuple("abcde"), flip_pairs=((1, 2),)
)


def build(options: dict[str, Any], device: torch.device) -> Augment:
    config = validate(AugmentConfig, options)
    if config.preset in RL:
        found = build_rl_augment(config, SPEC, device)
        assert found is not None
        return found
    return build_augment(config, SAMPLES, device)


def batch(preset: str) -> dict[str, torch.Tensor]:
    agents = (2,) if preset in RL else ()
    generator = torch.Generator().manual_seed(5)
    found = {
        "image": torch.randint(
            0, 256, (6, *agents, 3, 12, 12), dtype=torch.uint8, generator=generator
        ),
        "mask": torch.randint(0, 5, (6, 12, 12), dtype=torch.uint8, generator=generator),
        "action": torch.randint(0, 3, (6, 2), dtype=torch.int32, generator=generator),
    }
    if preset == "symmetry":
        del found["mask"]  # of actions, there
    return found


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({"preset": "minimal"}, 20),
        ({"preset": "standard"}, 40),
        ({"preset": "strong", "mixup": 0.3, "cutmix": 0.3}, 80),
        ({"preset": "random-shift"}, 5),
        ({"preset": "random-shift", "color": True}, 30),
        ({"preset": "symmetry"}, 8),
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


def symmetric(space: str) -> EnvSpec:
    """The spec of a space with a symmetry of everything that it has."""
    spec = make_spec(space)
    maps = ("drawn", "board", STATE) if space == "images" else ()
    changes = [ArrayChange(name, turns=1) for name in maps]
    changes.append(ArrayChange("view", signs=(-1.0, 1, 1, 1, 1)))
    if maps:
        cell = ArrayChange(AGENT_CELL, order=(1, 0), signs=(-1.0, 1.0), offsets=(SIDE - 1.0, 0.0))
        changes.append(cell)
    discrete = isinstance(spec.action, Discrete)
    action = (1, 2, 3, 0) if discrete else (1, 0)
    signs = () if discrete else (1.0, -1.0)
    return replace(spec, symmetries=(Symmetry("all", tuple(changes), action, signs),))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case("mappo", "discrete", "shared", True, "fp32"), marks=pytest.mark.long),
        pytest.param(Case("coma", "images", "shared", False, "fp32"), marks=pytest.mark.long),
        pytest.param(Case("maddpg", "continuous", "own", False, "fp32"), marks=pytest.mark.long),
        pytest.param(Case("masac", "continuous", "own", False, "fp32"), marks=pytest.mark.long),
        Case("qmix", "images", "shared", False, "fp32"),
    ],
    ids=str,
)
def test_a_run_with_symmetries_is_clean(case: Case, tmp_path: Path) -> None:
    updates = CALLS_TO_CAPTURE + 1
    config = case.config(augment={"preset": "symmetry"})
    with pretend_cuda(ALLOWED) as cuda:
        with DrivenRun(config, symmetric(case.space), tmp_path) as run:
            run.play_until(updates, run.player(3), run.player(2))
        assert run.updates >= updates
        assert not run.run.context.learner.algorithm.graphs.fallbacks
    assert not unknown(list(cuda.report.faults))

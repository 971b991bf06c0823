"""Segmentation: its schedule and average by hand, what it learns, graphs, checkpoints."""

import copy
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from murmur.learner_service.algorithms.segmentation import (
    Config,
    Segmentation,
    masks_of,
    network_input,
)
from murmur.learner_service.device.precision import Precision
from murmur.learner_service.learning.returns import target_of
from murmur.learner_service.learning.supervised import build_supervised
from murmur.learner_service.learning.supervised_network import (
    decay_after,
    follow,
    learning_rate,
)
from murmur.learner_service.storage.samples import SampleBatch
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.config.section import validate
from murmur.shared.process.errors import ConfigError, SpecError
from murmur.shared.wire.samples import SampleSpec
from murmur.shared.wire.spec import ArraySpec
from tests.learner_service.algorithms.test_captured_updates import tensors
from tests.learner_service.toys import CPU
from tests.pretend_cuda import pretend_cuda
from tests.pretend_cuda.known import ALLOWED, unknown

GPU = torch.device("cuda", 0)
SIDE, COUNT = 16, 8
SPEC = SampleSpec(
    "squares",
    (
        ArraySpec("image", "uint8", (3, SIDE, SIDE), per_agent=False),
        ArraySpec("mask", "uint8", (SIDE, SIDE), per_agent=False),
    ),
    (COUNT, COUNT),
    "0" * 64,
    ("floor", "square", "stripe"),
)
HERE = {
    "learned*": "the test reads what updates give",
    "SupervisedNetwork.__init__*": "before training",
}
UNET = {"name": "unet", "channels": (8, 8), "groups": 2}
SEGFORMER = {
    "name": "segformer",
    **{"widths": (8, 8), "depths": (1, 1), "heads": (1, 2), "reductions": (2, 1), "decoder": 8},
}


def squares(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Images with a bright square, a dark stripe and ignored pixels, and their masks."""
    random = np.random.default_rng(seed)
    image = random.integers(90, 120, (COUNT, 3, SIDE, SIDE), np.uint8)
    mask = np.zeros((COUNT, SIDE, SIDE), np.uint8)
    for each, classes in zip(image, mask, strict=True):
        x, y = random.integers(0, SIDE - 5, 2)
        classes[y : y + 5, x : x + 5] = 1
        classes[:, (x + 7) % SIDE] = 2
        each[:, classes == 1] += 100
        each[:, classes == 2] -= 80
    mask[:, 0, 0] = 255
    return torch.from_numpy(image), torch.from_numpy(mask)


def build(
    network: Mapping[str, Any] = UNET,
    device: torch.device = CPU,
    precision: str = "fp32",
    spec: SampleSpec = SPEC,
    augment: Mapping[str, Any] | None = None,
    **options: Any,
) -> Segmentation:
    given = {"name": "segmentation", "batch_size": 4, "warmup_epochs": 1, **options}
    config = {
        **{"source": {"name": "faces"}, "algorithm": given, "network": network},
        **{"augment": augment or {}, "run": {"seed": 5}},
    }
    whole = validate(ExperimentConfig, config)
    algorithm = build_supervised(whole, spec, Precision(precision, device), device)
    assert isinstance(algorithm, Segmentation)
    return algorithm


def batches(updates: int, device: torch.device = CPU, start: int = 0) -> list[SampleBatch]:
    """Two of each epoch; the last one is smaller."""
    image, mask = (x.to(device) for x in squares())
    found = []
    for update in range(start, updates):
        rows = slice(0, 4) if update % 2 == 0 else slice(4, COUNT - 1)
        index = torch.arange(COUNT)[rows]
        arrays = {"image": image[rows], "mask": mask[rows]}
        found.append(SampleBatch(arrays, index, update // 2, update % 2 == 0, update % 2 == 1))
    return found


def test_learning_rate_by_hand() -> None:
    config = Config(epochs=10, lr=1.0, warmup_epochs=2, final_lr_fraction=0.2)
    rates = [learning_rate(config, u, 2) for u in (0, 3, 4, 12, 20, 25)]
    # 4 updates of warm-up: 1/4, 4/4; then 16 of cosine: 1, half way 0.2 + 0.8 / 2, the end 0.2
    assert rates == pytest.approx([0.25, 1, 1, 0.6, 0.2, 0.2])


def test_average_by_hand() -> None:
    assert decay_after(0, 0.99) == pytest.approx(1 / 10)
    assert decay_after(10, 0.99) == pytest.approx(11 / 20)
    assert decay_after(10_000, 0.99) == 0.99
    network = nn.Linear(1, 1, bias=False)
    nn.init.constant_(network.weight, 2.0)
    average = target_of(network).eval()
    nn.init.constant_(network.weight, 6.0)
    follow(average, network, torch.tensor(0.25))
    assert average.weight.item() == 3  # 2 + (6 - 2) / 4
    assert not average.weight.requires_grad


def test_bytes_and_unit_floats_are_the_same_input() -> None:
    image = torch.tensor([0, 51, 255], dtype=torch.uint8)
    torch.testing.assert_close(network_input(image), torch.tensor([-2.0, -1.2, 2.0]))
    torch.testing.assert_close(network_input(image / 255), network_input(image))


def test_mixed_masks_share_each_image() -> None:
    one, two = torch.zeros(2, 3, 3), torch.ones(2, 3, 3)
    assert [s.tolist() for _, s in masks_of({"mask": one})] == [[1, 1]]
    pairs = masks_of({"mask": one, "mask_b": two, "mix": torch.tensor([1.0, 0.25])})
    assert [s.tolist() for _, s in pairs] == [[1, 0.25], [0, 0.75]]


@pytest.mark.parametrize("network", [UNET, SEGFORMER], ids=lambda n: n["name"])
def test_squares_are_learned(network: Mapping[str, Any]) -> None:
    algorithm = build(network, epochs=30, lr=5e-3, ema_decay=0.9, balance=0.5)
    image, mask = squares(seed=1)
    before = algorithm.evaluate([(image, mask)])
    for batch in batches(60):
        scalars = algorithm.update(batch)
    after = algorithm.evaluate([(image[:5], mask[:5]), (image[5:], mask[5:])])
    assert before["f_score"] < 0.5
    assert after["f_score"] > 0.9 if network is UNET else after["f_score"] > before["f_score"] + 0.2
    assert after["majority_f_score"] < 0.4
    assert all(math.isfinite(x) for x in scalars.values())


def test_evaluation_counts_every_pixel_once() -> None:
    algorithm = build()
    image, mask = squares()
    predicted = algorithm.make_policy().act({"image": image}, None)["mask"]
    wanted = np.zeros((3, 3), np.int64)
    for t, p in zip(mask.flatten().tolist(), predicted.flatten().tolist(), strict=True):
        if t != 255:
            wanted[t, p] += 1
    found = algorithm.confusion([(image[:3], mask[:3]), (image[3:], mask[3:])])
    assert (found == wanted).all()


def test_patience_ends_the_run_without_a_better_score() -> None:
    algorithm = build(patience=2)
    image, mask = squares()
    finished = []
    for _ in range(3):  # nothing is learned between them
        algorithm.evaluate([(image, mask)])
        finished.append(algorithm.finished)
    assert finished == [False, False, True]
    resumed = build(patience=2)
    resumed.load_state_dict(algorithm.state_dict())
    assert resumed.finished


def test_only_matrices_and_kernels_decay() -> None:
    algorithm = build(weight_decay=0.3)
    group, others = algorithm._optimizer.param_groups
    assert (group["weight_decay"], others["weight_decay"]) == (0.3, 0)
    assert group["decoupled_weight_decay"]
    assert all(p.ndim > 1 for p in group["params"])
    assert len(group["params"]) + len(others["params"]) == len([*algorithm.network.parameters()])


def test_rare_classes_weigh_more_by_the_pixels_seen() -> None:
    algorithm = build(balance=0.5)
    algorithm.update(batches(1)[0])
    _, mask = squares()
    counts = [int((mask[:4] == k).sum()) for k in range(3)]
    assert algorithm._pixels.count.tolist() == counts


def test_a_resumed_run_continues_to_the_bit() -> None:
    whole, first, second = (build(SEGFORMER, augment={"preset": "strong"}) for _ in range(3))
    for batch in batches(6):
        whole.update(batch)
    for batch in batches(3):
        first.update(batch)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for batch in batches(6, start=3):
        second.update(batch)
    ours, theirs = tensors(whole.state_dict()), tensors(second.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def learned(
    network: Mapping[str, Any],
    precision: str,
    augment: Mapping[str, Any],
    updates: int,
    captured: bool,
) -> tuple[Segmentation, Any]:
    """An algorithm after updates and evaluations in between, and what they gave."""
    algorithm = build(network, GPU, precision, augment=augment, balance=0.5, epochs=25)
    algorithm.graphs.enabled = captured
    image, mask = (x.to(GPU) for x in squares(seed=1))
    given = []
    for batch in batches(updates, GPU):
        given.append({k: float(v) for k, v in algorithm.update(batch).items()})
        if batch.epoch % 5 == 4 and batch.ends_epoch:
            given.append(algorithm.evaluate([(image[:4], mask[:4]), (image[4:], mask[4:])]))
    return algorithm, given


MIXED = {"preset": "progressive", "at": 5, "mixup": 0.3, "cutmix": 0.3}


@pytest.mark.parametrize(
    ("network", "precision", "augment", "updates"),
    [
        (SEGFORMER, "fp16", {"preset": "minimal"}, 12),
        pytest.param(SEGFORMER, "fp16", MIXED, 50, marks=pytest.mark.long),
        pytest.param(UNET, "fp32", MIXED, 50, marks=pytest.mark.long),
        pytest.param(UNET, "bf16", MIXED, 50, marks=pytest.mark.long),
    ],
    ids=["quick", "segformer-fp16", "unet-fp32", "unet-bf16"],
)
def test_captured_updates_equal_eager_ones(
    network: Mapping[str, Any], precision: str, augment: Mapping[str, Any], updates: int
) -> None:
    with pretend_cuda({**ALLOWED, **HERE}) as cuda:
        captured, ours = learned(network, precision, augment, updates, True)
        eager, theirs = learned(network, precision, augment, updates, False)
        faults = unknown(list(cuda.report.faults))
        weights = [tensors(a.state_dict()) for a in (captured, eager)]
    assert not faults
    assert ours == theirs
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
    phases = 2 if augment is MIXED else 1  # with two sizes of batch each; evaluations have one
    assert captured.graphs.replays["update"] == updates - phases * 2 * 3
    assert captured.graphs.replays["validate"] == max(0, 2 * (updates // 10) - 3)
    assert not captured.graphs.fallbacks


def test_augmentation_is_for_training_alone() -> None:
    plain, changed = build(), build(augment={"preset": "standard"})
    batch, pair = batches(1)[0], squares()
    assert plain.evaluate([pair]) == changed.evaluate([pair])
    assert plain.update(batch)["loss"] != changed.update(batch)["loss"]
    assert torch.equal(batch.arrays["image"], pair[0][:4])  # the store's samples stay


def test_augmentation_of_policies_is_refused() -> None:
    with pytest.raises(ConfigError, match="random-shift is for environments"):
        build(augment={"preset": "random-shift"})


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"image": (3, 8, 8)}, "source 'squares' has no such 'mask'"),
        ({"image": (1, 8, 8), "mask": (8, 8)}, r"of one size.*\(1, 8, 8\) and \(8, 8\)"),
        ({"image": (3, 8, 8), "mask": (8, 9)}, r"of one size.*\(3, 8, 8\) and \(8, 9\)"),
    ],
)
def test_samples_that_are_no_images_with_masks_are_refused(
    arrays: dict[str, tuple[int, ...]], words: str
) -> None:
    specs = tuple(ArraySpec(n, "uint8", s, per_agent=False) for n, s in arrays.items())
    spec = SampleSpec("squares", specs, (4, 4), "0" * 64, SPEC.classes)
    with pytest.raises(SpecError, match=words):
        build(spec=spec)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cross_entropy": 0, "dice": 0}, "there is nothing to learn from"),
        ({"class_weights": (1, 2, 3), "balance": 0.5}, "balance=0.5 would choose them"),
        ({"class_weights": (1, -2, 3)}, "must be numbers from 0 on"),
        ({"class_weights": (1, 2)}, r"has 2 numbers.*3 classes \(floor, square, stripe\)"),
        ({"learning_rate": 1}, "learning_rate"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build(**options)

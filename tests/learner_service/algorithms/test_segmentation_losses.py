"""Losses of pixels, by hand and against torch."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from murmur.learner_service.algorithms.segmentation import (
    cross_entropy,
    dice_loss,
    rarity_weights,
    target_shares,
)

EVEN = torch.ones(2)


def masks(rows: list[list[int]]) -> Tensor:
    """[1, H, W] uint8."""
    return torch.tensor([rows], dtype=torch.uint8)


def log_p(*pixels: tuple[float, ...]) -> Tensor:
    """[1, K, 1, W] log-probabilities of a row of pixels."""
    return torch.tensor(pixels).T[None, :, None].log()


def test_target_is_one_hot_and_empty_where_ignored() -> None:
    target = target_shares([(masks([[1, 255]]), torch.ones(1))], 2)
    assert target[0, :, 0].tolist() == [[0, 0], [1, 0]]


def test_target_of_two_masks_mixes_their_classes() -> None:
    pairs = [
        (masks([[0, 1, 255]]), torch.tensor([0.75])),
        (masks([[1, 1, 0]]), torch.tensor([0.25])),
    ]
    assert target_shares(pairs, 2)[0, :, 0].tolist() == [[0.75, 0, 0.25], [0.25, 1, 0]]


def test_cross_entropy_by_hand() -> None:
    target = target_shares([(masks([[0, 1, 255]]), torch.ones(1))], 2)
    p = log_p((0.5, 0.5), (0.75, 0.25), (0.1, 0.9))
    # even weights: (log 2 + log 4) / 2;  class 1 three times: (log 2 + 3 log 4) / 4
    even = (math.log(2) + math.log(4)) / 2
    tripled = (math.log(2) + 3 * math.log(4)) / 4
    torch.testing.assert_close(cross_entropy(p, target, EVEN), torch.tensor(even))
    weights = torch.tensor([1.0, 3.0])
    torch.testing.assert_close(cross_entropy(p, target, weights), torch.tensor(tripled))


def test_cross_entropy_equals_torchs_weighted_and_ignored() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 4, 5, 6, generator=generator)
    mask = torch.randint(0, 5, (2, 5, 6), generator=generator)
    mask[mask == 4] = 255
    weights = torch.tensor([1.0, 0.5, 2.0, 3.0])
    wanted = F.cross_entropy(logits, mask, weights, ignore_index=255)
    target = target_shares([(mask, torch.ones(2))], 4)
    torch.testing.assert_close(cross_entropy(logits.log_softmax(1), target, weights), wanted)


def test_dice_loss_by_hand() -> None:
    target = target_shares([(masks([[0, 1, 255]]), torch.ones(1))], 3)
    p = log_p((0.5, 0.25, 0.25), (0.25, 0.75, 0.0), (0.0, 1.0, 0.0))
    # class 0: 2 * 0.5 / (1 + 0.75) = 4/7; class 1: 2 * 0.75 / (1 + 1) = 3/4; class 2 is absent
    wanted = 1 - (4 / 7 + 3 / 4) / 2
    torch.testing.assert_close(dice_loss(p, target), torch.tensor(wanted))


def test_a_batch_of_ignored_pixels_costs_nothing() -> None:
    logits = torch.zeros(1, 2, 1, 2, requires_grad=True)
    target = target_shares([(masks([[255, 255]]), torch.ones(1))], 2)
    p = logits.log_softmax(1)
    loss = cross_entropy(p, target, EVEN) + dice_loss(p, target)
    loss.backward()
    assert loss.item() == 0
    assert logits.grad is not None
    assert not logits.grad.any()


def test_rarity_weights_by_hand() -> None:
    pixels = torch.tensor([100.0, 25.0, 0.0])
    assert rarity_weights(pixels, 0.5).tolist() == [1, 2, 10]  # sqrt 1, sqrt 4, sqrt 100
    assert rarity_weights(pixels, 1.0).tolist() == [1, 4, 10]  # 100 is more than 10
    assert rarity_weights(pixels, 0.0).tolist() == [1, 1, 1]

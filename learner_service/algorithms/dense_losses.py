"""Losses of logits for each pixel. Targets are shares of classes, so that images can be mixed."""

from collections.abc import Sequence

import torch
from torch import Tensor

from learner_service.group.group import ALONE, Group

_SMALL = 1e-6
_MOST_RARE = 10.0  # how many times the weight of the commonest pixel a class may have, at most


def target_shares(masks: Sequence[tuple[Tensor, Tensor]], num_classes: int) -> Tensor:
    """Share of each class in each pixel; 0 for all classes where a mask holds another number.

    T_k = sum_i share_i [mask_i = k]. With one mask of share 1 this is one-hot.

    Args:
        masks: ([B, H, W] class indices, [B] share) of each mask; shares of an image add up to 1.
        num_classes: K.

    Returns:
        [B, K, H, W] float32.
    """
    classes = torch.arange(num_classes, device=masks[0][0].device).view(1, -1, 1, 1)
    total: Tensor | None = None
    for mask, share in masks:
        shares = (mask.unsqueeze(1) == classes) * share.view(-1, 1, 1, 1)
        total = shares if total is None else total + shares
    assert total is not None
    return total


def cross_entropy(log_p: Tensor, target: Tensor, weights: Tensor, group: Group = ALONE) -> Tensor:
    """Cross-entropy, the weighted mean over all pixels that count; 0 if none does.

    -sum w_k T_k log p_k / sum w_k T_k, over pixels and classes.

    Args:
        log_p: [B, K, H, W] log-probabilities; carry gradient.
        target: [B, K, H, W] shares, see `target_shares`; 0 for all classes of an ignored pixel.
        weights: [K] of the classes.
        group: the mean is over the pixels of all its ranks.
    """
    weighted = target * weights.view(1, -1, 1, 1)
    sums = [(weighted * log_p).sum(), weighted.sum()]
    summed, weight = group.totals(sums)
    return -summed / weight.clamp_min(_SMALL)


def dice_loss(log_p: Tensor, target: Tensor, group: Group = ALONE) -> Tensor:
    """1 - Dice coefficient, the mean over the classes that the batch's targets hold.

    D_k = 2 sum T_k p_k / (sum T_k + sum p_k), over the pixels that count. Each class matters the
    same, whatever its size. Milletari, Navab, Ahmadi 2016, "V-Net" (arXiv:1606.04797), section 3.

    Args:
        log_p: [B, K, H, W] log-probabilities; carry gradient.
        target: [B, K, H, W] shares, see `target_shares`.
        group: the sums are over the pixels of all its ranks.
    """
    counts = target.sum(1, keepdim=True)  # [B, 1, H, W], 0 where a pixel is ignored
    p = log_p.exp() * counts
    over = (0, 2, 3)
    sums = [(p * target).sum(over), target.sum(over), p.sum(over)]  # [K]
    both, truth, predicted = group.totals(sums)
    present = (truth > 0).float()
    dice = 2 * both / (truth + predicted).clamp_min(_SMALL)
    return ((1 - dice) * present).sum() / present.sum().clamp_min(1)


def rarity_weights(pixels: Tensor, power: float) -> Tensor:
    """[K] weights that rise as a class gets rarer: (most / n_k)^power, at most _MOST_RARE.

    Args:
        pixels: [K] pixels of each class so far.
        power: 0: all classes weigh 1; 1: all classes together weigh the same.
    """
    counts = pixels.float().clamp_min(1)
    return (counts.max() / counts).pow(power).clamp_max(_MOST_RARE)

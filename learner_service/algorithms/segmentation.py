"""Semantic segmentation: a class for each pixel of an image, learned from images and masks.

Cross-entropy and Dice with class weights and an ignored index, AdamW with a warm-up and a cosine,
an average of the weights (see SupervisedNetwork). Evaluations use the average and count a confusion
matrix on the device, which is read once.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from murmur.learner_service.device.readback import to_host
from murmur.learner_service.layers.casting import cast_weights
from murmur.learner_service.layers.dense import build_dense
from murmur.learner_service.learning.confusion import SCORES, Counts, count_pairs, scores
from murmur.learner_service.learning.supervised import class_weights, image_size
from murmur.learner_service.learning.supervised_network import (
    NetworkConfig,
    NetworkPolicy,
    SupervisedNetwork,
    follow,
)
from murmur.learner_service.preprocess.augment.mixing import MASK_B, MIX
from murmur.learner_service.ranks.group import ALONE, Group
from murmur.learner_service.telemetry.figures import Figures, of_masks
from murmur.shared.wire.samples import IMAGE, MASK

SUPERVISED = True
_CENTRE, _SPREAD = 0.5, 0.25  # of images in 0..1: what the network is fed is about 0, of size 1
_SMALL = 1e-6
_MOST_RARE = 10.0  # how many times the weight of the commonest pixel a class may have, at most


class Config(NetworkConfig):
    """Options of segmentation."""

    cross_entropy: float = Field(1.0, ge=0, description="weight of the cross-entropy")
    dice: float = Field(1.0, ge=0, description="weight of the Dice loss")
    class_weights: tuple[float, ...] = Field(
        (), description="of each class in the cross-entropy, by index; empty: see balance"
    )
    balance: float = Field(
        0.0,
        ge=0,
        le=1,
        description="weight classes in the cross-entropy by their rarity so far: (most / n)^balance"
        ", at most 10; 0: all alike",
    )

    @model_validator(mode="after")
    def _learns(self) -> "Config":
        if not self.cross_entropy and not self.dice:
            raise ValueError("cross_entropy and dice are both 0: there is nothing to learn from")
        if self.class_weights and self.balance:
            raise ValueError(
                f"class_weights are given and balance={self.balance:g} would choose them: set "
                "balance to 0, or leave class_weights out"
            )
        if any(not 0 <= w < math.inf for w in self.class_weights):
            raise ValueError(f"class_weights {self.class_weights} must be numbers from 0 on")
        return self


def network_input(image: Tensor) -> Tensor:
    """[B, 3, H, W] uint8, or float in 0..1 -> float about 0."""
    unit = image.float() / 255 if image.dtype == torch.uint8 else image.float()
    return (unit - _CENTRE) / _SPREAD


def masks_of(batch: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Masks of a batch with the share of each: one, or the two of MixUp."""
    mask = batch[MASK]
    if MIX not in batch:
        return [(mask, torch.ones(len(mask), device=mask.device))]
    share = batch[MIX]
    return [(mask, share), (batch[MASK_B], 1 - share)]


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
        weights: [K] weights of the classes.
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


def any_loss(logits: Tensor) -> Tensor:
    """Both losses of logits [B, K, H, W], for any mask: what they keep for the backward pass."""
    log_p = logits.float().log_softmax(1)
    mask = torch.zeros_like(logits[:, 0], dtype=torch.uint8)
    target = target_shares([(mask, logits.new_ones(len(logits)))], logits.shape[1])
    weights = logits.new_ones(logits.shape[1])
    return cross_entropy(log_p, target, weights) + dice_loss(log_p, target)


class Pixels(nn.Module):
    """Pixels of each class that training has seen.

    Attributes:
        count: [K] float64.
    """

    STARTS_FRESH = True  # a fine-tuned run may learn from other images

    count: Tensor

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(num_classes, dtype=torch.float64))


class SegmentationPolicy(NetworkPolicy):
    """The averaged network, frozen: classes of images."""

    @torch.inference_mode()
    def act(
        self,
        observation: Mapping[str, Tensor],
        generator: torch.Generator | None,
        memory: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Classes of images.

        Args:
            observation: "image" [B, 3, H, W] uint8 of the size that was trained on.
            generator: unused.
            memory: unused.

        Returns:
            "mask" [B, H, W] uint8; "logits" [B, K, H, W] float32.
        """
        with self._precision.autocast():
            logits = self.network(network_input(observation[IMAGE])).float()
        return {MASK: logits.argmax(1).to(torch.uint8), "logits": logits}


class Segmentation(SupervisedNetwork):
    """Supervised algorithm that segments images. Used by the thread that learns."""

    POLICY, metrics = SegmentationPolicy, SCORES
    _config: Config

    def _build(self) -> None:
        """Logits of each pixel, and what counts pixels: of the classes, of an evaluation."""
        spec, classes = self._spec, len(self._spec.classes)
        size, weights = image_size(spec), class_weights(self._config.class_weights, spec)
        self.network = build_dense(self._network, size, classes, any_loss)
        self._weights = weights.to(self._device)
        self._pixels = Pixels(classes).to(self._device)
        self._matrix = torch.zeros(classes**2 + 1, dtype=torch.int64, device=self._device)
        self._counted = self._capture("validate", self._count)

    def _learn(self, rows: Mapping[str, Tensor], phase: str) -> dict[str, Tensor]:
        """The update, on the device from end to end; `phase` names the augmentation's kernels."""
        c = self._config
        seen = dict(rows) if self.augment is None else self.augment(rows, self._generator)
        # 1. Log-probabilities log p and targets T of each pixel, [B, K, H, W].
        with cast_weights(self._precision, self.network):
            logits = self.network(network_input(seen[IMAGE]))
        log_p = logits.float().log_softmax(1)
        target = target_shares(masks_of(seen), log_p.shape[1])
        # 2. Weights w of the classes [K], by the pixels n seen so far.
        pixels = target.sum((0, 2, 3))
        self._group.sum_([pixels])
        self._pixels.count.add_(pixels)
        weights = self._weights
        if c.balance:
            weights = rarity_weights(self._pixels.count, c.balance)
        # 3. L = a cross-entropy + b Dice.
        ce = cross_entropy(log_p, target, weights, self._group)
        dice = dice_loss(log_p, target, self._group)
        loss = c.cross_entropy * ce + c.dice * dice
        # 4. A step of AdamW down L, and the average: mean += share (theta - mean).
        norm = self._precision.step(
            loss, self._optimizer, self.network.parameters(), c.max_grad_norm
        )
        follow(self.average, self.network, self._share)
        # 5. How many pixels are right: the sum of T_k of the likeliest class k.
        right = target.gather(1, log_p.detach().argmax(1, keepdim=True))
        hits, pixels = self._group.totals([right.sum(), target.sum()])
        return {
            "loss": loss.detach(),
            "cross_entropy": ce.detach(),
            "dice": dice.detach(),
            "accuracy": hits / pixels.clamp_min(1),
            "grad_norm": norm,
        }

    def evaluate(self, batches: Iterable[tuple[Tensor, Tensor]]) -> dict[str, float]:
        """Scores of the averaged network, see `scores`; waits for the device once."""
        self._latest = self.confusion(batches)
        found = scores(self._latest)
        self._judge(found[self.metrics[0]])
        return found

    def figures(self, image: Tensor, mask: Tensor) -> Figures:
        """Return images with their masks and the predicted ones, and the confusion matrix."""
        image, mask, guess = to_host((image, mask, self._predict(image).to(torch.uint8)))
        return of_masks(image, mask, guess, self._latest, self._spec.classes)

    @torch.inference_mode()
    def _predict(self, image: Tensor) -> Tensor:
        """[B, H, W] classes that the averaged network gives the pixels of [B, 3, H, W]."""
        with cast_weights(self._precision, self.average):
            logits: Tensor = self.average(network_input(image))
        return logits.float().argmax(1)

    @torch.inference_mode()
    def confusion(self, batches: Iterable[tuple[Tensor, Tensor]]) -> Counts:
        """[K, K] pixels of class row that the averaged network takes for class column."""
        self._matrix.zero_()
        for image, mask in batches:
            self._counted({IMAGE: image, MASK: mask})
        self._group.sum_([self._matrix])  # of all ranks: they evaluate at once, and judge alike
        k = len(self._spec.classes)
        matrix: Counts = to_host(self._matrix[:-1].view(k, k)).numpy().copy()
        return matrix

    @torch.inference_mode()
    def _count(self, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Add a batch to the confusion matrix, on the device."""
        count_pairs(rows[MASK], self._predict(rows[IMAGE]), self._matrix)
        return {}


build = Segmentation

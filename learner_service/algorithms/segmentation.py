"""Semantic segmentation: a class for each pixel of an image, learned from images and masks.

Cross-entropy and Dice with class weights and an ignored index, AdamW (Loshchilov and Hutter 2019,
arXiv:1711.05101), a warm-up and a cosine (arXiv:1608.03983), an average of the weights. Evaluations
use the average and count a confusion matrix on the device, which is read once.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from learner_service.algorithms.averaging import averaged, decay_after, follow
from learner_service.algorithms.base import Policy
from learner_service.algorithms.confusion import SCORES, Counts, count_pairs, scores
from learner_service.algorithms.dense_losses import (
    cross_entropy,
    dice_loss,
    rarity_weights,
    target_shares,
)
from learner_service.algorithms.supervised import Supervised, SupervisedConfig
from learner_service.augment.mixing import MASK_B, MIX
from learner_service.networks.casting import cast_weights
from learner_service.networks.dense import build_dense
from learner_service.networks.dropout import draw_from
from learner_service.networks.snapshot import publish, snapshot
from learner_service.runtime.adam import Adam
from learner_service.runtime.precision import Precision
from learner_service.storage.sample_batch import SampleBatch
from shared.config import PluginConfig
from shared.errors import ConfigError, SpecError
from shared.samples import IMAGE, MASK, SampleSpec

SUPERVISED = True
_CENTRE, _SPREAD = 0.5, 0.25  # of images in 0..1: what the network is fed is about 0, of size 1


class Config(SupervisedConfig):
    """Options of segmentation."""

    lr: float = Field(8e-4, gt=0, description="AdamW's learning rate after the warm-up")
    warmup_epochs: float = Field(5.0, ge=0, description="over which it rises linearly from 0")
    final_lr_fraction: float = Field(
        0.01, ge=0, le=1, description="what is left of it at the end of the cosine"
    )
    weight_decay: float = Field(
        1e-4, ge=0, description="AdamW's, of matrices and kernels; biases and norms have none"
    )
    max_grad_norm: float = Field(1.0, ge=0, description="gradient norm is clipped; 0: never")
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
    ema_decay: float = Field(
        0.99,
        ge=0,
        lt=1,
        description="share of the averaged weights that an update keeps; evaluations, best.pt and "
        "exports use the average; 0: the last weights",
    )
    patience: int = Field(
        0, ge=0, description="evaluations without a better score after which the run ends; 0: never"
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


def learning_rate(config: Config, updates: float, per_epoch: int) -> float:
    """Learning rate of update `updates`, from 0: a linear warm-up, then half a cosine.

    With w updates of warm-up and n in all: lr (u + 1) / w while u < w, then
    lr (f + (1 - f) (1 + cos(pi (u - w) / (n - w))) / 2).

    Args:
        config: lr, warmup_epochs, epochs, final_lr_fraction (f).
        updates: u.
        per_epoch: updates of an epoch.
    """
    warm_up, total = config.warmup_epochs * per_epoch, config.epochs * per_epoch
    if updates < warm_up:
        return config.lr * min(1.0, (updates + 1) / warm_up)
    done = min(1.0, (updates - warm_up) / max(1.0, total - warm_up))
    share = config.final_lr_fraction
    return config.lr * (share + (1 - share) * (1 + math.cos(math.pi * done)) / 2)


def network_input(image: Tensor) -> Tensor:
    """[B, 3, H, W] uint8, or float in 0..1 -> float about 0."""
    unit = image.float() / 255 if image.dtype == torch.uint8 else image.float()
    return (unit - _CENTRE) / _SPREAD


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


class SegmentationPolicy(Policy):
    """The averaged network, frozen: classes of images."""

    def __init__(self, network: nn.Module, precision: Precision) -> None:
        self.network = snapshot(network, precision)
        self._precision = precision

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
            generator: not used.
            memory: not used.

        Returns:
            "mask" [B, H, W] uint8; "logits" [B, K, H, W] float32.
        """
        with self._precision.autocast():
            logits = self.network(network_input(observation[IMAGE])).float()
        return {MASK: logits.argmax(1).to(torch.uint8), "logits": logits}


class Segmentation(Supervised):
    """See the module. Used by the learner thread.

    Attributes:
        network: learns.
        average: of its weights; evaluated, published, exported.
    """

    metrics = SCORES

    def __init__(
        self,
        config: Config,
        spec: SampleSpec,
        network: PluginConfig,
        precision: Precision,
        device: torch.device,
        seed: int,
    ) -> None:
        """Build the network, its average and the optimiser.

        Raises:
            SpecError: if samples are not images with masks.
            ConfigError: if the network cannot take them, or class_weights do not fit the classes.
        """
        super().__init__(precision, device, seed)
        size = image_size(spec)
        self._config, self._spec = config, spec
        self.rows_per_update = config.batch_size
        at_once = config.batch_size * self._group.size
        self._per_epoch = max(1, -(-spec.size("train") // at_once))
        self._weights = class_weights(config, spec).to(device)
        classes = len(spec.classes)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.network = build_dense(network, size, classes, any_loss)
        self.average = averaged(self.network).to(device)
        self.network.to(device)
        draw_from(self.network, self._generator)
        self._pixels = Pixels(classes).to(device)
        self._rate = torch.zeros((), device=device)
        self._share = torch.zeros((), device=device)  # of the network in its average
        self._optimizer = Adam(
            decayed(self.network, config.weight_decay),
            self._rate,
            fused=True,
            capturable=device.type == "cuda",
            decoupled_weight_decay=True,
        )
        self._parts |= {
            "network": self.network,
            "average": self.average,
            "pixels": self._pixels,
            "optimizer": self._optimizer,
        }
        self._counts = {"updates": 0, "best_score": -1.0, "evaluations_since_best": 0}
        self._matrix = torch.zeros(classes**2 + 1, dtype=torch.int64, device=device)
        self._captured = self._capture("update", self._learn)
        self._counted = self._capture("validate", self._count)

    def update(self, batch: SampleBatch) -> dict[str, Tensor]:
        """One step on a batch of images and masks.

        Returns:
            loss, cross_entropy, dice (losses), accuracy of the pixels, grad_norm, lr.
        """
        c, updates = self._config, self._counts["updates"]
        phase = ""
        if self.augment is not None:
            self.augment.advance(batch.epoch, int(updates))
            phase = self.augment.phase
        self._rate.fill_(learning_rate(c, updates, self._per_epoch))
        self._share.fill_(1 - decay_after(updates, c.ema_decay))
        scalars = self._captured({name: batch.arrays[name] for name in (IMAGE, MASK)}, phase=phase)
        self._counts["updates"] += 1
        return {**scalars, "lr": self._rate.clone()}

    def _learn(self, rows: Mapping[str, Tensor], phase: str) -> dict[str, Tensor]:
        """The update, on the device from end to end; `phase` names the augmentation's kernels."""
        c = self._config
        seen = dict(rows) if self.augment is None else self.augment(rows, self._generator)
        # 1. Log-probabilities and targets of each pixel, [B, K, H, W].
        with cast_weights(self._precision, self.network):
            logits = self.network(network_input(seen[IMAGE]))
        log_p = logits.float().log_softmax(1)
        target = target_shares(masks_of(seen), log_p.shape[1])
        # 2. Weights of the classes [K], by the pixels seen so far.
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
        # 4. A step of AdamW; the average of the weights follows.
        norm = self._precision.step(
            loss, self._optimizer, self.network.parameters(), c.max_grad_norm
        )
        follow(self.average, self.network, self._share)
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
        found = scores(self.confusion(batches))
        counts, score = self._counts, found[self.metrics[0]]
        if score > counts["best_score"]:
            counts |= {"best_score": score, "evaluations_since_best": 0}
        else:
            counts["evaluations_since_best"] += 1
        self._note_patience()
        return found

    def _note_patience(self) -> None:
        stale = self._counts["evaluations_since_best"]
        self.finished = 0 < self._config.patience <= stale

    @torch.inference_mode()
    def confusion(self, batches: Iterable[tuple[Tensor, Tensor]]) -> Counts:
        """[K, K] pixels of class row that the averaged network takes for class column."""
        self._matrix.zero_()
        for image, mask in batches:
            self._counted({IMAGE: image, MASK: mask})
        self._group.sum_([self._matrix])  # of all ranks: they evaluate at once, and judge alike
        k = len(self._spec.classes)
        matrix: Counts = self._matrix[:-1].view(k, k).cpu().numpy().copy()
        return matrix

    @torch.inference_mode()
    def _count(self, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Add a batch to the confusion matrix, on the device."""
        with cast_weights(self._precision, self.average):
            logits = self.average(network_input(rows[IMAGE]))
        count_pairs(rows[MASK], logits.float().argmax(1), self._matrix)
        return {}

    def make_policy(self) -> SegmentationPolicy:
        """See Algorithm."""
        return SegmentationPolicy(self.average, self._precision)

    @torch.no_grad()
    def publish(self, policy: Policy) -> None:
        """See Algorithm."""
        assert isinstance(policy, SegmentationPolicy)
        publish(self.average, policy.network)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See Algorithm."""
        super().load_state_dict(state)
        self._note_patience()


def image_size(spec: SampleSpec) -> tuple[int, int]:
    """Height and width of a data set's images.

    Raises:
        SpecError: if its samples are not RGB images with masks of their size.
    """
    image, mask = spec.array(IMAGE), spec.array(MASK)
    for name, array in ((IMAGE, image), (MASK, mask)):
        if array is None or array.dtype != "uint8":
            raise SpecError(
                f"segmentation needs samples with '{IMAGE}' uint8 [3, H, W] and '{MASK}' uint8 "
                f"[H, W]; source '{spec.name}' has no such '{name}'"
            )
    assert image is not None
    assert mask is not None
    if len(image.shape) != 3 or image.shape[0] != 3 or mask.shape != image.shape[1:]:
        raise SpecError(
            f"segmentation needs '{IMAGE}' [3, H, W] and '{MASK}' [H, W] of one size; source "
            f"'{spec.name}' has {image.shape} and {mask.shape}"
        )
    return image.shape[1], image.shape[2]


def class_weights(config: Config, spec: SampleSpec) -> Tensor:
    """[K] configured weights of the classes; ones if there are none.

    Raises:
        ConfigError: if there is not one for each class.
    """
    given, classes = config.class_weights, spec.classes
    if given and len(given) != len(classes):
        raise ConfigError(
            f"algorithm.class_weights has {len(given)} numbers, source '{spec.name}' has "
            f"{len(classes)} classes ({', '.join(classes)}); give one for each"
        )
    return torch.tensor(given or [1.0] * len(classes))


def any_loss(logits: Tensor) -> Tensor:
    """Both losses of logits [B, K, H, W], for any mask: what they keep for the backward pass."""
    log_p = logits.float().log_softmax(1)
    mask = torch.zeros_like(logits[:, 0], dtype=torch.uint8)
    target = target_shares([(mask, logits.new_ones(len(logits)))], logits.shape[1])
    weights = logits.new_ones(logits.shape[1])
    return cross_entropy(log_p, target, weights) + dice_loss(log_p, target)


def masks_of(batch: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Masks of a batch with the share of each: one, or the two of MixUp."""
    mask = batch[MASK]
    if MIX not in batch:
        return [(mask, torch.ones(len(mask), device=mask.device))]
    share = batch[MIX]
    return [(mask, share), (batch[MASK_B], 1 - share)]


def decayed(network: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups: matrices and kernels decay, biases and norms do not."""
    weights = [p for p in network.parameters() if p.ndim > 1]
    others = [p for p in network.parameters() if p.ndim <= 1]
    groups = [{"params": weights, "weight_decay": weight_decay}]
    return [*groups, {"params": others, "weight_decay": 0.0}] if others else groups


build = Segmentation

"""The confusion matrix of a validation split, counted on the device, and its scores."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Counts = NDArray[np.int64]
SCORES = ("f_score", "miou", "accuracy", "majority_f_score")


def count_pairs(truth: Tensor, predicted: Tensor, into: Tensor) -> None:
    """Add pairs of classes to a matrix in place; never waits for the device.

    Args:
        truth: any shape, class indices; other numbers count nowhere.
        predicted: the same shape, class indices.
        into: [K * K + 1] int64; entry K t + p counts pixels of class t taken for p, the last entry
            all pixels that count nowhere.
    """
    num_classes = round((len(into) - 1) ** 0.5)
    t, p = truth.reshape(-1).long(), predicted.reshape(-1).long()
    cell = torch.where(t < num_classes, t * num_classes + p, num_classes**2)
    into.scatter_add_(0, cell, torch.ones_like(cell))  # whole numbers: their order is no matter


def f_scores(matrix: Counts) -> NDArray[np.float64]:
    """[K] F-score of each class, NaN of one that the truth does not hold.

    F = 2 TP / (2 TP + FP + FN).
    """
    hits, truth, predicted = matrix.diagonal(), matrix.sum(1), matrix.sum(0)
    return np.where(truth > 0, 2 * hits / np.maximum(truth + predicted, 1), np.nan)


def overlaps(matrix: Counts) -> NDArray[np.float64]:
    """[K] intersection over union of each class, NaN of one that the truth does not hold.

    IoU = TP / (TP + FP + FN).
    """
    hits, truth, predicted = matrix.diagonal(), matrix.sum(1), matrix.sum(0)
    return np.where(truth > 0, hits / np.maximum(truth + predicted - hits, 1), np.nan)


def majority_f_score(matrix: Counts) -> float:
    """F-score of calling every pixel the commonest class: the mean over the classes present."""
    truth = matrix.sum(1)
    guess = np.zeros_like(matrix)
    guess[:, truth.argmax()] = truth
    return float(np.nanmean(f_scores(guess)))


def scores(matrix: Counts) -> dict[str, float]:
    """Compute the scores of a confusion matrix; all 0 if it holds no pixel.

    Where the truth holds one class alone there is nothing to tell apart, and a network that knows
    no other class would score 1: f_score, miou and majority_f_score are 0.

    Args:
        matrix: [K, K] pixels of class row taken for class column.

    Returns:
        by the names of SCORES: f_score and miou, means over the classes that the truth holds;
        accuracy, the share of the pixels that are right; majority_f_score, see above.
    """
    total = matrix.sum()
    if not total:
        return dict.fromkeys(SCORES, 0.0)
    accuracy = int(matrix.trace()) / int(total)
    if np.count_nonzero(matrix.sum(1)) < 2:
        return {**dict.fromkeys(SCORES, 0.0), "accuracy": accuracy}
    found = (
        float(np.nanmean(f_scores(matrix))),
        float(np.nanmean(overlaps(matrix))),
        accuracy,
        majority_f_score(matrix),
    )
    return dict(zip(SCORES, found, strict=True))

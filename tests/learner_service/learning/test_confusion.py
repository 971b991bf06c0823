"""The confusion matrix and its scores, by hand."""

import numpy as np
import pytest
import torch

from murmur.learner_service.learning.confusion import (
    SCORES,
    count_pairs,
    f_scores,
    majority_f_score,
    overlaps,
    scores,
)

# Of class 0 three pixels are right and one is taken for 1; of class 1 two are right; no class 2,
# for which one pixel of class 1 is taken.
MATRIX = np.array([[3, 1, 0], [0, 2, 1], [0, 0, 0]])


def test_pairs_are_counted_and_other_classes_left_out() -> None:
    into = torch.zeros(10, dtype=torch.int64)
    truth = torch.tensor([0, 0, 0, 0, 1, 1, 1, 255, 3], dtype=torch.uint8)
    predicted = torch.tensor([0, 0, 0, 1, 1, 1, 2, 0, 0])
    count_pairs(truth[:4], predicted[:4], into)
    count_pairs(truth[4:], predicted[4:], into)
    assert (into[:-1].view(3, 3).numpy() == MATRIX).all()
    assert into[-1] == 2


def test_f_scores_and_overlaps_by_hand() -> None:
    # F: 2*3 / (4 + 3), 2*2 / (3 + 3); IoU: 3 / (4 + 3 - 3), 2 / (3 + 3 - 2)
    np.testing.assert_allclose(f_scores(MATRIX), [6 / 7, 4 / 6, np.nan])
    np.testing.assert_allclose(overlaps(MATRIX), [3 / 4, 2 / 4, np.nan])


def test_majority_calls_every_pixel_the_commonest_class() -> None:
    # class 0 everywhere: 2*4 / (4 + 7) for class 0, 0 for class 1
    assert majority_f_score(MATRIX) == pytest.approx(8 / 11 / 2)


def test_scores_are_means_over_the_classes_present() -> None:
    found = scores(MATRIX)
    assert found == pytest.approx(
        {
            "f_score": (6 / 7 + 4 / 6) / 2,
            "miou": (3 / 4 + 2 / 4) / 2,
            "accuracy": 5 / 7,
            "majority_f_score": 4 / 11,
        }
    )


def test_scores_of_one_class_alone_are_zero() -> None:
    # F of class 0 would be 2*9 / (10 + 9), and 1 for a network that knows no other class
    alone = scores(np.array([[9, 1], [0, 0]]))
    assert alone == {"f_score": 0, "miou": 0, "accuracy": 0.9, "majority_f_score": 0}
    assert scores(np.array([[10, 0], [0, 0]]))["f_score"] == 0


def test_scores_of_nothing_are_zero() -> None:
    empty = scores(np.zeros((2, 2), np.int64))
    assert empty == dict.fromkeys(SCORES, 0.0)

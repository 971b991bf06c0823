"""Augmentation: random shifts of images, mirror images of the world."""

from collections.abc import Mapping

import torch
from torch import Tensor
from typing_extensions import override

from learner_service.preprocess.augment.base import Augment
from learner_service.preprocess.transform import Rows, Transform


class Augmentation(Transform):
    """Changes what was seen and done at random.

    Advantages, targets and log probabilities stay: a symmetry changes none of them, if the policy
    that acted is as symmetric as its world (Mittal et al. 2024, "Symmetry Considerations for
    Learning Task Symmetric Robot Policies", arXiv:2403.04359).
    """

    draws = True

    def __init__(self, augment: Augment) -> None:
        self._augment = augment

    @override
    def draw(self, rows: Mapping[str, Tensor], generator: torch.Generator) -> Rows:
        return self._augment(rows, generator)

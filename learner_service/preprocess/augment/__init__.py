"""Augmentations of training batches on the device: geometry, colours, mixing, symmetries."""

from murmur.learner_service.preprocess.augment.base import Augment, Batch
from murmur.learner_service.preprocess.augment.building import build_augment, build_rl_augment

__all__ = ["Augment", "Batch", "build_augment", "build_rl_augment"]

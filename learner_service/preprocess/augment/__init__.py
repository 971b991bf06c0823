"""Augmentations of training batches on the device: geometry, colours, mixing, symmetries."""

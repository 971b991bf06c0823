"""Loop over images with OpenCV: the same augmentation as the device's, image by image."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from murmur.learner_service.preprocess.augment.photometry import NO_BLUR

Image = NDArray[np.uint8]


class ImageLoop:
    """Augmentation of images [H, W, 3] one by one; operations without effect are left out."""

    def __init__(self, flip_pairs: Sequence[tuple[int, int]], outside: int) -> None:
        self._outside = outside
        self._swapped = np.arange(256, dtype=np.uint8)
        for a, b in flip_pairs:
            self._swapped[[a, b]] = b, a
        self._levels = np.arange(256, dtype=np.float32)

    def __call__(
        self, images: Image, masks: Image, drawn: Mapping[str, NDArray[np.float32]]
    ) -> dict[str, Tensor]:
        """Augment images [N, H, W, 3] and masks [N, H, W] into the network's inputs."""
        found = [
            self._one(images[i], masks[i], {name: float(x[i]) for name, x in drawn.items()})
            for i in range(len(images))
        ]
        stacked = np.stack([image.transpose(2, 0, 1) for image, _ in found])
        return {
            "image": torch.from_numpy(stacked.astype(np.float32) * np.float32(1 / 255)),
            "mask": torch.from_numpy(np.stack([mask for _, mask in found])),
        }

    def _one(self, image: Image, mask: Image, drawn: Mapping[str, float]) -> tuple[Any, Any]:
        image, mask = self._move(image, mask, drawn)
        if drawn["flip"] < 0:
            mask = cv2.LUT(mask, self._swapped)
        if drawn.get("brightness", 1.0) != 1.0:
            image = self._colour(image, drawn)
        if drawn.get("sigma", NO_BLUR) != NO_BLUR:
            image = cv2.GaussianBlur(
                image, (3, 3), drawn["sigma"], borderType=cv2.BORDER_REFLECT_101
            )
        return image, mask

    def _move(self, image: Image, mask: Image, drawn: Mapping[str, float]) -> tuple[Any, Any]:
        """Flip, or flip, rotate, scale and shift in one warp."""
        still = {"angle": 0.0, "scale": 1.0, "right": 0.0, "down": 0.0}
        if all(drawn.get(name, value) == value for name, value in still.items()):
            if drawn["flip"] > 0:
                return image, mask
            return cv2.flip(image, 1), cv2.flip(mask, 1)
        h, w = mask.shape
        centre = (w - 1) / 2, (h - 1) / 2
        degrees = math.degrees(drawn["angle"])
        matrix = np.eye(3)
        matrix[:2] = cv2.getRotationMatrix2D(centre, degrees, drawn["scale"])
        if drawn["flip"] < 0:
            matrix = matrix @ np.array([[-1.0, 0, w - 1], [0, 1, 0], [0, 0, 1]])
        matrix[0, 2] += drawn["right"] * w / 2
        matrix[1, 2] += drawn["down"] * h / 2
        return (
            cv2.warpAffine(image, matrix[:2], (w, h), flags=cv2.INTER_LINEAR),
            cv2.warpAffine(
                mask,
                matrix[:2],
                (w, h),
                flags=cv2.INTER_NEAREST,
                borderMode=cv2.BORDER_CONSTANT,
                borderValue=self._outside,
            ),
        )

    def _colour(self, image: Image, drawn: Mapping[str, float]) -> Any:  # noqa: ANN401
        """Change brightness and contrast by tables, saturation by blending with the gray image."""
        bright = np.clip(np.rint(self._levels * drawn["brightness"]), 0, 255).astype(np.uint8)
        image = cv2.LUT(image, bright)
        mean = cv2.cvtColor(image, cv2.COLOR_RGB2GRAY).mean()
        c = drawn["contrast"]
        levels = np.clip(np.rint(self._levels * c + (1 - c) * mean), 0, 255).astype(np.uint8)
        image = cv2.LUT(image, levels)
        grey = cv2.cvtColor(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY), cv2.COLOR_GRAY2RGB)
        s = drawn["saturation"]
        return cv2.addWeighted(image, s, grey, 1 - s, 0)

"""Pictures of augmented images and their masks."""

import numpy as np
import torch
from numpy.typing import NDArray

from murmur.learner_service.export.segmentation import Trained
from murmur.learner_service.preprocess.augment.building import build_augment
from murmur.learner_service.telemetry.figures import painted, sheet, upright
from murmur.shared.wire.samples import IMAGE, MASK

Picture = NDArray[np.uint8]
_END = 1 << 40  # an epoch and an update after any that changes the preset


def augmented(trained: Trained, image: Picture, mask: Picture, count: int) -> Picture:
    """Draw an image and its mask as the last epochs may see them; the first column is as they are.

    Args:
        trained: trained run with the augmentation.
        image: [3, H, W] image.
        mask: [H, W] mask.
        count: number of augmented examples.
    """
    spec, cpu = trained.spec, torch.device("cpu")
    augment = build_augment(
        trained.config.augment, cpu, flip_pairs=spec.flip_pairs, ignore_index=spec.ignore_index
    )
    augment.advance(_END, _END)
    batch = {
        IMAGE: torch.from_numpy(image).expand(count, -1, -1, -1),
        MASK: torch.from_numpy(mask).expand(count, -1, -1),
    }
    seen = augment(batch, torch.Generator().manual_seed(0))
    images = (seen[IMAGE].clamp(0, 1) * 255).round().numpy()
    k = len(spec.classes)
    return sheet(
        [
            [upright(image), *(upright(each) for each in images)],
            [painted(mask, k), *(painted(each, k) for each in seen[MASK].numpy())],
        ]
    )

"""Requirements of segmentation on a data set: images, masks of their size, named classes."""

from collections.abc import Sequence

import torch
from torch import Tensor

from shared.process.errors import ConfigError, SpecError
from shared.wire.samples import IMAGE, MASK, SampleSpec


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


def class_weights(given: Sequence[float], spec: SampleSpec) -> Tensor:
    """[K] configured weights of the classes; ones if there are none.

    Raises:
        ConfigError: if there is not one for each class.
    """
    classes = spec.classes
    if given and len(given) != len(classes):
        raise ConfigError(
            f"algorithm.class_weights has {len(given)} numbers, source '{spec.name}' has "
            f"{len(classes)} classes ({', '.join(classes)}); give one for each"
        )
    return torch.tensor(given or [1.0] * len(classes))

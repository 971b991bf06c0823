"""Reduction of images before they are sent: downscaling and conversion to gray with OpenCV."""

import math
from collections.abc import Callable
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from murmur.shared.config.extras import missing_advice
from murmur.shared.process.errors import ConfigError
from murmur.shared.wire.timestep import Array

Pixels = Annotated[int, Field(ge=4, le=1024)]
Resize = Pixels | tuple[Pixels, Pixels] | Literal["auto", "none"]
_USUAL = 84  # pixels a side
_LARGE = 128 * 128  # pixels of an image that `auto` reduces
_COLOURS = 3


def reduced_shape(chw: tuple[int, ...], resize: Resize, gray: bool) -> tuple[int, ...]:
    """Return the shape [C, H, W] in which an image of bytes travels.

    Args:
        chw: shape of the image, [C, H, W].
        resize: size in pixels, of each side or as (height, width); "auto" or "none".
        gray: true for one channel in place of red, green and blue.

    Raises:
        ConfigError: if gray is set for an image that has neither one nor three channels.
    """
    c, h, w = chw
    if gray and c not in (1, _COLOURS):
        raise ConfigError(
            f"environment.gray: an image of {c} channels is not red, green and blue; set it to "
            "false"
        )
    if resize == "auto":
        size = (_USUAL, _USUAL) if h * w > _LARGE else (h, w)
    elif isinstance(resize, int):
        size = resize, resize
    else:
        size = (h, w) if resize == "none" else resize
    return (1 if gray else c, *size)


def reducing_writer(
    shape: tuple[int, ...], wanted: tuple[int, ...], *, channels_last: bool
) -> Callable[[Array, Any], None]:
    """Return a function of (place, image) that writes an image of the environment to its place.

    Args:
        shape: shape in the environment: [H, W], [C, H, W] or [H, W, C].
        wanted: shape of the place, [C, H, W].
        channels_last: true if the channels are at the end.

    Raises:
        ConfigError: if OpenCV is not installed.
    """
    chw = (1, *shape) if len(shape) == 2 else shape
    chw = (chw[2], *chw[:2]) if channels_last else chw
    try:
        import cv2
    except ImportError:
        raise ConfigError(
            f"images of {chw[1]} x {chw[2]} are to be made {wanted[1]} x {wanted[2]} "
            f"(environment.resize): {missing_advice('cv2', 'images')}; or set "
            "environment.resize: none, environment.gray: false"
        ) from None
    cv2.setNumThreads(1)  # a worker has one core
    gray, resize = wanted[0] != chw[0], wanted[1:] != chw[1:]
    height, width = wanted[1:]
    # Linear interpolation by up to 2 looks at every pixel; then exact means of whole blocks:
    # two to three times as fast as means of fractions of pixels, and within two levels of gray.
    folds = math.ceil(chw[1] / height / 2), math.ceil(chw[2] / width / 2)
    between = width * folds[1], height * folds[0]

    def write(place: Array, value: Any) -> None:
        image = np.asarray(value)
        if image.dtype != np.uint8:
            raise ValueError(f"has dtype {image.dtype}, its space says uint8")
        if image.shape != shape:
            raise ValueError(f"has shape {image.shape}, its space says {shape}")
        if image.ndim == 3 and not channels_last:
            image = image.transpose(1, 2, 0)
        if not image.flags.c_contiguous:
            image = np.ascontiguousarray(image)
        if gray:
            image = cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)
        if resize:
            image = cv2.resize(image, between, interpolation=cv2.INTER_LINEAR)
        if resize and max(folds) > 1:
            image = cv2.resize(image, (width, height), interpolation=cv2.INTER_AREA)
        place[...] = image if image.ndim == 2 else image.transpose(2, 0, 1)

    return write

"""Notices of what reading changes in an image or a mask, each kind said once for the first file."""

from pathlib import Path

from env_service.sources.decode import Header
from shared.notices import Notices

_IMAGES, _MASKS = "images", "masks"  # subjects
_TURNED = 5  # orientations of EXIF from here on swap width and height
_SAME_SHAPE = 0.01  # difference of two ratios of width and height that is rounding


def say_image_changes(
    notices: Notices, header: Header, file: Path, size: tuple[int, int], mask: Header
) -> None:
    """Say what an image loses on its way to RGB of 8 bits and the configured size.

    Args:
        notices: takes the statements.
        header: of the image's file.
        file: named in the text.
        size: (height, width) of samples.
        mask: header of its mask's file.
    """

    def say(kind: str, text: str) -> None:
        notices.say(kind, _IMAGES, f"{text}; the first such file is {file}")

    upright = header.height, header.width
    if header.orientation >= _TURNED:
        upright = header.width, header.height
    if header.orientation != 1 and not notices.said("orientation", _IMAGES):
        say(
            "orientation",
            f"images are turned upright by their EXIF orientation ({header.orientation}), masks "
            "are not turned: masks must be drawn on the upright image",
        )
    if upright != size and not notices.said("resized", _IMAGES):
        say("resized", _resized(upright, size))
    if header.depth > 8:
        say("depth", f"of {header.depth} bits of an image the upper 8 are kept")
    if header.alpha:
        say("alpha", "alpha of images is dropped: transparent pixels keep the color below")
    if header.channels < 3 and not header.palette:
        say("grey", "grey images become RGB with three equal channels")
    if header.kind == "jpeg" and header.channels > 3:
        say("cmyk", "CMYK images become RGB without their color profile")
    if header.frames:
        say("frames", "of animated images the first frame is kept")
    if mask.orientation != 1:
        notices.say(
            "orientation",
            _MASKS,
            f"EXIF orientation of masks is ignored; the mask of {file} has {mask.orientation}",
        )


def _resized(upright: tuple[int, int], size: tuple[int, int]) -> str:
    """Text about a change of size (height, width)."""
    (height, width), (rows, columns) = upright, size
    text = (
        f"images are resized from {width}×{height} to {columns}×{rows} (source.size), masks to the "
        "nearest pixel"
    )
    if abs(width / height * rows / columns - 1) > _SAME_SHAPE:
        text += f", and proportions change from {width / height:.2f} to {columns / rows:.2f}"
    return text


def say_mask_changes(notices: Notices, header: Header, file: Path) -> None:
    """Say what of a mask is not read.

    Args:
        notices: takes the statements.
        header: of the mask's file.
        file: named in the text.
    """

    def say(kind: str, text: str) -> None:
        notices.say(kind, _MASKS, f"{text}; the first such file is {file}")

    if header.palette:
        say("palette", "of masks with a palette the indices are the classes, not the colors")
    elif header.channels >= 3:
        say("channels", "of masks with three equal channels one is read")
    if header.alpha and not header.palette:
        say("alpha", "alpha of masks is ignored: transparent pixels have a class, too")
    if header.frames:
        say("frames", "of animated masks the first frame is read")

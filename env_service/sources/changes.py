"""Notices of changes that reading makes to images and masks, once per kind, for the first file."""

from collections.abc import Callable
from pathlib import Path

from murmur.env_service.sources.decode import Header
from murmur.shared.wire.notices import Notices

_IMAGES, _MASKS = "images", "masks"  # subjects
_TURNED = 5  # orientations of EXIF from here on swap width and height
_SAME_SHAPE = 0.01  # difference of two ratios of width and height that is rounding


def _sayer(notices: Notices, subject: str, file: Path) -> Callable[[str, str], None]:
    """Return a function that gives a notice of a kind, with its text, and names the file."""

    def say(kind: str, text: str) -> None:
        notices.say(kind, subject, f"{text}; the first such file is {file}")

    return say


def say_image_changes(notices: Notices, header: Header, file: Path) -> None:
    """Give notices of an image's losses in the conversion to RGB of 8 bits.

    Args:
        notices: collector of the notices.
        header: header of the image's file.
        file: path for the text.
    """
    say = _sayer(notices, _IMAGES, file)
    if header.orientation != 1 and not notices.said("orientation", _IMAGES):
        say(
            "orientation",
            f"images are turned upright by their EXIF orientation ({header.orientation}), masks "
            "are not turned: masks must be drawn on the upright image",
        )
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


def say_resized(notices: Notices, header: Header, file: Path, size: tuple[int, int]) -> None:
    """Give a notice that images are resized, and whether their proportions change.

    Args:
        notices: collector of the notice.
        header: header of the image's file.
        file: path for the text.
        size: (height, width) of samples.
    """
    height, width = header.height, header.width
    if header.orientation >= _TURNED:
        height, width = width, height
    if (height, width) == size or notices.said("resized", _IMAGES):
        return
    rows, columns = size
    text = (
        f"images are resized from {width}×{height} to {columns}×{rows} (source.size), masks to the "
        "nearest pixel"
    )
    if abs(width / height * rows / columns - 1) > _SAME_SHAPE:
        text += f", and proportions change from {width / height:.2f} to {columns / rows:.2f}"
    _sayer(notices, _IMAGES, file)("resized", text)


def say_mask_changes(notices: Notices, header: Header, file: Path) -> None:
    """Give notices of a mask's parts that are not read.

    Args:
        notices: collector of the notices.
        header: header of the mask's file.
        file: path for the text.
    """
    say = _sayer(notices, _MASKS, file)
    if header.palette:
        say("palette", "of masks with a palette the indices are the classes, not the colors")
    elif header.channels >= 3:
        say("channels", "of masks with three equal channels one is read")
    if header.alpha and not header.palette:
        say("alpha", "alpha of masks is ignored: transparent pixels have a class, too")
    if header.frames:
        say("frames", "of animated masks the first frame is read")
    if header.orientation != 1:
        say("orientation", f"the EXIF orientation of masks ({header.orientation}) is ignored")

"""A folder of images and masks: images/*.jpg or *.png, masks/*.png with the same stems.

    data/
      images/0001.jpg     JPEG or PNG, any size; its EXIF orientation is applied
      masks/0001.png      class indices: grey values of any depth, or palette indices; or the
                          option `values`, the number that stands for each class
      classes.txt         one name a line, by index; or the option `classes`
      train.txt valid.txt optional: one stem or file name a line; else a seeded split

A fault of the whole folder is refused when the source is built. A file that cannot be used is a
broken sample, with the file's name.
"""

import hashlib
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator

from murmur.env_service.sources.changes import say_image_changes, say_mask_changes, say_resized
from murmur.env_service.sources.decode import (
    decode_image,
    decode_mask,
    planes,
    read_file,
    resize,
    same_size,
)
from murmur.env_service.sources.size import Size, height_and_width, sample_arrays
from murmur.env_service.sources.source import BrokenSample, check_classes
from murmur.shared.config import Section
from murmur.shared.process.errors import ConfigError
from murmur.shared.wire.notices import Notices
from murmur.shared.wire.samples import MAX_CLASSES, SPLITS, SampleSpec
from murmur.shared.wire.timestep import Array

_IMAGES, _MASKS = (".jpg", ".jpeg", ".png"), (".png",)
_MAX_LIST_BYTES = 1 << 26
_IGNORED = 255  # in samples, where source.values says what the numbers of files are
_LOOK_AT = 8  # masks that are looked at when the source is built


class Config(Section):
    """Options of `folder`."""

    path: str = Field(description="the folder with images and masks")
    size: Size = Field(
        256, description="samples are resized to it: a number, or [height, width], pixels"
    )
    classes: tuple[str, ...] = Field(
        (), description="names of the classes, by index; empty: the lines of classes.txt"
    )
    ignore_index: int = Field(
        255, ge=0, le=255, description="number in mask files whose pixels count nowhere"
    )
    values: tuple[Annotated[int, Field(ge=0, le=255)], ...] = Field(
        (),
        description="number that stands for each class in mask files, by index, such as [0, 255]; "
        "empty: the index",
    )
    flip_pairs: tuple[tuple[str, str], ...] = Field(
        (), description="names of classes that a horizontal flip swaps: [[left eye, right eye]]"
    )
    train: int = Field(0, ge=0, description="number of training samples used; 0: all")
    valid: int = Field(0, ge=0, description="number of validation samples used; 0: all")
    valid_share: float = Field(
        0.1, gt=0, lt=1, description="without train.txt and valid.txt: share that validates"
    )
    split_seed: int = Field(0, ge=0, description="without the lists: another seed, another split")

    @field_validator("classes", "values")
    @classmethod
    def _name_one_class_each(cls, given: tuple[str | int, ...]) -> tuple[str | int, ...]:
        for one in given:
            if given.count(one) > 1:
                raise ValueError(f"{one!r} stands for two classes; give each class one of its own")
        return given


class Folder:
    """A source of images and masks in a folder.

    Attributes:
        notices: collector of notices about values that reading changes, guesses or leaves out.
    """

    def __init__(self, config: Config) -> None:
        """List the files and choose the splits.

        Raises:
            ConfigError: if the folder cannot be used, naming the missing or invalid part.
        """
        root = Path(config.path).expanduser()
        if not root.is_dir():
            raise ConfigError(f"source.path '{config.path}' is no folder; murmur downloads nothing")
        self.notices = Notices()
        classes = config.classes or _class_names(root)
        self._values = _class_of_value(config, classes)
        images = _files(root / "images", _IMAGES, self.notices)
        masks = _files(root / "masks", _MASKS, self.notices)
        self._say_unused(config, root, images, masks)
        self._splits = _splits(root, sorted(images), config)
        used = [stem for split in SPLITS for stem in self._splits[split]]
        if missing := sorted(stem for stem in used if stem not in masks):
            raise ConfigError(
                f"{len(missing)} of {len(used)} images have no mask in {root / 'masks'}: "
                f"{_some(missing)}; add STEM.png, or name the images that have one in train.txt "
                "and valid.txt"
            )
        self._images, self._masks = images, masks
        self._size = height_and_width(config.size)
        _refuse_colours([masks[stem] for stem in used])
        digest = hashlib.sha256()
        options = (classes, config.ignore_index, config.flip_pairs, self._size)
        digest.update(repr((*options, config.values) if config.values else options).encode())
        self._num_bytes: dict[str, tuple[int, int]] = {}
        for split in SPLITS:
            for stem in self._splits[split]:
                sizes = self._num_bytes[stem] = _bytes(images[stem]), _bytes(masks[stem])
                digest.update(repr((split, stem, *sizes)).encode())
        self._known: set[str] = set()  # stems of whole files
        self.spec = SampleSpec(
            name="folder",
            arrays=sample_arrays(self._size),
            sizes=(len(self._splits["train"]), len(self._splits["valid"])),
            digest=digest.hexdigest(),
            classes=classes,
            ignore_index=_IGNORED if config.values else config.ignore_index,
            flip_pairs=_pairs(config.flip_pairs, classes),
        )

    def read(self, split: str, index: int) -> dict[str, Array]:
        """Read an image and its mask, resized.

        Returns:
            "image" uint8 [3, H, W] in RGB, and "mask" uint8 [H, W] of class indices.

        Raises:
            BrokenSample: if one of the files cannot be used, naming it.
        """
        stem = self._splits[split][index]
        image_file, mask_file = self._images[stem], self._masks[stem]
        image_bytes, mask_bytes = self._num_bytes[stem]
        known = stem in self._known  # damage and changes are looked for once
        image, header = decode_image(
            _read(image_file, image_bytes), str(image_file), self._size, known=known
        )
        mask, mask_header = decode_mask(_read(mask_file, mask_bytes), str(mask_file), known=known)
        if not same_size(header, image, mask):
            turned = f", turned upright (EXIF {header.orientation})" * (header.orientation > 1)
            raise BrokenSample(
                "mask_size",
                f"{mask_file} is {mask.shape[1]}×{mask.shape[0]}, its image {image_file} is "
                f"{header.width}×{header.height}{turned}",
            )
        if self._values is not None:
            by_class = self._values[mask]  # 256 for a number without a class
            if int(by_class.max(initial=0)) > 255:
                number = int(mask[by_class > 255].min())
                raise BrokenSample(
                    "class_range", f"{mask_file} holds {number}, which source.values does not name"
                )
            mask = by_class.astype(np.uint8)
        check_classes(
            mask, self.spec, str(mask_file), "; set source.values if masks hold other numbers"
        )
        if not known:
            say_image_changes(self.notices, header, image_file)
            say_resized(self.notices, header, image_file, self._size)
            say_mask_changes(self.notices, mask_header, mask_file)
            self._known.add(stem)
        return {
            "image": planes(resize(image, self._size, nearest=False)),
            "mask": resize(mask, self._size, nearest=True),
        }

    def _say_unused(
        self, config: Config, root: Path, images: dict[str, Path], masks: dict[str, Path]
    ) -> None:
        """Give notices of files in the folder that are not read."""
        if config.classes and (root / "classes.txt").is_file():
            names = _class_names(root)
            if names != config.classes:
                self.notices.say(
                    "unused",
                    "classes.txt",
                    f"source.classes ({', '.join(config.classes)}) is used, {root}/classes.txt "
                    f"({', '.join(names)}) is not",
                )
        if (root / "valid.txt").is_file() and (root / "val.txt").is_file():
            self.notices.say(
                "unused", "val.txt", f"{root}/valid.txt is used, {root}/val.txt is not"
            )
        listed = (root / "train.txt").is_file()
        if not listed and (alone := sorted(set(masks) - set(images))):
            self.notices.say(
                "unused",
                "masks",
                f"{len(alone)} masks have no image in {root / 'images'} and are left out: "
                f"{_some(alone)}",
            )


def build(config: Config) -> Folder:
    """Make the source."""
    import cv2

    cv2.setNumThreads(1)  # workers share the cores
    return Folder(config)


def _class_names(root: Path) -> tuple[str, ...]:
    """Read the class names in classes.txt.

    Raises:
        ConfigError: if the file is missing, or has too few, too many or repeated names.
    """
    file = root / "classes.txt"
    if not file.is_file():
        raise ConfigError(
            f"the classes of {root} have no names: write them into {file}, one a line in the "
            "order of their indices, or set source.classes"
        )
    names = tuple(_lines(file))
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{file} names class '{name}' twice")
    if not 2 <= len(names) <= MAX_CLASSES:
        raise ConfigError(f"{file} has {len(names)} lines; a data set has 2 to {MAX_CLASSES}")
    return names


def _lines(file: Path) -> list[str]:
    """Read the lines of a file that are not empty.

    Raises:
        ConfigError: if the file cannot be read as text.
    """
    try:
        with file.open("rb") as opened:
            text = opened.read(_MAX_LIST_BYTES).decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is no text in UTF-8: {error.reason}") from None
    return [line.strip() for line in text.splitlines() if line.strip()]


def _class_of_value(config: Config, classes: Sequence[str]) -> NDArray[np.uint16] | None:
    """Return [256] the class of each number in mask files, 256 for none; None: the number.

    Raises:
        ConfigError: if source.values does not name a number for each class, or without it
            source.ignore_index is a class.
    """
    values, ignored = config.values, config.ignore_index
    if not values:
        if ignored < len(classes) < MAX_CLASSES:
            raise ConfigError(
                f"source.ignore_index is {ignored}, the index of class '{classes[ignored]}'; name "
                "the other classes alone and the numbers that stand for them in source.values"
            )
        return None
    if len(values) != len(classes):
        raise ConfigError(
            f"source.values has {len(values)} numbers, there are {len(classes)} classes "
            f"({', '.join(classes)}); give one for each"
        )
    table = np.full(256, 256, np.uint16)
    table[ignored] = _IGNORED
    table[list(values)] = np.arange(len(values))
    return table


def _files(folder: Path, suffixes: Sequence[str], notices: Notices) -> dict[str, Path]:
    """List files by stem, without hidden ones.

    Raises:
        ConfigError: if the folder is missing, has no such files, or two of one stem.
    """
    kinds = " or ".join(f"*{suffix}" for suffix in suffixes)
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}; it holds {kinds}")
    found: dict[str, Path] = {}
    others: list[str] = []
    for file in sorted(folder.iterdir()):
        if file.name.startswith("."):
            continue
        if file.suffix.lower() not in suffixes or file.is_fifo():
            others.append(file.name)
            continue
        if file.stem in found:
            raise ConfigError(f"{found[file.stem]} and {file.name} have the same stem: remove one")
        found[file.stem] = file
    if not found:
        raise ConfigError(f"{folder} has no {kinds}")
    if others:
        notices.say(
            "unused", str(folder), f"{folder} is read for {kinds}; left out: {_some(others)}"
        )
    return found


def _splits(root: Path, stems: Sequence[str], config: Config) -> dict[str, list[str]]:
    """Choose the stems of each split.

    Raises:
        ConfigError: if a list is invalid or a split is empty.
    """
    lists = {"train": root / "train.txt", "valid": root / "valid.txt"}
    if not lists["valid"].is_file() and (root / "val.txt").is_file():
        lists["valid"] = root / "val.txt"
    there = {split: file for split, file in lists.items() if file.is_file()}
    if len(there) == 1:
        (file,) = there.values()
        missing = next(name for name in lists if name not in there)
        raise ConfigError(f"{file} is there, {missing}.txt is not: write both, or remove it")
    if there:
        splits = {split: _listed(file, set(stems)) for split, file in there.items()}
        if both := sorted(set(splits["train"]) & set(splits["valid"])):
            raise ConfigError(
                f"{_some(both)} in both {lists['train'].name} and {lists['valid'].name}: "
                "validation would see what was trained on"
            )
    else:
        # Each image's place follows from its own name: new images move few of the others.
        order = sorted(
            stems, key=lambda s: hashlib.sha256(f"{config.split_seed}:{s}".encode()).digest()
        )
        count = max(1, round(len(stems) * config.valid_share))
        splits = {"train": sorted(order[count:]), "valid": sorted(order[:count])}
    for split, most in (("train", config.train), ("valid", config.valid)):
        if most > len(splits[split]):
            raise ConfigError(
                f"source.{split} = {most}, but split '{split}' of {root} has {len(splits[split])}"
            )
        splits[split] = splits[split][: most or None]
        if not splits[split]:
            why = f"{lists[split]} is empty" if there else f"{root} has {len(stems)} image(s)"
            raise ConfigError(f"split '{split}' is empty: {why}")
    return splits


def _listed(file: Path, stems: set[str]) -> list[str]:
    """Read the stems that a list names, sorted.

    Raises:
        ConfigError: for entries that are missing or repeated, naming them.
    """
    listed = []
    for line in _lines(file):
        path = Path(line)
        listed.append(path.stem if path.suffix.lower() in _IMAGES else path.name)
    if unknown := sorted(set(listed) - stems):
        raise ConfigError(f"{file} names {_some(unknown)}; not in {file.parent / 'images'}")
    if len(set(listed)) < len(listed):
        twice = sorted(stem for stem in set(listed) if listed.count(stem) > 1)
        raise ConfigError(f"{file} names {_some(twice)} twice")
    return sorted(listed)


def _refuse_colours(masks: Sequence[Path]) -> None:
    """Refuse masks if all that are checked hold colors: then no sample could be used.

    Raises:
        ConfigError: if all of them hold colors, naming one.
    """
    step = -(-len(masks) // _LOOK_AT)
    for file in masks[::step]:
        try:
            decode_mask(read_file(file), str(file))
            return
        except BrokenSample as broken:
            if broken.reason != "mask_format":
                return
            detail = broken.detail
    raise ConfigError(f"the masks are no class indices: {detail}")


def _pairs(named: Sequence[tuple[str, str]], classes: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """Convert pairs of names to pairs of indices.

    Raises:
        ConfigError: for a name that no class has.
    """
    for name in chain.from_iterable(named):
        if name not in classes:
            raise ConfigError(
                f"source.flip_pairs names '{name}'; the classes are {', '.join(classes)}"
            )
    return tuple((classes.index(one), classes.index(other)) for one, other in named)


def _read(file: Path, num_bytes: int) -> bytes:
    """Read a file that was listed with this size; -1: any size.

    Raises:
        BrokenSample: if it cannot be read, or has another size now ("changed").
    """
    data = read_file(file)
    if len(data) != num_bytes >= 0:
        raise BrokenSample(
            "changed", f"{file} had {num_bytes} bytes when it was listed, now {len(data)}"
        )
    return data


def _bytes(file: Path) -> int:
    """Return the size of a file, bytes; -1 if it is not known."""
    try:
        return file.stat().st_size
    except OSError:
        return -1


def _some(names: Sequence[str]) -> str:
    """List the first few of many names."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(f"'{name}'" for name in names[:3]) + more

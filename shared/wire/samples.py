"""The spec of a source of images and targets, which the handshake compares."""

import math
import re
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from murmur.shared.process.errors import SpecError
from murmur.shared.rpc import ENCODING_BYTES, MAX_OBSERVATION_BYTES
from murmur.shared.rpc import rollout_pb2 as pb
from murmur.shared.wire.spec import MAX_ARRAYS, ArraySpec, check_name, from_proto, to_fields

SPLITS = ("train", "valid")
IMAGE, MASK = "image", "mask"  # names with a fixed meaning

MAX_SAMPLES = 1 << 24  # of one split
MAX_CLASSES = 256
_SHA256 = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """Everything the learner must know of a data set; fixed by the first Hello of a run.

    Attributes:
        name: name of the source, such as "faces".
        arrays: arrays of one sample, in wire order, with per_agent=False: "image" is uint8
            [3, H, W] in RGB, "mask" uint8 [H, W] of class indices.
        sizes: number of samples of each split of SPLITS.
        digest: SHA-256, in hexadecimal, of the definition of the data set: the list of files and
            their sizes, or a generator's options.
        classes: names of the classes, by index.
        ignore_index: value of mask pixels that are neither learned nor scored; no class has it.
        flip_pairs: pairs of class indices that a horizontal flip swaps.
    """

    name: str
    arrays: tuple[ArraySpec, ...]
    sizes: tuple[int, int]
    digest: str
    classes: tuple[str, ...]
    ignore_index: int = 255
    flip_pairs: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        """Check that the spec is possible.

        Raises:
            SpecError: for an impossible spec, naming the field.
        """
        check_name("source", self.name)
        if not 0 < len(self.arrays) <= MAX_ARRAYS:
            raise SpecError(
                f"source '{self.name}' declares {len(self.arrays)} arrays; need 1 to {MAX_ARRAYS}"
            )
        names = [array.name for array in self.arrays]
        for array in self.arrays:
            if names.count(array.name) > 1:
                raise SpecError(f"source '{self.name}' declares array '{array.name}' twice")
            if array.per_agent:
                raise SpecError(
                    f"source '{self.name}' declares array '{array.name}' per agent; a sample has "
                    "no agents: set per_agent=False"
                )
        if self.sample_bytes > MAX_OBSERVATION_BYTES - ENCODING_BYTES:
            raise SpecError(
                f"a sample of source '{self.name}' takes {self.sample_bytes} bytes, a message "
                f"holds {MAX_OBSERVATION_BYTES - ENCODING_BYTES}; make its images smaller"
            )
        for split, size in zip(SPLITS, self.sizes, strict=True):
            if not 0 <= size <= MAX_SAMPLES:
                raise SpecError(
                    f"split '{split}' of source '{self.name}' has {size} samples; it may have 0 "
                    f"to {MAX_SAMPLES}"
                )
        if not _SHA256.fullmatch(self.digest):
            raise SpecError(
                f"source '{self.name}' has digest {self.digest[:70]!r}; expected the 64 "
                "hexadecimal digits of a SHA-256"
            )
        self._check_classes()

    def stray_pixels(self, mask: NDArray[Any]) -> NDArray[Any]:
        """Return the pixels of a mask that are neither a class nor ignored."""
        count = len(self.classes)
        if int(mask.max(initial=0)) < count:
            return mask[:0]
        strays: NDArray[Any] = mask[(mask >= count) & (mask != self.ignore_index)]
        return strays

    def _check_classes(self) -> None:
        """Check the fields that depend on the classes.

        Raises:
            SpecError: for an impossible value, naming the field.
        """
        count = len(self.classes)
        if not 2 <= count <= MAX_CLASSES:
            raise SpecError(f"source '{self.name}' has {count} classes; need 2 to {MAX_CLASSES}")
        for name in self.classes:
            check_name("class", name)
        if not 0 <= self.ignore_index <= 255:
            raise SpecError(
                f"source '{self.name}' has ignore_index {self.ignore_index}; masks are uint8: "
                "use 0 to 255"
            )
        if self.ignore_index < count < MAX_CLASSES:  # of 256 classes none can be ignored
            raise SpecError(
                f"source '{self.name}' has ignore_index {self.ignore_index}, the index of class "
                f"'{self.classes[self.ignore_index]}'; use a number from {count} to 255"
            )
        for pair in self.flip_pairs:
            if pair[0] == pair[1] or not all(0 <= index < count for index in pair):
                raise SpecError(
                    f"source '{self.name}' has flip pair {pair}; name two of its {count} classes "
                    "by index"
                )
        paired = [index for pair in self.flip_pairs for index in pair]
        for index in paired:
            if paired.count(index) > 1:
                raise SpecError(f"source '{self.name}' has class {index} in two flip pairs")

    @property
    def sample_bytes(self) -> int:
        """Return the bytes of all arrays of one sample."""
        return sum(np.dtype(a.dtype).itemsize * math.prod(a.shape) for a in self.arrays)

    def size(self, split: str) -> int:
        """Return the number of samples of a split."""
        return self.sizes[SPLITS.index(split)]

    def array(self, name: str) -> ArraySpec | None:
        """Return the array of that name, or None."""
        return next((a for a in self.arrays if a.name == name), None)


def sample_difference(ours: SampleSpec, theirs: SampleSpec) -> str | None:
    """Name the first field in which two specs differ, or None if they are equal.

    Returns:
        description such as "sizes: (64, 100) here, (64, 90) there".
    """
    for field in fields(SampleSpec):
        here, there = getattr(ours, field.name), getattr(theirs, field.name)
        if here == there:
            continue
        if field.name == "digest":
            return (
                f"digest: {here[:12]}… here, {there[:12]}… there: the files or options of source "
                f"'{ours.name}' are not the same on all servers, or not those the run began with"
            )
        return f"{field.name}: {here} here, {there} there"
    return None


def samples_to_proto(spec: SampleSpec) -> pb.SampleSpec:
    """Encode a SampleSpec as a protobuf message, which has the dataclass's fields."""
    pairs = [index for pair in spec.flip_pairs for index in pair]
    return pb.SampleSpec(**(to_fields(spec) | {"flip_pairs": pairs}))


def samples_from_proto(message: pb.SampleSpec) -> SampleSpec:
    """Decode a SampleSpec from a protobuf message.

    Raises:
        SpecError: if the message does not hold a possible spec.
    """
    if len(message.sizes) != len(SPLITS) or len(message.flip_pairs) % 2:
        raise SpecError(
            f"source {message.name[:40]!r} has {len(message.sizes)} sizes and "
            f"{len(message.flip_pairs)} indices of flip pairs; need {len(SPLITS)}, and two for "
            "each pair"
        )
    pairs = iter(message.flip_pairs)
    return from_proto(SampleSpec, message, flip_pairs=tuple(zip(pairs, pairs, strict=True)))

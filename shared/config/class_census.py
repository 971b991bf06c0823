"""The classes that the masks of a data set hold, and messages on those that do not occur."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from murmur.shared.wire.samples import SPLITS, SampleSpec
from murmur.shared.wire.timestep import Array

Flags = NDArray[np.bool_]
_FEW = 8  # values up to which comparing one by one is cheaper than counting all
_NAMED = 5  # classes in a sentence
_LISTED = 12  # classes whose values are listed


class ClassCensus:
    """Record of the values that occur in the masks of each split. Reads each sample once.

    Attributes:
        seen: [2, 256] bool, true if a mask of the split holds the value.
        looked: one array per split, [N] bool, true if the sample's mask was read.
    """

    def __init__(self, spec: SampleSpec) -> None:
        """Begin with nothing seen."""
        self.seen = np.zeros((len(SPLITS), 256), np.bool_)
        self.looked = [np.zeros(size, np.bool_) for size in spec.sizes]
        self._wanted = [*range(len(spec.classes)), spec.ignore_index]

    def look(self, split: int, indices: Sequence[int], masks: Array) -> None:
        """Record the values of masks [n, H, W] of a split; skip them if all were read before."""
        if not len(indices) or self.looked[split][indices].all():
            return
        self.looked[split][indices] = True
        seen = self.seen[split]
        missing = [value for value in self._wanted if not seen[value]]
        if len(missing) > _FEW:
            seen |= np.bincount(masks.ravel(), minlength=256)[:256] > 0
            return
        for value in missing:
            seen[value] = bool((masks == value).any())


class ClassProblem(NamedTuple):
    """A defect of the data set: classes that the masks do not hold.

    Attributes:
        subject: short name of the classes concerned.
        text: message of one sentence.
        fatal: true if fewer than two classes are left, so that nothing is learned or scored.
    """

    subject: str
    text: str
    fatal: bool


def class_problems(spec: SampleSpec, seen: Flags, counts: tuple[int, int]) -> list[ClassProblem]:
    """Find the classes that cannot be learned or scored because the masks do not hold them.

    Args:
        spec: spec of the data set.
        seen: [2, 256] bool, true if the split's masks hold the value.
        counts: number of masks read in each split; a split with 0 is not checked.
    """
    k, ignored = len(spec.classes), spec.ignore_index
    train, valid = seen[:, :k]
    found: list[ClassProblem] = []
    if counts[0] and not train.any():
        text = (
            f"all masks of {counts[0]} training samples hold {ignored} alone, which is ignored "
            f"(source.ignore_index): {_hint(spec, ~train)}"
        )
        found.append(ClassProblem("training classes", text, True))
    elif counts[0] and not train.all():
        text = f"{_classes(spec, ~train)} in none of {counts[0]} training samples: not learned"
        if ignored >= k and seen[0, ignored]:
            text += f". {ignored} is ignored (source.ignore_index): {_hint(spec, ~train)}"
        found.append(ClassProblem("training classes", text, int(train.sum()) < 2))
    if counts[0] and counts[1] and (only := ~train & valid).any():
        text = f"{_classes(spec, only)} in validation samples alone: the score of each is about 0"
        found.append(ClassProblem("classes of validation alone", text, False))
    if counts[1] and not valid.all():
        text = f"{_classes(spec, ~valid)} in none of {counts[1]} validation samples: "
        few = int(valid.sum()) < 2
        if few:
            text += "f_score and miou are 0, as there are no two classes to tell apart"
        else:
            text += f"f_score and miou are means over the other {int(valid.sum())}"
        found.append(ClassProblem("validation classes", text, few))
    return found


def _hint(spec: SampleSpec, absent: Flags) -> str:
    """Return advice for masks with ignored pixels that may belong to an absent class."""
    classes, ignored, indices = spec.classes, spec.ignore_index, np.flatnonzero(absent).tolist()
    if len(indices) > 1:
        return "if it means a class, write the class's index, or set source.values"
    (k,) = indices
    write = "write masks of 0 and 1" if len(classes) == 2 else f"write {k} in its place"
    values = [*range(k), ignored, *range(k + 1, len(classes))]
    shown = f"={values}" if len(classes) <= _LISTED else ""
    return f"if it means '{classes[k]}', {write}, or set source.values{shown}"


def _classes(spec: SampleSpec, which: Flags) -> str:
    """Name classes with their indices, and the verb."""
    indices = np.flatnonzero(which).tolist()
    names = [f"'{spec.classes[k]}' ({k})" for k in indices[:_NAMED]]
    if more := len(indices) - len(names):
        names.append(f"{more} more")
    if len(indices) == 1:
        return f"class {names[0]} is"
    return f"classes {', '.join(names[:-1])} and {names[-1]} are"

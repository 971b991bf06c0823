"""Conversion of observations to float32, with one notice if precision is lost."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from murmur.shared.wire.notices import Notices
from murmur.shared.wire.timestep import Array

Path = tuple[Any, ...]  # keys that lead from an observation to one of its parts
Write = Callable[[Array, Any], None]  # writes a part into its place

VECTOR = "observation"
WHOLE = 2**24  # float32 holds all whole numbers up to here
# Of an entry's range in an episode. MuJoCo's short episodes lose up to 5e-5, which harms nothing.
_LOSS = 1e-3
_FIRST_STEPS = 64  # that are all looked at; then every _EVERY-th
_EVERY, _JUDGE_EVERY = 64, 256
CAST = "cast"  # kind of the notices


def subject_of(path: Path) -> str:
    """Return the name of a part of an observation in notices."""
    return ".".join(map(str, path)) or VECTOR


def write_box(place: Array, value: Any) -> None:
    """Write numbers of exactly the declared shape.

    Raises:
        ValueError: if they have another shape.
    """
    if getattr(value, "shape", None) != place.shape:
        value = np.asarray(value)
        if value.shape != place.shape:
            raise ValueError(f"has shape {value.shape}, its space says {place.shape}")
    place[...] = value


def require_numbers(value: Any) -> None:
    """Refuse values that NumPy would cast to float32 with a loss or by parsing text.

    Raises:
        ValueError: if the value holds no real numbers, or some are masked.
    """
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        raise ValueError("is a masked array, and murmur has no place for its mask")
    dtype = np.asarray(value).dtype
    if dtype.kind not in "biufO":
        raise ValueError(f"has dtype {dtype}; murmur takes real numbers")


class CastWatch:
    """Comparison of one copy's observations with the float32 numbers that are sent.

    A loss of precision matters if the numbers differ by less than float32 resolves. So the loss is
    compared with the range of the entry in its episode.

    Attributes:
        on: true if this step is compared.
    """

    def __init__(self, notices: Notices) -> None:
        """Report losses to `notices`."""
        self._notices = notices
        self.on, self._steps = True, 0
        self._ranges: dict[tuple[int, str], _Ranges] = {}

    def step(self) -> None:
        """Count a step of the copy, and decide whether to compare it."""
        self._steps += 1
        self.on = self._steps < _FIRST_STEPS or self._steps % _EVERY == 0
        if self._steps % _JUDGE_EVERY == 0:
            self._judge()

    def begin(self) -> None:
        """Check the losses of the episode that has ended, and begin another one."""
        self._judge()
        self._ranges.clear()
        self.step()

    def look(self, agent: int, name: str, value: Any, place: Array) -> None:
        """Compare a part of an observation with its float32 numbers."""
        array = np.asarray(value)
        kind, size = array.dtype.kind, array.dtype.itemsize
        exact = kind == "b" or size <= (4 if kind == "f" else 2)
        if exact or not array.size or self._notices.said(CAST, name):
            return
        if kind in "iu":
            for k in np.flatnonzero(np.abs(array.astype(np.float64)) > WHOLE).tolist():
                before, after = int(array.flat[k]), int(place.flat[k])
                if before != after:
                    self._say(name, k, array, before, after, "")
                    return
            return
        wide = array.astype(np.float64)
        if not np.isfinite(place).all():  # a fault, which the caller finds
            return
        ranges = self._ranges.get((agent, name))
        if ranges is None:
            ranges = self._ranges[agent, name] = _Ranges(wide)
        ranges.add(wide, place)

    def _judge(self) -> None:
        """Report the entry of each observation that loses too much precision."""
        for (_, name), ranges in self._ranges.items():
            span = ranges.high - ranges.low
            lost = (ranges.loss > _LOSS * span) & (span > 0)
            if not lost.any() or self._notices.said(CAST, name):
                continue
            k = int(np.argmax(np.where(lost, ranges.loss / np.where(lost, span, 1), 0)))
            before = float(ranges.before.flat[k])
            about = f", and all of it changes by {span.flat[k]:.6g} in an episode"
            self._say(name, k, ranges.before, before, float(np.float32(before)), about)

    def _say(
        self,
        name: str,
        entry: int,
        array: Array,
        before: float,
        after: float,
        about: str,
    ) -> None:
        where = f"{list(map(int, np.unravel_index(entry, array.shape)))}" if array.size > 1 else ""
        self._notices.say(
            CAST,
            name,
            f"observation '{name}'{where} is {before!r} ({array.dtype}) and arrives as {after!r} "
            f"(float32){about}; subtract its start or scale it in a factory of your own",
        )


class _Ranges:
    """Ranges and losses of the entries of one observation in one episode."""

    def __init__(self, first: NDArray[np.float64]) -> None:
        self.low = first.copy()
        self.high = first.copy()
        self.before = first.copy()
        self.loss = np.zeros_like(first)

    def add(self, wide: NDArray[np.float64], place: Array) -> None:
        np.minimum(self.low, wide, out=self.low)
        np.maximum(self.high, wide, out=self.high)
        loss = np.abs(wide - place.astype(np.float64))
        larger = loss > self.loss
        self.loss[larger], self.before[larger] = loss[larger], wide[larger]


def say_number(
    notices: Notices, subject: str, what: str, before: Any, after: float, fix: str
) -> None:
    """Give one notice that a number beyond WHOLE changes as float32.

    Args:
        notices: collector of the notice.
        subject: subject of the notice.
        what: name of the number.
        before: value that the environment gave.
        after: value that is sent.
        fix: advice for the user.
    """
    if notices.said(CAST, subject) or not np.isfinite(after):
        return
    whole = isinstance(before, int | np.integer)
    if (int(after) != int(before)) if whole else (after != float(before)):
        plain = int(before) if whole else float(before)
        text = f"{what} is {plain!r} and arrives as {after!r} (float32); {fix}"
        notices.say(CAST, subject, text)

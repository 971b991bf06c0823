"""`murmur check-source`: the test of a source, by reading its samples."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from murmur.env_service.sources.source import BrokenSample, make_source, notices_of, read_sample
from murmur.learner_service.telemetry.figures import painted, png, sheet, upright
from murmur.shared.config import PluginConfig
from murmur.shared.config.class_census import ClassProblem, class_problems
from murmur.shared.process.errors import ConfigError
from murmur.shared.process.files import write_whole
from murmur.shared.wire.notices import Notice
from murmur.shared.wire.samples import IMAGE, MASK, SPLITS, SampleSpec
from murmur.shared.wire.timestep import Array
from murmur.text import plain

_READ_TWICE = 4
_NAMED = 20  # broken samples of one reason
_ON_SHEET, _ACROSS = 24, 8  # samples, and pictures in a row


@dataclass
class Examined:
    """Findings about a source.

    Attributes:
        spec: specification of the source.
        read: number of samples that were read.
        seconds: processor seconds of reading.
        broken: details of the unusable samples by reason.
        changed: samples that were not the same when read again.
        masks: [2] masks read, by split.
        pixels: [2, 256] pixels of each value, by split.
        samples_with: [256] samples in which each value occurs.
        notices: changes that reading makes.
        kept: samples for a sheet.
    """

    spec: SampleSpec
    read: int = 0
    seconds: float = 0.0
    broken: dict[str, list[str]] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)
    masks: list[int] = field(default_factory=lambda: [0] * len(SPLITS))
    pixels: NDArray[np.int64] = field(default_factory=lambda: np.zeros((2, 256), np.int64))
    samples_with: NDArray[np.int64] = field(default_factory=lambda: np.zeros(256, np.int64))
    notices: list[Notice] = field(default_factory=list)
    kept: list[dict[str, Array]] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        """Return whether every sample was read or found broken."""
        return self.read + sum(map(len, self.broken.values())) == sum(self.spec.sizes)

    @property
    def problems(self) -> list[ClassProblem]:
        """Classes that do not occur; fatal only if every sample was looked at."""
        train, valid = self.masks
        found = class_problems(self.spec, self.pixels > 0, (train, valid))
        return [problem._replace(fatal=problem.fatal and self.whole) for problem in found]

    @property
    def usable(self) -> bool:
        """Return whether all that was read can be learned from."""
        wrong = self.broken or self.changed or any(problem.fatal for problem in self.problems)
        return bool(self.read) and not wrong


def examine(plugin: PluginConfig, most: int) -> Examined:
    """Read samples of both splits, evenly spread.

    Args:
        plugin: plug-in of the source.
        most: largest number of samples to read; 0: all.

    Raises:
        ConfigError: if the source cannot be built.
    """
    source = make_source(plugin)
    found = Examined(source.spec)
    for split, index in _chosen(source.spec, most):
        began = time.process_time()
        try:
            arrays = read_sample(source, split, index)
            found.seconds += time.process_time() - began
            again = read_sample(source, split, index) if found.read < _READ_TWICE else arrays
        except BrokenSample as broken:
            found.broken.setdefault(broken.reason, []).append(broken.detail)
            continue
        found.read += 1
        if any((arrays[name] != again[name]).any() for name in arrays):
            found.changed.append(f"sample {index} of split '{split}'")
        if MASK in arrays:
            mask = arrays[MASK].astype(np.uint8, copy=False)
            counts = np.bincount(mask.ravel(), minlength=256)
            found.masks[SPLITS.index(split)] += 1
            found.pixels[SPLITS.index(split)] += counts
            found.samples_with += counts > 0
        if len(found.kept) < _ON_SHEET:
            found.kept.append(arrays)
    found.notices = notices_of(source).all
    return found


def _chosen(spec: SampleSpec, most: int) -> Iterator[tuple[str, int]]:
    """Return split and index of the samples to read."""
    total = sum(spec.sizes)
    for at in np.unique(np.linspace(0, total - 1, min(total, most or total)).astype(int)).tolist():
        split = SPLITS[at >= spec.sizes[0]]
        yield split, at - (spec.sizes[0] if split == SPLITS[1] else 0)


def show(found: Examined, console: Console) -> None:
    """Print what was found."""
    spec = found.spec
    for reason, details in sorted(found.broken.items()):
        console.print("[red]✗[/]", plain(f"{len(details)} broken, {reason}: {details[0]}"))
        for detail in details[1:_NAMED]:
            console.print(plain(f"    {detail}"))
        if len(details) > _NAMED:
            console.print(plain(f"    and {len(details) - _NAMED} more"))
    for where in found.changed:
        message = "read again, was another; read must depend on split and index alone"
        console.print("[red]✗[/]", plain(f"{where}, {message}"))
    for problem in found.problems:
        console.print("[red]✗[/]" if problem.fatal else "[yellow]![/]", plain(problem.text))
    if found.problems and not found.whole:
        console.print("[yellow]![/]", plain("only some samples were read; --samples 0 reads all"))
    for notice in found.notices:
        console.print("[yellow]![/]", plain(notice.text))
    if found.usable:
        console.print("[green]✓[/]", plain(f"'{spec.name}': {found.read} samples can be used"))
    train, valid = spec.sizes
    console.print(plain(f"  {train} samples to train on, {valid} to validate with"))
    for array in spec.arrays:
        console.print(plain(f"  {array.name}: {array.dtype} {list(array.shape)}"))
    if not found.read:
        return
    rate = found.read / max(found.seconds, 1e-9)
    console.print(plain(f"  {rate:.0f} samples a second of one core"))
    pixels = found.pixels.sum(0)
    ignored = int(pixels[spec.ignore_index])
    pixels[spec.ignore_index] = 0
    counted = max(1, int(pixels[: len(spec.classes)].sum()))
    table = Table("class", "share of pixels", "in samples", box=None, padding=(0, 2))
    for k, name in enumerate(spec.classes):
        samples = found.samples_with[k] / found.read
        table.add_row(plain(name), f"{pixels[k] / counted:.2%}", f"{samples:.0%}")
    if ignored:
        share = ignored / (counted + ignored)
        table.add_row(plain(f"ignored ({spec.ignore_index})"), f"{share:.2%}", "")
    console.print(table)


def write_sheet(found: Examined, file: Path) -> None:
    """Write samples beside their masks, in colors, as one PNG.

    Raises:
        ConfigError: if there is nothing to draw.
    """
    k = len(found.spec.classes)
    cells = [
        picture
        for arrays in found.kept
        if arrays.keys() >= {IMAGE, MASK}
        for picture in (upright(arrays[IMAGE]), painted(arrays[MASK], k))
    ]
    if not cells:
        raise ConfigError(f"source '{found.spec.name}' gave no image with a mask to draw")
    rows = [cells[i : i + _ACROSS] for i in range(0, len(cells), _ACROSS)]
    write_whole(file, png(sheet(rows)))

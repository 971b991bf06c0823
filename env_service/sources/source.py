"""The contract of a source: samples of images and class masks, read by split and index.

A source plug-in is a module `env_service/sources/<name>.py` (or a package, or an entry point of
group `murmur.sources`) that has

    Config               a frozen pydantic model: every option with its default, unit and meaning
    build(config) -> Source

`package.module:Name` names a class or function that is a plug-in by itself: see
murmur.shared.config.named_plugin.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from murmur.shared.config import PluginConfig
from murmur.shared.config.extras import advising
from murmur.shared.config.plugins import plugin_failures, resolve_plugin
from murmur.shared.process.errors import ConfigError
from murmur.shared.process.traces import error_message
from murmur.shared.wire.notices import Notices
from murmur.shared.wire.samples import MASK, SampleSpec
from murmur.shared.wire.timestep import Array


class BrokenSample(Exception):  # noqa: N818 - it names what is broken, as EnvironmentFault does
    """A sample that cannot be used; it leaves the epoch and is counted by its reason.

    Attributes:
        reason: slug for metrics: "unreadable", "mask_size", "class_range".
        detail: description of the problem, with the file's name.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


class Source(Protocol):
    """Samples of two splits.

    One thread calls `read`. A source shares nothing with other processes: each worker builds its
    own.

    Attributes:
        spec: arrays, sizes, classes and digest; fixed for life.

    A source may have an attribute `notices` (murmur.shared.wire.notices.Notices) about values that
    it changes, ignores or guesses; the run reports each once.
    """

    spec: SampleSpec

    def read(self, split: str, index: int) -> dict[str, Array]:
        """Read the arrays of one sample: a pure function of split and index.

        Args:
            split: name of the split, "train" or "valid".
            index: number of the sample, from 0 to spec.size(split) - 1.

        Returns:
            arrays that `spec.arrays` names; the caller may keep and change them.

        Raises:
            BrokenSample: if this sample cannot be used.
        """
        ...


def make_source(plugin: PluginConfig) -> Source:
    """Build the source that a configuration names.

    Raises:
        ConfigError: if there is no such source, an option is wrong, or it cannot be built.
    """
    found = resolve_plugin("source", plugin)
    what = f"source '{plugin.name}'"
    with plugin_failures(what), advising(f"{what}: "):
        return _checked(plugin.name, found.module.build(found.options))


def notices_of(source: Source) -> Notices:
    """Return a source's attribute `notices`, or an empty collector."""
    notices = getattr(source, "notices", None)
    return notices if isinstance(notices, Notices) else Notices()


def _checked(name: str, source: Source) -> Source:
    """Check that an object has the attributes of a source, and return it.

    Raises:
        ConfigError: if it has no spec or no read(), naming which.
    """
    if not isinstance(getattr(source, "spec", None), SampleSpec):
        raise ConfigError(f"source '{name}' is a {type(source).__name__} without a SampleSpec")
    if not callable(getattr(source, "read", None)):
        raise ConfigError(f"source '{name}' is a {type(source).__name__} without read()")
    return source


def read_sample(source: Source, split: str, index: int) -> dict[str, Array]:
    """Read one sample and check it against the source's spec.

    Raises:
        BrokenSample: if the source raises it, if its code raises ("raised"), and if the arrays
            differ from its spec ("wrong_arrays", "class_range").
    """
    where = f"sample {index} of split '{split}' of source '{source.spec.name}'"
    try:
        arrays = source.read(split, index)
    except (BrokenSample, MemoryError):
        raise
    except Exception as error:
        raise BrokenSample("raised", f"{where} raised {error_message(error)}") from error
    if not isinstance(arrays, dict):
        raise BrokenSample("wrong_arrays", f"{where} is a {type(arrays).__name__}, not a dict")
    wanted = [array.name for array in source.spec.arrays]
    if sorted(arrays) != sorted(wanted):
        raise BrokenSample("wrong_arrays", f"{where} has arrays {sorted(arrays)}, not {wanted}")
    for spec in source.spec.arrays:
        array = np.asarray(arrays[spec.name])
        if array.dtype != np.dtype(spec.dtype) or array.shape != spec.shape:
            raise BrokenSample(
                "wrong_arrays",
                f"{where}: '{spec.name}' is {array.dtype} {array.shape}, its spec says "
                f"{spec.dtype} {spec.shape}",
            )
        arrays[spec.name] = np.ascontiguousarray(array)
    if MASK in arrays:
        check_classes(arrays[MASK].astype(np.uint8, copy=False), source.spec, where)
    return arrays


def check_classes(
    mask: NDArray[np.integer], spec: SampleSpec, where: str, advice: str = ""
) -> None:
    """Refuse a mask with an index that is neither a class nor ignored.

    Args:
        mask: class indices, of any shape.
        spec: spec of the data set.
        where: file or sample of the mask, for messages.
        advice: advice to append to the message.

    Raises:
        BrokenSample: if there is such an index, with reason "class_range", naming the smallest.
    """
    if (strays := spec.stray_pixels(mask)).size:
        count = len(spec.classes)
        raise BrokenSample(
            "class_range",
            f"{where} has class {int(strays.min())} in {strays.size} pixels; there are {count} "
            f"classes, 0 to {count - 1}, and {spec.ignore_index} is ignored{advice}",
        )

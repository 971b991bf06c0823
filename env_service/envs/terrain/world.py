"""Generators of the ground truth: the cells of interest on the map."""

import importlib.resources
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from murmur.env_service.envs.terrain.config import Config
from murmur.shared.process.errors import RasterError

_GDAL_NODATA = 42113  # TIFF tag that holds the value of cells without data, as text
_BUNDLED = {"jacksboro": "jacksboro_fault_dem.npy"}
_FORMATS = {".npy": "", ".png": "PNG", ".tif": "TIFF", ".tiff": "TIFF"}  # Pillow's names
_MIN_SIDE = 8  # cells of the smaller side of a crop; less shows nothing but pixels
_TRIES = 20


def load_raster(name: str) -> NDArray[np.float32]:
    """Read a raster.

    Args:
        name: 'jacksboro' (bundled) or the path of a .tif, .tiff, .png or .npy file.

    Returns:
        [rows, columns] float32 values, finite, of more than one value.

    Raises:
        RasterError: if the file cannot be read or its values cannot be used.
    """
    if name in _BUNDLED:
        folder = importlib.resources.files("murmur.env_service.envs.terrain") / "data"
        with (folder / _BUNDLED[name]).open("rb") as file:
            bundled: NDArray[np.int16] = np.load(file, allow_pickle=False)
        return np.asarray(bundled, np.float32)
    path = Path(name)
    if not path.is_file():
        raise RasterError(
            f"raster '{name}' does not exist; give a .tif, .png or .npy file or {set(_BUNDLED)}"
        )
    values, nodata = _read(path)
    if values.ndim != 2:
        raise RasterError(
            f"raster '{name}' has shape {values.shape}; save a single band (rows, columns)"
        )
    if values.dtype.kind not in "biuf":
        raise RasterError(f"raster '{name}' holds {values.dtype}; save real numbers")
    if not values.size:
        raise RasterError(f"raster '{name}' has shape {values.shape}: there is nothing in it")
    with np.errstate(over="ignore"):  # what is too large becomes infinite, and is refused
        result = values.astype(np.float32)
    missing = ~np.isfinite(result)
    if nodata is not None:
        missing |= values == nodata
    if missing.any():
        value = "not finite" if nodata is None else f"not finite or nodata ({nodata:g})"
        raise RasterError(
            f"raster '{name}' has {np.count_nonzero(missing)} of {values.size} cells that are "
            f"{value}; fill them or cut them off"
        )
    if result.min() == result.max():
        raise RasterError(
            f"raster '{name}' is {result.flat[0]:g} everywhere; take one with two values or more"
        )
    return result


def _read(path: Path) -> tuple[NDArray[np.generic], float | None]:
    """Read the values of a file and its nodata value, if it names one."""
    suffix = path.suffix.lower()
    if suffix not in _FORMATS:
        raise RasterError(f"raster '{path}' is a '{suffix}' file; save it as .tif, .png or .npy")
    try:
        if suffix == ".npy":
            return np.load(path, allow_pickle=False), None
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)  # 90 million cells
            with Image.open(path, formats=[_FORMATS[suffix]]) as image:
                tag = getattr(image, "tag_v2", {}).get(_GDAL_NODATA)
                nodata = None if tag is None else float(str(tag).strip("\0 "))
                # The numbers of a palette's colours are no values.
                return np.asarray(image.convert("RGB") if image.mode == "P" else image), nodata
    except Exception as error:  # NumPy and Pillow raise whatever a broken file makes them
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise RasterError(f"raster '{path}' cannot be read ({reason}); save it again") from error


def resample(
    values: NDArray[np.float32], shape: tuple[int, int], nearest: bool
) -> NDArray[np.float32]:
    """Resample a grid's values to another grid over the same area.

    Each new cell gets the mean over the area that it covers, parts of cells included (OpenCV's
    INTER_AREA): from m to n cells, cell i gets the mean over [i m/n, (i+1) m/n). Or it gets the
    value at its corner: cell i that of floor(i m/n).

    Args:
        values: [rows, columns] values.
        shape: (rows, columns) of the result.
        nearest: true for values at corners instead of means.
    """
    if nearest:
        rows, columns = (np.arange(n) * m // n for n, m in zip(shape, values.shape, strict=True))
        return values[np.ix_(rows, columns)]
    across = _means(values, shape[0])
    return np.asarray(_means(across.T, shape[1]).T, np.float32)


def _means(values: NDArray[np.floating], cells: int) -> NDArray[np.float64]:
    """Compute means over equal cells of the first axis."""
    count = len(values)
    before = np.zeros((count + 1, *values.shape[1:]))
    np.cumsum(values, axis=0, out=before[1:])  # sum of all that comes before an index
    edges = np.arange(cells + 1) * (count / cells)
    whole = np.minimum(edges.astype(np.intp), count - 1)
    at_edges = before[whole] + (edges - whole)[:, None] * values[whole]
    return np.asarray(np.diff(at_edges, axis=0) * (cells / count))


class RasterWorld:
    """Generator of ground truths from crops of a raster.

    Each crop is turned by a multiple of 90 degrees and flipped (if augmented), resampled to the
    map, and thresholded. A crop with a share of interest outside `raster_share` is redrawn, up to
    20 times in all; if none fits, the share closest to a half is taken.

    Args:
        config: options of the mission.
        shape: cells of the map.

    Raises:
        RasterError: if the raster cannot be used with this configuration.
    """

    def __init__(self, config: Config, shape: tuple[int, int]) -> None:
        self._config = config
        self._shape = shape
        self._values = load_raster(config.raster)
        self._threshold: float | None = config.raster_threshold
        if config.raster_quantile_of == "raster" and self._threshold is None:
            self._threshold = float(np.quantile(self._values, config.raster_quantile))
        if self._threshold is not None:
            low, high = float(self._values.min()), float(self._values.max())
            if not low <= self._threshold < high:
                raise RasterError(
                    f"raster '{config.raster}' lies in [{low:g}, {high:g}] and is of one class at "
                    f"threshold {self._threshold:g}; set raster_threshold in between"
                )
        side = min(min(self._crop_size(turned)) for turned in (False, True))
        if side < _MIN_SIDE:
            raise RasterError(
                f"raster '{config.raster}' of shape {self._values.shape} gives crops of {side} "
                f"cells, need {_MIN_SIDE}; raise raster_crop = {config.raster_crop:g} or take a "
                "finer raster"
            )

    def _crop_size(self, turned: bool) -> tuple[int, int]:
        """Return rows and columns of a crop of the map's proportions."""
        rows, columns = self._shape[::-1] if turned else self._shape
        height, width = self._values.shape
        scale = min(height / rows, width / columns) * self._config.raster_crop
        return min(round(rows * scale), height), min(round(columns * scale), width)

    def draw(self, generator: np.random.Generator) -> NDArray[np.uint8]:
        """Draw a ground truth: [X, Y] uint8, 1 = of interest.

        Raises:
            RasterError: if 20 crops in a row are of one class only.
        """
        low, high = self._config.raster_share
        best, best_distance = None, np.inf
        for _ in range(_TRIES):
            truth = self._crop(generator)
            share = float(truth.mean())
            if low <= share <= high:
                return truth
            if 0 < share < 1 and abs(share - 0.5) < best_distance:
                best, best_distance = truth, abs(share - 0.5)
        if best is None:
            raise RasterError(
                f"raster '{self._config.raster}': {_TRIES} crops in a row were of one class; raise "
                "raster_crop or set raster_threshold nearer to the middle"
            )
        return best

    def _crop(self, generator: np.random.Generator) -> NDArray[np.uint8]:
        """Draw one crop, thresholded."""
        config = self._config
        turns = int(generator.integers(4)) if config.raster_augment else 0
        rows, columns = self._crop_size(turned=turns % 2 == 1)
        top = int(generator.integers(self._values.shape[0] - rows + 1))
        left = int(generator.integers(self._values.shape[1] - columns + 1))
        crop = np.rot90(self._values[top : top + rows, left : left + columns], turns)
        if config.raster_augment and generator.integers(2):
            crop = crop[::-1]
        values = resample(crop, self._shape, nearest=config.raster_resampling == "nearest")
        threshold = self._threshold
        if threshold is None:
            # Of the crop, not of its resampled values: cheaper by the factor of enlargement.
            threshold = float(np.quantile(crop, config.raster_quantile))
        return np.asarray(values > threshold, np.uint8)


Truth = NDArray[np.uint8]
Generator = np.random.Generator
DrawWorld = Callable[[Generator], Truth]
"""Draws [X, Y] uint8, 1 = of interest."""


def _cells(size: int, percent: int) -> int:
    """Return a percentage of a side, in whole cells."""
    return size * percent // 100


def half_plane(shape: tuple[int, int], generator: Generator) -> Truth:
    """Draw 30 to 60 % of the area at one of the four sides: 124 different maps."""
    truth = np.zeros(shape, np.uint8)
    side = int(generator.integers(4))
    view = truth if side < 2 else truth.T
    depth = _cells(len(view), int(generator.integers(30, 61)))
    view[:depth] = 1
    return np.ascontiguousarray(truth[::-1, ::-1]) if side % 2 else truth


def corner(shape: tuple[int, int], generator: Generator) -> Truth:
    """Draw a rectangle of 55 to 74 % of each side in one of the four corners."""
    truth = np.zeros(shape, np.uint8)
    rows, columns = (
        _cells(size, int(percent))
        for size, percent in zip(shape, generator.integers(55, 75, 2), strict=True)
    )
    flip_x, flip_y = generator.integers(2, size=2)
    view = truth[::-1] if flip_x else truth
    view = view[:, ::-1] if flip_y else view
    view[:rows, :columns] = 1
    return truth


def band(shape: tuple[int, int], generator: Generator) -> Truth:
    """Draw a band from 20..34 % to 65..79 % along one axis, or all but that band."""
    truth = np.zeros(shape, np.uint8)
    view = truth.T if generator.integers(2) else truth
    first, end = int(generator.integers(20, 35)), int(generator.integers(65, 80))
    view[_cells(len(view), first) : _cells(len(view), end)] = 1
    return 1 - truth if generator.integers(2) else truth


def corners_2(shape: tuple[int, int], generator: Generator) -> Truth:
    """Draw two opposite corners of 40 to 54 % of each side; they may overlap."""
    truth = np.zeros(shape, np.uint8)
    percent = int(generator.integers(40, 55))
    rows, columns = (_cells(size, percent) for size in shape)
    view = truth[::-1] if generator.integers(2) else truth
    view[:rows, :columns] = 1
    view[len(view) - rows :, truth.shape[1] - columns :] = 1
    return truth


def corners_4(shape: tuple[int, int], generator: Generator) -> Truth:
    """Draw four corners of 28 to 37 % of each side, or all but four of 32 to 41 %."""
    truth = np.zeros(shape, np.uint8)
    inverse = bool(generator.integers(2))
    percent = int(generator.integers(32, 42) if inverse else generator.integers(28, 38))
    rows, columns = (_cells(size, percent) for size in shape)
    for view in (truth, truth[::-1], truth[:, ::-1], truth[::-1, ::-1]):
        view[:rows, :columns] = 1
    return 1 - truth if inverse else truth


class GaussianField:
    """A Gaussian random field of power spectrum k^-exponent, cut at half its range.

    The spectrum of white noise is drawn directly and filtered by k^(-exponent / 2), k the length
    of the vector of integer frequencies, k = 0 removed; a cell is 1 where the field is at least
    half way between its minimum and its maximum.

    Args:
        shape: cells of the map.
        exponent: exponent of the power spectrum.
    """

    def __init__(self, shape: tuple[int, int], exponent: float) -> None:
        self._shape = shape
        x = np.fft.fftfreq(shape[0], 1 / shape[0])[:, None]
        y = np.fft.rfftfreq(shape[1], 1 / shape[1])
        k = np.hypot(x, y)
        k[0, 0] = np.inf
        amplitude = k ** (-exponent / 2)
        # These columns hold each frequency and its conjugate. irfft2 keeps the real part of what
        # independent draws give there, half of their power.
        amplitude[:, 0] *= np.sqrt(2)
        if shape[1] % 2 == 0:
            amplitude[:, -1] *= np.sqrt(2)
        self._amplitude = amplitude.astype(np.float32)

    def field(self, generator: Generator) -> NDArray[np.float32]:
        """Draw the field before it is cut: [X, Y], of arbitrary scale."""
        noise = generator.standard_normal((*self._amplitude.shape, 2), np.float32)
        spectrum = noise.view(np.complex64)[..., 0] * self._amplitude
        return np.fft.irfft2(spectrum, self._shape).astype(np.float32, copy=False)

    def __call__(self, generator: Generator) -> Truth:
        """Draw a ground truth, [X, Y] uint8."""
        field = self.field(generator)
        return np.asarray(field >= (field.min() + field.max()) / 2, np.uint8)


def world(config: Config, shape: tuple[int, int]) -> DrawWorld:
    """Make the generator that a configuration names, for a map of this shape.

    Raises:
        RasterError: if it is a raster that cannot be used.
    """
    if config.world == "raster":
        return RasterWorld(config, shape).draw
    if config.world == "gaussian":
        return GaussianField(shape, config.gaussian_exponent)
    draw = {
        "half-plane": half_plane,
        "corner": corner,
        "band": band,
        "corners-2": corners_2,
        "corners-4": corners_4,
    }[config.world]
    return lambda generator: draw(shape, generator)

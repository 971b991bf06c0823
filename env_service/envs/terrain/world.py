"""Generators of the ground truth: the cells of interest on the map."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from env_service.envs.terrain.config import Config
from env_service.envs.terrain.raster import RasterWorld

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

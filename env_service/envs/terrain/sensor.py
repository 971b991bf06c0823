"""The downward camera: its footprint, resolution and noise."""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from murmur.env_service.compiled import compiled
from murmur.env_service.envs.terrain.config import Config
from murmur.env_service.envs.terrain.lattice import lattice_shape
from murmur.env_service.splitmix import mix

_EPSILON = 1e-9  # keeps 56.9999... cells from becoming 56


class Camera(NamedTuple):
    """The camera over every position of the lattice.

    Attributes:
        centre_x: [X] int64, map row below each lattice x.
        centre_y: [Y] int64, map column below each lattice y.
        radius_x: [Z] int64, half the footprint's side along x at each altitude, map cells.
        radius_y: [Z] int64, half the footprint's side along y, map cells.
        noise: [Z] float64, probability of a wrong cell.
        ratio: [Z] float32, odds (1 - noise) / noise that the camera's report of a cell is right.
    """

    centre_x: NDArray[np.int64]
    centre_y: NDArray[np.int64]
    radius_x: NDArray[np.int64]
    radius_y: NDArray[np.int64]
    noise: NDArray[np.float64]
    ratio: NDArray[np.float32]


def footprint_side_m(altitude_m: float, fov_deg: float) -> float:
    """Return the side of the ground seen from an altitude: 2 h tan(FoV / 2), meters."""
    return 2 * altitude_m * math.tan(math.radians(fov_deg) / 2)


def cell_size_m(config: Config) -> float:
    """Return the side of a map cell: one camera pixel at the lowest altitude, meters."""
    return footprint_side_m(config.altitudes_m[0], config.fov_x_deg) / config.pixels


def map_shape(config: Config) -> tuple[int, int]:
    """Return the map's cells along x and y; parts of a cell at the edge are left out."""
    size = cell_size_m(config)
    return int(config.area_x_m / size + _EPSILON), int(config.area_y_m / size + _EPSILON)


def camera(config: Config) -> Camera:
    """Make the camera of a mission.

    A footprint reaches floor(floor(side / cell) / 2) cells to both sides of the cell below the
    camera: [centre - radius, centre + radius).
    """
    size = cell_size_m(config)
    x, y, _ = lattice_shape(config)

    def radius(fov_deg: float) -> NDArray[np.int64]:
        sides = [footprint_side_m(h, fov_deg) / size for h in config.altitudes_m]
        return np.array([int(side + _EPSILON) // 2 for side in sides], np.int64)

    noise = np.array(config.noise)
    return Camera(
        centre_x=(np.arange(x) * config.spacing_m / size + _EPSILON).astype(np.int64),
        centre_y=(np.arange(y) * config.spacing_m / size + _EPSILON).astype(np.int64),
        radius_x=radius(config.fov_x_deg),
        radius_y=radius(config.fov_y_deg),
        noise=noise,
        ratio=((1 - noise) / noise).astype(np.float32),
    )


@compiled()
def footprint(
    camera: Camera, cell: NDArray[np.int32], shape: tuple[int, int], out: NDArray[np.int64]
) -> None:
    """Compute the part of the map seen from a position.

    Args:
        camera: camera of the mission.
        cell: [3] position.
        shape: cells of the map.
        out: [4] receives first row, end row, first column, end column (ends excluded).
    """
    x, rx = camera.centre_x[cell[0]], camera.radius_x[cell[2]]
    y, ry = camera.centre_y[cell[1]], camera.radius_y[cell[2]]
    out[0], out[1] = max(x - rx, 0), min(x + rx, shape[0])
    out[2], out[3] = max(y - ry, 0), min(y + ry, shape[1])


@compiled()
def stream(key: np.uint64, time: int, number: int) -> np.uint64:
    """Return the key of one of an episode's random streams at one time."""
    return np.uint64(mix(mix(key + np.uint64(time)) + np.uint64(number)))


@compiled()
def measure(
    truth: NDArray[np.uint8],
    rect: NDArray[np.int64],
    noise: float,
    key: np.uint64,
    words: NDArray[np.uint64],
    seen: NDArray[np.uint8],
) -> None:
    """Measure a footprint; each cell is wrong with probability `noise`, independently.

    The noise is a pure function of the key (splitmix64 in counter mode, 16 bits for each cell, so
    probabilities are multiples of 2^-16): neither other environments nor other agents shift it.

    Args:
        truth: [X, Y] ground truth, 0 or 1.
        rect: [4] footprint.
        noise: probability of a wrong cell.
        key: random key of this agent's measurement at this time.
        words: scratch, at least a quarter of the footprint's cells.
        seen: [>= rows, >= columns] receives 0 or 1 at the footprint's cells, from [0, 0] on.
    """
    rows, columns = rect[1] - rect[0], rect[3] - rect[2]
    for k in range((rows * columns + 3) // 4):
        words[k] = mix(key + np.uint64(k) * np.uint64(0x9E3779B97F4A7C15))
    draws = words.view(np.uint16)
    limit = np.uint16(min(round(noise * 65536), 65535))
    for i in range(rows):
        draw = draws[i * columns : (i + 1) * columns]
        source = truth[rect[0] + i, rect[2] : rect[3]]
        target = seen[i, :columns]
        for j in range(columns):
            target[j] = source[j] ^ np.uint8(draw[j] < limit)

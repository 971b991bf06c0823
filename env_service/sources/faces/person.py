"""A person: shape and pose of the head, colors, hair, clothes, accessories.

Head coordinates: x to the right, y down, z towards the viewer; the crown is at y = -1, the chin at
y = 1.
"""

import numpy as np
from numpy.typing import NDArray

from murmur.env_service.sources.faces.canvas import Colour, Points, mix, shade

Space = NDArray[np.float64]  # [N, 3] x, y, z

_AT = np.array([-1.0, -0.93, -0.75, -0.45, -0.1, 0.25, 0.55, 0.8, 0.93, 1.0])
_HALF_WIDTH = np.array([0.05, 0.34, 0.57, 0.69, 0.71, 0.68, 0.58, 0.42, 0.28, 0.14])
_HALF_DEPTH = np.array([0.05, 0.42, 0.68, 0.83, 0.86, 0.8, 0.7, 0.62, 0.56, 0.5])


def rotation(yaw: float, pitch: float, roll: float) -> NDArray[np.float64]:
    """Return the rotation [3, 3] by angles in rad: yaw about y, pitch about x, roll about z."""
    cy, sy, cp, sp, cr, sr = (f(a) for a in (yaw, pitch, roll) for f in (np.cos, np.sin))
    about_y = np.array([[cy, 0, sy], [0, 1, 0], [-sy, 0, cy]])
    about_x = np.array([[1, 0, 0], [0, cp, -sp], [0, sp, cp]])
    about_z = np.array([[cr, -sr, 0], [sr, cr, 0], [0, 0, 1]])
    turned: NDArray[np.float64] = about_z @ about_x @ about_y
    return turned


class Head:
    """A head of random shape and pose.

    Attributes:
        centre: [2] center of the head in the picture.
        scale: half the head's height, in the picture.
        yaw, pitch, roll: angles, radians; yaw > 0 looks to the right of the picture.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        """Draw shape and pose."""
        self.scale = float(rng.uniform(0.23, 0.4))
        self.centre = np.array([rng.normal(0.5, 0.06), rng.normal(0.46, 0.04)])
        self.yaw = float(np.clip(rng.normal(0, 0.42), -0.95, 0.95))
        self.pitch = float(np.clip(rng.normal(0, 0.16), -0.4, 0.4))
        self.roll = float(np.clip(rng.normal(0, 0.2), -0.6, 0.6))
        broad, jaw, chin = rng.uniform(0.9, 1.12), rng.uniform(0.82, 1.15), rng.uniform(0.6, 1.4)
        lower = np.clip(_AT, 0, 1)
        self._half_width = _HALF_WIDTH * broad * (1 + (jaw - 1) * np.minimum(1, lower * 1.6))
        self._half_width[-1] *= chin
        self._half_depth = _HALF_DEPTH * rng.uniform(0.92, 1.05)
        self._head = rotation(self.yaw, self.pitch, self.roll)
        self._body = rotation(0.45 * self.yaw, 0.2 * self.pitch, 0.2 * self.roll)

    def project(self, points: Space) -> Points:
        """Project points of the head into the picture; near parts are slightly larger."""
        turned = points @ self._head.T
        placed: Points = self.centre + self.scale * turned[:, :2] / (1.12 - 0.12 * turned[:, 2:])
        return placed

    def project_body(self, points: Space) -> Points:
        """Project points of neck and shoulders, which turn less than the head."""
        placed: Points = self.centre + self.scale * (points @ self._body.T)[:, :2]
        return placed

    def half_width(self, y: NDArray[np.float64] | float) -> NDArray[np.float64]:
        """Return half the head's width at height y."""
        width: NDArray[np.float64] = np.interp(y, _AT, self._half_width)
        return width

    def face(self, points: Points, lift: float = 0.0) -> Space:
        """Place points (x, y) on the front of the head, at a distance `lift` from it."""
        x, y = points[:, 0], points[:, 1]
        across = np.clip(x / np.maximum(self.half_width(y), 0.05), -1, 1)
        z = np.interp(y, _AT, self._half_depth) * np.sqrt(1 - across**2)
        return np.stack([x, y, z + lift], 1)

    def rings(self, top: float, bottom: float, angle: float, grown: float = 1.0) -> Space:
        """Return points around the head, for the outline of a part of it.

        Args:
            top: height y of the highest points.
            bottom: height y of the lowest points.
            angle: largest angle from the front, to both sides, radians; pi: all around.
            grown: scale, larger than 1 for parts that lie on the head.
        """
        y = np.linspace(top, bottom, 12)[:, None]
        a = np.linspace(-angle, angle, 25)[None]
        width = np.interp(y, _AT, self._half_width) * grown
        depth = np.interp(y, _AT, self._half_depth) * grown
        points = np.broadcast_arrays(
            width * np.sin(a), y * np.where(y < 0, grown, 1), depth * np.cos(a)
        )
        return np.stack(points, -1).reshape(-1, 3)

    def depth(self, point: tuple[float, float, float]) -> float:
        """Return a point's depth towards the viewer; below 0 it is behind the outline."""
        return float((self._head @ np.array(point))[2])


_SKINS = np.array(
    [(188, 210, 246), (150, 184, 232), (120, 158, 208), (84, 122, 178), (50, 76, 124), (32, 44, 74)]
)
_HAIRS = np.array(
    [
        (18, 16, 16),
        (26, 32, 46),
        (36, 56, 92),
        (60, 110, 160),
        (120, 180, 215),
        (40, 60, 150),
        (150, 150, 155),
        (215, 218, 222),
    ]
)
_IRISES = np.array([(30, 45, 80), (40, 80, 120), (150, 110, 70), (100, 130, 80), (110, 110, 105)])


def any_colour(rng: np.random.Generator, low: float = 10, high: float = 245) -> Colour:
    """Draw a color of any hue."""
    b, g, r = rng.uniform(low, high, 3).tolist()
    return b, g, r


def _between(rng: np.random.Generator, table: np.ndarray, spread: float) -> Colour:
    """Draw a color between two neighbors of a table."""
    at = rng.uniform(0, len(table) - 1)
    i = int(at)
    colour = table[i] + (at - i) * (table[i + 1] - table[i]) + rng.normal(0, spread, 3)
    b, g, r = np.clip(colour, 4, 250).tolist()
    return b, g, r


def _chosen(rng: np.random.Generator, **shares: float) -> str:
    """Draw a name by the shares of all names, which add up to 1."""
    return str(rng.choice([*shares], p=[*shares.values()]))


class Look:
    """The random look of a person: colors, hair, clothes, accessories.

    Attributes:
        fringe: how far the hair comes down over the forehead, 0: not at all.
        volume: size of the hair, 1: as the head.
        length: length of the hair, in head coordinates.
        ears_shown: true for each ear, left and right, that hair does not cover.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        """Draw a person."""
        self.skin = _between(rng, _SKINS, 7)
        self.hair = any_colour(rng) if rng.random() < 0.08 else _between(rng, _HAIRS, 8)
        if rng.random() < 0.06:  # as the skin, which is hard to tell apart
            self.hair = shade(self.skin, rng.uniform(0.7, 1.05))
        self.style = style = _chosen(
            rng, bald=0.07, short=0.24, curly=0.14, bob=0.16, long=0.2, bun=0.1, side=0.09
        )
        covered = style in ("bob", "long") and rng.random() < 0.6
        lip = mix(self.skin, (70, 60, 190), rng.uniform(0.05, 0.7))
        as_skin = rng.random() < 0.1
        self.cloth = shade(self.skin, rng.uniform(0.75, 1.1)) if as_skin else any_colour(rng)
        self.brow = mix(shade(self.hair, 0.75), self.skin, rng.uniform(0, 0.6))
        self.lip = shade(lip, rng.uniform(0.75, 1.05))
        self.iris = _between(rng, _IRISES, 8)
        other = rng.random() < 0.5
        self.cloth_2 = any_colour(rng) if other else shade(self.cloth, rng.uniform(0.6, 1.4))
        fringe = rng.random() < 0.45 and style != "bald"
        self.fringe = rng.uniform(0.1, 0.5) if fringe else 0.0
        flat = style in ("short", "bun")
        self.volume = rng.uniform(1.05, 1.16) if flat else rng.uniform(1.1, 1.35)
        self.length = rng.uniform(0.3, 0.9) if style == "bob" else rng.uniform(1.0, 2.2)
        self.hairline = rng.uniform(-0.72, -0.5)
        self.hat = _chosen(rng, none=0.74, cap=0.08, beanie=0.07, brim=0.07, scarf=0.04)
        self.glasses = _chosen(rng, none=0.68, round=0.11, square=0.11, dark=0.1)
        self.beard = rng.uniform(0.2, 0.8) if rng.random() < 0.22 else 0.0
        self.ears_shown = (not covered or rng.random() < 0.15, not covered or rng.random() < 0.15)
        self.earrings = _chosen(rng, none=0.56, stud=0.12, hoop=0.16, drop=0.16)
        self.necklace = _chosen(rng, none=0.62, chain=0.13, beads=0.12, pendant=0.13)
        self.mouth_open = rng.uniform(0.04, 0.2) if rng.random() < 0.42 else 0.0
        self.smile = rng.normal(0.25, 0.5)
        self.eyes_open = 0.0 if rng.random() < 0.05 else rng.uniform(0.35, 1.1)
        self.lashes = rng.uniform(0, 1)
        self.age = max(0.0, rng.normal(0.2, 0.4))
        self.freckles = rng.random() < 0.12
        self.neckline = _chosen(rng, round=0.32, v=0.24, high=0.18, hood=0.13, bare=0.13)
        self.pattern = _chosen(rng, plain=0.4, stripes=0.18, checks=0.14, dots=0.1, knit=0.18)

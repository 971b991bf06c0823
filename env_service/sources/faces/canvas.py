"""A picture and its mask, drawn together in coordinates from 0 to 1."""

import cv2
import numpy as np
from numpy.typing import NDArray

Points = NDArray[np.float64]  # [N, 2] x, y
Colour = tuple[float, float, float]  # blue, green, red; 0 to 255

_SHIFT = 4  # bits of a pixel's fraction


def smooth(points: Points, rounds: int = 2) -> Points:
    """Cut the corners of a closed curve (Chaikin 1974): four times the points in two rounds."""
    for _ in range(rounds):
        following = np.roll(points, -1, 0)
        cut = np.empty((2 * len(points), 2))
        cut[0::2] = 0.75 * points + 0.25 * following
        cut[1::2] = 0.25 * points + 0.75 * following
        points = cut
    return points


def hull(points: Points) -> Points:
    """Return the convex hull of points."""
    found = cv2.convexHull(points.astype(np.float32))
    return found[:, 0].astype(np.float64)  # type: ignore[no-any-return]


def shade(colour: Colour, factor: float) -> Colour:
    """Make a color darker or lighter by a factor."""
    b, g, r = (min(255.0, max(0.0, c * factor)) for c in colour)
    return b, g, r


def mix(one: Colour, other: Colour, share: float) -> Colour:
    """Mix two colors: `share` of the other."""
    b, g, r = (a + (b - a) * share for a, b in zip(one, other, strict=True))
    return b, g, r


class Canvas:
    """A picture and its mask of classes, into which shapes are drawn.

    Attributes:
        size: side S of both, pixels.
        image: [S, S, 3] picture in blue, green, red.
        mask: [S, S] classes.
    """

    def __init__(self, size: int) -> None:
        """Start with an empty picture, all background."""
        self.size = size
        self.image = np.zeros((size, size, 3), np.uint8)
        self.mask = np.zeros((size, size), np.uint8)

    def _fixed(self, points: Points) -> NDArray[np.int32]:
        """Convert points to OpenCV's fractions of pixels; clip far ones."""
        pixels = points * (self.size << _SHIFT)
        far = 4 * self.size << _SHIFT
        return pixels.clip(-far, far).astype(np.int32)

    def within(self, outline: Points) -> NDArray[np.uint8]:
        """Return [S, S], 1 for pixels within an outline, else 0."""
        within = np.zeros_like(self.mask)
        cv2.fillPoly(within, [(np.clip(outline, -4, 5) * self.size).astype(np.int32)], 1)
        return within

    def fill(self, part: int | None, points: Points, colour: Colour) -> None:
        """Fill a polygon; `part` None leaves the mask."""
        fixed = [self._fixed(points)]
        cv2.fillPoly(self.image, fixed, colour, cv2.LINE_AA, _SHIFT)
        if part is not None:
            cv2.fillPoly(self.mask, fixed, part, cv2.LINE_8, _SHIFT)

    def line(
        self,
        part: int | None,
        points: Points,
        colour: Colour,
        width: float,
        closed: bool = False,
    ) -> None:
        """Draw a line through points [K, 2], or many lines [N, K, 2] at once."""
        fixed = list(self._fixed(points).reshape(-1, *points.shape[-2:]))
        thick = max(1, round(width * self.size))
        cv2.polylines(self.image, fixed, closed, colour, thick, cv2.LINE_AA, _SHIFT)
        if part is not None:
            cv2.polylines(self.mask, fixed, closed, part, thick, cv2.LINE_8, _SHIFT)

    def disc(self, part: int | None, centre: Points, radius: float, colour: Colour) -> None:
        """Fill a circle."""
        x, y = self._fixed(centre[None])[0].tolist()
        pixels = max(1, int(radius * (self.size << _SHIFT)))
        cv2.circle(self.image, (x, y), pixels, colour, -1, cv2.LINE_AA, _SHIFT)
        if part is not None:
            cv2.circle(self.mask, (x, y), pixels, part, -1, cv2.LINE_8, _SHIFT)

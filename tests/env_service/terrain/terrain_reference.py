"""A mission in plain numpy and OpenCV: full maps, log-odds, no increments. Slow and obvious.

It is given what the cameras reported; everything else it works out for itself.
"""

import math
from dataclasses import dataclass, field

import cv2
import numpy as np
from numpy.typing import NDArray

from murmur.env_service.envs.terrain import Config

LIMIT = math.log(0.9999 / 0.0001)
Map = NDArray[np.float64]


def entropy(p: Map) -> Map:
    p = np.clip(p, 1e-4, 1 - 1e-4)
    return -p * np.log2(p) - (1 - p) * np.log2(1 - p)


def weight(p: Map) -> Map:
    return np.where(p > 0.501, 1.0, np.where(p < 0.499, 0.0, 0.5))


def sigmoid(x: Map) -> Map:
    return 1 / (1 + np.exp(-x))


@dataclass
class ReferenceMission:
    """One episode of one mission."""

    config: Config
    truth: NDArray[np.uint8]
    range_m: float
    time: int = -1
    seen: NDArray[np.bool_] = field(init=False)
    beliefs: Map = field(init=False)  # [A + 1, X, Y] log-odds, the last is the global one

    def __post_init__(self) -> None:
        c = self.config
        self.size = (
            round(c.area_x_m / c.spacing_m) + 1,
            round(c.area_y_m / c.spacing_m) + 1,
        )
        lowest = 2 * c.altitudes_m[0] * math.tan(math.radians(c.fov_x_deg / 2))
        self.cell_m = lowest / c.pixels
        self.seen = np.zeros(self.truth.shape, bool)
        self.beliefs = np.zeros((c.num_agents + 1, *self.truth.shape))
        self.images: list[Map] = []

    def box(self, cell: NDArray[np.int32]) -> tuple[int, int, int, int]:
        """Unclipped footprint: first row, end row, first column, end column."""
        c = self.config
        height = c.altitudes_m[cell[2]]
        bounds: list[int] = []
        for axis, fov in ((0, c.fov_x_deg), (1, c.fov_y_deg)):
            side = 2 * height * math.tan(math.radians(fov / 2)) / self.cell_m
            radius = math.floor(math.floor(side + 1e-9) / 2)
            centre = math.floor(cell[axis] * c.spacing_m / self.cell_m + 1e-9)
            bounds += [centre - radius, centre + radius]
        return bounds[0], bounds[1], bounds[2], bounds[3]

    def advance(
        self,
        cells: NDArray[np.int32],
        reports: list[NDArray[np.uint8]],
        heard: NDArray[np.uint8],
    ) -> None:
        """Everyone has moved to `cells`, looked down and seen `reports` (clipped to the map)."""
        c = self.config
        agents = c.num_agents
        self.time += 1
        self.cells, self.heard = cells.copy(), heard.copy()
        before = sigmoid(self.beliefs[agents])
        self.inside, self.images, patches = [], [], []
        for a in range(agents):
            x0, x1, y0, y1 = self.box(cells[a])
            accuracy = 1 - c.noise[cells[a, 2]]
            padded = np.full((x1 - x0, y1 - y0), 0.5)
            mask = np.zeros(self.truth.shape, bool)
            log_odds = np.zeros(self.truth.shape)
            cx0, cx1 = max(x0, 0), min(x1, self.truth.shape[0])
            cy0, cy1 = max(y0, 0), min(y1, self.truth.shape[1])
            assert reports[a].shape == (cx1 - cx0, cy1 - cy0)
            prob = np.where(reports[a] == 1, accuracy, 1 - accuracy)
            padded[cx0 - x0 : cx1 - x0, cy0 - y0 : cy1 - y0] = prob
            mask[cx0:cx1, cy0:cy1] = True
            log_odds[cx0:cx1, cy0:cy1] = np.log(prob / (1 - prob))
            self.inside.append(mask)
            self.images.append(padded)
            patches.append(log_odds)
            self.seen |= mask
        for reader in range(agents + 1):
            order = list(range(agents))
            if reader < agents:
                order.remove(reader)
                order = [reader] + [b for b in order if heard[reader, b]]
            for b in order:
                belief, mask = self.beliefs[reader], self.inside[b]
                belief[mask] = np.clip(belief[mask], -LIMIT, LIMIT) + patches[b][mask]
        after = sigmoid(self.beliefs[agents])
        w = weight(after)
        base = (w * entropy(before)).mean()
        self.gain = (w * (entropy(before) - entropy(after))).mean() / base
        self.prob = after

    def in_range(self) -> NDArray[np.bool_]:
        c = self.config
        metres = np.array(
            [[x * c.spacing_m, y * c.spacing_m, c.altitudes_m[z]] for x, y, z in self.cells]
        )
        return np.linalg.norm(metres[:, None] - metres, axis=-1) <= self.range_m

    def shrink(self, image: Map) -> Map:
        return np.asarray(cv2.resize(image, self.size[::-1], interpolation=cv2.INTER_AREA))

    def metrics(self) -> dict[str, float]:
        roi = self.truth == 1
        claimed = self.prob > 0.5 + 1e-6
        return {
            "entropy": float(entropy(self.prob)[roi].mean()),
            "f1": 2 * float((claimed & roi).sum()) / float(claimed.sum() + roi.sum()),
            "coverage": float(self.seen.mean()),
        }

    def actor(self, a: int) -> dict[str, Map]:
        c = self.config
        h, w = self.size
        levels = len(c.altitudes_m)
        prob = np.clip(self.shrink(sigmoid(self.beliefs[a])), 1e-4, 0.9999)
        last = self.shrink(self.images[a])
        others = np.full(self.truth.shape, 0.5)
        position = np.zeros((h, w))
        x, y, z = self.cells[a]
        for r in range(h):
            for k in range(w):
                position[r, k] = 0 <= x + r - h // 2 < h and 0 <= y + k - w // 2 < w
        for b in range(c.num_agents):
            if b != a and self.heard[a, b]:
                others[self.inside[b]] = 0
                r, k = self.cells[b][0] - x + h // 2, self.cells[b][1] - y + w // 2
                if 0 <= r < h and 0 <= k < w:
                    position[r, k] = (self.cells[b][2] + 1) / (levels + 1)
        others[self.inside[a]] = 1
        position[h // 2, w // 2] = (z + 1) / (levels + 1)
        return {
            "budget": np.full((h, w), max(c.budget - self.time, 0) / c.budget),
            "agent_id": np.full((h, w), (a + 1) / c.num_agents),
            "position": position,
            "w_entropy": weight(prob) * entropy(prob),
            "local_w_entropy": weight(last) * entropy(last),
            "prob": prob,
            "footprint": self.shrink(others),
        }

    def critic(self) -> dict[str, Map]:
        positions = np.zeros(self.size)
        for x, y, z in self.cells:
            positions[x, y] = (z + 1) / len(self.config.altitudes_m)
        prob = np.clip(self.shrink(self.prob), 1e-4, 0.9999)
        union = np.where(np.any(self.inside, axis=0), 1.0, 0.5)
        return {
            "positions": positions,
            "w_entropy": weight(prob) * entropy(prob),
            "prob": prob,
            "footprints": self.shrink(union),
        }

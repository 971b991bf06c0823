"""Pictures of a mission: ground truth, the team's belief, its entropy, the paths flown."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from murmur.env_service.pictures import AGENT_COLOURS, Snapshot, draw_disc, write_title

FRAMES_PER_STEP = 3  # the UAVs glide from one position to the next

_TRUTH = LinearSegmentedColormap.from_list("truth", ["#eef0f2", "#2f6f4f"])
_BELIEF = LinearSegmentedColormap.from_list("belief", ["#3b4c8a", "#f4f4f0", "#2f6f4f"])
NEEDED = ("truth", "prob", "entropy", "positions_m", "paths_m", "footprints", "cell_m")
READING = (
    "Squares are where the agents began, discs where they ended (larger is higher). The middle map "
    "is what the team believes; the darker the right one, the surer it is."
)


def figures(snapshots: Sequence[Snapshot], rows: Sequence[int], title: str) -> Iterator[Figure]:
    """Draw the given rows of an episode, and the UAVs on their way between them."""
    yield mission_figure(snapshots[rows[0]], title)
    for before, after in pairwise(snapshots[row] for row in rows):
        start, end = before.state["positions_m"], after.state["positions_m"]
        for part in range(1, FRAMES_PER_STEP):
            share = part / FRAMES_PER_STEP
            yield mission_figure(before, title, start + share * (end - start))
        yield mission_figure(after, title)


def mission_figure(
    snapshot: Snapshot, title: str, positions_m: NDArray[np.float64] | None = None
) -> Figure:
    """Draw three maps side by side: truth with the flown paths, belief, entropy.

    Args:
        snapshot: row to draw.
        title: first words of the title.
        positions_m: [A, 3] positions at which to draw the UAVs, m; None: those of the row.
    """
    state = snapshot.state
    cell = float(state["cell_m"])
    size_x, size_y = (float(side * cell) for side in state["truth"].shape)
    extent = (0.0, size_x, 0.0, size_y)
    with mpl.rc_context({"font.size": 10, "axes.titlesize": 11, "axes.linewidth": 0.6}):
        figure = Figure(figsize=(12.8, 5.0), dpi=80, facecolor="white")
        axes = figure.subplots(1, 3)
        figure.subplots_adjust(left=0.03, right=0.965, bottom=0.14, top=0.83, wspace=0.14)
        for axis, (name, key, colours) in zip(
            axes,
            (
                ("truth and flown paths", "truth", _TRUTH),
                ("belief: probability of interest", "prob", _BELIEF),
                ("entropy: how unsure, bits", "entropy", mpl.colormaps["magma"]),
            ),
            strict=True,
        ):
            _draw_map(axis, name, np.asarray(state[key], np.float32).T, extent, colours)
            if axis is not axes[0]:
                bar = figure.colorbar(
                    axis.images[0], ax=axis, fraction=0.04, pad=0.015, ticks=[0, 0.5, 1]
                )
                bar.ax.tick_params(length=2, labelsize=9.5)
        _draw_team(axes[0], state, positions_m, paths=True)
        _draw_team(axes[1], state, positions_m, footprints=positions_m is None)
        _draw_team(axes[2], state, positions_m)
        figure.legend(
            loc="lower left",
            bbox_to_anchor=(0.02, 0.0),
            ncols=min(len(state["positions_m"]), 8),
            frameon=False,
            fontsize=9,
        )
        time = int(state["time"]) if "time" in state else len(state["paths_m"]) - 1
        shown = [
            f"{k} {snapshot.metrics[k]:.2f}" for k in ("entropy", "f1") if k in snapshot.metrics
        ]
        write_title(figure, "    ".join([title, f"t = {time}", *shown]).replace("f1", "F1"), 0.03)
    return figure


def _draw_map(
    axis: Any,  # noqa: ANN401 - matplotlib's Axes
    name: str,
    values: NDArray[np.float32],
    extent: tuple[float, float, float, float],
    colours: Any,  # noqa: ANN401 - matplotlib's Colormap
) -> None:
    """Draw one map [Y, X] of values from 0 to 1, with its size in meters."""
    _, size_x, _, size_y = extent
    axis.imshow(
        values,
        origin="lower",
        extent=extent,
        vmin=0,
        vmax=1,
        cmap=colours,
        interpolation="nearest",
    )
    axis.set_title(name, loc="left")
    axis.set_xticks([0, size_x], ["0", f"{size_x:.0f} m"])
    axis.set_yticks([0, size_y], ["0", f"{size_y:.0f}"])
    axis.tick_params(length=2, labelsize=9.5)
    axis.autoscale(enable=False)


def _draw_team(
    axis: Any,  # noqa: ANN401 - matplotlib's Axes
    state: Mapping[str, NDArray[Any]],
    positions_m: NDArray[np.float64] | None,
    *,
    paths: bool = False,
    footprints: bool = False,
) -> None:
    """Draw UAVs as discs that grow with altitude, with paths and labels, or last footprints."""
    positions = state["positions_m"] if positions_m is None else positions_m
    cell = float(state["cell_m"])
    for a, (x, y, z) in enumerate(positions):
        colour = AGENT_COLOURS[a % len(AGENT_COLOURS)]
        if paths:
            path = state["paths_m"][:, a]
            if positions_m is not None:
                path = np.vstack([path, positions[a]])
            axis.plot(
                *path[:, :2].T, color=colour, linewidth=2.2, alpha=0.9, zorder=3, clip_on=False
            )
            axis.plot(*path[0, :2], marker="s", color=colour, markersize=5, zorder=3, clip_on=False)
        if footprints:
            x0, x1, y0, y1 = cell * state["footprints"][a]  # m
            outline: dict[str, Any] = {"fill": False, "edgecolor": colour, "linewidth": 1.6}
            axis.add_patch(Rectangle((x0, y0), x1 - x0, y1 - y0, zorder=4, **outline))
        label = f"UAV {a + 1}: {z:.0f} m" if paths else None
        draw_disc(axis, (x, y), colour, _size(z, state), label)


def _size(altitude_m: float, state: Mapping[str, NDArray[Any]]) -> float:
    """Return the marker size, in points; the episode's highest UAV has the largest."""
    highest = max(float(np.max(state["paths_m"][..., 2])), altitude_m, 1e-6)
    return 5.0 + 8.0 * altitude_m / highest

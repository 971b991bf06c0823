"""Pictures of `spread`: agents and the landmarks that they share out."""

from collections.abc import Iterator, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Circle

from murmur.env_service.pictures import AGENT_COLOURS, Snapshot, write_title

NEEDED = ("agents", "landmarks", "radius")
READING = "Discs are the agents, lines their paths; crosses are the landmarks to share out."


def figures(snapshots: Sequence[Snapshot], rows: Sequence[int], title: str) -> Iterator[Figure]:
    """Draw the given rows of an episode, each with the paths up to it."""
    places = np.stack([s.state["agents"] for s in snapshots])  # [T, A, 2]
    reach = 1.1 * max(1.0, float(np.abs(places).max()))  # nothing holds an agent in the square
    for row in rows:
        state = snapshots[row].state
        figure = Figure(figsize=(6.0, 6.4), dpi=80, facecolor="white")
        axis = figure.add_axes((0.08, 0.05, 0.88, 0.86))
        axis.set_xlim(-reach, reach)
        axis.set_ylim(-reach, reach)
        axis.set_aspect("equal")
        axis.tick_params(length=2, labelsize=9.5)
        axis.locator_params(nbins=5)
        axis.plot(*state["landmarks"].T, "x", color="black", markersize=10, markeredgewidth=2.5)
        for a, place in enumerate(state["agents"]):
            colour = AGENT_COLOURS[a % len(AGENT_COLOURS)]
            axis.plot(*places[: row + 1, a].T, color=colour, linewidth=1.2, alpha=0.8)
            axis.add_patch(Circle(place, float(state["radius"]), color=colour, alpha=0.6))
        write_title(figure, f"{title}    t = {row}", 0.08)
        yield figure

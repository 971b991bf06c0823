"""Pictures of `formation`: the flight area from above, with the paths flown so far."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Circle
from numpy.typing import NDArray

from murmur.env_service.pictures import AGENT_COLOURS, Snapshot, draw_disc, write_title

NEEDED = ("agents", "heading", "goal", "obstacle", "in_formation", "area", "radii")
READING = (
    "Lines are the paths flown, arrows the headings. The large disc is the leader; followers "
    "within the dotted circle around it are in formation. Dark is the obstacle, green the goal."
)
_ARROW_PX = 40.0  # length of an agent's arrow


def figures(snapshots: Sequence[Snapshot], rows: Sequence[int], title: str) -> Iterator[Figure]:
    """Draw the given rows of an episode, each with the paths up to it."""
    places = np.stack([s.state["agents"] for s in snapshots])  # [T, A, 2]
    for row in rows:
        state = snapshots[row].state
        goal, collision, near, formation = map(float, state["radii"])
        figure = Figure(figsize=(7.2, 6.6), dpi=80, facecolor="white")
        axis = figure.add_axes((0.07, 0.06, 0.9, 0.86))
        (left, top), (right, bottom) = state["area"]
        to, round_ = _point(state["goal"]), _point(state["obstacle"])
        axis.set_xlim(left, right)
        axis.set_ylim(bottom, top)  # y grows downwards
        axis.set_aspect("equal")
        axis.tick_params(length=2, labelsize=9.5)
        axis.add_patch(Circle(to, goal, color="#a1d99b"))
        axis.annotate("goal", to, ha="center", va="center", fontsize=9)
        axis.add_patch(Circle(round_, near, fill=False, color="#969696", ls="--"))
        axis.add_patch(Circle(round_, collision, color="#636363"))
        leader = _point(state["agents"][0])
        axis.add_patch(Circle(leader, formation, fill=False, color=AGENT_COLOURS[0], ls=":"))
        for a, (x, y) in enumerate(state["agents"]):
            colour = AGENT_COLOURS[a % len(AGENT_COLOURS)]
            axis.plot(*places[: row + 1, a].T, color=colour, linewidth=1.2, alpha=0.8)
            heading = float(state["heading"][a])
            end = (x + _ARROW_PX * np.cos(heading), y - _ARROW_PX * np.sin(heading))
            arrow = {"arrowstyle": "-|>", "color": colour, "linewidth": 2}
            axis.annotate("", end, (x, y), arrowprops=arrow)
            draw_disc(axis, (x, y), colour, 6 if a else 9, f"follower {a}" if a else "leader")
        axis.legend(loc="lower right", fontsize=9, framealpha=0.8)
        together = f"{int(state['in_formation'].sum())} of {len(state['in_formation'])}"
        write_title(figure, f"{title}    t = {row}    followers in formation: {together}", 0.07)
        yield figure


def _point(place: NDArray[Any]) -> tuple[float, float]:
    return float(place[0]), float(place[1])

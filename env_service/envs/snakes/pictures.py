"""Pictures of `snakes`: the board, warm colors for the agents, cold ones for their opponents."""

from collections.abc import Iterator, Sequence

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from murmur.env_service.pictures import Snapshot, write_title

NEEDED = ("board", "heads", "lengths", "scores", "side", "time")
READING = (
    "Warm colours are the agents' snakes, cold ones their opponents', green the beans; a white "
    "disc is the head of a snake that lives."
)
_FLOOR, _BEAN = "#f4f4f0", "#31a354"
_TEAMS = (("#a63603", "#e6550d", "#fdae6b"), ("#08519c", "#3182bd", "#9ecae1"))


def figures(snapshots: Sequence[Snapshot], rows: Sequence[int], title: str) -> Iterator[Figure]:
    """Draw the given rows of a game."""
    for row in rows:
        state = snapshots[row].state
        ours = slice(0, 3) if int(state["side"]) == 0 else slice(3, 6)
        players = [*_TEAMS[0], *_TEAMS[1]] if ours.start == 0 else [*_TEAMS[1], *_TEAMS[0]]
        figure = Figure(figsize=(9.6, 5.6), dpi=80, facecolor="white")
        axis = figure.add_axes((0.02, 0.03, 0.96, 0.84))
        axis.imshow(
            state["board"],
            cmap=ListedColormap([_FLOOR, _BEAN, *players]),
            vmin=-0.5,
            vmax=7.5,  # codes 0 to 7, each in the middle of its colour
            interpolation="nearest",
        )
        height, width = state["board"].shape
        axis.set_xticks([])
        axis.set_yticks([])
        axis.vlines(np.arange(1, width) - 0.5, -0.5, height - 0.5, color="white", linewidth=1)
        axis.hlines(np.arange(1, height) - 0.5, -0.5, width - 0.5, color="white", linewidth=1)
        for (y, x), length in zip(state["heads"], state["lengths"], strict=True):
            if length:
                axis.plot(x, y, "o", color="white", markersize=9, markeredgecolor="black")
        scores = state["scores"]
        own = int(scores[ours].sum())
        score = (
            f"score of the agents (warm): {own}, of their opponents (cold): {scores.sum() - own}"
        )
        write_title(figure, f"{title}    t = {state['time']}    {score}", 0.02, size=12)
        yield figure

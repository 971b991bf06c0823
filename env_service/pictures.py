"""Pictures of episodes: an environment that can be drawn has a module `pictures` beside it.

It holds

    NEEDED                                  what the environment's render_state must give
    READING                                 how to read its pictures, in a sentence or two
    figures(snapshots, rows, title)         yields the pictures of an episode
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

if TYPE_CHECKING:  # training imports this module and draws nothing
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DRAWN = frozenset(p.parent.name for p in Path(__file__).parent.glob("envs/*/pictures.py"))
AGENT_COLOURS = ("#e6550d", "#3182bd", "#c51b8a", "#31a354", "#756bb1", "#fdae6b", "#17becf")


@dataclass(frozen=True)
class Snapshot:
    """One row of an episode.

    Attributes:
        state: arrays from the environment's render_state, by name.
        metrics: the environment's own results so far.
    """

    state: Mapping[str, NDArray[Any]]
    metrics: Mapping[str, float]


def write_title(figure: "Figure", text: str, left: float, size: float = 13) -> None:
    """Write a bold title that begins at `left`, a share of the width; `size` in points."""
    figure.suptitle(text, x=left, ha="left", fontsize=size, fontweight="bold")


def draw_disc(
    axis: "Axes", place: tuple[float, float], colour: str, size: float, label: str | None
) -> None:
    """Draw an agent as a disc with a white edge, `size` points wide."""
    (disc,) = axis.plot(*place, "o", color=colour, markersize=size, label=label)
    disc.set(markeredgecolor="white", markeredgewidth=1.2, zorder=5, clip_on=False)


def painters() -> dict[str, ModuleType]:
    """Import the `pictures` module of each environment that has one, by the environment's name."""
    return {
        name: import_module(f"murmur.env_service.envs.{name}.pictures") for name in sorted(DRAWN)
    }


def find_painter(snapshots: Sequence[Snapshot]) -> ModuleType | None:
    """Find the `pictures` module that draws such states; None if there is none.

    An environment of your own may give the same arrays as one of murmur's.
    """
    if not snapshots:
        return None
    given = snapshots[0].state.keys()
    return next((p for p in painters().values() if set(p.NEEDED) <= given), None)

"""Pictures of episodes: a module for each environment that can be drawn, by its name.

Each has

    NEEDED                                  what the environment's render_state must give
    figures(snapshots, rows, title)         yields the pictures of an episode
"""

import pkgutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

DRAWN = frozenset(module.name for module in pkgutil.iter_modules(__path__))
AGENT_COLOURS = ("#e6550d", "#3182bd", "#c51b8a", "#31a354", "#756bb1", "#fdae6b", "#17becf")


@dataclass(frozen=True)
class Snapshot:
    """One row of an episode.

    Attributes:
        state: what the environment's render_state gave.
        metrics: the environment's own results so far.
    """

    state: Mapping[str, NDArray[Any]]
    metrics: Mapping[str, float]


def drawable(needed: Collection[str], snapshots: Sequence[Snapshot]) -> bool:
    """Whether the environment gave what a picture needs: a module's NEEDED."""
    return bool(snapshots) and set(needed) <= snapshots[0].state.keys()

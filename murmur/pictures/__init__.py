"""Pictures of episodes: a module for each environment that can be drawn, by its name.

Each has

    NEEDED                                  what the environment's render_state must give
    READING                                 how to read its pictures, in a sentence or two
    figures(snapshots, rows, title)         yields the pictures of an episode
"""

import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
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


def painters() -> dict[str, ModuleType]:
    """Every environment's module, by name."""
    return {name: import_module(f"{__name__}.{name}") for name in sorted(DRAWN)}


def find_painter(snapshots: Sequence[Snapshot]) -> ModuleType | None:
    """What draws such states; None if nothing does.

    An environment of your own may give what one of murmur's gives.
    """
    if not snapshots:
        return None
    given = snapshots[0].state.keys()
    return next((p for p in painters().values() if set(p.NEEDED) <= given), None)

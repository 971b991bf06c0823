"""Maps that the learner computes from observations that the environment sends.

An environment may send less than its networks see: a number instead of a map that is equal
everywhere, probabilities instead of both probabilities and their entropy. Its spec then names, for
each map that the networks see, how every channel follows from the observations (the sources). A
channel that never changes is sent once, in the spec.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from murmur.shared.process.errors import SpecError

Kind = Literal["copy", "fill", "constant", "entropy"]
MAX_CHANNELS = 4_096  # of a derived map


@dataclass(frozen=True, slots=True)
class Channel:
    """One channel [H, W] of a derived map.

    Attributes:
        kind: "copy": channel `index` of the source. "fill": entry `index` of the source, a vector,
            in every cell. "constant": entry a of `values` in every cell of agent a's map (entry 0
            of a map that agents share). "entropy": weighted binary entropy of channel `index` of
            the source.
        source: name of an observation; empty for "constant".
        index: channel or entry of the source; unused for "constant".
        values: "constant": one value per agent. "entropy": (p_min, low, high); probabilities are
            clamped to [p_min, 1 - p_min], the weight is 0 below `low`, 1 above `high`, 0.5 between.
    """

    kind: Kind
    source: str = ""
    index: int = 0
    values: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class DerivedMap:
    """A map [C, H, W] that replaces its sources in the networks' inputs.

    Attributes:
        name: key of the map in observations.
        channels: C channels; at least one is taken from a map, which gives H and W.
    """

    name: str
    channels: tuple[Channel, ...]

    @property
    def sources(self) -> Iterator[str]:
        """Yield the names of the observations it is computed from; names may repeat."""
        return (channel.source for channel in self.channels if channel.source)


@dataclass(frozen=True, slots=True)
class MapShape:
    """Shape of a derived map: (C, H, W), per agent or shared by all agents."""

    shape: tuple[int, int, int]
    per_agent: bool


def check_derived(
    derived: DerivedMap,
    find: Callable[[str], tuple[tuple[int, ...], str, bool] | None],
    num_agents: int,
) -> MapShape:
    """Check a derived map against its sources, and return its shape.

    Args:
        derived: map to check.
        find: function from the name of an observation to (shape, dtype, per_agent), or None.
        num_agents: number of agents A.

    Raises:
        SpecError: for a source that does not exist or does not fit, naming map and channel.
    """
    sizes: set[tuple[int, int]] = set()
    owners: set[bool] = set()
    if not 0 < len(derived.channels) <= MAX_CHANNELS:
        raise SpecError(
            f"derived map '{derived.name}' has {len(derived.channels)} channels; it may have 1 to "
            f"{MAX_CHANNELS}"
        )
    for number, channel in enumerate(derived.channels):
        where = f"channel {number} of derived map '{derived.name}'"
        if channel.kind not in get_args(Kind):
            raise SpecError(f"{where} is of kind '{channel.kind}'; use one of {get_args(Kind)}")
        _check_values(where, channel, num_agents)
        if channel.kind == "constant":
            continue
        found = find(channel.source)
        if found is None:
            raise SpecError(f"{where} is computed from '{channel.source}', which does not travel")
        shape, dtype, per_agent = found
        owners.add(per_agent)
        rank = 1 if channel.kind == "fill" else 3
        if len(shape) != rank or dtype != "float32" or not 0 <= channel.index < shape[0]:
            raise SpecError(
                f"{where} needs entry {channel.index} of '{channel.source}', a float32 array with "
                f"{rank} dimension{'s' * (rank > 1)}; it is {dtype} {shape}"
            )
        if rank == 3:
            sizes.add((shape[1], shape[2]))
    if len(sizes) != 1 or len(owners) != 1:
        raise SpecError(
            f"derived map '{derived.name}' needs sources of one height and width, all per agent or "
            f"all shared; its maps are {sorted(sizes)}, per agent: {sorted(owners)}"
        )
    height, width = sizes.pop()
    return MapShape((len(derived.channels), height, width), owners.pop())


def _check_values(where: str, channel: Channel, num_agents: int) -> None:
    values = channel.values
    counts = {"constant": (1, num_agents), "entropy": (3,)}.get(channel.kind, (0,))
    if len(values) not in counts or not all(map(math.isfinite, values)):
        raise SpecError(
            f"{where} ({channel.kind}) has values {values[:8]}; it takes "
            f"{' or '.join(map(str, counts))} finite numbers"
        )
    if channel.kind == "entropy" and not 0 < values[0] < 0.5:
        raise SpecError(f"{where} clamps probabilities at {values[0]}; use a number in (0, 0.5)")

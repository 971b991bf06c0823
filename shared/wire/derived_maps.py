"""Maps that the learner computes from observations that the environment sends.

An environment may send less than its networks see: a number instead of a map that is equal
everywhere, probabilities instead of both probabilities and their entropy. Its spec then names, for
each map that the networks see, how every channel follows from the observations (the sources). A
channel that never changes is sent once, in the spec.
"""

import math
from collections.abc import Iterator
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


def check_channel(where: str, channel: Channel, num_agents: int) -> None:
    """Check a channel's kind, and that its values are as many finite numbers as its kind takes.

    Raises:
        SpecError: for another kind or other values; names `where`.
    """
    values = channel.values
    if channel.kind not in get_args(Kind):
        raise SpecError(f"{where} is of kind '{channel.kind}'; use one of {get_args(Kind)}")
    counts = {"constant": (1, num_agents), "entropy": (3,)}.get(channel.kind, (0,))
    if len(values) not in counts or not all(map(math.isfinite, values)):
        raise SpecError(
            f"{where} ({channel.kind}) has values {values[:8]}; it takes "
            f"{' or '.join(map(str, counts))} finite numbers"
        )
    if channel.kind == "entropy" and not 0 < values[0] < 0.5:
        raise SpecError(f"{where} clamps probabilities at {values[0]}; use a number in (0, 0.5)")

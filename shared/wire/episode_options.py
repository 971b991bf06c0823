"""Options of episodes on the wire."""

import math
from collections.abc import Iterable, Mapping

from murmur.shared.config.episode_options import MOST_CHARACTERS, MOST_OPTIONS, Value
from murmur.shared.process.errors import WireError
from murmur.shared.rpc import rollout_pb2 as pb

OPTIONS_BYTES = MOST_OPTIONS * (8 * MOST_CHARACTERS + 32)  # of all of a message, in UTF-8
_FIELDS = {bool: "flag", int: "whole", float: "number", str: "word"}


def options_to_proto(options: Mapping[str, Value]) -> list[pb.EpisodeOption]:
    """Encode options of episodes, by name."""
    return [
        pb.EpisodeOption(name=name, **{_FIELDS[type(value)]: value})  # type: ignore[arg-type]
        for name, value in options.items()
    ]


def options_from_proto(options: Iterable[pb.EpisodeOption]) -> dict[str, Value]:
    """Decode options of episodes.

    Raises:
        WireError: if one has no name or value, or stands twice.
    """
    found: dict[str, Value] = {}
    for option in options:
        kind = option.WhichOneof("value")
        value = getattr(option, kind) if kind else math.nan
        if not option.name or option.name in found or value != value:
            raise WireError(f"the learner sent no value of option '{option.name[:40]}', or two")
        found[option.name] = value
    return found

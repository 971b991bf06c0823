"""Vector clocks: what is known to have happened before what, for streams and for host threads."""

Clock = dict[int, int]  # stream -> how many of its operations


def merge(into: Clock, other: Clock) -> None:
    """Afterwards all that the other knows is known."""
    for stream, tick in other.items():
        if into.get(stream, 0) < tick:
            into[stream] = tick


def covers(clock: Clock, stream: int, tick: int) -> bool:
    """Whether that operation is known to be over."""
    return clock.get(stream, 0) >= tick

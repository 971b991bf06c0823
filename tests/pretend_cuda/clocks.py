"""Vector clocks: which operations are known to be over, per stream and per host thread."""

Clock = dict[int, int]  # stream -> number of its operations that are over


def merge(into: Clock, other: Clock) -> None:
    """Add what another clock knows."""
    for stream, tick in other.items():
        if into.get(stream, 0) < tick:
            into[stream] = tick


def covers(clock: Clock, stream: int, tick: int) -> bool:
    """Whether an operation of a stream is known to be over."""
    return clock.get(stream, 0) >= tick

"""Time limits of the kit, and lengths of its acts."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Time limits in seconds, and lengths of the acts.

    Attributes:
        start_s: time until the first Hello.
        patience_s: wait for one message; a step or a replay may take long.
        again_s: time for reconnecting, once it is known that the stream has ended.
        frozen_s: time for noticing that a learner is gone without notice, and reconnecting.
        delay_s: delay of Welcome and of one answer.
        quiet_s: time in which a server that was refused for good must not reconnect.
        rows: largest number of messages of the first play.
        play_s: length of the first play, even with fewer messages.
    """

    start_s: float = 120.0
    patience_s: float = 60.0
    again_s: float = 30.0
    frozen_s: float = 30.0
    delay_s: float = 2.0
    quiet_s: float = 12.0
    rows: int = 500
    play_s: float = 20.0

"""How patient the kit is, and how much it plays."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """How long things may take, in seconds, and how much is played.

    Attributes:
        start_s: until the first Hello.
        patience_s: for one message; a step or a replay may take long.
        again_s: for reconnecting, once it is known that the stream has ended.
        frozen_s: for noticing that a learner is gone without notice, and reconnecting.
        delay_s: by which the learner keeps Welcome and one answer waiting.
        quiet_s: in which a server that was refused for good must not reconnect.
        rows: most messages of the first play.
        play_s: after which it ends, though fewer came.
    """

    start_s: float = 120.0
    patience_s: float = 60.0
    again_s: float = 30.0
    frozen_s: float = 30.0
    delay_s: float = 2.0
    quiet_s: float = 12.0
    rows: int = 500
    play_s: float = 20.0

"""Bytes that acting and evaluations copy between host and device."""


class Copied:
    """Counters of bytes. Written by the inference thread, read by any.

    Attributes:
        to_device: bytes of observations, rewards and similar arrays.
        to_host: bytes of actions.
    """

    def __init__(self) -> None:
        """Begin at zero."""
        self.to_device = self.to_host = 0

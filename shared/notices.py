"""Notices: what murmur changes, ignores, guesses or cannot express, each said once.

Whoever finds such a thing calls `Notices.say`; the process's owner logs it, counts it by kind, and passes
it on to where a user looks: the first lines of a run, `check-env`, the report.
"""

import logging
from dataclasses import dataclass

logger = logging.getLogger(__name__)

_MOST = 64  # notices of one collector; further ones are counted in `dropped`


@dataclass(frozen=True, slots=True)
class Notice:
    """One statement about what does not survive or was guessed.

    Attributes:
        kind: slug for the metric's label, such as `cast` or `axes_guessed`.
        subject: name of the observation, agent, metric or configuration key concerned.
        text: one sentence with the name, the first such value and the key that changes it.
    """

    kind: str
    subject: str
    text: str


class Notices:
    """Collect notices, one for each pair of kind and subject. One thread calls it.

    Attributes:
        dropped: calls of `say` after _MOST different notices.
    """

    def __init__(self) -> None:
        self.dropped = 0
        self._said: dict[tuple[str, str], Notice] = {}
        self._pending: list[Notice] = []

    def said(self, kind: str, subject: str) -> bool:
        """Tell whether this was said already, so that a costly look can be spared."""
        return (kind, subject) in self._said

    def say(self, kind: str, subject: str, text: str) -> None:
        """Keep a notice, unless its kind and subject were said before."""
        if (kind, subject) in self._said:
            return
        if len(self._said) >= _MOST:
            self.dropped += 1
            return
        notice = Notice(kind, subject, " ".join(text.split()))
        self._said[kind, subject] = notice
        self._pending.append(notice)
        logger.warning("%s", notice.text)

    def take(self) -> list[Notice]:
        """Return the notices said since the last call."""
        pending = self._pending
        self._pending = []
        return pending

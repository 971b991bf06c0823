"""Notices: values that murmur changes, ignores, guesses or cannot express, each reported once.

Code that finds such a thing calls `Notices.say`. `check-env` prints the notices. A session sends
them to the learner (`pack_notices`), which logs and counts each once, keeps it for the report, and
shows it in the first lines of `murmur train`.
"""

import json
import logging
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from google.protobuf.message import DecodeError

from murmur.shared.process.errors import WireError
from murmur.shared.rpc import rollout_pb2 as pb

logger = logging.getLogger("murmur")

FILE = "notices.jsonl"  # in the run's folder
PREFIX = "notice: "  # of lines in logs
GIVEN_UP = "evaluation_given_up"  # the kind by which an evaluator gives up its evaluation
_MOST = 64  # notices of one collector; the last says that further ones are left out
_MOST_BYTES = 1 << 17  # of a message
_SUBJECT_CHARACTERS, _TEXT_CHARACTERS = 200, 1000
_KIND = re.compile(r"[a-z0-9_]{1,40}")
# First byte of a WorkerMessage that holds notices, which need no answer.
NOTICES_TAG = bytes([pb.WorkerMessage.NOTICES_FIELD_NUMBER << 3 | 2])


@dataclass(frozen=True, slots=True)
class Notice:
    """One statement about a value that is lost, changed or guessed.

    Attributes:
        kind: slug for the metric's label, such as `cast` or `axes_guessed`.
        subject: name of the observation, agent, metric or configuration key concerned.
        text: one sentence with the name, the first such value and the key that changes it.
    """

    kind: str
    subject: str
    text: str


class Notices:
    """Collector of notices, one for each pair of kind and subject. Used by one thread.

    Attributes:
        pending: notices given since the last `take`.
        most: different notices that are kept; the last says that further ones are left out.
    """

    most = _MOST

    def __init__(self) -> None:
        self.pending: list[Notice] = []
        self._said: dict[tuple[str, str], Notice] = {}

    def said(self, kind: str, subject: str) -> bool:
        """Return whether this notice was given already, so that a costly check can be skipped."""
        return (kind, subject) in self._said

    def say(self, kind: str, subject: str, text: str) -> None:
        """Keep and log a notice, unless one of its kind and subject was given before."""
        if (kind, subject) in self._said or len(self._said) >= self.most:
            return
        if len(self._said) == self.most - 1:
            text = f"{self.most - 1} notices were given; further ones are left out, first: {text}"
            # Not the subject of a smaller collector, whose last notice may be among these.
            kind, subject = "left_out", f"notices after {self.most - 1}"
            if (kind, subject) in self._said:
                return
        notice = Notice(kind, _line(subject, _SUBJECT_CHARACTERS), _line(text, _TEXT_CHARACTERS))
        self._said[kind, subject] = notice
        self.pending.append(notice)
        logger.warning("%s%s", PREFIX, notice.text)

    @property
    def all(self) -> list[Notice]:
        """Return all notices given so far."""
        return list(self._said.values())

    def take(self) -> list[Notice]:
        """Return the notices given since the last call."""
        pending, self.pending = self.pending, []
        return pending

    def repeat(self) -> None:
        """Let `take` return all notices again, because a new stream begins."""
        self.pending = self.all


def _line(text: str, most: int) -> str:
    """Return text as one printable line of at most `most` characters."""
    line = "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))
    return line if len(line) <= most else line[: most - 2] + " …"


def pack_notices(notices: Iterable[Notice]) -> bytes:
    """Encode notices as one WorkerMessage."""
    message = pb.Notices(notices=[pb.Notice(**asdict(notice)) for notice in notices])
    return pb.WorkerMessage(notices=message).SerializeToString()


def unpack_notices(message: bytes) -> list[Notice]:
    """Decode a WorkerMessage that begins with NOTICES_TAG; none if it holds something else.

    Raises:
        WireError: if there are too many, or one is no line of text.
    """
    if len(message) > _MOST_BYTES:
        raise WireError(f"notices take {len(message)} bytes, at most {_MOST_BYTES} are allowed")
    try:
        found = pb.WorkerMessage.FromString(message).notices.notices
    except DecodeError as error:
        raise WireError(f"message is no WorkerMessage: {error}") from None
    if len(found) > _MOST:
        raise WireError(f"{len(found)} notices came in one message, at most {_MOST} are allowed")
    for notice in found:
        if not _KIND.fullmatch(notice.kind):
            raise WireError(f"kind {notice.kind[:40]!r} of a notice is no slug of a-z, 0-9 and _")
        for name, text, most in (
            ("subject", notice.subject, _SUBJECT_CHARACTERS),
            ("text", notice.text, _TEXT_CHARACTERS),
        ):
            if len(text) > most or not text.isprintable():
                raise WireError(
                    f"{name} {text[:40]!r} of a notice has {len(text)} characters; it may have "
                    f"{most}, all printable"
                )
    return [Notice(notice.kind, notice.subject, notice.text) for notice in found]


def notice_line(notice: Notice) -> str:
    """Format a notice as a line of FILE."""
    return json.dumps(asdict(notice)) + "\n"


def read_notices(file: Path) -> list[Notice]:
    """Read the different notices of a run, oldest first; none if there is no file."""
    found: dict[tuple[str, str], Notice] = {}
    try:
        lines = file.read_text(errors="replace").splitlines()
    except OSError:
        return []
    for line in lines:
        try:
            notice = Notice(**json.loads(line))
        except (ValueError, TypeError):
            continue  # torn by a full disk
        found.setdefault((notice.kind, notice.subject), notice)
    return list(found.values())

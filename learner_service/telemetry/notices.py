"""Notices of all workers: each is logged, counted and kept once."""

import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from murmur.shared.process.process import logger
from murmur.shared.wire.notices import FILE, PREFIX, Notice, notice_line, read_notices

_MOST = 256  # different notices of a run
_MOST_KINDS = 32  # that the metric tells apart
_OTHER = "other"


class NoticeLog:
    """Collect the notices that sessions and the learner give. Any thread may call it."""

    def __init__(self, count: Callable[[str], None]) -> None:
        """Keep nothing on disk until `keep_in`.

        Args:
            count: adds 1 to the metric `notices` of a kind.
        """
        self._count = count
        self._file: Path | None = None
        self._said: set[tuple[str, str]] = set()
        self._kinds: set[str] = set()
        self._full = False
        self._lock = threading.Lock()

    def keep_in(self, run_dir: Path) -> None:
        """Append to the run's notices from now on; those that are there were said before."""
        with self._lock:
            self._file = run_dir / FILE
            self._said |= {(notice.kind, notice.subject) for notice in read_notices(self._file)}

    def said(self, kind: str, subject: str) -> bool:
        """Return whether the run was given this notice, by this process or one before it."""
        with self._lock:
            return (kind, subject) in self._said

    def add(self, notices: Iterable[Notice]) -> None:
        """Log, count and keep those whose kind and subject are new."""
        with self._lock:
            for notice in notices:
                key = notice.kind, notice.subject
                if key in self._said:
                    continue
                if len(self._said) >= _MOST:
                    if not self._full:
                        self._full = True
                        logger.warning(
                            "%s%d notices came; further ones are left out", PREFIX, _MOST
                        )
                    return
                self._said.add(key)
                if len(self._kinds) < _MOST_KINDS:
                    self._kinds.add(notice.kind)
                self._count(notice.kind if notice.kind in self._kinds else _OTHER)
                logger.warning("%s%s", PREFIX, notice.text)
                self._keep(notice)

    def _keep(self, notice: Notice) -> None:
        if self._file is None:
            return
        try:
            with self._file.open("a") as file:
                file.write(notice_line(notice))
        except OSError as error:
            logger.error("cannot write %s: %s; training continues", self._file, error.strerror)

"""Errors and warnings in the logs of child processes, which are text or JSON lines."""

import json
import re
from pathlib import Path
from typing import Any

# A line of trouble in a log, as text and as JSON (shared/process/process.py).
TROUBLE = re.compile(
    r"^[\d:]+ \S+: (WARNING|ERROR|CRITICAL) |^\{.*\"level\": \"(WARNING|ERROR|CRITICAL)\""
)
_ERROR = re.compile(r"(?:^error:| ERROR | CRITICAL |^\{.*\"level\": \"(?:ERROR|CRITICAL)\")\s*(.+)")
_ERROR_LINES = 400  # of a log's end


def last_error(log: Path, start: int = 0) -> str:
    """Return the last error in a log and the last line of its traceback; empty if there is none.

    Args:
        log: log file of text or JSON lines.
        start: first byte to read.
    """
    try:
        with log.open("rb") as file:
            file.seek(start)
            lines = file.read().decode(errors="replace").splitlines()[-_ERROR_LINES:]
    except OSError:
        return ""
    for at, line in reversed(list(enumerate(lines))):
        found = _ERROR.search(line)
        if found:
            after = lines[at + 1 :]
            entry = log_entry(line)
            message = str(entry["message"]) if entry else found[1] or ""
            traceback = str(entry.get("traceback", "")).splitlines() if entry else after
            return ": ".join(filter(None, [message.strip(), _raised(traceback)]))
    return _raised(lines)


def _raised(lines: list[str]) -> str:
    """Return the exception at the end of the last traceback in these lines; "" if none."""
    starts = [i for i, line in enumerate(lines) if line.startswith("Traceback (")]
    if not starts:
        return ""
    rest = lines[starts[-1] + 1 :]
    return next((line.strip() for line in rest if line and not line.startswith(" ")), "")


def log_entry(line: str) -> dict[str, Any]:
    """Parse a line of a log as JSON; empty if it is not."""
    try:
        entry = json.loads(line) if line.startswith("{") else {}
    except ValueError:
        return {}
    return entry if isinstance(entry, dict) and "message" in entry else {}

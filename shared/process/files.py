"""Files of a run: folders made, small files read and written whole, sizes, disk errors."""

import contextlib
import errno
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from murmur.shared.process.errors import ConfigError, ResourceError

# Errors that the user can fix: space, permissions, a mount, a disk.
_FIXES = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space",
    errno.EFBIG: "free some space",
    errno.EROFS: "mount it writable",
    errno.EACCES: "make it writable for this user",
    errno.EPERM: "make it writable for this user",
    errno.EIO: "check the disk",
}


def disk_error(error: OSError, path: Path | None = None) -> ResourceError | None:
    """Return a readable error for a failed file operation; None if it is no disk error.

    Args:
        error: error of the file operation.
        path: file or folder, if the error does not name it.
    """
    fix = _FIXES.get(error.errno or 0)
    if fix is None:
        return None
    where = path or error.filename or "a file or standard output"
    verb = "write" if path else "use"
    return ResourceError(
        f"cannot {verb} {where}: {error.strerror}; {fix}, or name another folder (--run, "
        "run.directory, --out)"
    )


def make_folder(folder: Path) -> None:
    """Make a run folder if it does not exist.

    Raises:
        ResourceError: if the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except ValueError as error:  # a NUL in the name
        raise ResourceError(f"cannot make run folder {str(folder)!r}: {error}") from None
    except FileExistsError:
        what = "a link to nothing" if folder.is_symlink() and not folder.exists() else "a file"
        raise ResourceError(
            f"cannot make run folder {folder}: it is {what}; name another folder"
        ) from None
    except OSError as error:
        raise ResourceError(f"cannot make run folder {folder}: {error.strerror}") from None


def size_text(size: float) -> str:
    """Format bytes in a suitable unit, such as 3.4 MiB."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def read_json(path: Path) -> dict[str, Any]:
    """Read a file's JSON object; empty if the file is missing, half written or no object."""
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Provide a temporary file that replaces the user's file at the end of the block.

    If the block raises, the user's file is unchanged. A pipe, a device, and a file in a folder
    that cannot be written are written in place.

    Yields:
        path of the file to write, with the same suffix.

    Raises:
        ConfigError: if a file operation in the block fails.
    """
    in_place = path.exists() and not (path.is_file() and os.access(path.resolve().parent, os.W_OK))
    target = path.resolve()  # a link stays one
    beside = path if in_place else target.with_name(f".{target.stem}.{os.getpid()}{target.suffix}")
    try:
        yield beside
        if not in_place:
            if target.exists():
                shutil.copymode(target, beside)
            beside.replace(target)
    except OSError as error:
        reason = error.strerror or str(error).partition("\n")[0]
        raise ConfigError(f"cannot write '{path}': {reason}") from None
    finally:
        if not in_place:
            with contextlib.suppress(OSError):
                beside.unlink(missing_ok=True)


def write_output(path: Path, content: str | bytes) -> None:
    """Write a file that the user has named; see `replacing`.

    Raises:
        ConfigError: if it cannot be written; the old content is untouched.
    """
    with replacing(path) as file:
        file.write_bytes(content.encode() if isinstance(content, str) else content)


def write_json(path: Path, data: object, stdout: TextIO | None = None) -> None:
    """Write JSON to a file that the user has named, or to standard output if its name is "-".

    Args:
        path: file to write; "-" for standard output.
        data: value of JSON's types.
        stdout: stream used as standard output; None: sys.stdout.

    Raises:
        ConfigError: if it cannot be written.
    """
    text = json.dumps(data, indent=1) + "\n"
    if str(path) != "-":
        write_output(path, text)
        return
    out = stdout or sys.stdout
    out.write(text)
    out.flush()


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a small file: a reader sees the old content or the new, never a part.

    Raises:
        ResourceError: if it cannot be written; the old content is untouched.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        known = disk_error(error, path)
        raise known or ResourceError(f"cannot write {path}: {error.strerror}") from None

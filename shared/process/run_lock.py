"""The exclusive lock on a run folder, so that it has one writer.

The lock is flock(2) on run.lock, so the system releases it when the last process that holds it
ends for any reason. `murmur train` acquires it and passes it to its learner: the run stays locked
while a learner that died is restarted. Readers (evaluate, report, doctor, --serve) take no lock.
The file's text, "pid host", only names the holder in messages.
"""

import contextlib
import fcntl
import logging
import os
import socket
import weakref
from pathlib import Path
from typing import Self

from murmur.shared.process.errors import ResourceError
from murmur.shared.process.files import disk_error, make_folder

logger = logging.getLogger("murmur")

LOCK_FILE = "run.lock"
LOCK_VARIABLE = "MURMUR_RUN_LOCK"  # the file descriptor that a parent process hands down
_PARENT = "parent "  # in its place: the process that holds the lock for its children


class RunLock:
    """The exclusive right to write to a run folder. Forked children do not keep it.

    Attributes:
        fd: file descriptor that holds the lock; None if the file system has no locks.
    """

    def __init__(
        self, fd: int | None, folder: Path = Path(), parents: tuple[int, int] | None = None
    ) -> None:
        """Wrap a descriptor that holds the lock of a folder.

        Args:
            fd: file descriptor; None if this process holds none.
            folder: run folder.
            parents: process id and descriptor that hold the lock for this process, if any.
        """
        self.fd = fd
        self._folder = folder
        self._parents = parents
        _locks.add(self)

    @classmethod
    def acquire(cls, folder: Path) -> "RunLock":
        """Lock a run folder; make it if it does not exist.

        Raises:
            ResourceError: if another process holds the lock, or the folder cannot be written.
        """
        make_folder(folder)
        path = folder / LOCK_FILE
        if inherited := cls._of_parent(folder):
            return inherited
        handed_down = os.environ.pop(LOCK_VARIABLE, "")
        if handed_down.isdecimal() and _is_open_on(int(handed_down), path):
            os.set_inheritable(int(handed_down), False)
            return cls(int(handed_down), folder)
        while True:
            try:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            except OSError as error:
                raise _unwritable(folder, error) from None
            lock = cls(fd if _locked(fd, path) else None, folder)
            if lock.fd is None or _is_open_on(fd, path):  # else deleted between open and flock
                break
            lock.release()
        try:
            _sign(fd)
        except OSError as error:
            os.close(fd)
            raise _unwritable(folder, error) from None
        if lock.fd is None:
            os.close(fd)
        return lock

    @classmethod
    def of_group(cls, folder: Path) -> "RunLock":
        """Return the lock of a rank; its group's rank 0 holds it, or the parent of both."""
        return cls._of_parent(folder) or cls(None)

    @classmethod
    def _of_parent(cls, folder: Path) -> "RunLock | None":
        """Return the lock that the parent process holds for this one; None if it does not."""
        prefix = f"{_PARENT}{os.getppid()} "
        text = os.environ.get(LOCK_VARIABLE, "")
        if not text.startswith(prefix):
            return None
        fd = text.removeprefix(prefix)
        return cls(None, folder, (os.getppid(), int(fd)) if fd.isdecimal() else None)

    def handed_down(self) -> tuple[tuple[int, ...], dict[str, str]]:
        """Return the descriptors and environment variables that give a child this lock."""
        return ((), {}) if self.fd is None else ((self.fd,), {LOCK_VARIABLE: str(self.fd)})

    def kept_by_parent(self) -> dict[str, str]:
        """Return the variables that let children use this lock, which this process holds.

        For children that inherit no file descriptors. They must end with this process.
        """
        return {LOCK_VARIABLE: f"{_PARENT}{os.getpid()} {self.fd}"}

    def moved_to(self) -> Path | None:
        """Return the folder's new path if it was renamed while locked; else None."""
        process, fd = self._parents or ("self", self.fd)
        held = Path(f"/proc/{process}/fd/{fd}")
        try:
            if fd is None or held.stat().st_nlink == 0:  # no lock, or its file was deleted
                return None
            path = self._folder / LOCK_FILE
            if path.exists() and held.samefile(path):
                return None
            now = Path(os.readlink(held)).parent
        except OSError:  # not Linux
            return None
        whole = (now / "config.yaml").is_file()  # else the lock file alone was moved
        return now if whole or not self._folder.exists() else None

    def retake(self) -> bool:
        """Lock the folder again if its lock file was deleted.

        Returns:
            true if the lock file was deleted and the folder locked again.

        Raises:
            ResourceError: if another process has locked it since.
        """
        if self.fd is None or _is_open_on(self.fd, self._folder / LOCK_FILE):
            return False
        path = self._folder / LOCK_FILE
        try:
            again = RunLock.acquire(self._folder)
        except ResourceError as error:
            raise ResourceError(f"{path} was deleted while the run trains: {error}") from None
        os.close(self.fd)
        self.fd, again.fd = again.fd, None
        return True

    def release(self) -> None:
        """Release the lock; a process that inherited it keeps it."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None

    def __enter__(self) -> Self:
        """Return the lock."""
        return self

    def __exit__(self, *_: object) -> None:
        """Release the lock."""
        self.release()


_locks: "weakref.WeakSet[RunLock]" = weakref.WeakSet()


def _drop_locks() -> None:
    """Close a forked child's descriptors, so that its parent's end frees the folders."""
    for lock in _locks:
        lock.release()


os.register_at_fork(after_in_child=_drop_locks)


def _locked(fd: int, path: Path) -> bool:
    """Lock an open file.

    Returns:
        false if the file system has no locks.

    Raises:
        ResourceError: if another process holds the lock.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = _holder(fd)
        os.close(fd)
        raise ResourceError(
            f"run folder {path.parent} is in use by {holder}; stop that process first, or name "
            "another folder with --run"
        ) from None
    except OSError as error:
        logger.warning(
            "cannot lock %s: %s; make sure that no other process trains in this folder",
            path,
            error.strerror,
        )
        return False
    return True


def _holder(fd: int) -> str:
    """Return a description of the process that holds a lock, read from its file."""
    pid, _, host = os.pread(fd, 200, 0).decode(errors="replace").strip().partition(" ")
    if not pid.isdecimal():  # it has the lock since a moment ago
        return "another process"
    return f"process {pid}" + (f" on {host}" if host != socket.gethostname() else "")


def _sign(fd: int) -> None:
    """Write this process's id and host to the lock file."""
    text = f"{os.getpid()} {socket.gethostname()}\n".encode()
    os.pwrite(fd, text, 0)
    os.ftruncate(fd, len(text))


def _is_open_on(fd: int, path: Path) -> bool:
    """Return whether a descriptor is open on the file of this name."""
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(fd), path.stat())
    return False


def _unwritable(folder: Path, error: OSError) -> ResourceError:
    known = disk_error(error, folder)
    return known or ResourceError(f"cannot write to run folder {folder}: {error.strerror}")

"""Two snapshots of the policy: one acts while the other is written."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from murmur.learner_service.device.streams import Fence
from murmur.learner_service.learning.base import Policy


@dataclass(eq=False)
class Snapshot:
    """A policy as it was after some update.

    Attributes:
        policy: acts.
        version: updates it had.
        lock: held while it acts, and while it is written.
    """

    policy: Policy
    version: int
    lock: threading.Lock = field(default_factory=threading.Lock)


class Snapshots:
    """Publishes by writing the snapshot that does not act, and swapping the two.

    So acting never waits for an update; publishing waits for an act that began before the last
    swap, if it still lasts.

    Attributes:
        published: fence after the last weights written for acting, those of evaluations included.
    """

    def __init__(self, make: Callable[[], Policy], version: int, device: torch.device) -> None:
        """Make both.

        Args:
            make: makes a policy.
            version: updates it has.
            device: device that it acts on.
        """
        self._current, self._spare = Snapshot(make(), version), Snapshot(make(), version)
        self.published = Fence(device)
        self._read = Fence(device)

    @property
    def policy(self) -> Policy:
        """The policy that acts now."""
        return self._current.policy

    @contextmanager
    def acting(self) -> Iterator[Snapshot]:
        """The snapshot to act with; it does not change until the context ends."""
        snapshot = self._current
        while not snapshot.lock.acquire(blocking=False):  # two were published just now
            snapshot = self._current
        try:
            self.published.wait()
            yield snapshot
            self._read.mark()
        finally:
            snapshot.lock.release()

    def each(self) -> Iterator[Policy]:
        """Both policies; none is written while it is in use. Called by the inference thread."""
        for snapshot in (self._current, self._spare):
            with snapshot.lock:
                self.published.wait()
                yield snapshot.policy
                self._read.mark()

    def publish(self, write: Callable[[Policy], None], version: int) -> None:
        """Let acts that begin from now on use what was learned.

        Args:
            write: copies it into a policy.
            version: updates made.
        """
        spare = self._spare
        with spare.lock:
            self._read.wait()
            write(spare.policy)
            spare.version = version
        self.published.mark()
        self._current, self._spare = spare, self._current

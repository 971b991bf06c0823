"""Acts of the examination and their limits, and a stream as the kit reads it."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import grpc

from murmur.kit.conformance.checklist import Checklist
from murmur.kit.conformance.peer import Session
from murmur.shared.process.errors import WireError
from murmur.shared.rpc import rollout_pb2 as pb

_RUN_SEED = 0xDEAD_BEEF_0BAD_F00D  # does not fit 63 bits, nor a float
_FIRST_SLOT = 3
VERSION = 1 << 40
GARBAGE = b"\xff\xff\xff"  # no message
Answer = TypeVar("Answer")


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


class Act(NamedTuple):
    """A part of the examination that is played on one stream.

    Attributes:
        name: name for the user.
        play: function that plays it.
        key: key of the contract's sentence that is broken if the server ends the stream meanwhile.
    """

    name: str
    play: Callable[[Session], Awaitable[None]]
    key: str = "stays"


class Unplayable(Exception):  # noqa: N818 - a finding, noted already
    """An error after which nothing more can be played on the stream."""


class Stream:
    """One stream of messages in parts.

    Attributes:
        session: session of the stream.
        checklist: checklist that receives the findings.
    """

    def __init__(self, session: Session, checklist: Checklist, patience_s: float) -> None:
        """Begin a stream; `patience_s` is the longest wait for one message."""
        self.session = session
        self.checklist = checklist
        self._patience_s = patience_s

    async def receive(self, key: str, name: str, read: Callable[[bytes], Answer | None]) -> Answer:
        """Read messages up to a whole one.

        Args:
            key: key of the contract's sentence that an unreadable message breaks.
            name: name of the message.
            read: codec of the message; returns None for a part that is not the last.

        Raises:
            Ended: if the stream ends.
            Silent: if nothing comes in time.
            Unplayable: if it cannot be read.
        """
        try:
            while (received := read(await self.session.read(self._patience_s))) is None:
                pass
        except WireError as error:
            words = f"{name}: {error}"
            self.checklist.note(key, words)
            self.session.end((grpc.StatusCode.INVALID_ARGUMENT, words))
            raise Unplayable from None
        self.checklist.note(key)
        return received


def welcome(num_envs: int, starts: Sequence[pb.SlotStart] = ()) -> bytes:
    """Return a Welcome of the kit's run; without `starts`, to first episodes.

    Args:
        num_envs: number of environments; 0: samples.
        starts: episode and actions of each environment.
    """
    slots = starts or [pb.SlotStart()] * num_envs
    first = _FIRST_SLOT if num_envs else 0
    message = pb.Welcome(policy_version=VERSION, run_seed=_RUN_SEED, first_slot=first, slots=slots)
    return pb.LearnerMessage(welcome=message).SerializeToString()

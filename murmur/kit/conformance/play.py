"""Acts and their limits, a stream as the kit plays it, and the record of the first one."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import grpc
import numpy as np

from murmur.env_service.environment import LONGER
from murmur.kit.conformance.checklist import Checklist
from murmur.kit.conformance.peer import Session
from murmur.kit.conformance.rows import RowRules
from murmur.shared.process.errors import WireError
from murmur.shared.rpc import rollout_pb2 as pb
from murmur.shared.wire.codec import ActionCodec, ObservationCodec
from murmur.shared.wire.framing import varint
from murmur.shared.wire.timestep import Array, StepType, TimeStep

_RUN_SEED = 0xDEAD_BEEF_0BAD_F00D  # does not fit 63 bits, nor a float
_FIRST_SLOT = 3
_VERSION = 1 << 40
GARBAGE = b"\xff\xff\xff"  # no message
_LAST, _ABORTED = int(StepType.LAST), int(StepType.ABORTED)
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


@dataclass
class Record:
    """The first play, to compare others with; row r is the r-th message.

    Attributes:
        rows: digests of every array, by row and environment.
        step_types: [N] step types by row.
        actions: answers to the rows.
    """

    rows: list[list[dict[str, bytes]]] = field(default_factory=list)
    step_types: list[Array] = field(default_factory=list)
    actions: list[Array] = field(default_factory=list)

    def ends(self, i: int) -> list[int]:
        """Return the rows in which an episode of environment i has ended."""
        return [r for r, kinds in enumerate(self.step_types) if kinds[i] == _LAST]

    def known(self, i: int) -> int:
        """Return the number of rows of environment i before its first failure."""
        failed = (r for r, kinds in enumerate(self.step_types) if kinds[i] == _ABORTED)
        return next(failed, len(self.rows))

    def points(self, i: int) -> list[tuple[int, int, int]]:
        """Return resumption points of environment i: (episode, its first row, the row to reach)."""
        known, ends = self.known(i), self.ends(i)
        end = ends[0] if ends else known - 1
        points = [(0, 0, min(max(1, end // 2), known - 1))]
        if ends and end + 1 < known:
            points.append((0, 0, end + 1))  # the last action answered LAST
            last = ends[1] if len(ends) > 1 else known - 1
            points.append((1, end + 1, end + 1 + (last - end) // 2))
        if ends and end < known:
            points.append((0, 0, end))
        points.append((0, 0, 0))
        return [(e, b, t) for e, b, t in points if 0 <= t < known] or [(0, 0, 0)]


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


class Play(Stream):
    """Rows and answers of one stream of environments."""

    def __init__(self, rules: RowRules, session: Session, patience_s: float) -> None:
        """Begin a stream.

        Args:
            rules: rules of its rows.
            session: session of the stream.
            patience_s: longest wait for one message.
        """
        super().__init__(session, rules.checklist, patience_s)
        self._rules, self.sequence = rules, 0
        self._observations = ObservationCodec(rules.spec, rules.num_envs)
        self._actions = ActionCodec(rules.spec, rules.num_envs)

    async def row(self) -> TimeStep:
        """Read the next Observation and check it by the rules.

        Raises:
            Ended: if the stream ends.
            Silent: if nothing comes in time.
            Unplayable: if it cannot be read.
        """
        self.sequence += 1
        name, read = f"message {self.sequence}", self._observations.receive
        sequence, timestep = await self.receive("size", name, read)
        wrong = f"message {self.sequence} of a stream has the number {sequence}"
        self.checklist.note("sequence", wrong if sequence != self.sequence else None)
        self.sequence = sequence  # continue from there: once is enough to know
        if any((n.kind, n.subject) == LONGER for n in self.session.notices):
            self._rules.longer = True
        self._rules.examine(timestep)
        return timestep

    async def answer(self, action: Array, encoding: int = 0) -> None:
        """Send an Action: 0 as murmur writes it, 1 without zero fields, 2 in another order."""
        early = f"message {self.sequence + 1} came before {self.sequence} was answered"
        self.checklist.note("lockstep", early if self.session.unread else None)
        if encoding == 0:
            message = self._actions.pack(self.sequence, _VERSION, action)
        else:
            message = action_message(self.sequence, encoded(action))
        if encoding == 2:
            arrays = pb.Action(arrays=encoded(action)).SerializeToString()
            counters = pb.Action(sequence=self.sequence, policy_version=7).SerializeToString()
            inner = arrays + counters
            message = b"\x12" + varint(len(inner)) + inner
        await self.session.write(message)


def encoded(action: Array) -> bytes:
    """Encode an action for the wire: C order, little-endian."""
    return np.ascontiguousarray(action, action.dtype.newbyteorder("<")).tobytes()


def action_message(sequence: int, arrays: bytes) -> bytes:
    """Return an Action without a policy version."""
    action = pb.Action(sequence=sequence, arrays=arrays)
    return pb.LearnerMessage(action=action).SerializeToString()


def welcome(num_envs: int, starts: Sequence[pb.SlotStart] = ()) -> bytes:
    """Return a Welcome of the kit's run; without `starts`, to first episodes.

    Args:
        num_envs: number of environments; 0: samples.
        starts: episode and actions of each environment.
    """
    slots = starts or [pb.SlotStart()] * num_envs
    first = _FIRST_SLOT if num_envs else 0
    message = pb.Welcome(policy_version=_VERSION, run_seed=_RUN_SEED, first_slot=first, slots=slots)
    return pb.LearnerMessage(welcome=message).SerializeToString()

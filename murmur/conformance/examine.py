"""What the kit plays with an environment server, in order.

One session is played with, the first that says Hello; it is known again by its `worker_id`. All
others are told that the learner is full, and dial again, as the contract has it.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import grpc
import numpy as np

from murmur.conformance.checklist import Checklist
from murmur.conformance.peer import Ended, Peer, Session, Silent, Status
from murmur.conformance.rows import RowRules, digests, legal_action
from murmur.conformance.subject import Subject
from shared.codec import ActionCodec, ObservationCodec, action_array_layout
from shared.credentials import CredentialFolder
from shared.errors import ConnectionLostError, SpecError, WireError
from shared.rpc import PROTOCOL_VERSION
from shared.rpc import rollout_pb2 as pb
from shared.spec import MAX_ENVS, MAX_NAME_CHARACTERS, Discrete, EnvSpec, spec_from_proto
from shared.timestep import Array, StepType, TimeStep

_RUN_SEED = 0xDEAD_BEEF_0BAD_F00D  # does not fit 63 bits, nor a float
_FIRST_SLOT = 3
_VERSION = 1 << 40
_RESUMED_ROWS = 20  # compared after an episode was taken up
_LAST, _VOID = int(StepType.LAST), int(StepType.VOID)

_UNAVAILABLE: Status = (grpc.StatusCode.UNAVAILABLE, "conformance: the learner stops")
_INTERNAL: Status = (grpc.StatusCode.INTERNAL, "conformance: something went wrong")
_FULL: Status = (grpc.StatusCode.RESOURCE_EXHAUSTED, "conformance: one session at a time")
REFUSALS = (
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNIMPLEMENTED,
)


class Unplayable(Exception):  # noqa: N818 - a finding, noted already
    """What came is so wrong that nothing can be played after it."""


@dataclass(frozen=True)
class Limits:
    """How long things may take, in seconds, and how much is played.

    Attributes:
        start_s: until the first Hello.
        patience_s: for one message; a step or a replay may take long.
        again_s: for dialling again, once it is known that the stream has ended.
        frozen_s: for noticing that a learner is gone without a word, and dialling again.
        delay_s: by which the learner keeps Welcome and one answer waiting.
        quiet_s: in which a server that was refused for good must not dial again.
        rows: most messages of the first play.
        play_s: after which it ends, though fewer came.
    """

    start_s: float = 120.0
    patience_s: float = 60.0
    again_s: float = 30.0
    frozen_s: float = 30.0
    delay_s: float = 2.0
    quiet_s: float = 12.0
    rows: int = 500
    play_s: float = 20.0


@dataclass
class Record:
    """The first play, to compare others with; row r is the r-th message.

    Attributes:
        rows: digests of every array, by row and environment.
        step_types: [N] by row.
        actions: the answer to each row.
    """

    rows: list[list[dict[str, bytes]]] = field(default_factory=list)
    step_types: list[Array] = field(default_factory=list)
    actions: list[Array] = field(default_factory=list)

    def ends(self, i: int) -> list[int]:
        """Rows in which an episode of environment i has ended."""
        return [r for r, kinds in enumerate(self.step_types) if kinds[i] == _LAST]

    def known(self, i: int) -> int:
        """Rows of environment i before its first failure, which nothing need repeat."""
        failed = (r for r, kinds in enumerate(self.step_types) if kinds[i] == _VOID)
        return next(failed, len(self.rows))


class Examination:
    """The whole examination. Used by one event loop."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        credentials: CredentialFolder | None = None,
        limits: Limits | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Prepare to listen.

        Args:
            host: where to listen.
            port: the same; 0: any.
            credentials: of a learner; None: plain text.
            limits: patience.
            say: told what is going on.
        """
        self.checklist = Checklist()
        self._peer = Peer(host, port, self._door, credentials)
        self._secured = credentials is not None
        self._limits, self._say = limits or Limits(), say
        self._random = np.random.default_rng(0)
        self._subject: Subject | None = None
        # The session that is waited for, by name once there is one; and how others are refused.
        self._expected: asyncio.Future[Session] | None = None
        self._name: str | None = None
        self._refusal = _FULL
        self._refused: list[tuple[float, str]] = []  # when, who
        self._spec: EnvSpec | None = None
        self._num_envs = 0
        self._record = Record()

    async def run(
        self,
        command: Sequence[str] = (),
        acts: Sequence[str] = (),
        ready: Callable[[int], None] = lambda port: None,
    ) -> Checklist:
        """Examine.

        Args:
            command: starts the environment server; empty: somebody starts it by hand.
            acts: only these of ACTS, and no endings; empty: everything.
            ready: told the port once it listens.

        Raises:
            ResourceError: if the port cannot be had.
            ConfigError: if the command cannot be started.
            ConnectionLostError: if no environment server dials.
        """
        async with self._peer:
            ready(self._peer.port)
            with ExitStack() as stack:
                if command:
                    self._subject = stack.enter_context(Subject(command))
                try:
                    complete = await self._play_acts(acts)
                except Unplayable:
                    return self.checklist
                if acts:
                    return self.checklist
                if complete and self._subject is not None:
                    await self._drain()
                elif complete:
                    await self._refuse_for_good()
            if command:
                for code in REFUSALS:
                    await self._refused_process(command, code)
                for name, answer in WRONG_ANSWERS.items():
                    await self._misled_process(command, name, answer)
        return self.checklist

    # --- who may come in

    def _door(self, session: Session) -> Status | None:
        """Take the session that is waited for, refuse all others."""
        if session.problem:
            # Once a Hello has come, a server that was refused may be on its way out.
            if self._spec is None or not session.silent:
                self.checklist.broken("hello", session.problem)
            return grpc.StatusCode.FAILED_PRECONDITION, session.problem
        assert session.hello is not None
        if session.hello.mode == pb.MODE_EVALUATE:
            return None  # as if no evaluation were due: it waits
        expected = self._expected
        known = self._name is None or session.name == self._name
        if expected is not None and not expected.done() and known:
            self._name = session.name
            expected.set_result(session)
            return None
        self._refused.append((time.monotonic(), session.name))
        return self._refusal

    async def _next(self, timeout_s: float) -> Session | None:
        """The next stream of the session, or None if it does not come in time."""
        self._expected = asyncio.get_running_loop().create_future()
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            done, _ = await asyncio.wait({self._expected}, timeout=0.1)
            if done:
                session = self._expected.result()
                self._check_hello(session)
                return session
            if self._subject is not None and self._subject.ended:
                break
            if self._spec is None and self.checklist.problems:
                break  # whoever came did not say Hello
        self._expected = None
        return None

    def _check_hello(self, session: Session) -> None:
        """Hold a Hello to the contract, and to the ones before.

        Raises:
            Unplayable: if its spec cannot be.
        """
        hello = session.hello
        assert hello is not None
        problem = None
        if hello.protocol_version != PROTOCOL_VERSION:
            problem = f"protocol_version is {hello.protocol_version}, not {PROTOCOL_VERSION}"
        elif not hello.worker_id or not hello.worker_id.isprintable():
            problem = f"worker_id {hello.worker_id[:40]!r} is empty or not printable"
        elif len(hello.worker_id) > MAX_NAME_CHARACTERS:
            problem = f"worker_id has {len(hello.worker_id)} characters"
        elif hello.mode != pb.MODE_TRAIN:
            problem = f"mode is {hello.mode}, not MODE_TRAIN or MODE_EVALUATE"
        elif not 1 <= hello.num_envs <= MAX_ENVS:
            problem = f"num_envs is {hello.num_envs}, not 1 to {MAX_ENVS}"
        try:
            spec = spec_from_proto(hello.spec)
            ObservationCodec(spec, hello.num_envs)
        except SpecError as error:
            self.checklist.broken("hello", str(error))
            raise Unplayable from None
        if self._spec is None:
            self._spec, self._num_envs = spec, hello.num_envs
        elif (spec, hello.num_envs) != (self._spec, self._num_envs):
            problem = "spec or num_envs differ from those of the session's first Hello"
        self.checklist.hold("hello", problem)
        if self._secured:
            wrong = None if session.role == "environment" else f"its role is '{session.role}'"
            self.checklist.hold("credentials", wrong)

    # --- the acts

    async def _play_acts(self, only: Sequence[str]) -> bool:
        """Play one act after another; False if the session did not come back."""
        how, timeout_s = "", self._limits.start_s
        for name, act, leave, consequence in ACTS:
            if only and name not in only:
                continue
            session = await self._next(timeout_s)
            if session is None and not how:
                if self.checklist.problems:
                    return False
                raise ConnectionLostError(self._nobody(timeout_s))
            if session is None:
                self.checklist.broken(f"again {how}", self._nobody(timeout_s))
                return False
            if how:
                self.checklist.kept(f"again {how}")
            self._say(name)
            try:
                await act(self, session)
                self.checklist.kept("stays")
            except (Ended, Silent) as error:
                key = "encodings" if name == "another play" else "stays"
                self.checklist.broken(key, f"{name}: {error}")
            how, timeout_s = consequence, self._limits.again_s
            if consequence == "frozen":
                timeout_s = self._limits.frozen_s
            await leave(self, session)
        if only:
            return False
        return await self._full(how)

    def _nobody(self, timeout_s: float) -> str:
        """Who did not come, in words."""
        if self._subject is not None and self._subject.ended:
            return f"the environment server has ended: {self._subject.last_words()}"
        whose = "" if self._name is None else f" with worker_id '{self._name}'"
        return f"no Hello{whose} came within {timeout_s:g} s"

    async def _first_play(self, session: Session) -> None:
        """Episodes from their beginning, plainly answered."""
        await asyncio.sleep(self._limits.delay_s)  # Welcome keeps it waiting
        if session.unread:
            self.checklist.broken("lockstep", "an Observation came before Welcome was sent")
        play = _Play(self, session, fresh=True)
        await play.welcome(self._starts([(0, b"")] * self._num_envs))
        limits, record = self._limits, self._record
        enough = time.monotonic() + limits.play_s
        ends = np.zeros(self._num_envs, np.int64)
        while len(record.rows) < limits.rows:
            timestep = await play.row()
            record.rows.append(digests(timestep))
            record.step_types.append(timestep.step_type.copy())
            ends += timestep.step_type >= _LAST
            record.actions.append(legal_action(play.spec, timestep, self._random))
            if (ends.min() >= 2 or time.monotonic() > enough) and len(record.rows) >= 20:
                break
            if len(record.rows) == 10:
                await asyncio.sleep(limits.delay_s)
                self.checklist.kept("patient")
            elif len(record.rows) % 8 == 0:
                await asyncio.sleep(0.02)  # time for a message that must not come
            await play.answer(record.actions[-1])

    async def _another_play(self, session: Session) -> None:
        """The same again, answered in other encodings; what answers LAST and VOID means nothing."""
        play = _Play(self, session, fresh=True)
        await play.welcome(self._starts([(0, b"")] * self._num_envs))
        await self._compare(play, [0] * self._num_envs, "repeats", other_encodings=True)

    async def _resume(self, session: Session, variant: int) -> None:
        """Episodes that are under way, each environment at another point of the first play."""
        starts, targets = [], []
        for i in range(self._num_envs):
            choices = self._points(i)
            episode, begin, target = choices[(variant + i) % len(choices)]
            actions = self._record.actions[begin:target]
            starts.append((episode, b"".join(_bytes(a[i]) for a in actions)))
            targets.append(target)
        play = _Play(self, session, fresh=False)
        await play.welcome(self._starts(starts))
        await self._compare(play, targets, "resumes")

    def _points(self, i: int) -> list[tuple[int, int, int]]:
        """Where environment i can be taken up: (episode, its first row, the row to reach)."""
        known, ends = self._record.known(i), self._record.ends(i)
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

    async def _compare(
        self, play: "_Play", targets: list[int], key: str, *, other_encodings: bool = False
    ) -> None:
        """Play on from these rows of the record with its actions, and compare what comes."""
        record = self._record
        problem, compared = None, 0
        for step in range(len(record.rows) if key == "repeats" else _RESUMED_ROWS):
            timestep = await play.row()
            found = digests(timestep)
            action = legal_action(play.spec, timestep, self._random)
            for i, target in enumerate(targets):
                at = target + step
                if at >= record.known(i):
                    continue
                compared += 1
                different = [k for k, v in record.rows[at][i].items() if found[i].get(k) != v]
                if different and problem is None:
                    problem = (
                        f"environment {i}, {step} rows after its start, which is row {target} of "
                        f"the first play: {different[0]} differs"
                    )
                if record.step_types[at][i] < _LAST:
                    action[i] = record.actions[at][i] if at < len(record.actions) else action[i]
            if all(t + step + 1 >= len(record.rows) for t in targets):
                break
            encoding = step % 3 if other_encodings else 0
            await play.answer(action, encoding)
        if other_encodings:
            self.checklist.kept("encodings")
        if compared:
            self.checklist.hold(key, problem)

    async def _few_rows(self, session: Session) -> None:
        """Three rows, to have something under way."""
        play = _Play(self, session, fresh=True)
        await play.welcome(self._starts([(0, b"")] * self._num_envs))
        for _ in range(3):
            timestep = await play.row()
            await play.answer(legal_action(play.spec, timestep, self._random))

    def _starts(self, starts: Sequence[tuple[int, bytes]]) -> list[pb.SlotStart]:
        return [pb.SlotStart(episode=e, actions=a) for e, a in starts]

    # --- how an act ends

    async def _end_unavailable(self, session: Session) -> None:
        session.end(_UNAVAILABLE)

    async def _end_ok(self, session: Session) -> None:
        session.end(None)

    async def _end_internal(self, session: Session) -> None:
        session.end(_INTERNAL)

    async def _cut(self, session: Session) -> None:
        self._peer.cut()

    async def _freeze(self, session: Session) -> None:
        self._peer.freeze()

    async def _restart(self, session: Session) -> None:
        await self._peer.restart()

    # --- endings

    async def _full(self, how: str) -> bool:
        """Refuse the session again and again; it must come back, and not too often."""
        self._say("the learner is full")
        name, refusals = self._name, 5
        self._refused.clear()
        deadline = time.monotonic() + refusals * self._limits.again_s
        while sum(who == name for _, who in self._refused) < refusals:
            await asyncio.sleep(0.05)
            if time.monotonic() > deadline or (self._subject is not None and self._subject.ended):
                came = any(who == name for _, who in self._refused)
                key = "again full" if came else f"again {how}"
                self.checklist.broken(key, self._nobody(refusals * self._limits.again_s))
                return False
        self.checklist.kept(f"again {how}")
        times = [when for when, who in self._refused if who == name][:refusals]
        took = times[-1] - times[0]
        hurry = f"it dialled {refusals} times within {took:.2f} s" if took < 0.5 else None
        self.checklist.hold("again full", hurry)
        return True

    async def _drain(self) -> None:
        """Tell the server to stop in the middle of a play."""
        assert self._subject is not None
        self._say("told to stop")
        session = await self._next(self._limits.again_s)
        if session is None:
            self.checklist.broken("drain", self._nobody(self._limits.again_s))
            return
        play = _Play(self, session, fresh=True)
        await play.welcome(self._starts([(0, b"")] * self._num_envs))
        try:
            await play.answer(legal_action(play.spec, await play.row(), self._random))
            self._subject.terminate()
            while True:
                await play.answer(legal_action(play.spec, await play.row(), self._random))
        except Silent as error:
            self.checklist.broken("drain", f"{error} after SIGTERM")
            return
        except Ended:
            await asyncio.sleep(0.3)  # a stream that was cancelled says so a moment later
        session.end(None)
        code = await self._subject.code(self._limits.again_s)
        problem = None
        if session.gone:
            problem = "it cancelled its stream instead of closing its side"
        elif code != 0:
            problem = "it does not end" if code is None else f"it ended with code {code}"
        self.checklist.hold("drain", problem)

    async def _refuse_for_good(self) -> None:
        """Refuse every session; none may dial a second time."""
        self._say("refused for good")
        self._refuse_everybody(REFUSALS[0])
        await asyncio.sleep(self._limits.quiet_s)
        names = [who for _, who in self._refused]
        twice = next((n for n in names if names.count(n) > 1), None)
        problem = None if twice is None else f"'{twice}' dialled again after {REFUSALS[0].name}"
        if names:
            self.checklist.hold("refused", problem)

    def _refuse_everybody(self, code: grpc.StatusCode) -> None:
        self._expected = None
        self._refused.clear()
        self._refusal = (code, "conformance: refused for good")

    async def _refused_process(self, command: Sequence[str], code: grpc.StatusCode) -> None:
        """A server of its own that is refused with this status."""
        self._say(f"refused with {code.name}")
        self._refuse_everybody(code)
        with Subject(command) as self._subject:
            ended = await self._subject.code(self._limits.start_s)
        self.checklist.hold("refused", _unless_two(ended, code.name))

    async def _misled_process(
        self,
        command: Sequence[str],
        name: str,
        answer: Callable[["_Play"], Awaitable[None]],
    ) -> None:
        """A server of its own that is answered wrongly once."""
        self._say(f"answered with {name}")
        self._name, self._refusal = None, _FULL
        with Subject(command) as self._subject:
            session = await self._next(self._limits.start_s)
            if session is None:
                self.checklist.broken("answers", f"{name}: {self._nobody(self._limits.start_s)}")
                return
            await answer(_Play(self, session, fresh=True))
            ended = await self._subject.code(self._limits.again_s)
        self.checklist.hold("answers", _unless_two(ended, name))


class _Play:
    """Rows and answers of one stream."""

    def __init__(self, examination: Examination, session: Session, *, fresh: bool) -> None:
        spec, n = examination._spec, examination._num_envs
        assert spec is not None
        self.spec, self.num_envs, self.session = spec, n, session
        self.checklist, self._patience_s = examination.checklist, examination._limits.patience_s
        self._observations, self._actions = ObservationCodec(spec, n), ActionCodec(spec, n)
        self._rules = RowRules(spec, self.checklist, fresh)
        self.sequence = 0

    async def welcome(self, starts: list[pb.SlotStart]) -> None:
        """Send Welcome with where each environment starts."""
        welcome = pb.Welcome(
            first_slot=_FIRST_SLOT, policy_version=_VERSION, run_seed=_RUN_SEED, slots=starts
        )
        await self.session.write(pb.LearnerMessage(welcome=welcome).SerializeToString())

    async def row(self) -> TimeStep:
        """The next Observation, held to the rules.

        Raises:
            Ended: if the stream ends.
            Silent: if nothing comes in time.
            Unplayable: if it cannot be read.
        """
        try:
            while True:
                message = await self.session.read(self._patience_s)
                received = self._observations.receive(message)
                if received is not None:
                    break
        except WireError as error:
            words = f"message {self.sequence + 1}: {error}"
            self.checklist.broken("size", words)
            self.session.end((grpc.StatusCode.INVALID_ARGUMENT, words))
            raise Unplayable from None
        sequence, timestep = received
        self.checklist.kept("size")
        self.sequence += 1
        wrong = f"message {self.sequence} of a stream has the number {sequence}"
        self.checklist.hold("sequence", wrong if sequence != self.sequence else None)
        self.sequence = sequence  # go on from there: once is enough to know
        self._rules.examine(timestep)
        return timestep

    async def answer(self, action: Array, encoding: int = 0) -> None:
        """Send an Action: 0 as murmur writes it, 1 without zero fields, 2 in another order."""
        early = f"message {self.sequence + 1} came before {self.sequence} was answered"
        self.checklist.hold("lockstep", early if self.session.unread else None)
        if encoding == 0:
            message = self._actions.pack(self.sequence, _VERSION, action)
        else:
            body = pb.Action(sequence=self.sequence, arrays=_bytes(action))
            message = pb.LearnerMessage(action=body).SerializeToString()
        if encoding == 2:
            arrays = pb.Action(arrays=_bytes(action)).SerializeToString()
            counters = pb.Action(sequence=self.sequence, policy_version=7).SerializeToString()
            inner = arrays + counters
            message = b"\x12" + _varint(len(inner)) + inner
        await self.session.write(message)


def _bytes(action: Array) -> bytes:
    """As it travels: C order, little-endian."""
    return np.ascontiguousarray(action, action.dtype.newbyteorder("<")).tobytes()


def _varint(value: int) -> bytes:
    """Protobuf's base-128 number."""
    digits = []
    while value > 0x7F:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*digits, value])


def _unless_two(code: int | None, what: str) -> str | None:
    """What is wrong with an exit code other than 2."""
    if code == 2:
        return None
    return f"{what}: " + ("it does not end" if code is None else f"it ended with code {code}")


async def _other_sequence(play: _Play) -> None:
    await play.welcome([pb.SlotStart()] * play.num_envs)
    action = np.zeros_like(await _first_action(play))
    play.sequence += 1
    await play.answer(action)


async def _other_size(play: _Play) -> None:
    await play.welcome([pb.SlotStart()] * play.num_envs)
    action = await _first_action(play)
    body = pb.Action(sequence=play.sequence, arrays=_bytes(action)[:-1])
    await play.session.write(pb.LearnerMessage(action=body).SerializeToString())


async def _first_action(play: _Play) -> Array:
    return legal_action(play.spec, await play.row(), np.random.default_rng(0))


async def _other_slots(play: _Play) -> None:
    await play.welcome([pb.SlotStart()] * (play.num_envs + 1))


async def _torn_replay(play: _Play) -> None:
    _, dtype, shape = action_array_layout(play.spec, play.num_envs).fields[0]
    whole = dtype.itemsize * int(np.prod(shape[1:]))
    await play.welcome([pb.SlotStart(actions=bytes(whole + 1))] * play.num_envs)


async def _action_first(play: _Play) -> None:
    dtype = np.int32 if isinstance(play.spec.action, Discrete) else np.float32
    size = () if isinstance(play.spec.action, Discrete) else (play.spec.action.size,)
    await play.answer(np.zeros((play.num_envs, play.spec.num_agents, *size), dtype))


async def _garbage(play: _Play) -> None:
    await play.session.write(b"\xff\xff\xff")


WRONG_ANSWERS: dict[str, Callable[[_Play], Awaitable[None]]] = {
    "an Action with another sequence number": _other_sequence,
    "an Action with a byte too few": _other_size,
    "a Welcome for another number of environments": _other_slots,
    "a Welcome whose actions are no whole number of actions": _torn_replay,
    "an Action instead of Welcome": _action_first,
    "bytes that are no message": _garbage,
}

_Act = Callable[[Examination, Session], Awaitable[None]]


def _resumed(variant: int) -> _Act:
    async def act(examination: Examination, session: Session) -> None:
        await examination._resume(session, variant)

    return act


# Name, what is played, how the learner goes away, and what must follow: a key "again ...".
ACTS: tuple[tuple[str, _Act, _Act, str], ...] = (
    ("first play", Examination._first_play, Examination._end_unavailable, "UNAVAILABLE"),
    ("another play", Examination._another_play, Examination._end_ok, "OK"),
    ("episodes under way", _resumed(0), Examination._end_internal, "INTERNAL"),
    ("episodes under way, elsewhere", _resumed(1), Examination._cut, "cut"),
    ("episodes under way, a third time", _resumed(2), Examination._freeze, "frozen"),
    ("a few rows", Examination._few_rows, Examination._restart, "GOAWAY"),
)

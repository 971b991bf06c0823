"""What the kit plays with an environment server, in order.

One session is played with, the first that says Hello; it is known again by its `worker_id`. All
others are told that the learner is full, and dial again, as the contract has it.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import grpc
import numpy as np

from murmur.conformance.checklist import Checklist
from murmur.conformance.peer import Ended, Peer, Session, Silent, Status
from murmur.conformance.play import Play, Record, Unplayable, encoded
from murmur.conformance.rows import digests, legal_action
from murmur.conformance.subject import Subject
from murmur.conformance.wrong_answers import WRONG_ANSWERS
from shared.codec import ObservationCodec
from shared.credentials import CredentialFolder
from shared.errors import ConnectionLostError, SpecError
from shared.rpc import PROTOCOL_VERSION
from shared.rpc import rollout_pb2 as pb
from shared.spec import MAX_ENVS, MAX_NAME_CHARACTERS, EnvSpec, spec_from_proto
from shared.timestep import StepType

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
        play = self._play(session, fresh=True)
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
        play = self._play(session, fresh=True)
        await play.welcome(self._starts([(0, b"")] * self._num_envs))
        await self._compare(play, [0] * self._num_envs, "repeats", other_encodings=True)

    async def _resume(self, session: Session, variant: int) -> None:
        """Episodes that are under way, each environment at another point of the first play."""
        starts, targets = [], []
        for i in range(self._num_envs):
            choices = self._record.points(i)
            episode, begin, target = choices[(variant + i) % len(choices)]
            actions = self._record.actions[begin:target]
            starts.append((episode, b"".join(encoded(a[i]) for a in actions)))
            targets.append(target)
        play = self._play(session, fresh=False)
        await play.welcome(self._starts(starts))
        await self._compare(play, targets, "resumes")

    async def _compare(
        self, play: Play, targets: list[int], key: str, *, other_encodings: bool = False
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
        play = self._play(session, fresh=True)
        await play.welcome(self._starts([(0, b"")] * self._num_envs))
        for _ in range(3):
            timestep = await play.row()
            await play.answer(legal_action(play.spec, timestep, self._random))

    def _play(self, session: Session, *, fresh: bool) -> Play:
        """The stream, held to the rules."""
        assert self._spec is not None
        patience_s = self._limits.patience_s
        return Play(self._spec, self._num_envs, session, self.checklist, patience_s, fresh=fresh)

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
        play = self._play(session, fresh=True)
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
            in_order = await session.closed_in_order()
        session.end(None)
        code = await self._subject.code(self._limits.again_s)
        problem = None
        if not in_order:
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
        answer: Callable[[Play], Awaitable[None]],
    ) -> None:
        """A server of its own that is answered wrongly once."""
        self._say(f"answered with {name}")
        self._name, self._refusal = None, _FULL
        with Subject(command) as self._subject:
            session = await self._next(self._limits.start_s)
            if session is None:
                self.checklist.broken("answers", f"{name}: {self._nobody(self._limits.start_s)}")
                return
            await answer(self._play(session, fresh=True))
            ended = await self._subject.code(self._limits.again_s)
        self.checklist.hold("answers", _unless_two(ended, name))


def _unless_two(code: int | None, what: str) -> str | None:
    """What is wrong with an exit code other than 2."""
    if code == 2:
        return None
    return f"{what}: " + ("it does not end" if code is None else f"it ended with code {code}")


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

"""`murmur conformance`: the acts that the kit plays with a server, in order, and its checklist.

One session is played with, the first that says Hello; it is known again by its `worker_id`. All
others are refused because the learner is full, and reconnect, as the contract has it.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import grpc
from rich.console import Console
from rich.markup import escape

from murmur.kit.conformance.checklist import SUPPLY_CONTRACT, Checklist
from murmur.kit.conformance.environments import EnvironmentPlayer
from murmur.kit.conformance.peer import Ended, Peer, Session, Silent, Status
from murmur.kit.conformance.play import Limits, Unplayable
from murmur.kit.conformance.samples import SamplePlayer
from murmur.shared.process.errors import ConfigError, ConnectionLostError, SpecError
from murmur.shared.rpc import PROTOCOL_VERSION
from murmur.shared.rpc import rollout_pb2 as pb
from murmur.shared.wire.channel import FINAL
from murmur.shared.wire.credentials import CredentialFolder
from murmur.shared.wire.spec import MAX_NAME_CHARACTERS
from murmur.text import plain

_STATUSES: dict[str, Status | None] = {
    "UNAVAILABLE": (grpc.StatusCode.UNAVAILABLE, "conformance: the learner stops"),
    "OK": None,
    "INTERNAL": (grpc.StatusCode.INTERNAL, "conformance: something went wrong"),
}
_LAST_WORDS = 400  # characters of a server's output that are shown
_KILL_AFTER_S = 15.0
# How the learner leaves after each act; the contract's keys "again ..." say what must follow.
_CONSEQUENCES = (*_STATUSES, "cut", "frozen", "GOAWAY")
_FULL: Status = (grpc.StatusCode.RESOURCE_EXHAUSTED, "conformance: one session at a time")

_SHOWN = 3  # findings of one kind

# Why a sentence was not put to the test.
_UNTESTED = {
    "credentials": "needs --security",
    "aborted": "no environment failed",
    "finite": "no array holds fractions",
    "named": "no sample was broken",
    "answers": "needs the command that starts the server",
    "drain": "needs the command that starts the server",
}


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
            host: address to listen on.
            port: port to listen on; 0: any.
            credentials: credentials of a learner; None: plain text.
            limits: time limits of the examination.
            say: function called with each message.
        """
        self.checklist = Checklist()
        self._peer = Peer(host, port, self._door, credentials)
        self._secured = credentials is not None
        self._limits, self._say = limits or Limits(), say
        # The server, where the kit itself starts it, and the file of its output.
        self._subject: subprocess.Popen[bytes] | None = None
        self._output = Path()
        # The session that is waited for, by name once there is one; and how others are refused.
        self._expected: asyncio.Future[Session] | None = None
        self._name: str | None = None
        self._refusal = _FULL
        self._refused: list[tuple[float, str]] = []  # when, who
        self._player: EnvironmentPlayer | SamplePlayer | None = None  # from the first Hello on

    async def run(
        self,
        command: Sequence[str] = (),
        acts: Sequence[str] = (),
        ready: Callable[[int], None] = lambda port: None,
    ) -> Checklist:
        """Examine the server.

        Args:
            command: command that starts the environment server; empty: it is started by hand.
            acts: acts to play of the player's, without endings; empty: everything.
            ready: function called with the port once it listens.

        Raises:
            ResourceError: if the port is not available.
            ConfigError: if the command cannot be started.
            ConnectionLostError: if no environment server connects.
        """
        async with self._peer:
            ready(self._peer.port)
            with self._started(command) if command else contextlib.nullcontext():
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
                for code in FINAL:
                    await self._refused_process(command, code)
                assert self._player is not None
                for name, messages in self._player.wrong_answers.items():
                    await self._misled_process(command, name, messages)
        return self.checklist

    # --- the server, where the kit starts it

    @contextlib.contextmanager
    def _started(self, command: Sequence[str]) -> Iterator[None]:
        """Start a command; end it with the block, if not before, with all that it starts.

        Raises:
            ConfigError: if there is no such program.
        """
        with tempfile.NamedTemporaryFile(prefix="murmur-conformance-") as output:
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise ConfigError(f"cannot start '{command[0]}': {error.strerror}") from None
            self._subject, self._output = process, Path(output.name)
            try:
                yield
            finally:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_KILL_AFTER_S)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    @property
    def _ended(self) -> bool:
        """Return whether the server's process has ended."""
        return self._subject is not None and self._subject.poll() is not None

    async def _code(self, timeout_s: float) -> int | None:
        """Return the exit code of the server's process; None if it does not end in time."""
        assert self._subject is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            return await asyncio.to_thread(self._subject.wait, timeout_s)
        return None

    # --- who may come in

    def _door(self, session: Session) -> Status | None:
        """Admit the expected session and refuse all others."""
        if session.problem:
            # Once a Hello has come, a server that was refused may be on its way out.
            if self._player is None or not session.silent:
                self.checklist.note("hello", session.problem)
            return grpc.StatusCode.FAILED_PRECONDITION, session.problem
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
        """Wait for the next stream of the session; None if it does not come in time."""
        self._expected = asyncio.get_running_loop().create_future()
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            done, _ = await asyncio.wait({self._expected}, timeout=0.1)
            if done:
                session = self._expected.result()
                self._check_hello(session)
                return session
            if self._ended:
                break
            if self._player is None and self.checklist.problems:
                break  # the peer did not say Hello
        self._expected = None
        return None

    def _check_hello(self, session: Session) -> None:
        """Check a Hello by the contract and by the ones before.

        Raises:
            Unplayable: if what it announces cannot be.
        """
        hello = session.hello
        if self._player is None and hello.mode == pb.MODE_SUPPLY:
            self.checklist.contract = SUPPLY_CONTRACT
        problem = None
        if hello.protocol_version != PROTOCOL_VERSION:
            problem = f"protocol_version is {hello.protocol_version}, not {PROTOCOL_VERSION}"
        elif not hello.worker_id or not hello.worker_id.isprintable():
            problem = f"worker_id {hello.worker_id[:40]!r} is empty or not printable"
        elif len(hello.worker_id) > MAX_NAME_CHARACTERS:
            problem = f"worker_id has {len(hello.worker_id)} characters"
        elif hello.mode not in (pb.MODE_TRAIN, pb.MODE_SUPPLY):
            problem = f"mode is {hello.mode}, not MODE_TRAIN, MODE_EVALUATE or MODE_SUPPLY"
        try:
            if self._player is None:
                kind = SamplePlayer if hello.mode == pb.MODE_SUPPLY else EnvironmentPlayer
                self._player = kind(hello, self.checklist, self._limits)
            problem = problem or self._player.check_hello(hello)
        except SpecError as error:
            self.checklist.note("hello", str(error))
            raise Unplayable from None
        self.checklist.note("hello", problem)
        if self._secured:
            wrong = None if session.role == "environment" else f"its role is '{session.role}'"
            self.checklist.note("credentials", wrong)

    # --- the acts

    async def _play_acts(self, only: Sequence[str]) -> bool:
        """Play one act after another; False if the session did not come back."""
        session = await self._next(self._limits.start_s)
        if session is None:
            if self.checklist.problems:
                return False
            raise ConnectionLostError(self._nobody(self._limits.start_s))
        assert self._player is not None
        how = ""
        for act, consequence in zip(self._player.acts, _CONSEQUENCES, strict=True):
            if only and act.name not in only:
                continue
            if session is None:
                frozen = how == "frozen"
                timeout_s = self._limits.frozen_s if frozen else self._limits.again_s
                session = await self._next(timeout_s)
                if session is None:
                    self.checklist.note(f"again {how}", self._nobody(timeout_s))
                    return False
                self.checklist.note(f"again {how}")
            self._say(act.name)
            try:
                await act.play(session)
                self.checklist.note("stays")
            except (Ended, Silent) as error:
                self.checklist.note(act.key, f"{act.name}: {error}")
            await self._leave(session, consequence)
            how, session = consequence, None
        if only:
            return False
        return await self._full(how)

    async def _leave(self, session: Session, how: str) -> None:
        """Leave as a learner does after an act."""
        if how == "GOAWAY":
            await self._peer.restart()
        elif how == "cut":
            self._peer.cut()
        elif how == "frozen":
            self._peer.freeze()
        else:
            session.end(_STATUSES[how])

    def _nobody(self, timeout_s: float) -> str:
        """Return a message on the sessions that did not come."""
        if self._ended:
            said = self._output.read_text(errors="replace")[-_LAST_WORDS:]
            return f"the server has ended: {' '.join(said.split())}"
        whose = "" if self._name is None else f" with worker_id '{self._name}'"
        return f"no Hello{whose} came within {timeout_s:g} s"

    # --- endings

    async def _full(self, how: str) -> bool:
        """Refuse the session again and again; it must come back, and not too often."""
        self._say("the learner is full")
        name, refusals = self._name, 5
        self._refused.clear()
        deadline = time.monotonic() + refusals * self._limits.again_s
        while sum(who == name for _, who in self._refused) < refusals:
            await asyncio.sleep(0.05)
            if time.monotonic() > deadline or self._ended:
                came = any(who == name for _, who in self._refused)
                key = "again full" if came else f"again {how}"
                self.checklist.note(key, self._nobody(refusals * self._limits.again_s))
                return False
        self.checklist.note(f"again {how}")
        times = [when for when, who in self._refused if who == name][:refusals]
        took = times[-1] - times[0]
        hurry = f"it connected {refusals} times within {took:.2f} s" if took < 0.5 else None
        self.checklist.note("again full", hurry)
        return True

    async def _drain(self) -> None:
        """Send the server SIGTERM in the middle of a play."""
        assert self._subject is not None
        self._say("told to stop")
        session = await self._next(self._limits.again_s)
        if session is None:
            self.checklist.note("drain", self._nobody(self._limits.again_s))
            return
        assert self._player is not None
        try:
            await self._player.until_ended(session, self._subject.terminate)
        except Silent as error:
            self.checklist.note("drain", f"{error} after SIGTERM")
            return
        except Ended:
            in_order = await session.closed_in_order()
        session.end(None)
        code = await self._code(self._limits.again_s)
        problem = None
        if not in_order:
            problem = "it cancelled its stream instead of closing its side"
        elif code != 0:
            problem = "it does not end" if code is None else f"it ended with code {code}"
        self.checklist.note("drain", problem)

    async def _refuse_for_good(self) -> None:
        """Refuse every session; none may connect a second time."""
        self._say("refused for good")
        self._refuse_everybody(FINAL[0])
        await asyncio.sleep(self._limits.quiet_s)
        names = [who for _, who in self._refused]
        twice = next((n for n in names if names.count(n) > 1), None)
        problem = None if twice is None else f"'{twice}' reconnected after {FINAL[0].name}"
        if names:
            self.checklist.note("refused", problem)

    def _refuse_everybody(self, code: grpc.StatusCode) -> None:
        self._expected = None
        self._refused.clear()
        self._refusal = (code, "conformance: refused for good")

    async def _refused_process(self, command: Sequence[str], code: grpc.StatusCode) -> None:
        """Start a server of its own and refuse it with this status."""
        self._say(f"refused with {code.name}")
        self._refuse_everybody(code)
        with self._started(command):
            ended = await self._code(self._limits.start_s)
        self.checklist.note("refused", _unless_two(ended, code.name))

    async def _misled_process(
        self, command: Sequence[str], name: str, messages: Sequence[bytes]
    ) -> None:
        """Start a server of its own and answer it wrongly once."""
        self._say(f"answered with {name}")
        self._name, self._refusal = None, _FULL
        with self._started(command):
            session = await self._next(self._limits.start_s)
            if session is None:
                self.checklist.note("answers", f"{name}: {self._nobody(self._limits.start_s)}")
                return
            for message in messages:
                await session.write(message)
            ended = await self._code(self._limits.again_s)
        self.checklist.note("answers", _unless_two(ended, name))


def _unless_two(code: int | None, what: str) -> str | None:
    """Return a message on an exit code other than 2; None for 2."""
    if code == 2:
        return None
    return f"{what}: " + ("it does not end" if code is None else f"it ended with code {code}")


def _host_and_port(address: str) -> tuple[str, int]:
    """Split host:port; an IPv6 address is returned without its brackets.

    Raises:
        ConfigError: if it is not host:port.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"'{address}' is no address: write it as host:port, 127.0.0.1:50051")
    return host.strip("[]"), int(port)


def examine_and_show(
    address: str,
    command: Sequence[str],
    security: Path | None,
    patience_s: float,
    console: Console,
) -> bool:
    """Examine one server; return whether it keeps the contract.

    Args:
        address: address to listen on.
        command: command that starts the server.
        security: folder of a learner's credentials.
        patience_s: longest wait for one message.
        console: console that prints the report.

    Raises:
        MurmurError: if the address cannot be bound, the command does not start, or no peer
            connects.
    """
    host, port = _host_and_port(address)
    credentials = CredentialFolder(security) if security else None
    limits = Limits(patience_s=patience_s)

    def say(line: str) -> None:
        console.print(plain(f"  {line} …", "dim"))

    def ready(port: int) -> None:
        if not command:
            console.print(
                plain(
                    f"listening on {host}:{port}: start one environment server that connects to "
                    f"this address (within {limits.start_s:g} s)"
                )
            )

    examination = Examination(host, port, credentials=credentials, limits=limits, say=say)
    checklist = asyncio.run(examination.run(command, ready=ready))
    show(checklist, console)
    return not checklist.problems


def show(checklist: Checklist, console: Console) -> None:
    """Print every sentence of the contract with a mark, and its errors below it."""
    console.print(checklist.contract.subject)
    for key, held, wrong in checklist.verdicts():
        mark = {True: "[green]✓[/]", False: "[red]✗[/]", None: "[dim]–[/]"}[held]
        why = "" if held is not None else f" ({_UNTESTED.get(key, 'it did not come to that')})"
        sentence = escape(checklist.contract.sentences[key])
        console.print(f"{mark} {sentence}[dim]{why}[/]", highlight=False)
        for words in wrong[:_SHOWN]:
            console.print(plain(f"    {words}"))
        if len(wrong) > _SHOWN:
            console.print(f"    and {len(wrong) - _SHOWN} times more", highlight=False)
    count = len(checklist.problems)
    console.print(
        "[green]The contract is kept, as far as it was tested.[/]"
        if not count
        else f"[red]The contract is broken in {count} point{'s' * (count > 1)}.[/]"
    )

"""SUPPLY sessions: servers that send samples as the learner asks for them.

A faster session is asked for more. What a session owes when it ends is asked of others, so
that each sample of an epoch is received once. Runs on the server's event loop.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc

from murmur.learner_service.serving.admission import Admission, Admitted, Context, Refused
from murmur.learner_service.storage.samples import SampleStore
from murmur.learner_service.telemetry.metrics import LearnerMetrics
from murmur.learner_service.telemetry.progress import Progress
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.process.errors import MurmurError, SpecError, WireError
from murmur.shared.process.process import end_process, logger
from murmur.shared.rpc import rollout_pb2 as pb
from murmur.shared.wire.notices import NOTICES_TAG, unpack_notices
from murmur.shared.wire.sample_codec import MAX_GRANT, Grant, SampleCodec, pack_grant
from murmur.shared.wire.samples import (
    MASK,
    SPLITS,
    SampleSpec,
    sample_difference,
    samples_from_proto,
)
from murmur.shared.wire.timestep import Array

_FIRST_PATIENCE = 10  # a source may open and index its files before its first samples
_GRANT_BYTES = 256 * 1024  # of the samples of one grant, about
_MOST_IN_GRANT = 8  # unless supply.window asks for more
_GRANTS_OPEN = 4  # of one session, where supply.window is chosen
_MAX_BROKEN_LINES = 20  # of the log
_MAX_REASONS = 16  # that metrics tell apart
_OTHER = "other"


def grant_sizes(spec: SampleSpec, window: int) -> tuple[int, int]:
    """Return the samples of a session to ask for at once, and the most that it may owe.

    Args:
        spec: spec of the samples.
        window: supply.window; 0: chosen.
    """
    size = max(1, min(_MOST_IN_GRANT, _GRANT_BYTES // spec.sample_bytes))
    if not window:
        return size, _GRANTS_OPEN * size
    return max(1, min(size, window // 2, MAX_GRANT)), window


class SupplyDesk:
    """Serves all SUPPLY sessions of a run. Event loop, but for `wake`.

    Attributes:
        store: samples that were received; None until the run is open.
        notices: notices of sources on what they change, ignore or guess.
        received_bytes: counter of what came over the wire.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        metrics: LearnerMetrics,
        progress: Progress,
        open_run: Callable[[SampleSpec], None],
        begin: Callable[[], None],
    ) -> None:
        """Work for a run that has no samples yet.

        Args:
            config: experiment.
            metrics: Prometheus metrics.
            progress: counters of the run.
            open_run: builds the run for the spec of its first session, and sets `store`.
            begin: called when a session is admitted.
        """
        self._seed, self._window = config.run.seed, config.supply.window
        self._metrics, self._progress = metrics, progress
        self._open_run, self._begin = open_run, begin
        self.store: SampleStore | None = None
        self.notices = metrics.notices
        self._timeout_s = config.learner.session_timeout_s or None
        self._received = metrics.counter("samples_received")
        self.received_bytes = metrics.counter("received_bytes")
        self._sessions: set[_Session] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reasons: set[str] = set()
        self._broken_lines = 0

    def wake(self) -> None:
        """There may be something to ask for again. Called by any thread."""
        if self._loop is not None and self._sessions:
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        for session in self._sessions:
            session.wake()

    async def serve(self, hello: pb.Hello, context: Context, stream: Admitted) -> None:
        """Serve one session, from its Hello to the end of its stream.

        Raises:
            Refused: if there can be no such session, or it breaks the contract.
        """
        if hello.mode != pb.MODE_SUPPLY:
            raise Refused(
                grpc.StatusCode.FAILED_PRECONDITION,
                "mode",
                f"worker '{hello.worker_id}' brings an environment, this run learns from a source "
                "of samples; start the server with the run's configuration",
            )
        try:
            spec = samples_from_proto(hello.source)
            size, window = grant_sizes(spec, self._window)
            stream.reserve(window * spec.sample_bytes)
            store = await self._agree(hello, spec, stream.admission)
            self._begin()
        except MurmurError as error:
            raise Refused(grpc.StatusCode.FAILED_PRECONDITION, "spec", str(error)) from None
        welcome = pb.Welcome(policy_version=self._progress.updates, run_seed=self._seed)
        await context.write(pb.LearnerMessage(welcome=welcome).SerializeToString())
        stream.welcome()
        session = _Session(self, store, context, stream, size, window)
        self._sessions.add(session)
        try:
            await session.run(self._timeout_s)
        finally:
            self._sessions.discard(session)
            self._reassign(store, session, hello.worker_id)

    def _reassign(self, store: SampleStore, session: "_Session", worker_id: str) -> None:
        """Give back what an ended session still owes, to ask others for it."""
        owed = sum(len(request.indices) for request in session.open)
        for request in reversed(session.open):
            store.give_back(request)
        if owed:
            self._metrics.counter("samples_reassigned").inc(owed)
            logger.info("worker '%s' is gone; %d samples are asked of others", worker_id, owed)
            self._wake()

    async def _agree(self, hello: pb.Hello, spec: SampleSpec, admission: Admission) -> SampleStore:
        """Let the first session begin the run; compare later ones with it. Returns the samples.

        Raises:
            MurmurError: if this is another data set than the run's.
        """
        self._loop = asyncio.get_running_loop()
        await admission.open_once(lambda: self.store is not None, lambda: self._open_run(spec))
        assert self.store is not None
        difference = sample_difference(self.store.spec, spec)
        if difference:
            raise SpecError(
                f"worker '{hello.worker_id}' brings another data set than this run's: "
                f"{difference} (here: the learner, there: the worker); bring back the files and "
                "options of the run, or begin a new one, with run.start_from for its weights"
            )
        return self.store

    def keep(
        self,
        store: SampleStore,
        request: Grant,
        arrays: dict[str, Array],
        broken: list[pb.BrokenSample],
    ) -> None:
        """Give samples to the store, count them, and name broken ones."""
        try:
            fresh = store.add(request, arrays, [b.index for b in broken])
        except MurmurError as error:
            self._note_broken(request, broken)
            logger.error("%s", error)
            end_process(2)
        else:
            self._received.inc(len(request.indices) - len(broken))
            if fresh:
                self._note_broken(request, broken)

    def _note_broken(self, request: Grant, broken: list[pb.BrokenSample]) -> None:
        split = SPLITS[request.split]
        for b in broken:
            if len(self._reasons) < _MAX_REASONS:
                self._reasons.add(b.reason)
            reason = b.reason if b.reason in self._reasons else _OTHER
            self._metrics.counter("samples_broken", reason=reason).inc()
            self._broken_lines += 1
            if self._broken_lines <= _MAX_BROKEN_LINES:
                logger.warning(
                    "sample %d of split '%s' is left out, %s: %s",
                    b.index,
                    split,
                    b.reason,
                    b.detail,
                )
            if self._broken_lines == _MAX_BROKEN_LINES:
                logger.warning("further broken samples are counted, not named")


@dataclass(eq=False)
class _Session:
    """One stream of samples.

    Attributes:
        desk: desk that the session belongs to.
        store: store of the samples.
        context: gRPC context of the stream.
        stream: the stream's place and counts in admission.
        size: samples of one grant.
        window: most samples that the session may owe.
        open: grants that are not answered yet, oldest first.
    """

    desk: SupplyDesk
    store: SampleStore
    context: Context
    stream: Admitted
    size: int
    window: int
    open: deque[Grant] = field(default_factory=deque)

    def __post_init__(self) -> None:
        """Owe nothing yet."""
        self._codec = SampleCodec(self.store.spec)
        self._sequence = self._owed = 0
        self._reading: asyncio.Task[object] | None = None
        self._room: asyncio.Future[object] = asyncio.get_running_loop().create_future()

    def wake(self) -> None:
        """There may be something to ask for again."""
        if not self._room.done():
            self._room.set_result(None)

    async def run(self, timeout_s: float | None) -> None:
        """Grants and samples, until the worker closes its side.

        Raises:
            Refused: if it sends nothing for too long.
            WireError: if it sends something else than what it was asked for.
        """
        patience_s = timeout_s and timeout_s * _FIRST_PATIENCE
        try:
            while True:
                if self._room.done():
                    self._room = asyncio.get_running_loop().create_future()
                await self._grant(timeout_s)
                message = await self._receive(patience_s)
                if message is None:
                    continue
                if not isinstance(message, bytes):  # grpc.aio.EOF
                    return
                patience_s = timeout_s
                self._take(message)
        finally:
            if self._reading is not None:
                self._reading.cancel()

    async def _grant(self, timeout_s: float | None) -> None:
        """Ask for samples while the window has room."""
        while self._owed < self.window:
            request = self.store.request(min(self.size, self.window - self._owed))
            if request is None:
                return
            self._sequence += 1
            grant = request._replace(sequence=self._sequence)
            self.open.append(grant)
            self._owed += len(grant.indices)
            try:
                async with asyncio.timeout(timeout_s):
                    await self.context.write(pack_grant(grant))
            except TimeoutError:
                raise self._silent(f"has not read a grant for {timeout_s:g} s") from None

    async def _receive(self, patience_s: float | None) -> object:
        """The next message; None if there may be something to ask for before it comes."""
        if self._reading is None:
            self._reading = asyncio.ensure_future(self.context.read())
        waits: set[asyncio.Future[object]] = {self._reading}
        if self._owed < self.window:
            waits.add(self._room)
        done, _ = await asyncio.wait(
            waits,
            timeout=patience_s if self.open else None,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if not done:
            raise self._silent(f"has sent no samples for {patience_s:g} s")
        if self._reading not in done:
            return None
        message, self._reading = self._reading.result(), None
        return message

    def _silent(self, what: str) -> Refused:
        return Refused(
            grpc.StatusCode.DEADLINE_EXCEEDED,
            "idle",
            f"worker '{self.stream.worker}' {what} (learner.session_timeout_s); others are asked",
        )

    def _take(self, message: bytes) -> None:
        """Samples, or a part of them, have come."""
        self.desk.received_bytes.inc(len(message))
        if message.startswith(NOTICES_TAG) and (notices := unpack_notices(message)):
            self.desk.notices.add(notices)
            return
        if not self.open:
            raise WireError("the session sent samples that the learner did not request")
        grant = self.open[0]
        answer = self._codec.receive(message, grant)
        if answer is None:
            return
        arrays, broken = answer
        spec = self.store.spec
        # On a GPU an index that is no class would end the process.
        if MASK in arrays and (strays := spec.stray_pixels(arrays[MASK])).size:
            raise WireError(
                f"a mask of grant {grant.sequence} holds class {int(strays.min())}; there are "
                f"{len(spec.classes)} classes, and {spec.ignore_index} is ignored"
            )
        self.stream.messages += 1
        self.open.popleft()
        self._owed -= len(grant.indices)
        self.desk.keep(self.store, grant, arrays, broken)

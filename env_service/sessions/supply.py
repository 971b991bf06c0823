"""SUPPLY sessions of a worker: samples are read and sent as the learner asks for them.

A worker is one process with one thread and one stream. While it reads a sample, which blocks the
event loop on purpose, the next grants wait in gRPC's buffers: the learner keeps several open.
"""

import asyncio
import contextlib
import logging
import socket

import grpc
from google.protobuf.message import DecodeError
from grpc import aio

from env_service.metrics import WorkerMetrics
from env_service.sessions.ranks import Placement, Ranks
from env_service.sessions.reconnect import Disconnected
from env_service.sessions.worker import run_until
from env_service.sources.source import BrokenSample, Source, make_source, read_sample
from env_service.watchdog.heartbeat import Heartbeat
from shared.config import ExperimentConfig
from shared.errors import MurmurError, WireError
from shared.rpc import METHOD, PROTOCOL_VERSION
from shared.rpc import rollout_pb2 as pb
from shared.sample_codec import Broken, Grant, SampleCodec, unpack_grant
from shared.samples import SPLITS, samples_to_proto
from shared.timestep import Array

logger = logging.getLogger("murmur")

_GRACE_S = 1.0  # how long a stopping worker waits for the learner to end the stream
_MAX_BROKEN_LINES = 20  # of the log
_EOF = object()


class SupplySession:
    """A source and its stream to the learner. Used by one asyncio task."""

    def __init__(
        self, source: Source, worker_id: str, stop: asyncio.Event, heartbeat: Heartbeat
    ) -> None:
        """Take over the source.

        Args:
            source: where samples are read.
            worker_id: names the session in the learner's logs.
            stop: set when the worker is to end.
            heartbeat: where to say what it does.
        """
        self._source, self._worker_id, self._stop = source, worker_id, stop
        self._heartbeat, self._at = heartbeat, heartbeat.part(0, 1)
        self._codec = SampleCodec(source.spec)
        self._broken_lines = 0

    async def run(self, placement: Placement, metrics: WorkerMetrics) -> None:
        """Supply until told to stop, through as many streams as that takes.

        Raises:
            MurmurError: for what connecting again cannot change.
        """
        while not self._stop.is_set():
            try:
                async with placement.channel() as channel:
                    # No (de)serialisers: the codec reads and writes the bytes itself.
                    open_call = channel.stream_stream(METHOD)  # type: ignore[call-arg]
                    call: aio.StreamStreamCall[bytes, bytes] = open_call()  # type: ignore[call-arg]
                    try:
                        await placement.greeted(self._open(call))
                        if placement.leaving.is_set():
                            continue
                        async with placement.playing():
                            await self._supply(call, metrics, placement.leaving)
                    finally:
                        call.cancel()
            except Disconnected as error:
                await placement.pause(error, self._stop)

    async def _open(self, call: "aio.StreamStreamCall[bytes, bytes]") -> None:
        """Hello and Welcome.

        Raises:
            Disconnected: if the learner is not there, refuses or goes away.
            WireError: if it answers something else than Welcome.
        """
        hello = pb.Hello(
            protocol_version=PROTOCOL_VERSION,
            worker_id=self._worker_id,
            mode=pb.MODE_SUPPLY,
            source=samples_to_proto(self._source.spec),
        )
        await _write(call, pb.WorkerMessage(hello=hello).SerializeToString())
        reply = await _read(call)
        try:
            message = pb.LearnerMessage.FromString(reply)
        except DecodeError as error:
            raise WireError(
                f"the learner's answer to Hello is no LearnerMessage: {error}"
            ) from None
        if message.WhichOneof("message") != "welcome":
            raise WireError(f"the learner answered Hello with '{message.WhichOneof('message')}'")

    async def _supply(
        self,
        call: "aio.StreamStreamCall[bytes, bytes]",
        metrics: WorkerMetrics,
        leaving: asyncio.Event,
    ) -> None:
        """Answer grants until told to stop, or to leave for another learner."""
        expected = 1
        while True:
            metrics.enter("wait")
            message = await self._next(call, leaving)
            if message is None:
                return
            metrics.messages_received += 1
            metrics.bytes_received += len(message)
            grant = unpack_grant(self._source.spec, message)
            if grant.sequence != expected:
                raise WireError(f"grant {grant.sequence} came, expected {expected}")
            expected += 1
            samples, broken = self._read_samples(grant, metrics)
            metrics.enter("pack")
            messages = self._codec.messages(grant, samples, broken)
            metrics.count_rows(len(samples))
            metrics.enter("wait")
            for part in messages:
                await _write(call, part)
                metrics.messages_sent += 1
                metrics.bytes_sent += len(part)

    async def _next(
        self, call: "aio.StreamStreamCall[bytes, bytes]", leaving: asyncio.Event
    ) -> bytes | None:
        """The next grant; None if the session is to end or to leave, and its stream is closed."""
        if self._stop.is_set() or leaving.is_set():
            await _close(call)
            return None
        reading = asyncio.ensure_future(_read(call))
        ends = [asyncio.ensure_future(event.wait()) for event in (self._stop, leaving)]
        try:
            await asyncio.wait({reading, *ends}, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                return reading.result()
            await _close(call)  # before the read is given up: that cancels the call
            return None
        finally:
            for end in ends:
                end.cancel()
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError, Disconnected):
                await reading

    def _read_samples(
        self, grant: Grant, metrics: WorkerMetrics
    ) -> tuple[list[dict[str, Array]], list[Broken]]:
        """What a grant asks for, as far as it can be read."""
        metrics.enter("step")
        samples, broken = [], []
        for index in grant.indices:
            self._at.seeds[0], self._at.steps[0] = index, grant.split
            self._heartbeat.enter(0, 1)
            try:
                samples.append(read_sample(self._source, SPLITS[grant.split], index))
            except BrokenSample as error:
                broken.append(Broken(index, error.reason, error.detail))
                self._broken_lines += 1
                if self._broken_lines <= _MAX_BROKEN_LINES:
                    logger.warning("sample %d of '%s': %s", index, SPLITS[grant.split], error)
            finally:
                self._heartbeat.leave()
        return samples, broken


async def _write(call: "aio.StreamStreamCall[bytes, bytes]", message: bytes) -> None:
    """Send a message.

    Raises:
        Disconnected: if the stream is over.
    """
    try:
        await call.write(message)
    except (aio.AioRpcError, asyncio.InvalidStateError):
        raise await _over(call) from None
    except asyncio.CancelledError:
        await _cancelled(call)


async def _read(call: "aio.StreamStreamCall[bytes, bytes]") -> bytes:
    """The next message.

    Raises:
        Disconnected: if the stream is over.
    """
    reply: object = _EOF
    try:
        reply = await call.read()
    except (aio.AioRpcError, asyncio.InvalidStateError):
        pass  # the stream is over; the status says why
    except asyncio.CancelledError:
        await _cancelled(call)
    if not isinstance(reply, bytes):
        raise await _over(call)
    return reply


async def _cancelled(call: "aio.StreamStreamCall[bytes, bytes]") -> None:
    """Tell a task that is cancelled from a stream that the *peer* ends with CANCELLED.

    Raises:
        asyncio.CancelledError: if it is the task.
        Disconnected: if it is the stream.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
    raise await _over(call)


async def _over(call: "aio.StreamStreamCall[bytes, bytes]") -> Disconnected:
    code: grpc.StatusCode = await call.code()
    return Disconnected(code, await call.details() or "")


async def _close(call: "aio.StreamStreamCall[bytes, bytes]") -> None:
    """Half-close the stream and wait for the learner to end it."""
    with contextlib.suppress(asyncio.InvalidStateError, aio.AioRpcError, TimeoutError):
        await call.done_writing()
        await asyncio.wait_for(call.code(), _GRACE_S)


async def run_supply(
    config: ExperimentConfig,
    worker: int,
    stop: asyncio.Event,
    metrics: WorkerMetrics,
    heartbeat: Heartbeat,
) -> None:
    """Supply samples until `stop` is set.

    Args:
        config: the experiment.
        worker: the worker's number, for names.
        stop: ends the session after the samples under way, or after a short grace.
        metrics: the worker's counts.
        heartbeat: where it says what it does.

    Raises:
        MurmurError: for what only the user can change.
    """
    source = make_source(config.source)
    heartbeat.end_making()
    session = SupplySession(source, f"{socket.gethostname()}-{worker}", stop, heartbeat)
    try:
        async with Ranks(config, metrics, "environment", first_turn=worker) as ranks:
            await run_until(stop, metrics, [session.run(ranks.placement(1), metrics)])
    except MurmurError as error:
        logger.error("%s", error)
        heartbeat.give_up()
        raise
    finally:
        heartbeat.begin_closing()

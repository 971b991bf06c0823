"""SUPPLY sessions of a worker, which read and send the samples that the learner requests.

A worker is one process with one thread and one stream. While it reads a sample, which blocks the
event loop on purpose, the next grants wait in gRPC's buffers: the learner keeps several open.
"""

import asyncio
import contextlib
import logging
import socket
from functools import partial

from murmur.env_service.metrics import WorkerMetrics
from murmur.env_service.sessions.connection import Call
from murmur.env_service.sessions.ranks import LearnerChoice, Ranks
from murmur.env_service.sessions.reconnect import Disconnected
from murmur.env_service.sessions.worker import closing_all, run_until
from murmur.env_service.sources.source import (
    BrokenSample,
    Source,
    make_source,
    notices_of,
    read_sample,
)
from murmur.env_service.watchdog.faults import Heartbeat
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.process.errors import WireError
from murmur.shared.rpc import PROTOCOL_VERSION
from murmur.shared.rpc import rollout_pb2 as pb
from murmur.shared.wire.sample_codec import Grant, SampleCodec, broken_sample, unpack_grant
from murmur.shared.wire.samples import SPLITS, samples_to_proto
from murmur.shared.wire.timestep import Array

logger = logging.getLogger("murmur")

_MAX_BROKEN_LINES = 20  # of the log


class SupplySession:
    """A source and its stream to the learner. Used by one asyncio task."""

    def __init__(
        self, source: Source, worker_id: str, stop: asyncio.Event, heartbeat: Heartbeat
    ) -> None:
        """Take over the source.

        Args:
            source: source of the samples.
            worker_id: name of the session in the learner's logs.
            stop: event that asks the worker to end.
            heartbeat: heartbeat of the worker.
        """
        self._source = source
        self._worker_id = worker_id
        self._stop = stop
        self._at = heartbeat.part(0, 1)
        self._codec = SampleCodec(source.spec)
        self._broken_lines = 0

    async def run(self, choice: LearnerChoice, metrics: WorkerMetrics) -> None:
        """Supply samples until `stop` is set, reconnecting as needed.

        Raises:
            MurmurError: if reconnecting cannot help.
        """
        hello = pb.Hello(
            protocol_version=PROTOCOL_VERSION,
            worker_id=self._worker_id,
            mode=pb.MODE_SUPPLY,
            source=samples_to_proto(self._source.spec),
        )
        while not self._stop.is_set():
            try:
                connect = partial(Call, metrics=metrics)
                async with choice.stream(connect, hello) as (call, _):
                    await self._supply(call, metrics, choice.leaving)
            except Disconnected as error:
                await choice.pause(error, self._stop)

    async def _supply(self, call: Call, metrics: WorkerMetrics, leaving: asyncio.Event) -> None:
        """Answer grants until `stop` or `leaving` is set."""
        expected = 1
        notices = notices_of(self._source)
        notices.repeat()
        while True:
            metrics.enter("wait")
            message = await self._next(call, leaving)
            if message is None:
                return
            grant = unpack_grant(self._source.spec, message)
            if grant.sequence != expected:
                raise WireError(f"grant {grant.sequence} came, expected {expected}")
            expected += 1
            samples, broken = self._read_samples(grant, metrics)
            metrics.enter("pack")
            messages = self._codec.messages(grant, samples, broken)
            metrics.count_rows(len(samples))
            metrics.enter("wait")
            if notices.pending:
                await call.tell(notices)
            for part in messages:
                await call.write(part)

    async def _next(self, call: Call, leaving: asyncio.Event) -> bytes | None:
        """Return the next grant; close the stream and return None to end or to leave."""
        if self._stop.is_set() or leaving.is_set():
            await call.close()
            return None
        reading = asyncio.ensure_future(call.read())
        ends = [asyncio.ensure_future(event.wait()) for event in (self._stop, leaving)]
        try:
            await asyncio.wait({reading, *ends}, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                return reading.result()
            await call.close()  # before the read is given up: that cancels the call
            return None
        finally:
            for end in ends:
                end.cancel()
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError, Disconnected):
                await reading

    def _read_samples(
        self, grant: Grant, metrics: WorkerMetrics
    ) -> tuple[list[dict[str, Array]], list[pb.BrokenSample]]:
        """Read the samples of a grant; return the arrays of intact ones, and the broken ones."""
        metrics.enter("step")
        samples, broken = [], []
        for index in grant.indices:
            self._at.seeds[0], self._at.steps[0] = index, grant.split
            self._at.enter()
            try:
                samples.append(read_sample(self._source, SPLITS[grant.split], index))
            except BrokenSample as error:
                broken.append(broken_sample(index, error.reason, error.detail))
                self._broken_lines += 1
                if self._broken_lines <= _MAX_BROKEN_LINES:
                    logger.warning("sample %d of '%s': %s", index, SPLITS[grant.split], error)
            finally:
                self._at.leave()
        return samples, broken


async def run_supply(
    config: ExperimentConfig,
    worker: int,
    stop: asyncio.Event,
    metrics: WorkerMetrics,
    heartbeat: Heartbeat,
) -> None:
    """Supply samples until `stop` is set.

    Args:
        config: configuration of the experiment.
        worker: number of the worker, for names.
        stop: event that ends the session after the samples under way, or a short grace.
        metrics: counts of the worker.
        heartbeat: heartbeat of the worker.

    Raises:
        MurmurError: if only the user can fix the cause.
    """
    source = make_source(config.source)
    heartbeat.end_making()
    session = SupplySession(source, f"{socket.gethostname()}-{worker}", stop, heartbeat)
    with closing_all((), heartbeat):
        async with Ranks(config, metrics, "environment", first_turn=worker) as ranks:
            await run_until(stop, metrics, [session.run(ranks.choice(1), metrics)])

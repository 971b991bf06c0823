"""SUPPLY sessions: both sides take and refuse what an independent reading of the contract does.

A server's messages to the learner, with batches sampled from received data; a learner's messages to
the server; Hello and its SampleSpec.
"""

import asyncio
import contextlib
import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from unittest import mock

import grpc
import numpy as np
import torch
from google.protobuf.message import DecodeError
from prometheus_client import CollectorRegistry

from murmur.env_service.metrics import WorkerMetrics
from murmur.env_service.sessions.connection import Call
from murmur.env_service.sessions.reconnect import Disconnected
from murmur.env_service.sessions.supply import SupplySession
from murmur.env_service.watchdog.faults import Heartbeat
from murmur.learner_service.images.supply import SupplyDesk
from murmur.learner_service.serving.admission import Admission
from murmur.learner_service.serving.server import RolloutServer
from murmur.learner_service.storage.samples import CacheChoice, SampleStore
from murmur.learner_service.telemetry.metrics import LearnerMetrics
from murmur.learner_service.telemetry.progress import Progress
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.config.learner import LearnerConfig
from murmur.shared.config.section import validate
from murmur.shared.process.errors import SpecError, WireError
from murmur.shared.process.process import logger
from murmur.shared.rpc import PROTOCOL_VERSION
from murmur.shared.rpc import rollout_pb2 as pb
from murmur.shared.wire.codec import Frame
from murmur.shared.wire.sample_codec import Grant, SampleCodec, broken_sample
from murmur.shared.wire.samples import (
    SPLITS,
    SampleSpec,
    sample_difference,
    samples_from_proto,
    samples_to_proto,
)
from tests.fuzz import Reader
from tests.fuzz.stand_in import LOOP, Aborted, Context
from tests.supply.toy_source import ToySource

MODULES = (
    "murmur.learner_service.images.supply",
    "murmur.learner_service.storage.epochs",
    "murmur.learner_service.storage.samples",
    "murmur.env_service.sessions.supply",
    "murmur.shared.wire.sample_codec",
    "murmur.shared.wire.samples",
)
TRAIN, VALID = 6, 2
SOURCE = ToySource(train=TRAIN, valid=VALID, size=4, broken=(4,))
_IMAGE, _SAMPLE = 48, 64  # bytes of an image, and of image and mask
_PART = 40  # bytes of a part: a grant of 3 samples takes 5
_BATCH = 3
_MOST_MESSAGES = 40
_TURNS = 4  # of the event loop, in which a session that is woken asks for samples
_SLUG = re.compile(r"[a-z][a-z0-9_]{0,31}")
_HELLO = pb.Hello(
    protocol_version=PROTOCOL_VERSION,
    worker_id="s",
    mode=pb.MODE_SUPPLY,
    source=samples_to_proto(SOURCE.spec),
)
_VALID_HELLO = pb.WorkerMessage(hello=_HELLO).SerializeToString()
_VALID_SPEC = _HELLO.source.SerializeToString()
SEEDS = [
    b"\0",
    b"\1",
    b"\2" + bytes(60),
    b"\3" + bytes([9, 0] * 20),
    *(bytes([k, cached]) + bytes([2, 9, 9, 0] * 20) for k in (4, 5) for cached in (0, 1, 2, 3)),
]


def one(data: bytes) -> str:
    reader = Reader(data)
    match reader.below(8):
        case 0:
            return _spec(reader.edited(_VALID_SPEC))
        case 1:
            return _first_message(reader)
        case 2 | 3:
            return _learners_messages(reader)
        case _:
            return _servers_messages(reader)


def _parts(num_bytes: int, field: str) -> list[Frame]:
    """Frames of small parts, so that there are several."""
    return [
        Frame(pb.WorkerMessage, field, 1, min(_PART, num_bytes - start), part)
        for part, start in enumerate(range(0, max(num_bytes, 1), _PART))
    ]


@contextlib.contextmanager
def _small_and_quiet() -> Iterator[None]:
    """Small parts, and nothing in the log."""
    with (
        mock.patch("murmur.shared.wire.sample_codec.part_frames", _parts),
        mock.patch.object(logger, "disabled", True),
    ):
        yield


# --- a spec, and the first message


def _spec(message: bytes) -> str:
    """Specs that are taken survive the way to protobuf and back, and equal themselves."""
    try:
        proto = pb.SampleSpec.FromString(message)
    except DecodeError:
        return "no spec"
    try:
        spec = samples_from_proto(proto)
    except SpecError:
        return "impossible spec"
    again = samples_from_proto(samples_to_proto(spec))
    assert sample_difference(spec, again) is None, spec
    return "spec"


def _first_message(reader: Reader) -> str:
    """A welcomed client has sent a fitting Hello."""
    if reader.below(2):
        message = reader.edited(_VALID_HELLO)
    else:
        hello = copy.deepcopy(_HELLO)
        number = int.from_bytes(reader.take(1 + reader.below(4)), "little")
        match reader.below(4):
            case 0:
                hello.protocol_version = number
            case 1:
                hello.mode = number % 2**31  # type: ignore[assignment]
            case 2:
                hello.source.sizes[reader.below(2)] = number
            case _:
                hello.source.digest = reader.take(64).hex()[:64]
        message = pb.WorkerMessage(hello=hello).SerializeToString()
    fits = False
    try:
        parsed = pb.WorkerMessage.FromString(message)
    except DecodeError:
        pass
    else:
        parsed.DiscardUnknownFields()
        said = parsed.hello
        fits = (
            parsed.WhichOneof("message") == "hello"
            and said.protocol_version == PROTOCOL_VERSION
            and len(said.worker_id) <= 256
            and said.worker_id.isprintable()
            and said.mode == pb.MODE_SUPPLY
            and said.preferred_first_slot < 1 << 20
            and said.source == _HELLO.source
        )
    status, written = _play(Stream(iter([message])))
    assert (status == "OK") == fits, (status, message)
    assert bool(written) == fits
    return "welcomed" if fits else status


# --- what a server sends to the learner


def _refuse_to_open(spec: SampleSpec) -> None:
    raise AssertionError("the run is open")


_CONFIG = validate(ExperimentConfig, {"source": {"name": "toy"}, "supply": {"window": 6}})
_DESK = SupplyDesk(_CONFIG, LearnerMetrics(), Progress(), _refuse_to_open, lambda: None)
_LEARNER = LearnerConfig(max_sessions=2)
_SERVER = RolloutServer(_DESK, Admission(_LEARNER, LearnerMetrics()), _LEARNER)


class Stream(Context):
    """A stream whose next message is made when the server asks for it; None: a turn later."""

    def __init__(self, messages: Iterator[bytes | None]) -> None:
        super().__init__(())
        self._next = messages

    async def read(self) -> object:
        while (message := next(self._next, grpc.aio.EOF)) is None:
            await asyncio.sleep(0)
        return message


def _new_store(places: int, *, ordered: bool) -> SampleStore:
    choice = CacheChoice("stream" if places else "device", "", places)
    cpu = torch.device("cpu")
    store = SampleStore(SOURCE.spec, _BATCH, 1, choice, cpu, {"to_device": 0}, ordered=ordered)
    if places:
        store.on_room = _DESK.wake
    _DESK.store = store
    return store


def _play(stream: Stream) -> tuple[str, list[bytes]]:
    """A whole stream: its status, and what the server wrote."""
    if _DESK.store is None:
        _new_store(0, ordered=False)
    status = "OK"
    with _small_and_quiet():
        try:
            LOOP.run_until_complete(_SERVER._play(None, stream))  # type: ignore[arg-type]
        except Aborted as aborted:
            status = aborted.code.name
    assert not _SERVER.admission.streams, "a place, or memory, was left behind"
    return status, stream.written


@dataclass
class Open:
    """A grant that is not answered yet, and its answer so far."""

    grant: pb.Grant
    indices: list[int]
    broken: list[int] | None = None
    data: bytes = b""


class Server:
    """Says Hello and answers grants, mostly rightly; knows the right outcome of each message."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._places = (0, 0, 4, TRAIN)[reader.below(4)]
        self._store = _new_store(self._places, ordered=bool(reader.below(2)))
        self.stream = Stream(self._messages())
        self.expected, self.failed = "OK", False
        self._open: list[Open] = []
        self._grants = 0
        self._asked: set[tuple[int, int, int]] = set()  # (split, epoch, index)
        self._sent: dict[tuple[int, int, int], bytes] = {}
        self._lost: set[tuple[int, int]] = set()  # (split, index)
        self._trained: dict[int, list[int]] = {}  # by epoch

    def _messages(self) -> Iterator[bytes | None]:
        yield _VALID_HELLO
        ready: list[bytes] = []
        for _ in range(_MOST_MESSAGES):
            self._look()
            for _ in range(self._reader.below(3)):
                self.train()
            for _ in range(_TURNS if not self._open else 0):
                yield None  # room may have been made
                self._look()
            unasked = not self._open and self._reader.below(8)
            if self.failed or unasked or not self._reader.left:
                return
            if not ready:
                ready = self._answer()
            message = ready.pop(0)
            if self._reader.below(16) == 15:
                message = self._reader.edited(message)
            if not self._is_right(message):
                self.expected = "INVALID_ARGUMENT"
            yield message

    def _look(self) -> None:
        """Take notice of new grants, which must keep the contract."""
        for message in self.stream.written[1 + self._grants :]:
            parsed = pb.LearnerMessage.FromString(message)
            assert parsed.WhichOneof("message") == "grant"
            grant = parsed.grant
            self._grants += 1
            indices = np.frombuffer(grant.indices, "<i4").tolist()
            assert grant.sequence == self._grants
            assert grant.split < 2
            assert 1 <= len(indices) <= 64
            assert all(0 <= i < (TRAIN, VALID)[grant.split] for i in indices)
            kept = not self._places or grant.split == 1
            for index in indices:
                asked = (grant.split, 0 if kept else grant.epoch, index)
                assert asked not in self._asked, f"asked twice: {asked}"
                self._asked.add(asked)
            self._open.append(Open(grant, indices))
        assert sum(len(o.indices) for o in self._open) <= _CONFIG.supply.window

    def _answer(self) -> list[bytes]:
        """The messages that answer the oldest grant, mostly right ones."""
        reader = self._reader
        now = self._open[0] if self._open else Open(pb.Grant(sequence=1), [0])
        indices = list(now.indices)
        what = reader.below(16)
        bits = reader.byte() if what < 3 else 0
        lost = [i for k, i in enumerate(indices) if bits >> k & 1]
        good = [i for i in indices if i not in lost]
        images = b"".join(bytes([i + 1] * _IMAGE) for i in good)
        masks = bytearray(b"".join(bytes([i % 3] * 16) for i in good))
        reason, sequence, part = "unreadable", now.grant.sequence, 0
        match what:
            case 3 if masks:
                masks[reader.byte() % len(masks)] = reader.byte()
            case 4:
                sequence = reader.below(4)
            case 5:
                part = reader.below(3)
            case 6:
                masks += reader.take(3)
            case 2:
                lost += [reader.below(8)] * (1 + reader.below(2))
            case 1:
                reason = reader.take(reader.below(4)).decode("latin-1")
            case _:
                pass
        messages = []
        if lost:
            named = [pb.BrokenSample(index=i, reason=reason, detail="\n") for i in lost]
            messages.append(pb.Samples(sequence=sequence, broken=named))
        arrays = images + bytes(masks)
        for k, at in enumerate(range(0, len(arrays), _PART)):
            of_part = arrays[at : at + _PART]
            messages.append(pb.Samples(sequence=sequence, arrays=of_part, part=part + k))
        if what == 7 and len(messages) > 1:
            messages[-1].broken.add(index=indices[0], reason=reason)
        if what == 8:
            messages.reverse()
        if what == 9 or not messages:
            return [pb.WorkerMessage(hello=_HELLO).SerializeToString()]
        return [pb.WorkerMessage(samples=m).SerializeToString() for m in messages]

    def _is_right(self, message: bytes) -> bool:
        """Whether the contract allows this message here, by docs/wire.md, "Samples"."""
        if not self._open:
            return False
        now = self._open[0]
        try:
            parsed = pb.WorkerMessage.FromString(message)
        except DecodeError:
            return False
        said = parsed.samples
        if parsed.WhichOneof("message") != "samples" or said.sequence != now.grant.sequence:
            return False
        if said.broken:
            named = [b.index for b in said.broken]
            if said.arrays or now.data or now.broken is not None:
                return False
            if len(set(named)) < len(named) or not set(named) <= set(now.indices):
                return False
            if not all(_SLUG.fullmatch(b.reason) for b in said.broken):
                return False
            now.broken = named
            if len(named) == len(now.indices):
                self._finish(now, [], b"")
            return True
        good = [i for i in now.indices if i not in (now.broken or ())]
        due = min(_PART, len(good) * _SAMPLE - len(now.data))
        if said.part != len(now.data) // _PART or len(said.arrays) != due:
            return False
        now.data += said.arrays
        if len(now.data) < len(good) * _SAMPLE:
            return True
        if any(2 < value < 255 for value in now.data[len(good) * _IMAGE :]):
            return False
        self._finish(now, good, now.data)
        return True

    def _finish(self, now: Open, good: list[int], data: bytes) -> None:
        """A grant has been answered."""
        self._open.pop(0)
        split, epoch = now.grant.split, now.grant.epoch
        for k, index in enumerate(good):
            image = data[k * _IMAGE : (k + 1) * _IMAGE]
            self._sent[split, epoch if self._places else 0, index] = image
        self._lost |= {(split, i) for i in now.broken or ()}
        sizes = (TRAIN, VALID)
        self.failed = any(sum(s == k for s, _ in self._lost) == sizes[k] for k in (0, 1))

    def train(self) -> None:
        """Take a batch if there is one: once an epoch each sample, with the bytes that came."""
        batch = self._store.sample(0, 0.0)
        if batch is None:
            return
        trained = self._trained.setdefault(batch.epoch, [])
        for index, image in zip(batch.index.tolist(), batch.arrays["image"], strict=True):
            assert index not in trained, f"{index} is trained twice in epoch {batch.epoch}"
            trained.append(index)
            came = self._sent[0, batch.epoch if self._places else 0, index]
            assert image.numpy().tobytes() == came, index
        if batch.ends_epoch:
            lost = {i for split, i in self._lost if split == 0}
            assert set(trained) | lost == set(range(TRAIN)), "the epoch ended early"
        self._store.done(batch)

    def finish_epochs(self) -> None:
        """After the session, an honest one brings what is missing: nothing is lost."""
        until = self._store.epoch + 2
        for _ in range(10 * TRAIN):
            if self._store.epoch >= until:
                assert self._store.valid_ready(0.0)
                return
            request = self._store.request(4)
            if request is not None:
                _, epoch, split, indices = request
                arrays = {
                    "image": np.stack([np.full((3, 4, 4), i + 1, np.uint8) for i in indices]),
                    "mask": np.zeros((len(indices), 4, 4), np.uint8),
                }
                for index, image in zip(indices, arrays["image"], strict=True):
                    self._sent[split, epoch if self._places else 0, index] = image.tobytes()
                self._store.add(request, arrays, [])
            self.train()
        raise AssertionError(f"the run is stuck in epoch {self._store.epoch}")


def _servers_messages(reader: Reader) -> str:
    server = Server(reader)
    with mock.patch("murmur.learner_service.images.supply.end_process") as end:
        status, _ = _play(server.stream)
    assert status == server.expected, (status, server.expected)
    assert end.called == server.failed
    if server.failed:
        return "all samples broken"
    if reader.below(4) == 0:
        server.finish_epochs()
    return status


# --- what a learner sends to the server


class RawCall:
    """The server's side of a stream: messages that come, and what is written."""

    def __init__(self, messages: list[bytes]) -> None:
        self._messages = iter(messages)
        self.written: list[bytes] = []

    async def read(self) -> object:
        return next(self._messages, grpc.aio.EOF)

    async def write(self, message: bytes) -> None:
        self.written.append(message)

    async def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.OK

    async def details(self) -> str:
        return ""


class _Channel:
    """Opens a call that is there already."""

    def __init__(self, call: RawCall) -> None:
        self._call = call

    def stream_stream(self, method: str) -> Callable[[], RawCall]:
        return lambda: self._call


class _NeverStops:
    """In place of an asyncio.Event, which belongs to a loop that runs."""

    def is_set(self) -> bool:
        return False

    async def wait(self) -> None:
        await LOOP.create_future()


_METRICS = WorkerMetrics("train", CollectorRegistry())
_READS = Heartbeat.private(1)


def _learners_messages(reader: Reader) -> str:
    messages = [pb.LearnerMessage(welcome=pb.Welcome(run_seed=5)).SerializeToString()]
    while reader.left and len(messages) < 8:
        messages.append(_grant(reader, len(messages)))
    if not reader.below(8):
        at = reader.below(len(messages))
        messages[at] = reader.edited(messages[at])
    call = RawCall(messages)
    with _small_and_quiet():
        session = SupplySession(SOURCE, "s", _NeverStops(), _READS)  # type: ignore[arg-type]

        async def play() -> None:
            stream = Call(_Channel(call), _METRICS)  # type: ignore[arg-type]
            await stream.greet(pb.Hello(worker_id="s", mode=pb.MODE_SUPPLY))
            await session._supply(stream, _METRICS, _NeverStops())  # type: ignore[arg-type]

        try:
            LOOP.run_until_complete(play())
        except WireError:
            outcome = "refused"
        except Disconnected:
            outcome = "supplied"
        answers, expected = _answers(messages)
        assert outcome == expected, (outcome, expected, messages)
        assert call.written[1:] == answers
    return outcome


def _grant(reader: Reader, sequence: int) -> bytes:
    """The next grant, mostly a right one."""
    what = reader.below(10)
    split = reader.below(2) if what else reader.below(4)
    indices = [reader.below((TRAIN, VALID)[split % 2]) for _ in range(1 + reader.below(4))]
    if what == 1:
        indices = indices * reader.below(40)
    if what == 2:
        indices.append(int.from_bytes(reader.take(4), "little", signed=True))
    if what == 3:
        sequence = reader.below(4)
    packed = np.array(indices, "<i4").tobytes() + (reader.take(2) if what == 4 else b"")
    grant = pb.Grant(sequence=sequence, epoch=reader.below(3), split=split, indices=packed)
    return pb.LearnerMessage(grant=grant).SerializeToString()


def _answers(messages: list[bytes]) -> tuple[list[bytes], str]:
    """What a server must write after Hello, and how it ends, by docs/wire.md."""
    answers: list[bytes] = []
    for sequence, message in enumerate(messages):
        try:
            parsed = pb.LearnerMessage.FromString(message)
        except DecodeError:
            return answers, "refused"
        if parsed.WhichOneof("message") != ("grant" if sequence else "welcome"):
            return answers, "refused"
        if not sequence:
            continue
        grant = parsed.grant
        if grant.sequence != sequence or grant.split > 1 or len(grant.indices) % 4:
            return answers, "refused"
        indices = np.frombuffer(grant.indices, "<i4").tolist()
        size = (TRAIN, VALID)[grant.split]
        if not 1 <= len(indices) <= 64 or not all(0 <= i < size for i in indices):
            return answers, "refused"
        good = [i for i in indices if grant.split or i != 4]
        whole = Grant(sequence, grant.epoch, grant.split, tuple(indices))
        samples = [SOURCE.read(SPLITS[grant.split], i) for i in good]
        broken = [broken_sample(4, "unreadable", "toy-4.png")] * (len(indices) - len(good))
        answers += SampleCodec(SOURCE.spec).messages(whole, samples, broken)
    return answers, "supplied"

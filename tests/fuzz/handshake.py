"""The first message: a fitting Hello is welcomed, any other is refused."""

import copy

from google.protobuf.message import DecodeError

from murmur.shared.process.errors import SpecError
from murmur.shared.rpc import PROTOCOL_VERSION
from murmur.shared.rpc import rollout_pb2 as pb
from murmur.shared.wire.codec import check_size
from murmur.shared.wire.spec import first_difference, spec_from_proto, spec_to_proto
from tests.fuzz import Reader
from tests.fuzz.stand_in import SPEC, play
from tests.wire import hello

MODULES = (
    "murmur.learner_service.serving.admission",
    "murmur.learner_service.serving.lockstep",
    "murmur.shared.wire.spec",
)
_HELLO = hello(SPEC, 2)
_VALID = pb.WorkerMessage(hello=_HELLO).SerializeToString()
_CONTINUOUS = copy.deepcopy(_HELLO.spec)
_CONTINUOUS.action.continuous.size, _CONTINUOUS.action.continuous.high = 2, 1.0
_SPECS = [_HELLO.spec.SerializeToString(), _CONTINUOUS.SerializeToString()]
SEEDS = [b"\0\1" + _VALID, b"\1", b"\2", b"\2\1", b"\3\1\4"]


def one(data: bytes) -> str:
    reader = Reader(data)
    match reader.below(4):
        case 0:
            return _first_message(reader.rest())
        case 1:
            return _first_message(reader.edited(_VALID))
        case 2:
            return _spec(reader.edited(_SPECS[reader.below(2)]))
        case _:
            return _first_message(pb.WorkerMessage(hello=_changed(reader)).SerializeToString())


def _changed(reader: Reader) -> pb.Hello:
    """Hello with some fields set to something else."""
    hello = copy.deepcopy(_HELLO)
    for _ in range(1 + reader.below(3)):
        number = int.from_bytes(reader.take(1 + reader.below(4)), "little")
        match reader.below(6):
            case 0:
                hello.protocol_version = number
            case 1:
                hello.worker_id = reader.take(reader.byte()).decode("latin-1")
            case 2:
                hello.mode = number % 2**31  # type: ignore[assignment]
            case 3:
                hello.num_envs = number
            case 4:
                hello.preferred_first_slot = number
            case _:
                hello.spec.num_agents = number
    return hello


def _first_message(message: bytes) -> str:
    status, written = play([message])
    fits = False
    try:
        parsed = pb.WorkerMessage.FromString(message)
    except DecodeError:
        pass
    else:
        hello = parsed.hello
        parsed.DiscardUnknownFields()
        fits = (
            parsed.WhichOneof("message") == "hello"
            and len(message) <= 1 << 20
            and hello.protocol_version == PROTOCOL_VERSION
            and len(hello.worker_id) <= 256
            and hello.worker_id.isprintable()
            and hello.mode in (1, 2)
            and 1 <= hello.num_envs <= 65_536
            and hello.preferred_first_slot < 1 << 20
            and hello.spec == _HELLO.spec
        )
    assert (status == "OK") == fits, (status, message)
    assert len(written) == fits
    return "welcomed" if fits else status


def _spec(message: bytes) -> str:
    """Specs that are taken survive the way to protobuf and back, and equal themselves."""
    try:
        proto = pb.EnvSpec.FromString(message)
    except DecodeError:
        return "no spec"
    try:
        spec = spec_from_proto(proto)
        check_size(spec, 1)
    except SpecError:
        return "impossible spec"
    assert first_difference(spec, spec_from_proto(spec_to_proto(spec))) is None, spec
    return "spec"

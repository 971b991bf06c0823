"""The codec reads what protobuf and the layout allow, nothing else, and reads the same."""

import numpy as np
from google.protobuf.message import DecodeError

from murmur.shared.process.errors import WireError
from murmur.shared.rpc import rollout_pb2 as pb
from murmur.shared.wire.codec import (
    ActionCodec,
    Layout,
    ObservationCodec,
    action_array_layout,
    timestep_layout,
)
from murmur.shared.wire.episode_options import OPTIONS_BYTES, options_from_proto
from murmur.shared.wire.spec import Discrete, EnvSpec, action_layout
from tests.fuzz import Reader
from tests.shared.wire.test_codec import SPECS, payload, timestep

MODULES = ("murmur.shared.wire.codec",)
SEEDS = [bytes([k, 1, 0]) for k in range(8)] + [bytes([0, 0]) + b"\x12\x04\x12\x02ab"]
SEEDS += [b"\x04\1\1\0\0\3\xff"]  # an action that stands twice in a message

_ENCODING_BYTES = 64  # by which a message may be longer than murmur's own frame of it


def _observation(name: str, n: int) -> tuple[EnvSpec, ObservationCodec, Layout, bytes]:
    spec = SPECS[name]
    codec = ObservationCodec(spec, n)
    (message,) = codec.messages(300, timestep(spec, n))
    return spec, codec, timestep_layout(spec, n), message


def _action(name: str, n: int) -> tuple[EnvSpec, ActionCodec, Layout, bytes]:
    spec = SPECS[name]
    codec = ActionCodec(spec, n)
    dtype, shape = action_layout(spec.action)
    action = np.ones((n, spec.num_agents, *shape), dtype)
    return spec, codec, action_array_layout(spec, n), codec.pack(9, 2**40, action)


def _accepted(spec: EnvSpec, body: pb.Observation | pb.Action) -> bool:
    """Return whether all actions of a message, if it has any, are the spec's, and its options."""
    if not isinstance(body, pb.Action):
        return True
    try:
        options_from_proto(body.options)
    except WireError:
        return False
    dtype, _ = action_layout(spec.action)
    action = np.frombuffer(body.arrays, dtype)
    if isinstance(spec.action, Discrete):
        return all(0 <= a < spec.action.num_actions for a in action.tolist())
    return all(spec.action.low <= a <= spec.action.high for a in action.tolist())


_CODECS: list[tuple[EnvSpec, ObservationCodec | ActionCodec, Layout, bytes]] = [
    _observation("small", 1),
    _observation("small", 40),
    _observation("mixed", 2),
    _action("small", 3),
    _action("mixed", 2),
]


def one(data: bytes) -> str:
    reader = Reader(data)
    spec, codec, layout, valid = _CODECS[reader.below(len(_CODECS))]
    message = reader.edited(valid) if reader.below(4) else reader.rest()
    kind, field = (
        (pb.WorkerMessage, "observation")
        if isinstance(codec, ObservationCodec)
        else (pb.LearnerMessage, "action")
    )
    wanted = None
    try:
        parsed = kind.FromString(message)
    except DecodeError:
        pass
    else:
        body = getattr(parsed, field)
        further = OPTIONS_BYTES if isinstance(body, pb.Action) else 0
        short = len(message) <= len(valid) + _ENCODING_BYTES + further
        fits = len(body.arrays) == layout.num_bytes and not getattr(body, "part", 0)
        if parsed.WhichOneof("message") == field and short and fits and _accepted(spec, body):
            wanted = body
    try:
        if isinstance(codec, ObservationCodec):
            received = codec.receive(message)
            assert received is not None
            sequence, rows = received
            got = (sequence, 0, payload(spec, rows))
        else:
            sequence, version, action = codec.unpack(message)
            got = (sequence, version, action.tobytes())
    except WireError:
        assert wanted is None, "refused what protobuf reads"
        return "refused"
    assert wanted is not None, "read what protobuf refuses"
    version = getattr(wanted, "policy_version", 0)
    assert got == (wanted.sequence, version, wanted.arrays)
    return "read"

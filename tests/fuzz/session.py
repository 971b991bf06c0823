"""A whole stream: the server takes and refuses what an independent reading of the contract does."""

import struct
from dataclasses import dataclass, field

import numpy as np
from google.protobuf.message import DecodeError

from murmur.shared.rpc import rollout_pb2 as pb
from tests.fuzz import Reader
from tests.fuzz.stand_in import HOST, SPEC, play
from tests.wire import hello_message

MODULES = (
    "murmur.learner_service.serving.lockstep",
    "murmur.learner_service.serving.requests",
    "murmur.shared.wire.codec",
)
SEEDS = [bytes([0] + [0] * 12), bytes([1, 0, 2, 3, 0, 9]), bytes([0, 0, 0, 2, 2, 2, 0, 0, 0])]

N, A = 2, 2
# reward 16, discount 8, x 32, mask 12, metric 8, step_type 2 bytes: docs/wire.md, "Arrays".
_NUM_BYTES = 78
_FLOATS = 14  # reward, discount and x come first


@dataclass
class Rows:
    """One message, before it is written."""

    reward: list[float] = field(default_factory=lambda: [0.0] * 4)
    discount: list[float] = field(default_factory=lambda: [1.0] * 2)
    x: list[float] = field(default_factory=lambda: [0.5] * 8)
    mask: list[int] = field(default_factory=lambda: [1] * 12)
    metric: list[float] = field(default_factory=lambda: [0.0] * 2)
    kinds: list[int] = field(default_factory=lambda: [0, 0])

    def arrays(self) -> bytes:
        floats = [*self.reward, *self.discount, *self.x]
        out = struct.pack(f"<{_FLOATS}f", *floats) + bytes(self.mask)
        return out + struct.pack("<2f", *self.metric) + bytes(self.kinds)


def one(data: bytes) -> str:
    reader = Reader(data)
    evaluates = bool(reader.below(2))
    messages = [hello_message(SPEC, N, mode=2 if evaluates else 1)]
    kinds, sequence = [0, 0], 0
    while reader.left and len(messages) < 6:
        sequence += 1
        message, kinds = _message(reader, sequence, kinds)
        messages.append(message)
    expected, answers = _contract(messages[1:], evaluates)
    before = HOST.rows
    status, written = play(messages)
    assert (status, len(written)) == (expected, 1 + answers), (status, expected, messages)
    assert HOST.rows - before == N * answers
    return status


def _message(reader: Reader, sequence: int, kinds: list[int]) -> tuple[bytes, list[int]]:
    """The next message, mostly a right one, and the step types it tells."""
    what = reader.below(12)
    rows = Rows()
    after = reader.byte()  # the outcome of each environment
    chosen = [after % 3 + 1, after // 3 % 3 + 1]
    rows.kinds = [0 if k in (2, 3) else c for k, c in zip(kinds, chosen, strict=True)]
    if sequence == 1:
        rows.kinds = [0, 0]
    rows.metric = [0.0 if k == 2 else float("nan") for k in rows.kinds]  # not on LAST: any
    match what:
        case 0:
            rows.kinds[reader.below(2)] = reader.below(6)
        case 1:
            bad = (float("nan"), float("inf"), -float("inf"), 3e38)[reader.below(4)]
            array = (rows.reward, rows.discount, rows.x, rows.metric)[reader.below(4)]
            array[reader.byte() % len(array)] = bad
        case 2:
            first = 3 * reader.below(4)
            rows.mask[first : first + 3] = [reader.byte(), reader.byte(), reader.byte()]
        case 3:
            sequence = sequence + reader.below(3) - 1
        case 4:
            sequence = int.from_bytes(reader.take(8), "little")
        case _:
            pass
    observation = pb.Observation(sequence=sequence, arrays=rows.arrays())
    message = pb.WorkerMessage(observation=observation).SerializeToString()
    if what == 5:
        message = reader.edited(message)
    return message, rows.kinds


def _contract(messages: list[bytes], evaluates: bool) -> tuple[str, int]:
    """Status and number of answers by docs/wire.md, read independently."""
    before: list[int] | None = None
    for count, message in enumerate(messages):
        try:
            parsed = pb.WorkerMessage.FromString(message)
        except DecodeError:
            return "INVALID_ARGUMENT", count
        arrays = parsed.observation.arrays
        if parsed.WhichOneof("message") != "observation" or len(arrays) != _NUM_BYTES:
            return "INVALID_ARGUMENT", count
        if len(message) > 2 + 9 + 2 + _NUM_BYTES + 64:
            return "INVALID_ARGUMENT", count
        if parsed.observation.part:
            return "INVALID_ARGUMENT", count
        if parsed.observation.sequence != count + 1:
            return "FAILED_PRECONDITION", count
        floats = np.frombuffer(arrays, "<f4", _FLOATS)
        mask = np.frombuffer(arrays, np.uint8, 12, 4 * _FLOATS).reshape(4, 3)
        metric = np.frombuffer(arrays, "<f4", 2, 4 * _FLOATS + 12)
        kinds = list(arrays[-2:])
        follows = (  # ABORTED may stand in the place of any row
            (not evaluates or set(kinds) <= {0, 3})
            if before is None
            else all(k == 3 or (k == 0) == (b >= 2) for k, b in zip(kinds, before, strict=True))
        )
        legal = mask.max() <= 1 and mask.any(1).all()
        finite = np.isfinite(floats).all() and np.isfinite(metric[np.equal(kinds, 2)]).all()
        reward, discount = floats[:4].reshape(2, 2), floats[4:6]
        paid = np.abs(reward).max() <= 1e6 and not reward[np.equal(kinds, 0)].any()
        finite = finite and np.abs(floats[6:]).max() <= 1e18
        ranged = paid and discount.min() >= 0 and discount.max() <= 1
        good = max(kinds) <= 3 and follows and legal and finite and ranged
        if not good:
            return "INVALID_ARGUMENT", count
        before = kinds
    return "OK", len(messages)

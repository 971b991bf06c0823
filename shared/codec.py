"""Arrays <-> bytes by spec, and messages <-> bytes without a second copy.

The wire is plain protobuf (proto/rollout.proto): any language can speak it. But protobuf's own
Python code copies a `bytes` field twice on its way out and once on its way in, about 2 ms a
megabyte. All messages after the handshake have the same length, so this module writes their
protobuf framing once, packs arrays straight into the frame, and reads them back as views.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError, Message
from numpy.typing import NDArray

from shared.channel import MAX_OBSERVATION_BYTES
from shared.errors import SpecError, WireError
from shared.rpc import rollout_pb2 as pb
from shared.spec import EnvSpec, action_layout
from shared.timestep import Array, TimeStep

_FIXED64 = np.dtype("<u8")

# A frame has at most 30 bytes beside its arrays; other encodings of the same message, with longer
# varints and fields in another order, a few more.
_ENCODING_BYTES = 64


@dataclass(frozen=True)
class Layout:
    """Where each array of a message lies in its payload: back to back, in order.

    Attributes:
        fields: (name, dtype, shape) of every array, leading dimensions included.
    """

    fields: tuple[tuple[str, np.dtype[np.generic], tuple[int, ...]], ...]

    @cached_property
    def num_bytes(self) -> int:
        """Length of the payload."""
        return sum(d.itemsize * math.prod(s) for _, d, s in self.fields)

    def views(self, payload: memoryview | bytes | bytearray) -> dict[str, Array]:
        """The arrays of a payload, by name, without a copy.

        Raises:
            WireError: if the payload has the wrong number of bytes, naming the arrays expected.
        """
        if len(payload) != self.num_bytes:
            raise WireError(
                f"arrays hold {len(payload)} bytes, the spec says {self.num_bytes}: "
                + ", ".join(f"{n} {d.name}{list(s)}" for n, d, s in self.fields)
            )
        return {
            name: np.ndarray(shape, dtype, payload, offset)
            for name, dtype, shape, offset in self._places
        }

    @cached_property
    def _places(self) -> list[tuple[str, np.dtype[np.generic], tuple[int, ...], int]]:
        """Fields and where in the payload each begins."""
        sizes = [d.itemsize * math.prod(s) for _, d, s in self.fields]
        starts = accumulate(sizes, initial=0)
        return [(*field, start) for field, start in zip(self.fields, starts, strict=False)]


# Names of the wire's own arrays; no observation or metric can collide with them, because those
# carry a prefix.
_STEP_TYPE, _REWARD, _DISCOUNT, _ACTION = "step_type", "reward", "discount", "action"
_OBSERVATION, _METRIC = "observation/", "metric/"


def timestep_layout(spec: EnvSpec, num_envs: int) -> Layout:
    """The payload of an Observation: reward, discount, observations, metrics, step_type."""
    n, a = num_envs, spec.num_agents
    f32, u8 = np.dtype("<f4"), np.dtype("u1")
    fields: list[tuple[str, np.dtype[np.generic], tuple[int, ...]]] = [
        (_REWARD, f32, (n, a)),
        (_DISCOUNT, f32, (n,)),
    ]
    for o in spec.observations:
        lead = (n, a) if o.per_agent else (n,)
        dtype = np.dtype(o.dtype).newbyteorder("<")
        fields.append((_OBSERVATION + o.name, dtype, (*lead, *o.shape)))
    fields += [(_METRIC + m, f32, (n,)) for m in spec.metrics]
    fields.append((_STEP_TYPE, u8, (n,)))
    return Layout(tuple(fields))


def action_array_layout(spec: EnvSpec, num_envs: int) -> Layout:
    """The payload of an Action: one array, int32 [N, A] or float32 [N, A, U]."""
    dtype, shape = action_layout(spec.action)
    return Layout(((_ACTION, dtype.newbyteorder("<"), (num_envs, spec.num_agents, *shape)),))


def check_size(spec: EnvSpec, num_envs: int) -> None:
    """Refuse a session whose messages would be too large; sets no memory aside.

    Raises:
        SpecError: naming the bytes of a message and the limit.
    """
    limit = MAX_OBSERVATION_BYTES - _ENCODING_BYTES
    for what, layout in (
        ("an observation", timestep_layout(spec, num_envs)),
        ("an action", action_array_layout(spec, num_envs)),
    ):
        if layout.num_bytes > limit:
            raise SpecError(
                f"{what} of {num_envs} environments '{spec.name}' takes {layout.num_bytes} bytes, "
                f"a message holds {limit}; use fewer environments in a session "
                "(env_server.envs_per_worker / sessions_per_worker)"
            )


def timestep_from_views(spec: EnvSpec, views: Mapping[str, Array]) -> TimeStep:
    """Group the views of a payload into a TimeStep."""
    return TimeStep(
        step_type=views[_STEP_TYPE],  # type: ignore[arg-type]
        reward=views[_REWARD],  # type: ignore[arg-type]
        discount=views[_DISCOUNT],  # type: ignore[arg-type]
        observation={o.name: views[_OBSERVATION + o.name] for o in spec.observations},
        metrics={m: views[_METRIC + m] for m in spec.metrics},  # type: ignore[misc]
    )


def _varint(value: int) -> bytes:
    """Protobuf's base-128 varint."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


class Frame:
    """A reusable protobuf frame: fixed64 fields 1..n, then one `bytes` field, in a oneof.

    Equal, byte for byte, to what protobuf's own code writes. Used by one thread.

    Attributes:
        payload: writable views of the arrays, by name; fill them, then call `tobytes`.
        max_bytes: no encoding of such a message is longer.
    """

    def __init__(self, oneof_field: int, num_counters: int, layout: Layout) -> None:
        """Lay out the frame.

        Args:
            oneof_field: number of this message in the outer oneof.
            num_counters: how many fixed64 fields come first (sequence, policy_version).
            layout: the arrays of the `bytes` field that follows.
        """
        size = layout.num_bytes
        arrays_header = bytes([(num_counters + 1) << 3 | 2]) + _varint(size)
        inner = 9 * num_counters + len(arrays_header) + size
        head = bytearray(bytes([oneof_field << 3 | 2]) + _varint(inner))
        self._counters_at = [len(head) + 9 * i + 1 for i in range(num_counters)]
        for i in range(num_counters):
            head += bytes([(i + 1) << 3 | 1]) + bytes(8)
        head += arrays_header
        self._layout = layout
        self._payload_at = len(head)
        self.max_bytes = len(head) + size + _ENCODING_BYTES
        self._buffer = head + bytes(size)
        self._counters = [np.frombuffer(self._buffer, _FIXED64, 1, at) for at in self._counters_at]
        # What every frame of this layout has in common, to recognise one on arrival. A zero
        # fixed64 is left out by protobuf's writers; such frames take the general path.
        self._common = [
            (start, bytes(self._buffer[start:stop]))
            for start, stop in zip(
                [0, *(at + 8 for at in self._counters_at)],
                [*self._counters_at, self._payload_at],
                strict=True,
            )
        ]
        self.payload = layout.views(memoryview(self._buffer)[self._payload_at :])

    def tobytes(self, *counters: int) -> bytes:
        """The finished message."""
        for view, value in zip(self._counters, counters, strict=True):
            view[0] = value
        return bytes(self._buffer)

    def match(self, message: bytes) -> tuple[list[int], memoryview] | None:
        """Counters and payload of a message of exactly this layout, else None."""
        if len(message) != len(self._buffer):
            return None
        for start, expected in self._common:
            if not message.startswith(expected, start):
                return None
        counters = [int.from_bytes(message[at : at + 8], "little") for at in self._counters_at]
        return counters, memoryview(message)[self._payload_at :]


class ObservationCodec:
    """Packs and unpacks WorkerMessage.observation for one session. Used by one thread."""

    def __init__(self, spec: EnvSpec, num_envs: int) -> None:
        """Prepare the frame for sessions of `num_envs` environments of this spec.

        Raises:
            SpecError: if it would be too large.
        """
        check_size(spec, num_envs)
        self._spec, self._layout = spec, timestep_layout(spec, num_envs)
        self._frame = Frame(pb.WorkerMessage.OBSERVATION_FIELD_NUMBER, 1, self._layout)
        self._out = timestep_from_views(spec, self._frame.payload)

    def pack(self, sequence: int, timestep: TimeStep) -> bytes:
        """The message that carries a time step.

        Raises:
            WireError: if an array does not have the shape or type of the spec, naming it.
        """
        out = self._out
        _copy(out.step_type, timestep.step_type, "step_type")
        _copy(out.reward, timestep.reward, "reward")
        _copy(out.discount, timestep.discount, "discount")
        for name, view in out.observation.items():
            _copy(view, timestep.observation.get(name), f"observation '{name}'")
        for name, view in out.metrics.items():
            _copy(view, timestep.metrics.get(name), f"metric '{name}'")
        return self._frame.tobytes(sequence)

    def unpack(self, message: bytes) -> tuple[int, TimeStep]:
        """Sequence number and time step of a message; arrays are read-only views of it.

        Raises:
            WireError: if the message is no Observation or has the wrong number of bytes.
        """
        matched = self._frame.match(message)
        if matched is not None:
            (sequence,), payload = matched
        else:
            observation = _parse(pb.WorkerMessage, message, "observation", self._frame.max_bytes)
            sequence, payload = observation.sequence, memoryview(observation.arrays)
        return sequence, timestep_from_views(self._spec, self._layout.views(payload))


class ActionCodec:
    """Packs and unpacks LearnerMessage.action for one session. Used by one thread."""

    def __init__(self, spec: EnvSpec, num_envs: int) -> None:
        """Prepare the frame for sessions of `num_envs` environments of this spec."""
        self._layout = action_array_layout(spec, num_envs)
        self._frame = Frame(pb.LearnerMessage.ACTION_FIELD_NUMBER, 2, self._layout)

    def pack(self, sequence: int, policy_version: int, action: Array) -> bytes:
        """The message that carries actions, int32 [N, A] or float32 [N, A, U]."""
        _copy(self._frame.payload[_ACTION], action, "action")
        return self._frame.tobytes(sequence, policy_version)

    def unpack(self, message: bytes) -> tuple[int, int, Array]:
        """Sequence number, policy version and actions (a read-only view) of a message.

        Raises:
            WireError: if the message is no Action or has the wrong number of bytes.
        """
        matched = self._frame.match(message)
        if matched is not None:
            (sequence, version), payload = matched
        else:
            action = _parse(pb.LearnerMessage, message, "action", self._frame.max_bytes)
            sequence, version = action.sequence, action.policy_version
            payload = memoryview(action.arrays)
        return sequence, version, self._layout.views(payload)[_ACTION]


def _copy(view: NDArray[np.generic], value: Array | None, name: str) -> None:
    """Copy an array into its place in the frame."""
    if value is None:
        raise WireError(f"{name} is missing: the spec declares it, the environment left it out")
    if value.shape != view.shape:
        raise WireError(f"{name} has shape {value.shape}, the spec says {view.shape}")
    if value.dtype != view.dtype:
        raise WireError(f"{name} has dtype {value.dtype}, the spec says {view.dtype}")
    view[...] = value


def _parse(kind: type[Message], message: bytes, field: str, max_bytes: int) -> Any:  # noqa: ANN401
    """The wanted member of a message's oneof, by protobuf's general parser, which copies it."""
    if len(message) > max_bytes:
        raise WireError(
            f"a message of {len(message)} bytes came; by the spec '{field}' has at most {max_bytes}"
        )
    try:
        parsed = kind.FromString(message)
    except DecodeError as error:
        raise WireError(f"message is no {kind.__name__}: {error}") from None
    got = parsed.WhichOneof("message")
    if got != field:
        raise WireError(f"expected message '{field}', got '{got}'")
    return getattr(parsed, field)

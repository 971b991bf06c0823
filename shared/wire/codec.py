"""Arrays <-> bytes by spec, and messages <-> bytes without a second copy.

The wire is plain protobuf (proto/rollout.proto): any language can speak it. But protobuf's own
Python code copies a `bytes` field twice on its way out and once on its way in, about 2 ms a
megabyte. All messages after the handshake have the same length, so this module prepares their
protobuf framing once, joins it with the arrays in one copy, and reads arrays back as views.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from struct import Struct
from typing import Any

import numpy as np
from google.protobuf.message import Message
from numpy.typing import NDArray

from shared.process.errors import SpecError, WireError
from shared.rpc import rollout_pb2 as pb
from shared.wire.channel import ENCODING_BYTES, MAX_OBSERVATION_BYTES, PART_BYTES
from shared.wire.framing import parse, varint
from shared.wire.parts import Assembly, part_frames, split
from shared.wire.spec import Discrete, EnvSpec, action_layout
from shared.wire.timestep import Array, TimeStep


@dataclass(frozen=True)
class Layout:
    """Layout of a message's arrays in its payload: back to back, in order.

    Attributes:
        fields: (name, dtype, shape) of every array, leading dimensions included.
    """

    fields: tuple[tuple[str, np.dtype[np.generic], tuple[int, ...]], ...]

    @cached_property
    def num_bytes(self) -> int:
        """Return the length of the payload, bytes."""
        return sum(d.itemsize * math.prod(s) for _, d, s in self.fields)

    def views(self, payload: memoryview | bytes | bytearray) -> dict[str, Array]:
        """Return the arrays of a payload, by name, without a copy.

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
            for name, dtype, shape, offset in self.places
        }

    @cached_property
    def places(self) -> list[tuple[str, np.dtype[np.generic], tuple[int, ...], int]]:
        """Return the fields, each with its byte offset in the payload."""
        sizes = [d.itemsize * math.prod(s) for _, d, s in self.fields]
        starts = accumulate(sizes, initial=0)
        return [(*field, start) for field, start in zip(self.fields, starts, strict=False)]


# Names of the wire's own arrays; no observation or metric can collide with them, because those
# carry a prefix.
_STEP_TYPE, _REWARD, _DISCOUNT, _ACTION = "step_type", "reward", "discount", "action"
_OBSERVATION, _METRIC = "observation/", "metric/"


def timestep_layout(spec: EnvSpec, num_envs: int) -> Layout:
    """Return the layout of an Observation: reward, discount, observations, metrics, step_type."""
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
    """Return the layout of an Action: one array, int32 [N, A] or float32 [N, A, U]."""
    dtype, shape = action_layout(spec.action)
    return Layout(((_ACTION, dtype.newbyteorder("<"), (num_envs, spec.num_agents, *shape)),))


def check_size(spec: EnvSpec, num_envs: int) -> None:
    """Refuse a session with messages that are too large. Allocates no memory.

    Raises:
        SpecError: if a message is too large, naming its bytes and the limit.
    """
    limit = MAX_OBSERVATION_BYTES - ENCODING_BYTES
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


def message_bytes(spec: EnvSpec, num_envs: int) -> int:
    """Return the bytes of one observation and one action of a session, together."""
    layouts = timestep_layout(spec, num_envs), action_array_layout(spec, num_envs)
    return sum(layout.num_bytes for layout in layouts)


class Frame:
    """The protobuf framing of one kind of message: numbers, then the arrays of a layout.

    The numbers are fixed64 fields 1..n, the arrays together one `bytes` field. Written messages
    equal, byte for byte, the output of protobuf's own code. Used by one thread.

    Attributes:
        layout: layout of the arrays.
        max_bytes: upper bound on the bytes of any encoding of such a message.
    """

    def __init__(
        self, kind: type[Message], field: str, numbers: Sequence[str], layout: Layout
    ) -> None:
        """Lay out the frame. Allocates no memory of the arrays' size.

        Args:
            kind: message on the stream, with a oneof.
            field: name of this message in the oneof.
            numbers: names of the fixed64 fields (sequence, policy_version).
            layout: layout of the arrays.
        """
        self._kind = kind
        self._field = field
        self._numbers = numbers
        self.layout = layout
        arrays = bytes([(len(numbers) + 1) << 3 | 2]) + varint(layout.num_bytes)
        inner = 9 * len(numbers) + len(arrays) + layout.num_bytes
        outer = bytes([kind.DESCRIPTOR.fields_by_name[field].number << 3 | 2]) + varint(inner)
        tags = [bytes([i << 3 | 1]) for i in range(1, len(numbers) + 1)]
        # What all messages of this layout have in common: the bytes before each number and before
        # the arrays. Protobuf's writers omit a number of zero; such messages are parsed.
        self._common = (outer + tags[0], *tags[1:], arrays)
        self._head = Struct("<" + "Q".join(f"{len(part)}s" for part in self._common))
        self._values: list[bytes | int] = [0] * (2 * len(numbers) + 1)
        self._values[::2] = self._common
        self._length = self._head.size + layout.num_bytes
        self.max_bytes = self._length + ENCODING_BYTES

    def pack(self, numbers: Sequence[int], arrays: Sequence[Array | None]) -> bytes:
        """Encode numbers and arrays as a message.

        Raises:
            WireError: if an array is missing, or has another shape or dtype than the spec says.
        """
        for (name, dtype, shape), array in zip(self.layout.fields, arrays, strict=True):
            if array is None or array.shape != shape or array.dtype != dtype:
                raise _wrong_array(name, dtype, shape, array)
        self._values[1::2] = numbers
        head = self._head.pack(*self._values)
        try:
            return b"".join((head, *arrays))  # type: ignore[arg-type]
        except TypeError:  # an array that is not contiguous, such as one with agents reordered
            return b"".join((head, *map(np.ascontiguousarray, arrays)))  # type: ignore[arg-type]

    def unpack(self, message: bytes) -> tuple[Sequence[int], list[Array]]:
        """Decode numbers and arrays, which are read-only views, of a message.

        Raises:
            WireError: if the message is another one, or has the wrong number of bytes.
        """
        if len(message) == self._length:
            values = self._head.unpack_from(message)
            if values[::2] == self._common:
                return values[1::2], [
                    np.ndarray(shape, dtype, message, at) for dtype, shape, at in self._places
                ]
        parsed = parse(self._kind, message, self._field, self.max_bytes)
        if getattr(parsed, "part", 0):
            raise WireError(
                f"part {parsed.part} of an observation came, by the spec one message holds all of "
                f"its {self.layout.num_bytes} bytes"
            )
        numbers = [getattr(parsed, name) for name in self._numbers]
        return numbers, list(self.layout.views(parsed.arrays).values())

    @cached_property
    def _places(self) -> list[tuple[np.dtype[np.generic], tuple[int, ...], int]]:
        """Return dtype, shape and first byte in the message of each array."""
        return [(d, shape, self._head.size + at) for _, d, shape, at in self.layout.places]


def _wrong_array(
    name: str, dtype: np.dtype[np.generic], shape: tuple[int, ...], array: Array | None
) -> WireError:
    """Make the error for an array that is not as the spec says."""
    kind, _, own = name.rpartition("/")
    name = f"{kind} '{own}'" if kind else own
    if array is None:
        return WireError(f"{name} is missing: the spec declares it, the environment left it out")
    if array.shape != shape:
        return WireError(f"{name} has shape {array.shape}, the spec says {shape}")
    return WireError(f"{name} has dtype {array.dtype}, the spec says {dtype}")


class ObservationCodec:
    """Codec of one session's observations. Used by one thread.

    An observation of up to PART_BYTES is one message; a larger one is several, the parts of
    shared.wire.parts.

    Attributes:
        num_parts: number of messages of one observation.
    """

    def __init__(self, spec: EnvSpec, num_envs: int) -> None:
        """Prepare for sessions of `num_envs` environments of this spec. Allocates no memory.

        Raises:
            SpecError: if an observation would be too large.
        """
        check_size(spec, num_envs)
        layout = timestep_layout(spec, num_envs)
        self._frame = Frame(pb.WorkerMessage, "observation", ("sequence",), layout)
        self._observations = tuple(o.name for o in spec.observations)
        self._metrics = spec.metrics
        many = layout.num_bytes > PART_BYTES
        self._part_frames = part_frames(layout.num_bytes) if many else []
        self.num_parts = max(1, len(self._part_frames))

    def messages(self, sequence: int, timestep: TimeStep) -> list[bytes]:
        """Encode a time step as messages, in order.

        Raises:
            WireError: if an array does not have the shape or type of the spec, naming it.
        """
        arrays = [
            timestep.reward,
            timestep.discount,
            *map(timestep.observation.get, self._observations),
            *map(timestep.metrics.get, self._metrics),
            timestep.step_type,
        ]
        if not self._part_frames:
            return [self._frame.pack((sequence,), arrays)]
        return list(split(self._part_frames, sequence, self._filled(arrays)))

    def receive(self, message: bytes) -> tuple[int, TimeStep] | None:
        """Decode the next message of a stream; None if the observation has further parts.

        Returns:
            sequence number and time step. Its arrays are read-only views of the message, or of a
            buffer that the next observation overwrites.

        Raises:
            WireError: if the message is no Observation, has the wrong number of bytes, or is not
                the part that comes next.
        """
        if not self._part_frames:
            (sequence,), arrays = self._frame.unpack(message)
        else:
            whole = self._assembly.add(message)
            if whole is None:
                return None
            sequence, payload = whole
            arrays = list(self._frame.layout.views(payload).values())
        # In the order of the layout.
        reward, discount, *rest, step_type = arrays
        metrics = rest[len(self._observations) :]
        return sequence, TimeStep(
            step_type,  # type: ignore[arg-type]
            reward,  # type: ignore[arg-type]
            discount,  # type: ignore[arg-type]
            dict(zip(self._observations, rest, strict=False)),
            dict(zip(self._metrics, metrics, strict=True)),  # type: ignore[arg-type]
        )

    def _filled(self, arrays: Sequence[Array | None]) -> memoryview:
        """Return the payload of an observation of several parts, in a buffer that is kept.

        Fresh memory of this size takes longer than the copy: the system clears it page by page.
        """
        payload, views = self._buffer
        for (name, dtype, shape), view, array in zip(
            self._frame.layout.fields, views, arrays, strict=True
        ):
            if array is None or array.shape != shape or array.dtype != dtype:
                raise _wrong_array(name, dtype, shape, array)
            view[...] = array
        return payload

    @cached_property
    def _buffer(self) -> tuple[memoryview, list[Array]]:
        """Return memory for the payload of an observation, and the views of its arrays."""
        # From bytes, which are freed at once: malloc then keeps memory of this size, that of the
        # messages too, where it would give it back to the system after each.
        payload = memoryview(bytearray(bytes(self._frame.layout.num_bytes)))
        return payload, list(self._frame.layout.views(payload).values())

    @cached_property
    def _assembly(self) -> Assembly:
        """Return the buffer in which `receive` joins parts."""
        return Assembly(self._part_frames, self._frame.layout.num_bytes)


class ActionCodec:
    """Codec of LearnerMessage.action for one session. Used by one thread."""

    def __init__(self, spec: EnvSpec, num_envs: int) -> None:
        """Prepare the frame for sessions of `num_envs` environments of this spec."""
        layout = action_array_layout(spec, num_envs)
        self._frame = Frame(pb.LearnerMessage, "action", ("sequence", "policy_version"), layout)
        self._spec = spec.action
        if not isinstance(spec.action, Discrete):
            self._low, self._high = np.float32(spec.action.low), np.float32(spec.action.high)

    def pack(self, sequence: int, policy_version: int, action: Array) -> bytes:
        """Encode actions, int32 [N, A] or float32 [N, A, U], as a message."""
        return self._frame.pack((sequence, policy_version), (action,))

    def unpack(self, message: bytes) -> tuple[int, int, Array]:
        """Decode sequence number, policy version and actions (a read-only view) of a message.

        Raises:
            WireError: if the message is no Action, has the wrong number of bytes, or holds actions
                outside the spec, on which an environment might fail.
        """
        (sequence, version), (action,) = self._frame.unpack(message)
        if isinstance(self._spec, Discrete):
            # One pass: as an unsigned number a negative one is larger than all others.
            largest = np.maximum.reduce(action.view(np.uint32), axis=None)  # .max() takes 3 us more
            accepted = largest < self._spec.num_actions
        else:
            least, most = (f.reduce(action, axis=None) for f in (np.minimum, np.maximum))
            accepted = self._low <= least and most <= self._high  # false if one is NaN
        if not accepted:
            raise self._out_of_range(action)
        return sequence, version, action

    def _out_of_range(self, action: NDArray[Any]) -> WireError:
        """Make the error for actions outside the spec, naming the first."""
        if isinstance(self._spec, Discrete):
            accepted = f"0 to {self._spec.num_actions - 1}"
            wrong = (action < 0) | (action >= self._spec.num_actions)
        else:
            accepted = f"{self._low:g} to {self._high:g}"
            wrong = ~((action >= self._low) & (action <= self._high))
        at = tuple(np.argwhere(wrong)[0].tolist())
        return WireError(
            f"the learner sent action {action[at]} for agent {at[1]} of environment {at[0]} of the "
            f"session; the environment accepts {accepted}"
        )

"""Arrays <-> bytes by spec, messages <-> bytes without a second copy, and checks of time steps.

The wire is plain protobuf (proto/rollout.proto): any language can speak it. But protobuf's own
Python code copies a `bytes` field twice on its way out and once on its way in, about 2 ms a
megabyte. All messages after the handshake have the same length, so this module prepares their
protobuf framing once, joins it with the arrays in one copy, and reads arrays back as views.

An observation too large for one message is cut into parts. Part k holds bytes k * PART_BYTES to
(k + 1) * PART_BYTES of its arrays, the last part the rest. gRPC never has more than one part of a
stream in memory. The receiver knows the number of parts from the spec, so the sender does not
announce it.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, repeat
from struct import Struct
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError, Message
from numpy.typing import NDArray

from murmur.shared.config.episode_options import Value
from murmur.shared.process.errors import SpecError, WireError
from murmur.shared.rpc import ENCODING_BYTES, MAX_OBSERVATION_BYTES, PART_BYTES
from murmur.shared.rpc import rollout_pb2 as pb
from murmur.shared.wire.episode_options import (
    OPTIONS_BYTES,
    options_from_proto,
    options_to_proto,
)
from murmur.shared.wire.spec import (
    ACTION_MASK,
    ADJACENCY,
    AGENT_CELL,
    AGENT_MASK,
    EXPERT_ACTION,
    TURN_MASK,
    ActionSpec,
    Composite,
    Continuous,
    Discrete,
    EnvSpec,
    action_bounds,
    action_factors,
    action_layout,
    factor_starts,
)
from murmur.shared.wire.timestep import Array, StepType, TimeStep, named_arrays

# Names of the wire's own arrays; no observation or metric can collide with them, because those
# carry a prefix.
_STEP_TYPE, _REWARD, _DISCOUNT, _ACTION = "step_type", "reward", "discount", "action"
_OBSERVATION, _METRIC = "observation/", "metric/"
_PART = b"\x1d"  # tag of Observation's and Samples' field
_HALF = 2  # bytes; BLAS has no half precision
# NumPy compares faster with ints.
_FIRST, _MID = int(StepType.FIRST), int(StepType.MID)
_LAST, _ABORTED = int(StepType.LAST), int(StepType.ABORTED)
_LARGEST = float(np.finfo(np.float32).max)
# Beyond it sums within a network overflow float32, and actions of NaN would mean nothing.
MAX_ABS_OBSERVATION = 1e18
_MAX_SQUARE = MAX_ABS_OBSERVATION**2  # of a float32 sum of squares, which bounds each number


def varint(value: int) -> bytes:
    """Encode a number as protobuf's base-128 varint."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def parse(kind: type[Message], message: bytes, field: str, max_bytes: int) -> Any:  # noqa: ANN401
    """Return the wanted member of a message's oneof, by protobuf's general parser (a copy).

    Raises:
        WireError: if the message is too long, invalid, or holds another member.
    """
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


class Frame:
    """The protobuf framing of one kind of message: numbers, then arrays, then a part's number.

    The numbers are fixed64 fields 1..n, the arrays together one `bytes` field. Written messages
    equal, byte for byte, the output of protobuf's own code. Used by one thread.

    Attributes:
        size: bytes of the arrays.
    """

    def __init__(
        self, kind: type[Message], field: str, numbers: int, size: int, part: int = 0
    ) -> None:
        """Lay out the frame. Allocates no memory of the arrays' size.

        Args:
            kind: message on the stream, with a oneof.
            field: name of this message in the oneof.
            numbers: number of its fixed64 fields (sequence, policy_version).
            size: bytes of the arrays.
            part: number of the part, from 0; 0 also for arrays in one message.
        """
        self._kind, self._field = kind, field
        self.size = size
        self._tail = _PART + part.to_bytes(4, "little") if part else b""  # protobuf omits zeros
        arrays = bytes([(numbers + 1) << 3 | 2]) + varint(size)
        inner = 9 * numbers + len(arrays) + size + len(self._tail)
        outer = bytes([kind.DESCRIPTOR.fields_by_name[field].number << 3 | 2]) + varint(inner)
        tags = [bytes([i << 3 | 1]) for i in range(1, numbers + 1)]
        # What all messages of this frame have in common: the bytes before each number and before
        # the arrays. Protobuf's writers omit a number of zero; such messages are parsed.
        self._common = (outer + tags[0], *tags[1:], arrays)
        self._head = Struct("<" + "Q".join(f"{len(text)}s" for text in self._common))
        self._values: list[bytes | int] = [0] * (2 * numbers + 1)
        self._values[::2] = self._common
        self._place = slice(self._head.size, self._head.size + size)
        self._length = self._head.size + size + len(self._tail)

    def pack(self, numbers: Sequence[int], arrays: Sequence[Any]) -> bytes:
        """Encode numbers and arrays, which together have `size` bytes, as a message."""
        self._values[1::2] = numbers
        head = self._head.pack(*self._values)
        try:
            return b"".join((head, *arrays, self._tail))
        except TypeError:  # an array that is not contiguous, such as one with agents reordered
            return b"".join((head, *map(np.ascontiguousarray, arrays), self._tail))  # type: ignore[arg-type]

    def match(self, message: bytes) -> tuple[Sequence[int], memoryview] | None:
        """Return numbers and arrays of a message of exactly this framing.

        None for any other message, which `parse` decodes if its encoding is valid.
        """
        if len(message) == self._length:
            values = self._head.unpack_from(message)
            if values[::2] == self._common and (not self._tail or message.endswith(self._tail)):
                return values[1::2], memoryview(message)[self._place]
        return None

    def parse(self, message: bytes, further: int = 0) -> Any:  # noqa: ANN401 - of protobuf
        """Parse a message in any valid encoding, by protobuf's general parser.

        Args:
            message: bytes of the message.
            further: largest size of its fields that are not in the frame, bytes.

        Raises:
            WireError: if it is another message, or too long.
        """
        limit = self._length + ENCODING_BYTES + further
        return parse(self._kind, message, self._field, limit)


def part_frames(num_bytes: int, field: str = "observation") -> list[Frame]:
    """Return the frames of an observation, or of samples, with arrays of `num_bytes` bytes."""
    return [
        Frame(pb.WorkerMessage, field, 1, min(PART_BYTES, num_bytes - start), part)
        for part, start in enumerate(range(0, max(num_bytes, 1), PART_BYTES))
    ]


def split(frames: list[Frame], sequence: int, payload: memoryview) -> Iterator[bytes]:
    """Yield the messages of one observation, in order."""
    at = 0
    for frame in frames:
        yield frame.pack((sequence,), (payload[at : at + frame.size],))
        at += frame.size


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

    @property
    def labels(self) -> list[str]:
        """Return the names of the arrays in messages, as in "observation 'maps'"."""
        parts = (name.partition("/") for name, _, _ in self.fields)
        return [f"{kind} '{own}'" if slash else kind for kind, slash, own in parts]

    def errors(self, arrays: Mapping[str, object]) -> Iterator[str]:
        """Yield what is wrong with arrays, by label, that do not fit."""
        for label, (_, dtype, shape) in zip(self.labels, self.fields, strict=True):
            array = arrays.get(label)
            if array is None:
                yield f"{label} is in the spec but missing"
            elif not isinstance(array, np.ndarray):
                yield f"{label} is a {type(array).__name__}, not a NumPy array"
            else:
                if array.dtype != dtype:
                    yield f"{label} has dtype {array.dtype}, not {dtype}"
                if array.shape != shape:
                    yield f"{label} has shape {array.shape}, not {shape}"

    def views(self, payload: memoryview | bytes | bytearray) -> list[Array]:
        """Return the arrays of a payload in the order of the fields, without a copy.

        Raises:
            WireError: if the payload has the wrong number of bytes, naming the arrays expected.
        """
        if len(payload) != self.num_bytes:
            raise WireError(
                f"arrays hold {len(payload)} bytes, the spec says {self.num_bytes}: "
                + ", ".join(f"{n} {d.name}{list(s)}" for n, d, s in self.fields)
            )
        shapes, dtypes, starts = self._places
        return list(map(np.ndarray, shapes, dtypes, repeat(payload), starts))  # type: ignore[arg-type]

    @cached_property
    def _places(self) -> tuple[list[tuple[int, ...]], list[np.dtype[np.generic]], list[int]]:
        """Return the shapes, dtypes and byte offsets in the payload of all arrays."""
        sizes = [d.itemsize * math.prod(s) for _, d, s in self.fields]
        starts = list(accumulate(sizes[:-1], initial=0))
        return [s for _, _, s in self.fields], [d for _, d, _ in self.fields], starts


@dataclass(frozen=True)
class TimeStepLayout(Layout):
    """Layout of an Observation.

    Attributes:
        observations: names of the observations.
        metrics: names of the metrics.
    """

    observations: tuple[str, ...]
    metrics: tuple[str, ...]

    def fitting(self, timestep: TimeStep) -> list[Array] | None:
        """Return a time step's arrays in the order of the fields; None if `errors` finds any."""
        arrays = [
            timestep.reward,
            timestep.discount,
            *map(timestep.observation.get, self.observations),
            *map(timestep.metrics.get, self.metrics),
            timestep.step_type,
        ]
        kind = np.ndarray  # looked up once: this is done for each message
        for (_, dtype, shape), array in zip(self.fields, arrays, strict=True):
            if not isinstance(array, kind) or array.shape != shape or array.dtype != dtype:
                return None
        return arrays  # type: ignore[return-value]

    def timestep(self, arrays: Iterable[Array]) -> TimeStep:
        """Return the time step of arrays in the order of the fields."""
        rest: Iterator[Any] = iter(arrays)
        reward, discount = next(rest), next(rest)
        observation = dict(zip(self.observations, rest, strict=False))
        metrics = dict(zip(self.metrics, rest, strict=False))
        return TimeStep(next(rest), reward, discount, observation, metrics)


def timestep_layout(spec: EnvSpec, num_envs: int) -> TimeStepLayout:
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
    return TimeStepLayout(tuple(fields), tuple(o.name for o in spec.observations), spec.metrics)


def action_array_layout(spec: EnvSpec, num_envs: int) -> Layout:
    """Return the layout of an Action: one array [N, A] or [N, A, ...], see ActionSpec."""
    dtype, shape = action_layout(spec.action)
    return Layout(((_ACTION, dtype.newbyteorder("<"), (num_envs, spec.num_agents, *shape)),))


def past_actions(spec: EnvSpec, actions: bytes) -> Array:
    """Decode a SlotStart's bytes to actions of one environment, [t, A] or [t, A, ...].

    Raises:
        WireError: if the last step's actions are not whole.
    """
    layout = action_array_layout(spec, 1)
    ((_, dtype, shape),) = layout.fields
    if len(actions) % layout.num_bytes:
        raise WireError(
            f"Welcome replays {len(actions)} bytes of actions, no multiple of "
            f"{layout.num_bytes} bytes a step"
        )
    return np.frombuffer(actions, dtype).reshape(-1, *shape[1:])


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


class ObservationCodec:
    """Codec of one session's observations. Used by one thread.

    An observation of up to PART_BYTES is one message; a larger one is several, its parts.

    Attributes:
        num_parts: number of messages of one observation.
    """

    def __init__(self, spec: EnvSpec, num_envs: int) -> None:
        """Prepare for sessions of `num_envs` environments of this spec. Allocates no memory.

        Raises:
            SpecError: if an observation would be too large.
        """
        check_size(spec, num_envs)
        self._layout = timestep_layout(spec, num_envs)
        self._frames = part_frames(self._layout.num_bytes)
        self.num_parts = len(self._frames)
        # Of the observation that arrives in parts: the next part, bytes so far, and its number.
        self._part = self._filled = 0
        self._sequence = 0

    def messages(self, sequence: int, timestep: TimeStep) -> list[bytes]:
        """Encode a time step as messages, in order.

        Raises:
            WireError: if an array does not have the shape or type of the spec, naming it.
        """
        arrays = self._layout.fitting(timestep)
        if arrays is None:
            raise WireError(next(self._layout.errors(named_arrays(timestep))))
        if self.num_parts == 1:
            return [self._frames[0].pack((sequence,), arrays)]
        # Fresh memory of this size takes longer than the copy: the system clears it page by page.
        payload, views = self._buffer
        for view, array in zip(views, arrays, strict=True):
            view[...] = array
        return list(split(self._frames, sequence, payload))

    def receive(self, message: bytes) -> tuple[int, TimeStep] | None:
        """Decode the next message of a stream; None if the observation has further parts.

        Returns:
            sequence number and time step. Its arrays are read-only views of the message, or of a
            buffer that the next observation overwrites.

        Raises:
            WireError: if the message is no Observation, has the wrong number of bytes, or is not
                the part that comes next.
        """
        frame = self._frames[self._part]
        (sequence,), payload = frame.match(message) or self._parse(message, frame)
        if self.num_parts > 1:
            if self._part and sequence != self._sequence:
                raise WireError(
                    f"part {self._part} of an observation has sequence number {sequence}, the "
                    f"parts before it {self._sequence}"
                )
            self._joined[self._filled : self._filled + frame.size] = payload
            self._sequence, self._part = sequence, self._part + 1
            self._filled += frame.size
            if self._part < self.num_parts:
                return None
            self._part = self._filled = 0
            payload = self._joined.toreadonly()
        return sequence, self._layout.timestep(self._layout.views(payload))

    def _parse(self, message: bytes, frame: Frame) -> tuple[Sequence[int], memoryview]:
        """Parse a part in any valid encoding, by protobuf's general parser."""
        observation = frame.parse(message)
        if observation.part != self._part:
            raise WireError(
                f"part {observation.part} of an observation came, expected part {self._part} of "
                f"{self.num_parts}"
            )
        if len(observation.arrays) != frame.size and self.num_parts > 1:
            raise WireError(
                f"part {self._part} of an observation holds {len(observation.arrays)} bytes, "
                f"expected {frame.size}: every part holds {PART_BYTES}, the last one the rest"
            )
        return (observation.sequence,), memoryview(observation.arrays)

    @cached_property
    def _buffer(self) -> tuple[memoryview, list[Array]]:
        """Return memory for the payload of an observation, which is kept, and its arrays' views."""
        # From bytes, which are freed at once: malloc then keeps memory of this size, that of the
        # messages too, where it would give it back to the system after each.
        payload = memoryview(bytearray(bytes(self._layout.num_bytes)))
        return payload, self._layout.views(payload)

    @cached_property
    def _joined(self) -> memoryview:
        """Return memory that `receive` joins parts in; the system provides it as they arrive."""
        return np.empty(self._layout.num_bytes, np.uint8).data


def finite_bounds(action: ActionSpec) -> tuple[Array, Array]:
    """Return the lowest and highest value of each part of an action; unbounded: any but infinity.

    Args:
        action: spec of the action.
    """
    low, high = np.clip(np.array(action_bounds(action), np.float32), -_LARGEST, _LARGEST)
    return low, high


def wrong_entries(
    spec: ActionSpec, action: NDArray[Any], low: Array, high: Array
) -> NDArray[np.bool_]:
    """Return where actions are outside the bounds, NaN or, as a choice, no whole number.

    Args:
        spec: spec of the action.
        action: actions [..., entries].
        low: lowest value of each entry, see `finite_bounds`.
        high: highest value of each entry.
    """
    wrong: NDArray[np.bool_] = ~((action >= low) & (action <= high))
    if action.dtype.kind == "f":
        choices = slice(0, len(action_factors(spec)))
        wrong[..., choices] |= action[..., choices] != np.rint(action[..., choices])
    return wrong


class ActionCodec:
    """Codec of LearnerMessage.action for one session. Used by one thread.

    Attributes:
        options: options of episodes that came with the last message unpacked; empty: none.
    """

    def __init__(
        self, spec: EnvSpec, num_envs: int, agents: NDArray[np.intp] | None = None
    ) -> None:
        """Prepare the frame for sessions of `num_envs` environments of this spec.

        Args:
            spec: spec of the session.
            num_envs: number of environments N.
            agents: [A] column of packed actions for each agent of the spec; None: both have one
                order.
        """
        self._layout = action_array_layout(spec, num_envs)
        ((_, self._dtype, self._shape),) = self._layout.fields
        self._frame = Frame(pb.LearnerMessage, "action", 2, self._layout.num_bytes)
        self._agents = agents
        self._spec = spec.action
        low, high = finite_bounds(spec.action)
        if isinstance(spec.action, Continuous):
            low, high = low[0], high[0]
        self._low, self._high = low, high
        self.options: dict[str, Value] = {}

    def pack(self, sequence: int, policy_version: int, action: Array) -> bytes:
        """Encode actions [N, A] or [N, A, ...], see ActionSpec, as a message."""
        if self._agents is not None:
            action = action[:, self._agents]
        if action.shape != self._shape or action.dtype != self._dtype:
            raise WireError(next(self._layout.errors({_ACTION: action})))
        return self._frame.pack((sequence, policy_version), (action,))

    def with_options(self, message: bytes, options: Mapping[str, Value]) -> bytes:
        """Return a packed message that also carries options of the episodes that begin next."""
        whole = pb.LearnerMessage.FromString(message)
        whole.action.options.extend(options_to_proto(options))
        return whole.SerializeToString()

    def unpack(self, message: bytes) -> tuple[int, int, Array]:
        """Decode sequence number, policy version and actions (a read-only view) of a message.

        Raises:
            WireError: if the message is no Action, has the wrong number of bytes, or holds actions
                outside the spec, on which an environment might fail.
        """
        found, self.options = self._frame.match(message), {}
        if found is None:
            parsed = self._frame.parse(message, OPTIONS_BYTES)
            self.options = options_from_proto(parsed.options)
            found = (parsed.sequence, parsed.policy_version), memoryview(parsed.arrays)
        (sequence, version), payload = found
        action: NDArray[Any]
        (action,) = self._layout.views(payload)
        if isinstance(self._spec, Discrete):
            # One pass: as an unsigned number a negative one is larger than all others.
            largest = np.maximum.reduce(action.view(np.uint32), axis=None)  # .max() takes 3 us more
            accepted = largest < self._spec.num_actions
        elif isinstance(self._spec, Composite):
            accepted = not wrong_entries(self._spec, action, self._low, self._high).any()
        else:
            least, most = (f.reduce(action, axis=None) for f in (np.minimum, np.maximum))
            accepted = self._low <= least and most <= self._high  # false if one is NaN
        if not accepted:
            raise self._out_of_range(action)
        return sequence, version, action

    def _out_of_range(self, action: NDArray[Any]) -> WireError:
        """Make the error for actions outside the spec, naming the first."""
        if isinstance(self._spec, Discrete):
            action = action[..., None]
        wrong = wrong_entries(self._spec, action, self._low, self._high)
        at = tuple(np.argwhere(wrong)[0].tolist())
        low, high = (np.broadcast_to(x, action.shape)[at] for x in (self._low, self._high))
        entry = f" at index {at[2]}" if isinstance(self._spec, Composite) else ""
        return WireError(
            f"the learner sent action {action[at]}{entry} for agent {at[1]} of environment {at[0]} "
            f"of the session; the environment accepts {low:g} to {high:g}"
        )


class RowCheck:
    """Check, in both services, of docs/wire.md's rules for the rows of a message.

    Keeps no state between messages.

    `passes` takes a few passes over usual rows and no allocation of their size. Only rows that it
    does not accept are checked number by number, by `broken`.
    """

    def __init__(
        self,
        spec: EnvSpec,
        num_envs: int,
        max_abs_reward: float = math.inf,
        *,
        received: bool = True,
    ) -> None:
        """Prepare for messages of one shape.

        Args:
            spec: spec of the rows.
            num_envs: number of environments N.
            max_abs_reward: largest reward allowed, absolute (learner.max_abs_reward).
            received: true if the rows came in a message: its arrays have the spec's dtypes and
                shapes, and ABORTED may stand in the place of any row; false for an environment's.
        """
        self._layout = None if received else timestep_layout(spec, num_envs)
        self._largest_kind = _ABORTED if received else _LAST
        self._max_abs_reward = max_abs_reward
        self._bound = min(max_abs_reward, _LARGEST)
        self._max_square = min(max_abs_reward * max_abs_reward, _LARGEST)
        self._ones = np.ones(num_envs, np.float32).tobytes()
        self._mids = bytes([_MID]) * num_envs
        self._flags = tuple(
            o.name for o in spec.observations if o.name in (ACTION_MASK, AGENT_MASK, TURN_MASK)
        )
        self._flags += (ADJACENCY,) * spec.gives_adjacency
        self._takes_turns = spec.takes_turns
        self._starts = factor_starts(action_factors(spec.action))  # of choices in an action mask
        self._agent = spec.agent_label
        self._agents = [spec.agent_label(agent) for agent in range(spec.num_agents)]
        self._per_agent = {o.name for o in spec.observations if o.per_agent}
        self._num_actions = 0  # of an expert's actions; 0: it says none
        if spec.observation(EXPERT_ACTION) and isinstance(spec.action, Discrete):
            self._num_actions = spec.action.num_actions
        # Observations that are flags or indices, with the lowest and highest number they may hold.
        self._ranges = [(name, 0, 1) for name in self._flags if name != ACTION_MASK]
        if self._num_actions:
            self._ranges.append((EXPERT_ACTION, -1, self._num_actions - 1))
        self._map_size: tuple[int, ...] = ()  # (rows, columns); empty: nothing to check
        if spec.own_images and spec.observation(AGENT_CELL):
            self._map_size = spec.own_images[0].shape[1:]

    def passes(self, t: TimeStep, restart: NDArray[np.bool_] | None = None) -> bool:
        """Return whether rows certainly keep all rules; if not, `broken` must decide.

        Args:
            t: N rows.
            restart: [N] bool, true where an episode must begin, with FIRST; None if that is not
                known.
        """
        if self._layout and self._layout.fitting(t) is None:
            return False
        # The sum of squares bounds each number, and is not finite if one of them is not.
        if not float(np.vdot(t.reward, t.reward)) <= self._max_square:
            return False
        if t.discount.tobytes() != self._ones and not _within(t.discount, 0, 1):
            return False
        kind = t.step_type
        if kind.tobytes() != self._mids or (restart is not None and np.count_nonzero(restart)):
            first = kind == _FIRST
            if np.count_nonzero(kind > self._largest_kind):
                return False
            if restart is not None and np.count_nonzero((first != restart) & (kind <= _LAST)):
                return False
            if np.count_nonzero(t.reward[first]):
                return False
            if np.count_nonzero(kind == _LAST):
                for metric in t.metrics.values():
                    if not math.isfinite(np.vdot(metric, metric)):
                        return False
        for array in t.observation.values():
            # A sum of squares bounds each number, in one pass by BLAS.
            quick = array.dtype.kind != "f" or (
                array.dtype.itemsize > _HALF and np.vdot(array, array) <= _MAX_SQUARE  # type: ignore[arg-type]
            )
            if not quick and not _possible(array):
                return False
        if ACTION_MASK in self._flags:
            legal: Array = t.observation[ACTION_MASK]  # of each choice: 1 where any action is
            if len(self._starts) == 1:
                legal = np.maximum.reduce(legal, axis=-1)
            else:
                legal = np.maximum.reduceat(legal, self._starts, axis=-1)
            if not _within(legal, 1, 1):
                return False
        for name, low, high in self._ranges:
            if not _within(t.observation[name], low, high):
                return False
        if self._takes_turns:
            num_turns = t.observation[TURN_MASK].sum(1)
            if np.count_nonzero(num_turns != (kind < _LAST)):
                return False
        return not self._map_size or bool(self._on_maps(t.observation[AGENT_CELL]).all())

    def broken(
        self, timestep: TimeStep, restart: NDArray[np.bool_] | None = None
    ) -> dict[int, str]:
        """Find the first rule that each environment breaks.

        Args:
            timestep: N rows of the dtypes and shapes of the spec.
            restart: [N] bool, true where an episode must begin; None if that is not known.

        Returns:
            number of the environment -> array, value and rule as the end of the sentence
            "environment 3 returned ..."; empty if all rules are kept.
        """
        found: dict[int, str] = {}
        with np.errstate(invalid="ignore"):
            disorder = self._disorder(timestep.step_type, restart)
            for env, what in chain(disorder, self._breaches(timestep)):
                found.setdefault(env, what)
        return found

    def _disorder(
        self, step_type: NDArray[np.uint8], restart: NDArray[np.bool_] | None
    ) -> Iterator[tuple[int, str]]:
        """Yield (environment, description) of step types that cannot come here."""
        largest = self._largest_kind
        for env in np.flatnonzero(step_type > largest).tolist():
            numbers = ", ".join(map(str, range(largest)))
            yield env, f"step_type {step_type[env]}, expected {numbers} or {largest}"
        if restart is None:
            return
        wrong = ((step_type == _FIRST) != restart) & (step_type <= _LAST)
        for env in np.flatnonzero(wrong).tolist():
            if largest == _ABORTED:
                begins = f"{'an' if restart[env] else 'no'} episode begins here"
                must = f"{begins}; FIRST must follow LAST and ABORTED, and nothing else"
            else:
                must = (
                    "a restart gives FIRST"
                    if restart[env]
                    else "without a restart comes MID or LAST"
                )
            yield env, f"step_type {StepType(step_type[env]).name}, but {must}"

    def _on_maps(self, cell: Array) -> NDArray[np.bool_]:
        """Return [N, A] bool, true if the agent's cell lies on its maps."""
        on: NDArray[np.bool_] = np.logical_and(cell >= 0, cell < self._map_size).all(-1)  # type: ignore[operator]
        return on

    def _breaches(self, t: TimeStep) -> Iterator[tuple[int, str]]:
        """Yield every breach as (environment, description), in the order of the arrays."""
        yield from _not_finite("reward", t.reward, self._agents)
        too_large = np.abs(t.reward) > self._bound
        for env, agent in np.argwhere(too_large).tolist():
            yield (
                env,
                f"a reward of {t.reward[env, agent]:g} for {self._agent(agent)}, beyond "
                f"±{self._max_abs_reward:g} (learner.max_abs_reward)",
            )
        on_first = (t.step_type == _FIRST)[:, None] & (t.reward != 0)
        for env, agent in np.argwhere(on_first).tolist():
            yield (
                env,
                f"a reward of {t.reward[env, agent]:g} for {self._agent(agent)} on FIRST, where no "
                "action has been taken yet",
            )
        for env in np.flatnonzero(~((t.discount >= 0) & (t.discount <= 1))).tolist():
            yield env, f"a discount of {t.discount[env]:g}, which must be within 0 and 1"
        for name, array in t.observation.items():
            label = f"observation '{name}'"
            agents = self._agents if name in self._per_agent else ()
            yield from _not_finite(label, array, agents)
            if array.dtype.kind == "f" and array.dtype.itemsize > _HALF:
                too_large = np.isfinite(array) & (np.abs(array) > MAX_ABS_OBSERVATION)
                for env, what in _named(label, array, too_large, agents):
                    yield env, f"{what}, beyond ±{MAX_ABS_OBSERVATION:g}"
        yield from self._choices(t)
        last = t.step_type == _LAST
        for name, values in t.metrics.items():
            for env in np.flatnonzero(last & ~np.isfinite(values)).tolist():
                yield env, f"{values[env]} in metric '{name}' on LAST"

    def _choices(self, t: TimeStep) -> Iterator[tuple[int, str]]:
        """Yield breaches in masks, expert actions and cells, which are used as indices."""
        for name in self._flags:
            flags = t.observation[name]
            for env, agent, *rest in np.argwhere(~np.isin(flags, (0, 1))).tolist():
                value = flags[(env, agent, *rest)]
                yield env, f"{value} in {name} of {self._agent(agent)}, where 0 or 1 must be"
        if self._takes_turns:
            turns, playing = t.observation[TURN_MASK] != 0, t.step_type < _LAST
            for env in np.flatnonzero(turns.sum(1) != playing).tolist():
                names = " and ".join(self._agent(a) for a in np.flatnonzero(turns[env])[:2])
                kind = StepType(t.step_type[env]).name
                acts = f"{'one' if playing[env] else 'no'} agent acts on {kind}"
                yield env, f"a {TURN_MASK} that gives {names or 'no agent'} the turn, where {acts}"
        if ACTION_MASK in self._flags:
            flags = np.maximum.reduceat(t.observation[ACTION_MASK], self._starts, axis=-1)
            for env, agent, factor in np.argwhere(flags == 0).tolist():
                of = f" in choice {factor}" if len(self._starts) > 1 else ""
                yield env, f"an {ACTION_MASK} that allows no action to {self._agent(agent)}{of}"
        if self._num_actions:
            advice: NDArray[np.int32] = t.observation[EXPERT_ACTION].astype(np.int32)
            for env, agent in np.argwhere((advice < -1) | (advice >= self._num_actions)).tolist():
                yield (
                    env,
                    f"{advice[env, agent]} as {EXPERT_ACTION} of {self._agent(agent)}, which has "
                    f"{self._num_actions} actions",
                )
        if self._map_size:
            cell = t.observation[AGENT_CELL]
            for env, agent in np.argwhere(~self._on_maps(cell)).tolist():
                yield (
                    env,
                    f"{cell[env, agent].tolist()} as {AGENT_CELL} of {self._agent(agent)}, "
                    f"outside the maps of {self._map_size}",
                )


def _within(array: Array, low: float, high: float) -> bool:
    """Return whether all numbers are within a range; False for NaN."""
    least, most = np.minimum.reduce(array, axis=None), np.maximum.reduce(array, axis=None)
    return bool(low <= least and most <= high)


def _possible(array: Array) -> bool:
    """Return whether no number is NaN, infinite or beyond ±MAX_ABS_OBSERVATION."""
    if array.dtype.itemsize <= _HALF:
        return bool(np.isfinite(array).all())
    return _within(array, -MAX_ABS_OBSERVATION, MAX_ABS_OBSERVATION)


def _not_finite(label: str, array: Array, agents: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Yield every NaN and infinity as (environment, description)."""
    if array.dtype.kind == "f":
        yield from _named(label, array, ~np.isfinite(array), agents)


def _named(
    label: str, array: Array, bad: NDArray[np.bool_], agents: Sequence[str]
) -> Iterator[tuple[int, str]]:
    """Yield (environment, description) of bad numbers; `agents` label axis A of [N, A, ...]."""
    for env, *index in np.argwhere(bad).tolist():
        value = array[(env, *index)]
        of = f" of {agents[index.pop(0)]}" if agents else ""
        yield env, f"{value:g} in {label}{of}" + (f" at index {index}" if index else "")

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
from numpy.typing import NDArray

from shared.channel import ENCODING_BYTES, MAX_OBSERVATION_BYTES, PART_BYTES
from shared.errors import SpecError, WireError
from shared.framing import Frame, parse
from shared.parts import Assembly, part_frames, split
from shared.rpc import rollout_pb2 as pb
from shared.spec import Discrete, EnvSpec, action_layout
from shared.timestep import Array, TimeStep


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
            for name, dtype, shape, offset in self._places
        }

    @cached_property
    def _places(self) -> list[tuple[str, np.dtype[np.generic], tuple[int, ...], int]]:
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


def timestep_from_views(spec: EnvSpec, views: Mapping[str, Array]) -> TimeStep:
    """Group the views of a payload into a TimeStep."""
    return TimeStep(
        step_type=views[_STEP_TYPE],  # type: ignore[arg-type]
        reward=views[_REWARD],  # type: ignore[arg-type]
        discount=views[_DISCOUNT],  # type: ignore[arg-type]
        observation={o.name: views[_OBSERVATION + o.name] for o in spec.observations},
        metrics={m: views[_METRIC + m] for m in spec.metrics},  # type: ignore[misc]
    )


def message_bytes(spec: EnvSpec, num_envs: int) -> int:
    """Return the bytes of one observation and one action of a session, together."""
    layouts = timestep_layout(spec, num_envs), action_array_layout(spec, num_envs)
    return sum(layout.num_bytes for layout in layouts)


class ObservationCodec:
    """Codec of one session's observations. Used by one thread.

    An observation of up to PART_BYTES is one message; a larger one is several, the parts of
    shared.parts. `messages` and `receive` handle both; `pack` and `unpack` only the first.

    Attributes:
        num_parts: number of messages of one observation.
    """

    def __init__(self, spec: EnvSpec, num_envs: int) -> None:
        """Prepare for sessions of `num_envs` environments of this spec. Allocates no memory.

        Raises:
            SpecError: if an observation would be too large.
        """
        check_size(spec, num_envs)
        self._spec, self._layout = spec, timestep_layout(spec, num_envs)
        num_bytes = self._layout.num_bytes
        self._frame = Frame(pb.WorkerMessage.OBSERVATION_FIELD_NUMBER, 1, num_bytes)
        self._part_frames = part_frames(num_bytes) if num_bytes > PART_BYTES else []
        self.num_parts = max(1, len(self._part_frames))

    def messages(self, sequence: int, timestep: TimeStep) -> list[bytes]:
        """Encode a time step as messages, in order.

        Raises:
            WireError: if an array does not have the shape or type of the spec, naming it.
        """
        if not self._part_frames:
            return [self.pack(sequence, timestep)]
        self._fill(timestep)
        return list(split(self._part_frames, sequence, self._frame.payload))

    def pack(self, sequence: int, timestep: TimeStep) -> bytes:
        """Encode a time step that needs no parts as one message.

        Raises:
            WireError: if an array does not have the shape or type of the spec, naming it.
        """
        assert not self._part_frames
        self._fill(timestep)
        return self._frame.tobytes(sequence)

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
            return self.unpack(message)
        whole = self._assembly.add(message)
        if whole is None:
            return None
        sequence, payload = whole
        return sequence, timestep_from_views(self._spec, self._layout.views(payload))

    def unpack(self, message: bytes) -> tuple[int, TimeStep]:
        """Decode sequence number and time step of a message that has no parts; see `receive`.

        Raises:
            WireError: if the message is no Observation or has the wrong number of bytes.
        """
        matched = self._frame.match(message)
        if matched is not None:
            (sequence,), payload = matched
        else:
            observation = parse(pb.WorkerMessage, message, "observation", self._frame.max_bytes)
            if observation.part:
                raise WireError(
                    f"part {observation.part} of an observation came, by the spec one message "
                    f"holds all of its {self._layout.num_bytes} bytes"
                )
            sequence, payload = observation.sequence, memoryview(observation.arrays)
        return sequence, timestep_from_views(self._spec, self._layout.views(payload))

    @cached_property
    def _out(self) -> TimeStep:
        """Return views of the frame, the destination of `_fill`."""
        return timestep_from_views(self._spec, self._layout.views(self._frame.payload))

    @cached_property
    def _assembly(self) -> Assembly:
        """Return the buffer in which `receive` joins parts."""
        return Assembly(self._part_frames, self._layout.num_bytes)

    def _fill(self, timestep: TimeStep) -> None:
        """Copy the arrays into the frame."""
        out = self._out
        _copy(out.step_type, timestep.step_type, "step_type")
        _copy(out.reward, timestep.reward, "reward")
        _copy(out.discount, timestep.discount, "discount")
        for name, view in out.observation.items():
            _copy(view, timestep.observation.get(name), f"observation '{name}'")
        for name, view in out.metrics.items():
            _copy(view, timestep.metrics.get(name), f"metric '{name}'")


class ActionCodec:
    """Codec of LearnerMessage.action for one session. Used by one thread."""

    def __init__(self, spec: EnvSpec, num_envs: int) -> None:
        """Prepare the frame for sessions of `num_envs` environments of this spec."""
        self._layout = action_array_layout(spec, num_envs)
        self._frame = Frame(pb.LearnerMessage.ACTION_FIELD_NUMBER, 2, self._layout.num_bytes)
        self._spec = spec.action

    @cached_property
    def _out(self) -> Array:
        """Return the view of the frame that `pack` writes actions to."""
        return self._layout.views(self._frame.payload)[_ACTION]

    def pack(self, sequence: int, policy_version: int, action: Array) -> bytes:
        """Encode actions, int32 [N, A] or float32 [N, A, U], as a message."""
        _copy(self._out, action, "action")
        return self._frame.tobytes(sequence, policy_version)

    def unpack(self, message: bytes) -> tuple[int, int, Array]:
        """Decode sequence number, policy version and actions (a read-only view) of a message.

        Raises:
            WireError: if the message is no Action or has the wrong number of bytes.
        """
        matched = self._frame.match(message)
        if matched is not None:
            (sequence, version), payload = matched
        else:
            action = parse(pb.LearnerMessage, message, "action", self._frame.max_bytes)
            sequence, version = action.sequence, action.policy_version
            payload = memoryview(action.arrays)
        return sequence, version, self._layout.views(payload)[_ACTION]

    def require_accepted(self, action: NDArray[Any]) -> None:
        """Refuse actions outside the spec, before an environment fails on them.

        Raises:
            WireError: for actions outside the spec, naming the first.
        """
        if isinstance(self._spec, Discrete):
            accepted = f"0 to {self._spec.num_actions - 1}"
            # One pass: as an unsigned number a negative one is larger than all others.
            largest = np.maximum.reduce(action.view(np.uint32), axis=None)  # .max() takes 3 us more
            if largest < self._spec.num_actions:
                return
            wrong = (action < 0) | (action >= self._spec.num_actions)
        else:
            low, high = np.float32(self._spec.low), np.float32(self._spec.high)
            accepted = f"{low:g} to {high:g}"
            least, most = (f.reduce(action, axis=None) for f in (np.minimum, np.maximum))
            if low <= least and most <= high:  # false if one is NaN
                return
            wrong = ~((action >= low) & (action <= high))
        at = tuple(np.argwhere(wrong)[0].tolist())
        raise WireError(
            f"the learner sent action {action[at]} for agent {at[1]} of environment {at[0]} of the "
            f"session; the environment accepts {accepted}"
        )


def _copy(view: NDArray[np.generic], value: Array | None, name: str) -> None:
    """Copy an array to its place in the frame.

    Raises:
        WireError: if the array is missing, or has another shape or dtype than the spec says.
    """
    if value is None:
        raise WireError(f"{name} is missing: the spec declares it, the environment left it out")
    if value.shape != view.shape:
        raise WireError(f"{name} has shape {value.shape}, the spec says {view.shape}")
    if value.dtype != view.dtype:
        raise WireError(f"{name} has dtype {value.dtype}, the spec says {view.dtype}")
    view[...] = value

"""Samples <-> bytes by spec: the messages of a SUPPLY session after its handshake."""

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from murmur.shared.process.errors import WireError
from murmur.shared.rpc import ENCODING_BYTES, MAX_MESSAGE_BYTES, PART_BYTES
from murmur.shared.rpc import rollout_pb2 as pb
from murmur.shared.wire.codec import Frame, Layout, parse, part_frames, split
from murmur.shared.wire.samples import SPLITS, SampleSpec
from murmur.shared.wire.timestep import Array

MAX_GRANT = 64  # samples of one grant
_MAX_DETAIL = 300  # characters
_SLUG = re.compile("[a-z][a-z0-9_]{0,31}")
_BROKEN_BYTES = 64 * 2048  # of a message that names broken samples, at most
_INDEX = np.dtype("<i4")


class Grant(NamedTuple):
    """The learner's request for samples of a session.

    Attributes:
        sequence: number of the grant on its stream, from 1; 0: it is not sent yet.
        epoch: epoch that the samples are for.
        split: index of the split in SPLITS.
        indices: indices of the samples in the split.
    """

    sequence: int
    epoch: int
    split: int
    indices: tuple[int, ...]


def broken_sample(index: int, reason: str, detail: str) -> pb.BrokenSample:
    """Return the message about a sample that cannot be read.

    Args:
        index: index of the sample in its split.
        reason: slug for the metric's label.
        detail: text that names the file; its first 300 characters are kept, printable.
    """
    line = "".join(c if c.isprintable() else "?" for c in detail[:_MAX_DETAIL])
    return pb.BrokenSample(index=index, reason=reason, detail=line)


def pack_grant(grant: Grant) -> bytes:
    """Encode a grant as a LearnerMessage."""
    message = pb.Grant(
        sequence=grant.sequence,
        epoch=grant.epoch,
        split=grant.split,
        indices=np.array(grant.indices, _INDEX).tobytes(),
    )
    return pb.LearnerMessage(grant=message).SerializeToString()


def unpack_grant(spec: SampleSpec, message: bytes) -> Grant:
    """Decode a grant from a LearnerMessage.

    Raises:
        WireError: if the message is no grant, or names samples that do not exist.
    """
    grant: pb.Grant = parse(pb.LearnerMessage, message, "grant", MAX_MESSAGE_BYTES)
    if grant.split >= len(SPLITS) or len(grant.indices) % _INDEX.itemsize:
        raise WireError(
            f"grant {grant.sequence} names split {grant.split} and {len(grant.indices)} bytes of "
            "indices; splits are 0 and 1, an index takes 4 bytes"
        )
    indices = np.frombuffer(grant.indices, _INDEX)
    size = spec.sizes[grant.split]
    if not 0 < len(indices) <= MAX_GRANT or indices.min() < 0 or indices.max() >= size:
        raise WireError(
            f"grant {grant.sequence} asks for samples {indices.tolist()[:MAX_GRANT]} of "
            f"{size}; need 1 to {MAX_GRANT} indices below {size}"
        )
    return Grant(grant.sequence, grant.epoch, grant.split, tuple(indices.tolist()))


class SampleCodec:
    """Codec of one session's samples. Used by one thread.

    The answer to a grant of n samples is one message, or the parts of murmur.shared.wire.codec.
    If some of the samples are broken, a message that names them comes first.
    """

    def __init__(self, spec: SampleSpec) -> None:
        """Prepare for samples of this spec. Allocates no memory."""
        self._spec = spec
        self._by_count: dict[int, tuple[Layout, list[Frame]]] = {}
        self._buffer = memoryview(bytearray())
        self._part = self._filled = 0
        self._broken: list[pb.BrokenSample] = []

    def messages(
        self,
        grant: Grant,
        samples: Sequence[dict[str, Array]],
        broken: Sequence[pb.BrokenSample],
    ) -> list[bytes]:
        """Encode the answer to a grant as messages, in order.

        Args:
            grant: grant to answer.
            samples: arrays of the samples that could be read, in the grant's order.
            broken: samples that could not be read.
        """
        messages = []
        if broken:
            answer = pb.Samples(sequence=grant.sequence, broken=broken)
            messages.append(pb.WorkerMessage(samples=answer).SerializeToString())
        if not samples:
            return messages
        layout, frames = self._of(len(samples))
        payload = self._room(layout.num_bytes)
        for array, view in zip(self._spec.arrays, layout.views(payload), strict=True):
            for row, sample in enumerate(samples):
                view[row] = sample[array.name]
        return messages + list(split(frames, grant.sequence, payload))

    def receive(
        self, message: bytes, grant: Grant
    ) -> tuple[dict[str, Array], list[pb.BrokenSample]] | None:
        """Decode the next message; None if the answer to the grant has further ones.

        Returns:
            arrays by name, [n, ...] of the n intact samples in the grant's order (read-only views,
            valid until the next call); and the broken samples.

        Raises:
            WireError: if this is not the message that comes next.
        """
        count = len(grant.indices) - len(self._broken)
        layout, frames = self._of(count)
        frame = frames[self._part]
        matched = frame.match(message) or self._parse(message, grant, frame)
        if matched is None:
            return self._finish([]) if len(self._broken) == len(grant.indices) else None
        (sequence,), data = matched
        if sequence != grant.sequence:
            raise WireError(f"samples of grant {sequence} came, expected {grant.sequence}")
        if len(frames) == 1:
            return self._finish(layout.views(data))
        payload = self._room(layout.num_bytes)
        payload[self._filled : self._filled + frame.size] = data
        self._part, self._filled = self._part + 1, self._filled + frame.size
        if self._part < len(frames):
            return None
        return self._finish(layout.views(payload.toreadonly()))

    def _parse(
        self, message: bytes, grant: Grant, frame: Frame
    ) -> tuple[Sequence[int], memoryview] | None:
        """Parse a message in any valid encoding; None if it names broken samples (kept)."""
        longest = max(frame.size + ENCODING_BYTES, _BROKEN_BYTES)
        samples = parse(pb.WorkerMessage, message, "samples", min(longest, PART_BYTES + 64))
        if samples.broken:
            self._note_broken(samples, grant)
            return None
        if samples.sequence != grant.sequence:
            raise WireError(f"samples of grant {samples.sequence} came, expected {grant.sequence}")
        if samples.part != self._part or len(samples.arrays) != frame.size:
            raise WireError(
                f"part {samples.part} with {len(samples.arrays)} bytes of samples came, expected "
                f"part {self._part} with {frame.size} bytes"
            )
        return (samples.sequence,), memoryview(samples.arrays)

    def _note_broken(self, samples: pb.Samples, grant: Grant) -> None:
        """Check and keep the broken samples that a message names.

        Raises:
            WireError: if they are not of the grant, or come instead of arrays.
        """
        indices = [b.index for b in samples.broken]
        unknown = set(indices) - set(grant.indices)
        if samples.sequence != grant.sequence or samples.arrays or self._broken or self._part:
            raise WireError(
                f"broken samples of grant {samples.sequence} come with arrays or after them; they "
                f"come first, in a message of their own (grant {grant.sequence} is due)"
            )
        if unknown or len(set(indices)) != len(indices):
            raise WireError(
                f"broken samples {indices} are named, grant {grant.sequence} asked for "
                f"{list(grant.indices)}, each once"
            )
        for b in samples.broken:
            if not _SLUG.fullmatch(b.reason):
                raise WireError(
                    f"sample {b.index} is broken for the reason {b.reason[:40]!r}; a reason has 1 "
                    "to 32 of a-z, 0-9 and _"
                )
        self._broken = [broken_sample(b.index, b.reason, b.detail) for b in samples.broken]

    def _finish(self, views: list[Array]) -> tuple[dict[str, Array], list[pb.BrokenSample]]:
        """Return the whole answer to a grant, and reset for the next one."""
        names = (array.name for array in self._spec.arrays)
        arrays = dict(zip(names, views, strict=False))  # none if all samples are broken
        broken, self._broken = self._broken, []
        self._part = self._filled = 0
        return arrays, broken

    def _of(self, count: int) -> tuple[Layout, list[Frame]]:
        """Return layout and framing of `count` samples."""
        known = self._by_count.get(count)
        if known is None:
            fields = tuple(
                (a.name, np.dtype(a.dtype).newbyteorder("<"), (count, *a.shape))
                for a in self._spec.arrays
            )
            layout = Layout(fields)
            known = self._by_count[count] = layout, part_frames(layout.num_bytes, "samples")
        return known

    def _room(self, num_bytes: int) -> memoryview:
        """Return `num_bytes` of the buffer, which grows to the largest answer."""
        if len(self._buffer) < num_bytes:
            self._buffer = memoryview(bytearray(num_bytes))
        return self._buffer[:num_bytes]

"""Files of checkpoints: written whole or not at all, verified, read without pickle.

Every .pt is a zip archive whose comment is the SHA-256 of the archive without it. torch.load alone
would take a file with a flipped bit.
"""

import contextlib
import hashlib
import io
import json
import os
import re
import secrets
import struct
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from murmur.learner_service.device.readback import to_host
from murmur.shared.process.errors import CheckpointError

FORMAT = 1
_CHUNK = re.compile(r"(?:rank\d+-)?replay-\d+-\d+\.pt", re.ASCII)
_MARK = b"sha256:"
_COMMENT = len(_MARK) + 64
WRITER = secrets.token_hex(4)  # in the names of files that this process is writing


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint.

    Raises:
        CheckpointError: if it is torn, foreign, of another format, or holds NaN or infinity in what
            acts and learns.
    """
    data = verified(path)
    _require_plain_archive(path, data)
    try:
        # weights_only: tensors and plain values, never code.
        state: Any = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        raise unreadable(path, str(error)) from None
    found = state.get("format") if isinstance(state, dict) else type(state).__name__
    if not isinstance(found, int) or found != FORMAT:
        shown = found if isinstance(found, int | str) else type(found).__name__
        raise CheckpointError(f"{path} has format {shown!r}, this murmur reads {FORMAT}")
    checkpoint: dict[str, Any] = state
    algorithm = checkpoint.get("algorithm")
    for name, value in _not_finite(algorithm.get("parts") if isinstance(algorithm, dict) else None):
        raise unreadable(path, f"{name} holds {value:g}, so that no action means anything")
    return checkpoint


def _not_finite(state: object, name: str = "") -> Iterator[tuple[str, float]]:
    """Names of tensors that hold NaN or infinity, each with its first such value."""
    if isinstance(state, dict):
        for key, value in state.items():
            yield from _not_finite(value, f"{name}.{key}" if name else str(key))
    elif isinstance(state, torch.Tensor) and state.is_floating_point():
        bad = ~state.isfinite()
        if bad.any():
            yield name, state[bad][0].item()


def verified(path: Path, *, signed: bool = False) -> bytes:
    """A file's bytes, if they are those that were written.

    Args:
        path: the file.
        signed: whether it must have a checksum; older murmurs wrote none.

    Raises:
        CheckpointError: if not.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise unreadable(path, error.strerror or str(error)) from None
    if data[-_COMMENT:].startswith(_MARK):
        archive = memoryview(data)[: -_COMMENT - 2]
        digest = hashlib.sha256(archive)
        digest.update(b"\0\0")  # the length of a comment that is not there
        if digest.hexdigest().encode() != data[-64:]:
            raise unreadable(path, "its checksum does not fit its contents")
    elif signed:
        raise unreadable(path, "it is not whole")
    return data


def write(state: dict[str, Any], path: Path) -> None:
    """Write beside, flush to disk, rename: a reader sees the old file or the new one.

    Raises:
        CheckpointError: if it cannot be written.
    """
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, **to_host(state)}, buffer)
    archive = buffer.getbuffer()
    comment = _MARK + hashlib.sha256(archive).hexdigest().encode()
    # A zip archive ends with the length of its comment and the comment.
    write_bytes([archive[:-2], struct.pack("<H", _COMMENT), comment], path)


def write_bytes(parts: Sequence[bytes | memoryview], path: Path) -> None:
    """The same with bytes."""
    temporary = path.with_suffix(f".{WRITER}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        reason = error.strerror or str(error)
        raise CheckpointError(
            f"cannot write checkpoint {path}: {reason}; free some space or set run.directory "
            "elsewhere; earlier checkpoints are untouched"
        ) from None


def chunk_files(checkpoint: Path) -> dict[str, str]:
    """Number -> file name of the replay's chunks that belong to a checkpoint.

    Raises:
        CheckpointError: if the file that tells them is damaged.
    """
    path = checkpoint.with_suffix(".json")
    try:
        return _checked_chunks(path, json.loads(path.read_bytes()))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise unreadable(path, str(error)) from None


def chunks_of(path: Path, state: dict[str, Any]) -> dict[str, str]:
    """The same, of a checkpoint that was read."""
    return _checked_chunks(path, state["chunks"]) if "chunks" in state else chunk_files(path)


def _checked_chunks(path: Path, chunks: object) -> dict[str, str]:
    """Chunks as they were read from a file, if they are what murmur writes."""
    if isinstance(chunks, dict) and all(
        isinstance(k, str) and k.isdecimal() and isinstance(v, str) and _CHUNK.fullmatch(v)
        for k, v in chunks.items()
    ):
        return chunks
    raise unreadable(path, "it does not name the parts of a replay")


def _require_plain_archive(path: Path, data: bytes) -> None:
    """Check that a checkpoint takes no more memory than its file: murmur's are not compressed.

    Raises:
        CheckpointError: if it is no zip archive, or holds more than its size.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError) as error:
        raise unreadable(path, f"it is no checkpoint ({error})") from None
    size = sum(member.file_size for member in members)
    if size > len(data) or any(member.compress_type for member in members):
        raise unreadable(
            path, f"it would expand from {len(data)} to {size} bytes; murmur compresses nothing"
        )


def unreadable(path: Path, reason: str) -> CheckpointError:
    """An error that says why a checkpoint cannot be read."""
    reason = " ".join(reason.split())[:200]
    return CheckpointError(
        f"cannot read checkpoint {path}: {reason}; pick another with --checkpoint"
    )

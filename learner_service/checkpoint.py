"""Checkpoints: written whole or not at all, verified, rotated, read without pickle.

A replay is too large to write anew each time. It is saved beside, in chunks, of which only those
that changed are written; update-<n>.json names the chunks that belong to update-<n>.pt.

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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from google.protobuf.message import DecodeError

from learner_service.algorithms.base import Algorithm, Policy, build_algorithm
from learner_service.runtime.precision import Precision
from learner_service.storage.storage import Feed
from learner_service.telemetry.tally import Tally
from shared.config import ExperimentConfig, validate
from shared.errors import CheckpointError, ConfigError, SpecError
from shared.process import logger
from shared.rpc import rollout_pb2 as pb
from shared.samples import SampleSpec, samples_from_proto, samples_to_proto
from shared.spec import EnvSpec, first_difference, spec_from_proto, spec_to_proto

FORMAT = 1
_NAME = re.compile(r"update-(\d+)\.pt")
_CHUNK = re.compile(r"replay-\d+-\d+\.pt", re.ASCII)
_MARK = b"sha256:"
_COMMENT = len(_MARK) + 64
_WRITER = secrets.token_hex(4)  # in the names of files that this process is writing


class CheckpointFolder:
    """The checkpoints of one run: update-<n>.pt, the latest few, best.pt, and league-<n>.pt.

    Attributes:
        path: the folder.
    """

    def __init__(self, run_dir: Path, keep: int) -> None:
        """Keep the latest `keep` checkpoints beside the best."""
        self.path, self._keep = run_dir / "checkpoints", keep
        self._chunks: dict[str, str] = {}  # number -> file of the storage's chunks as last saved
        self._pending: dict[int, Callable[[], dict[str, Any]]] = {}  # chunks to be written

    def save(self, state: dict[str, Any], updates: int, storage: Feed[Any] | None = None) -> Path:
        """Write update-<n>.pt and what changed of the storage; delete what is beyond the limit.

        Raises:
            CheckpointError: if it cannot be written; earlier checkpoints are untouched.
        """
        path = self.path / f"update-{updates:06d}.pt"
        if storage is not None:
            state = {**state, "storage": storage.state_dict()}
            self._pending |= storage.chunks()
        for number, chunk in list(self._pending.items()):
            file = f"replay-{number:05d}-{updates:06d}.pt"
            self._write({"arrays": chunk()}, self.path / file)
            self._chunks[str(number)] = file
            del self._pending[number]
        if self._chunks:
            self._write_bytes([json.dumps(self._chunks).encode()], path.with_suffix(".json"))
        self._write({**state, "chunks": dict(self._chunks)}, path)
        self._rotate()
        return path

    def _rotate(self) -> None:
        """Delete the oldest checkpoints, and chunks that none of the rest names."""
        for old in self._numbered()[: -self._keep]:
            old.unlink(missing_ok=True)
            old.with_suffix(".json").unlink(missing_ok=True)
        for left in self.path.glob("*.tmp"):  # by a process that was killed
            if _WRITER not in left.name:  # else another thread is writing it
                left.unlink(missing_ok=True)
        try:
            named = {f for path in self._numbered() for f in _chunk_files(path).values()}
        except CheckpointError as error:
            logger.warning("%s; no part of a replay is deleted", error)
            return
        for file in self.path.glob("replay-*.pt"):
            if file.name not in named:
                file.unlink(missing_ok=True)

    def load_storage(self, path: Path, state: dict[str, Any], storage: Feed[Any]) -> None:
        """Give a storage back what was saved with a checkpoint.

        Raises:
            CheckpointError: if a part is missing or torn.
            ConfigError: if the storage has another size now.
        """
        kept = state.get("storage")
        if kept is None:
            logger.warning("%s holds no replay: the run goes on with an empty one", path)
            return
        storage.load_state_dict(kept)
        self._chunks = _chunks_of(path, state)
        for number, file in self._chunks.items():
            storage.load_chunk(int(number), self.load(self.path / file)["arrays"])

    def save_best(self, state: dict[str, Any]) -> Path:
        """Write best.pt.

        Raises:
            CheckpointError: if it cannot be written; the one before is untouched.
        """
        path = self.path / "best.pt"
        self._write(state, path)
        return path

    def best_score(self, metric: str) -> float | None:
        """What best.pt scored; None if there is none to beat, or another metric chose it.

        The file says, not the checkpoint that a run goes on from: it may have been written later.
        """
        path = self.path / "best.pt"
        if not path.is_file():
            return None
        try:
            state = self.load(path)
        except CheckpointError as error:
            logger.warning("%s; the next evaluation writes another", error)
            return None
        chosen_by = json.loads(state["config"])["evaluation"]["best_metric"]
        score: float | None = state["best"] if chosen_by == metric else None
        return score

    def save_opponent(self, state: dict[str, Any], updates: int) -> Path:
        """Write league-<n>.pt, a policy that the run will play against.

        Raises:
            CheckpointError: if it cannot be written.
        """
        path = self.path / f"league-{updates:06d}.pt"
        self._write(state, path)
        return path

    def save_batch(self, arrays: dict[str, Any], updates: int) -> Path:
        """Write a batch for inspection."""
        path = self.path / f"batch-{updates:06d}.pt"
        self._write({"arrays": arrays}, path)
        return path

    def has_checkpoint(self) -> bool:
        """Whether a run could continue from here."""
        return bool(self._numbered())

    def require_no_run(self) -> None:
        """Check that a new run may begin here: its checkpoints would mix with an earlier run's.

        Raises:
            ConfigError: if a run was begun in this folder.
        """
        run_dir = self.path.parent
        counts = Tally(run_dir / "counters.bin").items() if self._has("counters.bin") else {}
        if self.has_checkpoint():
            how = f"add --resume to continue it from {self._numbered()[-1].name}"
        elif self._has("progress.jsonl") or any(self.path.glob("*.pt")) or any(counts.values()):
            how = "it has no checkpoint for --resume; --auto-resume starts it over in this folder"
        else:
            return
        raise ConfigError(
            f"run folder {run_dir} already holds a run: {how}, or name another folder with --run"
        )

    def _has(self, name: str) -> bool:
        """Whether a file of the run is there and not empty."""
        path = self.path.parent / name
        return path.is_file() and path.stat().st_size > 0

    def find(self, which: str) -> Path:
        """The file of "latest", "best", or a path.

        Raises:
            CheckpointError: if there is none.
        """
        if which == "latest":
            numbered = self._numbered()
            if not numbered:
                raise CheckpointError(
                    f"no checkpoint in {self.path}; start without --resume, or name another run"
                )
            return numbered[-1]
        path = self.path / "best.pt" if which == "best" else Path(which)
        if which == "best" and not path.is_file():
            return self.find("latest")
        if not path.is_file():
            raise CheckpointError(f"no checkpoint {path}; try 'latest'")
        return path

    def load(self, path: Path) -> dict[str, Any]:
        """Read a checkpoint.

        Raises:
            CheckpointError: if it is torn, foreign, or of another format.
        """
        data = self._verified(path)
        _require_plain_archive(path, data)
        try:
            # weights_only: tensors and plain values, never code.
            state: Any = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:
            raise _unreadable(path, str(error)) from None
        found = state.get("format") if isinstance(state, dict) else type(state).__name__
        if not isinstance(found, int) or found != FORMAT:
            shown = found if isinstance(found, int | str) else type(found).__name__
            raise CheckpointError(f"{path} has format {shown!r}, this murmur reads {FORMAT}")
        checkpoint: dict[str, Any] = state
        return checkpoint

    def load_latest(self) -> tuple[Path, dict[str, Any]]:
        """The newest checkpoint that is whole, and the replay that belongs to it.

        Those passed over are renamed to .refused: they are newer, and would be kept in place of
        those that the run is about to write.

        Raises:
            CheckpointError: if none can be read, with the newest one's reason.
        """
        refused: list[tuple[Path, CheckpointError]] = []
        for path in reversed(self._numbered()):
            try:
                state = self.load(path)
                for file in _chunks_of(path, state).values():
                    self._verified(self.path / file, signed="chunks" in state)
            except CheckpointError as error:
                refused.append((path, error))
                continue
            for bad, reason in refused:
                logger.warning("%s; the run goes on from %s", reason, path.name)
                bad.replace(bad.with_suffix(".refused"))
            return path, state
        if refused:
            raise refused[0][1]
        raise CheckpointError(
            f"no checkpoint in {self.path}; start without --resume, or name another run"
        )

    def _verified(self, path: Path, *, signed: bool = False) -> bytes:
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
            raise _unreadable(path, error.strerror or str(error)) from None
        if data[-_COMMENT:].startswith(_MARK):
            archive = memoryview(data)[: -_COMMENT - 2]
            digest = hashlib.sha256(archive)
            digest.update(b"\0\0")  # the length of a comment that is not there
            if digest.hexdigest().encode() != data[-64:]:
                raise _unreadable(path, "its checksum does not fit its contents")
        elif signed:
            raise _unreadable(path, "it is not whole")
        return data

    def _numbered(self) -> list[Path]:
        """update-<n>.pt, oldest first."""
        if not self.path.is_dir():
            return []
        found = [p for p in self.path.iterdir() if _NAME.fullmatch(p.name)]
        return sorted(found, key=lambda p: int(_NAME.fullmatch(p.name)[1]))  # type: ignore[index]

    def _write(self, state: dict[str, Any], path: Path) -> None:
        """Write beside, flush to disk, rename: a reader sees the old file or the new one."""
        buffer = io.BytesIO()
        torch.save({"format": FORMAT, **state}, buffer)
        archive = buffer.getbuffer()
        comment = _MARK + hashlib.sha256(archive).hexdigest().encode()
        # A zip archive ends with the length of its comment and the comment.
        self._write_bytes([archive[:-2], struct.pack("<H", _COMMENT), comment], path)

    def _write_bytes(self, parts: Sequence[bytes | memoryview], path: Path) -> None:
        temporary = path.with_suffix(f".{_WRITER}.tmp")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
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


def _chunk_files(checkpoint: Path) -> dict[str, str]:
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
        raise _unreadable(path, str(error)) from None


def _chunks_of(path: Path, state: dict[str, Any]) -> dict[str, str]:
    """The same, of a checkpoint that was read."""
    return _checked_chunks(path, state["chunks"]) if "chunks" in state else _chunk_files(path)


def _checked_chunks(path: Path, chunks: object) -> dict[str, str]:
    """Chunks as they were read from a file, if they are what murmur writes."""
    if isinstance(chunks, dict) and all(
        isinstance(k, str) and k.isdecimal() and isinstance(v, str) and _CHUNK.fullmatch(v)
        for k, v in chunks.items()
    ):
        return chunks
    raise _unreadable(path, "it does not name the parts of a replay")


def _require_plain_archive(path: Path, data: bytes) -> None:
    """Check that a checkpoint takes no more memory than its file: murmur's are not compressed.

    Raises:
        CheckpointError: if it is no zip archive, or holds more than its size.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError) as error:
        raise _unreadable(path, f"it is no checkpoint ({error})") from None
    size = sum(member.file_size for member in members)
    if size > len(data) or any(member.compress_type for member in members):
        raise _unreadable(
            path, f"it would expand from {len(data)} to {size} bytes; murmur compresses nothing"
        )


def _unreadable(path: Path, reason: str) -> CheckpointError:
    reason = " ".join(reason.split())[:200]
    return CheckpointError(
        f"cannot read checkpoint {path}: {reason}; pick another with --checkpoint"
    )


def spec_text(spec: EnvSpec) -> str:
    """A spec as a checkpoint keeps it: hexadecimal, since weights_only reads no bytes."""
    return spec_to_proto(spec).SerializeToString(deterministic=True).hex()


def saved_spec(state: Mapping[str, Any]) -> EnvSpec:
    """The spec a checkpoint was made with.

    Raises:
        CheckpointError: if it names none: something else than murmur wrote it.
    """
    if "source" in state:
        raise CheckpointError(
            "the checkpoint is of a run with a source, not with an environment; use the "
            "configuration it was trained with, or start a new run"
        )
    try:
        return spec_from_proto(pb.EnvSpec.FromString(bytes.fromhex(state["spec"])))
    except (KeyError, TypeError, ValueError, DecodeError, SpecError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise CheckpointError(
            f"the checkpoint names no environment ({reason}), so murmur did not write it; pick "
            "another with --checkpoint"
        ) from None


def check_spec(path: Path, state: dict[str, Any], spec: EnvSpec) -> None:
    """Compare a checkpoint's spec with an environment's.

    Raises:
        CheckpointError: naming the first difference.
    """
    difference = first_difference(saved_spec(state), spec)
    if difference:
        raise CheckpointError(
            f"checkpoint {path} is of another environment: {difference}; "
            "use the configuration it was trained with, or start a new run"
        )


def source_text(spec: SampleSpec) -> str:
    """The spec of a data set as a checkpoint keeps it; see spec_text."""
    return samples_to_proto(spec).SerializeToString(deterministic=True).hex()


def saved_source(state: Mapping[str, Any]) -> SampleSpec:
    """The data set a checkpoint of a supervised run was made with.

    Raises:
        CheckpointError: if it names none.
    """
    if "source" not in state:
        raise CheckpointError(
            "the checkpoint is of a run in an environment, the configuration has a source; use "
            "the configuration it was trained with, or start a new run"
        )
    try:
        return samples_from_proto(pb.SampleSpec.FromString(bytes.fromhex(state["source"])))
    except (TypeError, ValueError, DecodeError, SpecError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise CheckpointError(
            f"the checkpoint names no data set ({reason}), so murmur did not write it; pick "
            "another with --checkpoint"
        ) from None


def load_algorithm(
    path: Path, state: dict[str, Any], config: ExperimentConfig, algorithm: Algorithm[Any]
) -> None:
    """Give a configured algorithm what a checkpoint holds of it.

    Raises:
        CheckpointError: if it does not fit, naming what is configured otherwise.
    """
    saved = json.loads(state["config"])
    name, here = saved["algorithm"]["name"], config.algorithm.name
    if name == here:
        try:
            algorithm.load_state_dict(state["algorithm"])
            return
        except (KeyError, RuntimeError, ValueError) as error:
            reason = _differences(saved, config) or " ".join(str(error).split())[:200]
    else:
        reason = f"algorithm.name: {name} there, {here} here"
    raise CheckpointError(
        f"checkpoint {path} does not fit the configuration: {reason}; "
        "use the configuration it was trained with, or start a new run"
    )


def saved_policy(
    name: str, state: Mapping[str, Any], precision: Precision, device: torch.device
) -> tuple[Policy, ExperimentConfig]:
    """The policy of a checkpoint, whatever algorithm and network it has, and its configuration.

    Args:
        name: of the checkpoint, for messages.
        state: what it holds.
        precision: to act in.
        device: to act on.

    Raises:
        MurmurError: if this murmur cannot build it.
    """
    config = validate(ExperimentConfig, json.loads(state["config"]), name)
    algorithm = build_algorithm(
        config.algorithm,
        saved_spec(state),
        config.network,
        precision,
        device,
        config.run.seed,
    )
    try:
        algorithm.load_state_dict(state["algorithm"])
    except (KeyError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(
            f"checkpoint {name} does not fit this release's '{config.algorithm.name}': {reason}; "
            "use the release it was saved by"
        ) from None
    return algorithm.make_policy(), config


def _differences(saved: dict[str, Any], config: ExperimentConfig) -> str:
    """Where algorithm and network are configured otherwise than when a checkpoint was saved."""
    found, now = [], config.model_dump(mode="json")
    for section in ("algorithm", "network"):
        there, here = saved[section], now[section]
        for key in sorted(there.keys() | here.keys()):
            a, b = (values.get(key, "its default") for values in (there, here))
            if a != b:
                found.append(f"{section}.{key}: {a} there, {b} here")
    return "; ".join(found)

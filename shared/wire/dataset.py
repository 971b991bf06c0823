"""Datasets: whole episodes in a folder of files that NumPy reads.

    dataset.json        spec, source, counts, and the size and digest of each file
    episodes-00000.npz  arrays by name, one row for each time step; no pickle

An episode of T steps has T + 1 rows, FIRST to LAST: the action of a row led to the next one, that
of the LAST row is 0 and means nothing. On LAST the discount tells how the episode ended: 0
terminated, 1 truncated. Masks are observations; rewards of absent agents are as the environment
gave them. Beside the rows a file has the seed and the number of rows of each of its episodes.
"""

import hashlib
import io
import json
import os
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np
from google.protobuf import json_format
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from murmur.shared.process.errors import ConfigError, MurmurError
from murmur.shared.process.files import disk_error, make_folder, write_whole
from murmur.shared.rpc import rollout_pb2 as pb
from murmur.shared.wire.codec import RowCheck, finite_bounds, wrong_entries
from murmur.shared.wire.spec import (
    EnvSpec,
    action_layout,
    first_difference,
    spec_from_proto,
    spec_to_proto,
    without_expert,
)
from murmur.shared.wire.timestep import Array, StepType, TimeStep

HEADER = "dataset.json"
FORMAT, VERSION = "murmur-dataset", 1
OBSERVATION = "observation/"
_SEED, _LENGTH = "episode_seed", "episode_rows"
_FILE_BYTES = 32 << 20  # of rows in memory that make a file
_WRITTEN_BY = "name a folder that `murmur record` has written"
_DAMAGED = (ValueError, KeyError, EOFError, zipfile.BadZipFile, OSError, NotImplementedError)


class _File(BaseModel):
    """Entry of one file in the header."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str = Field(pattern=r"^episodes-\d{5,}\.npz$")
    episodes: int = Field(ge=1)
    rows: int = Field(ge=2)
    bytes: int = Field(ge=1)
    sha256: str


class _Header(BaseModel):
    """Contents of dataset.json."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: str
    version: int
    source: dict[str, Any]
    environment: dict[str, Any]
    episodes: int
    transitions: int
    spec: dict[str, Any]
    files: list[_File]


@dataclass(frozen=True)
class Episodes:
    """Episodes one after the other, R rows of E episodes.

    Attributes:
        arrays: name -> [R, ...]: step_type, reward, discount, action, and observations with the
            prefix OBSERVATION.
        length: [E] int64 number of rows of each episode, T + 1.
        seed: [E] uint64 seed of each episode.
    """

    arrays: dict[str, Array]
    length: NDArray[np.int64]
    seed: NDArray[np.uint64]

    def chosen(self, wanted: NDArray[np.bool_]) -> "Episodes":
        """Select the episodes for which `wanted` [E] is true."""
        rows = wanted.repeat(self.length)
        arrays = {name: array[rows] for name, array in self.arrays.items()}
        return Episodes(arrays, self.length[wanted], self.seed[wanted])


def array_layout(spec: EnvSpec) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
    """Return dtype and shape of one row of each array, by name."""
    agents = spec.num_agents
    dtype, shape = action_layout(spec.action)
    layout: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {
        "step_type": (np.dtype(np.uint8), ()),
        "reward": (np.dtype(np.float32), (agents,)),
        "discount": (np.dtype(np.float32), ()),
        "action": (dtype, (agents, *shape)),
    }
    for o in spec.observations:
        layout[OBSERVATION + o.name] = np.dtype(o.dtype), (agents,) * o.per_agent + o.shape
    return layout


class Dataset:
    """A dataset that was written before; its header is read at once, its files when needed.

    Attributes:
        folder: folder of the files.
        spec: spec of the environment that it is of.
        source: description of the policy that acted, by key.
        num_episodes: number of episodes.
        num_transitions: number of steps, all agents together.
    """

    def __init__(self, folder: str | Path, option: str) -> None:
        """Read the header.

        Args:
            folder: folder of the dataset.
            option: configuration key or option that names the folder, for messages.

        Raises:
            ConfigError: if there is no dataset, or not one that can be read here.
        """
        self.folder = Path(folder)
        self._where = f"{option}={folder}"
        header = self._header()
        self._files = header.files
        self.source = header.source
        self.num_episodes, self.num_transitions = header.episodes, header.transitions
        counts = [sum(f.episodes for f in header.files), sum(f.rows for f in header.files)]
        if counts != [header.episodes, header.transitions + header.episodes]:
            raise ConfigError(
                f"{self._where}: {HEADER} is not consistent: {header.transitions} transitions of "
                f"{header.episodes} episodes, its files have {counts[1] - counts[0]} of "
                f"{counts[0]}; record it again"
            )
        if not header.episodes:
            raise ConfigError(f"{self._where}: it has no episodes; record some")
        listed = sorted(file.name for file in header.files)
        there = {path.name for path in self.folder.glob("episodes-*.npz")}
        if other := [*there.difference(listed), *(a for a, b in pairwise(listed) if a == b)]:
            raise ConfigError(
                f"{self._where}: {other[0]} is not in {HEADER}, or twice; record it again"
            )
        try:
            self.spec = spec_from_proto(json_format.ParseDict(header.spec, pb.EnvSpec()))
        except (json_format.ParseError, MurmurError) as error:
            raise ConfigError(
                f"{self._where}: {HEADER} has no valid spec ({_line(error)}); record it again"
            ) from None

    def _header(self) -> _Header:
        """Read and check dataset.json."""
        try:
            data = json.loads((self.folder / HEADER).read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            raise ConfigError(f"{self._where}: it has no {HEADER}; {_WRITTEN_BY}") from None
        except OSError as error:
            raise disk_error(error) or ConfigError(f"{self._where}: {_line(error)}") from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"{self._where}: {HEADER} is damaged ({_line(error)}); record it again"
            ) from None
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ConfigError(f"{self._where}: {HEADER} is of another format; {_WRITTEN_BY}")
        if data.get("version") != VERSION:
            raise ConfigError(
                f"{self._where}: it is of version {data.get('version')!r} of the format, this "
                f"murmur reads version {VERSION}; record it again"
            )
        try:
            return _Header.model_validate(data)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            raise ConfigError(
                f"{self._where}: {HEADER} is damaged at '{key}': {first['msg']}; record it again"
            ) from None

    def require_spec(self, spec: EnvSpec) -> None:
        """Check that the dataset's rows are such as an environment sends.

        Names of the environment, its metrics and its longest episode may differ.

        Args:
            spec: spec of the environment.

        Raises:
            ConfigError: naming the first difference.
        """
        same = ("name", "metrics", "max_episode_steps", "derived", "symmetries")
        theirs = replace(without_expert(self.spec), **{key: getattr(spec, key) for key in same})
        if difference := first_difference(without_expert(spec), theirs):
            raise ConfigError(
                f"{self._where} is of environment '{self.spec.name}', this run is in "
                f"'{spec.name}': {difference}; name a dataset of this environment"
            )

    def describe(self) -> str:
        """Return source and size."""
        source = ", ".join(f"{key} {value}" for key, value in self.source.items())
        return (
            f"{self.num_transitions:,} transitions of {self.num_episodes:,} episodes in "
            f"{self.folder} ({source})"
        )

    def columns(self, steps: int) -> int:
        """Return the number of replay columns that its rows take, file by file.

        Args:
            steps: transitions of a column.
        """
        return sum(-(-(file.rows - 1) // steps) for file in self._files)

    def parts(self) -> Iterator[Episodes]:
        """Yield the episodes of one file after the other, checked.

        Raises:
            ConfigError: if a file is missing, cut or damaged, or breaks a rule of the wire.
        """
        for file in self._files:
            where = f"{self._where}: {file.name}"
            try:
                raw = (self.folder / file.name).read_bytes()
            except OSError as error:
                raise ConfigError(f"{where} cannot be read: {error.strerror}") from None
            if len(raw) != file.bytes:
                raise ConfigError(
                    f"{where} has {len(raw)} bytes, {HEADER} says {file.bytes}: it is cut or was "
                    "changed; record it again"
                )
            if hashlib.sha256(raw).hexdigest() != file.sha256:
                raise ConfigError(f"{where} is damaged: its digest differs; record it again")
            try:
                found = _unpacked(raw, file, self.spec)
            except _DAMAGED as error:
                raise ConfigError(f"{where} is damaged: {_line(error)}; record it again") from None
            if wrong := first_breach(found, self.spec):
                raise ConfigError(f"{where} has {wrong}; record it again")
            yield found


def _unpacked(raw: bytes, file: _File, spec: EnvSpec) -> Episodes:
    """Read the arrays of a file; nothing larger than the file is allocated.

    Raises:
        ValueError: if an array is missing, or has another dtype or shape than the spec says.
    """
    wanted = {
        name: (dtype, (file.rows, *shape)) for name, (dtype, shape) in array_layout(spec).items()
    }
    wanted[_SEED] = np.dtype(np.uint64), (file.episodes,)
    wanted[_LENGTH] = np.dtype(np.int64), (file.episodes,)
    arrays: dict[str, Array] = {}
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        names = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        if names.keys() != wanted.keys():
            other = sorted(names.keys() ^ wanted.keys())
            raise ValueError(f"array '{other[0]}' is missing or not in the spec")
        for name, (dtype, shape) in wanted.items():
            if names[name].compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"array '{name}' is compressed")
            with archive.open(names[name]) as member:
                version = np.lib.format.read_magic(member)
                read = np.lib.format.read_array_header_1_0
                if version != (1, 0):
                    read = np.lib.format.read_array_header_2_0
                found, fortran, kind = read(member)
                if found != shape or kind != dtype or fortran:
                    raise ValueError(
                        f"array '{name}' is {kind} {found}, the header's is {dtype} {shape}"
                    )
                arrays[name] = np.frombuffer(member.read(), dtype).reshape(shape)
    seed, length = arrays.pop(_SEED).astype(np.uint64), arrays.pop(_LENGTH).astype(np.int64)
    if (length < 2).any() or length.sum() != file.rows:
        raise ValueError(f"its episodes have {length.sum()} rows, the header says {file.rows}")
    return Episodes(arrays, length, seed)


def first_breach(episodes: Episodes, spec: EnvSpec) -> str:
    """Describe the first row that no environment of this spec sends, or action that it refuses.

    Args:
        episodes: episodes of the spec's dtypes and shapes.
        spec: spec of the environment.

    Returns:
        description, such as "a reward of nan in step 3 of the episode with seed 7"; empty if there
        is none.
    """
    arrays, rows = episodes.arrays, len(episodes.arrays["step_type"])
    starts = np.cumsum(episodes.length) - episodes.length

    def at(row: int) -> str:
        episode = int(np.searchsorted(starts, row, side="right")) - 1
        return f"in step {row - starts[episode]} of the episode with seed {episodes.seed[episode]}"

    order = np.full(rows, int(StepType.MID), np.uint8)
    order[starts] = int(StepType.FIRST)
    order[starts + episodes.length - 1] = int(StepType.LAST)
    if (wrong := np.flatnonzero(arrays["step_type"] != order)).size:
        row = int(wrong[0])
        kind, must = arrays["step_type"][row], StepType(order[row]).name
        return f"step_type {kind}, where {must} must be, {at(row)}"
    observed = {o.name: arrays[OBSERVATION + o.name] for o in spec.observations}
    timestep = TimeStep(
        arrays["step_type"],  # type: ignore[arg-type]
        arrays["reward"],  # type: ignore[arg-type]
        arrays["discount"],  # type: ignore[arg-type]
        observed,
    )
    check = RowCheck(spec, rows)
    if not check.passes(timestep) and (broken := check.broken(timestep)):
        row = min(broken)
        return f"{broken[row]} {at(row)}"
    acted, action = order != int(StepType.LAST), arrays["action"]
    low, high = finite_bounds(spec.action)
    action = action.reshape(rows, -1, len(low))
    outside = wrong_entries(spec.action, action, low, high)
    if (bad := np.argwhere(outside & acted[:, None, None])).size:
        row, agent, entry = bad[0].tolist()
        return (
            f"action {action[row, agent, entry]:g} of {spec.agent_label(agent)}, outside "
            f"[{low[entry]:g}, {high[entry]:g}], {at(row)}"
        )
    return ""


class DatasetWriter:
    """Writer of one dataset: nothing is seen of it before it is whole.

    As a context manager: at the end of the block the folder gets its name; after an error what was
    written is removed.
    """

    def __init__(
        self, folder: Path, source: Mapping[str, Any], environment: Mapping[str, Any]
    ) -> None:
        """Make a folder beside the dataset's, to write into.

        Args:
            folder: the dataset's folder, which must not exist.
            source: description of the policy that acts, by key.
            environment: section of the configuration with the environment and its options.

        Raises:
            ConfigError: if the folder exists.
        """
        if folder.exists() or folder.is_symlink():
            raise ConfigError(f"{folder} exists; name another folder, or remove it")
        self._folder, self._source = folder, dict(source)
        self._environment = dict(environment)
        self._beside = folder.with_name(f".{folder.name}.{os.getpid()}")
        self._spec: EnvSpec | None = None
        self._files: list[_File] = []
        self._kept = 0  # files of finished sessions
        self._buffer: list[tuple[dict[str, Array], int]] = []
        self._bytes = 0

    @property
    def num_episodes(self) -> int:
        """Return the number of episodes so far."""
        return sum(file.episodes for file in self._files) + len(self._buffer)

    @property
    def num_transitions(self) -> int:
        """Return the number of steps so far."""
        waiting = sum(len(arrays["reward"]) for arrays, _ in self._buffer)
        return sum(file.rows for file in self._files) + waiting - self.num_episodes

    def __enter__(self) -> Self:
        """Make the folder."""
        make_folder(self._beside)
        return self

    def begin(self, spec: EnvSpec) -> None:
        """Begin a session, or play it again: what was added since `keep` is dropped."""
        self._spec = spec
        for file in self._files[self._kept :]:
            (self._beside / file.name).unlink()
        del self._files[self._kept :]
        self._buffer.clear()
        self._bytes = 0

    def add(self, arrays: dict[str, Array], seed: int) -> None:
        """Add an episode.

        Args:
            arrays: name -> [T + 1, ...], see Episodes.
            seed: seed of the episode.
        """
        self._buffer.append((arrays, seed))
        self._bytes += sum(array.nbytes for array in arrays.values())
        if self._bytes >= _FILE_BYTES:
            self._write_file()

    def keep(self) -> None:
        """Keep all that was added."""
        self._write_file()
        self._kept = len(self._files)

    def _write_file(self) -> None:
        """Write the episodes that wait, if there are any.

        Raises:
            MurmurError: if the disk is full, or a row cannot be of this environment.
        """
        if not self._buffer:
            return
        assert self._spec is not None
        arrays = {
            name: np.concatenate([arrays[name] for arrays, _ in self._buffer], dtype=dtype)
            for name, (dtype, _) in array_layout(self._spec).items()
        }
        length = np.array([len(arrays["reward"]) for arrays, _ in self._buffer], np.int64)
        seed = np.array([seed for _, seed in self._buffer], np.uint64)
        if wrong := first_breach(Episodes(arrays, length, seed), self._spec):
            raise ConfigError(f"{self._folder}: what is recorded has {wrong}")
        raw = io.BytesIO()
        np.savez(raw, **arrays, **{_SEED: seed, _LENGTH: length})  # type: ignore[arg-type]
        content, name = raw.getvalue(), f"episodes-{len(self._files):05d}.npz"
        write_whole(self._beside / name, content)
        digest = hashlib.sha256(content).hexdigest()
        self._files.append(
            _File(
                name=name,
                episodes=len(length),
                rows=int(length.sum()),
                bytes=len(content),
                sha256=digest,
            )
        )
        self._buffer.clear()
        self._bytes = 0

    def __exit__(self, kind: object, *_: object) -> None:
        """Write the header and give the folder its name; after an error remove it."""
        try:
            if kind is None:
                self._finish()
        finally:
            shutil.rmtree(self._beside, ignore_errors=True)

    def _finish(self) -> None:
        """Write the header; then the folder gets its name."""
        self.keep()
        assert self._spec is not None
        header = _Header(
            format=FORMAT,
            version=VERSION,
            source=self._source,
            environment=self._environment,
            episodes=self.num_episodes,
            transitions=self.num_transitions,
            spec=json_format.MessageToDict(
                spec_to_proto(self._spec), preserving_proto_field_name=True
            ),
            files=self._files,
        )
        write_whole(self._beside / HEADER, json.dumps(header.model_dump(), indent=1) + "\n")
        try:
            self._beside.rename(self._folder)
        except OSError as error:
            known = disk_error(error, self._folder)
            raise known or ConfigError(f"cannot write {self._folder}: {error.strerror}") from None


def _line(error: Exception) -> str:
    """Return an error's message in one short line."""
    return " ".join(str(error).split())[:200] or type(error).__name__

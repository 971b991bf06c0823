"""The newest evaluation's first episode as a file with the arrays for its pictures."""

import io
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from murmur.env_service.environment import VectorEnvironment
from murmur.env_service.pictures import Snapshot
from murmur.shared.process.errors import MurmurError
from murmur.shared.process.files import write_whole
from murmur.shared.process.process import logger
from murmur.shared.wire.timestep import Array, StepType, TimeStep

SHARE = 0.005  # of a processor's time; the next episode is recorded when the last is paid for
_MOST_BYTES = 48 << 20  # of the rows in memory; of a larger episode every second, fourth ... row
_ROW_BYTES = 1024  # that a row takes beside its arrays
_METRIC = "metric/"


class EpisodeRecorder:
    """Recorder of copy 0's episodes; pass its `take` as on_row. Used by one thread.

    An environment without pictures is called once. A full disk ends the recording, not the
    evaluation.
    """

    def __init__(self, file: Path) -> None:
        """Record into `file`, an .npz that `read_episode` reads."""
        self._file = file
        self._snapshots: list[Snapshot] = []
        self._recording, self._off = False, False
        self._due = 0.0

    def take(self, environment: VectorEnvironment, timestep: TimeStep) -> None:
        """Record a row; write the file after the last one of an episode."""
        kind = timestep.step_type[0]
        if kind == StepType.FIRST:  # also of an evaluation that broke and is played again
            self._snapshots.clear()
            self._bytes = 0
            self._every = 1
            self._rows = 0
            self._cost_s = 0.0
            self._recording = not self._off and time.monotonic() >= self._due
        if not self._recording:
            return
        started = time.thread_time()
        last = kind == StepType.LAST
        if self._rows % self._every == 0 or last:
            self._note(environment, timestep)
        if self._bytes > _MOST_BYTES and not last:
            self._snapshots, self._every = self._snapshots[::2], 2 * self._every
            self._bytes //= 2
        self._rows += 1
        if last and self._recording:
            self._write()
        self._cost_s += time.thread_time() - started
        if last:
            self._recording = False
            self._due = time.monotonic() + self._cost_s / SHARE

    def _note(self, environment: VectorEnvironment, timestep: TimeStep) -> None:
        try:
            state = {name: np.asarray(a) for name, a in environment.render_state(0).items()}
        except Exception as error:  # evaluations count without pictures
            if not isinstance(error, NotImplementedError):
                logger.exception("render_state failed; the live page shows no episode")
            self._off, self._recording = True, False
            return
        metrics = {name: float(values[0]) for name, values in timestep.metrics.items()}
        self._snapshots.append(Snapshot(state, metrics))
        self._bytes += _ROW_BYTES + sum(a.nbytes for a in state.values())

    def _write(self) -> None:
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **_packed(self._snapshots))  # type: ignore[arg-type]
        try:
            write_whole(self._file, buffer.getvalue())
        except MurmurError as error:
            logger.warning("the live page shows no episode: %s", error)
            self._off = True


def _packed(snapshots: list[Snapshot]) -> dict[str, Array]:
    """Pack each array of all rows into one: its values, and its shape in every row."""
    packed: dict[str, Array] = {}
    for name in snapshots[0].state:
        rows = [snapshot.state[name] for snapshot in snapshots]
        packed[name] = np.concatenate([row.ravel() for row in rows])
        packed[f"{name}/shape"] = np.array([row.shape for row in rows], np.int64)
    for name in snapshots[0].metrics:
        packed[_METRIC + name] = np.array([s.metrics[name] for s in snapshots])
    return packed


def read_episode(file: Path) -> list[Snapshot]:
    """Read the rows of a recorded episode.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it holds no episode.
    """
    try:
        with file.open("rb") as raw, np.load(raw, allow_pickle=False) as packed:
            arrays = {name: packed[name] for name in packed.files}
    except (EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{file} is torn: {error}") from error
    states: dict[str, list[Array]] = {}
    for name, shapes in arrays.items():
        if name.endswith("/shape"):
            ends = np.cumsum([np.prod(shape, dtype=np.int64) for shape in shapes])
            parts = np.split(arrays[name.removesuffix("/shape")], ends[:-1])
            states[name.removesuffix("/shape")] = [
                part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)
            ]
    metrics: Mapping[str, Array] = {
        name.removeprefix(_METRIC): values
        for name, values in arrays.items()
        if name.startswith(_METRIC)
    }
    count = min((len(rows) for rows in states.values()), default=0)
    return [
        Snapshot(
            {name: rows[i] for name, rows in states.items()},
            {name: float(values[i]) for name, values in metrics.items()},
        )
        for i in range(count)
    ]

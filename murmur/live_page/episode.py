"""Pictures of the newest recorded episode, on one sheet that the page plays."""

import io
import time
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np

from murmur.env_service.adapters.frames import DRAWING
from murmur.env_service.sessions.recording import SHARE, read_episode
from murmur.runs.run_folder import EPISODE, RunFolder
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.process.errors import ConfigError
from murmur.shared.process.process import logger

FRAMES = 36  # of an episode: each costs tens of milliseconds
_COLUMNS = 6
_COLOURS = 128
_FRAMES_PER_SECOND = 6


@dataclass(frozen=True)
class Sheet:
    """Pictures side by side, in rows of `columns`.

    Attributes:
        png: content of the picture file.
        version: version of the recorded episode.
        frames: number of pictures.
        columns: columns of the sheet.
        rate: pictures per second.
        reading: instructions for reading the pictures.
    """

    png: bytes
    version: int
    frames: int
    columns: int = _COLUMNS
    rate: float = _FRAMES_PER_SECOND
    reading: str = ""


class EpisodePictures:
    """Drawings of recorded episodes, of which the newest is kept. Used by any thread.

    Drawing takes at most SHARE of a processor's time: a newer episode waits until the last drawing
    is paid for, unless it is asked for.
    """

    def __init__(self, run: RunFolder) -> None:
        """Prepare to draw a run's episodes."""
        self._run = run
        self._lock = Lock()
        self._sheet: Sheet | None = None
        self._trouble, self._failed = "", 0
        self._due = 0.0

    def state(self, config: ExperimentConfig) -> dict[str, Any]:
        """Return the recorded version, the version that `sheet` would return, and their text."""
        version = self._version()
        drawn = self._sheet.version if self._sheet else 0
        shown = version if time.monotonic() >= self._due and version != self._failed else drawn
        reading = self._sheet.reading if self._sheet else ""
        words = self._text(config, version)
        return {"recorded": version, "shown": shown, "words": words, "reading": reading}

    def sheet(self, name: str, *, newest: bool) -> Sheet | None:
        """Draw the newest episode, at once if it may be; None if there is none.

        Args:
            name: name of the environment.
            newest: flag to draw at once, although the last drawing was recent.
        """
        with self._lock:
            version = self._version()
            drawn = self._sheet.version if self._sheet else 0
            if version not in (0, drawn, self._failed) and (
                newest or time.monotonic() >= self._due
            ):
                started = time.thread_time()
                self._draw(name, version)
                self._due = time.monotonic() + (time.thread_time() - started) / SHARE
            return self._sheet

    def _version(self) -> int:
        """Return the version of the recorded episode; 0 if there is none."""
        try:
            return (self._run.path / EPISODE).stat().st_mtime_ns // 1_000_000
        except OSError:
            return 0

    def _text(self, config: ExperimentConfig, version: int) -> str:
        name = config.environment.name
        if self._trouble:
            return self._trouble
        if version:
            return ""
        if config.supervised:
            return f"A run with a source plays no episodes; `murmur render {self._run.path}`."
        if name in DRAWING:
            again = f"murmur render {self._run.path}"
            return f"Environments of '{name}' are drawn only when asked: `{again}`."
        if not config.evaluation.on:
            return (
                "No episode is recorded: the run makes no evaluations (evaluation.every_updates)."
            )
        return f"No episode is recorded yet, or environment '{name}' has no pictures."

    def _draw(self, name: str, version: int) -> None:
        self._failed = version  # until it is drawn
        try:
            from PIL import Image

            from murmur.env_service.pictures import find_painter
            from murmur.runs.render import draw_episode
        except ModuleNotFoundError:
            self._trouble = "Pictures need the extra 'report': pip install 'murmur-marl[report]'."
            return
        try:
            snapshots = read_episode(self._run.path / EPISODE)
            frames = draw_episode(name, snapshots, name, FRAMES)
            painter = find_painter(snapshots)
        except (OSError, ValueError, ConfigError) as error:
            logger.warning("the newest episode cannot be drawn: %s", error)
            self._trouble = f"The newest episode cannot be drawn: {error}."
            return
        height, width, _ = frames[0].shape
        rows = -(-len(frames) // _COLUMNS)
        cells = np.full((rows * _COLUMNS, height, width, 3), 255, np.uint8)
        cells[: len(frames)] = frames
        sheet = cells.reshape(rows, _COLUMNS, height, width, 3).swapaxes(1, 2)
        sheet = sheet.reshape(rows * height, _COLUMNS * width, 3)
        buffer = io.BytesIO()
        Image.fromarray(sheet).quantize(_COLOURS).save(buffer, "PNG")
        reading = painter.READING if painter else ""
        self._trouble, self._failed = "", 0
        self._sheet = Sheet(buffer.getvalue(), version, len(frames), reading=reading)

"""Moving pictures of an episode; the environments draw their content."""

import errno
import io
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

from murmur.env_service.adapters.frames import DRAWING, FRAME
from murmur.env_service.pictures import Snapshot, find_painter, painters
from murmur.env_service.sessions.evaluate import OnRow
from murmur.runs.evaluation import MOST_ROWS, Recorder
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.process.errors import ConfigError
from murmur.shared.process.files import replacing

FRAMES_PER_SECOND = 6
HOLD_S = 2.0  # the last picture stays
MOST_FRAMES_PER_SECOND = 30.0
_LITTLE_ROOM = 1 << 16  # bytes
_MP4_INDEX = b"moov"  # written last


def draw_episode(
    environment: str, snapshots: Sequence[Snapshot], title: str, most: int = MOST_ROWS
) -> list[NDArray[np.uint8]]:
    """Draw all pictures of an episode, or `most` of them, as [height, width, 3] arrays.

    Raises:
        ConfigError: if the environment has no pictures.
    """
    painter = find_painter(snapshots)
    if painter is None:
        known = "; ".join(f"{name}: {', '.join(p.NEEDED)}" for name, p in painters().items())
        raise ConfigError(
            f"environment '{environment}' has no pictures: they need a render_state as one of "
            f"these gives ({known})"
        )
    every = math.ceil(len(snapshots) / most)
    rows = [*range(0, len(snapshots) - 1, every), len(snapshots) - 1]
    return [_pixels(figure) for figure in painter.figures(snapshots, rows, title)]


def _pixels(figure: Figure) -> NDArray[np.uint8]:
    """Draw a figure as [height, width, 3] pixels."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()  # type: ignore[no-untyped-call]
    pixels: NDArray[Any] = np.asarray(canvas.buffer_rgba())[..., :3]  # type: ignore[no-untyped-call]
    return pixels.copy()


@contextmanager
def recorded_movie(file: Path, config: ExperimentConfig, title: str) -> Iterator[OnRow]:
    """Write the episode that is played in the block as a GIF or MP4.

    Args:
        file: file, .gif or .mp4.
        config: configuration that names the environment.
        title: title above the pictures, unless the environment draws them itself.

    Yields:
        function to pass as on_row.

    Raises:
        ConfigError: for another kind of file, or if the environment has no pictures.
    """
    if file.suffix not in (".gif", ".mp4"):
        raise ConfigError(f"'{file}': pictures are written as .gif or .mp4")
    name = config.environment.name
    if name in DRAWING:
        recorder = Recorder(required_by=config.environment.options.get("factory", name))
        yield recorder.take
        frames = [np.asarray(row.state[FRAME], np.uint8) for row in recorder.snapshots]
        rate = (recorder.frames_per_second or FRAMES_PER_SECOND) / recorder.every
        write_movie(file, frames, min(rate, MOST_FRAMES_PER_SECOND))
    else:
        recorder = Recorder()
        yield recorder.take
        write_movie(file, draw_episode(name, recorder.snapshots, title))


def write_movie(
    file: Path, frames: Sequence[NDArray[np.uint8]], rate: float = FRAMES_PER_SECOND
) -> None:
    """Write a GIF or MP4.

    Args:
        file: file, .gif or .mp4.
        frames: pictures, [height, width, 3] each, all of one size.
        rate: frames per second.

    Raises:
        ConfigError: if it cannot be written.
    """
    import imageio.v2 as imageio

    frames = [*frames, *[frames[-1]] * math.ceil(HOLD_S * rate)]
    with replacing(file) as beside:
        if file.suffix == ".gif":
            buffer = io.BytesIO()  # on a full disk the writer's end would raise once more
            imageio.mimsave(buffer, frames, format="GIF", duration=1000 / rate, loop=0)
            beside.write_bytes(buffer.getvalue())
            return
        try:
            imageio.mimsave(beside, frames, format="FFMPEG", fps=rate, macro_block_size=2)
            pipe = file.exists() and not file.is_file()
            whole = pipe or _MP4_INDEX in beside.read_bytes()
        except OSError:
            whole = False
        if not whole:  # ffmpeg says why on standard error, and may fail without an error here
            full = shutil.disk_usage(file.resolve().parent).free < _LITTLE_ROOM
            number = errno.ENOSPC if full else errno.EIO
            raise OSError(number, os.strerror(number))

"""Moving pictures of an episode; environments say what is on them."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

from env_service.pictures import Snapshot, find_painter, painters
from shared.errors import ConfigError

FRAMES_PER_SECOND = 6
HOLD_S = 2.0  # the last picture stays
MOST_ROWS = 240  # of a longer episode every second, third ... row is drawn


def draw_episode(
    environment: str, snapshots: Sequence[Snapshot], title: str
) -> list[NDArray[np.uint8]]:
    """All pictures of an episode, as [height, width, 3] arrays.

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
    every = math.ceil(len(snapshots) / MOST_ROWS)
    rows = [*range(0, len(snapshots) - 1, every), len(snapshots) - 1]
    return [_pixels(figure) for figure in painter.figures(snapshots, rows, title)]


def _pixels(figure: Figure) -> NDArray[np.uint8]:
    """[height, width, 3]."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()  # type: ignore[no-untyped-call]
    pixels: NDArray[Any] = np.asarray(canvas.buffer_rgba())[..., :3]  # type: ignore[no-untyped-call]
    return pixels.copy()


def write_movie(file: Path, frames: Sequence[NDArray[np.uint8]]) -> None:
    """Write a GIF or MP4.

    Raises:
        ConfigError: for another kind of file, or one that cannot be written.
    """
    import imageio.v2 as imageio

    if file.suffix not in (".gif", ".mp4"):
        raise ConfigError(f"'{file}': pictures are written as .gif or .mp4")
    frames = [*frames, *[frames[-1]] * int(HOLD_S * FRAMES_PER_SECOND)]
    try:
        if file.suffix == ".gif":
            imageio.mimsave(file, frames, format="GIF", duration=1000 / FRAMES_PER_SECOND, loop=0)
        else:
            imageio.mimsave(
                file, frames, format="FFMPEG", fps=FRAMES_PER_SECOND, macro_block_size=2
            )
    except OSError as error:
        raise ConfigError(f"cannot write '{file}': {error.strerror or error}") from None

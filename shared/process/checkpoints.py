"""Files of a run's checkpoints: by number, and by what a user calls them."""

import re
from pathlib import Path

from murmur.shared.process.errors import CheckpointError

_NAME = re.compile(r"update-\d+\.pt", re.ASCII)


def numbered_checkpoints(folder: Path) -> list[Path]:
    """Return the files update-<n>.pt of a folder, the oldest first; none where it is missing.

    Raises:
        OSError: if the folder cannot be read; a run that took it for empty would start again.
    """
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    return sorted(found, key=updates_of)


def updates_of(checkpoint: Path) -> int:
    """Return the number of updates in the name of a numbered checkpoint."""
    return int(checkpoint.stem.removeprefix("update-"))


def find_checkpoint(folder: Path, which: str) -> Path:
    """Return a checkpoint: "best" (the latest if there is no best), "latest", or a path.

    Args:
        folder: folder of the run's checkpoints.
        which: name of the checkpoint.

    Raises:
        CheckpointError: if there is none.
    """
    if which not in ("best", "latest"):
        if Path(which).is_file():
            return Path(which)
        raise CheckpointError(f"no checkpoint '{which}'; give best, latest or a file")
    if which == "best" and (folder / "best.pt").is_file():
        return folder / "best.pt"
    numbered = numbered_checkpoints(folder)
    if not numbered:
        raise CheckpointError(
            f"no checkpoint in '{folder}'; training writes the first after "
            "learner.checkpoint_every_updates updates and at its end"
        )
    return numbered[-1]

"""What is found in a run's folder."""

from pathlib import Path

import pytest

from murmur.run_folder import RunFolder
from shared.errors import CheckpointError


def test_the_latest_checkpoint_is_that_of_most_updates(tmp_path: Path) -> None:
    run, folder = RunFolder(tmp_path), tmp_path / "checkpoints"
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        run.checkpoint("latest")
    folder.mkdir()
    for updates in (999_950, 1_000_000, 990_000):  # numbers are six digits wide, or wider
        (folder / f"update-{updates:06d}.pt").touch()
    assert run.checkpoint("latest").name == "update-1000000.pt"
    assert run.checkpoint("best").name == "update-1000000.pt"
    (folder / "best.pt").touch()
    assert run.checkpoint("best").name == "best.pt"

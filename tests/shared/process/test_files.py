"""Files that the user has named: whole, or as they were."""

import os
import stat
import threading
from pathlib import Path

import pytest

from murmur.shared.process.errors import ConfigError
from murmur.shared.process.files import replacing, write_json, write_output


def fail_half_way(file: Path) -> None:
    file.write_text("half")
    raise OSError(28, "No space left on device")


def test_an_output_that_fails_leaves_the_old_one(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    write_output(file, "good")
    with (
        pytest.raises(ConfigError, match=r"cannot write '.*result.json': No space left"),
        replacing(file) as beside,
    ):
        fail_half_way(beside)
    with pytest.raises(TypeError):
        write_json(file, object())
    assert file.read_text() == "good"
    assert os.listdir(tmp_path) == ["result.json"]


def test_mode_and_link_of_an_output_stay(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("old")
    file.chmod(0o640)
    link.symlink_to(file)
    write_output(link, "new")
    assert link.is_symlink()
    assert (file.read_text(), stat.S_IMODE(file.stat().st_mode)) == ("new", 0o640)


def test_a_pipe_is_written_in_place(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    write_output(pipe, "through")
    reader.join(60)
    assert read == ["through"]
    with pytest.raises(ConfigError, match="cannot write '/dev/full'"):
        write_output(Path("/dev/full"), "x")
    with pytest.raises(ConfigError, match="cannot write"):
        write_output(tmp_path, "a folder")

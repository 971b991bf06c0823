"""Files of a run and outputs that users name."""

import os
import stat
import subprocess
import sys
from pathlib import Path

from shared.files import write_output


def test_a_failed_output_leaves_the_file_that_was_there(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text("good")
    code = (
        "import resource, signal, sys; from pathlib import Path\n"
        "from shared.files import write_output\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
        "write_output(Path(sys.argv[1]), 'x' * 1000)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(file)], capture_output=True, text=True, check=False
    )
    assert f"ConfigError: cannot write '{file}': File too large" in done.stderr
    assert file.read_text() == "good"
    assert os.listdir(tmp_path) == ["report.html"]


def test_an_output_keeps_links_and_permissions(tmp_path: Path) -> None:
    file, link = tmp_path / "a", tmp_path / "b"
    file.write_text("old")
    file.chmod(0o640)
    link.symlink_to(file)
    write_output(link, "new")
    assert file.read_text() == "new"
    assert link.is_symlink()
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    write_output(Path(os.devnull), "x")

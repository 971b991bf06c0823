"""A package of another program that has the name of one of murmur's."""

import subprocess
import sys
from pathlib import Path

import pytest


def run(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    """A script of the user's, beside a package `shared` of the user's."""
    package = folder / "shared"
    package.mkdir()
    (package / "__init__.py").write_text("helper = 1\n")
    script = folder / "script.py"
    script.write_text(code)
    return subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)


def test_foreign_package_imported_before_is_named(tmp_path: Path) -> None:
    done = run(tmp_path, "import shared\nassert shared.helper == 1\nimport murmur\n")
    assert done.returncode == 1
    message = done.stderr.splitlines()[-1]
    assert message.startswith("ImportError: murmur needs its own package 'shared'")
    assert f"imported from {tmp_path / 'shared'} before: rename that one" in message


@pytest.mark.parametrize("line", ["import shared.process.errors", "import shared"])
def test_own_package_imported_before_is_welcome(tmp_path: Path, line: str) -> None:
    script = "import sys; sys.path = [p for p in sys.path if p != sys.path[0]]\n"
    done = run(tmp_path, f"{script}{line}\nimport murmur\nprint(murmur.MurmurError.__module__)\n")
    assert (done.returncode, done.stdout) == (0, "shared.process.errors\n"), done.stderr


def test_folder_with_such_a_package_comes_last(tmp_path: Path) -> None:
    done = run(tmp_path, "import murmur\nprint(murmur.MurmurError.__module__)\n")
    assert (done.returncode, done.stdout) == (0, "shared.process.errors\n"), done.stderr

"""A user's package that is called as one of murmur's was, or as a folder of the checkout is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def own(folder: Path, kind: str) -> None:
    """Write a user's `shared`: a package, a folder without __init__.py, or a module."""
    if kind == "module":
        (folder / "shared.py").write_text("helper = 1\n")
        return
    package = folder / "shared"
    package.mkdir()
    if kind == "package":
        (package / "__init__.py").write_text("helper = 1\n")
    (package / "maps.py").write_text("size = 8\n")


def run(folder: Path, code: str, **variables: str) -> str:
    """Run a script that lies in a folder; return what it printed."""
    script = folder / "script.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | variables,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("kind", ["package", "folder", "module"])
@pytest.mark.parametrize("order", ["shared, murmur", "murmur, shared"])
@pytest.mark.parametrize("root", ["last", "first"])
def test_a_users_shared_is_the_users(kind: str, order: str, root: str, tmp_path: Path) -> None:
    """Also where the checkout's root comes before the user's folder on sys.path."""
    own(tmp_path, kind)
    paths = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n" if root == "first" else ""
    use = {
        "package": "from shared import helper, maps",
        "folder": "from shared import maps",
        "module": "from shared import helper",
    }[kind]
    code = f"{paths}import {order}\n{use}\nprint(murmur.MurmurError.__module__)\n"
    assert run(tmp_path, code) == "murmur.shared.process.errors\n"


def test_a_plugin_folder_may_hold_a_package_of_any_name(tmp_path: Path) -> None:
    """Plug-in folders are not on sys.path, and asked before old names are."""
    plugins = tmp_path / "plugins"
    plugins.mkdir()
    own(plugins, "package")
    (plugins / "walk.py").write_text("from shared import helper\nfrom shared.maps import size\n")
    look = (
        "from murmur.shared.config.plugin_folders import look_in\n"
        f"look_in([{str(plugins)!r}], ['walk:Walk'])\n"
        "import walk\nprint(walk.helper, walk.size)\n"
    )
    assert run(tmp_path, look) == "1 8\n"


def test_murmur_takes_no_other_top_level_name(tmp_path: Path) -> None:
    code = (
        "import sys, murmur\nbefore = list(sys.path)\n"
        "import murmur.api, murmur.learner_service.run, murmur.env_service.app\n"
        "print(sorted({'shared', 'env_service', 'learner_service'} & set(sys.modules)))\n"
        "print(before == sys.path)\n"
    )
    assert run(tmp_path, code) == "[]\nTrue\n"

"""Search path of `module:Name`: installed packages, then the plug-in folders.

The folders are those of `run.plugin_folders`, then the working directory. They are not on sys.path:
only modules that a configuration names, and imports of code in these folders, are found there. So
no file of the user's hides murmur's packages or a library, or runs because a library looks for an
optional module of its name.
"""

import contextlib
import hashlib
import importlib
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from multiprocessing import spawn
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from murmur.shared.old_names import HANDING_OVER, OLD_NAMES

# package.module:Name or module:Class.method
NAMED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.\w+)*")
# Also what Gymnasium imports for its id "module:Name-v0".
_MODULE_AND_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\S*")

_folders: list[str] = []  # where modules are looked for
_known_folders: set[str] = set()  # of the configurations that this process has read
_allowed: set[str] = set()  # what the configurations name that this process has read
_named: set[str] = set()  # top-level modules of what is named
_found: set[str] = set()  # top-level modules that were found in the folders
_INSTALLED = tuple(
    os.path.join(sysconfig.get_path(kind), "")
    for kind in ("stdlib", "platstdlib", "purelib", "platlib")
)


def is_named(value: object) -> bool:
    """Return whether a value of the configuration names code, as package.module:Name."""
    return isinstance(value, str) and NAMED.fullmatch(value) is not None


def named_code(value: object) -> list[str]:
    """Return all code that a part of the configuration names, at any depth."""
    if isinstance(value, Mapping):
        return [name for pair in value.items() for item in pair for name in named_code(item)]
    if isinstance(value, list | tuple):
        return [name for item in value for name in named_code(item)]
    return [value] if isinstance(value, str) and _MODULE_AND_NAME.fullmatch(value) else []


class _Finder:
    """Finder of modules in the plug-in folders, after all other finders."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a top-level module that is named, or that code from the folders imports."""
        if path is not None or not (name in _named or _imported_from_folders()):
            return None
        spec = PathFinder.find_spec(name, _folders, target)
        if spec is not None:
            _found.add(name)
        return spec


def _imported_from_folders() -> bool:
    """Return whether code from the folders imports, by a statement or by import_module."""
    frame: FrameType | None = sys._getframe(2)
    by_name = False
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] in _found:
            return True
        if module.startswith("importlib"):
            by_name |= frame.f_code.co_name == "import_module"
        elif not by_name and module not in HANDING_OVER:
            return False
        frame = frame.f_back
    return False


_prepare = spawn.get_preparation_data


def _preparation_data(name: str) -> dict[str, Any]:
    """Let processes that a plug-in starts by multiprocessing find its module, as by sys.path."""
    data: dict[str, Any] = _prepare(name)
    if _found:
        data["sys_path"] = [*data["sys_path"], *_folders]
    return data


def plugin_files(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Find the files of code that a configuration names. Imports nothing.

    Args:
        names: package.module:Name each.

    Returns:
        name of a module -> its "file" and "sha256"; a package's digest covers all files in its
        folder.
    """
    found = {}
    for module in dict.fromkeys(name.partition(":")[0] for name in names):
        places = [Path(x, *module.split(".")) for x in dict.fromkeys([*sys.path, *_folders])]
        files = [file for x in places for file in (x / "__init__.py", x.with_suffix(".py"))]
        file = next((file for file in files if file.is_file()), None)
        if file is None:
            continue
        digest = hashlib.sha256()
        for part in sorted(file.parent.glob("*.py")) if file.stem == "__init__" else [file]:
            with contextlib.suppress(OSError):
                digest.update(part.name.encode() + b"\0" + part.read_bytes())
        found[module] = {"file": str(file.resolve()), "sha256": digest.hexdigest()}
    return found


def look_in(folders: Iterable[str] = (), names: Iterable[str] = ()) -> None:
    """Set the plug-in folders; the working directory is added.

    Args:
        folders: absolute paths.
        names: code that the configuration with these folders names; see `refused_code`.
    """
    folders, names = list(folders), list(names)
    _folders[:] = dict.fromkeys([*folders, *_working_directory()])
    _known_folders.update(folders)
    _allowed.update(names)
    _named.clear()
    for name in names:
        expect(name)
    if _Finder not in sys.meta_path:
        # After all others but that of old names, which are free for the user's own packages.
        sys.meta_path.insert(sys.meta_path.index(OLD_NAMES), _Finder)
        spawn.get_preparation_data = _preparation_data
    importlib.invalidate_caches()


def expect(name: str) -> None:
    """Let the module of package.module:Name be found in the folders."""
    _named.add(name.partition(":")[0].partition(".")[0])


def folders_in_use() -> list[str]:
    """Return the folders that are searched, which include the working directory."""
    return list(dict.fromkeys([*_folders, *_working_directory()]))


def _working_directory() -> list[str]:
    """Return the working directory in a list; an empty list if it was deleted."""
    try:
        return [os.getcwd()]
    except OSError:
        return []


def refused_code(name: str, folders: Iterable[str] = ()) -> str:
    """Give the reason to refuse code that a checkpoint names; "" if it may be imported.

    Code may be imported if this process has read a configuration that names it, or has imported
    its module and that is the user's own: a checkpoint alone runs no code. An imported module of a
    library does not count: others import it too, and its functions can do anything.

    Args:
        name: package.module:Name.
        folders: run.plugin_folders of the checkpoint.
    """
    module = name.partition(":")[0]
    if _is_own(module) or (name in _allowed and _known_folders.issuperset(folders)):
        return ""
    library = module.partition(".")[0] in sys.modules
    otherwise = "" if library else f", or import {module} first"
    return (
        "which no configuration here names: a checkpoint alone runs no code; load its run's folder "
        f"or a configuration that names it{otherwise}"
    )


def _is_own(module: str) -> bool:
    """Return whether a module is imported and neither murmur's nor installed: the user's own."""
    found = sys.modules.get(module)
    file = getattr(found, "__file__", None) or ""
    installed = file.startswith(_INSTALLED) or "-packages" in file
    # By an old name, too, a module of murmur's has its new name.
    own = found is not None and found.__name__.partition(".")[0] != "murmur"
    return bool(file) and not installed and own

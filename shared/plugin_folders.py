"""Where `module:Name` is looked for: among installed packages, then in these folders.

The folders are those of `run.plugin_folders`, then the working directory. They stand at the end of
sys.path, so that no file of the user's hides murmur's packages or a library. Worker processes start
with their parent's sys.path.
"""

import contextlib
import hashlib
import importlib
import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

# package.module:Name or module:Class.method
NAMED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.\w+)*")

_at_end: list[str] = []  # what this module has put at the end of sys.path
_allowed: set[str] = set()  # what the configurations name that this process has read


def is_named(value: object) -> bool:
    """Whether a value of the configuration names code, as package.module:Name."""
    return isinstance(value, str) and NAMED.fullmatch(value) is not None


def named_code(value: object) -> list[str]:
    """All that a part of the configuration names as package.module:Name, however deep."""
    if isinstance(value, Mapping):
        return [name for item in value.values() for name in named_code(item)]
    if isinstance(value, list | tuple):
        return [name for item in value for name in named_code(item)]
    return [str(value)] if is_named(value) else []


def plugin_files(value: object) -> dict[str, dict[str, str]]:
    """Find the files of all code that a part of the configuration names; imports nothing.

    Returns:
        name of a module -> its "file", and the "sha256" of it, of a package that of all its files
        in that folder.
    """
    found = {}
    for module in dict.fromkeys(name.partition(":")[0] for name in named_code(value)):
        parts = module.split(".")
        for folder in map(Path, sys.path):
            single, package = (
                folder.joinpath(*parts).with_suffix(".py"),
                folder.joinpath(*parts, "__init__.py"),
            )
            whole = package.is_file()
            if not whole and not single.is_file():
                continue
            file = package if whole else single
            digest = hashlib.sha256()
            for part in sorted(file.parent.glob("*.py")) if whole else [file]:
                with contextlib.suppress(OSError):
                    digest.update(part.name.encode() + b"\0" + part.read_bytes())
            found[module] = {"file": str(file.resolve()), "sha256": digest.hexdigest()}
            break
    return found


def look_in(folders: Iterable[str] = (), names: Iterable[str] = ()) -> None:
    """Look in these folders and the working directory from now on, and nowhere else of one's own.

    Args:
        folders: absolute.
        names: what the configuration that has these folders names; see `is_allowed`.
    """
    for path in _at_end:
        if path in sys.path:
            sys.path.remove(path)
    wanted = dict.fromkeys([*folders, os.getcwd()])
    _at_end[:] = [path for path in wanted if path not in sys.path]
    sys.path.extend(_at_end)
    _allowed.update(names)
    importlib.invalidate_caches()


def folders_in_use() -> list[str]:
    """The folders that are looked in; the working directory is always one of them."""
    return list(dict.fromkeys([*_at_end, os.getcwd()]))


def is_allowed(name: str) -> bool:
    """Whether code that a checkpoint names may be imported.

    It may if this process has read a configuration that names it, or has imported its module: a
    checkpoint alone makes nothing run.
    """
    return name in _allowed or name.partition(":")[0] in sys.modules

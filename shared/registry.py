"""Plug-ins by name: a module in a folder, or an entry point of an installed package."""

import pkgutil
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import entry_points
from types import ModuleType

from shared.errors import ConfigError


def plugin_names(folder: str, group: str) -> list[str]:
    """Names of all plug-ins of a kind.

    Args:
        folder: the package whose modules are plug-ins, for example "env_service.envs"; the modules
            that its SUPPORT names are not.
        group: the entry-point group for packages outside, for example "murmur.environments".
    """
    return sorted(_inside(folder) | {e.name for e in entry_points(group=group)})


def _inside(folder: str) -> set[str]:
    package = import_module(folder)
    names = {m.name for m in pkgutil.iter_modules(package.__path__)}
    return names - getattr(package, "SUPPORT", set())


def load_plugin(folder: str, group: str, name: str) -> ModuleType:
    """Import the plug-in of that name: one of the folder, else one of an installed package.

    Installed packages are only looked through for names that the folder has not: that takes many
    milliseconds.

    Raises:
        ConfigError: if there is none, naming those there are.
    """
    if name in _inside(folder):
        return import_module(f"{folder}.{name}")
    for entry in entry_points(group=group):
        if entry.name == name:
            module: ModuleType = entry.load()
            return module
    known = plugin_names(folder, group)
    close = get_close_matches(name, known, 1)
    hint = f"did you mean '{close[0]}'? " if close else ""
    raise ConfigError(
        f"no {group.removeprefix('murmur.').rstrip('s')} '{name}'; {hint}known: " + ", ".join(known)
    )

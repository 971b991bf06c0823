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
        folder: the package whose modules are plug-ins, for example "env_service.envs".
        group: the entry-point group for packages outside, for example "murmur.environments".
    """
    inside = [m.name for m in pkgutil.iter_modules(import_module(folder).__path__)]
    outside = [e.name for e in entry_points(group=group)]
    return sorted({name for name in inside if not name.startswith("_")} | set(outside))


def load_plugin(folder: str, group: str, name: str) -> ModuleType:
    """Import the plug-in of that name.

    Raises:
        ConfigError: if there is none, naming those there are.
    """
    known = plugin_names(folder, group)
    if name not in known:
        close = get_close_matches(name, known, 1)
        hint = f"did you mean '{close[0]}'? " if close else ""
        raise ConfigError(
            f"no {group.removeprefix('murmur.').rstrip('s')} '{name}'; {hint}known: "
            + ", ".join(known)
        )
    for entry in entry_points(group=group):
        if entry.name == name:
            module: ModuleType = entry.load()
            return module
    return import_module(f"{folder}.{name}")

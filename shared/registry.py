"""Plug-ins by name: a module in a folder, an entry point of an installed package, module:Name."""

import logging
import pkgutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from pydantic import BaseModel, Field, create_model
from pydantic.fields import FieldInfo

from shared.errors import ConfigError, MurmurError
from shared.named_plugin import named_plugin, require_module
from shared.plugin_folders import folders_in_use
from shared.traces import error_message, place_of

logger = logging.getLogger("murmur")


@dataclass(frozen=True)
class Variant:
    """A plug-in that differs from another one of its folder only in options.

    Attributes:
        of: name of the other plug-in.
        doc: docstring of this one.
        fixed: option -> (its only allowed value, description).
        defaults: option -> default that replaces the other plug-in's.
    """

    of: str
    doc: str
    fixed: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)


@contextmanager
def plugin_failures(what: str) -> Iterator[None]:
    """Turn an exception of a plug-in's code into a ConfigError, as no restart fixes it.

    Args:
        what: name of the plug-in for the message, such as "network 'attention'".

    Raises:
        ConfigError: for any exception but murmur's own and lack of memory.
    """
    try:
        yield
    except (MurmurError, MemoryError):
        raise
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError":  # torch's, which shared does not know
            raise
        logger.info("%s failed", what, exc_info=True)
        raise ConfigError(
            f"{what} failed: {error_message(error)} ({place_of(error)}); correct it, its "
            "traceback is in the log"
        ) from error


def plugin_names(folder: str, group: str) -> list[str]:
    """Return the names of all plug-ins of a kind, sorted.

    Args:
        folder: package with a module per plug-in, such as "env_service.envs". Modules in its
            SUPPORT are no plug-ins; its VARIANTS, if any, are plug-ins, too. Its KNOWN_AS and
            NEAREST map other names to the options to write instead.
        group: entry-point group of external packages, such as "murmur.environments".
    """
    return sorted(_inside(folder) | {e.name for e in entry_points(group=group)})


def _inside(folder: str) -> set[str]:
    package = import_module(folder)
    names = {m.name for m in pkgutil.iter_modules(package.__path__)}
    return names - getattr(package, "SUPPORT", set()) | getattr(package, "VARIANTS", {}).keys()


@cache
def _variant(folder: str, name: str) -> ModuleType:
    """Make a plug-in's module from an entry of the folder's VARIANTS."""
    variant: Variant = import_module(folder).VARIANTS[name]
    base = import_module(f"{folder}.{variant.of}")
    inherited: dict[str, FieldInfo] = base.Config.model_fields
    options: dict[str, Any] = {
        option: (Literal[value], Field(value, description=description))
        for option, (value, description) in variant.fixed.items()
    }
    for option, value in variant.defaults.items():
        known = inherited[option]
        options[option] = (known.annotation, FieldInfo.merge_field_infos(known, default=value))
    module = ModuleType(f"{folder}.{name}", variant.doc)
    vars(module).update({key: value for key, value in vars(base).items() if key.isupper()})
    config: type[BaseModel] = create_model(
        "Config", __base__=base.Config, __doc__=f"Options of {name}.", **options
    )
    vars(module).update({"Config": config, "build": base.build})
    return module


def load_plugin(folder: str, group: str, name: str) -> ModuleType:
    """Import the plug-in of that name: one of the folder, else one of an installed package.

    package.module:Name names a class or function that is a plug-in by itself: see named_plugin.
    Installed packages are searched only for names that the folder lacks, which takes many
    milliseconds.

    Raises:
        ConfigError: if there is none, naming the known ones.
    """
    if ":" in name:
        return named_plugin(_kind(group), name)
    if name in getattr(import_module(folder), "VARIANTS", {}):
        return _variant(folder, name)
    if name in _inside(folder):
        return import_module(f"{folder}.{name}")
    for entry in entry_points(group=group):
        if entry.name == name:
            with plugin_failures(f"{_kind(group)} '{name}'"):
                module: ModuleType = entry.load()
            return module
    raise _unknown(folder, group, name)


def require_plugin(folder: str, group: str, name: str) -> None:
    """Check that there is a plug-in of that name, without importing it.

    Raises:
        ConfigError: if there is none, naming the known ones.
    """
    if ":" in name:
        require_module(_kind(group), name)
    elif name not in _inside(folder) and name not in plugin_names(folder, group):
        raise _unknown(folder, group, name)


def _kind(group: str) -> str:
    """Return the kind of a group's plug-ins: "environment", "source", "algorithm", "network"."""
    return group.removeprefix("murmur.").rstrip("s")


def _unknown(folder: str, group: str, name: str) -> ConfigError:
    kind = _kind(group)
    known = plugin_names(folder, group)
    return ConfigError(
        f"no {kind} '{name}'; {_hint(folder, kind, name, known)}known: {', '.join(known)}"
    )


def _hint(folder: str, kind: str, name: str, known: list[str]) -> str:
    """Suggest a correction of an unknown name, ending in "; " or "? "; "" if there is none."""
    package = import_module(folder)
    plain = name.lower().replace("-", "").replace("_", "")
    same: dict[str, Any] | None = getattr(package, "KNOWN_AS", {}).get(plain)
    near: dict[str, Any] | None = getattr(package, "NEAREST", {}).get(plain)
    if options := same or near:
        written = ", ".join(f"{key}: {_yaml(value)}" for key, value in options.items())
        what = f"{name} is" if same else "it is not built here; the nearest is"
        return f"{what} {kind}: {{{written}}}; "
    by_lower = {other.lower(): other for other in known}
    close = get_close_matches(name.lower(), by_lower, 1)
    if close:
        return f"did you mean '{by_lower[close[0]]}'? "
    module = name.removesuffix(".py")
    files = [Path(here) / f"{module}.py" for here in folders_in_use()]
    file = next((f for f in files if module.isidentifier() and f.is_file()), None)
    return f"for a class in {file} write {module}:CLASS; " if file else ""


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)

"""Plug-ins by name: a module in a folder, an entry point of an installed package, module:Name."""

import logging
import pkgutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Self

from pydantic import BaseModel, Field, create_model
from pydantic.fields import FieldInfo

from murmur.shared.config.named_plugin import named_plugin, require_module
from murmur.shared.config.plugin_folders import folders_in_use
from murmur.shared.config.section import PluginConfig, known_names, nearest, validate
from murmur.shared.config.text import one_line
from murmur.shared.process.errors import ConfigError, MurmurError
from murmur.shared.process.traces import error_message, place_of

logger = logging.getLogger("murmur")

# Kind -> package with a module per plug-in, and entry-point group of external packages. A package's
# SUPPORT are modules that are no plug-ins, its VARIANTS are plug-ins too. Its KNOWN_AS and NEAREST
# map other names to the options to write instead.
KINDS: Mapping[str, tuple[str, str]] = {
    "environment": ("murmur.env_service.envs", "murmur.environments"),
    "source": ("murmur.env_service.sources", "murmur.sources"),
    "algorithm": ("murmur.learner_service.algorithms", "murmur.algorithms"),
    "network": ("murmur.learner_service.networks", "murmur.networks"),
}


@dataclass(frozen=True)
class Plugin:
    """A plug-in that is loaded.

    Attributes:
        kind: key of KINDS, and its section in the configuration.
        name: its name.
        module: its module, or what stands for one: see named_plugin.
        options: its options, checked: a model of its own.
    """

    kind: str
    name: str
    module: ModuleType
    options: Any

    @property
    def own(self) -> bool:
        """Return whether it comes with murmur."""
        return self.module.__name__.startswith(KINDS[self.kind][0])

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return the plug-in itself, for copies of what holds it: modules cannot be copied."""
        return self


@dataclass(frozen=True)
class Variant:
    """A plug-in that differs from another one of its folder only in options.

    Attributes:
        of: name of the other plug-in.
        doc: docstring of this one.
        fixed: option -> (its only allowed value, description).
        defaults: option -> default that replaces the other plug-in's; of a section's options, a
            mapping of these.
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


def plugin_names(kind: str) -> list[str]:
    """Return the names of all plug-ins of a kind, sorted."""
    folder, group = KINDS[kind]
    return sorted(_inside(folder) | {e.name for e in entry_points(group=group)})


def _inside(folder: str) -> set[str]:
    package = import_module(folder)
    names = {m.name for m in pkgutil.iter_modules(package.__path__)}
    return names - getattr(package, "SUPPORT", set()) | getattr(package, "VARIANTS", {}).keys()


def _with_default(known: FieldInfo, value: Any) -> tuple[Any, FieldInfo]:  # noqa: ANN401
    """Return the type and the field of an option whose default changes.

    A section becomes one with other defaults, so that they hold for a configuration that sets some
    of its options.
    """
    kind: Any = known.annotation
    if isinstance(value, Mapping):
        changed: dict[str, Any] = {
            name: _with_default(kind.model_fields[name], x) for name, x in value.items()
        }
        kind = create_model(kind.__name__, __base__=kind, __doc__=kind.__doc__, **changed)
        value = kind()
    return kind, FieldInfo.merge_field_infos(known, annotation=kind, default=value)


def variant_config(variant: Variant, base: type[BaseModel], name: str) -> type[BaseModel]:
    """Return the options of a variant.

    Args:
        variant: entry of a folder's VARIANTS.
        base: options of the plug-in that it differs from.
        name: name of the variant.
    """
    options: dict[str, Any] = {
        option: (Literal[value], Field(value, description=description))
        for option, (value, description) in variant.fixed.items()
    }
    for option, value in variant.defaults.items():
        options[option] = _with_default(base.model_fields[option], value)
    return create_model("Config", __base__=base, __doc__=f"Options of {name}.", **options)


@cache
def _variant(folder: str, name: str) -> ModuleType:
    """Make a plug-in's module from an entry of the folder's VARIANTS."""
    variant: Variant = import_module(folder).VARIANTS[name]
    base = import_module(f"{folder}.{variant.of}")
    module = ModuleType(f"{folder}.{name}", variant.doc)
    vars(module).update({key: value for key, value in vars(base).items() if key.isupper()})
    config = variant_config(variant, base.Config, name)
    vars(module).update({"Config": config, "build": base.build})
    return module


def load_plugin(kind: str, name: str) -> ModuleType:
    """Import the plug-in of that name: one of murmur's, else one of an installed package.

    package.module:Name names a class or function that is a plug-in by itself: see named_plugin.
    Installed packages are searched only for names that murmur lacks, which takes many milliseconds.

    Raises:
        ConfigError: if there is none, naming the known ones.
    """
    folder, group = KINDS[kind]
    if ":" in name:
        return named_plugin(kind, name)
    if name in getattr(import_module(folder), "VARIANTS", {}):
        return _variant(folder, name)
    if name in _inside(folder):
        return import_module(f"{folder}.{name}")
    for entry in entry_points(group=group):
        if entry.name == name:
            with plugin_failures(f"{kind} '{name}'"):
                module: ModuleType = entry.load()
            return module
    raise _unknown(kind, name)


def resolve_plugin(kind: str, config: PluginConfig) -> Plugin:
    """Load the plug-in that a section names, and check its options.

    Raises:
        ConfigError: for an unknown plug-in or option, or a wrong value.
    """
    module = load_plugin(kind, config.name)
    return Plugin(kind, config.name, module, validate(module.Config, config.options, kind))


def require_plugin(kind: str, name: str) -> None:
    """Check that there is a plug-in of that name, without importing it.

    Raises:
        ConfigError: if there is none, naming the known ones.
    """
    if ":" in name:
        require_module(kind, name)
    elif name not in _inside(KINDS[kind][0]) and name not in plugin_names(kind):
        raise _unknown(kind, name)


def _unknown(kind: str, name: str) -> ConfigError:
    known = plugin_names(kind)
    hint = _hint(kind, name, known)
    return ConfigError(f"no {kind} '{name}'; {hint or known_names(name, known, 'murmur list')}")


def _hint(kind: str, name: str, known: list[str]) -> str:
    """Explain a name that other libraries use, or that a file here has; "" if it is another."""
    package = import_module(KINDS[kind][0])
    plain = name.lower().replace("-", "").replace("_", "")
    same: dict[str, Any] | None = getattr(package, "KNOWN_AS", {}).get(plain)
    near: dict[str, Any] | None = getattr(package, "NEAREST", {}).get(plain)
    if options := same or near:
        what = f"{name} is" if same else "it is not built here; the nearest is"
        return f"{what} {kind}: {one_line(options)}"
    if nearest(name, known, 1):
        return ""
    module = name.removesuffix(".py")
    files = [Path(here) / f"{module}.py" for here in folders_in_use()]
    file = next((f for f in files if module.isidentifier() and f.is_file()), None)
    return f"for a class in {file} write {module}:CLASS" if file else ""

"""A plug-in named as package.module:Name, in the shape of a plug-in's module.

    class Attention(nn.Module):
        class Config(Section):                       options of the configuration
            width: int = 64
        def __init__(self, config, shape, num_outputs, slices): ...

`Name`, a class or a function, is called with what a plug-in module's `build` or `make` is called
with. Without a `Config` of its own its further parameters are its options:

        def __init__(self, shape, num_outputs, slices, width: int = 64): ...

Names in capitals, such as STACKED and BASELINES, are those of a plug-in's module.
"""

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from operator import attrgetter
from types import ModuleType
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, create_model, field_validator

from murmur.shared.config.import_advice import hidden_advice, import_advice
from murmur.shared.config.plugin_folders import expect, is_named
from murmur.shared.config.section import Section
from murmur.shared.process.errors import ConfigError
from murmur.shared.process.traces import error_message, place_of

# What `Name` is called with, after the options if it has a Config.
CALLED_WITH: Mapping[str, tuple[str, ...]] = {
    "environment": ("num_envs",),
    "source": (),
    "algorithm": ("spec", "network", "precision", "device", "seed"),
    "network": ("shape", "num_outputs", "slices"),
    "dense network": ("size", "num_classes"),
    "baseline": ("environment",),
    "augmentation": ("device",),
}
_PLAIN = (bool, int, float, str, list, tuple, dict, type(None))  # what YAML can say
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class _Closed(Section):
    """Options of a plug-in with named parameters: any values that YAML has."""

    model_config = ConfigDict(
        arbitrary_types_allowed=True, protected_namespaces=(), allow_inf_nan=True
    )

    @field_validator("*")
    @classmethod
    def _in_range(cls, value: object, info: ValidationInfo) -> object:
        """Accept any number, because only the plug-in knows its range."""
        return value


class _Open(_Closed):
    """Options of a plug-in that accepts any keyword."""

    model_config = ConfigDict(frozen=True, extra="allow")


def find_object(path: str, missing: Callable[[Any, str], str] = lambda owner, part: "") -> Any:  # noqa: ANN401
    """Import the object that "package.module:Name" names.

    Args:
        path: package.module:Name; Name may have dots.
        missing: function of an object and the part of the name that it lacks; returns the advice
            to give, or "".

    Raises:
        ConfigError: if the module cannot be imported or lacks the name, naming the fix.
    """
    module_name, _, name = path.partition(":")
    if not is_named(path) and not module_name.endswith(".py"):
        raise ConfigError(f"'{path}': write it as package.module:Name")
    if module_name.endswith(".py"):
        dotted = module_name.removesuffix(".py").replace("/", ".").strip(".")
        raise ConfigError(f"'{module_name}' is a file; write {dotted}:{name}")
    if module_name == "__main__":
        raise ConfigError(
            f"'{path}' is of a notebook or script, where no other process finds it; move it to a "
            f"file beside it and write FILE:{name}"
        )
    expect(path)
    try:
        found = _import(module_name)
    except ImportError as error:
        raise ConfigError(import_advice(module_name, error)) from None
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"importing '{module_name}' raised {error_message(error)} ({place_of(error)})"
        ) from error
    for part in name.split("."):
        if not hasattr(found, part):
            if message := missing(found, part) or hidden_advice(module_name.partition(".")[0]):
                raise ConfigError(f"'{module_name}' has no '{part}': {message}")
            close = get_close_matches(part, dir(found), 1)
            hint = f"; did you mean '{close[0]}'?" if close else ""
            raise ConfigError(f"'{module_name}' has no '{part}'{hint}")
        found = getattr(found, part)
    return found


def _import(module_name: str) -> Any:  # noqa: ANN401
    """Import a module, or an attribute of a package that is named like a module.

    Raises:
        ImportError: if neither exists, as from `import_module`.
    """
    try:
        return import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        parent = missing.rpartition(".")[0]
        if not parent or not f"{module_name}.".startswith(f"{missing}."):
            raise
        with suppress(AttributeError):
            return attrgetter(module_name.removeprefix(f"{parent}."))(import_module(parent))
        raise


def named_plugin(kind: str, name: str) -> ModuleType:
    """Make a plug-in's module of the object named: Config, build, make, names in capitals.

    Args:
        kind: key of CALLED_WITH.
        name: package.module:Name.

    Raises:
        ConfigError: if it cannot be imported or called so, naming it and the fix.
    """
    try:
        target = find_object(name)
        if not callable(target):
            raise ConfigError(f"it is a {type(target).__name__}; name a class or a function")
        return _as_module(kind, name, target)
    except ConfigError as error:
        raise ConfigError(f"{kind} '{name}': {error}") from error.__cause__


def require_module(kind: str, name: str) -> None:
    """Check that the package of package.module:Name exists, without importing it.

    Raises:
        ConfigError: if it does not exist, naming the folders that were searched.
    """
    top = name.partition(":")[0].partition(".")[0]
    expect(name)
    if not is_named(name) or top == "__main__" or find_spec(top) is None:
        named_plugin(kind, name)  # says what is wrong


@cache
def _as_module(kind: str, name: str, target: Any) -> ModuleType:  # noqa: ANN401
    if kind == "network" and getattr(target, "DENSE", False):
        kind = "dense network"
    module = ModuleType(name, getattr(target, "__doc__", None))
    vars(module).update({key: getattr(target, key) for key in dir(target) if key.isupper()})
    own = getattr(target, "Config", None)
    if own is not None and not (isinstance(own, type) and issubclass(own, BaseModel)):
        raise ConfigError("its Config is no model; derive it from murmur.shared.config.Section")
    options = _options_of(target, CALLED_WITH[kind], own)

    def build(config: BaseModel, *given: object) -> Any:  # noqa: ANN401 - whatever it makes
        if own is not None:
            return target(config, *given)
        return target(*given, **dict(config))  # options beyond the fields, too

    vars(module).update({"Config": options, "build": build, "make": build})
    return module


def _parameters(target: Any) -> list[inspect.Parameter] | None:  # noqa: ANN401
    """Return the parameters of a class or function; None if Python does not know them."""
    for evaluated in (True, False):  # annotations may be text that names what is not there
        try:
            return list(inspect.signature(target, eval_str=evaluated).parameters.values())
        except (TypeError, ValueError, NameError, AttributeError):
            continue
    return None


def _options_of(
    target: Any,  # noqa: ANN401 - a class or function
    given: tuple[str, ...],
    own: type[BaseModel] | None,
) -> type[BaseModel]:
    """Return the model of an object's options: its own Config, or one of its further parameters.

    Args:
        target: class or function.
        given: names of what it is called with, beside its options.
        own: its Config; None: it has none.

    Raises:
        ConfigError: if it cannot be called so, naming its parameters and those it needs.
    """
    parameters = _parameters(target)
    if parameters is None:
        return own or create_model("Config", __base__=_Open)
    called_with = ("config", *given) if own else given
    positional = [p for p in parameters if p.kind in _POSITIONAL]
    further = positional[len(called_with) :]
    any_number = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    missing = len(positional) < len(called_with) and not any_number
    if missing or (own and any(p.default is p.empty for p in further)):
        takes = ", ".join(str(p).partition(":")[0].strip() for p in parameters)
        options = "" if own else " and then its options"
        names = ", ".join(called_with)
        raise ConfigError(f"it takes ({takes}); it is called with ({names}){options}")
    if own:
        return own
    fields: dict[str, Any] = {}
    for p in [*further, *(p for p in parameters if p.kind is p.KEYWORD_ONLY)]:
        required = p.default is p.empty
        settable = p.name != "name" and not p.name.startswith("_")
        if settable and (required or isinstance(p.default, _PLAIN)):
            kind = Any if p.annotation is p.empty or isinstance(p.annotation, str) else p.annotation
            fields[p.name] = (kind, ... if required else p.default)
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return create_model("Config", __base__=_Open if anything else _Closed, **fields)

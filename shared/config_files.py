"""Files of configurations: found by name, read on top of what they extend, changed by items."""

import contextlib
import logging
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from shared.errors import ConfigError
from shared.yaml_text import MAX_BYTES, parse_yaml, short

logger = logging.getLogger("murmur")

_HERE = Path(__file__).resolve().parent.parent
CONFIG_DIRS = (_HERE / "configs", _HERE / "murmur" / "configs")
PLUGINS = ("environment", "source", "algorithm", "network")  # sections that name one

# What PyYAML raises: the others come of text that is no UTF-8, of dates and numbers that cannot
# be, and of brackets in brackets.
NO_YAML = (yaml.YAMLError, ValueError, RecursionError)


def config_names() -> list[str]:
    """Names of the configurations that come with murmur."""
    return sorted({p.stem for d in CONFIG_DIRS if d.is_dir() for p in d.glob("*.yaml")})


def find_config(name: str) -> Path:
    """The file of a configuration, given as a path or as the name of one that comes with murmur.

    Raises:
        ConfigError: if there is none, naming those there are.
    """
    own = name.replace("_", "-")
    for path in (Path(name), *(folder / f"{own}.yaml" for folder in CONFIG_DIRS)):
        # Python's own answer to a name that no file can have is an exception.
        with contextlib.suppress(OSError, ValueError):
            if path.is_file():
                return path
    raise ConfigError(f"no configuration {short(name)}: {_why_none(name)}")


def _why_none(name: str) -> str:
    """What is wrong with the name of a configuration that does not exist."""
    with contextlib.suppress(OSError, ValueError):
        if (Path(name) / "config.yaml").is_file():
            return (
                "it is the folder of a run; `murmur train --resume --run FOLDER` continues it, "
                "its config.yaml is its configuration"
            )
        if Path(name).is_dir():
            return "it is a folder; give a YAML file"
    if "://" in name:
        return "murmur downloads nothing; save it as a file and give that"
    close = get_close_matches(name.lower().replace("_", "-"), config_names(), 1)
    hint = f"did you mean '{close[0]}'? " if close else ""
    return (
        "neither a file nor one of those that come with murmur; "
        f"{hint}known: {', '.join(config_names())}"
    )


def read_file(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    """A YAML file, on top of the one it extends."""
    if path in seen:
        raise ConfigError(f"{path} extends itself")
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        data = parse_yaml(content.decode(), str(path)) or {}
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except NO_YAML as error:
        raise ConfigError(f"{path} is no valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds a {type(data).__name__}; expected sections of keys")
    base = data.pop("extends", None)
    if base is not None and not isinstance(base, str):
        raise ConfigError(f"{path}: extends is {base!r}; expected the name of a configuration")
    return _merge(read_file(find_config(base), (*seen, path)), data) if base else data


def _merge(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    """`top` over `base`; a plug-in of another name keeps none of the base's options."""
    merged = dict(base)
    for key, value in top.items():
        below = base.get(key)
        if isinstance(value, dict) and isinstance(below, dict):
            other = value.get("name") not in (None, below.get("name"))
            keep = {} if other and key in PLUGINS else below
            merged[key] = _merge(keep, value)
        else:
            merged[key] = value
    return merged


def value_of(text: str, where: str) -> Any:  # noqa: ANN401 - whatever YAML can say
    """A value given as YAML text."""
    try:
        return parse_yaml(text, where)
    except NO_YAML:
        return text


def replace_plugin(data: dict[str, Any], section: str, name: object) -> None:
    """Before a plug-in of another name is set: drop the options of the file's, and say so."""
    below = data.get(section)
    before = below.get("name") if isinstance(below, dict) else None
    if before in (None, name):
        return
    options = ", ".join(key for key in data[section] if key != "name")
    if options:
        logger.warning(
            "%s.name=%s in place of %s, whose options are dropped: %s",
            section,
            name,
            before,
            options,
        )
    data[section] = {"name": before}


def set_value(data: dict[str, Any], path: list[str], value: object, source: str) -> None:
    """Put one value at a dotted path."""
    for part in path[:-1]:
        data = data.setdefault(part, {})
        if not isinstance(data, dict):
            raise ConfigError(f"{source}: '{part}' is a value, not a section")
    data[path[-1]] = value

"""YAML of a configuration: parsed without code, limited in size, values shown short."""

import math
from typing import Any

import yaml

from shared.errors import ConfigError

MAX_BYTES = 1 << 18  # of a configuration file; the largest of murmur's own has 4 KB
MAX_VALUES = 20_000  # of a configuration, each alias counted as what it stands for
_SHOWN = 80  # characters of a wrong value in a message


def parse_yaml(text: str, where: str) -> Any:  # noqa: ANN401 - whatever YAML can say
    """The value of a YAML document of limited size.

    Args:
        text: the document.
        where: the file or option that holds it, for messages.

    Raises:
        ConfigError: if it is too large, also by what its aliases stand for.
        yaml.YAMLError, ValueError, RecursionError: if it is no valid YAML.
    """
    if len(text) > MAX_BYTES:
        raise ConfigError(f"{where} is larger than {MAX_BYTES >> 10} KiB: no configuration is")
    loader = yaml.SafeLoader(text)
    loader.name = where  # errors name it
    try:
        root = loader.get_single_node()
        if root is None:
            return None
        if _count_values(root, {}) > MAX_VALUES:
            raise ConfigError(
                f"{where} holds more than {MAX_VALUES} values, each alias (*name) counted as what "
                "it stands for; remove aliases"
            )
        return without_nul(loader.construct_document(root), where)
    finally:
        loader.dispose()


def _count_values(node: yaml.Node, counted: dict[int, float]) -> float:
    """Values of a YAML node, each alias counted as what it stands for; inf if it holds itself."""
    if not isinstance(node, yaml.CollectionNode):
        return 1
    if id(node) not in counted:
        counted[id(node)] = math.inf  # while it is being counted
        children = [part for item in node.value for part in _parts(item)]
        counted[id(node)] = 1 + sum(_count_values(child, counted) for child in children)
    return counted[id(node)]


def _parts(item: object) -> tuple[Any, ...]:
    """The nodes of a sequence's item, or of a mapping's pair."""
    return item if isinstance(item, tuple) else (item,)


def without_nul(value: Any, where: str) -> Any:  # noqa: ANN401 - whatever YAML can say
    """The same value, if no text in it has a NUL: neither files nor processes can be named so."""
    if isinstance(value, str) and "\0" in value:
        raise ConfigError(f"{where}: {short(value)} contains a NUL character; remove it")
    parts = [*value, *value.values()] if isinstance(value, dict) else value
    if isinstance(parts, list):
        for part in parts:
            without_nul(part, where)
    return value


def short(value: object) -> str:
    """A value as Python writes it, cut to what a message can show."""
    try:
        text = repr(value)
    except ValueError:  # an integer with more digits than Python prints
        return "a number that is too long"
    return text if len(text) <= _SHOWN else text[: _SHOWN - 2] + " …"

"""A configuration as plain data and as YAML text, from which it is read back unchanged.

Values of murmur's own options are written in JSON's types (lists for tuples). Values of plug-in
options keep their types: whole numbers as keys, infinities, dates, sets, bytes, tuples.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, PydanticUserError, ValidationError
from pydantic_core import PydanticSerializationError

from shared.yaml_text import difference, parse_yaml, plain_value, to_yaml

_SAME_IN_JSON = (str, bool, type(None))
_HIDDEN = "***"
_USER_OF_URI = re.compile(r"(?<=://)[^/\s@]+(?=@)")
_SECRET_KEY = re.compile(
    r"(?:^|[._-])(?:password|passwd|secret|token|api_?key|authorization)$", re.I
)


def plain_data(model: BaseModel, where: str = "") -> dict[str, Any]:
    """Return a model's values in types that survive YAML.

    Args:
        model: a section of the configuration, or options of a plug-in.
        where: dotted key of the section, for messages.

    Raises:
        ConfigError: for a value that YAML cannot represent, naming its key.
    """
    raw = model.model_dump()
    data: dict[str, Any] = {}
    for key in raw:
        at, value = f"{where}.{key}".lstrip("."), getattr(model, key)
        data[key] = plain_data(value, at) if isinstance(value, BaseModel) else None
        if data[key] is None:
            data[key] = _as_json(model, key, value, raw[key], at)
    return data


def _as_json(model: BaseModel, key: str, value: object, raw: object, where: str) -> Any:  # noqa: ANN401
    """Return a field's JSON value if it validates to the same value, else the value itself."""
    kind = type(model)
    if key not in kind.model_fields or type(raw) in _SAME_IN_JSON:
        return plain_value(raw, where)
    try:
        said = model.model_dump(mode="json", include={key}, warnings=False)[key]
        own, again = (
            getattr(kind.model_validate({**dict(model), key: x}), key) for x in (value, said)
        )
    except (PydanticSerializationError, PydanticUserError, ValidationError, ValueError, KeyError):
        return plain_value(raw, where)
    return plain_value(said if difference(own, again) is None else raw, where)


def config_text(config: BaseModel) -> str:
    """Return the whole configuration as the text of a file for `murmur train`.

    Raises:
        ConfigError: for a value that YAML cannot represent, naming its key.
    """
    return to_yaml(plain_data(config))


def read_config_text(text: str, where: str) -> dict[str, Any]:
    """Read sections written by `config_text`, or as JSON by a checkpoint of 0.2.

    Raises:
        ConfigError, yaml.YAMLError, ValueError, RecursionError: if it is neither.
    """
    data = json.loads(text) if text.startswith("{") else parse_yaml(text, where)
    if not isinstance(data, dict):
        raise ValueError(f"the configuration of {where} is a {type(data).__name__}")
    return data


def comparable(data: object) -> object:
    """Return the value if JSON preserves it, else its YAML text."""
    try:
        lossless = difference(data, json.loads(json.dumps(data, allow_nan=False))) is None
    except (TypeError, ValueError):
        lossless = False
    return data if lossless else to_yaml({"": data})


def without_secrets(value: Any, key: str = "") -> Any:  # noqa: ANN401 - whatever YAML can say
    """Hide users and passwords in URIs, tokens and keys in a value, for display.

    Args:
        value: section, list or scalar.
        key: name of the value; names such as "api_key" mark secrets.
    """
    if isinstance(value, Mapping):
        return {name: without_secrets(part, str(name)) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(part, key) for part in value]
    if not isinstance(value, str):
        return value
    if value and _SECRET_KEY.search(key):
        return _HIDDEN
    return _USER_OF_URI.sub(_HIDDEN, value)

"""A configuration as plain data and as YAML text, from which it is read back unchanged.

What murmur's own options hold is written as JSON would have it (lists for tuples); what options of
plug-ins hold keeps its types: whole numbers as keys, infinities, dates, sets, bytes, tuples.
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
    """A model's values in types that YAML gives back.

    Args:
        model: a section of the configuration, or options of a plug-in.
        where: dotted key of the section, for messages.

    Raises:
        ConfigError: for a value that YAML cannot say, naming its key.
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
    """A field's value as JSON has it, if validation makes the same of that; else as it is."""
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
    """The whole configuration as a file that `murmur train` takes.

    Raises:
        ConfigError: for a value that YAML cannot say, naming its key.
    """
    return to_yaml(plain_data(config))


def read_config_text(text: str, where: str) -> dict[str, Any]:
    """The sections that `config_text` wrote, or those that a checkpoint of 0.2 has as JSON.

    Raises:
        ConfigError, yaml.YAMLError, ValueError, RecursionError: if it is neither.
    """
    data = json.loads(text) if text.startswith("{") else parse_yaml(text, where)
    if not isinstance(data, dict):
        raise ValueError(f"the configuration of {where} is a {type(data).__name__}")
    return data


def comparable(data: object) -> object:
    """A value as it comes back from JSON; as YAML text if JSON cannot say it."""
    try:
        lossless = difference(data, json.loads(json.dumps(data, allow_nan=False))) is None
    except (TypeError, ValueError):
        lossless = False
    return data if lossless else to_yaml({"": data})


def without_secrets(value: Any, key: str = "") -> Any:  # noqa: ANN401 - whatever YAML can say
    """A value for others to see: without users and passwords in URIs, without tokens and keys.

    Args:
        value: a section, list or scalar.
        key: its name.
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

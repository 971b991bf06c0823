"""YAML of configurations, read without running code and written without loss.

Numbers are YAML 1.2's (1e-3, .5, 0o17), with underscores as in YAML 1.1 (2_000_000); dates and
bytes are YAML 1.1's. Other text that the two versions read differently (010, 12:30, and in options
of plug-ins yes, no, on, off) is refused.
"""

import contextlib
import datetime
import json
import math
import re
from collections.abc import Mapping, Sequence
from os import PathLike, fspath
from typing import Any

import numpy as np
import yaml
from pydantic import BaseModel, PydanticUserError, ValidationError
from pydantic_core import PydanticSerializationError

from murmur.shared.process.errors import ConfigError

_SAME_IN_JSON = (str, bool, type(None))
_NO_JSON = (
    PydanticSerializationError, PydanticUserError, ValidationError, ValueError, KeyError
)  # fmt: skip
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
    kind, data = type(model), dict[str, Any]()
    for key, raw in model.model_dump().items():
        at, value = f"{where}.{key}".lstrip("."), getattr(model, key)
        if isinstance(value, BaseModel):
            data[key] = plain_data(value, at)
            continue
        if key in kind.model_fields and type(raw) not in _SAME_IN_JSON:
            with contextlib.suppress(*_NO_JSON):
                said = model.model_dump(mode="json", include={key}, warnings=False)[key]
                own, again = (
                    getattr(kind.model_validate({**dict(model), key: x}), key)
                    for x in (value, said)
                )
                raw = said if difference(own, again) is None else raw
        data[key] = plain_value(raw, at)
    return data


def read_config_text(text: str, where: str) -> dict[str, Any]:
    """Read sections written by `to_yaml`, or as JSON by a checkpoint of 0.2.

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


MAX_BYTES = 1 << 18  # of a configuration file; the largest of murmur's own has 4 KB
MAX_VALUES = 20_000  # of a configuration, each alias counted as what it stands for
PLUGINS = ("environment", "source", "algorithm", "network")  # sections that name one

# What PyYAML raises: the others come from text that is no UTF-8, of dates and numbers that cannot
# be, and of brackets in brackets.
NO_YAML = (yaml.YAMLError, ValueError, RecursionError)

_SHOWN = 80  # characters of a wrong value in a message
_WIDTH = 100  # of written lists, characters
_TOO_LONG = 10**4000  # Python prints integers of at most 4300 digits
_TAG = "tag:yaml.org,2002:"
_TUPLE = f"{_TAG}python/tuple"  # the name PyYAML writes; no other tag of Python's is read
_SCALARS = (bool, int, float, str, bytes, type(None), datetime.date, datetime.datetime)

# Options of plug-ins: any type may be meant. In a sweep the keys stand under set and vary.
_UNTYPED = re.compile(
    rf"(?:(?:set|vary)\.)?(?:{'|'.join(PLUGINS)}|evaluation\.environment)(?:\.|$)"
)

_WORDS = re.compile("yes|Yes|YES|no|No|NO|on|On|ON|off|Off|OFF")  # booleans of YAML 1.1 alone
_BASE_60 = r"(?::[0-5]?[0-9])+"
_PATTERNS = {
    "bool": rf"true|True|TRUE|false|False|FALSE|{_WORDS.pattern}",
    "null": "~|null|Null|NULL|",
    "int": r"[-+]?(?:[1-9][0-9_]*|0[0-7_]*|0[0-9]*|0x[0-9a-fA-F_]+|0b[01_]+)|0o[0-7_]+"
    rf"|[-+]?[1-9][0-9_]*{_BASE_60}",
    "float": r"[-+]?[0-9][0-9_]*(?:\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[eE][-+]?[0-9]+)"
    r"|[-+]?\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
    rf"|[-+]?[0-9][0-9_]*{_BASE_60}\.[0-9_]*",
    "timestamp": yaml.SafeLoader.timestamp_regexp.pattern.strip("^$"),
    "merge": "<<",
}
_WHOLE = {kind: re.compile(rf"(?:{p})\Z", re.VERBOSE) for kind, p in _PATTERNS.items()}
# Numbers that YAML 1.1 and 1.2 read differently: leading zero, base 60, base 2, signed base 16.
_TWO_NUMBERS = re.compile(r"[-+]?0[0-9_]*[1-9][0-9_]*|.*:.*|[-+]?0b.*|[-+]0x.*")
_BELOW_MICROSECONDS = re.compile(r"\.[0-9]{6}[0-9]*[1-9]")


def is_untyped(keys: str) -> bool:
    """Return whether a dotted key is an option of a plug-in, of a type murmur may not know."""
    return _UNTYPED.match(keys) is not None


def has_untyped_keys(path: Sequence[Any]) -> bool:
    """Return whether the keys below a path may be of any type: those of a plug-in's option.

    Keys of `environment.arguments` are names of parameters.
    """
    keys = path[1:] if path[:1] == ["evaluation"] else path
    names = 2 if keys[1:2] == ["arguments"] else 1
    return len(keys) > names and keys[0] in PLUGINS


class _Loader(yaml.SafeLoader):
    """Loader of this module's YAML. Refuses custom tags, as SafeLoader does."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - as PyYAML has it

    def make_tuple(self, node: yaml.Node) -> tuple[Any, ...]:
        """Read a tuple, which stands for one that Python code put into a configuration."""
        return tuple(self.construct_sequence(node, deep=True))  # type: ignore[arg-type]


class _Dumper(yaml.SafeDumper):
    """Dumper of sections as blocks, lists in one line, every value in full.

    Text that YAML 1.1 or 1.2 would read as another type is put in quotes.
    """

    def ignore_aliases(self, data: object) -> bool:
        """Write no aliases."""
        return True


for _kind, _pattern in _WHOLE.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"{_TAG}{_kind}", _pattern, None)
_Loader.add_constructor(_TUPLE, _Loader.make_tuple)
_Dumper.add_representer(
    list,
    lambda dumper, data: dumper.represent_sequence(f"{_TAG}seq", data, flow_style=True),
)
_Dumper.add_representer(
    tuple, lambda dumper, data: dumper.represent_sequence(_TUPLE, data, flow_style=True)
)


def parse_yaml(text: str, where: str, keys: str = "") -> Any:  # noqa: ANN401 - whatever YAML can say
    """Parse a YAML document of limited size.

    Args:
        text: YAML document.
        where: file or option that holds it, for messages.
        keys: dotted key of the value within a configuration; empty: a whole configuration.

    Raises:
        ConfigError: if the document is too large (aliases expanded), has a key twice, or holds
            text that YAML 1.1 and 1.2 read differently.
        yaml.YAMLError, ValueError, RecursionError: if the document is invalid YAML.
    """
    if len(text) > MAX_BYTES:
        raise ConfigError(f"{where} is larger than {MAX_BYTES >> 10} KiB: no configuration is")
    loader = _Loader(text)
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
        _check(loader, root, where, keys)
        return plain_value(loader.construct_document(root), where)
    finally:
        loader.dispose()


def yaml_trouble(error: Exception) -> str:
    """Say in a few words what one of NO_YAML found, and where in the document."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return " ".join(str(error).split())
    problem = " ".join(str(error.problem).split())  # type: ignore[attr-defined]
    if r"'\t'" in problem:
        problem = "a tab stands where YAML takes spaces alone; indent with spaces"
    begin = getattr(error, "context_mark", None)
    if begin is not None and begin.line != mark.line:
        problem += f", in what begins at line {begin.line + 1}, column {begin.column + 1}"
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}"


def to_yaml(data: Mapping[str, Any] | BaseModel, where: str = "configuration") -> str:
    """Write a YAML document that `parse_yaml` reads as `data`.

    Args:
        data: a configuration, or values of types that `plain_value` accepts.
        where: file or option that gets the document, for messages.

    Raises:
        ConfigError: if a value of `data` would be read as another value, naming its key.
    """
    data = plain_data(data) if isinstance(data, BaseModel) else plain_value(data, where)
    try:
        text = yaml.dump(data, Dumper=_Dumper, sort_keys=False, width=_WIDTH)
        read = parse_yaml(text, where)
    except NO_YAML as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{where} cannot be written as YAML: {reason}") from None
    at = difference(data, read)
    if at is not None:
        raise ConfigError(f"{where}: the value of '{at}' does not survive in YAML; simplify it")
    return text


def one_line(value: object) -> str:
    """Return a value as YAML in one line, as --set takes it."""
    text = yaml.dump(
        plain_value(value, "value"),
        Dumper=_Dumper,
        default_flow_style=True,
        width=math.inf,
        sort_keys=False,
    )
    return text.removesuffix("...\n").strip()


def difference(a: object, b: object, at: str = "") -> str | None:
    """Find the dotted key of the first difference of two values in type, order or value.

    NaN equals NaN. The result is None if there is no difference.
    """
    if type(a) is not type(b):
        return at
    if isinstance(a, dict) and isinstance(b, dict):
        if difference(list(a), list(b)) is not None:
            return at
        pairs = [
            (f"{at}.{key}".lstrip("."), x, y)
            for (key, x), y in zip(a.items(), b.values(), strict=True)
        ]
    elif isinstance(a, list | tuple) and isinstance(b, list | tuple):
        if len(a) != len(b):
            return at
        pairs = [(f"{at}.{i}".lstrip("."), x, y) for i, (x, y) in enumerate(zip(a, b, strict=True))]
    elif isinstance(a, datetime.datetime) and isinstance(b, datetime.datetime):
        return None if (a, a.utcoffset()) == (b, b.utcoffset()) else at
    else:  # repr tells -0.0 from 0.0
        same = a == b if not isinstance(a, float) else repr(a) == repr(b)
        return None if same else at
    return next(
        (found for key, x, y in pairs if (found := difference(x, y, key)) is not None), None
    )


def _count_values(node: yaml.Node, counted: dict[int, float]) -> float:
    """Count the values of a YAML node, aliases expanded; inf if the node contains itself."""
    if not isinstance(node, yaml.CollectionNode):
        return 1
    if id(node) not in counted:
        counted[id(node)] = math.inf  # while it is being counted
        pairs = isinstance(node, yaml.MappingNode)
        children = [part for pair in node.value for part in pair] if pairs else node.value
        counted[id(node)] = 1 + sum(_count_values(child, counted) for child in children)
    return counted[id(node)]


def _line(node: yaml.Node) -> int:
    """Return the number of a node's line, from 1."""
    line: int = node.start_mark.line + 1
    return line


def _check(loader: _Loader, node: yaml.Node, where: str, keys: str) -> None:
    """Refuse repeated keys and scalars with two readings, in a node and below it.

    Raises:
        ConfigError: for the first one found, naming it and its lines.
    """
    if isinstance(node, yaml.ScalarNode):
        _check_scalar(node, where, keys)
    elif isinstance(node, yaml.SequenceNode):
        for child in node.value:
            _check(loader, child, where, keys)
    elif isinstance(node, yaml.MappingNode):
        lines: dict[Any, tuple[yaml.Node, int]] = {}
        for key, value in node.value:
            _check(loader, key, where, keys)
            merge = key.tag == f"{_TAG}merge"
            shown = key.value if isinstance(key, yaml.ScalarNode) else "?"
            below = keys if merge else f"{keys}.{shown}".lstrip(".")
            if isinstance(key, yaml.ScalarNode) or key.tag == _TUPLE:
                made = ("<<",) if merge else loader.construct_object(key, deep=True)
                made = "nan" if made != made else made
                first = lines.setdefault(made, (key, _line(key)))
                if first[0] is not key:
                    _refuse_twice(where, below, first[0], key)
            _check(loader, value, where, below)


def _refuse_twice(where: str, keys: str, first: yaml.Node, again: yaml.Node) -> None:
    """Refuse the second of two equal keys."""
    a, b = _line(first), _line(again)
    lines = f"lines {a} and {b}" if a != b else f"line {a}"
    same = "" if first.value == again.value else f" (once as {first.value})"
    raise ConfigError(f"{where} has '{keys}' twice{same}, in {lines}; keep one of them")


def _check_scalar(node: yaml.ScalarNode, where: str, keys: str) -> None:
    """Refuse text that its tag, the two versions of YAML or Python do not hold as one value.

    What the versions read differently may stand where murmur's own types decide.

    Raises:
        ConfigError: for a scalar with two readings, beyond a float's range, or a time with parts of
            a microsecond, with the fix.
        yaml.constructor.ConstructorError: for text that is not of its tag's kind.
    """
    text, kind = node.value, node.tag.removeprefix(_TAG)
    kinds = ("float", "int") if kind == "float" else (kind,)
    if kind in _WHOLE and not any(_WHOLE[each].match(text) for each in kinds):
        problem = f"{short(text)} is no {kind}"
        raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
    at = f"{where}, line {_line(node)}: " + (f"{keys}: " if keys else "")
    word = kind == "bool" and _WORDS.fullmatch(text) and is_untyped(keys)
    if word or (kind in ("int", "float") and _TWO_NUMBERS.fullmatch(text)):
        what = "true or false" if word else "the number with its decimal digits alone"
        raise ConfigError(
            f"{at}{text} is not the same in YAML 1.1 and YAML 1.2; write {what}, or "
            f'"{text}" in quotes'
        )
    if kind == "timestamp" and _BELOW_MICROSECONDS.search(text):
        raise ConfigError(
            f"{at}{short(text)} has parts of a microsecond, which Python's datetime lacks; cut "
            "them, or put it in quotes"
        )
    digits = text.replace("_", "").lower()
    if kind == "float" and not digits.endswith(("inf", "nan")):
        value = float(digits)
        if math.isinf(value) or (not value and re.search("[1-9]", digits.partition("e")[0])):
            raise ConfigError(
                f"{at}{short(text)} is beyond the range of a float, it would be {value:g}; write "
                f"{'.inf' if value else '0.0'} if that is meant"
            )


def plain_value(value: object, where: str, count: list[int] | None = None) -> Any:  # noqa: ANN401 - whatever YAML can say
    """Return a deep copy of a value in types that survive YAML.

    NumPy's numbers become Python's, paths become text, mappings become dictionaries.

    Args:
        value: value to copy.
        where: its key, for messages.
        count: number of keys and values so far, of one that holds this one; None: it is the whole.

    Raises:
        ConfigError: if a configuration cannot hold it, naming its key.
    """
    if count is None:
        try:
            return plain_value(value, where, [0])
        except RecursionError:
            raise ConfigError(f"{where} is nested too deeply, or holds itself") from None
    count[0] += 1
    if count[0] > 2 * MAX_VALUES:  # of keys and values
        raise ConfigError(f"{where}: there are more than {MAX_VALUES} values in all; use a file")
    if isinstance(value, Mapping):
        return {
            plain_value(key, f"a key of {where}", count): plain_value(part, f"{where}.{key}", count)
            for key, part in value.items()
        }
    if isinstance(value, list) or type(value) is tuple:
        parts = [plain_value(part, f"{where}.{i}", count) for i, part in enumerate(value)]
        return parts if isinstance(value, list) else tuple(parts)
    return _plain_scalar(value, where)


def _plain_scalar(value: object, where: str) -> object:
    """Return a value that holds no others, in a type that survives YAML.

    Raises:
        ConfigError: if a configuration cannot hold it, naming its key.
    """
    if isinstance(value, np.generic) and value.dtype.kind in "biufUS":
        value = value.item()
    elif isinstance(value, PathLike):
        value = fspath(value)
    if isinstance(value, str) and "\0" in value:
        raise ConfigError(f"{where}: {short(value)} contains a NUL character; remove it")
    if type(value) not in _SCALARS:
        raise ConfigError(
            f"{where}: {short(value)} is a {type(value).__name__}; a configuration holds text, "
            "numbers, true and false, dates, bytes, lists, tuples and sections"
        )
    if isinstance(value, int) and abs(value) >= _TOO_LONG:
        raise ConfigError(f"{where}: a whole number of more than 4000 digits; give fewer")
    if isinstance(value, datetime.datetime) and (value.fold or not _has_plain_zone(value)):
        raise ConfigError(
            f"{where}: {short(value)} has a time zone that YAML cannot say; give it in UTC or "
            "with an offset in whole minutes"
        )
    return value


def _has_plain_zone(value: datetime.datetime) -> bool:
    """Return whether YAML can express a time's zone: none, or an offset in minutes."""
    if not isinstance(value.tzinfo, datetime.timezone | None):
        return False
    offset = value.utcoffset()
    return offset is None or not offset % datetime.timedelta(minutes=1)


def short(value: object) -> str:
    """Return a value's repr, cut to the length that a message can show."""
    try:
        text = repr(value)
    except ValueError:  # an integer with more digits than Python prints
        return "a number that is too long"
    return text if len(text) <= _SHOWN else text[: _SHOWN - 2] + " …"

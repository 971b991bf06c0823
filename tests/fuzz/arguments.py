"""Arguments of a factory arrive as they are written, by every way, or one line refuses them."""

import base64
import datetime
import json
import pickle
import struct
from typing import Any

from murmur.env_service.adapters.factory import AdapterConfig
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.config.files import load
from murmur.shared.config.section import validate
from murmur.shared.config.text import (
    NO_YAML,
    difference,
    one_line,
    parse_yaml,
    plain_data,
    to_yaml,
)
from murmur.shared.process.errors import ConfigError
from tests.fuzz import Reader, scratch

MODULES = (
    "murmur.shared.config.text",
    "murmur.shared.config.section",
    "murmur.shared.config.files",
)
SEEDS = [bytes([kind, *range(40)]) for kind in range(8)] + [
    b"\x07{prices: {0: 1.0}, budget: .inf}",
    b"\x07{a: &x [1, 2], b: *x, c: {<<: {d: 1}, d: 2}}",
    b"\x07{a: 1e-3, b: 2024-01-31}",
    b"\x07{a: 010}",
    b"\x07{a: 1, a: 2}",
]
_FILE = scratch() / "arguments.yaml"
_EVERY = 64  # cases in which files are written and read

_UTC = datetime.UTC
SCALARS: list[tuple[str, Any]] = [
    *[("1e-3", 0.001), ("1e6", 1e6), (".5", 0.5), ("-.5", -0.5), ("1.", 1.0), ("5e+2", 500.0)],
    *[("0", 0), ("-0.0", -0.0), ("00", 0), ("0e0", 0.0), ("+12", 12), ("2_000_000", 2_000_000)],
    *[("2_0.5", 20.5), ("0x1F", 31), ("0o17", 15), ("9007199254740993", 2**53 + 1)],
    *[(".inf", float("inf")), ("-.INF", -float("inf")), (".nan", float("nan"))],
    *[("true", True), ("False", False), ("null", None), ("~", None), ("''", ""), ("y", "y")],
    *[("09:30", "09:30"), ("0_8", "0_8"), ("-0o17", "-0o17"), ("=", "="), ("1.2.3", "1.2.3")],
    *[("'yes'", "yes"), ('"010"', "010"), ("'1e-3'", "1e-3"), ("'<<'", "<<"), ("'null'", "null")],
    *[
        ('"\\uD800"', "\ud800"),
        ('" a\\tb\\n"', " a\tb\n"),
        ('"\\x85\\u2028\\uFEFF"', "\x85\u2028\ufeff"),
    ],
    *[("2024-01-31", datetime.date(2024, 1, 31)), ("!!str 2024-01-31", "2024-01-31")],
    ("'2024-01-31 10:20:30.1234567'", "2024-01-31 10:20:30.1234567"),
    ("2024-01-31 10:20:30", datetime.datetime(2024, 1, 31, 10, 20, 30)),
    ("2024-01-31t10:20:30.25Z", datetime.datetime(2024, 1, 31, 10, 20, 30, 250000, _UTC)),
    (
        "2024-01-31 10:20:30 -05:30",
        datetime.datetime(
            2024, 1, 31, 10, 20, 30, tzinfo=datetime.timezone(-datetime.timedelta(minutes=330))
        ),
    ),
    *[("!!float 3", 3.0), ("!!int '7'", 7), ("!!str 7", "7"), ("a b", "a b"), ("ä€😀", "ä€😀")],
]
REFUSED = object()
_REFUSED_TEXTS = (
    *("010", "-07", "089", "12:30", "190:20:30.5", "0b11", "-0x1F", "0_1", "yes", "On", "NO"),
    *("off", "1e400", "-1e999", "1e-400", "!own x", "!!python/name:os.system", "!!int x", "*gone"),
    *("!!null x", "!!bool maybe", "!!set {a, b}", "{? [1] : 2}", "2024-13-01", '"\\0"'),
    "2024-01-31 10:20:30.1234567",
)


def document(reader: Reader, depth: int = 3) -> tuple[str, Any]:
    """A value as YAML in one line, and what it stands for: REFUSED if YAML or murmur refuse it."""
    kind = reader.below(16 if depth else 8)
    match kind:
        case 0:
            number = struct.unpack("<d", reader.take(8).ljust(8, b"\0"))[0]
            return _float(number)
        case 1:
            number = int.from_bytes(reader.take(1 + reader.below(20)), "little", signed=True)
            return str(number), number
        case 2:
            text = reader.take(reader.below(12)).decode("utf-16-le", "replace")
            return json.dumps(text, ensure_ascii=False), REFUSED if _unreadable(text) else text
        case 3:
            data = reader.take(reader.below(9))
            return f"!!binary '{base64.b64encode(data).decode()}'", data
        case 4 if reader.below(8) == 0:
            return _REFUSED_TEXTS[reader.below(len(_REFUSED_TEXTS))], REFUSED
        case 4 | 5 | 6 | 7:
            return SCALARS[reader.below(len(SCALARS))]
        case 8 | 9:
            texts, values = _several(reader, depth)
            return f"[{', '.join(texts)}]", _unless_refused(values, values)
        case 10:
            texts, values = _several(reader, depth)
            return f"!!python/tuple [{', '.join(texts)}]", _unless_refused(values, tuple(values))
        case 12:
            text, value = document(reader, depth - 1)
            if "&" in text or text.startswith("!"):  # one anchor at a time; no two tags
                return text, value
            return f"[&a {text}, *a]", _unless_refused([value], [value, value])
        case 13:
            base, top = _keys(reader), _keys(reader, depth)
            merged = _unless_refused([base[1], top[1]], None)
            if merged is None:
                merged = {**base[1], **top[1]}
            inner = top[0][1:-1]
            return f"{{<<: {base[0]}{', ' if inner else ''}{inner}}}", merged
        case _:
            return _keys(reader, depth)


def _float(number: float) -> tuple[str, Any]:
    if number != number:
        return ".nan", number
    if number in (float("inf"), -float("inf")):
        return f"{'-' if number < 0 else '+'}.inf", number
    return repr(number), number


def _unreadable(text: str) -> bool:
    """Whether PyYAML takes no such character, or murmur none."""
    return (
        any(
            not (
                c in "\t\n\r\x85"
                or " " <= c <= "~"
                or "\xa0" <= c <= "\ud7ff"
                or "\ue000" <= c <= "\ufffd"
                or c > "\uffff"
            )
            for c in json.dumps(text, ensure_ascii=False)
        )
        or "\0" in text
    )


def _several(reader: Reader, depth: int) -> tuple[list[str], list[Any]]:
    found = [document(reader, depth - 1) for _ in range(reader.below(4))]
    if sum("&" in text for text, _ in found) > 1:
        found = found[:1]
    return [text for text, _ in found], [value for _, value in found]


def _unless_refused(parts: list[Any], whole: Any) -> Any:
    return REFUSED if any(part is REFUSED for part in parts) else whole


def _keys(reader: Reader, depth: int = 0) -> tuple[str, Any]:
    """A mapping."""
    texts: list[str] = []
    made: dict[Any, Any] = {}
    refused = False
    for _ in range(reader.below(4)):
        key_text, key = SCALARS[reader.below(len(SCALARS))]
        value_text, value = document(reader, depth - 1) if depth else ("", None)
        if any("&" in text for text in texts):
            value_text, value = "1", 1
        texts.append(f"? {key_text} : {value_text}")
        twice = key in made or (key != key and any(other != other for other in made))
        refused |= value is REFUSED or twice
        made[key] = value
    return f"{{{', '.join(texts)}}}", REFUSED if refused else made


def keep(**arguments: Any) -> dict[str, Any]:
    """What a factory is given."""
    return arguments


def given(sections: dict[str, Any] | ExperimentConfig) -> dict[str, Any]:
    """What the factory of a configuration gets."""
    config = (
        sections if isinstance(sections, ExperimentConfig) else validate(ExperimentConfig, sections)
    )
    return keep(**validate(AdapterConfig, config.environment.options).arguments)


def sections_text(text: str) -> str:
    environment = f"{{name: gymnasium, factory: 'tests.fuzz.arguments:keep', arguments: {text}}}"
    return f"environment: {environment}\n"


def one(data: bytes) -> str:
    reader = Reader(data)
    if reader.below(8) == 7:
        text, value = reader.rest().decode("utf-8", "replace"), REFUSED
        known = False
    else:
        text, value = document(reader)
        text, known = f"{{x: {text}}}", True
        value = value if value is REFUSED else {"x": value}
    whole = sections_text(text)
    try:
        read = parse_yaml(whole, "file")
        config = validate(ExperimentConfig, read)
        first = given(config)
        written = to_yaml({"environment": plain_data(config.environment)})
    except ConfigError:
        assert not known or value is REFUSED, (text, value)
        return "refused"
    except NO_YAML:
        assert not known or value is REFUSED, (text, value)
        return "no YAML"
    if known:
        assert value is not REFUSED, (text, first)
        assert difference(value, first) is None, (text, value, first)
    if sum(data) % 8 == 0:  # else as to_yaml has checked
        _same(first, given(validate(ExperimentConfig, parse_yaml(written, "written"))), written)
        _same(first, given(pickle.loads(pickle.dumps(config))), "pickle")  # noqa: S301 - ours
    if sum(data) % _EVERY == 0:
        _check_files(first, whole)
    return "same"


def _check_files(arguments: dict[str, Any], whole: str) -> None:
    """Compare what files, items, variables and mappings give."""
    base = {"environment": {"name": "gymnasium", "factory": "tests.fuzz.arguments:keep"}}
    _FILE.write_bytes(whole.encode("utf-8", "surrogatepass"))
    _same(arguments, given(load(str(_FILE), (), {})), "file")
    line = one_line(arguments)
    _same(arguments, given(load(base, [f"environment.arguments={line}"], {})), line)
    variable = {"MURMUR__ENVIRONMENT__ARGUMENTS": line}
    _same(arguments, given(load(base, (), variable)), line)
    mapping = {"environment": {**base["environment"], "arguments": arguments}}
    config = load(mapping, (), {})
    _same(arguments, given(config), "mapping")
    _FILE.write_text(to_yaml(config))
    _same(arguments, given(load(str(_FILE), (), {})), "mapping's file")


def _same(a: dict[str, Any], b: dict[str, Any], how: str) -> None:
    assert difference(a, b) is None, (a, b, how)

"""Base classes of the configuration's sections, and checks with one-line error messages."""

import logging
import re
from collections.abc import Iterable, Mapping
from difflib import SequenceMatcher
from typing import Annotated, Any, Literal, Self, TypeVar, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_core import ErrorDetails

from murmur.shared.config.text import short
from murmur.shared.process.errors import ConfigError

Model = TypeVar("Model", bound=BaseModel)
logger = logging.getLogger("murmur")

# Option -> its name from 0.3 on. The former names are accepted until 0.4.
FORMER_NAMES = {
    "centralised": "centralized",
    "centred": "centered",
    "centred_state": "centered_state",
    "colour": "color",
    "grey": "gray",
    "initialisation": "initialization",
    "normalise": "normalize",
    "normalise_observations": "normalize_observations",
    "normalise_rewards": "normalize_rewards",
    "prioritised": "prioritized",
}
# Option that is gone -> its former default, and what to do instead. Configurations of former runs
# say all options: the default is passed over, any other value refused.
REMOVED: Mapping[str, tuple[object, str]] = {
    "learner.batcher.latency_target_ms": (0.0, "set preferred_batch_envs and max_wait_ms there"),
}
_noticed: set[str] = set()  # former names, as dotted keys


def with_new_names(
    model: type[BaseModel], data: Mapping[str, Any], where: str = ""
) -> dict[str, Any]:
    """Return values of a model's fields under the names that these have now.

    A former name is logged once in a process. Of a field given by both names the last one counts:
    files and overrides are merged in this order.

    Args:
        model: pydantic model.
        data: values by name, sections of the model nested in it.
        where: dotted path of this model within the configuration.

    Raises:
        ConfigError: for an option that is gone.
    """
    fields, found = model.model_fields, dict[str, Any]()
    for given, value in data.items():
        default, instead = REMOVED.get(f"{where}.{given}".lstrip("."), (None, ""))
        if instead and value == default:
            continue
        if instead:
            raise ConfigError(f"'{where}.{given}' = {short(value)}: it is gone; {instead}")
        name = FORMER_NAMES.get(given, given) if isinstance(given, str) else given
        if given in fields or name not in fields:
            name = given
        at = f"{where}.{name}".lstrip(".")
        if name != given and (old := f"{where}.{given}".lstrip(".")) not in _noticed:
            _noticed.add(old)
            logger.warning("%s is called %s now; the former name works until 0.4", old, at)
        kind = fields[name].annotation if name in fields else None
        if isinstance(value, dict) and isinstance(kind, type) and issubclass(kind, BaseModel):
            value = with_new_names(kind, value, at)
        found[name] = value
    return found


_FEW = 10  # names that a message lists
_LIKE, _NEAR = 0.6, 0.4  # ratios of difflib from which two names are alike, and near each other
_OTHER_WORDS = {"learning_rate": "lr", "gpu": "cuda"}  # other libraries' -> murmur's


def nearest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """Return the known names most like a name, the nearest first; none if none is like it.

    A known name is like it that has it as one of its words, as `actor_lr` has `lr`.
    """
    wanted = name.lower()
    for other, own in _OTHER_WORDS.items():
        wanted = wanted.replace(other, own)
    likeness = {}
    for each in known:
        low = each.lower()
        ratio = SequenceMatcher(None, wanted, low).ratio()
        is_word = len(wanted) > 1 and wanted in re.split(r"[-_. ]", low)
        # Of equally like names the last is the newest version.
        likeness[each] = (ratio + is_word, -abs(len(low) - len(wanted)), low)
    near = [each for each in likeness if likeness[each][0] >= _NEAR]
    near.sort(key=lambda each: likeness[each], reverse=True)
    return near[:count] if near and likeness[near[0]][0] >= _LIKE else []


def known_names(name: str, known: Iterable[str], listed_by: str = "") -> str:
    """Name what an unknown name may mean, for a message: of many known names the nearest three.

    Args:
        name: the unknown name.
        known: all known names.
        listed_by: command that lists them.
    """
    names = list(known)
    first, *others = nearest(name, names) or [""]
    hint = f"did you mean '{first}'? " if first else ""
    if len(names) <= _FEW:
        return f"{hint}known: {', '.join(names) or 'none'}"
    if not first and not listed_by:
        return f"known: {', '.join(names)}"
    near = f"near it: {', '.join(others)}; " if others else ""
    listed = f"`{listed_by}` lists all {len(names)}" if listed_by else f"{len(names)} are known"
    return f"{hint}{near}{listed}"


def validate(model: type[Model], data: Mapping[str, Any], where: str = "") -> Model:
    """Build a model, and report all validation errors in one readable line.

    Args:
        model: pydantic model.
        data: values of its fields.
        where: dotted path of this model within the configuration, for the messages.

    Raises:
        ConfigError: if values are invalid, naming each key, its value, and the fix.
    """
    try:
        return model.model_validate(with_new_names(model, data, where))
    except ValidationError as error:
        lines = [_message(model, where, found) for found in error.errors()]
        raise ConfigError("; ".join(lines)) from None


def _message(model: type[BaseModel], where: str, e: ErrorDetails) -> str:
    """Return one of pydantic's errors as a message with the key, its value, and the fix."""
    path = ".".join(str(p) for p in e["loc"])
    full = ".".join(p for p in (where, path) if p)
    if e["type"] == "extra_forbidden":
        known = _keys_at(model, [str(p) for p in e["loc"][:-1]])
        close = nearest(str(e["loc"][-1]), known)
        if close:
            hint = f"did you mean '{close[0]}'?" + f" near it: {', '.join(close[1:])}" * (
                len(close) > 1
            )
        elif len(known) > _FEW:
            hint = f"`murmur config NAME --explain` lists all {len(known)} keys beside it"
        else:
            hint = f"known: {', '.join(known)}"
        if "arguments" in known and not close:  # of an environment of another library
            hint += f"; what its factory is to be given is arguments.{e['loc'][-1]}"
        return f"unknown key '{full}'; {hint}"
    if e["type"] == "missing":
        return f"key '{full}' is missing{_plugin_advice(model, e['loc'])}"
    if e["type"] == "model_type":
        keys = ", ".join(_keys_at(model, [str(p) for p in e["loc"]]))
        return f"'{full}' = {short(e['input'])}: it is a section with keys: {keys}"
    if e["type"] in ("tuple_type", "list_type"):
        one = isinstance(e["input"], str | int | float)
        example = f", [{e['input']}]" if one else ""
        return f"'{full}' = {short(e['input'])}: it is a list{example}"
    if e["type"] == "dict_type":
        return f"'{full}' = {short(e['input'])}: it holds keys, {full}.KEY=VALUE"
    if e["type"] == "value_error":
        return f"{full + ': ' if full else ''}{e['ctx']['error']}"
    message = e["msg"].replace("Input should be", "it must be").partition(", unable to")[0]
    if e["type"] == "literal_error" and isinstance(e["input"], str):
        options = re.findall(r"'([^']*)'", e["ctx"]["expected"])
        close = nearest(e["input"], options, 1)
        message += f"; did you mean '{close[0]}'?" if close else ""
    if e["type"] == "string_type" and not isinstance(e["input"], list | dict):
        written = "" if e["input"] is None else e["input"]
        message += f""": --set '{full}="{written}"', or in quotes in the file"""
    return f"'{full}' = {short(e['input'])}: {message}"


def _plugin_advice(model: type[BaseModel], path: tuple[int | str, ...]) -> str:
    """Return the key to add if a plug-in's options are given without its name; else ""."""
    if len(path) != 2 or path[1] != "name":
        return ""
    section = str(path[0])
    default = model.model_fields[section].default
    name = getattr(default, "name", "")
    if not name:
        return ""
    if name == "auto":
        return (
            f": it is auto here, and auto's options are not known; name it too, with --set "
            f"{section}.name=mlp (for vectors) or {section}.name=cnn (for images)"
        )
    return f": it is {name} here; name it too, with --set {section}.name={name}"


def _keys_at(model: type[BaseModel], path: list[str]) -> list[str]:
    """Return the field names of the model found by following `path` from `model`."""
    for part in path:
        field = model.model_fields.get(part)
        kinds = [] if field is None else [field.annotation, *get_args(field.annotation)]
        below = [x for x in kinds if isinstance(x, type) and issubclass(x, BaseModel)]
        if not below:
            return []
        model = below[0]
    return [field.alias or name for name, field in model.model_fields.items()]


_EXACT = 2**53  # floats from here on skip whole numbers
_MOST_S = 1e9  # 30 years; longer waits overflow the system's clocks

Count = Annotated[int, Field(ge=1)]
# A number that 0 leaves to murmur; `auto` says the same.
Auto = Annotated[
    int,
    Field(ge=0),
    BeforeValidator(
        lambda value: 0 if value == "auto" else value,
        json_schema_input_type=int | Literal["auto"],
    ),
]
# The same where 0 is a number like any other: null, or `auto`.
_NULL_OR_AUTO = BeforeValidator(
    lambda value: None if value == "auto" else value,
    json_schema_input_type=int | Literal["auto"] | None,
)
Open = Annotated[int | None, Field(ge=0), _NULL_OR_AUTO]
Port = Annotated[int | None, Field(ge=0, le=65535), _NULL_OR_AUTO]
MetricsHosts = Annotated[
    str,
    Field(
        description="addresses of the metrics and health port, with commas between them; a "
        "network, 10.0.1.0/24, stands for this machine's own address in it"
    ),
]


class Section(BaseModel):
    """Base of every part of the configuration: frozen, unknown keys forbidden."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def changed(self, changes: Mapping[str, Any]) -> Self:
        """Return a copy with other values, which are not checked again.

        Args:
            changes: values by dotted key: {"learner.port": 0}.
        """
        own: dict[str, Any] = {}
        for key, value in changes.items():
            name, _, below = key.partition(".")
            part = own.get(name, getattr(self, name))
            own[name] = part.changed({below: value}) if below else value
        return self.model_copy(update=own)

    @field_validator("*", mode="before")
    @classmethod
    def _is_exact(cls, value: object, info: ValidationInfo) -> object:
        """Refuse a float as a whole number if it is too large to be exact."""
        if isinstance(value, float) and abs(value) >= _EXACT:
            kind = cls.model_fields[info.field_name or ""].annotation
            if int in (kind, *get_args(kind)) and float not in get_args(kind):
                raise ValueError(f"{value:g} is not exact as a whole number: write all its digits")
        return value

    @field_validator("*")
    @classmethod
    def _in_range(cls, value: object, info: ValidationInfo) -> object:
        """Refuse numbers too large for a wait (s) or an array."""
        if isinstance(value, int | float) and abs(value) > _MOST_S:
            if (info.field_name or "").endswith("_s"):
                raise ValueError(f"{value:g} s is too long: at most {_MOST_S:g} s")
            if abs(value) >= 2**63:
                raise ValueError(f"{float(value):g} is too large")
        return value


class PluginConfig(BaseModel):
    """A plug-in by name, with its options inline."""

    model_config = ConfigDict(frozen=True, extra="allow")

    name: str = Field(description="name of a plug-in, or package.module:Name")

    @property
    def options(self) -> dict[str, Any]:
        """Return all values but the name, as given."""
        return dict(self.model_extra or {})

    def with_options(self, options: Mapping[str, Any]) -> Self:
        """Return the same plug-in with other options; a section's own keys may be among them."""
        own = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self)(**{**own, **options, "name": self.name})


NO_PLUGIN = PluginConfig(name="")


def merged(
    base: dict[Any, Any], top: dict[Any, Any], plugins: tuple[str, ...] = ()
) -> dict[Any, Any]:
    """Merge `top` over `base`, key by key.

    Args:
        base: values used for keys that `top` lacks.
        top: values that take precedence.
        plugins: keys of sections that name a plug-in; another plug-in's name drops the options
            in `base`.
    """
    result = dict(base)
    for key, value in top.items():
        below = result.pop(key, None)  # what is given last is last
        if isinstance(value, dict) and isinstance(below, dict):
            other = value.get("name") not in (None, below.get("name"))
            result[key] = merged({} if other and key in plugins else below, value)
        else:
            result[key] = value
    return result

"""Configurations as files or mappings: search, inheritance by `extends`, overrides."""

import contextlib
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from murmur.shared.config.experiment import ExperimentConfig, RunConfig
from murmur.shared.config.plugin_folders import look_in, named_code
from murmur.shared.config.section import known_names, merged, validate
from murmur.shared.config.text import (
    MAX_BYTES,
    NO_YAML,
    PLUGINS,
    difference,
    has_untyped_keys,
    is_untyped,
    parse_yaml,
    plain_value,
    short,
    to_yaml,
    yaml_trouble,
)
from murmur.shared.process.errors import ConfigError
from murmur.shared.process.files import write_whole

logger = logging.getLogger("murmur")

ENV_PREFIX = "MURMUR__"
_HERE = Path(__file__).resolve().parents[2]
CONFIG_DIRS = (_HERE / "configs",)  # of the checkout, or in the installed package

# "a.b=value" items with values in YAML, or values by dotted key, also in nested sections.
Overrides = str | Iterable[str] | Mapping[str, Any]
Change = tuple[list[Any], Any, str]  # path of keys, value, where it comes from


def config_names() -> list[str]:
    """Return the names of the configurations that come with murmur."""
    return sorted({p.stem for d in CONFIG_DIRS if d.is_dir() for p in d.glob("*.yaml")})


def find_config(name: str, beside: Path | None = None) -> Path:
    """Find the file of a configuration, given as a path or as a name that comes with murmur.

    Args:
        name: path or name.
        beside: folder that is searched last, for the name as written and with .yaml; None: none.

    Raises:
        ConfigError: if there is none, naming the known configurations.
    """
    own = name.replace("_", "-")
    near = [] if beside is None else [beside / name, beside / f"{name}.yaml"]
    for path in (Path(name), *(folder / f"{own}.yaml" for folder in CONFIG_DIRS), *near):
        # Python's own answer to a name that no file can have is an exception.
        with contextlib.suppress(OSError, ValueError):
            if path.is_file():
                return path
    raise ConfigError(f"no configuration {short(name)}: {_why_none(name)}")


def _why_none(name: str) -> str:
    """Explain why a name is no configuration, and what to give instead."""
    with contextlib.suppress(OSError, ValueError):
        try:
            Path(name).stat()
        except PermissionError:
            return "this user may not look into its folder; `chmod a+rX FOLDER` lets all read it"
        if (Path(name) / "config.yaml").is_file():
            return (
                "it is the folder of a run; `murmur train --resume --run FOLDER` continues it, "
                "its config.yaml is its configuration"
            )
        if Path(name).is_dir():
            return "it is a folder; give a YAML file"
    if "://" in name:
        return "murmur downloads nothing; save it as a file and give that"
    names = known_names(name.lower().replace("_", "-"), config_names(), "murmur list")
    return f"neither a file nor one of those that come with murmur; {names}"


def read_config(config: str | Mapping[str, Any]) -> tuple[dict[str, Any], str, Path | None]:
    """Read a configuration's sections, its default run name, and its file if it has one.

    Args:
        config: a path, the name of a configuration that comes with murmur, or its sections, with
            or without `extends`.

    Raises:
        ConfigError: if there is no such configuration, or it is invalid.
    """
    if isinstance(config, str):
        path = find_config(config)
        return read_file(path, ()), path.stem, path
    data = plain_value(config, "configuration")
    base = data.get("extends")
    sections = [data.get(key) for key in ("environment", "source")]
    names = [part.get("name") for part in sections if isinstance(part, dict)]
    own_name = Path(base).stem if isinstance(base, str) else next(filter(None, names), "run")
    return _extended(data, "configuration", ()), str(own_name), None


def read_file(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    """Read a YAML file, merged over the one it extends.

    Args:
        path: file to read.
        seen: files that led to this one by `extends`.

    Raises:
        ConfigError: if the file extends itself, cannot be read, or holds no sections.
    """
    if path in seen:
        raise ConfigError(f"{path} extends itself")
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        data = parse_yaml(content.decode(), str(path)) or {}
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except NO_YAML as error:
        raise ConfigError(f"{path} is no valid YAML: {yaml_trouble(error)}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds a {type(data).__name__}; expected sections of keys")
    return _extended(data, str(path), (*seen, path))


def _extended(data: dict[str, Any], where: str, seen: tuple[Path, ...]) -> dict[str, Any]:
    """Merge the sections into the configuration that they extend, if any.

    It is looked for as `find_config` does, then beside the file that extends it.
    """
    base = data.pop("extends", None)
    if base is not None and not isinstance(base, str):
        raise ConfigError(f"{where}: extends is {base!r}; expected the name of a configuration")
    if not base:
        return data
    beside = seen[-1].parent if seen else Path()
    return merged(read_file(find_config(base, beside), seen), data, PLUGINS)


def changes_of(overrides: Overrides) -> Iterator[Change]:
    """Yield each override as path, value and source.

    A section in a mapping is merged with that of the configuration; a section in an item,
    "a={b: 1}", replaces it.

    Raises:
        ConfigError: for an item that is not "a.b=value", a key that is not text, or a value that a
            configuration cannot hold.
    """
    if isinstance(overrides, Mapping):
        for key, value in overrides.items():
            if not isinstance(key, str) or not all(key.split(".")):
                raise ConfigError(f"override {short(key)}: write the key as 'section.key'")
            path = path_of(key, f"override {key}")
            if len(path) == 1 and isinstance(value, Mapping) and not value:
                continue  # a section in which nothing changes
            yield from _leaves(path, value)
        return
    for item in [overrides] if isinstance(overrides, str) else overrides:
        key, equals, text = item.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set {short(item)}: write it as section.key=value")
        where = f"--set {key}"
        path = path_of(key.strip(), where)
        yield path, value_of(text, where, path), where


def all_changes(overrides: Overrides, environ: Mapping[str, str] | None) -> Iterator[Change]:
    """Yield the changes of environment variables, then the overrides.

    Args:
        overrides: changes as for `load`.
        environ: variables MURMUR__A__B=value; None: the process's own.

    Raises:
        ConfigError: see `changes_of`; for a variable's name that is nearly one of murmur's.
    """
    yield from _variables(os.environ if environ is None else environ)
    yield from changes_of(overrides)


def _leaves(path: list[Any], value: object) -> Iterator[Change]:
    """Yield a change for each key in the nested sections of an override."""
    where = f"override {'.'.join(map(str, path))}"
    if isinstance(value, Mapping) and value:
        for key, part in value.items():
            yield from _leaves([*path, plain_value(key, f"a key of {where}")], part)
    else:
        yield path, plain_value(value, where), where


def path_of(key: str, where: str) -> list[Any]:
    """Split a dotted key; within options of plug-ins, parse the parts as YAML (1 is a number).

    Raises:
        ConfigError: for a key that YAML 1.1 and 1.2 read differently.
    """
    path: list[Any] = list(key.split("."))
    for i, part in enumerate(path):
        if has_untyped_keys(path[:i]):
            try:
                path[i] = parse_yaml(part, where, ".".join(map(str, path[:i])))
            except NO_YAML:
                continue
            if isinstance(path[i], list | dict | None):
                path[i] = part
    return path


def dotted(path: list[Any], where: str) -> str:
    """Return a path as a dotted key, which `path_of` reads back.

    Raises:
        ConfigError: if a key has a dot, or is text that reads as a number.
    """
    key = ".".join(map(str, path))
    if difference(path_of(key, where), path) is not None:
        raise ConfigError(f"{where}: a sweep cannot name this key; give the section above it whole")
    return key


def value_of(text: str, where: str, path: list[Any]) -> Any:  # noqa: ANN401 - whatever YAML can say
    """Parse a value given as YAML text; invalid YAML is plain text in murmur's own options.

    Raises:
        ConfigError: if the value of a plug-in's option is invalid YAML.
    """
    keys = ".".join(map(str, path))
    try:
        return parse_yaml(text, where, keys)
    except NO_YAML as error:
        if not is_untyped(keys):
            return text
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"{where}={short(text)[1:-1]} is no valid YAML: {reason}; put text in quotes: "
            f"{where.removeprefix('--set ')}='\"...\"'"
        ) from None


def replace_plugin(data: dict[str, Any], section: str, name: object) -> None:
    """Drop a plug-in's options, with a warning, before a plug-in of another name replaces it."""
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


def set_value(data: dict[Any, Any], path: list[Any], value: object, source: str) -> None:
    """Set the value at a path of keys, making sections that are missing.

    Raises:
        ConfigError: if a key of the path holds a value, not a section; names `source`.
    """
    for part in path[:-1]:
        data = data.setdefault(part, {})
        if not isinstance(data, dict):
            raise ConfigError(f"{source}: '{part}' is a value, not a section")
    data.pop(path[-1], None)  # what is given last is last
    data[path[-1]] = value


def load(
    name: str | Mapping[str, Any],
    overrides: Overrides = (),
    environ: Mapping[str, str] | None = None,
) -> ExperimentConfig:
    """Load the configuration of an experiment.

    From then on the process looks for modules that it names in its run.plugin_folders.

    Args:
        name: a path, the name of a configuration that comes with murmur, or the sections of one.
        overrides: "a.b=value" items with values in YAML syntax, or a mapping of dotted keys.
        environ: environment variables with MURMUR__A__B=value items; None: the process's own.

    Raises:
        ConfigError: for an invalid configuration, naming the key, the value and the fix.
    """
    data, own_name, file = read_config(name)
    changes = list(all_changes(overrides, environ))
    for section in PLUGINS:
        names = [value for at, value, _ in changes if at == [section, "name"]]
        if names:
            replace_plugin(data, section, names[-1])
    for at, value, source in changes:
        set_value(data, at, value, source)
    try:
        config = validate(ExperimentConfig, data)
    except ConfigError as error:
        for at, _, source in changes:
            if source.startswith(ENV_PREFIX) and f"'{at[0]}" in str(error):
                raise ConfigError(f"{error} (environment variable {source})") from None
        raise
    run = config.run
    named = code_of(config)
    if named:
        run = run.model_copy(update={"plugin_folders": _plugin_folders(run, file)})
        look_in(run.plugin_folders, named)
    if not run.name:
        run = run.model_copy(update={"name": own_name})
    return config.model_copy(update={"run": run, "tracking": config.tracking.without_password()})


def save(config: ExperimentConfig, path: Path) -> Path:
    """Write the whole configuration to a file, which `load` reads; return its path.

    Raises:
        ConfigError: if a value would be read as another one, naming its key.
        ResourceError: if the file cannot be written.
    """
    write_whole(path, to_yaml(config))
    return path


def code_of(config: ExperimentConfig) -> list[str]:
    """Return all code that a configuration names, as package.module:Name."""
    plugins = [getattr(config, section) for section in PLUGINS]
    options = map(dict, (*plugins, config.augment.own))
    return named_code([*options, config.evaluation.environment, config.imitation.baseline])


def _variables(environ: Mapping[str, str]) -> Iterator[Change]:
    """Yield the changes that environment variables ask for.

    Raises:
        ConfigError: for a name that is nearly one of murmur's.
    """
    for key, text in sorted(environ.items()):
        if key.startswith("MURMUR_") and "__" in key[len(ENV_PREFIX) :] and key[7] != "_":
            raise ConfigError(f"environment variable {key}: write {ENV_PREFIX}{key[7:]}")
        if key.startswith(ENV_PREFIX):
            path = _path_of_variable(key)
            yield path, value_of(text, key, path), key


def _path_of_variable(key: str) -> list[Any]:
    """Return the keys that MURMUR__A__B names: in lower case, factory parameters as written.

    MURMUR__ENVIRONMENT__ARGUMENTS__TOLL is `toll`, and ...__maxSteps is `maxSteps`.
    """
    parts = key.removeprefix(ENV_PREFIX).split("__")
    low = [part.lower() for part in parts]
    options = low[1:] if low[0] == "evaluation" else low
    mixed = len(low) if options[1:2] != ["arguments"] else len(low) - len(options) + 2
    kept = [part.lower() if part.isupper() else part for part in parts[mixed:]]
    return path_of(".".join([*low[:mixed], *kept]), key)


def _plugin_folders(run: RunConfig, file: Path | None) -> tuple[str, ...]:
    """Return the absolute folders to search for named code, also when the run is resumed."""
    if run.plugin_folders:
        return tuple(os.path.abspath(folder) for folder in run.plugin_folders)
    beside = [] if file is None or file.parent in CONFIG_DIRS else [str(file.resolve().parent)]
    return tuple(dict.fromkeys([*beside, os.getcwd()]))

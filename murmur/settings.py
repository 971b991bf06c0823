"""What `murmur config` shows: names of what there is, and a configuration with every default."""

import ast
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from env_service.adapters.kinds import recognise
from env_service.environment import VectorEnvironment, environment_module, make_environment
from shared.config import (
    ExperimentConfig,
    PluginConfig,
    config_names,
    find_config,
    load,
    validate,
)
from shared.cores import available_cores, choose
from shared.errors import ConfigError
from shared.extras import install_command
from shared.registry import load_plugin, plugin_names, require_plugin
from shared.yaml_text import parse_yaml

ENVIRONMENTS = ("env_service.envs", "murmur.environments")
ALGORITHMS = ("learner_service.algorithms", "murmur.algorithms")
NETWORKS = ("learner_service.networks", "murmur.networks")
SOURCES = ("env_service.sources", "murmur.sources")
_KINDS = {
    "environment": ENVIRONMENTS,
    "source": SOURCES,
    "algorithm": ALGORITHMS,
    "network": NETWORKS,
}


def has_torch() -> bool:
    """Whether the learner's plug-ins can be imported here."""
    try:
        return find_spec("torch") is not None
    except (ImportError, ValueError):
        return False


def environment_factory(name: str, options: list[str]) -> Callable[[int], VectorEnvironment]:
    """A factory of `num_envs` copies of an environment.

    Args:
        name: of an environment plug-in, or package.module:Name of a VectorEnvironment (see
            shared.named_plugin), or of a PettingZoo parallel or Gymnasium environment, which is
            made from the options' arguments.
        options: "key=value" or "key.key=value" items for a plug-in's options; a key may begin with
            "environment.", as in the --set of `murmur train`.

    Raises:
        ConfigError: if there is no such environment or option.
    """
    options = [option.strip().removeprefix("environment.") for option in options]
    if ":" not in name:
        if name not in plugin_names(*ENVIRONMENTS):
            _suggest_factory(name)
        return partial(make_environment, PluginConfig(name=name, **nested_options(options)))
    data = nested_options(options)
    kind = recognise(name, data.get("arguments", {}))
    if kind != "murmur":
        return partial(make_environment, PluginConfig(name=kind, factory=name, **data))
    plugin = PluginConfig(name=name, **data)

    def make(num_envs: int) -> VectorEnvironment:
        try:
            return make_environment(plugin, num_envs)
        except ConfigError as error:
            raise ConfigError(
                f"{error}; a factory of a PettingZoo or Gymnasium environment is given its "
                "arguments by --set arguments.KEY=VALUE"
            ) from error

    return make


def source_config(name: str, options: list[str]) -> PluginConfig:
    """The source that a name means.

    Args:
        name: of a source plug-in, package.module:Name, or a configuration that has a source.
        options: "key=value" or "key.key=value" items; a key may begin with "source.".

    Raises:
        ConfigError: if there is no such source, or the configuration has none.
    """
    options = [option.strip().removeprefix("source.") for option in options]
    known = plugin_names(*SOURCES)
    if ":" in name or name in known:
        return PluginConfig(name=name, **nested_options(options))
    try:
        config = load(name, [f"source.{option}" for option in options])
    except ConfigError as error:
        if str(error).startswith("no configuration"):
            raise ConfigError(
                f"no source '{name}'; known: {', '.join(known)}; or give a configuration, or "
                "package.module:Name"
            ) from None
        raise
    if not config.supervised:
        raise ConfigError(f"configuration '{name}' has an environment, not a source")
    return config.source


def _suggest_factory(name: str) -> None:
    """Find out whether a name without colon means a file here: meet, meet.py, meet.Meet, meet.yaml.

    Raises:
        ConfigError: if it does, saying how to write it.
    """
    if name.endswith((".yaml", ".yml")) and Path(name).is_file():
        plugin = load(name).environment
        raise ConfigError(
            f"'{name}' is a configuration; write its environment, "
            f"{plugin.options.get('factory', plugin.name)}, and its options by --set KEY=VALUE"
        )
    path = name.removesuffix(".py").replace(os.sep, ".").strip(".")
    for module, _, wanted in ((path, "", ""), path.rpartition(".")):
        file = Path(*module.split("."))
        source = next((f for f in (Path(f"{file}.py"), file / "__init__.py") if f.is_file()), None)
        if source is None or not module:
            continue
        classes = [] if wanted else _classes_with_step(source)
        names = [wanted] if wanted else classes or ["CLASS"]
        raise ConfigError(
            f"'{name}' is no environment of murmur's; write what makes one in {source} as "
            + " or ".join(f"{module}:{x}" for x in names)
        )


def _classes_with_step(source: Path) -> list[str]:
    """Names of a file's classes that can be stepped; it is read, not run."""
    try:
        tree = ast.parse(source.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []
    return [
        node.name
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        and any(isinstance(x, ast.FunctionDef) and x.name == "step" for x in node.body)
    ]


def nested_options(items: list[str]) -> dict[str, Any]:
    """Options from "a.b=value" items, values in YAML syntax.

    Raises:
        ConfigError: for an item that is not so.
    """
    data: dict[str, Any] = {}
    for item in items:
        key, equals, text = item.partition("=")
        *path, last = key.strip().split(".")
        at = data
        for part in path:
            at = at.setdefault(part, {})
        if not equals or not last or not isinstance(at, dict):
            raise ConfigError(f"--set {item!r}: write it as key=value")
        at[last] = parse_yaml(text, f"--set {key}")
    return data


def setting(key: str, value: object) -> str:
    """KEY=VALUE as `--set` takes it, of a value that JSON has."""
    return f"{key}={json.dumps(value, ensure_ascii=False)}"


def first_line(module: object) -> str:
    """The sentence at the top of a module, a class or a function."""
    if isinstance(module, partial):  # its own docstring describes partial itself
        module = module.func
    return (getattr(module, "__doc__", None) or "").strip().partition("\n")[0]


def config_summary(name: str) -> str:
    """The first sentence of the comment at the top of a configuration file."""
    lines = takewhile(lambda line: line.startswith("#"), find_config(name).read_text().splitlines())
    comment = " ".join(line.lstrip("# ") for line in lines)
    return re.split(r"\. (?=[A-Z])|: (?=murmur)", comment)[0].rstrip(".")


def list_everything() -> dict[str, dict[str, str]]:
    """All names a configuration can use, by kind, each with a sentence."""
    environments = {name: load_plugin(*ENVIRONMENTS, name) for name in plugin_names(*ENVIRONMENTS)}
    found = {
        "configurations": {name: config_summary(name) for name in config_names()},
        "environments": {name: first_line(m) for name, m in environments.items()},
        "baselines": {
            f"{name}: {baseline}": first_line(factory)
            for name, module in environments.items()
            for baseline, factory in module.BASELINES.items()
        },
    }
    names = plugin_names(*SOURCES)
    found["sources"] = {name: first_line(load_plugin(*SOURCES, name)) for name in names}
    for kind, folder in (("algorithms", ALGORITHMS), ("networks", NETWORKS)):
        if has_torch():
            names = plugin_names(*folder)
            found[kind] = {name: first_line(load_plugin(*folder, name)) for name in names}
        else:
            command = install_command("learner")
            found[kind] = {"": f"not listed: torch is not installed here ({command})"}
    return found


def plugin_model(kind: str, plugin: PluginConfig) -> type[BaseModel] | None:
    """The plug-in's own options, or None where they cannot be known here.

    They cannot for the learner's plug-ins without torch, and for network `auto`, which is chosen
    when the environment is known.
    """
    if kind in ("algorithm", "network") and (not has_torch() or plugin.name == "auto"):
        return None
    environment = kind == "environment"
    module = (
        environment_module(plugin.name) if environment else load_plugin(*_KINDS[kind], plugin.name)
    )
    model: type[BaseModel] = module.Config
    return model


def _kinds(config: ExperimentConfig) -> tuple[str, ...]:
    """The kinds of plug-ins that a configuration names."""
    return ("source" if config.supervised else "environment", "algorithm", "network")


def resolve(config: ExperimentConfig, kinds: Iterable[str] | None = None) -> dict[str, Any]:
    """The configuration with every default, those of its plug-ins too.

    Args:
        config: the configuration.
        kinds: of plug-ins: "environment" or "source", "algorithm", "network"; None: all it names.

    Raises:
        ConfigError: for a plug-in that does not exist or an option that it does not have.
    """
    data: dict[str, Any] = config.model_dump(mode="json")
    for kind in _kinds(config) if kinds is None else kinds:
        plugin: PluginConfig = getattr(config, kind)
        model = plugin_model(kind, plugin)
        if model is not None:
            options = validate(model, plugin.options, kind)
            data[kind] = {"name": plugin.name, **options.model_dump(mode="json")}
    if not config.supervised:
        model = plugin_model("environment", config.environment)
        assert model is not None
        validate(model, config.for_evaluation().environment.options, "evaluation.environment")
    return data


def completed_here(config: ExperimentConfig) -> ExperimentConfig:
    """The configuration with every default of its environment; the learner completes the rest.

    It imports neither algorithm nor network, and so not torch: it checks only that they exist.

    Raises:
        ConfigError: for a plug-in that does not exist or an option that its environment or source
            lacks.
    """
    require_plugin(*ALGORITHMS, config.algorithm.name)
    if config.network.name != "auto":
        require_plugin(*NETWORKS, config.network.name)
    return validate(ExperimentConfig, resolve(config, _kinds(config)[:1]))


def changed(config: ExperimentConfig) -> dict[str, Any]:
    """What differs from the defaults, and what has none, as dotted keys."""
    defaults = resolve(
        ExperimentConfig(**{kind: _bare(kind, getattr(config, kind)) for kind in _kinds(config)})
    )
    base = dict(flatten(defaults))
    plugins = {f"{kind}.name" for kind in _kinds(config)}
    for kind in _kinds(config):
        needed = _bare(kind, getattr(config, kind)).options
        plugins |= {f"{kind}.{key}" for key, _ in flatten(needed)}
    return {
        key: value
        for key, value in flatten(resolve(config))
        if key in plugins or value != base.get(key)
    }


def _bare(kind: str, plugin: PluginConfig) -> PluginConfig:
    """A plug-in with the options it cannot do without, and no others."""
    model = plugin_model(kind, plugin)
    fields = model.model_fields if model else {}
    needed = {k: v for k, v in plugin.options.items() if k in fields and fields[k].is_required()}
    return PluginConfig(name=plugin.name, **needed)


def flatten(data: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested sections as (dotted key, value)."""
    for key, value in data.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def to_yaml(config: ExperimentConfig) -> str:
    """The whole configuration as a file that `murmur train` takes."""
    return yaml.dump(resolve(config), Dumper=_Dumper, sort_keys=False, width=100)


class _Dumper(yaml.SafeDumper):
    """Sections as blocks, lists in one line."""


_Dumper.add_representer(
    list,
    lambda dumper, data: dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=True),
)


def explain(config: ExperimentConfig) -> list[tuple[str, Any, Any, str]]:
    """Every key of a configuration.

    Returns:
        (dotted key, its value, its default, what it means) in the order of the models.
    """
    rows = []
    values = resolve(config)
    choice = choose(config, available_cores())
    chosen = {
        "env_server.num_workers": choice.num_workers,
        "learner.num_threads": choice.num_threads,
    }
    for key, default, meaning in _fields(ExperimentConfig):
        section = key.partition(".")[0]
        if section in _KINDS or section not in values:
            continue
        value = _at(values, key)
        if key in chosen and value == 0:
            value = default = f"auto: {chosen[key]} here"
        rows.append((key, value, default, meaning))
    for kind in _kinds(config):
        plugin: PluginConfig = getattr(config, kind)
        rows.append((f"{kind}.name", plugin.name, None, f"which {kind}; see `murmur config`"))
        model = plugin_model(kind, plugin)
        if model is not None:
            for key, default, meaning in _fields(model):
                rows.append((f"{kind}.{key}", _at(values[kind], key), default, meaning))
    return rows


def _fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _fields(kind, f"{prefix}{name}.")
        else:
            default = None if field.is_required() else field.get_default(call_default_factory=True)
            yield f"{prefix}{name}", default, field.description or ""


def _at(data: dict[str, Any], key: str) -> Any:  # noqa: ANN401 - a YAML value
    value: Any = data
    for part in key.split("."):
        value = value[part]
    return value

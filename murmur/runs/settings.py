"""Names of plug-ins, and configurations completed with their defaults: to train, and to show."""

import ast
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import entry_points
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from murmur.env_service.adapters.kinds import recognise
from murmur.env_service.environment import (
    VectorEnvironment,
    baselines,
    environment_module,
    make_environment,
)
from murmur.runs.declared import declared_model, first_lines
from murmur.shared.config import PluginConfig
from murmur.shared.config.cores import available_cores, choose
from murmur.shared.config.episode_options import EnvironmentConfig
from murmur.shared.config.experiment import ENV_METRICS_PORT, TRACKERS, ExperimentConfig
from murmur.shared.config.files import (
    Overrides,
    changes_of,
    config_names,
    find_config,
    load,
    set_value,
)
from murmur.shared.config.learner import METRICS_PORT, PORT
from murmur.shared.config.plugins import (
    KINDS,
    load_plugin,
    plugin_names,
    require_plugin,
)
from murmur.shared.config.section import validate
from murmur.shared.config.text import one_line, plain_data, plain_value
from murmur.shared.process.errors import ConfigError

_REFERENCE = "#/$defs/{model}"  # to a definition of the JSON Schema
TASK = ("environment", "source")  # kinds of plug-ins: a configuration names one of them
# Those of auto; runs of earlier versions, and learners started by hand, have them in config.yaml.
USUAL_PORTS = {
    "learner.port": PORT,
    "learner.metrics_port": METRICS_PORT,
    "env_server.metrics_port": ENV_METRICS_PORT,
}


def has_torch() -> bool:
    """Return whether the learner's plug-ins can be imported here."""
    try:
        return find_spec("torch") is not None
    except (ImportError, ValueError):
        return False


def environment_config(name: str, options: Overrides) -> EnvironmentConfig:
    """Return the configuration of an environment; see environment_factory.

    Raises:
        ConfigError: if there is no such environment, or an option of its episodes is invalid.
    """
    data = section_options("environment", options)
    if ":" not in name:
        if name not in plugin_names("environment"):
            _suggest_factory(name)
        return validate(EnvironmentConfig, {"name": name, **data}, "environment")
    kind = recognise(name, data.get("arguments", {}))
    own = {"name": name} if kind == "murmur" else {"name": kind, "factory": name}
    return validate(EnvironmentConfig, {**own, **data}, "environment")


def environment_factory(name: str, options: Overrides) -> Callable[[int], VectorEnvironment]:
    """Return a factory of `num_envs` copies of an environment.

    Args:
        name: name of an environment plug-in, or package.module:Name of a VectorEnvironment (see
            murmur.shared.config.named_plugin), or of a PettingZoo parallel or Gymnasium
            environment, which is made from the options' arguments.
        options: options of the plug-in; see section_options.

    Raises:
        ConfigError: if there is no such environment or option.
    """
    plugin = environment_config(name, options)
    if plugin.name != name or ":" not in name:
        return partial(make_environment, plugin)

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
    """Return the source that a name means.

    Args:
        name: name of a source plug-in, package.module:Name, or a configuration that has a source.
        options: options of the plug-in; see section_options.

    Raises:
        ConfigError: if there is no such source, or the configuration has none.
    """
    known = plugin_names("source")
    if ":" in name or name in known:
        return PluginConfig(name=name, **section_options("source", options))
    try:
        config = load(
            name, [f"source.{option.strip().removeprefix('source.')}" for option in options]
        )
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
    """Return names of a file's classes that can be stepped; the file is read, not run."""
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


def section_options(section: str, options: Overrides) -> dict[str, Any]:
    """Parse options of a section: "a.b=value" items, values in YAML syntax, or a mapping.

    Args:
        section: "environment" or "source".
        options: options by key; keys may begin with the section, as in the --set of `murmur train`.

    Raises:
        ConfigError: for an item that is not so.
    """
    prefix = f"{section}."
    if isinstance(options, Mapping):
        options = {prefix + str(key).removeprefix(prefix): value for key, value in options.items()}
    else:
        items = [options] if isinstance(options, str) else options
        options = [prefix + item.strip().removeprefix(prefix) for item in items]
    data: dict[str, Any] = {}
    for path, value, source in changes_of(options):
        set_value(data, path[1:], value, source)
    return data


def setting(key: str, value: object) -> str:
    """Format KEY=VALUE as `--set` takes it, of a value that JSON has."""
    return f"{key}={json.dumps(value, ensure_ascii=False)}"


def with_options(
    overrides: Overrides, given: Mapping[str, object], names: Mapping[str, str]
) -> list[str] | Mapping[str, Any]:
    """Add the values of options to overrides.

    Args:
        overrides: changes of the configuration.
        given: value of each option by its key; None: not given.
        names: name of each option by its key, for the message.

    Raises:
        ConfigError: if a key is given in both ways.
    """
    if not isinstance(overrides, Mapping):
        overrides = [overrides] if isinstance(overrides, str) else list(overrides)
    added = {key: plain_value(value, key) for key, value in given.items() if value is not None}
    for path, value, source in changes_of(overrides):
        key = ".".join(map(str, path))
        if key in added:
            raise ConfigError(
                f"{names[key]} {added[key]} and {source}={value} are the same key: give one"
            )
    if isinstance(overrides, Mapping):
        return {**overrides, **added}
    return [*overrides, *(setting(key, value) for key, value in added.items())]


def first_line(module: object) -> str:
    """Return the sentence at the top of a module, a class or a function."""
    if isinstance(module, partial):  # its own docstring describes partial itself
        module = module.func
    return (getattr(module, "__doc__", None) or "").strip().partition("\n")[0]


def config_summary(name: str) -> str:
    """Return the first sentence of the comment at the top of a configuration file."""
    lines = takewhile(lambda line: line.startswith("#"), find_config(name).read_text().splitlines())
    comment = " ".join(line.lstrip("# ") for line in lines)
    return re.split(r"\. (?=[A-Z])|: (?=murmur)", comment)[0].rstrip(".")


def list_everything() -> dict[str, dict[str, str]]:
    """Return all names that a configuration can use, by kind, each with a sentence."""
    found = {"configurations": {name: config_summary(name) for name in config_names()}}
    for kind in KINDS:
        found[f"{kind}s"] = first_lines(kind)
        if kind == "environment":
            found["baselines"] = {
                f"{name}: {baseline}": first_line(factory)
                for name in found["environments"]
                for baseline, factory in baselines(PluginConfig(name=name)).items()
            }
    trackers = {entry.name: entry for entry in entry_points(group=TRACKERS)}
    found["trackers"] = {
        "tensorboard": "Curves in the run's folder.",
        "wandb": "Weights & Biases.",
        "mlflow": "MLflow.",
        **{name: f"{entry.value}" for name, entry in trackers.items()},
    }
    return found


def all_keys() -> Iterator[str]:
    """Yield the dotted keys of murmur's own options: sections first, then plug-ins by name."""
    yield from (key for key, _ in fields(ExperimentConfig))
    for kind in ("algorithm", "network"):
        for name in plugin_names(kind):
            if (model := declared_model(kind, name)) is not None:
                yield from (f"{kind}.{key}" for key, _ in fields(model))


def plugin_model(kind: str, plugin: PluginConfig) -> type[BaseModel] | None:
    """Return the plug-in's own options, or None if they cannot be known here.

    They cannot for network `auto`, which is chosen when the environment is known, and without torch
    for the learner's plug-ins of others. Murmur's own are read without importing torch.
    """
    if kind not in TASK:
        if plugin.name == "auto":
            return None
        if (declared := declared_model(kind, plugin.name)) is not None or not has_torch():
            return declared
    load = environment_module if kind == "environment" else partial(load_plugin, kind)
    model: type[BaseModel] = load(plugin.name).Config
    return model


def with_plugin_defaults(
    config: ExperimentConfig, kinds: Sequence[str] | None = None
) -> ExperimentConfig:
    """Complete the configuration with every default of its plug-ins.

    `murmur train` completes the environment by it, for both services; the learner completes
    algorithm and network by `with_learner_options`. `murmur config` completes all.

    Args:
        config: the configuration.
        kinds: kinds of plug-ins to complete; None: all. Of the others options are checked, if they
            are murmur's; they are not imported. With TASK alone nothing imports torch; the learner
            completes the rest.

    Raises:
        ConfigError: for a plug-in that does not exist or an option that it does not have.
    """
    whole = {}
    for kind in ("source" if config.supervised else "environment", "algorithm", "network"):
        plugin: PluginConfig = getattr(config, kind)
        if kinds is not None and kind not in kinds:
            if plugin.name != "auto":
                require_plugin(kind, plugin.name)
                if (declared := declared_model(kind, plugin.name)) is not None:
                    validate(declared, plugin.options, kind)
        elif (model := plugin_model(kind, plugin)) is not None:
            if kind == "environment":
                _require_defaults(config.environment, plugin.options, model)
            options = validate(model, plugin.options, kind)
            whole[kind] = plugin.with_options(plain_data(options, kind))
            validate(model, whole[kind].options, kind)  # as the services read it: defaults too
    config = config.changed(whole)
    if config.evaluation.environment and not config.supervised:
        model = environment_module(config.environment.name).Config
        validate(model, config.for_evaluation().environment.options, "evaluation.environment")
    return config


def _require_defaults(
    environment: EnvironmentConfig, options: Mapping[str, Any], model: type[BaseModel]
) -> None:
    """Refuse an option that is both set for good and changed between episodes.

    Args:
        environment: section with the options that change.
        options: options that are set for good.
        model: options that the plug-in has.

    Raises:
        ConfigError: if there is one, naming it.
    """
    for where in ("curriculum", "randomize"):
        for name in getattr(environment, where):
            field = model.model_fields.get(name)
            if field is None or field.is_required() or name not in options:
                continue
            if options[name] != default_of(field):
                raise ConfigError(
                    f"environment.{name}={options[name]} and environment.{where}.{name} "
                    f"both set '{name}': keep one of them"
                )


def resolved_data(config: ExperimentConfig) -> dict[str, Any]:
    """Return the configuration with every default, those of its plug-ins too, as plain data.

    Raises:
        ConfigError: see `with_plugin_defaults`.
    """
    return plain_data(with_plugin_defaults(config))


def changed(config: ExperimentConfig) -> dict[str, Any]:
    """Return the options that differ from the defaults or have none, as dotted keys."""
    whole = resolved_data(config)
    bare = {kind: _bare(kind, getattr(config, kind)) for kind in KINDS if kind in whole}
    base = dict(flatten(resolved_data(ExperimentConfig.model_validate(bare))))
    needed = {f"{kind}.name" for kind in bare}
    needed |= {f"{kind}.{key}" for kind in bare for key, _ in flatten(bare[kind].options)}
    return {
        key: value
        for key, value in flatten(whole)
        if key in needed or value not in (base.get(key), USUAL_PORTS.get(key, base.get(key)))
    }


def _bare(kind: str, plugin: PluginConfig) -> PluginConfig:
    """Return a plug-in with its required options, and no others."""
    model = plugin_model(kind, plugin)
    known = model.model_fields if model else {}
    needed = {k: v for k, v in plugin.options.items() if k in known and known[k].is_required()}
    return PluginConfig(name=plugin.name, **needed)


def flatten(data: dict[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested sections as (dotted key, value)."""
    for key, value in data.items():
        name = key if isinstance(key, str) and key.isidentifier() else one_line(key)
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def explain(config: ExperimentConfig) -> list[tuple[str, Any, Any, str]]:
    """Return every key of a configuration.

    Returns:
        (dotted key, its value, its default, its meaning) in the order of the models.
    """
    rows = []
    values = resolved_data(config)
    chosen = choose(config, available_cores())
    for key, field in fields(ExperimentConfig):
        section = key.partition(".")[0]
        if section in KINDS or section not in values:
            continue
        value, default = _at(values, key), default_of(field)
        if key in chosen:
            value = default = f"auto: {chosen[key]} here"
        rows.append((key, value, default, field.description or ""))
    for kind in (kind for kind in KINDS if kind in values):
        plugin: PluginConfig = getattr(config, kind)
        rows.append((f"{kind}.name", plugin.name, None, f"which {kind}; see `murmur config`"))
        model = plugin_model(kind, plugin)
        if kind == "environment":
            rows += [
                (f"{kind}.{key}", values[kind].get(key, {}), {}, field.description or "")
                for key, field in fields(EnvironmentConfig)
                if key != "name"
            ]
        for key, field in fields(model) if model is not None else ():
            value = _at(values[kind], key)
            rows.append((f"{kind}.{key}", value, default_of(field), field.description or ""))
    return rows


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a configuration file, for completion and marks in editors.

    No key is required: a file may extend another one. Options of a plug-in follow from its name;
    those of a module:Name of your own are not checked.
    """
    schema = _schema_of(ExperimentConfig)
    definitions = schema["$defs"]
    for kind in KINDS:
        models = {n: plugin_model(kind, PluginConfig(name=n)) for n in plugin_names(kind)}
        section: dict[str, Any] = {"type": "object", "properties": {"name": {}}, "allOf": []}
        for name, model in models.items():
            if model is None:
                continue
            of_plugin = _schema_of(model)
            definitions |= of_plugin.pop("$defs", {})
            own = _schema_of(EnvironmentConfig)["properties"] if kind == "environment" else {}
            of_plugin["properties"] = {**own, "name": {"const": name}, **of_plugin["properties"]}
            key = f"{kind} {name}"
            definitions[key] = of_plugin
            condition = {"properties": {"name": {"const": name}}, "required": ["name"]}
            section["allOf"].append(
                {"if": condition, "then": {"$ref": _REFERENCE.format(model=key)}}
            )
        names = [*models, *(["auto"] if kind == "network" else [])]
        section["properties"]["name"] = {
            "description": f"which {kind}, or package.module:Name of your own",
            "anyOf": [{"enum": names}, {"type": "string", "pattern": ":"}],
        }
        schema["properties"][kind] = section
    extends = {"type": "string", "description": "the configuration, or file, that this one changes"}
    schema["properties"] = {"extends": extends, **schema["properties"]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "murmur configuration",
    }


def _schema_of(model: type[BaseModel]) -> dict[str, Any]:
    """Return a model's schema without required keys."""
    schema: dict[str, Any] = model.model_json_schema(ref_template=_REFERENCE)
    for part in (schema, *schema.get("$defs", {}).values()):
        part.pop("required", None)
    return schema


def fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield every option of a model, those of its sections too, by its dotted key."""
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from fields(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def default_of(field: FieldInfo) -> Any:  # noqa: ANN401 - a YAML value
    """Return the default of an option; None if it has none."""
    return None if field.is_required() else field.get_default(call_default_factory=True)


def _at(data: dict[str, Any], key: str) -> Any:  # noqa: ANN401 - a YAML value
    value: Any = data
    for part in key.split("."):
        value = value[part]
    return value

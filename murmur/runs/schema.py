"""JSON Schema of configurations, with which editors complete keys and mark wrong ones."""

from typing import Any

from pydantic import BaseModel

from murmur.runs.settings import plugin_model
from murmur.shared.config import PluginConfig
from murmur.shared.config.episode_options import EnvironmentConfig
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.config.plugins import KINDS, plugin_names

_REFERENCE = "#/$defs/{model}"


def json_schema() -> dict[str, Any]:
    """Return the schema of a configuration file.

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

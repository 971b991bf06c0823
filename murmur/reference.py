"""The pages of docs/reference, written from the code: `python -m murmur.reference`."""

import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from pydantic import BaseModel, TypeAdapter

import murmur
from murmur.doctor.machine import ROOT
from murmur.env_service.metrics import METRICS as ENV_METRICS
from murmur.env_service.metrics import PREFIX
from murmur.learner_service.telemetry.metric_table import METRICS as LEARNER_METRICS
from murmur.runs.settings import default_of, fields
from murmur.shared.config import PluginConfig
from murmur.shared.config.episode_options import EnvironmentConfig
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.config.plugins import load_plugin, plugin_names
from murmur.shared.process.metric import Metric

FOLDER = ROOT / "docs" / "reference"
_NOTE = "Written by `python -m murmur.reference`; a test compares this page with the code."
_METRICS = """\
Both services serve Prometheus text at `/metrics` and their health at `/healthz`: the learner on
`learner.metrics_port` (9101), an environment server on `env_server.metrics_port` (9102). If these
are in use and not set, both take other ports: the logs say them, and `learner.json` of the run's
folder the learner's. The learner also serves the `process_*` metrics of Prometheus's Python client.
A histogram `x` is served as `x_bucket`, `x_sum` and `x_count`.
[reliability.md](../reliability.md#the-balance) shows how the counters of time steps (rows) balance.
"""
_TYPES = {
    **{"integer": "int", "number": "float", "string": "str", "boolean": "bool"},
    **{"object": "mapping", "null": "empty", "": "object"},
}
_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def pages() -> dict[str, Callable[[], str]]:
    """Return the name of each page, and the function that returns its text."""
    return {
        "configuration": _configuration,
        "algorithms": lambda: _plugins("Algorithm options", "algorithm"),
        "networks": lambda: _plugins("Network options", "network"),
        "environments": lambda: _plugins("Environment options", "environment"),
        "sources": lambda: _plugins("Source options", "source"),
        "commands": _commands,
        "api": _api,
        "metrics": _metrics,
        "alerts": _alerts,
    }


def write(folder: Path = FOLDER) -> None:
    """Write every page into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (folder / f"{name}.md").write_text(text())


def _page(title: str, *parts: str) -> str:
    return "\n\n".join([f"# {title}", _NOTE, *(part.strip("\n") for part in parts)]) + "\n"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        cells = (" ".join(cell.split()).replace("|", "\\|") for cell in row)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _configuration() -> str:
    parts = [
        "`murmur config NAME --explain` prints the same for one configuration, with its values."
    ]
    for name, field in ExperimentConfig.model_fields.items():
        kind: Any = field.annotation
        if not issubclass(kind, PluginConfig):
            rows = _options(kind, f"{name}.")
            parts += [f"## {name}", _table(("option", "default", "values", "meaning"), rows)]
    return _page("Configuration reference", *parts)


def _plugins(title: str, kind: str) -> str:
    """Return the options of every plug-in of a kind; of a preset those that it does not preset."""
    parts = [f"Options stand beside `{kind}.name`, or are set by `--set {kind}.OPTION=VALUE`."]
    found = {name: load_plugin(kind, name) for name in plugin_names(kind)}
    if kind == "environment":
        own = [row for row in _options(EnvironmentConfig) if row[0] != "`name`"]
        parts += [
            "## Of every environment",
            _table(("option", "default", "values", "meaning"), own),
        ]
    for name, module in found.items():
        config: type[BaseModel] = module.Config
        text = module.__doc__ or ""
        parts += [f"## {name}", text if kind == "algorithm" else text.partition("\n")[0]]
        rows = list(_options(config))
        base = next((n for n, m in found.items() if n != name and m.Config in config.__mro__), None)
        if base and (config is not found[base].Config or base < name):
            same = set(_options(found[base].Config))
            rows = [row for row in rows if row not in same]
            but = ", but:" if rows else "."
            parts.append(f"Its options are those of [{base}](#{base}){but}")
        if rows:
            parts.append(_table(("option", "default", "values", "meaning"), rows))
    return _page(title, *parts)


def _options(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, ...]]:
    for key, field in fields(model, prefix):
        default = "" if field.is_required() else _value(default_of(field))
        kind: Any = Annotated[field.annotation, field, *field.metadata]
        yield f"`{key}`", default, _kind(TypeAdapter(kind).json_schema()), field.description or ""


def _value(value: object) -> str:
    if value is None or value in ("", (), [], {}):
        return "empty"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    if isinstance(value, tuple):
        value = list(value)
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _kind(schema: Mapping[str, Any]) -> str:
    """Return the type of an option as text: "int > 0", "`a`, `b`", "list of str"."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(_kind, schema["anyOf"])))
    if values := schema.get("enum") or ([schema["const"]] if "const" in schema else []):
        return ", ".join(f"`{str(x).lower() if isinstance(x, bool) else x}`" for x in values)
    if schema.get("type") == "array":
        inner = schema.get("prefixItems") or [schema["items"]]
        return "list of " + " or ".join(dict.fromkeys(map(_kind, inner)))
    kind = "path" if schema.get("format") == "path" else _TYPES[schema.get("type", "")]
    bounds = [f"{sign} {schema[name]:g}" for name, sign in _BOUNDS.items() if name in schema]
    return " ".join([kind, *bounds])


def _commands() -> str:
    from murmur.cli import app

    parts = ["`murmur COMMAND --help` prints the same, with examples."]
    group: Any = typer.main.get_command(app)
    for name, command in group.commands.items():
        if command.hidden:
            continue
        rows = []
        for parameter in command.params:
            if parameter.name == "help" or getattr(parameter, "hidden", False):
                continue
            named = ", ".join(f"`{o}`" for o in (*parameter.opts, *parameter.secondary_opts))
            argument = parameter.param_type_name == "argument"
            shown = f"`{(parameter.name or '').upper()}`" if argument else named
            rows.append((shown, getattr(parameter, "help", None) or ""))
        summary = (command.help or "").strip().partition("\n\n")[0]
        parts += [f"## murmur {name}", " ".join(summary.split())]
        if rows:
            parts.append(_table(("argument or option", "meaning"), rows))
    return _page("Command reference", *parts)


def _api() -> str:
    parts = ["`import murmur`; [python.md](../python.md) shows how to use it."]
    for name in murmur.__all__:
        member: Any = getattr(murmur, name)
        parts += _described(f"murmur.{name}", member)
        if not inspect.isclass(member):
            continue
        for attribute, value in vars(member).items():
            function = isinstance(value, types.FunctionType) and not attribute.startswith("_")
            if function or (isinstance(value, property) and value.__doc__):
                parts += _described(f"{name}.{attribute}", value, level=3)
    return _page("Python reference", *parts)


def _described(name: str, member: Any, level: int = 2) -> list[str]:  # noqa: ANN401 - anything
    """Return heading, signature and docstring of a function, class or property."""
    text = inspect.cleandoc(member.__doc__ or "")
    if inspect.isfunction(member):
        signature = inspect.signature(member)
        plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
        shown = inspect.Signature([p for p in plain if p.name != "self"])
        text = f"{name.rpartition('.')[2]}{shown}\n\n{text}"
    return [f"{'#' * level} {name}", f"```text\n{text}\n```"]


def _metrics() -> str:
    head = ("metric", "kind", "labels", "meaning", "if it looks wrong")

    def table(prefix: str, metrics: Iterable[Metric]) -> str:
        rows = []
        for m in metrics:
            name = prefix + m.name + "_total" * (m.kind == "counter")
            labels = ", ".join(f"`{label}`" for label in m.labels)
            rows.append((f"`{name}`", m.kind, labels, m.meaning, m.remedy))
        return _table(head, rows)

    of_learner, of_server = table("murmur_learner_", LEARNER_METRICS), table(PREFIX, ENV_METRICS)
    return _page("Metrics", _METRICS, "## Learner", of_learner, "## Environment server", of_server)


def _alerts() -> str:
    groups = yaml.safe_load((ROOT / "monitoring" / "prometheus" / "rules.yml").read_text())[
        "groups"
    ]
    rules = [rule for group in groups for rule in group["rules"] if "alert" in rule]
    rows = [
        (
            f"`{rule['alert']}`",
            rule["labels"]["severity"],
            rule.get("for", "0m"),
            f"`{' '.join(rule['expr'].split())}`",
            rule["annotations"]["description"],
        )
        for rule in rules
    ]
    head = ("alert", "severity", "after", "condition", "meaning and remedy")
    return _page("Alerts", _table(head, rows))


if __name__ == "__main__":
    write()

"""`murmur bench`: runs the modules of `PACKAGES`, each with DESCRIPTION and run(quick)."""

import contextlib
import io
import json
import pkgutil
import re
import shlex
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from murmur.machine import RESULTS, commit, describe_machine, versions
from murmur.settings import first_line
from murmur.text import number, plain
from shared.errors import ConfigError

# The second one breaks things on purpose and is only there in a checkout.
PACKAGES = ("murmur.benchmarks", "tests.chaos")


def benchmark_names() -> list[str]:
    """Names of all benchmarks: modules of `PACKAGES` that have a function run(quick)."""
    return sorted(_modules())


def _modules() -> dict[str, str]:
    """Full module name of each benchmark, by name."""
    found = {}
    for package in PACKAGES:
        with contextlib.suppress(ModuleNotFoundError):
            for module in pkgutil.iter_modules(import_module(package).__path__, f"{package}."):
                if hasattr(import_module(module.name), "run"):
                    found[module.name.rpartition(".")[2]] = module.name
    return found


def list_benchmarks() -> Table:
    """All benchmarks with their descriptions."""
    table = Table("benchmark", "what it measures", box=None, padding=(0, 3, 0, 0))
    for name in benchmark_names():
        module = import_module(_modules()[name])
        table.add_row(name, plain(_description(module)))
    return table


def _description(module: ModuleType) -> str:
    return str(getattr(module, "DESCRIPTION", "")) or first_line(module)


def run_benchmark(name: str, *, quick: bool, save: bool, console: Console) -> None:
    """Run one benchmark, print its result and, if asked, keep it.

    Raises:
        ConfigError: for an unknown name.
    """
    known = benchmark_names()
    if name not in known:
        close = get_close_matches(name, known, 1)
        hint = f"did you mean '{close[0]}'? " if close else ""
        raise ConfigError(f"no benchmark '{name}'; {hint}known: {', '.join(known)}")
    module = import_module(_modules()[name])
    console.print(plain(name, "bold"), plain(f": {_description(module)}"), sep="")
    if not hasattr(module, "run"):
        raise ConfigError(f"benchmark '{name}' has no function run(quick)")
    result = module.run(quick=quick)
    for table in result_tables(result):
        console.print(table, "")
    if save:
        console.print(plain(f"written: {save_result(name, result, quick)}"))


def result_tables(result: Mapping[str, Any], title: str = "") -> list[Table]:
    """A nested result as tables: plain values as a list, sections of plain values as rows."""
    simple = {key: value for key, value in result.items() if _is_plain(value)}
    sections = {key: value for key, value in result.items() if isinstance(value, dict)}
    rows = {key: v for key, v in sections.items() if all(_is_plain(x) for x in v.values())}
    tables = []
    if simple:
        table = _table("", title)
        for key, value in simple.items():
            table.add_row(plain(key), _cell(value))
        tables.append(table)
    if rows:
        tables.append(_rows_table(title, rows))
    for key, value in result.items():
        if isinstance(value, dict) and key not in rows:
            tables += result_tables(value, f"{title} {key}".strip())
        elif isinstance(value, list) and not _is_plain(value):
            tables.append(_rows_table(key, {str(i): row for i, row in enumerate(value)}))
    return tables


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return not any(isinstance(item, dict) for item in value)
    return not isinstance(value, dict)


def _cell(value: object) -> Text:
    if isinstance(value, list | tuple):
        return plain(", ".join(map(number, value)))
    return plain(number(value))


def _table(*headings: str) -> Table:
    """An empty table."""
    return Table(*(Column(plain(text)) for text in headings), box=None, padding=(0, 3, 0, 0))


def _rows_table(title: str, rows: Mapping[str, Mapping[str, Any]]) -> Table:
    columns = list(dict.fromkeys(key for row in rows.values() for key in row))
    if len(columns) > max(8, len(rows)):  # too wide to read: turn it
        turned = {c: {name: row.get(c) for name, row in rows.items()} for c in columns}
        return _rows_table(title, turned)
    table = _table(title, *columns)
    for name, row in rows.items():
        table.add_row(plain(name), *(_cell(row.get(column)) for column in columns))
    return table


def save_result(
    name: str, result: Mapping[str, Any], quick: bool, command: str | None = None
) -> Path:
    """Write a result with what it was measured on and by which command; returns the file."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    machine = describe_machine()
    now = datetime.now(UTC)
    label = machine["gpu"] or f"{machine['cores']}-core-cpu"
    slug = re.sub(r"[^a-z0-9]+", "-", str(label).lower()).strip("-")
    file = RESULTS / f"{name}-{now:%Y%m%d}-{slug}.json"
    data = {
        "benchmark": name,
        "date": now.isoformat(timespec="seconds"),
        "quick": quick,
        "machine": machine,
        "commit": commit(),
        "command": command or shlex.join(["murmur", *sys.argv[1:]]),
        "versions": versions(),
        "result": result,
    }
    file.write_text(json.dumps(data, indent=1) + "\n")
    file.with_suffix(".md").write_text(_readable(data))
    return file


def _readable(data: Mapping[str, Any]) -> str:
    """A saved result as a page."""
    machine = data["machine"]
    console = Console(file=io.StringIO(), width=140, record=True)
    for table in result_tables(data["result"]):
        console.print(table, "")
    lines = [line.rstrip() for line in console.export_text().splitlines()]
    return "\n".join(
        [
            f"# {data['benchmark']}",
            "",
            f"`{data['command']}`, {data['date'][:10]}, commit {data['commit']}, "
            f"{machine['cores']} cores ({machine['cpu']}), GPU: {machine['gpu'] or 'none'}.",
            "",
            "```text",
            *lines,
            "```",
            "",
        ]
    )

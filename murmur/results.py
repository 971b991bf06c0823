"""Results of benchmarks: their origin, and their files, tables and pages."""

import io
import json
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from murmur.doctor.machine import RESULTS, changed_files, commit, describe_machine, versions
from murmur.shared.process.errors import ConfigError, MurmurError
from murmur.text import in_rows, number, plain

PAGE_WIDTH = 140  # characters of a line of a saved page
_SHOWN_FILES = 3  # of those that are not committed
_GAP = 3  # characters between two columns


def require_clean_source(dirty: bool) -> None:
    """Refuse to keep a result that cannot be measured again. Call it before measuring.

    Args:
        dirty: True if the user allows it (`--dirty`); the result then says "-dirty".

    Raises:
        ConfigError: if the source differs from its commit.
    """
    changed = changed_files()
    if changed and not dirty:
        shown = ", ".join(changed[:_SHOWN_FILES]) + (" ..." if len(changed) > _SHOWN_FILES else "")
        raise ConfigError(
            f"the result cannot be saved: {len(changed)} files differ from commit {commit()} "
            f"({shown}), so no commit repeats it; commit them, or add --dirty: the result then "
            "says so"
        )


def run_command(main: Callable[[], int | None]) -> NoReturn:
    """Run the main function of a benchmark's own command.

    A user's mistake is one line and code 2, a stop by Ctrl-C or SIGTERM code 130.
    """
    try:
        raise SystemExit(main())
    except MurmurError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def provenance(module: str = "") -> dict[str, Any]:
    """Return a result's origin: date, machine, commit, command, versions. Call it first.

    Args:
        module: module of a benchmark with a command of its own, `python -m <module>`; else
            `murmur`.
    """
    program = ["python", "-m", module] if module else ["murmur"]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "commit": commit(),
        "command": shlex.join([*program, *sys.argv[1:]]),
        "versions": versions(),
    }


def origin_text(record: Mapping[str, Any]) -> str:
    """Return date, commit and machine of a result as text, from `provenance`."""
    machine = record["machine"]
    return (
        f"{record['date'][:10]}, commit {record['commit']}, {machine['cores']} cores "
        f"({machine['cpu']}), GPU: {machine['gpu'] or 'none'}"
    )


def save_result(
    name: str,
    result: Mapping[str, Any],
    origin: Mapping[str, Any],
    *,
    quick: bool = False,
    folder: Path | None = None,
) -> Path:
    """Write a result and its page.

    Args:
        name: name of the benchmark.
        result: measured values.
        origin: origin, from `provenance`.
        quick: True if the measurement was rough.
        folder: folder of the result; None: benchmarks/results.

    Returns:
        the JSON file; the page (.md) lies beside it.
    """
    folder = folder or RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    machine = origin["machine"]
    label = machine["gpu"] or f"{machine['cores']}-core-cpu"
    slug = re.sub(r"[^a-z0-9]+", "-", str(label).lower()).strip("-")
    day = origin["date"][:10].replace("-", "")
    file = folder / f"{name}-{day}-{slug}.json"
    data = {"benchmark": name, "quick": quick, **origin, "result": result}
    file.write_text(json.dumps(data, indent=1) + "\n")
    file.with_suffix(".md").write_text(_readable(data))
    return file


def result_tables(
    result: Mapping[str, Any], title: str = "", *, width: int = PAGE_WIDTH
) -> list[Table]:
    """Return a nested result as tables: plain values as a list, sections of plain values as rows.

    Args:
        result: measured values.
        title: title of the first column.
        width: characters of a line; the columns of a wider table are shown in several tables.
    """
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
        tables += _rows_tables(title, rows, width)
    for key, value in result.items():
        if isinstance(value, dict) and key not in rows:
            tables += result_tables(value, f"{title} {key}".strip(), width=width)
        elif isinstance(value, list) and not _is_plain(value):
            tables += _rows_tables(key, {str(i): row for i, row in enumerate(value)}, width)
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
    """Return an empty table."""
    return Table(*(Column(plain(text)) for text in headings), box=None, padding=(0, _GAP, 0, 0))


def _rows_tables(title: str, rows: Mapping[str, Mapping[str, Any]], width: int) -> list[Table]:
    """Return rows as a table; as several tables with some columns each if it is too wide."""
    columns = list(dict.fromkeys(key for row in rows.values() for key in row))
    if len(columns) > max(8, len(rows)):  # too wide to read: turn it
        turned = {c: {name: row.get(c) for name, row in rows.items()} for c in columns}
        return _rows_tables(title, turned, width)
    cells = {c: [_cell(row.get(c)) for row in rows.values()] for c in columns}

    def narrowest(column: str) -> int:
        """Return the characters of a column; headings break between words, cells do not."""
        return max(map(len, [*column.split(), *(cell.plain for cell in cells[column])]), default=0)

    names = min(max(map(len, [*title.split(), *rows]), default=0), width // 2)
    tables = []
    for part in in_rows(columns, narrowest, gap=_GAP, limit=width - names - 2 * _GAP):
        table = _table(title, *part)
        table.columns[0].width = names  # rich shrinks all others to fit
        for column in table.columns[1:]:
            column.min_width = narrowest(str(column.header))
        for i, name in enumerate(rows):
            table.add_row(plain(name), *(cells[column][i] for column in part))
        tables.append(table)
    return tables


def _readable(data: Mapping[str, Any]) -> str:
    """Return a saved result as a page."""
    console = Console(file=io.StringIO(), width=PAGE_WIDTH, record=True)
    for table in result_tables(data["result"]):
        console.print(table, "")
    shown = "\n".join(line.rstrip() for line in console.export_text().splitlines())
    origin = f"`{data['command']}`, {origin_text(data)}."
    return f"# {data['benchmark']}\n\n{origin}\n\n```text\n{shown}\n```\n"

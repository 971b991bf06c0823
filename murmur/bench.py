"""`murmur bench`: a list of the benchmarks, and their runs.

A benchmark is a file with DESCRIPTION and run(effort) in murmur/benchmarks, or in benchmarks and
tests/chaos, which only a checkout has. The list reads the files and imports none of them: it must
not need what a benchmark needs. NEEDS names modules that are not part of the extras env, learner
and report.
"""

import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from murmur.benchmarks.effort import Effort
from murmur.doctor.machine import ROOT
from murmur.results import provenance, require_clean_source, result_tables, save_result
from murmur.runs.declared import ModuleSource
from murmur.shared.config.extras import extra_of, install_command
from murmur.shared.config.section import known_names
from murmur.shared.process.errors import ConfigError
from murmur.text import plain

_CHECKOUT = {"benchmarks": ROOT / "benchmarks", "tests.chaos": ROOT / "tests" / "chaos"}
_PACKAGES = {
    "murmur.benchmarks": ROOT / "murmur" / "benchmarks",
    **(_CHECKOUT if (ROOT / "pyproject.toml").is_file() else {}),
}
# Listed where they are missing, too.
_OF_A_CHECKOUT = (
    *("faults", "kills", "kills_ranks", "launches", "ledger", "memory", "ranks", "replay"),
    *("sources", "supply"),
)
_BASE = ("numba", "torch", "grpc_health")  # of the extras env and learner, which all need


@dataclass(frozen=True)
class Topic:
    """One benchmark, as far as its file tells.

    Attributes:
        name: name that `murmur bench` takes.
        module: full name of the module; "" if its file is missing.
        description: text of its DESCRIPTION.
        needs: top-level modules that it imports beside those of the documented installation.
    """

    name: str
    module: str
    description: str
    needs: tuple[str, ...] = ()

    def missing(self) -> str:
        """Return the missing requirements with their remedy; "" if the benchmark can run."""
        if not self.module:
            return (
                "it needs murmur installed from a checkout, with pip install -e or `make install` "
                "there: the package does not hold it"
            )
        absent = [name for name in (*_BASE, *self.needs) if find_spec(name) is None]
        if not absent:
            return ""
        extras = sorted({extra_of(name) or name for name in absent})
        return f"it needs {', '.join(absent)}: {install_command(','.join(extras))}"


def topics() -> dict[str, Topic]:
    """Return all benchmarks by name."""
    found = {}
    for package, folder in _PACKAGES.items():
        for file in sorted(folder.glob("*.py")):
            name, module = file.stem, f"{package}.{file.stem}"
            source = ModuleSource(module, file)
            if source.bound.keys() >= {"run", "DESCRIPTION"}:
                needs = source.NEEDS if "NEEDS" in source.bound else ()
                found[name] = Topic(name, module, source.DESCRIPTION, needs)
    for name in _OF_A_CHECKOUT:
        found.setdefault(name, Topic(name, "", "a checkout only"))
    return dict(sorted(found.items()))


def find_topic(name: str) -> Topic:
    """Find a benchmark that can run here.

    Raises:
        ConfigError: for an unknown name, or naming what it needs.
    """
    known = topics()
    if name not in known:
        raise ConfigError(f"no benchmark '{name}'; {known_names(name, known)}")
    missing = known[name].missing()
    if missing:
        raise ConfigError(f"benchmark '{name}' cannot run: {missing}")
    return known[name]


def list_benchmarks() -> Table:
    """Return a table of all benchmarks with their descriptions and missing requirements."""
    table = Table("benchmark", "what it measures", box=None, padding=(0, 3, 0, 0))
    for topic in topics().values():
        missing = topic.missing()
        text = plain(topic.description)
        if missing:
            text.append_text(plain(f" ({missing})", "yellow"))
        table.add_row(topic.name, text)
    return table


def run_benchmark(
    name: str,
    effort: Effort,
    console: Console,
    *,
    save: bool = False,
    dirty: bool = False,
    folder: Path | None = None,
    chosen: Sequence[str] = (),
    dry_run: bool = False,
) -> Path | None:
    """Run one benchmark, print its result and, if asked, keep it.

    Args:
        name: name of the benchmark.
        effort: extent of the measurement.
        console: console that prints the result.
        save: flag to write the result.
        dirty: flag to write it even if the source differs from its commit.
        folder: folder of the result; None: benchmarks/results.
        chosen: topics of a benchmark that has topics; none: all.
        dry_run: flag to measure nothing: the result, `<name>-expected`, says what would be measured
            and what to expect of it.

    Returns:
        file of the result, None if it is not saved.

    Raises:
        ConfigError: for an unknown name, for what is not installed, for source that differs, for
            topics or a plan of a benchmark that has none.
    """
    topic = find_topic(name)
    if save:
        require_clean_source(dirty)
    module = _import(topic)
    if dry_run and not hasattr(module, "dry_run"):
        raise ConfigError(f"--dry-run: benchmark '{name}' has no plan to print; `gpu` has one")
    measure = module.dry_run if dry_run else partial(module.run, effort)
    if chosen and "chosen" not in inspect.signature(measure).parameters:
        raise ConfigError(f"--topics: benchmark '{name}' has no topics; `gpu` has some")
    origin = provenance()
    if not dry_run:
        console.print(plain(name, "bold"), plain(f": {topic.description}"), sep="")
    result = measure(tuple(chosen)) if chosen else measure()
    for table in result_tables(result, width=console.width):
        console.print(table, "")
    if not save:
        return None
    quick = effort is not Effort.FULL and not dry_run
    kept = f"{name}-expected" if dry_run else name
    file = save_result(kept, result, origin, quick=quick, folder=folder)
    console.print(plain(f"written: {file}"))
    return file


def _import(topic: Topic) -> Any:  # noqa: ANN401 - a module with `run`
    """Import the benchmark's module; murmur's own `tests` before any other of that name."""
    if topic.module.startswith("tests."):
        sys.path.insert(0, str(ROOT))
    return import_module(topic.module)

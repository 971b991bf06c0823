"""Commands that prepare a run: config, new, certs, check-env, check-source, conformance."""

import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from murmur.cli.app import PREPARE, command
from murmur.cli.options import Set, complete_config, complete_environment, complete_source
from murmur.shared.config.section import known_names
from murmur.shared.process.errors import ConfigError
from murmur.shared.process.files import write_json
from murmur.shared.process.process import logger
from murmur.shared.wire.notices import PREFIX
from murmur.text import plain


@command(PREPARE)
def config(
    name: Annotated[str | None, typer.Argument(autocompletion=complete_config)] = None,
    set_: Set = None,
    explain_: bool = False,
    schema: bool = False,
) -> None:
    """Show a configuration with every default; without a name list what there is.

    [bold]Examples[/]

      murmur config

      murmur config terrain-demo --set learner.device=cpu

      murmur config terrain-demo --explain

      murmur config --schema > murmur.schema.json

    Options:
        name: A YAML file or a name; without it, list what there is.
        explain_: Every key: value, default if another, meaning.
        schema: The JSON Schema of all configurations, for editors: docs say how.
    """
    from murmur.runs.settings import explain, json_schema, list_everything, resolved_data
    from murmur.shared.config.files import load
    from murmur.shared.config.text import to_yaml

    console = Console()
    if schema:
        if name is not None or explain_ or set_:
            raise ConfigError("--schema is that of all configurations: give it alone")
        print(json.dumps(json_schema(), indent=1))
    elif name is None:
        _show_names(list_everything(), console)
    elif explain_:
        _show_explained(explain(load(name, set_ or [])), console)
    else:
        print(to_yaml(resolved_data(load(name, set_ or []))), end="")


@command(PREPARE, "list")
def list_(
    kind: Annotated[str | None, typer.Argument()] = None,
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """List configurations and plug-ins, murmur's and those of installed packages, a line each.

    [bold]Examples[/]

      murmur list

      murmur list algorithms

      murmur list --json -

    Options:
        kind: configurations, environments, baselines, sources, algorithms, networks or trackers;
            without it, all.
        json_file: Write the list here; -: to standard output.
    """
    from murmur.runs.settings import list_everything

    found = list_everything()
    if kind is not None:
        wanted = next((name for name in found if name in (kind, f"{kind}s")), None)
        if wanted is None:
            raise ConfigError(f"nothing is called '{kind}' here; {known_names(kind, found)}")
        found = {wanted: found[wanted]}
    if json_file is not None:
        write_json(json_file, found)
    else:
        _show_names(found, Console())


def _show_names(found: Mapping[str, Mapping[str, str]], console: Console) -> None:
    """Print a table of names for each kind."""
    from rich.table import Table

    for kind, names in found.items():
        table = Table(
            kind, "", box=None, padding=(0, 2, 0, 2), title_justify="left", header_style="bold cyan"
        )
        for item, sentence in names.items():
            table.add_row(plain(item), plain(sentence))
        console.print(table, "")
    console.print("`murmur config NAME` shows a configuration, --explain what its keys mean")


def _show_explained(rows: Sequence[tuple[str, object, object, str]], console: Console) -> None:
    """Print every key with its value, its default if that is another, and its meaning."""
    from rich.padding import Padding

    longest = max(len(key) for key, *_ in rows)
    for key, value, default, meaning in rows:
        shown, usual = _short(value), _short(default)
        changed = value != default and shown != usual
        head = f"{key:<{longest}}  {shown}" + (f"  (default {usual})" if changed else "")
        if not console.is_terminal:  # a line for each key, to search in
            print(f"{head}  {meaning}")
            continue
        console.print(plain(head, "bold" if changed else ""))
        console.print(Padding(plain(meaning, "dim"), (0, 0, 0, 4)))


def _short(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "–"
    return str(value) if value != "" else "''"


@command(PREPARE)
def new(
    kind: Literal["algorithm", "network", "environment", "source"],
    name: str,
) -> None:
    """Write a plug-in of your own to begin with: a file, its test and a configuration.

    All three go into the working directory; the plug-in trains as it is. Nothing is overwritten.

    [bold]Examples[/]

      murmur new algorithm reinforce

      murmur new network attention

      murmur new environment street

    Options:
        kind: What to write.
        name: Of its file; in CamelCase, of its class.
    """
    from murmur.kit.new import write_skeleton

    files, named = write_skeleton(kind, name, Path())
    console = Console(soft_wrap=True, highlight=False)
    for file in files:
        console.print(plain(f"written: {file}"))
    plugin, test, configuration = files
    console.print("\nnext:")
    for line, what in (
        *([] if find_spec("pytest") else [("pip install pytest", "it runs the test")]),
        (f"pytest {test}", f"whether {named} keeps the contract"),
        (f"murmur train {configuration}", f"train with it; then change {plugin}"),
    ):
        console.print(plain(f"  {line}", "bold"))
        console.print(plain(f"      {what}", "dim"))


@command(PREPARE)
def certs(
    folder: Path,
    host: list[str] | None = None,
    days: Annotated[int, typer.Option(min=1)] = 365,
    renew: bool = False,
    force: bool = False,
    keep: bool = False,
) -> None:
    """Make certificates and tokens, so that learner and environment servers trust each other.

    Services that run read the new files by themselves. See docs/security.md.

    [bold]Examples[/]

      murmur certs certs --host gpu-host

      murmur certs certs --renew

    Options:
        folder: Where to write; one folder for each role in it.
        host: A name or address under which clients connect to the learner, beside localhost,
            learner and this machine's name. Repeatable.
        days: Days until the certificates expire.
        renew: New certificates from the authority that is there, with the names of the old ones,
            and new tokens; the newest old tokens stay valid.
        force: Replace everything: earlier credentials are refused.
        keep: If all files exist, check them and write nothing.
    """
    from murmur.kit.certs import are_there, default_hosts, make_certificates

    if renew + force + keep > 1:
        raise ConfigError("--renew, --force and --keep contradict each other: choose one")
    hosts = [*default_hosts(), *(host or [])]
    console = Console(soft_wrap=True, highlight=False)
    if keep and are_there(folder):
        console.print(plain(f"kept: {folder}"))
        return
    for made in make_certificates(folder, hosts, days, renew=renew, force=force):
        console.print(plain(f"written: {made}  (--set security.folder={made})"))
    console.print(
        f"Give each machine the folder of its role, keep {folder / 'ca.key'} to yourself.",
        markup=False,
    )


@command(PREPARE)
def check_env(
    name: Annotated[str, typer.Argument(autocompletion=complete_environment)],
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE")] = None,
    step_limit: Annotated[float, typer.Option(min=0.1)] = 20.0,
) -> None:
    """Test an environment against the contract and report what is wrong.

    It plays in a process of its own, so that a step that hangs or ends its process is reported too.

    [bold]Examples[/]

      murmur check-env terrain

      murmur check-env mpe2.simple_spread_v3:parallel_env --set arguments.N=3

      murmur check-env gymnasium:make --set arguments.id=CartPole-v1

      murmur check-env my_package.my_env:make_env

    Options:
        name: An environment's name, or package.module:factory of a PettingZoo, Gymnasium or
            vectorised environment.
        set_: One of its options, e.g. arguments.max_cycles=50 for a factory. Repeatable.
        step_limit: Longest time that a step may take, s.
    """
    print(f"checking '{name}' ...", flush=True)
    from murmur.kit.check_env import check_apart

    checked = check_apart(name, set_ or [], step_limit)
    console = Console(soft_wrap=True)
    for problem in checked.problems:
        console.print("[red]✗[/]", plain(problem))
    for notice in checked.notices:
        console.print("[yellow]![/]", plain(notice))
    if checked.problems:
        raise SystemExit(1)
    console.print("[green]✓[/]", plain(f"'{name}' keeps the contract of an environment"))
    for line in checked.description:
        console.print(plain(f"  {line}"))


@command(PREPARE)
def check_source(
    name: Annotated[str, typer.Argument(autocompletion=complete_source)],
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE")] = None,
    samples: Annotated[int, typer.Option(min=0)] = 200,
    sheet: Annotated[Path | None, typer.Option(metavar="FILE")] = None,
) -> None:
    """Read samples of a source: what is broken, how fast it is, how much there is of each class.

    Exits with 0 if all that was read can be used and holds two classes or more, else with 1.

    [bold]Examples[/]

      murmur check-source faces --sheet faces.png

      murmur check-source folder --set path=data --set size=128 --samples 0

    Options:
        name: A source's name, module:Class of your own, or a configuration.
        set_: One of its options, e.g. size=128. Repeatable.
        samples: Samples to read, of both splits; 0: all.
        sheet: Write a PNG of some samples beside their masks.
    """
    from murmur.kit.check_source import examine, show, write_sheet
    from murmur.runs.settings import source_config

    logger.addFilter(lambda record: not record.getMessage().startswith(PREFIX))  # `show` does
    found = examine(source_config(name, set_ or []), samples)
    console = Console(soft_wrap=True, highlight=False)
    show(found, console)
    if sheet is not None:
        write_sheet(found, sheet)
        console.print(plain(f"written: {sheet}"))
    raise SystemExit(0 if found.usable else 1)


@command(PREPARE)
def conformance(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT")],
    command: Annotated[list[str] | None, typer.Argument()] = None,
    security: Annotated[Path | None, typer.Option(metavar="FOLDER")] = None,
    patience: Annotated[float, typer.Option(min=1)] = 60.0,
) -> None:
    """Examine a server, in whatever language, against the contract of docs/wire.md.

    Plays the learner, with good answers and bad ones, cuts connections and goes away. Start your
    server of environments or samples and let it connect to HOST:PORT, or give the command that
    starts it. Exits with 0 if the contract is kept, with 1 if not.

    [bold]Examples[/]

      murmur conformance 127.0.0.1:50051

      murmur conformance 127.0.0.1:50051 -- murmur env-server spread --set env_server.metrics_port=0

      murmur conformance 0.0.0.0:50051 --security certs/learner

    Options:
        address: Where to listen.
        command: Starts the server, after --; then its exit codes and its stop are examined too.
        security: A learner's credentials, to examine with TLS and tokens.
        patience: Longest time that a step or a replay may take, s.
    """
    from murmur.kit.conformance.examine import examine_and_show

    console = Console(soft_wrap=True)
    kept = examine_and_show(address, command or [], security, patience, console)
    raise SystemExit(0 if kept else 1)

"""The application that commands register with, and the entry point `main`."""

import inspect
import os
import platform
import re
import shlex
import sys
import threading
from collections.abc import Callable, Sequence
from copy import copy
from itertools import pairwise
from typing import Annotated, Any, TypeVar, get_args, get_origin

import typer
import typer.core
from rich.console import Console
from typing_extensions import override

from murmur.shared.config.extras import DISTRIBUTION, advising
from murmur.shared.config.plugin_folders import look_in
from murmur.shared.config.section import nearest
from murmur.shared.process.errors import ConfigError, MurmurError
from murmur.shared.process.files import disk_error
from murmur.shared.process.process import FOREIGN_VARIABLES, leave
from murmur.text import plain

Function = TypeVar("Function", bound=Callable[..., None])
TRAIN, RESULTS, SPEED, PREPARE = "Train", "Results", "Machine and speed", "Prepare"  # of commands

_HELP = re.compile(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", re.MULTILINE)  # of a parameter
# Options of other libraries' commands -> murmur's.
_OTHER_OPTIONS = {
    **dict.fromkeys(("cuda", "gpu", "cpu"), "device"),
    **dict.fromkeys(("timesteps", "total_timesteps", "num_steps"), "steps"),
    "num_envs": "envs_per_worker",
}


class _Commands(typer.core.TyperGroup):
    """The commands; an unknown option is answered with the nearest one, or a key of --set."""

    @override
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            if type(error).__name__ != "NoSuchOption":  # click's, which typer hides
                raise
            raise ConfigError(_unknown_option(error)) from None


def _unknown_option(error: Any) -> str:  # noqa: ANN401
    """Return a message about an option that a command lacks, with what to write instead."""
    from murmur.cli.options import SHORT
    from murmur.runs.settings import all_keys

    options = {opt for p in error.ctx.command.params for opt in (*p.opts, *p.secondary_opts)}
    named = {option.lstrip("-").replace("-", "_"): option for option in options}
    keys = dict[str, str]()
    for key in all_keys() if "--set" in options else ():  # of equal names the first counts
        short = SHORT.get(key, "")
        written = short if short in options else f"--set {key}=VALUE"
        keys.setdefault(key.rpartition(".")[2], written)
    name = error.option_name.lstrip("-").replace("-", "_")
    name = _OTHER_OPTIONS.get(name, name)
    if keys.get(name) in options:
        near = [keys[name]]
    else:
        alike = [named[found] for found in nearest(name, named, 1)]
        near = alike or [keys[found] for found in nearest(name, keys)]
    command = error.ctx.command.name
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    return f"`murmur {command}` has no option {error.option_name}{hint} (`murmur {command} -h`)"


app = typer.Typer(
    name="murmur",
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Trains teams of agents: CPU environment servers stream to one learner over gRPC.",
    epilog="First steps: [bold]murmur check[/], then [bold]murmur train terrain-demo[/].",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def command(panel: str, name: str | None = None) -> Callable[[Function], Function]:
    """Register a function as a command whose docstring ends with the help of its parameters.

    The section "Options:" has the help of every parameter whose annotation has none. An option is
    called like its parameter, without an underscore at its end; a flag has no --no-flag.

    Args:
        panel: heading above the command in the list of commands.
        name: name of the command; None: that of the function.
    """

    def register(function: Function) -> Function:
        text, _, options = inspect.cleandoc(function.__doc__ or "").partition("\n\nOptions:\n")
        helps = {found[1]: " ".join(found[2].split()) for found in _HELP.finditer(options)}
        for parameter in inspect.signature(function).parameters.values():
            kind, info = parameter.annotation, None
            if get_origin(kind) is Annotated:
                kind, info = get_args(kind)
            elif parameter.default is parameter.empty:
                info = typer.Argument()
            option = parameter.name.rstrip("_").replace("_", "-")
            info = copy(info or typer.Option(f"--{option}"))
            info.help = helps.pop(parameter.name, info.help)
            function.__annotations__[parameter.name] = Annotated[kind, info]
        assert not helps, f"no parameters of {function.__name__}: {', '.join(helps)}"
        return app.command(name, help=text, rich_help_panel=panel)(function)

    return register


def _print_version(wanted: bool) -> None:
    """Print the versions that a report of a defect needs, and end."""
    if not wanted:
        return
    from murmur.doctor.machine import commit, installed_version

    own, torch = installed_version(DISTRIBUTION) or "from source", installed_version("torch")
    source = commit()
    print(f"murmur {own}" + (f" ({source})" if source != "unknown" else ""))
    print(f"Python {platform.python_version()}, torch {torch or 'not installed'}")
    raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the versions of murmur, Python and torch.",
        ),
    ] = False,
) -> None:
    """Trains teams of agents: CPU environment servers stream to one learner over gRPC."""


_NO_SEARCH = "let Optuna call murmur.train (docs/many-runs.md#search-with-optuna)"
# A command, or a command and its option, that was removed -> what to use instead.
_REMOVED = {
    "conformance --learner": "the kit examines servers; docs/wire.md says what a learner does",
    "csv": "murmur.Run(FOLDER).metrics().to_csv(FILE) and .evaluations().to_csv(FILE) write tables "
    "(docs/tracking.md#csv)",
    "profile --nsys": "docs/idle-gpu.md has the commands for Nsight Systems",
    "runs --algorithm": "give a pattern of folders, 'runs/NAME-*', or --json to jq",
    "runs --environment": "give a pattern of folders, 'runs/NAME-*', or --json to jq",
    "sweep --method": _NO_SEARCH,
    "sweep --trials": _NO_SEARCH,
    "slurm --time": "give it to sbatch: --sbatch=--time=12:00:00",
    "slurm --partition": "give it to sbatch: --sbatch=--partition=NAME",
    "slurm --env-partition": "write #SBATCH --partition=NAME under component 1 of the script",
    "slurm --account": "give it to sbatch: --sbatch=--account=NAME",
    "slurm --mem-per-cpu": "give it to sbatch: --sbatch=--mem-per-cpu=4G",
    "slurm --requeue": "the job is queued again as it is",
    "slurm --no-requeue": "write requeue=no in the script, and #SBATCH --no-requeue",
    "slurm --save-before": "give it to sbatch: --sbatch=--signal=B:USR1@SECONDS",
    "slurm --max-restarts": "write max_restarts=NUMBER in the script",
}


def _refuse_removed(typed: Sequence[str]) -> None:
    """Refuse what was removed, by its name.

    Args:
        typed: words of the command line after `murmur`.

    Raises:
        ConfigError: saying what to use instead.
    """
    for before, word in pairwise(("", *typed)):
        if word == "--":
            return
        if before == "--sbatch":  # whose value is an option
            continue
        name = word.partition("=")[0]
        named = typed[0] if word is typed[0] else f"{typed[0]} {name}"
        if named in _REMOVED:
            raise ConfigError(f"`murmur {named}` was removed: {_REMOVED[named]}")


def typed_command() -> str:
    """Return the command line of this process, as a shell takes it."""
    return shlex.join(["murmur", *sys.argv[1:]])


def main() -> None:
    """Run the command line; a user-fixable error is one line and exits with 2."""
    try:
        _run()
    except SystemExit as end:
        if threading.active_count() == 1:
            raise
        leave(end)


def _run() -> None:
    """Run a command, and end with its exit code.

    Raises:
        SystemExit: always, but after an error that is a fault of murmur's.
    """
    for name in FOREIGN_VARIABLES:
        os.environ.pop(name, None)
    try:
        os.getcwd()
    except FileNotFoundError:
        _fail("the working directory was deleted; change to another one")
    look_in()  # what is named as module:Name may lie in the working directory
    try:
        _refuse_removed(sys.argv[1:])
        with advising():
            app(prog_name="murmur")
    except MurmurError as error:
        _fail(str(error))
    except OSError as error:
        known = disk_error(error)
        if known is None:
            raise
        _fail(str(known))
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _fail(message: str) -> None:
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(plain("error:", "bold red"), plain(" ".join(message.split()), "red"))
    raise SystemExit(2)

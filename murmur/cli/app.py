"""The application that commands register with, and the entry point `main`."""

import os
import sys

import typer
from rich.console import Console
from rich.markup import escape

from shared.errors import MurmurError

app = typer.Typer(
    name="murmur",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Trains teams of agents: CPU environment servers stream to one learner over gRPC.",
    epilog="First steps: [bold]murmur check[/], then [bold]murmur train terrain-demo[/].",
    context_settings={"help_option_names": ["-h", "--help"]},
)

_EXTRAS = {
    "torch": "learner",
    "kornia": "learner",
    "tensorboard": "learner",
    "grpc_health": "learner",
    "PIL": "env",
    "numba": "env",
    "gymnasium": "zoo",
    "pettingzoo": "zoo",
    "mpe2": "zoo",
    "onnx": "export",
    "onnxruntime": "export",
    "onnxscript": "export",
    "lbforaging": "zoo",
    "vmas": "vmas",
    "jinja2": "report",
    "matplotlib": "report",
    "imageio": "report",
}


def main() -> None:
    """Run the command line; what a user can mend is said in one line and exits with 2."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # an environment given as module:factory may lie here
    try:
        app(prog_name="murmur")
    except MurmurError as error:
        _fail(str(error))
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _EXTRAS:
            raise
        _fail(
            f"this needs '{missing}', which is not installed: "
            f"pip install 'murmur-marl[{_EXTRAS[missing]}]'"
        )
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _fail(message: str) -> None:
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(f"[bold red]error:[/] [red]{escape(' '.join(message.split()))}[/]")
    raise SystemExit(2)

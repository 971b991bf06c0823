"""`murmur conformance`: runs the examination and prints the checklist."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from murmur.conformance.checklist import CONTRACT, Checklist
from murmur.conformance.examine import Examination, Limits
from murmur.text import plain
from shared.credentials import CredentialFolder
from shared.errors import ConfigError

_SHOWN = 3  # findings of one kind

# Why a sentence was not put to the test.
_UNTESTED = {
    "credentials": "needs --security",
    "choices": "nothing was played",
    "void": "no environment failed",
    "answers": "needs the command that starts the server",
    "drain": "needs the command that starts the server",
}


def examine_and_show(
    address: str,
    command: Sequence[str],
    security: Path | None,
    patience_s: float,
    console: Console,
) -> bool:
    """Examine one environment server; returns whether it keeps the contract.

    Raises:
        MurmurError: if the address cannot be had, the command not be started, or nobody dials.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"'{address}' is no address: write it as host:port, 127.0.0.1:50051")
    host = host.strip("[]")
    credentials = CredentialFolder(security) if security else None
    limits = Limits(patience_s=patience_s)

    def ready(port: int) -> None:
        if not command:
            console.print(
                plain(
                    f"listening on {host}:{port}: start one environment server that dials this "
                    f"address (within {limits.start_s:g} s)"
                )
            )

    examination = Examination(
        host,
        int(port),
        credentials=credentials,
        limits=limits,
        say=lambda line: console.print(plain(f"  {line} …", "dim")),
    )
    checklist = asyncio.run(examination.run(command, ready=ready))
    show(checklist, console)
    return not checklist.problems


def show(checklist: Checklist, console: Console) -> None:
    """Every sentence of the contract with a mark, and what was wrong below it."""
    console.print("An environment server")
    for key, held, wrong in checklist.verdicts():
        mark = {True: "[green]✓[/]", False: "[red]✗[/]", None: "[dim]–[/]"}[held]
        why = "" if held is not None else f" ({_UNTESTED.get(key, 'it did not come to that')})"
        console.print(f"{mark} {escape(CONTRACT[key])}[dim]{why}[/]", highlight=False)
        for words in wrong[:_SHOWN]:
            console.print(plain(f"    {words}"))
        if len(wrong) > _SHOWN:
            console.print(f"    and {len(wrong) - _SHOWN} times more", highlight=False)
    count = len(checklist.problems)
    console.print(
        "[green]The contract is kept, as far as it was tested.[/]"
        if not count
        else f"[red]The contract is broken in {count} point{'s' * (count > 1)}.[/]"
    )

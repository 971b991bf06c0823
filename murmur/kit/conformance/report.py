"""`murmur conformance`: runs the examination and prints the checklist."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from murmur.kit.conformance.checklist import Checklist
from murmur.kit.conformance.examine import Examination
from murmur.kit.conformance.play import Limits
from murmur.shared.process.errors import ConfigError
from murmur.shared.wire.credentials import CredentialFolder
from murmur.text import plain

_SHOWN = 3  # findings of one kind

# Why a sentence was not put to the test.
_UNTESTED = {
    "credentials": "needs --security",
    "aborted": "no environment failed",
    "finite": "no array holds fractions",
    "named": "no sample was broken",
    "answers": "needs the command that starts the server",
    "drain": "needs the command that starts the server",
}


def _host_and_port(address: str) -> tuple[str, int]:
    """Split host:port; an IPv6 address is returned without its brackets.

    Raises:
        ConfigError: if it is not host:port.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"'{address}' is no address: write it as host:port, 127.0.0.1:50051")
    return host.strip("[]"), int(port)


def examine_and_show(
    address: str,
    command: Sequence[str],
    security: Path | None,
    patience_s: float,
    console: Console,
) -> bool:
    """Examine one server; return whether it keeps the contract.

    Args:
        address: address to listen on.
        command: command that starts the server.
        security: folder of a learner's credentials.
        patience_s: longest wait for one message.
        console: console that prints the report.

    Raises:
        MurmurError: if the address cannot be bound, the command does not start, or no peer
            connects.
    """
    host, port = _host_and_port(address)
    credentials = CredentialFolder(security) if security else None
    limits = Limits(patience_s=patience_s)

    def say(line: str) -> None:
        console.print(plain(f"  {line} …", "dim"))

    def ready(port: int) -> None:
        if not command:
            console.print(
                plain(
                    f"listening on {host}:{port}: start one environment server that connects to "
                    f"this address (within {limits.start_s:g} s)"
                )
            )

    examination = Examination(host, port, credentials=credentials, limits=limits, say=say)
    checklist = asyncio.run(examination.run(command, ready=ready))
    show(checklist, console)
    return not checklist.problems


def show(checklist: Checklist, console: Console) -> None:
    """Print every sentence of the contract with a mark, and its errors below it."""
    console.print(checklist.contract.subject)
    for key, held, wrong in checklist.verdicts():
        mark = {True: "[green]✓[/]", False: "[red]✗[/]", None: "[dim]–[/]"}[held]
        why = "" if held is not None else f" ({_UNTESTED.get(key, 'it did not come to that')})"
        sentence = escape(checklist.contract.sentences[key])
        console.print(f"{mark} {sentence}[dim]{why}[/]", highlight=False)
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

"""Sockets that a tree of processes opens to others than this machine.

    python -m tests.listeners FILE COMMAND...    runs a command, and writes them to a file of JSON

A process sees the sockets of its own network namespace alone.
"""

import ipaddress
import json
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

_LOOK_EVERY_S = 0.05


class Listeners:
    """Looks at all sockets of a process and its descendants, until its end.

    Attributes:
        loopback: addresses of TCP sockets that listen on loopback.
        beyond: what others can reach: TCP sockets that listen elsewhere, UDP sockets that are
            bound elsewhere, and Unix sockets without a file, which have no permissions.
    """

    def __init__(self, pid: int) -> None:
        """Watch a process that runs."""
        self._process = psutil.Process(pid)
        self.loopback, self.beyond = set[tuple[str, int]](), set[str]()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        """Begin to look."""
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Look no more."""
        self._ended.set()
        self._thread.join(10)

    def _watch(self) -> None:
        while not self._ended.wait(_LOOK_EVERY_S):
            self.look()

    def look(self) -> None:
        """Look once."""
        try:
            tree = [self._process, *self._process.children(recursive=True)]
        except psutil.Error:
            return
        for process in tree:
            try:
                command = " ".join(process.cmdline()[:6])
                connections = process.net_connections("all")
            except psutil.Error:  # it has ended
                continue
            for c in connections:
                self._note(command, c)

    def _note(self, command: str, c: Any) -> None:
        if c.family == socket.AF_UNIX:
            if c.laddr and c.laddr[0] in "@\0":
                self.beyond.add(f"{command}: abstract Unix socket {c.laddr}")
            return
        listens = c.status == psutil.CONN_LISTEN
        if not c.laddr or not (listens or (c.type == socket.SOCK_DGRAM and not c.raddr)):
            return
        if not is_loopback(c.laddr.ip):
            self.beyond.add(f"{command}: {c.type.name} {c.laddr.ip}:{c.laddr.port}")
        elif listens:
            self.loopback.add((c.laddr.ip, c.laddr.port))


def is_loopback(ip: str) -> bool:
    """Whether this machine alone reaches an address."""
    address = ipaddress.ip_address(ip)
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def main(file: Path, command: list[str]) -> int:
    """Run a command, and write what it listened on; returns its exit code."""
    with subprocess.Popen(command) as process, Listeners(process.pid) as found:
        code = process.wait()
    text = json.dumps({"loopback": sorted(found.loopback), "beyond": sorted(found.beyond)})
    file.write_text(text)
    return code


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]), sys.argv[2:]))

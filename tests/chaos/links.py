"""Links that can be cut, stalled, slowed down and made lossy: a proxy, and a network of their own.

The proxy works everywhere. The network (a network namespace, a pair of virtual devices, iptables)
needs root on Linux; what it drops is dropped below TCP, as on a real network.
"""

import asyncio
import os
import shutil
import subprocess
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import Self

_CHUNK = 1 << 16


class Link(ABC):
    """Between environment servers and a learner.

    Attributes:
        host, port: what environment servers connect to.
        prefix: put before the command of a process that is to sit at the link's far end.
        metrics_host: where such a process serves its metrics; reached whatever the link does.
    """

    host = metrics_host = "127.0.0.1"
    port = 0
    prefix: Sequence[str] = ()

    @abstractmethod
    def cut(self) -> None:
        """Nothing passes and both sides get an error, as by a device that goes down."""

    @abstractmethod
    def stall(self) -> None:
        """Nothing passes, and neither side gets an error."""

    @abstractmethod
    def half(self) -> None:
        """What the learner sends is lost without an error."""

    @abstractmethod
    def slow(self) -> None:
        """What is sent takes its time."""

    @abstractmethod
    def heal(self) -> None:
        """Everything passes again."""


class Proxy(Link):
    """A TCP proxy on a thread of its own, in front of a learner on this machine."""

    def __init__(self, learner_port: int) -> None:
        self._target = learner_port
        self._pass_up, self._pass_down = asyncio.Event(), asyncio.Event()
        self._open = True
        self._delay_s = 0.0
        self._writers: set[asyncio.StreamWriter] = set()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def __enter__(self) -> Self:
        """Listen."""
        self._thread.start()
        if not self._ready.wait(10):
            raise RuntimeError("the proxy does not listen")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close everything."""
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(10)

    async def _serve(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        self._pass_up.set()
        self._pass_down.set()
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._end.wait()
        server.close()
        self._drop_all()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self._open:
            writer.transport.abort()
            return
        try:
            there, out = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, out}
        up = asyncio.create_task(self._pump(reader, out, self._pass_up))
        down = asyncio.create_task(self._pump(there, writer, self._pass_down))
        await asyncio.wait({up, down}, return_when=asyncio.FIRST_COMPLETED)
        for task in (up, down):
            task.cancel()
        for end in (writer, out):
            end.transport.abort()
        self._writers -= {writer, out}

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, passes: asyncio.Event
    ) -> None:
        try:
            while data := await reader.read(_CHUNK):
                await passes.wait()
                if self._delay_s:
                    await asyncio.sleep(self._delay_s)
                writer.write(data)
                await writer.drain()
        except OSError:
            pass

    def _drop_all(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    def _do(self, *, up: bool, down: bool, accept: bool = True, delay_s: float = 0.0) -> None:
        def change() -> None:
            self._open, self._delay_s = accept, delay_s
            for event, passes in ((self._pass_up, up), (self._pass_down, down)):
                event.set() if passes else event.clear()
            if not accept:
                self._drop_all()

        self._loop.call_soon_threadsafe(change)

    def cut(self) -> None:
        self._do(up=True, down=True, accept=False)

    def stall(self) -> None:
        self._do(up=False, down=False)

    def half(self) -> None:
        self._do(up=True, down=False)

    def slow(self) -> None:
        """200 ms each way."""
        self._do(up=True, down=True, delay_s=0.2)

    def heal(self) -> None:
        self._do(up=True, down=True)


class Namespace(Link):
    """A network namespace, and two pairs of virtual devices: one for the wire, one for metrics."""

    def __init__(self, learner_port: int) -> None:
        self.port, self._name = learner_port, f"murmur{os.getpid()}"
        self.host, self.metrics_host = "10.213.7.1", "10.213.8.2"
        self.prefix = ("ip", "netns", "exec", self._name)
        self._device = f"mf{os.getpid()}"

    @staticmethod
    def available() -> bool:
        """Whether this machine lets us make one."""
        tools = all(shutil.which(tool) for tool in ("ip", "tc", "iptables"))
        if not tools or os.geteuid() != 0:
            return False
        name = f"murmurtry{os.getpid()}"
        words = ("ip", "netns", "add", name)
        made = subprocess.run(words, capture_output=True, check=False)
        if made.returncode == 0:
            words = ("ip", "netns", "del", name)
            subprocess.run(words, check=False)
        return made.returncode == 0

    def __enter__(self) -> Self:
        """Make it."""
        n, d = self._name, self._device
        self._run("ip", "netns", "add", n)
        for pair, net in (("w", "10.213.7"), ("m", "10.213.8")):
            here, there = f"{d}{pair}a", f"{d}{pair}b"
            self._run("ip", "link", "add", here, "type", "veth", "peer", "name", there, "netns", n)
            self._run("ip", "addr", "add", f"{net}.1/30", "dev", here)
            self._run("ip", "link", "set", here, "up")
            self._run("ip", "-n", n, "addr", "add", f"{net}.2/30", "dev", there)
            self._run("ip", "-n", n, "link", "set", there, "up")
        self._run("ip", "-n", n, "link", "set", "lo", "up")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Delete it; its devices go with it."""
        self._run("ip", "netns", "del", self._name)

    def _run(self, *command: str) -> None:
        subprocess.run(command, check=True, capture_output=True)

    def _drop(self, *match: str) -> None:
        """Drop what comes in at the far end from the learner's side and matches."""
        wire = ("-i", f"{self._device}wb")
        self._run(*self.prefix, "iptables", "-A", "INPUT", *wire, *match, "-j", "DROP")

    def cut(self) -> None:
        self._run("ip", "-n", self._name, "link", "set", f"{self._device}wb", "down")

    def stall(self) -> None:
        self._drop()
        wire = ("-o", f"{self._device}wb")
        self._run(*self.prefix, "iptables", "-A", "OUTPUT", *wire, "-j", "DROP")

    def half(self) -> None:
        self._drop()

    def slow(self) -> None:
        """64 kbit/s each way."""
        rate = ("root", "tbf", "rate", "64kbit", "burst", "4kb", "latency", "800ms")
        self._run("tc", "qdisc", "add", "dev", f"{self._device}wa", *rate)
        self._run("tc", "-n", self._name, "qdisc", "add", "dev", f"{self._device}wb", *rate)

    def lose(self, share: float) -> None:
        """Lose a share of the packets, each way."""
        random = ("-m", "statistic", "--mode", "random", "--probability", str(share))
        self._drop(*random)
        out = ("-o", f"{self._device}wb", *random)
        self._run(*self.prefix, "iptables", "-A", "OUTPUT", *out, "-j", "DROP")

    def heal(self) -> None:
        self._run(*self.prefix, "iptables", "-F")
        for command in (
            ("tc", "qdisc", "del", "dev", f"{self._device}wa", "root"),
            ("tc", "-n", self._name, "qdisc", "del", "dev", f"{self._device}wb", "root"),
        ):
            subprocess.run(command, check=False, capture_output=True)  # there may be none
        self._run("ip", "-n", self._name, "link", "set", f"{self._device}wb", "up")

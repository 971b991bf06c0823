"""Counters of a run's environment servers: read from metrics, and kept in the run's folder.

`murmur train` reads the metrics of the servers that it started and appends them to servers.jsonl,
so that the ledgers of their workers outlive them.
"""

import json
import re
import time
import urllib.parse
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from murmur.runs.run_folder import RunFolder
from murmur.shared.process.addresses import is_loopback
from murmur.shared.process.errors import ConfigError

FILE = "servers.jsonl"
EVERY_S = 5.0  # between two lines
_LISTENS = re.compile(r"metrics and health on (http://[^\s\"]+)")  # of a server's log
_QUICK_S = 2.0

Sample = tuple[str, Mapping[str, str], float]


@dataclass(frozen=True)
class Servers:
    """Counters of the workers of a run's environment servers at one moment, in sum.

    Attributes:
        time: time of the snapshot [s], on the clock of the learner's snapshot beside it.
        states: seconds of all training or supply workers by state.
        cpu_s: CPU seconds of these workers.
        cpu_wait_s: seconds in which these workers were ready to run and had no processor.
        tree_cpu_s: CPU seconds of their servers and all processes below them.
        messages: messages that these workers sent.
        rows: environment rows, or samples, in these messages.
        evaluator_cpu_s: CPU seconds of the evaluators and all processes below them.
        here: whether all servers are on the learner's machine, as far as names tell.
    """

    time: float
    states: Mapping[str, float] = field(default_factory=dict)
    cpu_s: float = 0.0
    cpu_wait_s: float = 0.0
    tree_cpu_s: float = 0.0
    messages: float = 0.0
    rows: float = 0.0
    evaluator_cpu_s: float = 0.0
    here: bool = True


_SUMS = {
    "murmur_env_cpu_seconds_total": "cpu_s",
    "murmur_env_cpu_wait_seconds_total": "cpu_wait_s",
    "murmur_env_tree_cpu_seconds_total": "tree_cpu_s",
    "murmur_env_steps_total": "rows",
}


def servers_of(
    at: float, pages: Mapping[str, Iterable[Sample]], learner: str = ""
) -> Servers | None:
    """Sum the counters of environment servers; None if no page is a server's that trains.

    Args:
        at: time of the pages [s].
        pages: samples by address of the server.
        learner: address of the learner; empty: the machine of all.
    """
    states: dict[str, float] = {}
    sums, hosts = dict.fromkeys((*_SUMS.values(), "messages", "evaluator_cpu_s"), 0.0), set()
    for address, page in pages.items():
        samples = list(page)
        modes = {labels["mode"] for name, labels, _ in samples if name == "murmur_env_info"}
        if not modes:
            continue
        evaluates = modes == {"evaluate"}
        if not evaluates:
            hosts.add(urllib.parse.urlsplit(f"//{address.rpartition('//')[2]}").hostname)
        for name, labels, value in samples:
            if evaluates:
                if name == "murmur_env_tree_cpu_seconds_total":
                    sums["evaluator_cpu_s"] += value
            elif name == "murmur_env_seconds_total":
                states[labels["state"]] = states.get(labels["state"], 0.0) + value
            elif name == "murmur_env_messages_total":
                sums["messages"] += value * (labels["direction"] == "sent")
            elif name in _SUMS:
                sums[_SUMS[name]] += value
    if not hosts:
        return None
    own = urllib.parse.urlsplit(f"//{learner.rpartition('//')[2]}").hostname
    return Servers(at, states, **sums, here=not learner or hosts == {own})


def read_page(address: str, hint: str, timeout_s: float = 10.0) -> str:
    """Return the text behind an address of metrics.

    Raises:
        ConfigError: if it cannot be read, ending with `hint`.
    """
    try:
        host = urllib.parse.urlsplit(address).hostname or ""
        # None: those of the environment
        proxies: dict[str, str] | None = {} if is_loopback(host) else None
        opener = urllib.request.build_opener(urllib.request.ProxyHandler(proxies))
        with opener.open(address, timeout=timeout_s) as response:  # the user's own address
            text: str = response.read().decode()
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ConfigError(f"cannot read {address.split('?')[0]}: {reason}; {hint}") from None
    return text


def samples_of(text: str) -> list[Sample]:
    """Return the samples of a page of metrics."""
    families = text_string_to_metric_families(text)
    return [(s.name, s.labels, s.value) for family in families for s in family.samples]


class ServerRecorder:
    """Recorder of the counters of a run's environment servers on this machine, in its folder.

    Used by the supervisor's thread. What cannot be read or written is left out: the record serves
    the doctor alone.
    """

    def __init__(self, run: RunFolder) -> None:
        """Prepare; no server is known yet."""
        self._path = run.path / FILE
        self._pages: dict[Path, str] = {}  # log of a server -> address of its metrics
        self._next = 0.0

    def read_log(self, log: Path, line: str) -> None:
        """Take the address of a server's metrics from a line of its log."""
        if found := _LISTENS.search(line):
            self._pages[log] = f"{found[1]}/metrics"

    def record(self) -> None:
        """Append a line if it is due."""
        if time.monotonic() < self._next or not self._pages:
            return
        self._next = time.monotonic() + EVERY_S
        try:
            pages = {
                log.stem: samples_of(read_page(address, "", _QUICK_S))
                for log, address in self._pages.items()
            }
            if (seen := servers_of(time.time(), pages)) is not None:
                with self._path.open("a") as file:
                    file.write(json.dumps(asdict(seen)) + "\n")
        except (ConfigError, ValueError, OSError):  # a server starts or ends, or a full disk
            return


def recorded(run: RunFolder, begin: float, end: float) -> tuple[Servers, Servers] | None:
    """Return the counters of a run's servers at both ends of a window, or None if unknown.

    Args:
        run: folder of the run.
        begin: begin of the window, seconds since 1970.
        end: end of the window.
    """
    last: Servers | None = None
    first: Servers | None = None
    for line in run.lines_from_end(FILE):
        seen = _parse(line)
        if seen is None or seen.time > end + EVERY_S:
            continue
        if last is None:
            last = seen
        elif any(seen.states.get(s, 0.0) > v for s, v in last.states.items()):
            break  # of servers that were started again since
        else:
            first = seen
        if seen.time <= begin:
            break
    if last is None or first is None or last.time < begin:
        return None
    return first, last


def _parse(line: Mapping[str, Any]) -> Servers | None:
    """Return the counters of a line, also of another version's; None if it holds none."""
    known = {f.name for f in fields(Servers)}
    if "time" not in line or not isinstance(line.get("states"), dict):
        return None
    return Servers(**{name: value for name, value in line.items() if name in known})

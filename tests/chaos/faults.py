"""What each fault costs: real processes, real kills, real link cuts, and counts that balance.

A learner and an environment server with two workers of two sessions each. For every fault the
environment server is started, the fault is made while rows flow, and is undone; then the server is
told to stop, and every row that it sent is accounted for. `docs/faults.md` states the
contract that this checks; a line that does not hold raises an error. Faults whose cost is not
counted in rows are cases of their own: cases.py.

    murmur bench faults                                   all of them
    python -m tests.chaos.faults --list                   their names
    python -m tests.chaos.faults --only "disk full" ...   some; nothing is saved
"""

import argparse
import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from murmur.benchmarks.effort import Effort
from murmur.results import result_tables
from murmur.text import number
from tests.chaos import acts
from tests.chaos.acts import MESSAGE, NOTICED_S, SESSIONS, Bench, experiment
from tests.chaos.cases import Case, all_cases
from tests.chaos.clock import Clock
from tests.chaos.links import Link, Namespace, Proxy
from tests.chaos.stack import Counts, Stack, prepare_folder

DESCRIPTION = "what each fault costs, when it is noticed and when it is over (docs/faults.md)"
NEEDS = ("gymnasium",)


@dataclass
class Fault:
    """One line of the contract.

    Attributes:
        act: makes the fault and sees it over; returns seconds, and whatever else is worth saying.
        lost: messages that may be lost on their way: rows that were sent and never came.
        undone: whether updates may be lost with the learner.
        drops: reasons for which rows may be dropped beside the sessions' last ones.
        counter: what says so.
    """

    act: Callable[[Bench], dict[str, Any]]
    lost: int
    counter: str
    undone: bool = False
    drops: tuple[str, ...] = ()


FAULTS: dict[str, Fault] = {
    "worker killed (-9)": Fault(acts.worker_killed, 2, "rows_dropped{session}"),
    "simulator ends its process": Fault(
        acts.worker_crashed, 2, "murmur_env_episodes_dropped{died}"
    ),
    "environment server told to stop (-15)": Fault(
        acts.server_terminated, 0, "rows_dropped{session}"
    ),
    "worker paused until given up": Fault(acts.worker_paused, 2, "rows_dropped{session}"),
    "worker paused for 3 s": Fault(acts.worker_paused_shortly, 0, "-"),
    "environment raises": Fault(acts.environment_raises, 0, "murmur_env_episodes_dropped{raised}"),
    "environment returns NaN": Fault(
        acts.environment_nan, 0, "murmur_env_episodes_dropped{contents}"
    ),
    "environment hangs": Fault(acts.environment_hangs, 2, "murmur_env_episodes_dropped{hung}"),
    "environment leaks memory": Fault(
        acts.environment_leaks, 0, "murmur_env_episodes_dropped{memory}"
    ),
    "link cut": Fault(acts.link_cut, SESSIONS, "murmur_env_reconnects"),
    "link stalled": Fault(acts.link_stalled, SESSIONS, "murmur_env_reconnects"),
    "link half open": Fault(acts.link_half_open, SESSIONS, "murmur_env_reconnects"),
    "link slow": Fault(acts.link_slow, 0, "environment_seconds"),
    "link lossy": Fault(acts.link_lossy, 0, "environment_seconds"),
    "learner killed (-9)": Fault(
        acts.learner_killed, SESSIONS, "rows_undone, rows_dropped{restart}", True, ("restart",)
    ),
    "device memory is out": Fault(
        acts.device_memory_out, SESSIONS, "rows_undone, rows_dropped{restart}", True, ("restart",)
    ),
    "learner paused until given up": Fault(acts.learner_paused, SESSIONS, "murmur_env_reconnects"),
    "rolling restart of everything": Fault(acts.rolling_restart, 0, "rows_dropped{session}"),
    "disk full": Fault(acts.disk_full, 0, "checkpoint_failures"),
    "checkpoints read-only": Fault(acts.folder_read_only, 0, "checkpoint_failures"),
    "clock jumps by a day": Fault(acts.clock_jumps, 0, "-"),
    "two environment servers of one name": Fault(acts.two_of_one_name, 0, "sessions"),
    "worker of another protocol": Fault(acts.other_protocol, 0, "sessions_refused{protocol}"),
}
LINKS = {name for name in FAULTS if name.startswith("link ")}
LARGE = {"device memory is out"}
SETTINGS = {
    "environment hangs": ["env_server.step_timeout_s=2"],
    "environment leaks memory": ["env_server.worker_memory_mib=250"],
}


def check(name: str, fault: Fault, sent: int, counts: Counts) -> dict[str, Any]:
    """The balance of one fault, as a line of the result.

    Raises:
        AssertionError: if a row is missing, or lost for a reason that this fault does not excuse.
    """
    way = sent - counts.received
    line = {
        "sent": sent,
        "received": counts.received,
        "learned": counts.learned,
        "stored": counts.stored,
        **{f"dropped: {reason}": rows for reason, rows in sorted(counts.dropped.items())},
        "lost on the way": way,
        "undone": counts.undone,
    }
    wrong = set(counts.dropped) - {"session", *fault.drops}
    for broken, why in (
        (not counts.balanced, "rows received are not learned + stored + dropped"),
        (not 0 <= way <= fault.lost * MESSAGE, f"up to {fault.lost * MESSAGE} lost on the way"),
        (bool(wrong), f"dropped for {sorted(wrong)}"),
        (bool(counts.undone) and not fault.undone, "updates are undone"),
    ):
        if broken:
            raise AssertionError(f"{name}: {why}, but: {line}")
    return line


def go_through(bench: Bench, names: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each fault, and what it cost.

    Raises:
        AssertionError: if a line of the contract does not hold.
    """
    stack = bench.stack
    for name in names:
        fault = FAULTS[name]
        before = stack.counts()
        bench.start(*SETTINGS.get(name, []))
        seconds = fault.act(bench)
        sent = stack.settle()
        line = check(name, fault, sent, stack.counts().since(before))
        if seconds.get("noticed s", 0) > NOTICED_S:
            raise AssertionError(f"{name}: noticed after {seconds['noticed s']:.1f} s")
        yield name, {**seconds, **line, "counter": fault.counter}


@contextlib.contextmanager
def bench(folder: Path, link: str = "none", *, large: bool = False) -> Iterator[Bench]:
    """A learner, and a link to it: "none", "proxy" or "namespace"."""
    control = prepare_folder(folder / "control")
    config = experiment(control, large=large)
    if link == "namespace":
        config["learner"]["host"] = "0.0.0.0"
        config["security"] = {"insecure": True}
    with contextlib.ExitStack() as exits:
        stack = exits.enter_context(Stack(folder, config))
        made: Link | None = None
        if link == "proxy":
            made = exits.enter_context(Proxy(stack.port))
        elif link == "namespace":
            made = exits.enter_context(Namespace(stack.port))
        clock = Clock(folder / "clock") if Clock.available() else None
        made_bench = Bench(stack, control, made, clock)
        made_bench.start_learner()
        yield made_bench


def possible() -> list[str]:
    """Names of the faults that this machine lets us make."""
    names = list(FAULTS)
    if not Namespace.available():
        names.remove("link lossy")
    if os.geteuid() != 0 or not shutil.which("mount"):
        names.remove("checkpoints read-only")
    if not Clock.available():
        names.remove("clock jumps by a day")
    return names


def run(effort: Effort = Effort.FULL) -> dict[str, Any]:
    """All faults; where a network namespace is not available, its links are cut in a proxy."""
    if effort is Effort.SMOKE:
        return run_only(["worker of another protocol"], [])
    names, cases = possible(), all_cases()
    if effort is Effort.QUICK:
        names, cases = ["worker killed (-9)", "link cut"], cases[:1]
    return run_only(names, cases)


def run_only(names: list[str], cases: list[Case]) -> dict[str, Any]:
    """Some of the faults, and some of the cases."""
    made: dict[str, Any] = {case.name: _one_case(case) for case in cases}
    lines: dict[str, Any] = {}
    plain = [n for n in names if n not in LINKS | LARGE]
    links = [n for n in names if n in LINKS]
    far = "namespace" if links and Namespace.available() else "proxy"
    for link, some in (("none", plain), ("none", [n for n in names if n in LARGE]), (far, links)):
        if some:
            with tempfile.TemporaryDirectory(prefix="murmur-faults-") as folder:
                lines |= _all_of(Path(folder), link, some)
    result = {"links": "network namespace" if far == "namespace" else "proxy"} if links else {}
    return result | sections(lines) | case_sections(made)


def _one_case(case: Case) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="murmur-case-") as folder:
        began = time.monotonic()
        found = case.act(Path(folder))
        line = {**found, "seconds": time.monotonic() - began}
    print(case.name, line, flush=True)
    return line


def sections(lines: dict[str, Any]) -> dict[str, Any]:
    """Two tables: when, and the fate of the rows."""
    times = ("noticed s", "over s", "rows/s meanwhile", "counter")
    return {
        "times": {n: {k: v for k, v in line.items() if k in times} for n, line in lines.items()},
        "rows": {n: {k: v for k, v in line.items() if k not in times} for n, line in lines.items()},
    }


def case_sections(made: dict[str, Any]) -> dict[str, Any]:
    """Cases as one table of three columns: each finds something else."""
    table = {
        name: {
            "holds": "yes",  # else it had raised
            "seconds": line["seconds"],
            "found": "; ".join(f"{k}: {number(v)}" for k, v in line.items() if k != "seconds"),
        }
        for name, line in made.items()
    }
    return {"cases": table} if table else {}


def _all_of(folder: Path, link: str, names: list[str]) -> dict[str, Any]:
    lines: dict[str, Any] = {}
    with bench(folder, link, large=not LARGE.isdisjoint(names)) as b:
        for name, line in go_through(b, names):
            print(name, line, flush=True)
            lines[name] = line
    return lines


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=DESCRIPTION)
    parser.add_argument("--list", action="store_true", help="print the names")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="faults and cases to go through")
    options = parser.parse_args()
    cases = {case.name: case for case in all_cases()}
    if options.list or not options.only:
        print(*FAULTS, *cases, sep="\n")
        return
    unknown = sorted(set(options.only) - set(FAULTS) - set(cases))
    if unknown:
        parser.error(f"no fault {unknown}; --list prints them")
    impossible = sorted(set(options.only) & set(FAULTS) - set(possible()))
    if impossible:
        parser.error(f"{impossible} needs root, or tools that are missing here")
    names = [n for n in options.only if n in FAULTS]
    result = run_only(names, [cases[n] for n in options.only if n in cases])
    console = Console()
    for table in result_tables(result, width=console.width):
        console.print(table, "")


if __name__ == "__main__":
    main()

"""Faults of ranks: both train again within a minute, every row is counted, the policy learns.

Two learners of an async run, started as docs/many-learners.md says, and an environment server with
two workers for each. At random instants one of the two, drawn at random, is killed (SIGKILL); the
next kill follows some seconds after both train again. At the end the counters of each rank and of
both together must balance, and the policy is compared with that of an untouched run of as many
environment steps.

A recovery is the time from the kill to the first update after it, in three parts: until both
processes have been started again, until both listen, until they have made an update together.

In a run of its own, a rank drawn at random is paused (SIGSTOP) for 40 s, killed, or starved: all
its sessions go to the other one while its link is down. Each recovery takes at most 60 s.
"""

import contextlib
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from murmur.benchmarks.effort import Effort
from tests.chaos.kills import async_experiment, evaluated, last_record
from tests.chaos.links import Proxy
from tests.chaos.stack import Counts, Service, Stack, free_port, scrape
from tests.waiting import wait_until

DESCRIPTION = (
    "30 random kills of a rank of two: every row counted, learning unharmed; time until both train "
    "again (target ≤ 15 s). 10 times each paused, killed, starved of sessions (target ≤ 60 s)"
)

RANKS, KILLS, FAULTY = 2, 30, 10
_PAUSED_S, _LIMIT_S = 40.0, 60.0
_UNDER_WAY = 3  # updates that may follow the last look
_SESSIONS = 8  # of async_experiment
_ENVS = 8  # of a session: rows of a message
_PARTS = ("until both are started again", "until both listen", "until the first update")


def experiment(**run: int) -> dict[str, Any]:
    """That of `murmur bench kills`, with more checkpoints, and reconnecting as it is by default.

    Kills follow each other closely, and what came since the last checkpoint is lost.
    """
    config = async_experiment()
    del config["env_server"]["reconnect_max_s"]
    learner = {**config["learner"], "checkpoint_every_updates": 10}
    return {**config, "learner": learner, "run": run}


class RankStack(Stack):
    """A run of several learners, started again when one is lost; see Stack.

    Attributes:
        links: to each rank, while they are `linked`.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        """Prepare to run an experiment, given as a configuration file's content."""
        super().__init__(folder, config)
        self.server_address = f"127.0.0.1:{self.port}-{self.port + RANKS - 1}"
        self.links: list[Proxy] = []

    def _free_port(self) -> int:
        """The first of as many free ports as there are ranks."""
        return free_port(RANKS)

    @contextlib.contextmanager
    def linked(self) -> Iterator[str]:
        """Put a link before each rank; yields the addresses for environment servers."""
        with contextlib.ExitStack() as stack:
            ports = range(self.port, self.port + RANKS)
            self.links = [stack.enter_context(Proxy(port)) for port in ports]
            yield ",".join(f"127.0.0.1:{link.port}" for link in self.links)

    def start_ranks(self, *settings: str) -> Service:
        """Start both learners, from their latest checkpoint if there is one."""
        restarter = [sys.executable, "-m", "tests.chaos.restarter"]
        arguments = ["learner", str(self.config), "--run", str(self.run), "--auto-resume"]
        arguments += [f"--learners={RANKS}"]
        arguments += [part for setting in settings for part in ("--set", setting)]
        log = self.folder / "learner.log"
        self.learner = Service(arguments, log, restarter, {"OMP_NUM_THREADS": "1"})
        return self.learner

    def ranks(self) -> list[psutil.Process]:
        """The processes of the learners, by rank."""
        if self.learner is None:
            return []
        with contextlib.suppress(psutil.Error):
            children = psutil.Process(self.learner.pid).children(recursive=True)
            ranks = {c.environ().get("RANK", ""): c for c in children}
            return [ranks[number] for number in sorted(ranks) if number]
        return []

    def of_rank(self, rank: int) -> dict[str, float]:
        """A rank's Prometheus samples without prefix and the label `rank`; none if it is silent."""
        samples = scrape("127.0.0.1", self.metrics_port + rank)
        own = f'rank="{rank}"'
        found = {}
        for name, value in samples.items():
            short = name.removeprefix("murmur_learner_").replace(f",{own}", "").replace(own, "")
            found[short.replace("{}", "").replace("{,", "{")] = value
        return found

    def metrics(self) -> dict[str, float]:
        """The samples of all ranks, added up; none if one is silent."""
        total: dict[str, float] = {}
        for rank in range(RANKS):
            own = self.of_rank(rank)
            if not own:
                return {}
            for name, value in own.items():
                total[name] = total.get(name, 0.0) + value
        return total

    def updated(self) -> bool:
        """Whether each rank, as it runs now, has made an update."""
        return all(self.of_rank(rank).get("update_seconds_count", 0) for rank in range(RANKS))

    def made(self) -> list[tuple[int, float]]:
        """Process ID and updates of each rank, as it runs now."""
        pids = [process.pid for process in self.ranks()]
        updates = [self.of_rank(rank).get("update_seconds_count", 0) for rank in range(RANKS)]
        return list(zip(pids, updates, strict=len(pids) == RANKS))

    def made_more(self, before: list[tuple[int, float]]) -> bool:
        """Whether each rank has made updates since `before`, more than were under way then."""
        now, least = self.made(), dict(before)
        return len(now) == RANKS and all(
            updates > least.get(pid, 0) + (_UNDER_WAY if pid in least else 0)
            for pid, updates in now
        )

    def counts_by_rank(self) -> list[Counts]:
        """The fate of each rank's rows; exact only while no environment server runs."""
        self.counts()  # until they do not change any more
        return [self._counts_of(self.of_rank(rank)) for rank in range(RANKS)]


def kill_one(stack: RankStack, dice: random.Random) -> dict[str, float]:
    """Kill a rank; seconds of each part of the recovery, once both train again."""
    before = stack.ranks()
    if len(before) != RANKS:
        raise RuntimeError(f"{len(before)} ranks run, not {RANKS}:\n{stack.log_end()}")
    pids = {process.pid for process in before}
    killed = time.monotonic()
    dice.choice(before).kill()
    instants = []
    for done in (
        lambda: len([p for p in stack.ranks() if p.pid not in pids]) == RANKS,
        lambda: all(stack.of_rank(rank) for rank in range(RANKS)),
        stack.updated,
    ):
        wait_until(done, stack.log_end, 180, poll_s=0.05)
        instants.append(time.monotonic() - killed)
    parts = [b - a for a, b in zip([0.0, *instants], instants, strict=False)]
    return {**dict(zip(_PARTS, parts, strict=True)), "all": instants[-1]}


def pause(stack: RankStack, rank: int) -> float:
    """Pause a rank for 40 s, longer than the others wait; returns time.monotonic() of its start."""
    process, began = stack.ranks()[rank], time.monotonic()
    process.suspend()
    with contextlib.suppress(TimeoutError, psutil.NoSuchProcess):  # killed before, or not
        wait_until(lambda: not process.is_running(), timeout_s=_PAUSED_S, poll_s=0.1)
        return began
    with contextlib.suppress(psutil.NoSuchProcess):
        process.resume()
    return began


def kill(stack: RankStack, rank: int) -> float:
    """Kill a rank; returns time.monotonic() then."""
    began = time.monotonic()
    stack.ranks()[rank].kill()
    return began


def starve(stack: RankStack, rank: int) -> float:
    """Cut the link to a rank until the other one has all sessions; returns the time after."""
    link, other = stack.links[rank], 1 - rank
    link.cut()
    try:
        wait_until(
            lambda: stack.of_rank(other).get('sessions{mode="train"}') == _SESSIONS,
            stack.log_end,
            poll_s=0.1,
        )
    finally:
        link.heal()
    return time.monotonic()


FAULTS = {f"paused for {_PAUSED_S:g} s": pause, "killed": kill, "starved of sessions": starve}


def rank_faults(folder: Path, times: Mapping[str, int]) -> dict[str, list[float]]:
    """Recoveries from each fault of FAULTS, in seconds; a run ends with balanced counts.

    Args:
        folder: for the run.
        times: repetitions of each fault.

    Raises:
        AssertionError: if rows are unaccounted for.
    """
    dice = random.Random(2)  # noqa: S311 - no secret
    recoveries: dict[str, list[float]] = {fault: [] for fault in times}
    with RankStack(folder, experiment()) as stack, stack.linked() as addresses:
        learners = stack.start_ranks()
        stack.start_server("env_server.move_after_s=2", address=addresses)
        wait_until(stack.updated, stack.log_end, 180)
        for fault in (fault for fault, number in times.items() for _ in range(number)):
            before = stack.made()
            began = FAULTS[fault](stack, dice.randrange(RANKS))
            wait_until(partial(stack.made_more, before), stack.log_end, 180, poll_s=0.1)
            recoveries[fault].append(time.monotonic() - began)
        stack.settle()
        by_rank = stack.counts_by_rank()
        learners.end(signal.SIGTERM)
    if not all(counts.balanced for counts in by_rank):
        raise AssertionError(f"rows of each rank: {by_rank}")
    return recoveries


def kill_ranks(folder: Path, kills: int, pause_s: tuple[float, float]) -> dict[str, Any]:
    """Train under kills; counts, recoveries and environment steps.

    Args:
        folder: for the run.
        kills: how many.
        pause_s: least and longest time between a recovery and the next kill.

    Raises:
        AssertionError: if rows are unaccounted for.
    """
    dice = random.Random(1)  # noqa: S311 - no secret
    recoveries = []
    with RankStack(folder, experiment()) as stack:
        learners = stack.start_ranks()
        server = stack.start_server(address=stack.server_address)
        wait_until(stack.updated, stack.log_end, 180)
        for _ in range(kills):
            time.sleep(dice.uniform(*pause_s))
            recoveries.append(kill_one(stack, dice))
            if server.process.poll() is not None:
                raise RuntimeError(f"the environment server ended:\n{server.text()}")
        wait_until(lambda: stack.sessions() == _SESSIONS, "all play again", 120)
        sent = stack.settle()
        by_rank = stack.counts_by_rank()
        if learners.end(signal.SIGTERM) not in (0, 1, -signal.SIGTERM):
            raise RuntimeError(stack.log_end())
    both = added(by_rank)
    way = sent - both.received
    if not all(c.balanced for c in [*by_rank, both]) or not 0 <= way <= _lost(kills):
        raise AssertionError(f"rows sent {sent}, of each rank: {by_rank}")
    return {
        "kills": kills,
        "environment steps": last_record(folder)["env_steps"],  # without those that were undone
        "rows sent": sent,
        "rows lost on the way": way,
        "recoveries": recoveries,
        "counts": by_rank,
    }


def _lost(kills: int) -> int:
    """Most rows that can be lost on the way: of each session a message at each kill."""
    return kills * _SESSIONS * _ENVS


def added(counts: list[Counts]) -> Counts:
    """The counts of all ranks together."""
    reasons = {reason for c in counts for reason in c.dropped}
    return Counts(
        sum(c.received for c in counts),
        sum(c.learned for c in counts),
        sum(c.stored for c in counts),
        sum(c.undone for c in counts),
        {reason: sum(c.dropped.get(reason, 0) for c in counts) for reason in sorted(reasons)},
    )


def untouched(folder: Path, env_steps: int) -> None:
    """A run of as many environment steps that is not killed."""
    with RankStack(folder, experiment(max_env_steps=env_steps)) as stack:
        learners = stack.start_ranks()
        stack.start_server(address=stack.server_address)
        if learners.process.wait(1800) != 0:
            raise RuntimeError(stack.log_end())


def run(effort: Effort = Effort.FULL) -> dict[str, Any]:
    """Kills, recoveries by part, counts of both ranks and the final policies."""
    kills = effort.choose(1, 4, KILLS)
    pause_s = effort.choose((0.5, 1.0), (1.0, 5.0), (1.0, 12.0))
    with tempfile.TemporaryDirectory(prefix="murmur-kills-") as name:
        killed, whole, faulty = (Path(name, part) for part in ("killed", "whole", "faulty"))
        for part in (killed, whole):
            part.mkdir()
        done = kill_ranks(killed, kills, pause_s)
        result = _result(done)
        if effort is not Effort.SMOKE:
            faulty.mkdir()
            found = rank_faults(faulty, dict.fromkeys(FAULTS, effort.choose(0, 1, FAULTY)))
            result["back from each fault, s"] = {
                fault: {
                    "times": len(seconds),
                    "median": statistics.median(seconds),
                    "worst": max(seconds),
                    f"within {_LIMIT_S:g} s": sum(s <= _LIMIT_S for s in seconds),
                }
                for fault, seconds in found.items()
            }
        if effort is Effort.FULL:
            untouched(whole, int(done["environment steps"]))
            result["return of the killed run"] = evaluated(killed)
            result["return of an untouched run"] = evaluated(whole)
    return result


def _result(done: Mapping[str, Any]) -> dict[str, Any]:
    counts = added(done["counts"])
    recoveries: list[dict[str, float]] = done["recoveries"]
    return {
        "kills": done["kills"],
        "time until both train again, s": {
            part: {
                "median": statistics.median(r[part] for r in recoveries),
                "worst": max(r[part] for r in recoveries),
            }
            for part in (*_PARTS, "all")
        },
        "environment steps": done["environment steps"],
        "rows sent": done["rows sent"],
        "rows received": counts.received,
        "rows trained": counts.learned,
        "of them undone": counts.undone,
        "rows stored": counts.stored,
        **{f"rows dropped: {reason}": rows for reason, rows in counts.dropped.items()},
        "rows lost on the way": done["rows lost on the way"],
    }

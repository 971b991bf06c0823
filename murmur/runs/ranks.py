"""Several learners of one run on this machine: `murmur learner --learners COUNT`.

It sets the variables that torchrun would set, without torchrun's rendezvous: that listens on all
interfaces and unpickles what any client writes. Here the ranks meet on a socket of 127.0.0.1.

Nothing is restarted here: the supervisor does that, which knows what a run resumes from. The exit
code tells it how the ranks ended: 0 if all ended in order; 2 if one hit an error that only the
user can fix; LOST if one was killed; else 1.
"""

import math
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from murmur.learner_service.ranks import MEETING_VARIABLE
from murmur.runs.child import LOST, PARENT_VARIABLE, exit_message, murmur_command
from murmur.shared.process.process import configure_logging, logger, stop_on_signals
from murmur.shared.process.run_lock import RunLock

_LOOK_EVERY_S = 0.1
_SHUTDOWN_S = 50.0  # for ranks that are told to stop: they save
_LOST_S = 3.0  # for ranks whose group has lost one: without it they cannot save
_END_S = 300.0  # between the first rank that has ended in order and the last


def run_ranks(count: int, run: Path, arguments: Sequence[str]) -> int:
    """Run the ranks until all have ended; return the exit code.

    Args:
        count: number of learners.
        run: folder of the run.
        arguments: arguments of `murmur learner` for each of them.
    """
    configure_logging("ranks")
    stop = stop_on_signals()
    with RunLock.acquire(run) as lock:
        variables = lock.kept_by_parent() | {PARENT_VARIABLE: str(os.getpid())}
        ranks = _start(count, murmur_command("learner", *arguments), variables)
        return _await(ranks, stop)


def _start(
    count: int, command: list[str], variables: Mapping[str, str]
) -> list[subprocess.Popen[bytes]]:
    """Start a process for each rank, in a session of its own: Ctrl-C reaches this process alone."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC_")}
    inherited.setdefault("OMP_NUM_THREADS", "1")  # the learners set their own
    ranks = []
    with socket.create_server(("127.0.0.1", 0)) as meeting:
        for rank in range(count):
            own = {
                **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
                **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(count)),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(meeting.getsockname()[1]),
                **({} if rank else {MEETING_VARIABLE: str(meeting.fileno())}),
            }
            ranks.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    env={**inherited, **variables, **own},
                    pass_fds=() if rank else (meeting.fileno(),),
                    start_new_session=True,
                )
            )
    return ranks


def _await(ranks: Sequence[subprocess.Popen[bytes]], stop: threading.Event) -> int:
    """Wait until all ranks have ended; return the exit code.

    The first one that fails, or `stop`, ends the others: SIGTERM, and after a while SIGKILL.
    """
    told, deadline, killed = False, math.inf, set[int]()
    while None in (codes := [process.poll() for process in ranks]):
        running = [rank for rank, code in enumerate(codes) if code is None]
        lost = {rank: code for rank, code in enumerate(codes) if code}
        now = time.monotonic()
        if not told and (lost or stop.is_set()):
            told, deadline = True, now + (_SHUTDOWN_S if stop.is_set() else _LOST_S)
            for rank, code in lost.items():
                logger.info("rank %d ended (%s); the others end too", rank, exit_message(code))
            for rank in running:
                ranks[rank].terminate()
        elif 0 in codes and deadline == math.inf:
            deadline = now + _END_S
        if now > deadline:
            for rank in set(running) - killed:
                logger.warning("rank %d does not end: it is paused or hangs, and is killed", rank)
                ranks[rank].kill()
                killed.add(rank)
        time.sleep(_LOOK_EVERY_S)
    ends = [process.returncode for process in ranks]
    if 2 in ends:
        return 2
    if killed:
        return 1
    if any(code < 0 and not (told and code == -signal.SIGTERM) for code in ends):
        return LOST
    return int(any(code > 0 for code in ends))

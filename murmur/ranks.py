"""Starts several learners of one run on this machine: torchrun, as the learner of `murmur train`.

    python -m murmur.ranks COUNT RUN ARGUMENT...    runs `murmur learner ARGUMENT...` COUNT times

torchrun restarts nothing here: the supervisor does, which knows what a run resumes from. The exit
code tells it how the ranks ended: 0 if all ended in order; 2 if one hit an error that only the
user can fix; LOST if one was killed; else 1.
"""

import os
import sys
from pathlib import Path

from murmur.child import LOST, PARENT_VARIABLE, join_supervisor, murmur_command
from shared.run_lock import RunLock

_SHUTDOWN_S = 50  # for ranks that are told to stop: they save


def main(count: int, run: Path, arguments: list[str]) -> int:
    """Run the ranks until all have ended; returns the exit code."""
    join_supervisor()
    with RunLock.acquire(run) as lock:
        os.environ |= lock.kept_by_parent() | {PARENT_VARIABLE: str(os.getpid())}
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # the learners set their own
        return _launch(count, murmur_command("learner", *arguments))


def _launch(count: int, command: list[str]) -> int:
    """One torchrun."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    options = ["--standalone", f"--nproc-per-node={count}", "--max-restarts=0", "--no-python"]
    # Behind "--" nothing is taken for an abbreviated option of torchrun.
    parsed = torchrun.get_args_parser().parse_args([*options, "--", *command])
    if hasattr(parsed, "shutdown_timeout"):  # older releases have none
        parsed.shutdown_timeout = _SHUTDOWN_S
    try:
        torchrun.run(parsed)
    except SignalException:  # told to stop; the ranks were, too
        return 0
    except ChildFailedError as error:
        codes = [failure.exitcode for failure in error.failures.values()]
        return 2 if 2 in codes else LOST if min(codes) < 0 else 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))

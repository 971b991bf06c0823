"""Several learners of one run in processes of their own, for tests that play with them."""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from murmur.learner_service.ranks.meeting import kept_store
from murmur.shared.config.experiment import ExperimentConfig
from tests.ranks.processes import TIMEOUT_S, forked


class LearnerRanks:
    """`run_learner` on every rank.

    Attributes:
        processes: by rank.
    """

    def __init__(
        self,
        run_dir: Path,
        config: ExperimentConfig,
        options: dict[str, Any],
        size: int,
        prepare: "Callable[[int], object] | None",
    ) -> None:
        """Start the processes; the store that torchrun would have is of this process."""
        meeting = socket.create_server(("127.0.0.1", 0))
        self._store = kept_store(meeting, timedelta(seconds=60))
        self._pipes: list[Connection[Any, Any]] = []
        self.processes = []
        for rank in range(size):
            mine, theirs = forked.Pipe()
            arguments = (theirs, rank, size, self._store.port, run_dir, config, options, prepare)
            process = forked.Process(target=_learn, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self.processes.append(process)

    def ports(self, rank: int) -> tuple[int, int]:
        """The gRPC and the metrics port of a rank, once it listens."""
        pipe = self._pipes[rank]
        assert pipe.poll(TIMEOUT_S), f"rank {rank} does not listen"
        ports: tuple[int, int] = pipe.recv()
        return ports

    def stop(self) -> None:
        """Tell all ranks to stop."""
        for pipe in self._pipes:
            pipe.close()

    def codes(self) -> list[int | None]:
        """The exit codes, once all have ended."""
        for process in self.processes:
            process.join(TIMEOUT_S)
        return [process.exitcode for process in self.processes]


@contextmanager
def learner_ranks(
    run_dir: Path,
    config: ExperimentConfig,
    size: int = 2,
    *,
    prepare: Callable[[int], object] | None = None,
    **options: Any,
) -> Iterator[LearnerRanks]:
    """Learners of one run; killed at the end if they still run.

    Each process calls `prepare` with its rank before it learns.
    """
    ranks = LearnerRanks(run_dir, config, {"resume": False, **options}, size, prepare)
    try:
        yield ranks
    finally:
        ranks.stop()
        for process in ranks.processes:
            process.join(TIMEOUT_S)
            process.kill()


def _learn(
    pipe: "Connection[Any, Any]",
    rank: int,
    size: int,
    port: int,
    run_dir: Path,
    config: ExperimentConfig,
    options: dict[str, Any],
    prepare: Callable[[int], object] | None,
) -> None:
    """One rank, with the variables that torchrun sets; it stops when the pipe is closed."""
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {name: str(value) for name, value in variables.items()}
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    from murmur.learner_service.app import run_learner
    from murmur.shared.process.process import configure_logging

    configure_logging(f"learner-{rank}")
    if prepare is not None:
        prepare(rank)
    stop = threading.Event()

    def watch() -> None:
        try:
            pipe.recv()
        except EOFError:
            stop.set()

    threading.Thread(target=watch, daemon=True).start()
    code = run_learner(config, run_dir, stop=stop, on_ready=lambda *p: pipe.send(p), **options)
    os._exit(code)

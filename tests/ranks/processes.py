"""Real processes that form a group over gloo, for tests.

They fork from a server that has imported torch once, which takes a second and not one for each.
"""

import multiprocessing
import pickle
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from murmur.learner_service.ranks.group import Group

Job = Callable[..., Any]  # its first argument is the Group
TIMEOUT_S = 60.0
forked = multiprocessing.get_context("forkserver")
forked.set_forkserver_preload(["tests.ranks.preloaded"])


class JobError(Exception):
    """What a job raised on its rank: the error's type and message."""


class Ranks:
    """Processes of one group; each call runs a job on all of them.

    Attributes:
        processes: by rank.
    """

    def __init__(self, size: int = 2, timeout_s: float = TIMEOUT_S, *, gpus: bool = False) -> None:
        """Start the processes and let them meet.

        Args:
            size: number of ranks.
            timeout_s: longest wait of a rank for the others.
            gpus: whether each has a GPU of its own; else all are on the CPU.
        """
        self._folder = tempfile.TemporaryDirectory()
        store = Path(self._folder.name, "store")
        self._pipes: list[Connection[Any, Any]] = []
        self.processes = []
        for rank in range(size):
            mine, theirs = forked.Pipe()
            arguments = (theirs, rank, size, str(store), timeout_s, gpus)
            process = forked.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self.processes.append(process)

    def start(self, rank: int, job: Job, *arguments: object) -> None:
        """Have one rank begin a job: a function that can be imported, and what it is given."""
        self._pipes[rank].send_bytes(pickle.dumps((job, arguments)))

    def result(self, rank: int) -> Any:
        """What the job that `start` began returns.

        Raises:
            JobError: if it raised.
        """
        pipe = self._pipes[rank]
        if not pipe.poll(2 * TIMEOUT_S):
            raise TimeoutError(f"rank {rank} does not answer")
        worked, value = pipe.recv()
        if not worked:
            raise JobError(value)
        return value

    def call(self, job: Job, *arguments: object) -> list[Any]:
        """The results of a job that all ranks do, by rank.

        Raises:
            JobError: of every rank that raised, since one that fails leaves the others waiting.
        """
        for rank in range(len(self.processes)):
            self.start(rank, job, *arguments)
        results, errors = [], []
        for rank in range(len(self.processes)):
            try:
                results.append(self.result(rank))
            except JobError as error:
                errors.append(str(error))
        if errors:
            raise JobError("; ".join(errors))
        return results

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self.processes:
            process.join(TIMEOUT_S)
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _serve(
    pipe: "Connection[Any, Any]",
    rank: int,
    size: int,
    store: str,
    timeout_s: float,
    gpus: bool,
) -> None:
    """A rank: do jobs until the pipe closes."""
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    group = Group.join(rank, size, device, timeout_s, f"file://{store}")
    while True:
        try:
            job, arguments = pipe.recv()
        except EOFError:
            group.close()
            return
        try:
            answer = True, job(group, *arguments)
        except Exception as error:
            answer = False, f"{type(error).__name__}: {error}"
        pipe.send_bytes(pickle.dumps(answer))  # `send` would share the memory of tensors

"""What a learner answers to those who choose between several: how much it has to do already."""

import contextlib
from collections import Counter
from collections.abc import Iterator

import grpc

from learner_service.serving.places import Places
from shared.rpc import LOAD_METHOD
from shared.rpc import rollout_pb2 as pb
from shared.spec import MAX_ENVS


class Load:
    """Counts what the sessions bring. Used on the event loop."""

    def __init__(self, places: Places, rank: int = 0, size: int = 1) -> None:
        """No session has come.

        Args:
            places: the places for sessions.
            rank: of this learner among those of its run.
            size: learners of the run.
        """
        self._places, self._rank, self._size = places, rank, size
        self._environments = 0
        self._sessions: Counter[int] = Counter()  # by mode

    @contextlib.contextmanager
    def counted(self, hello: pb.Hello) -> Iterator[None]:
        """A session, from its Hello to its end."""
        brought = min(hello.num_envs, MAX_ENVS) if hello.mode == pb.MODE_TRAIN else 0
        self._environments += brought
        self._sessions[hello.mode] += 1
        try:
            yield
        finally:
            self._environments -= brought
            self._sessions[hello.mode] -= 1

    @property
    def training_sessions(self) -> int:
        """Sessions that bring rows to learn from. Read by any thread."""
        return self._sessions[pb.MODE_TRAIN] + self._sessions[pb.MODE_SUPPLY]

    def handler(self) -> "grpc.GenericRpcHandler[bytes, bytes]":
        """Serves LOAD_METHOD."""
        _, service, method = LOAD_METHOD.split("/")
        answer = grpc.unary_unary_rpc_method_handler(self._answer)
        return grpc.method_handlers_generic_handler(service, {method: answer})

    async def _answer(self, _request: bytes, _: object) -> bytes:
        return pb.LoadReply(
            rank=self._rank,
            size=self._size,
            environments=self._environments,
            supply_sessions=self._sessions[pb.MODE_SUPPLY],
            free_sessions=self._places.free("train"),
        ).SerializeToString()

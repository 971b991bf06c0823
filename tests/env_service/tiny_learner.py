"""The conformance kit's peer as a learner that always answers, for tests of the environment side.

It runs on a thread of its own and records what it was sent.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import grpc
import numpy as np

from murmur.kit.conformance.peer import Ended, Peer, Session, Status
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.config.section import validate
from murmur.shared.rpc import rollout_pb2 as pb
from murmur.shared.wire.codec import ActionCodec, ObservationCodec
from murmur.shared.wire.spec import EnvSpec, action_layout, spec_from_proto
from murmur.shared.wire.timestep import Array, TimeStep

TIMEOUT_S = 300.0

Policy = Callable[[TimeStep], Array]


@dataclass
class Recorded:
    """What one session sent."""

    hello: pb.Hello
    rows: list[TimeStep] = field(default_factory=list)
    actions: list[Array] = field(default_factory=list)
    half_closed: bool = False


def zeros(spec: EnvSpec, num_envs: int) -> Policy:
    """The policy that always answers zero."""
    dtype, shape = action_layout(spec.action)
    return lambda _: np.zeros((num_envs, spec.num_agents, *shape), dtype)


class TinyLearner:
    """Answers every session; `with TinyLearner() as learner: learner.address`."""

    def __init__(
        self,
        *,
        port: int = 0,
        run_seed: int = 7,
        starts: Sequence[tuple[int, bytes]] = (),
        policy: Callable[[EnvSpec, int], Policy] = zeros,
        refuse: Status | None = None,
        end_after: int | None = None,
        end_with: Status = (grpc.StatusCode.UNAVAILABLE, "stopping"),
        sequence_shift: int = 0,
        mute: bool = False,
        answer_to_hello: bytes = b"",
        pause_s: float = 0.0,
        version: Callable[[int], int] = lambda row: 3,
    ) -> None:
        self.port, self.run_seed, self.starts, self.policy = port, run_seed, starts, policy
        self.refuse, self.end_after, self.end_with = refuse, end_after, end_with
        self.sequence_shift, self.mute, self.pause_s = sequence_shift, mute, pause_s
        self.answer_to_hello, self.version = answer_to_hello, version
        self.sessions: list[Recorded] = []
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    @property
    def started(self) -> bool:
        return self._ready.is_set()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def __enter__(self) -> "TinyLearner":
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        async with (
            asyncio.TaskGroup() as self._players,
            Peer("127.0.0.1", self.port, self._door, None) as peer,
        ):
            self.port = peer.port
            self._ready.set()
            await self._stop.wait()

    def _door(self, session: Session) -> Status | None:
        if session.problem:
            return grpc.StatusCode.FAILED_PRECONDITION, session.problem
        recorded = Recorded(session.hello)
        self.sessions.append(recorded)
        if not self.refuse:
            self._players.create_task(self._play(session, recorded))
        return self.refuse

    async def _play(self, session: Session, recorded: Recorded) -> None:
        try:
            status = await self._answer(session, recorded)
        except Ended:
            recorded.half_closed = await session.closed_in_order()
            status = None
        session.end(status)

    async def _answer(self, session: Session, recorded: Recorded) -> Status | None:
        """Play until the environment server ends the stream; returns how to end it before that."""
        hello = recorded.hello
        if self.answer_to_hello:
            await session.write(self.answer_to_hello)
            return None
        spec, n = spec_from_proto(hello.spec), hello.num_envs
        starts = self.starts or [(0, b"")] * n
        welcome = pb.Welcome(
            first_slot=hello.preferred_first_slot,
            run_seed=self.run_seed,
            policy_version=self.version(0),
            slots=[pb.SlotStart(episode=e, actions=a) for e, a in starts],
        )
        await session.write(pb.LearnerMessage(welcome=welcome).SerializeToString())
        observations, actions = ObservationCodec(spec, n), ActionCodec(spec, n)
        policy = self.policy(spec, n)
        while True:
            received = observations.receive(await session.read(TIMEOUT_S))
            if received is None:
                continue
            sequence, timestep = received
            assert sequence == len(recorded.rows) + 1
            recorded.rows.append(timestep)
            if self.mute:
                continue
            if self.end_after is not None and len(recorded.rows) >= self.end_after:
                return self.end_with
            action = policy(timestep)
            recorded.actions.append(action)
            if self.pause_s:
                await asyncio.sleep(self.pause_s)
            version = self.version(len(recorded.rows))
            await session.write(actions.pack(sequence + self.sequence_shift, version, action))


def experiment(learner: str, **server: Any) -> ExperimentConfig:
    """A configuration with small sizes: one worker, 2 sessions of 4 copies of `spread`."""
    sizes = {
        "envs_per_worker": 8,
        "metrics_port": 0,
        "reconnect_min_s": 0.02,
        "reconnect_max_s": 0.1,
        "give_up_after_s": 20.0,
    }
    return validate(
        ExperimentConfig,
        {
            "environment": {"name": "spread", **server.pop("environment", {})},
            "env_server": {"learner": learner, **sizes, **server},
        },
    )

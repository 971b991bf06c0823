"""A supply session against the conformance kit's learner: how it ends."""

import asyncio

import grpc
from prometheus_client import CollectorRegistry

from murmur.env_service.metrics import WorkerMetrics
from murmur.env_service.sessions.ranks import Ranks
from murmur.env_service.sessions.supply import SupplySession
from murmur.env_service.watchdog.faults import Heartbeat
from murmur.kit.conformance.peer import Ended, Peer, Session, Status
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.config.section import validate
from murmur.shared.rpc import rollout_pb2 as pb
from murmur.shared.wire.sample_codec import Grant, SampleCodec, pack_grant
from tests.supply.toy_source import ToySource

SOURCE = ToySource(train=6, valid=2)
TIMEOUT_S = 30.0


def test_stopped_session_closes_its_stream_in_order() -> None:
    """While it waits for a grant: gRPC ends a call whose read is given up."""

    async def supply() -> bool:
        came: asyncio.Future[Session] = asyncio.get_running_loop().create_future()

        def door(session: Session) -> Status | None:
            came.set_result(session)
            return None

        stop, metrics = asyncio.Event(), WorkerMetrics("train", CollectorRegistry())
        async with Peer("127.0.0.1", 0, door, None) as learner:
            config = validate(
                ExperimentConfig,
                {
                    "source": {"name": "toy"},
                    "env_server": {"learner": f"127.0.0.1:{learner.port}"},
                },
            )
            server = SupplySession(SOURCE, "s", stop, Heartbeat.private(1))
            async with Ranks(config, metrics, "environment") as ranks:
                running = asyncio.create_task(server.run(ranks.choice(1), metrics))
                session = await asyncio.wait_for(came, TIMEOUT_S)
                await session.write(pb.LearnerMessage(welcome=pb.Welcome()).SerializeToString())
                grant = Grant(1, 0, 0, (2, 3))
                await session.write(pack_grant(grant))
                answer = SampleCodec(SOURCE.spec).receive(await session.read(TIMEOUT_S), grant)
                assert answer is not None
                assert answer[0]["image"][:, 0, 0, 0].tolist() == [2, 3]
                stop.set()
                try:
                    await session.read(TIMEOUT_S)
                except Ended:
                    in_order = await session.closed_in_order()
                session.end((grpc.StatusCode.UNAVAILABLE, "it may be told so"))
                await asyncio.wait_for(running, TIMEOUT_S)
                return in_order

    assert asyncio.run(supply())

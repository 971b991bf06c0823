"""Several learners: which one a session connects to, and when it goes to another."""

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from prometheus_client import CollectorRegistry

from murmur.env_service.environment import make_environment
from murmur.env_service.metrics import MOVES, WorkerMetrics
from murmur.env_service.sessions.expert import Expert
from murmur.env_service.sessions.ranks import LearnerChoice, Rank, Ranks, look_up, worth_moving
from murmur.env_service.sessions.reconnect import Disconnected
from murmur.env_service.sessions.supply import run_supply
from murmur.env_service.sessions.worker import WorkerSession, run_sessions, run_until
from murmur.env_service.watchdog.faults import FaultCount, GuardedEnvironment, Heartbeat
from murmur.kit.certs import make_certificates
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.config.section import validate
from murmur.shared.process.errors import ConfigError
from murmur.shared.rpc import LOAD_METHOD
from murmur.shared.wire.credentials import CredentialFolder
from tests.env_service.sessions.serving import ServingLearner, load
from tests.env_service.tiny_learner import experiment
from tests.learner_service.running import learner_process

ENVS, SESSIONS = 8, 2  # of a worker


def several(*learners: ServingLearner, **server: object) -> ExperimentConfig:
    """Workers of 8 environments in 2 sessions, for these learners."""
    quick = {"balance_every_s": 0.05, "move_after_s": 0.2}
    addresses = ",".join(learner.address for learner in learners)
    return experiment(addresses, **{**quick, **server})


class Workers:
    """Workers of one or several servers, on one event loop; `metrics` of each."""

    def __init__(self, config: ExperimentConfig, number: int) -> None:
        self._registries = [CollectorRegistry() for _ in range(number)]
        self.metrics = [WorkerMetrics("train", registry) for registry in self._registries]
        self._config = config

    def moved(self, reason: str) -> int:
        """Sessions that moved for a reason, reported or not yet."""
        total = "murmur_env_sessions_moved_total"
        reported = [r.get_sample_value(total, {"reason": reason}) or 0 for r in self._registries]
        waiting = (metrics.counts[f"sessions_moved/{reason}"] for metrics in self.metrics)
        return int(sum(reported) + sum(waiting))

    def play(self, until: Callable[[], Awaitable[object] | object]) -> None:
        """Play until a condition holds."""
        asyncio.run(asyncio.wait_for(self._play(until), 60))

    async def _play(self, until: Callable[[], Awaitable[object] | object]) -> None:
        stop = asyncio.Event()
        workers = [
            asyncio.create_task(
                run_sessions(self._config, i, i * ENVS, stop, metrics, Heartbeat.private(ENVS))
            )
            for i, metrics in enumerate(self.metrics)
        ]
        try:
            while not await _value(until):
                for worker in workers:
                    if worker.done():
                        worker.result()
                await asyncio.sleep(0.01)
        finally:
            stop.set()
            await asyncio.gather(*workers)


async def _value(condition: Callable[[], Awaitable[object] | object]) -> object:
    found = condition()
    return await found if isinstance(found, Awaitable) else found


def counts(learners: Sequence[ServingLearner]) -> list[int]:
    return [learner.environments for learner in learners]


def test_a_learner_says_how_much_it_has_to_do() -> None:
    with ServingLearner(rank=1, size=3, max_sessions=5) as learner:
        assert load(learner.address).free_sessions == 5
        seen = []

        def look() -> bool:
            if learner.environments == ENVS:
                seen.append(load(learner.address))
            return bool(seen)

        workers = Workers(experiment(learner.address), 1)
        workers.play(lambda: asyncio.get_running_loop().run_in_executor(None, look))
    reply = seen[0]
    assert (reply.rank, reply.size) == (1, 3)
    assert (reply.environments, reply.free_sessions, reply.supply_sessions) == (8, 3, 0)


def test_one_learner_is_asked_nothing() -> None:
    """Nor does it need to know the question: an older one does not."""

    async def main() -> None:
        metrics = WorkerMetrics("train", CollectorRegistry())
        async with Ranks(experiment("127.0.0.1:1"), metrics, "environment") as ranks:
            assert not ranks.movable
            assert (await ranks.choose(ranks.choice(4))).address == "127.0.0.1:1"

    asyncio.run(main())


@pytest.mark.parametrize("learners", [2, 3])
def test_sessions_are_spread_by_environments(learners: int) -> None:
    """Six sessions of four environments: 12 and 12, or 8, 8 and 8."""
    with ExitStack() as stack:
        all_ = [stack.enter_context(ServingLearner()) for _ in range(learners)]
        workers = Workers(several(*all_), 3)
        workers.play(lambda: counts(all_) == [24 // learners] * learners)


def test_a_learner_that_comes_later_gets_its_share() -> None:
    """In order: every row of a session that moves is answered."""
    with ExitStack() as stack:
        first = stack.enter_context(ServingLearner())
        with ServingLearner() as second:
            pass  # it has a port, and does not listen yet
        workers = Workers(several(first, second, move_after_s=0.05), 4)

        def even() -> bool:
            if first.environments == 32 and not second.listens:
                stack.enter_context(second)
            return counts([first, second]) == [16, 16]

        workers.play(even)
        rows = [metrics.counts["rows_unanswered"] for metrics in workers.metrics]
    assert sum(rows) == 0
    assert workers.moved("balance") >= 4


def test_a_session_moves_only_where_that_evens_two_learners_out() -> None:
    """With probability 1 - there / here: to an empty one for certain, else the less the fuller."""
    assert worth_moving(32, 0, 4, 0.999)
    assert worth_moving(32, 24, 4, 0.24)  # 1 - 24 / 32 = 0.25
    assert not worth_moving(32, 24, 4, 0.25)
    assert not worth_moving(20, 16, 4, 0.0)  # they would only change places
    assert worth_moving(21, 16, 4, 0.0)
    assert not worth_moving(16, 16, 4, 0.0)
    assert not worth_moving(0, 0, 4, 0.0)


def test_sessions_of_a_lost_learner_wait_then_go_and_come_back() -> None:
    with ExitStack() as stack:
        first = stack.enter_context(ServingLearner())
        life = ExitStack()
        second = life.enter_context(ServingLearner())
        workers = Workers(several(first, second), 2)
        seen: list[list[int]] = []

        def done() -> bool:
            now = counts([first, second])
            if not seen and now == [8, 8]:
                seen.append(now)
                life.close()
            elif len(seen) == 1 and now == [16, 0]:
                seen.append(now)
                stack.enter_context(second)
            return len(seen) == 2 and now == [8, 8]

        workers.play(done)
    assert workers.moved("lost") == 2


def test_session_reconnects_to_its_own_learner_first() -> None:
    """One that restarts soon keeps its sessions: nothing moves."""
    with ExitStack() as stack:
        first = stack.enter_context(ServingLearner())
        life = ExitStack()
        second = life.enter_context(ServingLearner())
        config = several(first, second, move_after_s=60.0, balance_every_s=0.0)
        workers = Workers(config, 2)
        before: list[int] = []  # environments of the second; unequal ones are never evened out

        def back() -> bool:
            if not before and sum(counts([first, second])) == 2 * ENVS:
                before.append(second.environments)
                life.close()
                stack.enter_context(second)
            return bool(before) and second.environments == before[0]

        workers.play(back)
    assert before[0] > 0
    assert [workers.moved(reason) for reason in MOVES] == [0, 0, 0]


def test_session_leaves_a_learner_that_waits_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Learners of one run say Welcome when each has a session; both came to the first one."""
    begun = threading.Event()
    with ServingLearner(waits_for=begun.is_set) as first, ServingLearner() as second:
        # As if both had asked before the other one came.
        monkeypatch.setattr(Ranks, "_least_loaded", _always_first)

        def both() -> bool:
            if second.environments:
                begun.set()
            return counts([first, second]) == [4, 4]

        Workers(several(first, second, envs_per_worker=8), 1).play(both)


def test_session_leaves_a_learner_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It blocks sessions until another one, which has none, has learned too."""
    with ServingLearner(pause_s=1e6) as first, ServingLearner() as second:
        monkeypatch.setattr(Ranks, "_least_loaded", _always_first)
        workers = Workers(several(first, second), 2)
        workers.play(lambda: counts([first, second]) == [8, 8])
        assert workers.moved("balance") >= 2
        assert workers.moved("lost") == 0


async def _always_first(ranks: Ranks, _: LearnerChoice) -> Rank:
    return ranks._ranks[0]


def test_a_full_learner_sends_its_sessions_to_another(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with ServingLearner(max_sessions=1) as small, ServingLearner() as large:
        workers = Workers(several(small, large), 2)
        workers.play(lambda: counts([small, large]) == [4, 12])


@pytest.mark.long
def test_supply_sessions_are_spread_by_number(tmp_path: Path) -> None:
    """Two real learners that learn from images; four workers that read them."""
    data = {
        "source": {"name": "tests.supply.toy_source:ToySource", "pause_s": 0.005},
        "algorithm": {"name": "segmentation", "batch_size": 4, "epochs": 1000},
        "network": {"name": "unet", "channels": [8, 8], "groups": 4},
        "supply": {"cache": "stream"},
        "learner": {"port": 0, "metrics_port": 0, "device": "cpu", "num_threads": 1},
    }
    one = validate(ExperimentConfig, data)
    with (
        learner_process(tmp_path / "one", one) as first,
        learner_process(tmp_path / "two", one) as second,
    ):
        addresses = [f"127.0.0.1:{learner.port}" for learner in (first, second)]
        server = {"learner": ",".join(addresses), "balance_every_s": 0.05}
        config = validate(ExperimentConfig, {**data, "env_server": server})

        async def main() -> None:
            stop, loop = asyncio.Event(), asyncio.get_running_loop()
            workers = [
                asyncio.create_task(
                    run_supply(
                        config,
                        number,
                        stop,
                        WorkerMetrics("supply", CollectorRegistry()),
                        Heartbeat.private(1),
                    )
                )
                for number in range(4)
            ]
            sessions: list[int] = []
            while sessions != [2, 2]:
                assert not any(worker.done() for worker in workers)
                replies = [await loop.run_in_executor(None, load, at) for at in addresses]
                sessions = [reply.supply_sessions for reply in replies]
            stop.set()
            await asyncio.gather(*workers)

        asyncio.run(asyncio.wait_for(main(), 300))


def test_a_refusal_for_want_of_room_moves_a_session() -> None:
    """The learner's answer was older than its refusal: as when many connect at once."""

    async def main(address: str) -> None:
        metrics = WorkerMetrics("train", CollectorRegistry())
        config = experiment(f"127.0.0.1:1,{address}", move_after_s=60.0)
        async with Ranks(config, metrics, "environment") as ranks:
            choice = ranks.choice(4)
            full, other = ranks._ranks
            choice.rank = full
            error = Disconnected(grpc.StatusCode.RESOURCE_EXHAUSTED, "learner.max_sessions=1")
            assert choice.pause_s(error) <= config.env_server.reconnect_min_s
            assert await ranks.choose(choice) is other
            assert [metrics.counts[f"sessions_moved/{reason}"] for reason in MOVES] == [0, 0, 1]
            choice.rank = other  # lost, but not long enough to be given up
            choice.pause_s(Disconnected(grpc.StatusCode.UNAVAILABLE, "gone"))
            assert await ranks.choose(choice) is other

    with ServingLearner() as learner:
        asyncio.run(main(learner.address))


def test_sync_worker_i_stays_with_learner_i_modulo_n() -> None:
    with ServingLearner() as first, ServingLearner() as second:
        config = several(first, second)
        learner = config.learner.model_copy(update={"pipeline": "sync"})
        workers = Workers(config.model_copy(update={"learner": learner}), 3)
        seen: list[set[str]] = []

        def all_play() -> bool:
            if counts([first, second]) != [16, 8]:
                return False
            for learner in (first, second):  # <host>-<worker>/<session>
                ids = [session.worker_id for session in learner.host.sessions]
                seen.append({name.rpartition("-")[2][0] for name in ids})
            return True

        workers.play(all_play)
    assert seen[:2] == [{"0", "2"}, {"1"}]
    assert [workers.moved(reason) for reason in MOVES] == [0, 0, 0]


def test_name_is_resolved_again_and_its_certificate_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a headless service: one name, the addresses of the pods that are there now."""
    make_certificates(tmp_path, ["learners.test"], 30)
    credentials = CredentialFolder(tmp_path / "learner")

    async def main(learners: list[ServingLearner]) -> None:
        metrics, stop = WorkerMetrics("train", CollectorRegistry()), asyncio.Event()
        port = learners[0].port
        found = ["127.0.0.2", "127.0.0.3"]

        async def names(name: str) -> list[str]:
            assert name == "learners.test"
            return found

        monkeypatch.setattr("murmur.env_service.sessions.ranks.look_up", names)
        sections = experiment(f"learners.test:{port}", balance_every_s=0.05).model_dump()
        sections["security"]["folder"] = str(tmp_path / "environment")
        config = validate(ExperimentConfig, sections)
        async with Ranks(config, metrics, "environment") as ranks:
            sessions = [_session(config, metrics, i, stop) for i in range(4)]
            plays = [session.run(ranks.choice(4), metrics) for session in sessions]
            task = asyncio.create_task(run_until(stop, metrics, plays))
            while counts(learners) != [8, 8, 0]:
                await asyncio.sleep(0.01)
            found.append("127.0.0.4")
            await ranks._refresh()
            while sorted(counts(learners)) != [4, 4, 8]:
                await asyncio.sleep(0.01)
            stop.set()
            await task

    with ExitStack() as stack:
        learners: list[ServingLearner] = []
        for host in ("127.0.0.2", "127.0.0.3", "127.0.0.4"):
            port = learners[0].port if learners else 0
            learner = ServingLearner(host, port, credentials=credentials)
            learners.append(stack.enter_context(learner))
        asyncio.run(asyncio.wait_for(main(learners), 60))
        with pytest.raises(grpc.RpcError) as refused:
            load(learners[0].address)  # in plain text
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


def test_numbered_learners_of_a_name_are_connected_by_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Evaluations are the first learner's; the order of a name's addresses means nothing."""
    with (
        ServingLearner("127.0.0.2", rank=1, size=2) as second,
        ServingLearner("127.0.0.3", second.port, rank=0, size=2) as first,
    ):

        async def names(_: str) -> list[str]:
            return ["127.0.0.2", "127.0.0.3"]

        monkeypatch.setattr("murmur.env_service.sessions.ranks.look_up", names)

        async def main() -> list[str]:
            metrics = WorkerMetrics("evaluate", CollectorRegistry())
            config = trusting(f"l:{second.port}")
            chosen = []
            for number in range(3):
                async with Ranks(config, metrics, number=number) as ranks:
                    chosen.append((await ranks.choose(ranks.choice(1))).address)
            return chosen

        assert asyncio.run(main()) == [first.address, second.address, first.address]


def test_name_that_cannot_be_resolved_is_used_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def no_address(_: str) -> list[str]:
        raise socket.gaierror(-2, "Name or service not known")

    async def one(_: str) -> list[str]:
        return ["10.0.0.1"]

    async def main() -> None:
        config = trusting("l:1")
        metrics = WorkerMetrics("train", CollectorRegistry())
        for names in (no_address, one):
            monkeypatch.setattr("murmur.env_service.sessions.ranks.look_up", names)
            async with Ranks(config, metrics, "environment") as ranks:
                assert ranks.addresses == ["l:1"]

    asyncio.run(main())


def test_a_name_has_addresses_of_one_family() -> None:
    """localhost may have two addresses and is one machine."""
    assert asyncio.run(look_up("localhost")) in (["127.0.0.1"], ["[::1]"])


def test_a_name_with_several_ports_has_a_learner_at_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Several machines of several GPUs each: every port of every address."""
    found = ["10.0.0.1"]

    async def names(name: str) -> list[str]:
        assert name == "l"
        return found

    monkeypatch.setattr("murmur.env_service.sessions.ranks.look_up", names)

    async def main() -> None:
        metrics = WorkerMetrics("train", CollectorRegistry())
        async with Ranks(trusting("l:1-2"), metrics, "environment") as ranks:
            assert ranks.addresses == ["l:1", "l:2"]
            found.append("10.0.0.2")
            await ranks._refresh()
            assert ranks.addresses == ["10.0.0.1:1", "10.0.0.1:2", "10.0.0.2:1", "10.0.0.2:2"]
            del found[0]
            await ranks._refresh()
            assert ranks.addresses == ["10.0.0.2:1", "10.0.0.2:2"]
            assert len(ranks._known) == 2  # no connection to what is gone

    asyncio.run(main())


@pytest.mark.parametrize("learners", ["a:1,a:1", "a:1,", ",a:1", "a:2-1", "a:1-2,a:2"])
def test_a_list_of_learners_names_each_once(learners: str) -> None:
    metrics = WorkerMetrics("train", CollectorRegistry())
    with pytest.raises(ConfigError, match=r"name each learner once, as in gpu-one:50051,gpu-two"):
        Ranks(experiment(learners), metrics, "environment")


def test_one_learner_on_another_machine_needs_credentials() -> None:
    metrics = WorkerMetrics("train", CollectorRegistry())
    with pytest.raises(ConfigError, match=r"env_server\.learner=far:1 reaches beyond this machine"):
        Ranks(experiment("127.0.0.1:1,far:1"), metrics, "environment")


def test_the_load_needs_a_token(tmp_path: Path) -> None:
    make_certificates(tmp_path, ["localhost"], 30)
    folder = tmp_path / "environment"
    secure = grpc.ssl_channel_credentials(
        (folder / "ca.pem").read_bytes(),
        (folder / "key.pem").read_bytes(),
        (folder / "certificate.pem").read_bytes(),
    )
    with (
        ServingLearner("localhost", credentials=CredentialFolder(tmp_path / "learner")) as learner,
        grpc.secure_channel(learner.address, secure) as channel,
        pytest.raises(grpc.RpcError) as refused,
    ):
        channel.unary_unary(LOAD_METHOD, None, None)(b"", timeout=10)
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


def trusting(learner: str) -> ExperimentConfig:
    """In plain text to anywhere."""
    sections = experiment(learner).model_dump()
    sections["security"]["insecure"] = True
    return validate(ExperimentConfig, sections)


def _session(
    config: ExperimentConfig, metrics: WorkerMetrics, number: int, stop: asyncio.Event
) -> WorkerSession:
    faults = FaultCount(0, metrics.drop_episodes)
    guarded = GuardedEnvironment(lambda: make_environment(config.environment, 4), faults)
    expert = Expert(config, guarded, asked=True)
    return WorkerSession(guarded, expert, f"test-0/{number}", 4 * number, stop)

"""A run is begun once, though the session that begins it ends meanwhile."""

import asyncio
import gc
import threading

import pytest

from murmur.learner_service.serving.admission import Admission
from murmur.learner_service.telemetry.metrics import LearnerMetrics
from murmur.shared.config.learner import LearnerConfig
from murmur.shared.process.errors import SpecError
from murmur.shared.rpc import rollout_pb2 as pb
from tests.env_service.sessions.serving import ServingLearner, load
from tests.learner_service.toys import vector_spec
from tests.waiting import wait_until
from tests.wire import Client, hello_message


def new_admission() -> Admission:
    return Admission(LearnerConfig(), LearnerMetrics())


def test_session_that_ends_at_the_start_begins_no_second_run() -> None:
    """Seen with two learners: a session moved on, and two threads learned in one process."""
    may_begin = threading.Event()
    spec = vector_spec()
    with ServingLearner(waits_for=may_begin.is_set) as learner:
        with Client(learner.port, spec, 1) as first:
            first.send(hello_message(spec, 1))
            wait_until(lambda: learner.host.opened == 1)
            first.drop()
        wait_until(lambda: load(learner.address).environments == 0)
        with Client(learner.port, spec, 1) as second:
            second.send(hello_message(spec, 1))
            wait_until(lambda: load(learner.address).environments == 1)
            may_begin.set()
            assert pb.LearnerMessage.FromString(second.read()).HasField("welcome")
        assert learner.host.opened == 1


def test_next_session_begins_a_run_that_the_first_could_not() -> None:
    calls: list[str] = []

    def fail() -> None:
        calls.append("first")
        raise SpecError("no such environment")

    async def sessions() -> None:
        admission = new_admission()
        first = admission.open_once(lambda: "second" in calls, fail)
        second = admission.open_once(lambda: "second" in calls, lambda: calls.append("second"))
        results = await asyncio.gather(first, second, return_exceptions=True)
        assert isinstance(results[0], SpecError)
        assert results[1] is None
        await admission.open_once(lambda: "second" in calls, pytest.fail)

    asyncio.run(sessions())
    assert calls == ["first", "second"]


def test_error_after_the_session_is_gone_is_not_printed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    go_on = threading.Event()

    def begin() -> None:
        go_on.wait(30)
        raise SpecError("the learner is told to stop")

    async def main() -> None:
        session = asyncio.create_task(new_admission().open_once(lambda: False, begin))
        await asyncio.sleep(0.05)
        session.cancel()
        await asyncio.gather(session, return_exceptions=True)
        go_on.set()
        while len(asyncio.all_tasks()) > 1:
            await asyncio.sleep(0.01)

    asyncio.run(main())
    gc.collect()
    assert "never retrieved" not in caplog.text

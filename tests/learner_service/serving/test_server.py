"""The learner over a real socket: the handshake, what it refuses, and that no row is lost."""

import dataclasses
import gc
import socket
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from murmur.learner_service.app import run_learner
from murmur.learner_service.telemetry.metric_table import METRICS
from murmur.shared.config import PluginConfig
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.process.errors import ResourceError
from murmur.shared.rpc import rollout_pb2 as pb
from murmur.shared.wire.codec import ActionCodec
from murmur.shared.wire.spec import (
    ACTION_MASK,
    AGENT_MASK,
    ArraySpec,
    Continuous,
    Discrete,
    EnvSpec,
)
from tests.learner_service.running import (
    RunningLearner,
    experiment,
    learner_process,
    running_learner,
)
from tests.learner_service.toys import ABORTED, FIRST, LAST, MID, row, vector_spec
from tests.waiting import wait_until
from tests.wire import Client, Refused

SPEC = vector_spec()


@pytest.fixture(scope="module")
def learner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningLearner]:
    config = experiment(learner={"max_sessions": 3}, run={"seed": 11})
    with running_learner(tmp_path_factory.mktemp("run"), config) as running:
        with Client(running.port, SPEC, 1) as first:  # fixes the spec
            first.hello()
        yield running


def refused(client: Client) -> Refused:
    with pytest.raises(Refused) as caught:
        client.read()
    return caught.value


def quiet(learner: RunningLearner) -> None:
    """No session is left."""
    wait_until(lambda: learner.metric("sessions") == 0)


def test_the_handshake_gives_slots_seed_and_version(learner: RunningLearner) -> None:
    quiet(learner)
    with Client(learner.port, SPEC, 2) as a, Client(learner.port, SPEC, 3) as b:
        first, second = a.hello(), b.hello()
        assert (first.first_slot, second.first_slot) == (0, 2)
        assert first.run_seed == 11
        assert [s.episode for s in first.slots] == [0, 0]
        assert len(second.slots) == 3
        action = a.exchange(row(SPEC, 2, FIRST))
        assert action.shape == (2, 2)
        assert action.dtype == np.int32
        assert action.min() >= 0
        assert action.max() < 3
        assert a.policy_version == first.policy_version
    quiet(learner)


def test_slots_are_those_preferred_if_free_else_the_first_gap(learner: RunningLearner) -> None:
    quiet(learner)
    with Client(learner.port, SPEC, 2) as a, Client(learner.port, SPEC, 2) as b:
        assert a.hello(preferred_first_slot=2).first_slot == 2
        assert b.hello(preferred_first_slot=3).first_slot == 0
        with Client(learner.port, SPEC, 1) as c:
            assert c.hello().first_slot == 4
    quiet(learner)


def test_nothing_is_kept_for_sizes_of_sessions_that_have_ended(learner: RunningLearner) -> None:
    def frames() -> set[object]:
        return {x for x in gc.get_objects() if type(x) is ActionCodec}

    quiet(learner)
    before = frames()  # kept, so that no address of theirs is used again
    for num_envs in (11, 12, 13):
        with Client(learner.port, SPEC, num_envs) as client:
            client.hello()
            client.exchange(row(SPEC, num_envs, FIRST))
            assert len(frames() - before) == 2  # the client's and the learner's
        del client
        wait_until(lambda: not frames() - before)


def test_another_spec_is_refused_naming_the_first_difference(learner: RunningLearner) -> None:
    other = dataclasses.replace(
        SPEC, observations=(dataclasses.replace(SPEC.observations[0], shape=(5,)),)
    )
    with Client(learner.port, other, 1) as client, pytest.raises(Refused) as caught:
        client.hello(worker_id="w-7")
    assert caught.value.code == grpc.StatusCode.FAILED_PRECONDITION
    assert "'w-7'" in caught.value.details
    wanted = "observations['view'].shape: (4,) here, (5,) there (here: the learner, there: the wor"
    assert wanted in caught.value.details


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"protocol_version": 99}, "FAILED_PRECONDITION", "protocol version 99, this learner 6"),
        ({"num_envs": 0}, "INVALID_ARGUMENT", "num_envs=0"),
        (
            {"curriculum": ["wind"]},
            "FAILED_PRECONDITION",
            "environment.curriculum names no option here, wind at worker",
        ),
        (
            {"curriculum": ["wind"], "mode": pb.MODE_EVALUATE, "episodes": 1},
            "FAILED_PRECONDITION",
            "environment.curriculum names no option here, wind at worker",
        ),
        ({"mode": pb.MODE_UNSPECIFIED}, "INVALID_ARGUMENT", "MODE_UNSPECIFIED"),
        ({"mode": pb.MODE_SUPPLY}, "FAILED_PRECONDITION", "it takes no samples; start the server"),
        ({"spec": pb.EnvSpec(name="x")}, "FAILED_PRECONDITION", "names no action spec"),
    ],
)
def test_a_hello_that_cannot_be_met_is_refused(
    learner: RunningLearner, changes: dict[str, object], code: str, words: str
) -> None:
    with Client(learner.port, SPEC, 1) as client, pytest.raises(Refused) as caught:
        client.hello(**changes)
    assert caught.value.code.name == code
    assert words in caught.value.details


def test_the_first_message_must_be_hello(learner: RunningLearner) -> None:
    with Client(learner.port, SPEC, 1) as client:
        client.put(row(SPEC, 1, FIRST))
        answer = refused(client)
        assert answer.code == grpc.StatusCode.FAILED_PRECONDITION
        assert "must be hello, got observation" in answer.details
    with Client(learner.port, SPEC, 1) as client:
        client.send(b"\xff\xff\xff")
        assert refused(client).code == grpc.StatusCode.INVALID_ARGUMENT
    with Client(learner.port, SPEC, 1) as client:
        client.half_close()
        assert "ended before Hello" in refused(client).details


def test_the_wrong_number_of_bytes_is_refused_naming_the_arrays(learner: RunningLearner) -> None:
    with Client(learner.port, SPEC, 2) as client:
        client.hello()
        observation = pb.Observation(sequence=1, arrays=b"\0" * 10)
        client.send(pb.WorkerMessage(observation=observation).SerializeToString())
        answer = refused(client)
    assert answer.code == grpc.StatusCode.INVALID_ARGUMENT
    # 2 * (2 rewards + 1 discount + 2 * 4 views + 1 score) * 4 bytes + 2 step types
    assert "hold 10 bytes, the spec says 98" in answer.details
    assert "observation/view float32[2, 2, 4]" in answer.details


@pytest.mark.parametrize("where", ["observation", "reward", "step_type"])
def test_poison_is_refused_and_nothing_of_it_is_stored(learner: RunningLearner, where: str) -> None:
    quiet(learner)
    before = learner.metric("rows_received_total")
    timestep = row(SPEC, 2, FIRST)
    if where == "observation":
        timestep.observation["view"][1, 0, 2] = np.nan  # type: ignore[index]
        words = "environment 1 returned nan in observation 'view' of agent 0 at index [2]"
    elif where == "reward":
        timestep.reward[0, 1] = np.inf
        words = "environment 0 returned inf in reward of agent 1"
    else:
        timestep.step_type[1] = 7
        words = "environment 1 returned step_type 7, expected 0, 1, 2 or 3"
    with Client(learner.port, SPEC, 2) as client:
        client.hello()
        client.put(timestep)
        answer = refused(client)
    assert answer.code == grpc.StatusCode.INVALID_ARGUMENT
    assert words in answer.details
    quiet(learner)
    assert learner.metric("rows_received_total") == before
    assert learner.metric("rejected_total", reason="contents") > 0


@pytest.mark.parametrize(
    ("array", "kind", "value", "words"),
    [
        ("discount", MID, 5, "returned a discount of 5, which must be within 0 and 1"),
        ("discount", LAST, -1, "returned a discount of -1, which must be within 0 and 1"),
        ("discount", FIRST, np.nan, "returned a discount of nan, which must be"),
        ("reward", FIRST, 0.5, "returned a reward of 0.5 for agent 0 on FIRST, where no action"),
        ("reward", MID, 1e30, "returned a reward of 1e+30 for agent 0, beyond ±1e+06 (learner.max"),
        ("reward", LAST, -2e6, "returned a reward of -2e+06 for agent 0, beyond ±1e+06"),
    ],
)
def test_numbers_outside_their_range_are_refused(
    learner: RunningLearner, array: str, kind: int, value: float, words: str
) -> None:
    with Client(learner.port, SPEC, 2) as client:
        client.hello()
        if kind != FIRST:
            client.exchange(row(SPEC, 2, FIRST))
        timestep = row(SPEC, 2, kind)
        getattr(timestep, array)[1] = value
        client.put(timestep)
        assert f"environment 1 {words}" in refused(client).details


def test_rewards_and_discounts_of_any_usual_size_are_taken(learner: RunningLearner) -> None:
    with Client(learner.port, SPEC, 3) as client:
        client.hello()
        client.exchange(row(SPEC, 3, FIRST))
        for kind, reward, discount in ((MID, 1e6, 1), (MID, -1e6, 0.5), (LAST, 1e-45, 0)):
            timestep = row(SPEC, 3, kind)
            timestep.reward[:], timestep.discount[:] = reward, discount
            client.exchange(timestep)


def test_a_result_that_is_no_number_is_refused_on_last_alone(learner: RunningLearner) -> None:
    quiet(learner)
    before = learner.metric("rows_received_total")
    with Client(learner.port, SPEC, 2) as client:
        client.hello()
        for kinds in ((FIRST, FIRST), (MID, MID), (LAST, MID), (FIRST, LAST)):
            timestep = row(SPEC, 2)
            timestep.step_type[:] = kinds
            timestep.metrics["score"][1] = np.nan
            if kinds[1] == LAST:
                client.put(timestep)
            else:
                client.exchange(timestep)
        answer = refused(client)
    assert answer.code == grpc.StatusCode.INVALID_ARGUMENT
    assert "environment 1 returned nan in metric 'score' on LAST" in answer.details
    quiet(learner)
    assert learner.metric("rows_received_total") == before + 3 * 2


def test_masks_that_say_nothing_are_refused(tmp_path: Path) -> None:
    masks = (ArraySpec(ACTION_MASK, "uint8", (3,)), ArraySpec(AGENT_MASK, "uint8", ()))
    spec = dataclasses.replace(SPEC, observations=(*SPEC.observations, *masks))
    breaches = (
        (ACTION_MASK, 0, "environment 0 returned an action_mask that allows no action to agent 1"),
        (
            ACTION_MASK,
            2,
            "environment 0 returned 2 in action_mask of agent 1, where 0 or 1 must be",
        ),
        (
            AGENT_MASK,
            255,
            "environment 0 returned 255 in agent_mask of agent 1, where 0 or 1 must be",
        ),
    )
    with running_learner(tmp_path, experiment()) as learner:
        for name, value, words in breaches:
            timestep = row(spec, 2, FIRST)
            for mask in (ACTION_MASK, AGENT_MASK):
                timestep.observation[mask][:] = 1  # type: ignore[index]
            timestep.observation[name][0, 1] = value  # type: ignore[index]
            with Client(learner.port, spec, 2) as client:
                client.hello()
                client.put(timestep)
                assert words in refused(client).details


@pytest.mark.parametrize(
    ("before", "then"), [(FIRST, FIRST), (MID, FIRST), (LAST, MID), (ABORTED, MID), (ABORTED, LAST)]
)
def test_steps_out_of_order_are_refused(learner: RunningLearner, before: int, then: int) -> None:
    with Client(learner.port, SPEC, 2) as client:
        client.hello()
        client.exchange(row(SPEC, 2, before))
        timestep = row(SPEC, 2, FIRST if before in (LAST, ABORTED) else MID)
        timestep.step_type[1] = then
        client.put(timestep)
        answer = refused(client)
    assert answer.code == grpc.StatusCode.INVALID_ARGUMENT
    assert "environment 1 returned step_type" in answer.details
    assert "FIRST must follow LAST and ABORTED, and nothing else" in answer.details


def test_a_wrong_sequence_number_is_refused(learner: RunningLearner) -> None:
    with Client(learner.port, SPEC, 1) as client:
        client.hello()
        client.exchange(row(SPEC, 1, FIRST))
        client.put(row(SPEC, 1), sequence=3)
        answer = refused(client)
    assert answer.code == grpc.StatusCode.FAILED_PRECONDITION
    assert "sent sequence number 3, expected 2" in answer.details


def test_a_silent_session_is_ended_and_what_it_sent_is_kept(tmp_path: Path) -> None:
    config = experiment(
        algorithm={"batch_number": 4},  # an update takes two environments
        env_server={"step_timeout_s": 0.1, "sessions_per_worker": 2},
        learner={"session_timeout_s": 0.5},
    )
    with running_learner(tmp_path, config) as learner, Client(learner.port, SPEC, 2) as silent:
        silent.hello()
        for t in range(3):
            silent.exchange(row(SPEC, 2, MID if t else FIRST))
        with pytest.raises(
            Refused, match=r"no whole observation for 0\.5 s \(learner\.session_timeout_s"
        ):
            silent.read()
        assert learner.metric("rejected_total", reason="idle") == 1
        wait_until(lambda: learner.metric("rows_trained_total") == 2 * 2)
        assert learner.metric("rows_dropped_total") == 2
        assert learner.metric("sessions") == 0


def test_surplus_sessions_are_refused(learner: RunningLearner) -> None:
    quiet(learner)
    clients = [Client(learner.port, SPEC, 1) for _ in range(3)]
    try:
        for client in clients:
            client.hello()
        with Client(learner.port, SPEC, 1) as surplus, pytest.raises(Refused) as caught:
            surplus.hello()
        assert caught.value.code == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "learner.max_sessions=3" in caught.value.details
    finally:
        for client in clients:
            client.drop()
    quiet(learner)
    with Client(learner.port, SPEC, 1) as client:  # there is room again
        client.hello()


def test_the_health_service_answers(learner: RunningLearner) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{learner.port}") as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(), timeout=10
        )
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_every_metric_is_served(learner: RunningLearner) -> None:
    # A metric with labels appears once it has a value; its family is there from the start.
    url = f"http://127.0.0.1:{learner.metrics_port}/metrics"
    with urllib.request.urlopen(url, timeout=10) as response:
        text = response.read().decode()
    for metric in METRICS:
        if not metric.name.startswith("gpu_"):  # only where there is a GPU
            assert f"# HELP murmur_learner_{metric.name}" in text, metric.name


def test_an_episode_may_fail_before_its_first_row(tmp_path: Path) -> None:
    """Its number is used up: a session that comes back continues after it."""
    plays = {
        # Environment 1 plays episodes 0, 1 (fails at once), 2 (the same), 3.
        "in the middle": (
            [(FIRST, FIRST), (MID, LAST), (MID, ABORTED), (MID, ABORTED), (MID, FIRST)],
            4,
        ),
        # 4, 5 (fails at once), 6.
        "first of all": ([(FIRST, FIRST), (MID, LAST), (MID, ABORTED), (MID, FIRST)], 7),
        "in the first row": ([(FIRST, ABORTED), (MID, ABORTED), (MID, FIRST)], 10),
        "in the last row": ([(FIRST, FIRST), (MID, LAST), (MID, ABORTED)], 12),
    }
    with running_learner(tmp_path, experiment(algorithm={"batch_number": 4})) as learner:
        for number, (kinds_of_rows, episode) in enumerate(plays.values()):
            with Client(learner.port, SPEC, 2) as client:
                client.hello()
                for kinds in kinds_of_rows:
                    timestep = row(SPEC, 2)
                    timestep.step_type[:] = kinds
                    client.exchange(timestep)
            quiet(learner)
            with Client(learner.port, SPEC, 2) as client:
                assert [s.episode for s in client.hello().slots] == [number + 1, episode]
            quiet(learner)
        assert learner.metric("episodes_dropped_total", reason="environment") == 2 + 1 + 2 + 1


def test_aborted_episode_is_counted_and_has_no_result(tmp_path: Path) -> None:
    config = experiment(algorithm={"batch_number": 4})  # an update takes two environments
    with running_learner(tmp_path, config) as learner, Client(learner.port, SPEC, 2) as client:
        client.hello()
        types = [(FIRST, FIRST), (MID, MID), (ABORTED, MID), (FIRST, MID), (LAST, LAST)]
        for kinds in types:
            timestep = row(SPEC, 2, value=1.0)
            timestep.step_type[:] = kinds
            timestep.reward[timestep.step_type == FIRST] = 0
            client.exchange(timestep)
        wait_until(lambda: learner.metric("updates_total") == 1)
        assert learner.metric("episodes_dropped_total", reason="environment") == 1
        assert learner.metric("episodes_dropped_total", reason="session") == 0
        assert learner.metric("episodes_total", mode="train") == 2
        # 3 transitions with results in the first environment's two episodes, 4 in the second's
        # one; the row that is aborted belongs to no step that was taken.
        assert learner.metric("env_steps_total") == 2 + 4
        # Returns of two agents with reward 1: 2 after the aborted row, 8 in the other environment.
        wait_until(lambda: learner.metric("episode_return", mode="train") == 5)


def test_no_row_is_lost_when_clients_drop_in_the_middle(tmp_path: Path) -> None:
    """Received = trained + waiting + in open unrolls + dropped, at every stop on the way."""
    # An update takes two environments.
    config = experiment(algorithm={"batch_number": 4}, learner={"max_policy_lag": 3})
    with running_learner(tmp_path, config) as learner:

        def count(name: str) -> float:
            return learner.metric(name)

        with Client(learner.port, SPEC, 2) as stays:
            stays.hello()
            for t in range(3):  # open: 3 rows of 2 environments, of an unroll of 5
                stays.exchange(row(SPEC, 2, MID if t else FIRST))
            with Client(learner.port, SPEC, 2) as goes:
                goes.hello()
                for t in range(8):  # one full unroll (4 transitions) and 4 rows of the next
                    goes.exchange(row(SPEC, 2, MID if t else FIRST))
                wait_until(lambda: count("updates_total") == 1)
            # It leaves 4 rows of an unroll: 3 transitions, and a row that nothing was done on.
            wait_until(lambda: count("updates_total") == 2)
            received, trained = count("rows_received_total"), count("rows_trained_total")
            assert received == 2 * 3 + 2 * 8
            assert trained == 2 * 4 + 2 * 3
            assert learner.metric("rows_dropped_total", reason="session") == 2
            assert learner.metric("rows_dropped_total", reason="lag") == 0
            assert learner.metric("episodes_dropped_total", reason="session") == 2
            held = received - trained - count("rows_dropped_total")
            assert held == 2 * 3  # what `stays` has in its open unroll
            for _ in range(3):
                stays.exchange(row(SPEC, 2))
            wait_until(lambda: count("updates_total") == 3)
        wait_until(lambda: count("updates_total") == 4)
        assert count("rows_dropped_total") == 2 + 2
        assert count("rows_received_total") == count("rows_trained_total") + count(
            "rows_dropped_total"
        )


def test_a_learner_that_only_serves_takes_no_memory_for_a_replay(tmp_path: Path) -> None:
    def qmix(capacity_rows: int) -> ExperimentConfig:
        algorithm = PluginConfig(name="qmix", replay={"capacity_rows": capacity_rows})
        return experiment().model_copy(update={"algorithm": algorithm})

    with running_learner(tmp_path, qmix(1000)) as learner, Client(learner.port, SPEC, 1) as client:
        client.hello()  # and a checkpoint is written at the end
    far_too_many = psutil.virtual_memory().total
    with (
        running_learner(tmp_path, qmix(far_too_many), serve_only=True) as learner,
        Client(learner.port, SPEC, 1) as client,
    ):
        client.hello(mode=pb.MODE_EVALUATE)
        assert client.exchange(row(SPEC, 1, FIRST)).shape == (1, 2)


def test_a_port_in_use_is_an_error_in_one_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with (
            pytest.raises(ResourceError, match=rf"cannot bind 127\.0\.0\.1:{port}: .*port"),
            running_learner(tmp_path, experiment(learner={"port": port})),
        ):
            pytest.fail("it must not start")
        with (
            pytest.raises(ResourceError, match=f"cannot bind metrics port 127.0.0.1:{port}: "),
            running_learner(tmp_path, experiment(learner={"metrics_port": port})),
        ):
            pytest.fail("it must not start")


def test_impossible_run_folder_is_an_error_with_a_message(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="cannot make run folder"):
        run_learner(experiment(), tmp_path / "file" / "run", resume=False, stop=threading.Event())


def test_unfit_environment_is_refused_and_the_next_may_fit(tmp_path: Path) -> None:
    push = EnvSpec("push", 1, (ArraySpec("x", "float32", (1,)),), Continuous(2))
    with running_learner(tmp_path, experiment()) as learner:
        with Client(learner.port, push, 1) as client, pytest.raises(Refused) as caught:
            client.hello()
        assert caught.value.code == grpc.StatusCode.FAILED_PRECONDITION
        assert "coma needs discrete actions" in caught.value.details
        with Client(learner.port, SPEC, 1) as client:
            client.hello()


def test_impossible_configuration_ends_the_learner_in_one_line(tmp_path: Path) -> None:
    maps = EnvSpec("maps", 1, (ArraySpec("m", "uint8", (1, 4, 4)),), Discrete(2))
    with learner_process(tmp_path, experiment()) as process:  # its network is an mlp
        with Client(process.port, maps, 1) as client, pytest.raises(Refused):
            client.hello()
        code, errors = process.wait()
    assert code == 2
    assert "use 'cnn'" in errors
    assert "Traceback" not in errors

"""Sessions against a real gRPC server: handshake, lockstep, replay, reconnect, refusals, stop."""

import asyncio
import gc
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from threading import Thread

import grpc
import numpy as np
import pytest
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry

from murmur.env_service.environment import VectorEnvironment, make_environment
from murmur.env_service.envs.spread import Config, Spread
from murmur.env_service.metrics import METRICS, PREFIX, WorkerMetrics
from murmur.env_service.sessions.expert import Expert
from murmur.env_service.sessions.ranks import Ranks
from murmur.env_service.sessions.worker import (
    Stream,
    WorkerSession,
    hello_of,
    run_sessions,
    run_until,
)
from murmur.env_service.watchdog.faults import Fault, FaultCount, GuardedEnvironment, Heartbeat
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.process.errors import (
    ConnectionLostError,
    EnvironmentFault,
    MurmurError,
    RunCompleteError,
    WireError,
)
from murmur.shared.rpc import PROTOCOL_VERSION
from murmur.shared.rpc import rollout_pb2 as pb
from murmur.shared.wire.channel import RUN_COMPLETE, STOPPING
from murmur.shared.wire.seeding import episode_seeds
from murmur.shared.wire.spec import EnvSpec, spec_from_proto
from murmur.shared.wire.timestep import Array, StepType, TimeStep
from tests.env_service.sessions.serving import ServingLearner
from tests.env_service.tiny_learner import Policy, TinyLearner, experiment


def play(
    config: ExperimentConfig,
    until: Callable[[], bool],
    make: Callable[[], VectorEnvironment] | None = None,
) -> CollectorRegistry:
    """Run a worker in this thread until a condition holds; returns its metrics.

    With `make`, one session of what it makes instead of the configured ones.
    """
    registry = CollectorRegistry()
    metrics = WorkerMetrics("train", registry)

    async def one_session(stop: asyncio.Event) -> None:
        assert make is not None
        faults = FaultCount(config.env_server.max_faults_per_minute, metrics.drop_episodes)
        bound = config.learner.max_abs_reward
        guarded = GuardedEnvironment(make, faults, max_abs_reward=bound)
        session = WorkerSession(guarded, Expert(config, guarded, asked=True), "test-0/0", 0, stop)
        async with Ranks(config, metrics, "environment") as ranks:
            await run_until(stop, metrics, [session.run(ranks.choice(4), metrics)])

    async def main() -> None:
        stop = asyncio.Event()

        async def watch() -> None:
            while not until():
                await asyncio.sleep(0.01)
            stop.set()

        watcher = asyncio.create_task(watch())
        try:
            if make is None:
                heartbeat = Heartbeat.private(config.env_server.envs_per_worker)
                await run_sessions(config, 3, 40, stop, metrics, heartbeat)
            else:
                await one_session(stop)
        finally:
            watcher.cancel()

    asyncio.run(asyncio.wait_for(main(), 30))
    return registry


def random_policy(spec: EnvSpec, num_envs: int) -> Policy:
    random = np.random.default_rng(0)
    return lambda _: random.integers(0, 5, (num_envs, spec.num_agents), dtype=np.int32)


def lone_episode(seed: int, actions: Array) -> TimeStep:
    """The row that one copy reaches from its seed by these actions."""
    environment = Spread(Config(), 1)
    timestep = environment.reset(np.array([seed], np.uint64))
    for action in actions:
        timestep = environment.step(action[None], np.zeros(1, np.bool_), np.zeros(1, np.uint64))
    return timestep


def test_handshake_and_lockstep() -> None:
    starts = [(0, b""), (5, b""), (0, b""), (9, b"")]
    with TinyLearner(policy=random_policy, starts=starts) as learner:
        registry = play(experiment(learner.address), lambda: _rows(learner, 2) > 60)
        sessions = sorted(learner.sessions, key=lambda s: s.hello.worker_id)
    for i, session in enumerate(sessions):
        hello = session.hello
        assert hello.protocol_version == PROTOCOL_VERSION
        assert hello.worker_id.endswith(f"-3/{i}")
        assert (hello.mode, hello.num_envs) == (pb.MODE_TRAIN, 4)
        assert hello.preferred_first_slot == 40 + 4 * i
        assert spec_from_proto(hello.spec) == Spread(Config(), 1).spec
        assert session.half_closed
        # Row 26 k begins the k-th episode of every slot, from the seed that all can compute.
        actions = np.array(session.actions)
        for row in (0, 10, 25, 26, 30, 52):
            begin = row // 26 * 26
            for copy, first_episode in enumerate((0, 5, 0, 9)):
                slot, episode = 40 + 4 * i + copy, first_episode + row // 26
                (seed,) = episode_seeds(7, np.array([slot]), np.array([episode]))
                wanted = lone_episode(seed, actions[begin:row, copy])
                got = session.rows[row]
                assert got.step_type[copy] == wanted.step_type[0]
                np.testing.assert_array_equal(got.reward[copy], wanted.reward[0])
                np.testing.assert_array_equal(
                    got.observation["observation"][copy], wanted.observation["observation"][0]
                )
    rows = sum(len(s.rows) for s in sessions)
    assert registry.get_sample_value("murmur_env_steps_total", {"mode": "train"}) == 4 * rows
    ended = sum(int((r.step_type == StepType.LAST).sum()) for s in sessions for r in s.rows)
    assert registry.get_sample_value("murmur_env_episodes_total", {"mode": "train"}) == ended
    sent = registry.get_sample_value("murmur_env_messages_total", {"direction": "sent"})
    assert sent == rows + 2  # and two Hellos
    assert registry.get_sample_value("murmur_env_sessions") == 0  # at the end


def _rows(learner: TinyLearner, sessions: int = 1) -> int:
    """Rows of the session that has had fewest; 0 before that number of sessions has come."""
    if len(learner.sessions) < sessions:
        return 0
    return min(len(s.rows) for s in learner.sessions)


def test_every_metric_of_the_table_is_reported() -> None:
    registry = CollectorRegistry()
    WorkerMetrics("train", registry).flush()
    reported = {f.name for f in registry.collect()}
    table = {PREFIX + m.name for m in METRICS}
    parents = {"murmur_env_worker_restarts", "murmur_env_info", "murmur_env_tree_cpu_seconds"}
    assert table - reported == parents
    assert reported <= table


def test_states_add_up_to_the_time_that_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("murmur.env_service.metrics.time.monotonic", lambda: now)
    registry = CollectorRegistry()
    metrics = WorkerMetrics("train", registry)
    for state, seconds in (("step", 2.0), ("pack", 0.5), ("wait", 3.0), ("unpack", 0.25)):
        metrics.enter(state)
        now += seconds
        metrics.flush()  # in the middle of a state: nothing is lost or counted twice
        now += seconds
    metrics.enter("wait")
    metrics.flush()
    seconds_of = {
        state: registry.get_sample_value("murmur_env_seconds_total", {"state": state})
        for state in WorkerMetrics.STATES
    }
    assert seconds_of == {"step": 4.0, "pack": 1.0, "wait": 6.0, "unpack": 0.5}


def test_replays_of_different_lengths_end_together() -> None:
    random = np.random.default_rng(5)
    # 25 steps reach LAST; the 26th action answered it, so the next episode has begun.
    lengths = [3, 0, 25, 26]
    replays = [random.integers(0, 5, (t, 3), dtype=np.int32) for t in lengths]
    starts = [(10 + i, r.astype("<i4").tobytes()) for i, r in enumerate(replays)]
    with TinyLearner(starts=starts) as learner:
        play(
            experiment(learner.address, sessions_per_worker=1, envs_per_worker=4),
            lambda: _rows(learner) > 30,
        )
    session = learner.sessions[0]
    wanted_types = [StepType.MID, StepType.FIRST, StepType.LAST, StepType.FIRST]
    assert session.rows[0].step_type.tolist() == wanted_types
    for copy, replay in enumerate(replays):
        episode, actions = (14, replay[:0]) if copy == 3 else (10 + copy, replay)
        (seed,) = episode_seeds(7, np.array([40 + copy]), np.array([episode]))
        wanted = lone_episode(seed, actions)
        got = session.rows[0]
        np.testing.assert_array_equal(
            got.observation["observation"][copy], wanted.observation["observation"][0]
        )
        np.testing.assert_array_equal(got.metrics["return"][copy], wanted.metrics["return"][0])
    # Copy 0 ends after 22 steps more, and its next episode is number 11.
    assert session.rows[22].step_type[0] == StepType.LAST
    (seed,) = episode_seeds(7, np.array([40]), np.array([11]))
    np.testing.assert_array_equal(
        session.rows[23].observation["observation"][0],
        lone_episode(seed, replays[0][:0]).observation["observation"][0],
    )


def test_a_replay_that_does_not_fit_is_refused() -> None:
    long = np.zeros((27, 3), "<i4").tobytes()
    for actions, error, wanted in (
        (b"12345", WireError, "no multiple of 12 bytes"),
        (long, EnvironmentFault, "ended an episode after 25 steps that was longer before"),
    ):
        with TinyLearner(starts=[(0, b""), (0, actions)]) as learner:
            config = experiment(learner.address, sessions_per_worker=1, envs_per_worker=2)
            with pytest.raises(error, match=wanted):
                play(config, lambda: False)


def test_a_welcome_of_the_wrong_size_is_refused() -> None:
    with TinyLearner(starts=[(0, b"")]) as learner, pytest.raises(WireError, match="names 1 slots"):
        play(experiment(learner.address), lambda: False)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (b"\xff\xff", "message is no LearnerMessage"),
        (
            pb.LearnerMessage(action=pb.Action()).SerializeToString(),
            "expected message 'welcome', got 'action'",
        ),
    ],
)
def test_an_answer_to_hello_that_is_no_welcome_is_refused(answer: bytes, problem: str) -> None:
    """Found by the conformance kit: the worker died, was started again, died, …"""
    wanted = pytest.raises(WireError, match=f"the learner's answer to Hello: {problem}")
    with TinyLearner(answer_to_hello=answer) as learner, wanted:
        play(experiment(learner.address), lambda: False)


def test_reconnects_when_the_learner_comes_back() -> None:
    with ExitStack() as first_life, ExitStack() as second_life:
        first = first_life.enter_context(TinyLearner())
        second = TinyLearner(port=first.port)

        def done() -> bool:
            if not second.sessions and _rows(first, 2) > 10 and not second.started:
                first_life.close()
                second_life.enter_context(second)
            return _rows(second, 2) > 10

        registry = play(experiment(first.address), done)
    assert {s.hello.preferred_first_slot for s in second.sessions} == {40, 44}
    assert all((s.rows[0].step_type == StepType.FIRST).all() for s in second.sessions)
    reconnects = registry.get_sample_value("murmur_env_reconnects_total")
    assert reconnects is not None
    assert reconnects >= 2


@pytest.mark.parametrize(
    "status",
    [
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    ],
)
def test_reconnects_after_a_stream_that_ended(status: grpc.StatusCode) -> None:
    with TinyLearner(end_after=5, end_with=(status, "for a while")) as learner:
        play(experiment(learner.address), lambda: len(learner.sessions) >= 6)


def test_waits_its_turn_when_the_learner_is_full() -> None:
    refuse = (grpc.StatusCode.RESOURCE_EXHAUSTED, "64 sessions are connected")
    with TinyLearner(refuse=refuse) as learner:
        play(experiment(learner.address), lambda: len(learner.sessions) >= 6)


@pytest.mark.parametrize(
    "status",
    [
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.UNAUTHENTICATED,
    ],
)
def test_a_refusal_for_good_names_the_reason(status: grpc.StatusCode) -> None:
    with TinyLearner(refuse=(status, "num_agents: 2 here, 3 there")) as learner:
        with pytest.raises(MurmurError, match="refused the session: num_agents: 2 here, 3 there"):
            play(experiment(learner.address), lambda: False)
        assert len(learner.sessions) <= 2


def test_gives_up_in_the_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    config = experiment("127.0.0.1:1", give_up_after_s=0.3)
    with pytest.raises(
        ConnectionLostError, match=r"no learner at 127\.0\.0\.1:1 for.*no process listens"
    ):
        play(config, lambda: False)
    waiting = [r for r in caplog.records if "waiting for learner" in r.message]
    assert len(waiting) == 1  # for both sessions and all attempts


@pytest.mark.parametrize("complete", [True, False])
def test_says_whether_the_run_is_complete_and_waits_on(
    complete: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    leaving: list[Thread] = []
    with ExitStack() as life:
        learner = ServingLearner(ends_with=RUN_COMPLETE if complete else STOPPING)
        life.enter_context(learner)

        def leave_when_both_play() -> bool:
            if learner.host.answered >= 20 and not leaving:
                leaving.append(Thread(target=life.close))
                leaving[0].start()
            return False

        with pytest.raises(ConnectionLostError) as lost:
            play(experiment(learner.address, give_up_after_s=0.5), leave_when_both_play)
        leaving[0].join()
    assert isinstance(lost.value, RunCompleteError) == complete
    assert ("is complete, and no other learner came" in str(lost.value)) == complete
    said = [r.message for r in caplog.records]
    complete_lines = [line for line in said if "this server ends unless another learner" in line]
    waiting_lines = [line for line in said if f"UNAVAILABLE: {STOPPING}" in line]
    assert (len(complete_lines), len(waiting_lines)) == ((1, 0) if complete else (0, 1))


def test_says_that_it_is_connected(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with TinyLearner() as learner:
        play(experiment(learner.address), lambda: _rows(learner, 2) > 3)
    said = [r.message for r in caplog.records]
    assert said.count(f"connected to learner at {learner.address}") == 1  # for both sessions


def test_a_wrong_sequence_number_is_an_error() -> None:
    wanted = pytest.raises(WireError, match="answered sequence 2 to 1")
    with TinyLearner(sequence_shift=1) as learner, wanted:
        play(experiment(learner.address), lambda: False)


def test_stops_although_the_learner_does_not_answer() -> None:
    with TinyLearner(mute=True) as learner:
        play(experiment(learner.address), lambda: _rows(learner, 2) == 1)  # bounded by wait_for


def test_cancelled_session_keeps_no_stream() -> None:
    """What a stream holds is its connection; without the garbage collector, so no cycle may."""
    streams: list[weakref.ref[Stream]] = []

    async def wait_for_an_answer(address: str) -> None:
        spread, metrics = Spread(Config(), 4), WorkerMetrics("train", CollectorRegistry())
        async with grpc.aio.insecure_channel(address) as channel:
            stream = Stream(channel, spread.spec, 4, metrics)
            streams.append(weakref.ref(stream))
            await stream.greet(hello_of(spread.spec, 4, "cancelled", pb.MODE_TRAIN))
            await stream.exchange(spread.reset(np.arange(4, dtype=np.uint64)))

    async def main(learner: TinyLearner) -> None:
        task = asyncio.create_task(wait_for_an_answer(learner.address))
        async with asyncio.timeout(10):
            while not _rows(learner):
                await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    gc.collect()
    gc.disable()
    try:
        with TinyLearner(mute=True) as learner:
            asyncio.run(main(learner))
            assert [stream() for stream in streams] == [None]
    finally:
        gc.enable()


class Faulty(Spread):
    """Four copies of spread that break their contract in the fourth row."""

    def __init__(self, fault: Callable[[TimeStep], TimeStep]) -> None:
        super().__init__(Config(), 4)
        self.fault, self.rows = fault, 0

    def step(
        self, action: Array, restart: NDArray[np.bool_], seeds: NDArray[np.uint64]
    ) -> TimeStep:
        timestep = super().step(action, restart, seeds)
        self.rows += 1
        return self.fault(timestep) if self.rows == 4 else timestep


def _nan(timestep: TimeStep) -> TimeStep:
    observation = np.array(timestep.observation["observation"])
    observation[2, 1, 7] = np.nan
    return replace(timestep, observation={"observation": observation})


def _raise(_: TimeStep) -> TimeStep:
    raise ValueError("the simulator is gone")


def _pay(value: float) -> Callable[[TimeStep], TimeStep]:
    def change(timestep: TimeStep) -> TimeStep:
        reward = np.array(timestep.reward)
        reward[2, 1] = value
        return replace(timestep, reward=reward)

    return change


def _discount(value: float) -> Callable[[TimeStep], TimeStep]:
    def change(timestep: TimeStep) -> TimeStep:
        discount = np.array(timestep.discount)
        discount[2] = value
        return replace(timestep, discount=discount)

    return change


def _begin(timestep: TimeStep) -> TimeStep:
    step_type = np.array(timestep.step_type)
    step_type[2] = StepType.FIRST
    return replace(timestep, step_type=step_type)


ALL = [0, 1, 2, 3]
CONTENTS: dict[str, tuple[Callable[[TimeStep], TimeStep], str, list[int], str]] = {
    "NaN in one copy": (
        _nan,
        "contents",
        [2],
        "environment 'spread' returned nan in observation 'observation' of agent 1 "
        "at index [7], in the episode with seed",
    ),
    "infinite rewards": (
        lambda t: replace(t, reward=t.reward * np.float32(np.inf)),
        "contents",
        ALL,
        "in reward of agent 0, in one of 4 episodes",
    ),
    "a reward beyond the bound": (
        _pay(1e30),
        "contents",
        [2],
        "returned a reward of 1e+30 for agent 1, beyond ±1e+06 (learner.max_abs_reward), in the",
    ),
    "a punishment beyond the bound": (_pay(-1e30), "contents", [2], "a reward of -1e+30 for agent"),
    "a discount above 1": (_discount(5), "contents", [2], "returned a discount of 5, which must"),
    "a discount below 0": (_discount(-1), "contents", [2], "returned a discount of -1, which must"),
    "FIRST within an episode": (
        _begin,
        "contents",
        [2],
        "returned step_type FIRST, but without a restart comes MID or LAST, in the episode",
    ),
}
FAULTS: dict[str, tuple[Callable[[TimeStep], TimeStep], str, list[int], str]] = {
    **CONTENTS,
    "exception": (
        _raise,
        "raised",
        ALL,
        "environment 'spread' raised ValueError: the simulator is gone, in one of 4 episodes",
    ),
    "shape": (
        lambda t: replace(t, reward=t.reward[:2]),
        "contents",
        ALL,
        "reward has shape (2, 3), not (4, 3)",
    ),
    "dtype": (
        lambda t: replace(t, reward=t.reward.astype(np.float64)),  # type: ignore[arg-type]
        "contents",
        ALL,
        "reward has dtype float64, not float32",
    ),
    "missing": (
        lambda t: replace(t, observation={}),
        "contents",
        ALL,
        "observation 'observation' is in the spec but missing",
    ),
    "nothing": (lambda t: None, "raised", ALL, "raised AttributeError"),  # type: ignore[return-value,dict-item,arg-type]
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_ends_its_episodes_and_no_others(
    fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    change, reason, copies, words = FAULTS[fault]
    made = []

    def make() -> VectorEnvironment:  # only the first one breaks
        made.append(Faulty(change) if not made else Spread(Config(), 4))
        return made[-1]

    with TinyLearner(policy=random_policy) as learner:
        registry = play(experiment(learner.address), lambda: _rows(learner) > 8, make)
    (session,) = learner.sessions
    rows, actions = session.rows, np.array(session.actions)
    aborted = rows[3]
    for copy in ALL:
        if copy not in copies:  # it continued as if nothing had happened
            (seed,) = episode_seeds(7, np.array([copy]), np.array([0]))
            wanted = lone_episode(seed, actions[:8, copy])
            got = rows[8].observation["observation"][copy]
            np.testing.assert_array_equal(got, wanted.observation["observation"][0])
            continue
        assert aborted.step_type[copy] == StepType.ABORTED
        assert aborted.discount[copy] == 1
        assert not aborted.reward[copy].any()
        assert not aborted.observation["observation"][copy].any()
        assert rows[4].step_type[copy] == StepType.FIRST  # of episode 1
        (seed,) = episode_seeds(7, np.array([copy]), np.array([1]))
        wanted = lone_episode(seed, actions[4:8, copy])
        got = rows[8].observation["observation"][copy]
        np.testing.assert_array_equal(got, wanted.observation["observation"][0])
    assert words in caplog.text
    assert (" at step 3" if len(copies) == 1 else " at steps 3 to 3") in caplog.text
    (seed,) = episode_seeds(7, np.array(copies[:1]), np.array([0]))
    assert str(seed) in caplog.text
    assert len(made) == (1 if fault in CONTENTS else 2)
    for name in ("raised", "contents", "hung", "died"):
        dropped = registry.get_sample_value("murmur_env_episodes_dropped_total", {"reason": name})
        assert dropped == (len(copies) if name == reason else 0)


def test_faults_without_end_end_the_worker() -> None:
    config = {"max_faults_per_minute": 3, "sessions_per_worker": 1}
    wanted = (
        r"^4 faults within a minute, more than env_server\.max_faults_per_minute = 3 allows; the "
        r"last: environment 'spread' raised ValueError: the simulator is gone, in one of 4 epis"
    )
    with TinyLearner() as learner, pytest.raises(EnvironmentFault, match=wanted):
        play(experiment(learner.address, **config), lambda: False, lambda: Faulty(_raise))


def test_old_faults_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("murmur.env_service.watchdog.faults.time.monotonic", lambda: now)
    dropped: list[tuple[str, int]] = []
    faults = FaultCount(2, lambda reason, episodes: dropped.append((reason, episodes)))
    fault = Fault((1, 3), "raised", "it broke")
    for _ in range(10):
        now += 30.5  # at most two within a minute
        faults.add(fault)
    assert dropped == [("raised", 2)] * 10
    with pytest.raises(EnvironmentFault, match="3 faults within a minute"):
        faults.add(fault)


def test_large_finite_numbers_and_unused_metrics_are_no_fault() -> None:
    def unusual(timestep: TimeStep) -> TimeStep:
        return replace(
            timestep,
            reward=np.full_like(timestep.reward, -1e6),
            observation={k: np.full_like(v, 9e17) for k, v in timestep.observation.items()},
            metrics={k: np.full_like(v, np.nan) for k, v in timestep.metrics.items()},
        )

    with TinyLearner() as learner:
        registry = play(
            experiment(learner.address), lambda: _rows(learner) > 6, lambda: Faulty(unusual)
        )
    name = "murmur_env_episodes_dropped_total"
    assert registry.get_sample_value(name, {"reason": "contents"}) == 0


def test_continuous_actions_travel() -> None:
    with TinyLearner() as learner:
        config = experiment(learner.address, environment={"continuous": True})
        play(config, lambda: _rows(learner, 2) > 3)
    assert make_environment(config.environment, 1).spec.action.size == 2  # type: ignore[union-attr]


class FailsToStart(Spread):
    """Four copies of spread; all of them fail whenever one is restarted with a seed in `bad`."""

    bad: frozenset[int] = frozenset()

    def step(
        self, action: Array, restart: NDArray[np.bool_], seeds: NDArray[np.uint64]
    ) -> TimeStep:
        if self.bad.intersection(seeds[restart].tolist()):
            raise ValueError("no room for the agents")
        return super().step(action, restart, seeds)


def _seed(copy: int, episode: int) -> int:
    return int(episode_seeds(7, np.array([copy]), np.array([episode]))[0])


@pytest.mark.parametrize("first", [0, 1])
def test_a_failed_start_costs_one_episode(first: int, caplog: pytest.LogCaptureFixture) -> None:
    """The first episodes of a session or later ones: the row is ABORTED, the next is one "
    "further."""
    environment = FailsToStart(Config(episode_steps=3), 4)
    environment.bad = frozenset({_seed(2, first), _seed(0, first + 1)})
    with TinyLearner(policy=random_policy) as learner:
        play(experiment(learner.address), lambda: _rows(learner) > 12, lambda: environment)
    (session,) = learner.sessions
    kinds = [r.step_type.tolist() for r in session.rows]
    begin = 4 * first  # rows of the episodes before
    assert kinds[begin : begin + 3] == [
        [StepType.ABORTED] * 4,
        [StepType.ABORTED] * 4,
        [0, 0, 0, 0],
    ]
    for copy in ALL:
        wanted = lone_episode(_seed(copy, first + 2), np.zeros((0, 3), np.int32))
        got = session.rows[begin + 2].observation["observation"][copy]
        np.testing.assert_array_equal(got, wanted.observation["observation"][0])
    assert caplog.text.count("no room for the agents") >= 2
    assert str(_seed(2, first)) in caplog.text


def test_a_start_that_always_fails_ends_with_its_message() -> None:
    environment = FailsToStart(Config(episode_steps=3), 4)
    environment.bad = frozenset(_seed(1, episode) for episode in range(100))
    with TinyLearner(policy=random_policy) as learner:
        config = experiment(learner.address, max_faults_per_minute=3)
        words = "4 faults within a minute.*max_faults_per_minute = 3.*no room for the agents"
        with pytest.raises(EnvironmentFault, match=words):
            play(config, lambda: False, lambda: environment)
    (session,) = learner.sessions
    assert [set(r.step_type.tolist()) for r in session.rows] == [{StepType.ABORTED}] * 3


def test_a_fault_in_a_replay_costs_its_episode() -> None:
    """What failed shows ABORTED where its replay leads to, and then begins the next episode."""

    class FailsOnce(Spread):
        calls = 0

        def step(
            self, action: Array, restart: NDArray[np.bool_], seeds: NDArray[np.uint64]
        ) -> TimeStep:
            self.calls += 1
            timestep = super().step(action, restart, seeds)
            if self.calls != 5:
                return timestep
            reward = timestep.reward.copy()
            reward[0] = np.nan
            return replace(timestep, reward=reward)

    replays = [np.zeros((t, 3), "<i4").tobytes() for t in (9, 7)]
    with TinyLearner(starts=[(4, replays[0]), (6, replays[1])]) as learner:
        play(
            experiment(learner.address),
            lambda: _rows(learner) > 2,
            lambda: FailsOnce(Config(), 2),
        )
    rows = learner.sessions[0].rows
    assert rows[0].step_type.tolist() == [StepType.ABORTED, StepType.MID]
    assert not rows[0].observation["observation"][0].any()
    assert rows[1].step_type.tolist() == [StepType.FIRST, StepType.MID]
    wanted = lone_episode(_seed(0, 5), np.zeros((0, 3), np.int32))
    np.testing.assert_array_equal(
        rows[1].observation["observation"][0], wanted.observation["observation"][0]
    )

"""The warm-up measures what it says, chooses once, and what cannot be is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from murmur.env_service.environment import make_environment
from murmur.learner_service.device.cuda_graph import CALLS_TO_CAPTURE
from murmur.learner_service.learning.base import algorithm_config
from murmur.learner_service.learning.options import OnPolicyConfig
from murmur.learner_service.storage.flight import Flight
from murmur.learner_service.storage.rollout import RolloutStorage
from murmur.learner_service.telemetry.metrics import LearnerMetrics
from murmur.learner_service.tuning.warm_up import WarmUp, check_in_flight
from murmur.shared.config.files import config_names, find_config, load
from murmur.shared.process.errors import ConfigError, SpecError
from tests.learner_service.running import experiment, running_learner
from tests.learner_service.toys import CPU, FIRST, MID, row, vector_spec
from tests.waiting import wait_until
from tests.wire import Client

SPEC = vector_spec()  # episodes of 4 steps
ENDLESS = replace(SPEC, max_episode_steps=0)


def turn(metrics: LearnerMetrics, environment_s: float, queue_s: float, act_s: float) -> None:
    metrics.histogram("environment_seconds").observe(environment_s)
    metrics.histogram("queue_wait_seconds").observe(queue_s)
    metrics.histogram("inference_seconds").observe(act_s)


def connected(environments: int) -> RolloutStorage:
    storage = RolloutStorage(ENDLESS, 0, SPEC.num_agents * 3200, 1, CPU)
    storage.connect(environments)
    return storage


def test_warm_up_measures_turns_and_updates() -> None:
    metrics, now, kept = LearnerMetrics(), [0.0], list[Flight]()
    storage = connected(100)
    warm = WarmUp(storage, metrics, any_lag=True, keep=kept.append, clock=lambda: now[0])
    turn(metrics, 9.0, 9.0, 9.0)  # before it begins
    for _ in range(CALLS_TO_CAPTURE):
        warm.updated(10, 9.0)  # compiles
    warm.updated(10, 9.0)  # begins
    for _ in range(64):
        turn(metrics, 1.4e-3, 0.2e-3, 0.4e-3)  # 2 ms
    for _ in range(3):
        warm.updated(1000, 1e-2)  # 1e-5 s a row
    now[0] = 10.0
    assert not warm.over
    warm.updated(1000, 1e-2)
    assert warm.over
    assert kept == [Flight(32, 100, 1)]
    warm.updated(1000, 100.0)
    assert len(kept) == 1


@pytest.mark.parametrize("eager", [2, 1000], ids=["for a while", "for good"])
def test_updates_that_are_not_replayed_are_not_measured(eager: int) -> None:
    metrics, now, kept, calls = LearnerMetrics(), [0.0], list[Flight](), [0]
    warm = WarmUp(
        *(connected(100), metrics),
        any_lag=True,
        keep=kept.append,
        clock=lambda: now[0],
        unsettled=lambda: calls[0],
    )
    for update in range(CALLS_TO_CAPTURE + 100):
        slow = update < CALLS_TO_CAPTURE + 3 + eager and update != CALLS_TO_CAPTURE
        calls[0] += slow  # after a first one that was replayed, new shapes come
        now[0] += 1.0
        for _ in range(16):
            turn(metrics, 2e-3, 0, 0)
        warm.updated(1000, 9.0 if slow else 1e-2)
    # 9 s an update are what it costs only where nothing is ever replayed: then one row is much.
    assert kept == [Flight(32, 100, 1)] if eager == 2 else kept[0].unrolls_per_update < 100


def test_warm_up_begins_again_where_environments_come() -> None:
    metrics, now, kept = LearnerMetrics(), [0.0], list[Flight]()
    storage = connected(50)
    warm = WarmUp(storage, metrics, any_lag=False, keep=kept.append, clock=lambda: now[0])
    for i in range(20):
        now[0] += 1.0
        storage.connect(50 + i)
        turn(metrics, 1e-3, 0, 0)
        warm.updated(1000, 1e-2)
    assert not kept
    for _ in range(64):
        turn(metrics, 2e-3, 0, 0)
    for _ in range(4):
        now[0] += 1.0
        warm.updated(1000, 1e-2)
    assert [f.unrolls_per_update for f in kept] == [69]


def test_few_turns_say_nothing() -> None:
    metrics, now, kept = LearnerMetrics(), [0.0], list[Flight]()
    storage = connected(50)
    warm = WarmUp(storage, metrics, any_lag=False, keep=kept.append, clock=lambda: now[0])
    for _ in range(50):
        now[0] += 1.0
        turn(metrics, 1e-3, 0, 0)
        warm.updated(1000, 1e-2)
    assert not kept  # 63 turns or fewer


def storage_of(name: str, *settings: str) -> tuple[RolloutStorage, OnPolicyConfig] | None:
    """The storage a shipped configuration makes in the async pipeline; None: with a replay."""
    config = load(name, settings, {})
    options = algorithm_config(config.algorithm)
    if not isinstance(options, OnPolicyConfig):
        return None
    try:
        spec = make_environment(config.environment, 1).spec
    except (ConfigError, SpecError) as error:
        pytest.skip(str(error))
    return (
        RolloutStorage(
            spec,
            getattr(options, "unroll_steps", 0),
            options.batch_size * options.batch_number,
            config.learner.policy_lag,
            CPU,
            unrolls_per_update=options.unrolls_per_update,
        ),
        options,
    )


ASYNC = [n for n in config_names() if load(n, [], {}).learner.pipeline == "async"]


@pytest.mark.filterwarnings("ignore:The old environment creation API:DeprecationWarning")
@pytest.mark.parametrize("name", ASYNC)
def test_shipped_configurations_do_not_contradict_themselves(name: str) -> None:
    made = storage_of(name)
    if made is None:
        return
    storage, options = made
    check_in_flight(load(name, [], {}), storage)
    if options.unrolls_per_update:
        assert "unrolls_per_update: 50  # one unroll is an episode" in find_config(name).read_text()


def test_session_larger_than_what_may_act_is_refused() -> None:
    fixed = ["algorithm.name=coma", "algorithm.unroll_steps=50", "algorithm.unrolls_per_update=2"]
    config = load("snakes", [*fixed, "learner.max_policy_lag=1"], {})
    made = storage_of("snakes", *fixed, "learner.max_policy_lag=1")
    assert made is not None
    with pytest.raises(
        ConfigError,
        match=r"of 2 environments.*max_policy_lag=1 lets 4 .* a session has 16 .*"
        r"unrolls_per_update=0, which chooses, or raise learner.max_policy_lag to at least 7",
    ):
        check_in_flight(config, made[0])


def test_configured_environments_count_where_unrolls_are_fixed() -> None:
    config = experiment(
        algorithm={"unrolls_per_update": 2, "batch_number": 1},
        env_server={"envs_per_worker": 40, "sessions_per_worker": 1},
    )
    storage = RolloutStorage(SPEC, 4, 4, 1, CPU, unrolls_per_update=2)
    with pytest.raises(ConfigError, match="a session has 40"):
        check_in_flight(config, storage)


def test_waiting_environments_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    config = experiment(
        algorithm={"unrolls_per_update": 2, "batch_number": 1},
        env_server={"num_workers": 4, "envs_per_worker": 4, "sessions_per_worker": 1},
    )
    with caplog.at_level("WARNING", logger="murmur"):
        check_in_flight(config, RolloutStorage(SPEC, 4, 4, 1, CPU, unrolls_per_update=2))
    assert "12 of 16 environments wait their turn" in caplog.text
    caplog.clear()
    check_in_flight(config, RolloutStorage(SPEC, 4, 4, 1, CPU))
    assert not caplog.text


@pytest.mark.long
def test_choice_is_written_down(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = experiment(algorithm={"unroll_steps": 0})
    with running_learner(tmp_path, config) as learner, Client(learner.port, SPEC, 4) as client:
        client.hello()
        client.exchange(row(SPEC, 4, FIRST))

        def chosen() -> bool:
            for _ in range(20):
                client.exchange(row(SPEC, 4, MID))
            return "Chosen" in caplog.text

        with caplog.at_level("INFO", logger="murmur"):
            wait_until(chosen, "what was chosen in the log")
    data = yaml.safe_load((tmp_path / "config.yaml").read_text())
    lines = (tmp_path / "progress.jsonl").read_text().splitlines()
    rollout = json.loads(lines[-1])["rollout"]
    assert data["algorithm"]["unroll_steps"] == 5  # an episode
    assert data["algorithm"]["unrolls_per_update"] == 4
    assert data["learner"]["max_policy_lag"] == rollout["max_policy_lag"] in (1, 2)

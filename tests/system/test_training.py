"""Whole runs: reproducible bit for bit, resumable bit for bit, and hard to kill."""

import json
import os
import signal
import time
import urllib.request
from collections.abc import Callable

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from murmur.env_service.metrics import METRICS as ENV_METRICS
from murmur.learner_service.telemetry.metric_table import METRICS as LEARNER_METRICS
from tests.system.conftest import Training

pytestmark = pytest.mark.system
COLLAPSES = (
    "{name: gymnasium, factory: 'tests.env_service.test_notices:Solo', arguments: {what: int64}}"
)
SYNC = ("--set", "learner.pipeline=sync")


def end(updates: int) -> tuple[str, str]:
    return ("--set", f"run.max_updates={updates}")


# One episode in five, by its seed, returns NaN in its tenth step.
FAILING = (
    "{name: gymnasium, factory: 'tests.env_service.troubled:Breaks', "
    "arguments: {how: nan, one_in: 5}, max_episode_steps: 30}"
)

# Episodes outlast updates, and so the values that they began with.
WINDY = (
    "{name: gymnasium, factory: 'tests.env_service.windy:Windy', arguments: {steps: 18}, "
    "metrics: [calm], randomize: {mass: [0.5, 2]}, curriculum: {wind: {levels: [1, 2, 3, 5, 9], "
    "when: {metric: return, below: 1, over_episodes: 2}}}}"
)
PICTURES = "{name: snakes, observation: images}"
STACKED = "{name: cnn, channels: [4], kernels: [3], strides: [2], hidden: [8], frame_stack: 3}"


@pytest.mark.long
def test_what_does_not_survive_is_in_the_first_lines(train: Callable[..., Training]) -> None:
    run = train("losing", "--set", "algorithm.name=ippo", *end(1), environment=COLLAPSES)
    run.wait()  # with such numbers updates may fail
    lines = run.output().splitlines()
    said = [line for line in lines if "1700000001 (int64) and arrives as 1700000000" in line]
    assert len(said) == 1
    assert said[0].startswith("! observation 'observation'[1] is")
    assert lines.index(said[0]) < 12
    assert len((run.run / "notices.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("settings", "environment"),
    [
        pytest.param(["algorithm.unroll_steps=0"], "", marks=pytest.mark.long),
        (["algorithm.unroll_steps=7", "network.recurrent=8"], ""),
        # The one agent of the failing environment has fewer rows: an update takes all that wait.
        pytest.param(
            ["algorithm.unroll_steps=7", "algorithm.batch_size=14"], FAILING, marks=pytest.mark.long
        ),
        pytest.param(
            ["algorithm.unroll_steps=7", "algorithm.batch_size=14"], WINDY, marks=pytest.mark.long
        ),
        pytest.param(
            ["algorithm.unroll_steps=7", f"network={STACKED}"], PICTURES, marks=pytest.mark.long
        ),
        pytest.param(
            [
                *("algorithm.unroll_steps=7", "algorithm.normalize_rewards=true"),
                "network={name: mlp, normalize_observations: true}",
            ],
            "",
            marks=pytest.mark.long,
        ),
        pytest.param(
            [  # two updates at a time
                *("algorithm.unroll_steps=3", "algorithm.unrolls_per_update=4"),
                *("imitation.baseline=recall", "imitation.updates=4"),
            ],
            "{name: memory}",
            marks=pytest.mark.long,
        ),
    ],
    ids=[
        *("whole episodes", "cut episodes that are remembered", "failing episodes", "curriculum"),
        *("stacks", "normalised", "imitation"),
    ],
)
def test_sync_runs_and_resumed_runs_are_equal_to_the_bit(
    train: Callable[..., Training], settings: list[str], environment: str
) -> None:
    settings = [*settings, "env_server.max_faults_per_minute=1000000"]
    options = (*SYNC, *(part for setting in settings for part in ("--set", setting)))
    whole, halves = (
        train(name, *options, *end(updates), environment=environment)
        for name, updates in (("whole", 8), ("halves", 4))
    )
    for run in (whole, halves):
        assert run.wait() == 0, run.output()
    halves = train("halves", *options, *end(8), "--resume")
    assert halves.wait() == 0, halves.output()
    losses = whole.losses()
    assert sorted(losses) == list(range(1, 9))
    assert len({loss["critic_loss"] for loss in losses.values()}) == 8  # it does change
    assert halves.losses() == losses
    courses = [[d.get("curriculum") for d in run.lines()] for run in (whole, halves)]
    assert courses[0][-1] == courses[1][-1]
    if environment == WINDY:
        levels = {d["curriculum"]["wind"]["level"] for d in whole.lines()}
        assert len(levels) > 1  # it did change
    log = (whole.run / "logs" / "env-server.log").read_text()
    assert ("returned nan in " in log) == (environment == FAILING)


@pytest.mark.long
def test_values_learned_in_one_step_an_update_stay_finite(train: Callable[..., Training]) -> None:
    """Returns contain values: with statistics of a hundred updates both swung ever more.

    The return of an untrained policy is -150 for all agents together; its estimate left 300 after
    478 updates, and 1e17 after 830.
    """
    one_step = "{name: mappo, batch_size: 2400, batch_number: 1, data_passes: 1, unroll_steps: 25}"
    settings = [
        f"algorithm={one_step}",
        "network.hidden=[64, 64]",
        "env_server.envs_per_worker=128",
    ]
    settings += ["environment.episode_steps=25", "learner.log_every_s=0.2", "run.seed=1"]
    options = [part for setting in settings for part in ("--set", setting)]
    run = train("one-step", *SYNC, *options, *end(600))
    assert run.wait() == 0, run.output()
    returns = [loss["return_mean"] for loss in run.losses().values()]
    assert len(returns) > 10
    assert max(map(abs, returns)) < 200


MASAC = (
    "--set",
    "environment={name: spread, continuous: true, num_agents: 2, episode_steps: 10}",
    "--set",
    "algorithm={name: masac, share_parameters: false, replay: {capacity_rows: 400, start_rows: 64, "
    "batch_size: 32, update_interval: 16, unroll_steps: 4, prioritized: true, n_step: 2}}",
)


@pytest.mark.long
def test_masac_acts_while_it_learns(train: Callable[..., Training]) -> None:
    run = train("async", *MASAC)
    run.until(lambda: run.updates() > 50)
    run.close()
    last = run.lines()[-1]
    # An update for every 16 rows after the first 64, and acting not far ahead.
    due = 1 + (last["rows_inserted"] - 64) // 16
    assert due - 40 <= last["updates"] <= due
    assert all(abs(v) < 1e6 for v in last["losses"].values())


@pytest.mark.long
def test_another_seed_gives_another_run(train: Callable[..., Training]) -> None:
    runs = [train(f"seed-{s}", *SYNC, *end(2), "--set", f"run.seed={s}") for s in (1, 2)]
    assert [run.wait() for run in runs] == [0, 0]
    assert runs[0].losses() != runs[1].losses()


def _balance(line: dict[str, int | dict[str, int]]) -> None:
    dropped, waiting = line["rows_dropped"], line["rows_waiting"]
    assert isinstance(dropped, dict)
    assert isinstance(waiting, int)
    assert line["rows_received"] == line["rows_trained"] + sum(dropped.values()) + waiting, line


def test_killed_worker_and_killed_learner(train: Callable[..., Training]) -> None:
    run = train("killed")
    run.until(lambda: run.updates() > 3)
    (worker,) = run.workers()
    worker.kill()
    run.until(lambda: [w.pid for w in run.workers()] not in ([], [worker.pid]))
    before = run.updates()
    run.until(lambda: run.updates() > before + 3)
    assert run.lines()[-1]["rows_dropped"]["session"] > 0

    learner = run.learner_pid()
    os.kill(learner, signal.SIGKILL)
    run.until(lambda: run.learner_pid() != learner)
    lines = len(run.lines())
    run.until(lambda: len(run.lines()) > lines)
    resumed_at = run.lines()[lines]["updates"]
    run.until(lambda: run.updates() > resumed_at + 3)
    run.close()
    # Every row that came was trained once, is saved, or was dropped for a reason that is named.
    last = run.lines()[-1]
    _balance(last)
    assert set(last["rows_dropped"]) <= {"session", "restart", "lag"}


@pytest.mark.long
def test_environments_that_fail_cost_their_episodes_and_no_more(
    train: Callable[..., Training],
) -> None:
    limit = ("--set", "env_server.max_faults_per_minute=1000000")
    run = train("failing", *limit, *end(12), environment=FAILING)
    run.until(lambda: run.updates() > 2)
    learner = json.loads((run.run / "learner.json").read_text())["metrics_port"]
    log = (run.run / "logs" / "env-server.log").read_text()
    servers = int(log.split("http://127.0.0.1:")[1].split()[0])
    dropped = 'episodes_dropped_total{reason="environment"}'
    run.until(lambda: _scrape(learner).get(f"murmur_learner_{dropped}", 0) > 3)
    name = 'murmur_env_episodes_dropped_total{reason="contents"}'
    run.until(lambda: _scrape(servers)[name] > 3)
    assert 'rows_dropped_total{reason="session"}' not in _scrape(learner)
    assert run.wait() == 0, run.output()
    last = run.lines()[-1]
    _balance(last)
    assert last["rows_trained"] > 0


def _scrape(port: int) -> dict[str, float]:
    url = f"http://127.0.0.1:{port}/metrics"
    text = urllib.request.urlopen(url, timeout=30).read().decode()
    return {
        key: float(value)
        for key, value in (line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
    }


@pytest.mark.long
def test_the_ledger_adds_up_to_wall_time(train: Callable[..., Training]) -> None:
    run = train("ledger")
    run.until(lambda: run.updates() > 2)
    port = json.loads((run.run / "learner.json").read_text())["metrics_port"]
    scrapes = []
    for _ in range(2):
        at, began = run.updates(), time.monotonic()
        totals: dict[str, float] = {}
        for key, value in _scrape(port).items():
            if key.startswith("murmur_learner_state_seconds_total"):
                thread = key.split('thread="')[1].split('"')[0]
                totals[thread] = totals.get(thread, 0.0) + value
        scrapes.append((began, time.monotonic(), totals))
        run.until(lambda at=at: run.updates() > at + 30)
    (a, b, first), (c, d, second) = scrapes
    assert set(first) == set(second) == {"inference", "learner", "grpc"}
    for thread, total in second.items():
        assert 0.99 * (c - b) <= total - first[thread] <= 1.01 * (d - a), thread


def test_every_metric_is_there_and_moves(train: Callable[..., Training]) -> None:
    run = train("metrics", "--set", "evaluation.every_updates=2", "--set", "evaluation.episodes=4")
    run.until(lambda: len(run.lines("evaluation")) >= 2)
    port = json.loads((run.run / "learner.json").read_text())["metrics_port"]
    before = _scrape(port)
    at = run.updates()
    run.until(lambda: run.updates() > at + 10)
    after = _scrape(port)
    # A counter that may stay 0 in this run belongs to `events`. `silent` are not in this run: those
    # of a GPU, fp16, a replay, samples, trackers elsewhere, a curriculum.
    rooms = ("gpu_", "graph_", "tracker_", "sample", "epoch", "curriculum_")
    silent = {m.name for m in LEARNER_METRICS if m.name.startswith(rooms)}
    silent |= {"rows_inserted"}
    silent |= {"eager_calls", "eager_seconds"}
    silent |= {"device_copied_bytes", "scaler_skipped_steps"}
    events = {"sessions_refused", "rejected", "rows_dropped", "episodes_dropped"}  # none happened
    events |= {"rows_undone", "checkpoint_failures", "audit_lines_suppressed", "updates_skipped"}
    events |= {"notices", "outliers_clipped", "ranks_without_sessions"}
    events |= {"acts_waited", "acts_waited_seconds"}
    missing, still = [], []
    for metric in LEARNER_METRICS:
        name = f"murmur_learner_{metric.name}"
        mine = [k for k in after if k.split("{")[0].startswith(name)]
        if metric.name in silent | events:
            continue
        if not mine:
            missing.append(name)
        elif metric.kind in ("counter", "histogram"):
            still += [name] * (not any(after[k] > before.get(k, 0) for k in mine))
    assert (missing, still) == ([], [])
    assert run.lines("progress")[-1]["graphs"]["eager_calls"]["update"] > 0
    log = (run.run / "logs" / "env-server.log").read_text()
    environment = _scrape(int(log.split("http://127.0.0.1:")[1].split()[0]))
    reported = {k.split("{")[0] for k in environment}
    for metric in ENV_METRICS:
        assert f"murmur_env_{metric.name}" + "_total" * (metric.kind == "counter") in reported
    run.close()
    board = EventAccumulator(str(run.run / "tensorboard"))
    board.Reload()
    assert board.Histograms("episodes/return")[0].histogram_value.num == 4


def test_misspelt_best_metric_is_an_error_before_training(
    train: Callable[..., Training],
) -> None:
    training = train("misspelt", "--set", "evaluation.best_metric=-colisions")
    assert training.wait() == 2
    line = training.output().splitlines()[-1]
    assert "environment 'spread' has no metric 'colisions'; did you mean 'collisions'?" in line
    assert "known: return, collisions, occupied" in line
    assert not training.lines()


def test_a_training_told_to_stop_saves_first(train: Callable[..., Training]) -> None:
    training = train("told")
    training.until(lambda: training.updates() >= 1)
    training.process.send_signal(signal.SIGTERM)
    assert training.process.wait(60) == 130
    assert "resume with:  murmur train --resume" in training.output()
    checkpoints = (training.run / "checkpoints").glob("update-*.pt")
    saved = max(int(path.stem.removeprefix("update-")) for path in checkpoints)
    assert saved == training.updates()


@pytest.mark.long
def test_training_stopped_before_a_checkpoint_restarts(
    train: Callable[..., Training],
) -> None:
    early = train("early")
    early.until((early.run / "logs" / "learner.log").exists)
    early.process.send_signal(signal.SIGINT)
    assert early.process.wait(60) == 130
    config = early.run / "config.yaml"
    assert f"restart with:  murmur train {config} --run {early.run}\n" in early.output()
    resumed = train("early", "--resume")
    assert resumed.wait() == 2
    assert f"start it again: murmur train {config} --run {early.run}\n" in resumed.output()
    again = train("early", *end(1))
    assert again.wait() == 0, again.output()

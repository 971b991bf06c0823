"""Acting and learning together: lag, parking, evaluation, stopping, and an exact resume."""

import json
import logging
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
import yaml

from murmur.learner_service.app import run_learner
from murmur.learner_service.checkpoint.folder import CheckpointFolder
from murmur.shared.config import PluginConfig
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.config.section import validate
from murmur.shared.process.errors import CheckpointError, ConfigError
from murmur.shared.rpc import rollout_pb2 as pb
from tests.learner_service.running import (
    TIMEOUT_S,
    RunningLearner,
    experiment,
    learner_process,
    play,
    running_learner,
)
from tests.learner_service.toys import FIRST, LAST, MID, MatrixGame, row, vector_spec
from tests.waiting import wait_until
from tests.wire import Client, Refused

SPEC = vector_spec()


def game(n: int = 2, rounds: int = 5) -> MatrixGame:
    return MatrixGame(MatrixGame.CLIMBING, n, rounds)


def start_player(
    learner: RunningLearner, slot: int, rows: int, n: int = 2, rounds: int = 5
) -> threading.Thread:
    """A session that plays on a thread of its own."""
    welcomed = threading.Event()

    def run() -> None:
        toy = game(n, rounds)
        with Client(learner.port, toy.spec, n) as client:
            welcome = client.hello(preferred_first_slot=slot)
            welcomed.set()
            play(client, welcome, toy, rows)

    thread = threading.Thread(target=run)
    thread.start()
    assert welcomed.wait(TIMEOUT_S)
    return thread


def load(run_dir: Path) -> dict[str, Any]:
    return CheckpointFolder(run_dir, 1).load_latest()[1]


def balance(state: dict[str, Any]) -> int:
    """Every row that came was trained, dropped for a reason, or is in the checkpoint: these."""
    p = state["progress"]
    kept = [u["arrays"]["step_type"].shape[1] * u["rows"] for u in state["storage"]["ready"]]
    assert p["rows_received"] == p["rows_trained"] + sum(p["rows_dropped"].values()) + sum(kept)
    return sum(kept)


def test_a_learner_that_is_told_to_stop_loses_no_row(tmp_path: Path) -> None:
    """Rows that wait, rows of open unrolls and rows on their way are in the checkpoint."""
    # An update takes 16 environments: what 3 send in this time waits.
    config = experiment(algorithm={"batch_number": 32})
    sent = 0
    with running_learner(tmp_path, config) as learner, Client(learner.port, SPEC, 3) as client:
        client.hello()
        for _ in range(7):  # a full unroll, which waits, and 3 rows of the next
            client.exchange(row(SPEC, 3, MID if sent else FIRST))
            sent += 3
        learner.stop()
        while True:
            sent += 3
            try:
                client.exchange(row(SPEC, 3))
            except Refused as error:
                why = error.code
                break
            time.sleep(0.1)  # an environment's step
        assert why in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    state = load(tmp_path)
    assert state["progress"]["rows_received"] == sent
    assert state["progress"]["rows_dropped"] == {"session": 3}  # no action followed the last row
    assert balance(state) == sent - 3
    more = experiment(algorithm={"batch_number": 8})
    with running_learner(tmp_path, more, resume=True) as learner:
        wait_until(
            lambda: learner.metric("updates_total") >= 1
        )  # of four environments; more if it took long to stop
        assert learner.metric("rows_received_total") == sent
        assert learner.metric("rows_undone_total") == 0
        assert learner.metric("rows_dropped_total", reason="restart") == 0
    assert balance(load(tmp_path)) < sent - 3


def test_a_slow_learner_parks_sessions_and_bounds_the_lag(tmp_path: Path) -> None:
    config = experiment(algorithm={"batch_number": 4, "data_passes": 10})
    with running_learner(tmp_path, config) as learner:
        players = [start_player(learner, slot, rows=50) for slot in (0, 2)]
        blocked = 0.0
        while any(p.is_alive() for p in players):
            blocked = max(blocked, learner.metric("parked_sessions"))
        for p in players:
            p.join()
        wait_until(lambda: learner.metric("sessions") == 0)
        # Each number is a scrape of its own: none may be taken while a last update ends.
        updates = -1.0
        while updates != (updates := learner.metric("updates_total")):
            time.sleep(1.0)
        assert updates > 15
        assert blocked > 0
        # Whatever the scheduler does to the two sessions, nothing older than one update is learned
        # from; that sessions of equal pace lose nothing is shown in storage/test_rollout.py.
        assert learner.metric("policy_lag_bucket", le="1.0") == learner.metric("policy_lag_count")
        unrolls = learner.metric("policy_lag_count")
        assert unrolls >= 2 * updates  # each counts: an update takes those of two environments
        assert learner.metric("policy_lag_bucket", le="0.0") < unrolls  # it did act while learning


def test_a_session_that_dies_makes_room_for_those_that_wait(tmp_path: Path) -> None:
    config = experiment(algorithm={"batch_number": 4}, learner={"max_policy_lag": 0})
    with running_learner(tmp_path, config) as learner:
        dies = Client(learner.port, SPEC, 2)
        dies.hello()
        dies.exchange(row(SPEC, 2, FIRST))
        with Client(learner.port, SPEC, 2) as waits:
            waits.hello()
            waits.put(row(SPEC, 2, FIRST))
            wait_until(lambda: learner.metric("parked_sessions") == 1)
            dies.drop()
            assert waits.get().shape == (2, 2)
            wait_until(lambda: learner.metric("parked_sessions") == 0)


def test_an_evaluation_is_played_greedily_and_reported(tmp_path: Path) -> None:
    config = experiment(evaluation={"every_updates": 1000, "best_metric": "score"})
    with running_learner(tmp_path, config) as learner:
        with Client(learner.port, SPEC, 1) as first:
            first.hello()
        with Client(learner.port, SPEC, 3) as client:
            welcome = client.hello(mode=pb.MODE_EVALUATE)
            assert len(welcome.slots) == 0
            answers = [client.exchange(row(SPEC, 3, kind, 2.0)) for kind in (FIRST, MID, LAST)]
            assert all(np.array_equal(answers[0], a) for a in answers[1:])  # greedy: no dice
            wait_until(lambda: (tmp_path / "checkpoints" / "best.pt").exists())
        lines = [json.loads(x) for x in (tmp_path / "progress.jsonl").read_text().splitlines()]
        (evaluation,) = [x for x in lines if x["kind"] == "evaluation"]
        assert evaluation["updates"] == 0
        # two steps of reward 2 for two agents
        assert evaluation["metrics"]["return"]["mean"] == 8
        assert evaluation["metrics"]["score"] == {
            "mean": 2,
            "std": 0,
            "ci95": [2, 2],
            "episodes": 3,
        }
        assert learner.metric("rows_received_total") == 0  # nothing is learned from it
        assert learner.metric("episodes_total", mode="evaluate") == 3
    assert CheckpointFolder(tmp_path, 1).load(tmp_path / "checkpoints" / "best.pt")["best"] == 2


@pytest.mark.parametrize(
    ("first_metric", "in_checkpoint", "metric", "best_score"),
    [("score", None, "score", 5), ("return", 5.0, "score", 2), ("score", 5.0, "-score", -2)],
)
def test_resumed_run_keeps_the_best_policy_of_the_same_metric(
    tmp_path: Path,
    first_metric: str,
    in_checkpoint: float | None,
    metric: str,
    best_score: float,
) -> None:
    """The best may have been written after the checkpoint that the run continues from."""

    def config(metric: str) -> ExperimentConfig:
        return experiment(evaluation={"every_updates": 1, "best_metric": metric})

    with running_learner(tmp_path, config(first_metric)) as learner:
        with Client(learner.port, SPEC, 1) as client:
            client.hello()
            for kind in (FIRST, MID, MID, MID, MID):
                client.exchange(row(SPEC, 1, kind))
        wait_until(lambda: learner.metric("updates_total") == 1)
    folder = CheckpointFolder(tmp_path, 1)
    state = load(tmp_path)
    assert state["best"] is None
    folder.save({**state, "best": in_checkpoint}, 1)
    folder.save_best({**state, "best": 5.0})
    with running_learner(tmp_path, config(metric), resume=True) as learner:
        with Client(learner.port, SPEC, 1) as client:
            client.hello()
            for kind in (FIRST, MID, MID, MID, MID):
                client.exchange(row(SPEC, 1, kind))
        wait_until(lambda: learner.metric("updates_total") == 2)
        with Client(learner.port, SPEC, 3) as client:
            client.hello(mode=pb.MODE_EVALUATE)
            for kind in (FIRST, MID, LAST):
                client.exchange(row(SPEC, 3, kind, 2.0))
    assert folder.load(tmp_path / "checkpoints" / "best.pt")["best"] == best_score
    assert load(tmp_path)["best"] == best_score


def test_last_policy_is_evaluated_where_the_run_ends(tmp_path: Path) -> None:
    # Four steps of one environment make an update: the limit counts steps learned from.
    config = experiment(run={"max_env_steps": 6}, evaluation={"every_updates": 1000})
    with (
        running_learner(tmp_path, config) as learner,
        Client(learner.port, SPEC, 1) as trains,
        Client(learner.port, SPEC, 1) as first,
        Client(learner.port, SPEC, 1) as last,
    ):
        trains.hello()
        first.hello(mode=pb.MODE_EVALUATE)  # of version 0; it continues beyond the run's end
        for kind in (FIRST, MID, MID, MID, MID):
            trains.exchange(row(SPEC, 1, kind))
        wait_until(lambda: learner.metric("updates_total") == 1)
        for _ in range(3):
            trains.exchange(row(SPEC, 1))
        assert not (tmp_path / "checkpoints" / "update-000001.pt").exists()  # 7 steps came
        trains.put(row(SPEC, 1))
        wait_until(lambda: (tmp_path / "checkpoints" / "update-000002.pt").exists())
        last.hello(mode=pb.MODE_EVALUATE)
        for client, version in ((last, 2), (first, 0)):
            client.exchange(row(SPEC, 1, FIRST))
            client.exchange(row(SPEC, 1, LAST))
            assert client.policy_version == version
    lines = [json.loads(x) for x in (tmp_path / "progress.jsonl").read_text().splitlines()]
    assert [x["updates"] for x in lines if x["kind"] == "evaluation"] == [2, 0]
    assert {x["env_steps"] for x in lines if x["updates"] == 2} == {8}


def test_an_evaluation_may_draw_its_actions(tmp_path: Path) -> None:
    config = experiment(evaluation={"every_updates": 1000, "sample": True})
    with running_learner(tmp_path, config) as learner:
        with Client(learner.port, SPEC, 1) as first:
            first.hello()
        with Client(learner.port, SPEC, 3) as client:
            client.hello(mode=pb.MODE_EVALUATE)
            kinds = [FIRST, *[MID] * 30]
            answers = [client.exchange(row(SPEC, 3, kind, 2.0)) for kind in kinds]
    assert len({a.tobytes() for a in answers}) > 5  # equal rows, different actions


def test_a_run_ends_at_its_limit_and_is_saved(tmp_path: Path) -> None:
    config = experiment(run={"max_updates": 3}, algorithm={"batch_number": 4})
    with running_learner(tmp_path, config) as learner:
        start_player(learner, 0, rows=10_000).join(TIMEOUT_S)
    state = load(tmp_path)
    assert state["progress"]["updates"] == 3
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["update-000003.pt"]
    ports = json.loads((tmp_path / "learner.json").read_text())
    assert ports["port"] == learner.port


def test_fp16_reports_its_loss_scale_and_skipped_steps(tmp_path: Path) -> None:
    config = experiment(learner={"precision": "fp16", "grad_scaler": "aggressive"})

    def agree() -> bool:  # the two are read one after the other, and updates may continue
        skipped = learner.metric("scaler_skipped_steps_total")
        return learner.metric("loss_scale") == 2.0 ** (16 - skipped)

    with running_learner(tmp_path, config) as learner:
        start_player(learner, 0, rows=40).join(TIMEOUT_S)
        wait_until(lambda: learner.metric("updates_total") > 2)
        wait_until(agree)
    lines = (tmp_path / "progress.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["losses"]["loss_scale"] in [2.0**k for k in range(17)]


def test_a_complete_run_is_not_trained_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = experiment(run={"max_updates": 3}, algorithm={"batch_number": 4})
    with running_learner(tmp_path, config) as learner:
        start_player(learner, 0, rows=10_000).join(TIMEOUT_S)
    assert run_learner(config, tmp_path, resume=True, stop=threading.Event()) == 0
    assert "update-000003.pt has reached run.max_updates=3; raise it to train on" in caplog.text
    assert load(tmp_path)["progress"]["updates"] == 3
    with pytest.raises(ConfigError, match=r"already holds a run: add --resume .* another folder"):
        run_learner(config, tmp_path, resume=False, stop=threading.Event())
    for section in ("algorithm", "network"):  # wrong settings are said first
        wrong = {"name": getattr(config, section).name, "hiden": 3, "gama": 3}
        changed = config.model_copy(update={section: PluginConfig(**wrong)})
        with pytest.raises(ConfigError, match=f"unknown key '{section}.(gama|hiden)'; did you"):
            run_learner(changed, tmp_path, resume=True, stop=threading.Event())


def test_resume_continues_and_refuses_another_environment(tmp_path: Path) -> None:
    config = experiment(run={"max_updates": 2}, algorithm={"batch_number": 4})
    with running_learner(tmp_path, config) as learner:
        start_player(learner, 0, rows=10_000).join(TIMEOUT_S)
    kept = tmp_path / "config.yaml"
    before = kept.read_bytes()
    more = experiment(run={"max_updates": 20}, algorithm={"batch_number": 4})
    with running_learner(tmp_path, more, resume=True) as learner:
        other = game(2, rounds=6)
        with (
            Client(learner.port, other.spec, 2) as client,
            pytest.raises(Refused, match="max_episode_steps: 5 here, 6 there") as refused,
        ):
            client.hello()
        assert f"{tmp_path}/checkpoints/update-000002.pt is of another" in str(refused.value)
        assert "or start a new run" in str(refused.value)
        assert kept.read_bytes() == before  # the run can continue as it was
        toy = game()
        with Client(learner.port, toy.spec, 2) as client:
            welcome = client.hello()
            assert welcome.policy_version >= 2  # what waited has been learned from already
            assert all(s.episode > 0 for s in welcome.slots)  # no seed is played twice
            assert yaml.safe_load(kept.read_text())["run"]["max_updates"] == 20
            play(client, welcome, toy, 10_000)
    state = load(tmp_path)
    assert state["progress"]["updates"] == 20
    balance(state)


@pytest.mark.parametrize(
    ("section", "options", "difference"),
    [
        ("network", {"hidden": [16]}, r"network\.hidden: \[8\] there, \[16\] here"),
        ("algorithm", {"share_parameters": False}, r"share_parameters: True there, False here"),
        ("algorithm", {"name": "mappo"}, r"algorithm\.name: coma there, mappo here"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_refused_resume_leaves_the_run_unchanged(
    tmp_path: Path, section: str, options: dict[str, Any], difference: str
) -> None:
    with running_learner(tmp_path, experiment(run={"max_updates": 2})) as learner:
        start_player(learner, 0, rows=10_000).join(TIMEOUT_S)
    before = {p: p.read_bytes() for p in [tmp_path / "config.yaml", *tmp_path.glob("*/*.pt")]}
    wanted = rf"update-000002\.pt does not fit the configuration: .*{difference}.*; use the config"
    with (
        pytest.raises(CheckpointError, match=wanted),
        running_learner(tmp_path, experiment(**{section: options}), resume=True),
    ):
        pytest.fail("it must not start")
    assert {p: p.read_bytes() for p in before} == before


def test_a_smaller_replay_is_refused_with_a_message(tmp_path: Path) -> None:
    def config(rows: int, updates: int) -> ExperimentConfig:
        replay = {"capacity_rows": rows, "start_rows": 8, "batch_size": 8, "update_interval": 8}
        options: dict[str, Any] = {"name": "qmix", "replay": replay}
        sections = experiment().model_dump(exclude={"algorithm"})
        return validate(
            ExperimentConfig, sections | {"algorithm": options, "run": {"max_updates": updates}}
        )

    with running_learner(tmp_path, config(80, 4)) as learner:
        start_player(learner, 0, rows=10_000).join(TIMEOUT_S)
    with (
        pytest.raises(ConfigError, match="the checkpoint's replay has 10 columns, this one 2"),
        running_learner(tmp_path, config(16, 8), resume=True),
    ):
        pytest.fail("it must not start")


def test_resumed_lockstep_run_without_sessions_loses_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sync = {"pipeline": "sync"}
    with running_learner(tmp_path, experiment(run={"max_updates": 2}, learner=sync)) as learner:
        for player in [start_player(learner, slot, 10_000) for slot in (0, 2)]:
            player.join(TIMEOUT_S)
    before = {p: p.read_bytes() for p in [tmp_path / "config.yaml", *tmp_path.glob("*/*.pt")]}
    with running_learner(tmp_path, experiment(learner=sync), resume=True) as learner:
        learner.stop()
    assert "is lost" not in caplog.text
    assert {p: p.read_bytes() for p in before} == before


def test_resume_without_a_checkpoint_is_an_error_with_a_message(tmp_path: Path) -> None:
    with (
        pytest.raises(CheckpointError, match="start without --resume"),
        running_learner(tmp_path, experiment(), resume=True),
    ):
        pytest.fail("it must not start")


SYNC: dict[str, Any] = {"learner": {"pipeline": "sync", "checkpoint_every_updates": 2}}


def sync_run(
    run_dir: Path,
    updates: int,
    slots: tuple[int, int],
    resume: bool = False,
    recurrent: int = 0,
    cell: str = "gru",
    **algorithm: Any,
) -> Any:
    """Two sessions of two environments; four updates to a rollout; stops at `updates`."""
    network = {"recurrent": recurrent, "recurrent_cell": cell}
    sections: dict[str, Any] = {"run": {"max_updates": updates}, "network": network, **SYNC}
    if "name" in algorithm:
        others = experiment(**sections).model_dump(exclude={"algorithm"})
        config = validate(ExperimentConfig, {**others, "algorithm": algorithm})
    else:
        config = experiment(algorithm=algorithm, **sections)
    with running_learner(run_dir, config, resume=resume) as learner:
        for player in [start_player(learner, slot, 10_000) for slot in slots]:
            player.join(TIMEOUT_S)
    return load(run_dir)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def test_lockstep_is_bit_equal_in_any_order_of_arrival(tmp_path: Path) -> None:
    a = sync_run(tmp_path / "a", 8, slots=(0, 2))
    b = sync_run(tmp_path / "b", 8, slots=(2, 0))
    assert same(a["algorithm"], b["algorithm"])
    assert same(a["slots"], b["slots"])
    assert same(a["generator"], b["generator"])


@pytest.mark.parametrize("recurrent", [0, 5])
def test_a_lockstep_run_resumes_to_the_bit(tmp_path: Path, recurrent: int) -> None:
    whole = sync_run(tmp_path / "whole", 16, slots=(0, 2), recurrent=recurrent)
    half = sync_run(tmp_path / "parts", 8, slots=(0, 2), recurrent=recurrent)
    assert len(half["memory"]) == (4 if recurrent else 0)  # of every slot, in mid-episode
    assert all(m.abs().max() > 0 for m in half["memory"].values())
    parts = sync_run(tmp_path / "parts", 16, slots=(2, 0), resume=True, recurrent=recurrent)
    for name in ("algorithm", "slots", "memory", "returns"):
        assert same(whole[name], parts[name]), name


@pytest.mark.parametrize(
    ("name", "cell"),
    [("sac", "lstm"), pytest.param("matd3", "gru", marks=pytest.mark.long)],
)
def test_lockstep_with_memory_off_policy_resumes_to_the_bit(
    tmp_path: Path, name: str, cell: str
) -> None:
    replay = {"capacity_rows": 400, "start_rows": 16, "batch_size": 16, "unroll_steps": 4}
    options: dict[str, Any] = {"name": name, "replay": {**replay, "update_interval": 8}}
    if name == "matd3":
        options["target_noise"] = 0.0  # actions are discrete
    how: dict[str, Any] = {"recurrent": 5, "cell": cell, **options}
    whole = sync_run(tmp_path / "whole", 8, slots=(0, 2), **how)
    half = sync_run(tmp_path / "parts", 4, slots=(0, 2), **how)
    width = 10 if cell == "lstm" else 5
    assert {m.shape[-1] for m in half["memory"].values()} == {width}
    parts = sync_run(tmp_path / "parts", 8, slots=(2, 0), resume=True, **how)
    for part in ("algorithm", "slots", "memory", "returns", "storage"):
        assert same(whole[part], parts[part]), part


def test_minibatches_of_a_run_grow_with_its_environments(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Four environments bring more at once than is asked for; a resumed run settles the same."""
    options: dict[str, Any] = {"unroll_steps": 0, "max_batch_size": 12}
    caplog.set_level(logging.INFO, "murmur")
    whole = sync_run(tmp_path / "whole", 8, slots=(0, 2), **options)
    assert "4 environments: a minibatch has 12 agent-transitions, 3 times" in caplog.text
    assert "learning rates are 1.73 times as large" in caplog.text
    sync_run(tmp_path / "parts", 4, slots=(0, 2), **options)
    parts = sync_run(tmp_path / "parts", 8, slots=(2, 0), resume=True, **options)
    assert same(whole["algorithm"], parts["algorithm"])
    text = (tmp_path / "whole" / "config.yaml").read_text()
    assert "batch_size: 4\n" in text
    assert "max_batch_size: 12\n" in text


@pytest.mark.parametrize("batch_number", [6, 12, 20])
def test_a_lockstep_run_with_leftovers_resumes_to_the_bit(
    tmp_path: Path, batch_number: int
) -> None:
    """An update takes 3, 6 or 10 of the 4 environments of a rollout: some are left over."""
    options: dict[str, Any] = {"batch_number": batch_number}
    whole = sync_run(tmp_path / "whole", 9, slots=(0, 2), **options)
    half = sync_run(tmp_path / "parts", 5, slots=(0, 2), **options)
    assert half["storage"]["ready"]
    parts = sync_run(tmp_path / "parts", 9, slots=(2, 0), resume=True, **options)
    for name in ("algorithm", "slots", "memory", "returns", "generator", "storage"):
        assert same(whole[name], parts[name]), name
    for state in (whole, parts):  # also what was counted, no row and no episode twice
        state["progress"].pop("seconds")
    assert same(whole["progress"], parts["progress"])


def test_lockstep_checkpoint_waits_for_the_update(tmp_path: Path) -> None:
    # Due at update 2, 4, ..: written at 4, 8, .., where nothing waits in memory.
    config = experiment(run={"max_updates": 10}, **SYNC)
    with running_learner(tmp_path, config) as learner:
        for player in [start_player(learner, slot, 10_000) for slot in (0, 2)]:
            player.join(TIMEOUT_S)
    numbers = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert numbers == ["update-000004.pt", "update-000008.pt", "update-000010.pt"]


def test_non_finite_loss_stops_the_run_and_keeps_the_batch(tmp_path: Path) -> None:
    config = experiment(
        algorithm={"critic_lr": 1e14, "data_passes": 4}, learner={"max_skipped_updates": 3}
    )
    with learner_process(tmp_path, config) as process:
        learner = RunningLearner(process.port, process.metrics_port, tmp_path, threading.Event())
        start_player(learner, 0, rows=10_000).join(TIMEOUT_S)
        code, errors = process.wait()
    assert code == 2
    (batch,) = (tmp_path / "checkpoints").glob("batch-*.pt")
    first, last = (x for x in errors.splitlines() if "the batch is in" in x)
    assert "update 0 is skipped: " in first
    assert "the weights stay as they were (skipped so far: 1)" in first
    assert last.startswith("update 0: ")
    assert "as in 3 tries before (learner.max_skipped_updates); the batch is in" in last
    assert str(batch) in last
    arrays = torch.load(batch, weights_only=True)["arrays"]
    assert arrays["action"].shape[0] == 5
    assert "Traceback" not in errors

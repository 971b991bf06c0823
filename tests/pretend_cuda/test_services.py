"""What surrounds updates, on the pretended GPU: evaluation, league, checkpoints, cuts, export."""

import ast
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from murmur.learner_service.algorithms.mappo import Mappo
from murmur.learner_service.checkpoint.folder import CheckpointFolder
from murmur.learner_service.device import cuda_graph
from murmur.learner_service.device.cuda_graph import WARM_UP_CALLS
from murmur.learner_service.export.policy import (
    GreedyPolicy,
    export_policy,
    load_policy,
    random_observations,
)
from murmur.learner_service.loop import Learner
from murmur.learner_service.serving.league import League
from murmur.learner_service.serving.staging import PackedStaging
from murmur.shared.wire.spec import action_factors
from tests.pretend_cuda import Machine, pretend_cuda
from tests.pretend_cuda.cases import AGENTS, Case, make_spec
from tests.pretend_cuda.driven import DrivenRun
from tests.pretend_cuda.known import ALLOWED, KNOWN, unknown
from tests.waiting import wait_until

MAPPO = Case("mappo", "discrete", "shared", False, "fp32")
RECURRENT = Case("coma", "discrete", "groups", True, "bf16")
MASAC = Case("masac", "continuous", "own", False, "fp16")
IMAGES = Case("mappo", "images", "shared", True, "fp16")
QMIX = Case("qmix", "discrete", "own", False, "fp32")


def cases(*quick: Case, slow: tuple[Case, ...] = ()) -> pytest.MarkDecorator:
    """Parametrises; the slow ones are for `make test-long`."""
    late = [pytest.param(case, marks=pytest.mark.long) for case in slow]
    return pytest.mark.parametrize("case", [*quick, *late], ids=str)


def assert_clean(cuda: Machine) -> None:
    assert not unknown(list(cuda.report.faults))


@pytest.mark.parametrize("sample", [False, True])
@cases(MASAC, slow=(IMAGES,))
def test_evaluations_are_clean(case: Case, sample: bool, tmp_path: Path) -> None:
    config = case.config(evaluation={"every_updates": 2, "sample": sample})
    with pretend_cuda(ALLOWED) as cuda, DrivenRun(config, make_spec(case.space), tmp_path) as run:
        players = [run.player(3), run.player(3)]
        judge = run.player(2, evaluates=True)
        run.play(lambda: judge.session.complete, judge, *players)
    assert (tmp_path / "checkpoints" / "best.pt").is_file()
    assert_clean(cuda)


@cases(MAPPO, slow=(RECURRENT, QMIX))
def test_a_league_is_clean(case: Case, tmp_path: Path) -> None:
    config = case.config(league={"size": 2, "every_updates": 1, "latest": 0.3})
    spec = make_spec(case.space, 2 * AGENTS)
    with pretend_cuda(ALLOWED) as cuda:
        with DrivenRun(config, spec, tmp_path) as run:
            players = [run.player(3), run.player(3)]
            run.play_until(3, *players)
            run.play_rows(6, *players)  # an episode: opponents are drawn
            pairings = [p.session.pairing for p in players]
            assert any(o is not None for p in pairings if p is not None for o in p.opponents)
        resumed = CheckpointFolder(tmp_path, 2).load_latest()
        with DrivenRun(config, spec, tmp_path, resumed) as run:
            before = run.updates
            run.play_until(before + 1, run.player(3), run.player(3))
    assert_clean(cuda)


def test_an_opponent_kept_while_a_batch_is_acted_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = MAPPO.config(league={"size": 1, "every_updates": 1, "latest": 0})
    draw, kept_meanwhile = League.draw, threading.Event()

    def draw_late(league: League, pairing: Any, begins: Any, *where: Any) -> None:
        before, until = league.opponents, time.monotonic() + 0.2
        while begins.any() and not kept_meanwhile.is_set() and time.monotonic() < until:
            if league.opponents != before:
                kept_meanwhile.set()
        draw(league, pairing, begins, *where)

    monkeypatch.setattr(League, "draw", draw_late)
    spec = make_spec(MAPPO.space, 2 * AGENTS)
    with pretend_cuda(ALLOWED) as cuda, DrivenRun(config, spec, tmp_path) as run:
        players = [run.player(3), run.player(3)]
        run.play(kept_meanwhile.is_set, *players)
        run.play_rows(6, *players)
    assert_clean(cuda)


@cases(MAPPO, MASAC, slow=(IMAGES, QMIX))
def test_checkpoints_are_clean_and_resume_on_both_devices(case: Case, tmp_path: Path) -> None:
    config = case.config(learner={"checkpoint_every_updates": 2})
    spec = make_spec(case.space)
    with pretend_cuda(ALLOWED) as cuda:
        with DrivenRun(config, spec, tmp_path) as run:
            run.play_until(3, run.player(3), run.player(3))
        resumed = CheckpointFolder(tmp_path, 2).load_latest()
        with DrivenRun(config, spec, tmp_path, resumed) as run:
            before = run.updates
            assert before >= 3
            run.play_until(before + 2, run.player(3), run.player(3))
    assert_clean(cuda)
    at_home = case.config(learner={"device": "cpu", "precision": "fp32"})
    with DrivenRun(at_home, spec, tmp_path, CheckpointFolder(tmp_path, 2).load_latest()) as run:
        before = run.updates
        run.play_until(before + 1, run.player(3), run.player(3))


@cases(MAPPO, slow=(RECURRENT,))
def test_open_unrolls_are_cut_cleanly(case: Case, tmp_path: Path) -> None:
    """A slow session's rows would be too old: they are learned from while more are written."""
    options = {"unroll_steps": 3, "batch_size": 27, "batch_number": 1}
    config = case.config(algorithm=options, learner={"max_policy_lag": 2})
    with pretend_cuda(ALLOWED) as cuda, DrivenRun(config, make_spec(case.space), tmp_path) as run:
        fast, slow = run.player(3), run.player(2)
        run.play_rows(2, fast, slow)
        for _ in range(3):
            run.play_until(run.updates + 3, fast)
            run.play_rows(1, slow)
        run.end(slow)
        run.play_rows(1, fast)
    assert run.run.context.progress.rows_trained > 0
    assert_clean(cuda)


@cases(MAPPO, MASAC)
def test_an_update_that_is_undone_is_clean(case: Case, tmp_path: Path) -> None:
    with (
        pretend_cuda(ALLOWED) as cuda,
        DrivenRun(case.config(), make_spec(case.space), tmp_path) as run,
    ):
        players = [run.player(3), run.player(3)]
        run.play_until(1, *players)
        broken = players[0].environments
        row = broken.row

        def with_huge_reward() -> Any:
            found = row()
            found.reward[:] = 1e30  # its square is infinite
            return found

        broken.row = with_huge_reward  # type: ignore[method-assign]
        run.play(lambda: run.run.context.progress.updates_skipped, *players)
    assert_clean(cuda)


@pytest.mark.long
def test_what_is_known_is_still_there(tmp_path: Path) -> None:
    """A fixed problem leaves the list."""
    found: set[tuple[str, str, str]] = set()
    spec = make_spec("discrete", 2 * AGENTS)
    for i, case in enumerate((MAPPO, RECURRENT, MASAC, QMIX)):
        league = {"size": 2, "every_updates": 1} if case.space == "discrete" else {}
        here = spec if league else make_spec(case.space)
        config = case.config(league=league)
        with pretend_cuda(ALLOWED) as cuda, DrivenRun(config, here, tmp_path / str(i)) as run:
            run.play_until(2, run.player(3), run.player(3))
        found |= {(f.kind, f.site.file, f.site.function) for f in cuda.report.faults}
    assert not KNOWN.keys() - found


def test_functions_that_may_wait_are_there() -> None:
    found = {
        f"{node.name}.{method.name}"
        for source in (Path(__file__).parents[2] / "learner_service").rglob("*.py")
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.ClassDef)
        for method in node.body
        if isinstance(method, ast.FunctionDef)
    }
    assert not {name.split(":")[0].rstrip("*") for name in ALLOWED} - found


def test_one_read_an_update_and_one_an_act(tmp_path: Path) -> None:
    with (
        pretend_cuda(ALLOWED) as cuda,
        DrivenRun(MAPPO.config(), make_spec("discrete"), tmp_path) as run,
    ):
        run.play_until(4, run.player(3), run.player(3))
    reads = {function: 0 for function in ("Learner._means", "InferenceLoop.serve")}
    for (_, site), count in cuda.report.syncs.items():
        reads[site.function] = reads.get(site.function, 0) + count
    assert reads["Learner._means"] == run.updates + run.run.context.progress.updates_skipped


@cases(MAPPO, slow=(RECURRENT,))
def test_acts_are_captured_before_the_first_rows(case: Case, tmp_path: Path) -> None:
    learner = {"max_policy_lag": 100, "batcher": {"max_batch_envs": 32}}
    config = case.config(learner=learner)
    with pretend_cuda(ALLOWED) as cuda, DrivenRun(config, make_spec(case.space), tmp_path) as run:
        graphs, sizes = run.run.inference.staging.graphs, 2  # 16 and 32 rows
        wait_until(lambda: graphs.captures["act"] == 2 * sizes, "graphs of two snapshots")
        eager = graphs.eager_calls["act"]
        players = [run.player(3)]
        run.play_until(1, *players)
        grown = run.run.inference.storage.arena.grown
        arena = run.run.inference.storage.arena
        for i in range(6):  # on a slow machine the first player alone has made it grow further
            players += [run.player(min(3 << i, 32)) for _ in range(6)]
            run.play_rows(4, *players)
            if arena.grown > grown:
                break
        assert arena.grown > grown
        assert graphs.captures["act"] == 2 * sizes
        assert graphs.eager_calls["act"] == eager == WARM_UP_CALLS * 2 * sizes
        assert graphs.replays["act"] > 10
        assert not graphs.fallbacks
    assert_clean(cuda)


@cases(MAPPO, slow=(RECURRENT,))
def test_a_batch_that_no_graph_is_for_is_said_once_and_counted(
    case: Case, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = case.config(
        learner={"max_policy_lag": 100, "batcher": {"max_batch_envs": 16}},
        env_server={"envs_per_worker": 40},  # in two sessions
    )
    with pretend_cuda(ALLOWED) as cuda, DrivenRun(config, make_spec(case.space), tmp_path) as run:
        graphs = run.run.inference.staging.graphs
        wait_until(lambda: graphs.captures["act"] == 4, "graphs of two snapshots")
        eager = graphs.eager_calls["act"]
        large, small = run.player(40), run.player(20)
        run.play_rows(8, large, small)
        run.play_until(1, large, small)
        assert graphs.captures["act"] == 4
        one_under_way = graphs.eager_calls["act"] - eager - large.rows
        assert 0 <= one_under_way <= 1
        assert graphs.replays["act"] >= small.rows
    said = [r.getMessage() for r in caplog.records if "without a CUDA graph" in r.getMessage()]
    assert len(said) == 1
    assert "a batch of 40 environments" in said[0]
    assert "learner.batcher.max_batch_envs=32" in said[0]
    assert_clean(cuda)


@cases(MASAC, slow=(MAPPO,))
def test_nothing_is_learned_while_acts_are_captured(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay that a run continues with holds rows enough for an update."""
    config, spec = case.config(), make_spec(case.space)
    with pretend_cuda(ALLOWED):
        with DrivenRun(config, spec, tmp_path) as run:
            run.play_until(2, run.player(3), run.player(3))
        prepare, prepared, updates = PackedStaging.prepare, list[int](), list[int]()

        def prepare_late(*arguments: Any) -> None:
            time.sleep(0.3)
            prepare(*arguments)
            prepared.append(len(updates))

        monkeypatch.setattr(PackedStaging, "prepare", prepare_late)
        means = Learner._means
        monkeypatch.setattr(Learner, "_means", lambda *a: updates.append(1) or means(*a))
        resumed = CheckpointFolder(tmp_path, 2).load_latest()
        with DrivenRun(config, spec, tmp_path, resumed) as run:
            run.play_until(run.updates + 2, run.player(3), run.player(3))
    assert prepared == [0, 0]
    assert updates


def test_no_lock_is_held_through_an_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even through the first, all of whose shapes are new."""
    free, scalars = list[bool](), Mappo._scalars

    def look() -> None:
        free.append(cuda_graph._LIBRARIES.acquire(timeout=5))
        cuda_graph._LIBRARIES.release()

    def seen(*arguments: Any) -> Any:
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        return scalars(*arguments)

    monkeypatch.setattr(Mappo, "_scalars", seen)
    with pretend_cuda(), DrivenRun(MAPPO.config(), make_spec(MAPPO.space), tmp_path) as run:
        run.play_until(1, run.player(3), run.player(3))
    assert all(free)
    assert free


@pytest.mark.parametrize(
    "what",
    ["evaluation", *(pytest.param(w, marks=pytest.mark.long) for w in ("training", "league"))],
)
def test_nobody_who_acts_waits_for_a_capture_of_learning(what: str, tmp_path: Path) -> None:
    """Once the libraries have seen the sizes of all batches."""
    league = {"size": 1, "every_updates": 1, "latest": 0.5} if what == "league" else {}
    config = MAPPO.config(
        learner={"max_policy_lag": 100, "batcher": {"max_batch_envs": 16}},
        evaluation={"every_updates": 2 if what == "evaluation" else 0, "episodes": 1000},
        league=league,
    )
    spec = make_spec(MAPPO.space, 2 * AGENTS if league else AGENTS)
    holds, leave = threading.Event(), threading.Event()

    def capture() -> None:
        with cuda_graph._LIBRARIES:
            holds.set()
            leave.wait(60)

    with pretend_cuda(ALLOWED), DrivenRun(config, spec, tmp_path) as run:
        players = [run.player(3), run.player(20)]  # with a graph, and without one
        if what == "evaluation":
            players.append(run.player(2, evaluates=True))
        run.play_until(2, *players)
        run.play_rows(30, *players)
        thread = threading.Thread(target=capture)
        thread.start()
        assert holds.wait(60)
        try:
            run.play_rows(4, *players)
        finally:
            leave.set()
            thread.join()


@cases(RECURRENT, slow=(MASAC,))
def test_a_policy_trained_there_acts_on_the_cpu(case: Case, tmp_path: Path) -> None:
    with pretend_cuda(ALLOWED) as cuda:
        with DrivenRun(case.config(), make_spec(case.space), tmp_path) as run:
            run.play_until(1, run.player(3), run.player(3))
        _, state = CheckpointFolder(tmp_path, 2).load_latest()
        policy, spec, _ = load_policy(state)
        given = random_observations(spec, 3, 0, policy.memory_size)
        outputs = GreedyPolicy(policy, action_factors(spec.action))(given)
        assert {x.device.type for x in outputs.values()} == {"cpu"}
    assert_clean(cuda)


@cases(slow=(RECURRENT, MASAC, IMAGES, QMIX))
def test_a_policy_trained_there_is_exported(case: Case, tmp_path: Path) -> None:
    with (
        pretend_cuda(ALLOWED) as cuda,
        DrivenRun(case.config(), make_spec(case.space), tmp_path) as run,
    ):
        run.play_until(1, run.player(3), run.player(3))
    assert_clean(cuda)
    path, state = CheckpointFolder(tmp_path, 2).load_latest()
    exported = export_policy(state, "torch-export", tmp_path / "policy.pt2", path.name)
    assert exported.difference < 1e-3


def test_pretending_leaves_torch_as_it_was() -> None:
    def state() -> list[Any]:
        precision = torch.get_float32_matmul_precision()
        return [torch.cuda.Stream, torch.Generator, torch.autocast, precision]

    before = state()
    with pretend_cuda():
        torch.set_float32_matmul_precision("high")
        assert state()[:3] != before[:3]
    assert state() == before


@cases(MAPPO, slow=(MASAC, RECURRENT))
def test_histograms_wait_only_at_their_interval(case: Case, tmp_path: Path) -> None:
    config = case.config(tracking={"histograms_every_updates": 2})
    with pretend_cuda(ALLOWED) as cuda, DrivenRun(config, make_spec(case.space), tmp_path) as run:
        run.play(lambda: run.run.context.progress.updates >= 4, run.player(3), run.player(3))
    (curves,) = (tmp_path / "tensorboard").iterdir()
    drawn = curves.read_bytes()
    assert all(name in drawn for name in (b"weights/", b"gradients/", b"actions/"))
    assert_clean(cuda)

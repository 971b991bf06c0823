"""What learners that share a run wait for, by hand-computed arithmetic, and where it is read."""

import io
import json
import os
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from murmur.doctor.group_diagnosis import RankFigures, advice, pace_setter, rank_figures
from murmur.doctor.page import as_json, examine, show
from murmur.runs.run_folder import RunFolder
from murmur.runs.snapshots import Snapshot, from_metrics, from_prometheus, learners_of
from murmur.shared.process.errors import ConfigError

NOWHERE = Console(file=io.StringIO())


def looks(
    rank: int, learner: dict[str, float], rows: float = 1000, updates: float = 50, envs: int = 32
) -> tuple[Snapshot, Snapshot]:
    """Ten seconds of a learner; `learner` are its thread's seconds by state."""
    inference = {"wait_environments": 8.0, "act": 2.0}
    before = Snapshot(100.0, 0, 0, 0.0, {"inference": {}, "learner": {}}, 3, rank=rank)
    threads = {"inference": inference, "learner": learner}
    after = Snapshot(110.0, rows, updates, 5.0, threads, 3, environments=envs, rank=rank)
    return before, after


def figures(rank: int, learner: dict[str, float], **more: Any) -> RankFigures:
    return rank_figures(rank, *looks(rank, learner, **more))


def test_figures_of_a_learner() -> None:
    """10 s: 2 of them for rows, 3 for the others; 5 s of work in 50 updates are 100 ms each."""
    spent = {"wait_rows": 2.0, "wait_ranks": 3.0, "forward": 2.0, "backward": 2.5, "publish": 0.5}
    assert figures(1, spent) == RankFigures(1, 32, 100.0, 0.2, 0.3, 0.1, 5.0)
    # The sync pipeline acts and learns on one thread.
    spent = {"wait_environments": 1.0, "act": 2.0, "forward": 6.0, "wait_ranks": 1.0}
    before = Snapshot(100.0, 0, 0, 0.0, {"inference": {}})
    sync = rank_figures(0, before, Snapshot(110.0, 1000, 50, 0.0, {"inference": spent}))
    assert (sync.waits_rows, sync.waits_ranks, sync.work_s) == (0.1, 0.1, 0.12)


def test_a_learner_alone_has_no_advice() -> None:
    assert advice([figures(0, {"wait_rows": 5.0, "forward": 5.0})]) == []


def test_a_slow_device_is_named() -> None:
    """150 ms of work in an update against 80: the others wait 45 - 10 % of their time more."""
    slow = figures(2, {"forward": 7.5, "wait_ranks": 1.0, "wait_rows": 1.5})
    quick = [
        figures(rank, {"forward": 4.0, "wait_ranks": 4.5, "wait_rows": 1.5}) for rank in (0, 1)
    ]
    ranks = [*quick, slow]
    assert pace_setter(ranks) is slow
    line = advice(ranks)[0]
    assert line == (
        "the others wait 35 % of their time for rank 2, whose updates take 150 ms of work, theirs "
        "80 ms: its device is slower, hotter or shared"
    )


@pytest.mark.parametrize(
    ("envs", "words"),
    [
        (16, "rank 0, which has 16 environments, they 32. Sessions move by themselves; if it"),
        (32, "rank 0, whose rows come late: its environment servers are slower, or too few"),
    ],
)
def test_a_learner_whose_rows_come_late_is_named(envs: int, words: str) -> None:
    late = figures(0, {"forward": 4.0, "wait_ranks": 0.5, "wait_rows": 5.5}, envs=envs)
    other = figures(1, {"forward": 4.0, "wait_ranks": 5.5, "wait_rows": 0.5})
    straggler, more = advice([late, other])
    assert "the others wait 50 % of their time for " + words in straggler
    # Together they wait (5.5 + 0.5) / 20 of their time: 1 / 0.7 times the rows would do.
    assert "could use 1.4 times the rows they get" in more


def test_a_learner_that_does_something_else_is_named() -> None:
    busy = figures(1, {"forward": 4.0, "wait_ranks": 0.5, "checkpoint": 5.5})
    other = figures(0, {"forward": 4.0, "wait_ranks": 6.0})
    assert "rank 1, which does something else meanwhile: a checkpoint" in advice([busy, other])[0]


def test_learners_that_work_all_the_time_could_use_another() -> None:
    """Work 0.9, exchange 0.05: three do in 0.9 * 2 / 3 + 0.05 = 0.65 what two do in 0.95."""
    ranks = [figures(r, {"forward": 9.0, "wait_ranks": 0.5, "wait_rows": 0.5}) for r in (0, 1)]
    (line,) = advice(ranks)
    assert "another learner would help: 3 instead of 2 are up to 1.46 times as fast" in line


def test_an_exchange_that_takes_long_wants_a_larger_batch() -> None:
    """Work 0.4, exchange 0.6: at twice the rows 0.4 + 0.3 for what took 1."""
    ranks = [figures(r, {"forward": 4.0, "wait_ranks": 6.0}) for r in (0, 1)]
    (line,) = advice(ranks)
    assert "the exchange takes 60 % of the time" in line
    assert "updates of twice the rows would learn from 1.43 times as many a second" in line


def test_starved_learners_need_environment_servers_first() -> None:
    ranks = [figures(r, {"forward": 4.5, "wait_ranks": 0.5, "wait_rows": 5.0}) for r in (0, 1)]
    (line,) = advice(ranks)
    assert "more environment servers would help" in line
    assert "could use 2.0 times the rows they get" in line


def test_learners_that_need_nothing_are_told_so() -> None:
    ranks = [figures(r, {"forward": 8.0, "wait_rows": 1.0, "evaluate": 1.0}) for r in (0, 1)]
    assert advice(ranks) == [
        "neither another learner nor a larger batch would help: see above",
    ]


METRICS = """\
murmur_learner_rows_received_total{{{rank}}} {rows}
murmur_learner_updates_total{{{rank}}} {updates}
murmur_learner_environments{{{rank}}} 16
murmur_learner_env_steps_total{{{rank}}} 10
murmur_learner_agent_steps_total{{{rank}}} 30
murmur_learner_state_seconds_total{{{rank}thread="inference",state="act"}} {act}
murmur_learner_state_seconds_total{{{rank}thread="learner",state="forward"}} {forward}
murmur_learner_state_seconds_total{{{rank}thread="learner",state="wait_ranks"}} {ranks}
murmur_learner_state_seconds_total{{{rank}thread="learner",state="wait_rows"}} {rows_s}
"""


def served(rank: int, look: int, labelled: bool = True) -> str:
    """The `look`th look at a learner: rank 1 works twice as long at each of ten updates."""
    work = 4 + 4 * rank
    return METRICS.format(
        rank=f'rank="{rank}",' if labelled else "",
        rows=1000 * look,
        updates=10 * look,
        act=look,
        forward=work * look,
        ranks=(9 - work) * look,
        rows_s=look,
    )


def learner(rank: int, labelled: bool = True) -> Callable[[str], str]:
    """Answers each look later than the one before."""
    seen = iter(range(1, 100))
    return lambda _: served(rank, next(seen), labelled)


Serve = Callable[[Callable[[str], str]], str]


def test_doctor_asks_all_learners_and_names_the_straggler(serve: Serve) -> None:
    addresses = f"{serve(learner(1))}, {serve(learner(0))}"
    seen = examine(None, addresses, None, 0.01, None, NOWHERE)
    assert [r.rank for r in seen.ranks] == [0, 1]
    said = io.StringIO()
    show(seen, Console(file=said, width=120))
    text = " ".join(said.getvalue().split())
    assert "rank environments rows/s waits for rows for ranks ms an update" in text
    assert "the others wait 40 % of their time for rank 1, whose updates take 800 ms" in text
    assert json.loads(as_json(seen))["ranks"][1]["rank"] == 1
    assert seen.rate == pytest.approx(sum(r.rate for r in seen.ranks))


def test_learners_of_no_one_run_are_refused(serve: Serve) -> None:
    addresses = ",".join(serve(learner(rank, labelled=False)) for rank in (0, 1))
    with pytest.raises(ConfigError, match=r"are 2 learners of ranks \[0, 0\]: give those of one"):
        from_metrics(addresses, 0.01)


@pytest.mark.parametrize("labelled", [True, False])
def test_prometheus_knows_all_learners_of_a_run(serve: Serve, labelled: bool) -> None:
    def answer(path: str) -> str:
        at = float(urllib.parse.parse_qs(urllib.parse.urlparse(path).query)["time"][0])

        def samples(rank: int) -> list[dict[str, Any]]:
            labels = {"instance": f"learner-{rank}"} | ({"rank": str(rank)} if labelled else {})

            def of(name: str, value: float, **more: str) -> dict[str, Any]:
                metric = {"__name__": f"murmur_learner_{name}", **labels, **more}
                return {"metric": metric, "value": [0, str(value)]}

            thread = {"thread": "inference", "state": "act"}
            return [
                of("rows_received_total", at * (rank + 1)),
                of("state_seconds_total", at, **thread),
            ]

        return json.dumps({"data": {"result": [*samples(1), *samples(0)]}})

    url = serve(answer)
    if not labelled:
        with pytest.raises(ConfigError, match="knows 2 learners at that time"):
            from_prometheus(url, 60.0)
        return
    both = from_prometheus(url, 60.0)
    rows = [after.rows - before.rows for before, after in both]
    assert rows == [pytest.approx(60, abs=0.01), pytest.approx(120, abs=0.01)]


def test_a_run_under_way_here_tells_where_its_learners_are(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    (tmp_path / "config.yaml").write_text("environment: {name: spread}\nalgorithm: {name: mappo}\n")
    (tmp_path / "learner.json").write_text(json.dumps({"pid": os.getpid(), "metrics_port": 7}))
    assert learners_of(run) == ""  # alone: its progress says more
    other = tmp_path / "learner-1.json"
    other.write_text(json.dumps({"pid": os.getpid(), "metrics_port": 8}))
    assert set(learners_of(run).split(",")) == {"http://127.0.0.1:7", "http://127.0.0.1:8"}
    other.write_text(json.dumps({"pid": 0, "metrics_port": 8}))
    assert learners_of(run) == ""

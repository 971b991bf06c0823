"""Real runs that do not learn, and one that does: what is said, and that it is said once."""

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from murmur.cli import app
from murmur.comparison.report import render_page
from murmur.learner_service.learning.stagnation import KIND
from murmur.runs.run_folder import RunFolder
from murmur.shared.wire.notices import FILE, read_notices
from tests.system.conftest import Training

pytestmark = [pytest.mark.system, pytest.mark.long, pytest.mark.timeout(1800)]

CART = """
environment: {name: gymnasium, factory: "gymnasium:make", arguments: {id: CartPole-v1}}
env_server: {num_workers: 1, envs_per_worker: 8, sessions_per_worker: 1, metrics_port: 0}
algorithm: {name: ippo, batch_size: 128, batch_number: 2, data_passes: 2}
network: {name: mlp, hidden: [16]}
learner: {port: 0, metrics_port: 0, log_every_s: 0.1, num_threads: 1, pipeline: sync}
"""
WHAT = "this run is no better than an untrained policy"


def said(run: Path) -> list[str]:
    return [notice.text for notice in read_notices(run / FILE) if notice.kind == KIND]


def test_a_run_says_once_that_it_does_not_learn(
    train: Callable[..., Training],
) -> None:
    uniform = ("--set", "algorithm.entropy_weight=5")
    first = train("run", *uniform, "--set", "run.max_env_steps=4000", whole=CART)
    assert first.wait(600) == 0, first.output()
    (text,) = said(first.run)
    assert "of run.max_env_steps=4,000 " + WHAT in text
    assert "(1) the policy stays as random as at first" in text
    assert "set algorithm.entropy_weight=0.01" in text
    unwrapped = " ".join(first.output().split())
    assert unwrapped.count(WHAT) == 1
    assert " ".join(text.split()) in unwrapped
    assert (first.run / "logs" / "learner.log").read_text().count(WHAT) == 1
    done = CliRunner().invoke(app, ["doctor", str(first.run), "--no-probe"])
    assert text in done.output
    assert WHAT in render_page(RunFolder.open(first.run), {})
    # Resumed, it is still judged, and said no more.
    again = train("run", *uniform, "--set", "run.max_env_steps=6000", "--resume", whole=CART)
    assert again.wait(600) == 0, again.output()
    assert said(first.run) == [text]
    assert WHAT not in again.output()


def test_a_run_that_learns_stays_silent(train: Callable[..., Training]) -> None:
    run = train("run", "--set", "run.max_env_steps=50000", whole=CART)
    assert run.wait(600) == 0, run.output()
    last = run.lines()[-1]["returns"]
    assert last["latest"]["mean"] > 1.5 * last["untrained"]["mean"]
    assert said(run.run) == []

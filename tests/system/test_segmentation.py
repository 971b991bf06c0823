"""A whole run of segmentation, in processes of its own: bit for bit, resumed, and measured."""

import json
from collections.abc import Callable

import pytest
import torch

from murmur.comparison.segmentation import load_trained, measure, open_source
from murmur.learner_service.checkpoint.folder import CheckpointFolder
from murmur.runs.run_folder import RunFolder
from tests.learner_service.algorithms.test_captured_updates import tensors
from tests.system.conftest import Training

pytestmark = [pytest.mark.system, pytest.mark.long]
PORTRAITS = """
source: {name: faces, size: 24, train: 10, valid: 4}
augment: {preset: strong, mixup: 0.3, cutmix: 0.3}
env_server: {num_workers: 1, metrics_port: 0}
algorithm: {name: segmentation, epochs: 4, batch_size: 4, evaluate_every_epochs: 2}
network: {name: segformer, widths: [8, 8], depths: [1, 1], heads: [1, 1], reductions: [2, 1]}
learner: {port: 0, metrics_port: 0, log_every_s: 0.000001, pipeline: sync}
"""
UPDATES = 4 * 3  # 10 portraits are 4, 4 and 2 in each epoch


@pytest.fixture
def trained(train: Callable[..., Training]) -> Callable[..., Training]:
    """Train to the end."""

    def finish(name: str, *arguments: str) -> Training:
        run = train(name, *arguments, whole=PORTRAITS)
        assert run.wait() == 0, run.output()
        return run

    return finish


def test_a_run_resumed_in_mid_epoch_is_equal_to_the_bit(trained: Callable[..., Training]) -> None:
    whole = trained("whole")
    trained("halves", "--set", "run.max_updates=5")
    halves = trained("halves", "--resume", "--set", "run.max_updates=0")
    losses, again = ({u: x for u, x in r.losses().items() if u} for r in (whole, halves))
    assert sorted(losses) == list(range(1, UPDATES + 1))
    assert again.pop(5) == {}  # the first line of the second half; no update was made in it yet
    del losses[5]
    assert again == losses
    ours, theirs = (
        tensors(CheckpointFolder(run.run, 1).load_latest()[1]["algorithm"])
        for run in (whole, halves)
    )
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    scores = [
        [e["metrics"]["f_score"]["mean"] for e in run.lines("evaluation") if e["updates"] > 5]
        for run in (whole, halves)
    ]
    assert scores[0] == scores[1]
    assert len(scores[0]) == 2  # after epochs 2 and 4


def test_best_checkpoint_scores_what_training_said(trained: Callable[..., Training]) -> None:
    run = trained("run")
    best = max(e["metrics"]["f_score"]["mean"] for e in run.lines("evaluation"))
    found, file = load_trained(RunFolder.open(run.run), "best")
    assert file.name == "best.pt"
    record = measure(found, open_source(found)).record("best.pt")
    assert record["f_score"] == pytest.approx(best, abs=1e-9)
    assert json.loads(json.dumps(record))["images"] == 4

"""Samples on the pretended GPU: one thread puts them, another takes batches; no race, no sync."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from murmur.learner_service.checkpoint.folder import CheckpointFolder
from murmur.learner_service.context import RunContext
from murmur.learner_service.device.streams import enter_stream
from murmur.learner_service.images.run import SupervisedRun
from murmur.learner_service.storage.samples import CacheChoice, SampleStore
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.config.section import validate
from murmur.shared.wire.samples import SPLITS
from tests.pretend_cuda import pretend_cuda
from tests.pretend_cuda.known import ALLOWED, unknown
from tests.supply.toy_source import ToySource
from tests.waiting import wait_until

SOURCE = ToySource(train=20, valid=5)


def send(samples: SampleStore, stop: threading.Event) -> None:
    """Answer requests, as the event loop does, until told to stop."""
    while not stop.is_set():
        request = samples.request(3)
        if request is None:
            stop.wait(0.001)
            continue
        split = SPLITS[request.split]
        lost = [i for i in request.indices if split == "valid" and i == 2]
        good = [SOURCE.read(split, i) for i in request.indices if i not in lost]
        arrays = {name: np.stack([s[name] for s in good]) for name in ("image", "mask")}
        samples.add(request, arrays, lost)


@pytest.mark.parametrize("places", [0, 9], ids=["cache", "window"])
def test_samples_are_clean_on_the_device(places: int) -> None:
    seen: list[int] = []
    with pretend_cuda(ALLOWED) as cuda:
        device, copied = torch.device("cuda"), {"to_device": 0}
        choice = CacheChoice("stream" if places else "device", "", places)
        samples = SampleStore(SOURCE.spec, 4, 1, choice, device, copied, ordered=False)
        stop = threading.Event()
        sender = threading.Thread(target=send, args=(samples, stop))
        sender.start()
        try:
            enter_stream(device)
            batches = []
            while samples.epoch < 2:
                batch = samples.sample(0, 0.1)
                if batch is not None:
                    batches.append(batch)
                    samples.done(batch)
            wait_until(lambda: samples.valid_ready(0.0), "the validation split")
            valid = list(samples.valid())
        finally:
            stop.set()
            sender.join()
        assert not unknown(list(cuda.report.faults))
        for batch in batches:
            index = batch.index.cpu().tolist()
            seen += index
            assert batch.arrays["image"][:, 0, 0, 0].cpu().tolist() == index
        assert torch.cat([image[:, 0, 0, 0] for image, _ in valid]).cpu().tolist() == [0, 1, 3, 4]
    assert sorted(seen) == sorted([*range(20)] * 2)
    sent = 44 if places else 24  # samples of 256 bytes
    assert copied["to_device"] >= sent * 256


def run_whole(
    folder: Path, epochs: int, checkpoint: tuple[Path, dict[str, Any]] | None = None
) -> SupervisedRun:
    """A supervised run to its last epoch, with its checkpoints and evaluations."""
    config = validate(
        ExperimentConfig,
        {
            "source": {"name": "faces"},
            "algorithm": {"name": "segmentation", "epochs": epochs, "batch_size": 4},
            "network": {"name": "unet", "channels": [8, 8], "groups": 4},
            "augment": {"preset": "minimal"},
            "learner": {"device": "cuda", "precision": "bf16", "metrics_port": 0, "port": 0},
        },
    )
    stop, ended = threading.Event(), threading.Event()
    run = SupervisedRun(RunContext(config, folder, checkpoint, False, stop))
    if checkpoint is None:
        run.open_source(SOURCE.spec)
    run.context.begin()
    learner, store = run.context.learner, run.sessions.store
    assert learner is not None
    assert store is not None
    sender = threading.Thread(target=send, args=(store, ended))
    sender.start()
    try:
        wait_until(learner.finished.is_set, "the last epoch")
    finally:
        ended.set()
        sender.join()
        stop.set()
    run.context.finish()
    run.context.close()
    return run


def test_a_supervised_run_is_clean_and_resumes(tmp_path: Path) -> None:
    with pretend_cuda(ALLOWED) as cuda:
        first = run_whole(tmp_path, 2)
        assert (first.context.progress.updates, first.context.progress.epochs) == (10, 2)
        replays = first.context.metrics.graph_calls()["graph_replays"]
        assert sum(replays.values()) > 0
        assert {f.name for f in (tmp_path / "figures").iterdir()} == {"masks.png", "confusion.png"}
        second = run_whole(tmp_path, 3, CheckpointFolder(tmp_path, 2).load_latest())
        assert (second.context.progress.updates, second.context.progress.epochs) == (15, 3)
        assert not unknown(list(cuda.report.faults))

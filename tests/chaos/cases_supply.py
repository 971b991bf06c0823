"""Supply servers and learners that are killed in the middle of an epoch."""

import io
import json
import os
import re
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

from murmur.learner_service.checkpoint.folder import CheckpointFolder
from murmur.runs.child import child_environment, murmur_command
from tests.chaos.cases import Case
from tests.chaos.stack import Stack
from tests.learner_service.networks.plugged import install
from tests.waiting import wait_until

_TRAIN, _BROKEN = 90, (4, 50)
_COUNTING = "from tests.supply.counting import SUPERVISED, Config, build\n"


class Supplied:
    """A run on the toy source, and what it has noted; `with` ends it."""

    def __init__(self, folder: Path, epochs: int = 2, **sections: dict[str, Any]) -> None:
        folder.mkdir(exist_ok=True)
        self.log = folder / "batches.jsonl"
        self.log.touch()
        source = {"train": _TRAIN, "valid": 5, "pause_s": 0.004, "broken": list(_BROKEN)}
        config = {
            "source": {"name": "tests.supply.toy_source:ToySource", **source},
            "supply": {"cache": "stream", "window": 12, **sections.get("supply", {})},
            "env_server": {"num_workers": 1, "reconnect_max_s": 0.5},
            "algorithm": {
                "name": "counting",
                "log": str(self.log),
                "batch_size": 4,
                "epochs": epochs,
                "pause_s": 0.01,
            },
            "learner": {
                "device": "cpu",
                "log_every_s": 0.1,
                "checkpoint_every_updates": 5,
                **sections.get("learner", {}),
            },
        }
        install(folder, "counting", _COUNTING, "algorithms")
        path = os.pathsep.join([str(folder), child_environment()["PYTHONPATH"]])
        self._more = {"PYTHONPATH": path}
        self.stack = Stack(folder, config)
        self._servers = 0

    def __enter__(self) -> "Supplied":
        return self

    def __exit__(self, *error: object) -> None:
        self.stack.__exit__(None, None, None)

    def start_learner(self) -> None:
        self.stack.start_learner(more=self._more)

    def start_server(self) -> None:
        self.stack.start_server(first_worker=self._servers, more=self._more)
        self._servers += 1

    def batches(self) -> list[dict[str, Any]]:
        """All updates that were begun, in the order of time."""
        lines = self.log.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def wait_for_updates(self, count: int) -> None:
        wait_until(lambda: len(self.batches()) >= count, f"{count} updates")

    def finish(self) -> dict[str, float]:
        """Wait for the learner's end; the counters that outlive it."""
        learner = self.stack.learner
        assert learner is not None
        wait_until(lambda: learner.process.poll() is not None, learner.text)
        assert learner.process.returncode == 0, learner.text()
        assert "Traceback" not in learner.text()
        from murmur.learner_service.telemetry.persistent_counters import PersistentCounters

        return PersistentCounters(self.stack.run / "counters.bin").items()

    def weight(self) -> float:
        """The weight of the latest checkpoint."""
        folder = CheckpointFolder(self.stack.run, 1)
        _, state = folder.load_latest()
        return float(state["algorithm"]["parts"]["network"]["weight"])


def surviving(batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The updates that count: a process that resumes begins with an earlier number again."""
    last = {batch["update"]: batch for batch in batches}
    return [last[number] for number in sorted(last)]


def check_epochs(batches: list[dict[str, Any]], epochs: int) -> None:
    """Each sample was trained once in each epoch."""
    wanted = Counter(set(range(_TRAIN)) - set(_BROKEN))
    for epoch in range(epochs):
        of_epoch = [batch for batch in batches if batch["epoch"] == epoch]
        assert Counter(i for batch in of_epoch for i in batch["index"]) == wanted
        assert [batch["ends"] for batch in of_epoch] == [False] * (len(of_epoch) - 1) + [True]


def counted(counters: dict[str, float], name: str) -> float:
    """A counter's sum over its labels."""
    return sum(value for key, value in counters.items() if json.loads(key)[0] == name)


def server_dies(folder: Path) -> dict[str, Any]:
    """One of two supply servers is killed in the middle of an epoch; nothing is trained twice."""
    with Supplied(folder) as run:
        run.start_learner()
        run.start_server()
        run.start_server()
        wait_until(lambda: run.stack.metric('sessions{mode="supply"}') == 2, "two sessions")
        run.wait_for_updates(3)
        victim = run.stack.servers[1]
        victim.end(signal.SIGKILL)
        counters = run.finish()
        check_epochs(run.batches(), 2)
        batches = run.batches()
    trained = (_TRAIN - len(_BROKEN)) * 2
    assert counted(counters, "rows_trained") == trained
    assert counted(counters, "rows_undone") == 0
    assert counted(counters, "samples_broken") == len(_BROKEN)
    reassigned = counted(counters, "samples_reassigned")
    assert 0 < reassigned <= 24, "the windows of both sessions, at most"
    return {"samples asked of another server": reassigned, "updates": len(batches)}


def learner_dies(folder: Path, *, sync: bool = False) -> dict[str, Any]:
    """The learner is killed in the middle of an epoch; what it had not saved is done again."""
    learner = {"pipeline": "sync"} if sync else {}
    with Supplied(folder / "killed", learner=learner) as run:
        run.start_learner()
        run.start_server()
        run.start_server()
        run.wait_for_updates(8)
        assert run.stack.learner is not None
        run.stack.learner.end(signal.SIGKILL)
        before = len(run.batches())
        run.start_learner()
        counters = run.finish()
        batches, weight = run.batches(), run.weight()
    check_epochs(surviving(batches), 2)
    again = batches[before]["update"]  # the first update after the checkpoint
    assert again % 5 == 0
    assert 0 < again <= before
    trained = (_TRAIN - len(_BROKEN)) * 2
    undone = counted(counters, "rows_undone")
    assert counted(counters, "rows_trained") - undone == trained
    assert 4 * (before - again - 1) <= undone <= 4 * (before - again)
    if sync:
        with Supplied(folder / "whole", learner=learner) as run:
            run.start_learner()
            run.start_server()
            run.finish()
            assert [b["index"] for b in run.batches()] == [b["index"] for b in surviving(batches)]
            assert run.weight() == weight
    return {"samples undone": undone, "updates done again": before - again}


def _write_damaged(root: Path) -> None:
    """24 images with masks of 0 and 255; the third is cut off and closed, the seventh has zeros."""
    rng = np.random.default_rng(0)
    (root / "images").mkdir(parents=True)
    (root / "masks").mkdir()
    (root / "classes.txt").write_text("ground\nobject\n")
    for i in range(24):
        mask = np.zeros((64, 64), np.uint8)
        y, x = rng.integers(8, 40, 2)
        mask[y : y + 16, x : x + 16] = 255
        image = rng.integers(0, 120, (64, 64, 3)).astype(np.uint8) + mask[..., None] // 3
        out = io.BytesIO()
        Image.fromarray(image).save(out, "JPEG", quality=90)
        data, third = out.getvalue(), len(out.getvalue()) // 3
        if i == 3:
            data = data[:third] + b"\xff\xd9"
        if i == 7:
            data = data[:third] + bytes(len(data) - third - 2) + b"\xff\xd9"
        (root / f"images/{i:03}.jpg").write_bytes(data)
        Image.fromarray(mask).save(root / f"masks/{i:03}.png")


def damaged_images(folder: Path) -> dict[str, Any]:
    """A run of damaged images and of masks whose 255 means a class says both, and names files."""
    folder.mkdir(exist_ok=True)
    _write_damaged(folder / "data")
    config = {
        "source": {"name": "folder", "path": str(folder / "data"), "size": 32},
        "algorithm": {"name": "segmentation", "epochs": 2, "batch_size": 8},
        "network": {"name": "unet", "channels": [8, 8], "groups": 4},
        "env_server": {"num_workers": 1, "metrics_port": 0},
        "learner": {"port": 0, "metrics_port": 0, "device": "cpu"},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    command = murmur_command(
        *("train", str(folder / "run.yaml"), "--run", str(folder / "run"), "--no-page")
    )
    began = time.monotonic()
    done = subprocess.run(
        command, capture_output=True, text=True, env=child_environment(), timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = " ".join(done.stdout.split())
    for words in (
        "! class 'object' (1) is in none of 20 training samples: not learned. 255 is ignored",
        "set source.values=[0, 255]",
        "! images are resized from 64×64 to 32×32 (source.size)",
        "f_score 0.000",
    ):
        assert words in said, said
    log = (folder / "run" / "logs" / "learner.log").read_text()
    assert log.count("is left out, unreadable:") == 2, log
    assert "003.jpg is damaged: Corrupt JPEG data: premature end" in log
    assert "007.jpg is damaged: Corrupt JPEG data: " in log
    assert not re.search("^Corrupt JPEG", (folder / "run/logs/env-server.log").read_text(), re.M)
    return {"seconds": time.monotonic() - began}


CASES = [
    Case("damaged images, masks of 255", damaged_images),
    Case("a supply server is killed in mid-epoch", server_dies),
    Case("the learner is killed in mid-epoch", learner_dies),
]

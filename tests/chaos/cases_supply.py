"""Supply servers and learners that are killed in the middle of an epoch."""

import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

from learner_service.checkpoint import CheckpointFolder
from murmur.child import child_environment
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
        from learner_service.telemetry.persistent_counters import PersistentCounters

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


CASES = [
    Case("a supply server is killed in mid-epoch", server_dies),
    Case("the learner is killed in mid-epoch", learner_dies),
]

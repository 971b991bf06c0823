"""SUPPLY sessions that answer late, twice, out of order or not at all: no sample counts twice."""

import json
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.config.section import validate
from murmur.shared.rpc import rollout_pb2 as pb
from murmur.shared.wire.sample_codec import Grant, broken_sample
from murmur.shared.wire.samples import SPLITS
from tests.learner_service.images.test_supply import SOURCE, Supplier
from tests.learner_service.networks.plugged import install
from tests.learner_service.running import RunningLearner, running_learner
from tests.waiting import wait_until

TRAIN = SOURCE.spec.sizes[0]
EPOCHS = 6


@pytest.fixture
def plugged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The algorithm that notes every sample it learns from, and where it notes them."""
    folder = tmp_path / "plugged"
    folder.mkdir()
    what = "from tests.supply.counting import SUPERVISED, Config, build\n"
    monkeypatch.syspath_prepend(str(install(folder, "counting", what, "algorithms")))
    yield folder / "batches.jsonl"
    sys.modules.pop("plugged_counting", None)


def config(log: Path, cache: str, **learner: Any) -> ExperimentConfig:
    algorithm = {
        **{"name": "counting", "log": str(log), "pause_s": 0.01},
        **{"batch_size": 5, "epochs": EPOCHS},
    }
    data = {
        "env_server": {"step_timeout_s": 0.01},
        "source": {"name": "toy"},
        "supply": {"window": 8, "cache": cache},
        "algorithm": algorithm,
        "learner": {"port": 0, "metrics_port": 0, "device": "cpu", "num_threads": 1, **learner},
    }
    return validate(ExperimentConfig, data)


def answers(supplier: Supplier, grant: Grant) -> list[bytes]:
    samples = [SOURCE.read(SPLITS[grant.split], i) for i in grant.indices]
    return supplier.codec.messages(grant, samples, [])


def check_epochs(log: Path, epochs: int = EPOCHS) -> None:
    """Each sample was trained once in each epoch."""
    batches = [json.loads(line) for line in log.read_text().splitlines()]
    for epoch in range(epochs):
        trained = Counter(i for b in batches if b["epoch"] == epoch for i in b["index"])
        assert trained == Counter(range(TRAIN)), epoch


def supply(port: int) -> None:
    """An orderly session, until the run ends."""
    try:
        with Supplier(port).welcomed() as supplier:
            while True:
                supplier.answer(supplier.grant())
    except (grpc.RpcError, StopIteration):
        return


def twice(supplier: Supplier, grants: list[Grant]) -> str:
    for message in answers(supplier, grants[0]) * 2:
        supplier.send(message)
    return "samples of grant 1 came, expected 2"


def twice_in_between(supplier: Supplier, grants: list[Grant]) -> str:
    for grant in (grants[0], grants[1], grants[0]):
        supplier.answer(grant)
    return "samples of grant 1 came, expected 3"


def out_of_order(supplier: Supplier, grants: list[Grant]) -> str:
    supplier.answer(grants[1])
    return "samples of grant 2 came, expected 1"


def of_no_grant(supplier: Supplier, grants: list[Grant]) -> str:
    supplier.answer(grants[0]._replace(sequence=99))
    return "samples of grant 99 came, expected 1"


def fewer(supplier: Supplier, grants: list[Grant]) -> str:
    supplier.answer(grants[0]._replace(indices=grants[0].indices[:1]))
    return "part 0 with 256 bytes of samples came, expected part 0"


def broken_twice(supplier: Supplier, grants: list[Grant]) -> str:
    lost = [broken_sample(grants[0].indices[0], "unreadable", "x.png")]
    (message,) = supplier.codec.messages(grants[0], [], lost)
    supplier.send(message)
    supplier.send(message)
    return "broken samples of grant 1 come with arrays or after them"


def hello_again(supplier: Supplier, grants: list[Grant]) -> str:
    supplier.send(pb.WorkerMessage(hello=pb.Hello(worker_id="s-1")).SerializeToString())
    return "expected message 'samples', got 'hello'"


DISORDERS: dict[Callable[[Supplier, list[Grant]], str], int] = {  # with samples that count
    twice: 4,
    twice_in_between: 8,
    out_of_order: 0,
    of_no_grant: 0,
    fewer: 0,
    broken_twice: 0,
    hello_again: 0,
}


@pytest.mark.parametrize("cache", ["stream", "device"])
def test_a_disorderly_session_ends_and_counts_nothing_twice(
    tmp_path: Path, plugged: Path, cache: str
) -> None:
    with running_learner(tmp_path / "run", config(plugged, cache)) as learner:
        counted = 0
        for disorder, kept in DISORDERS.items():
            with Supplier(learner.port).welcomed() as supplier:
                words = disorder(supplier, [supplier.grant() for _ in range(2)])
                code, details = supplier.refused()
            assert (code, words in details) == ("INVALID_ARGUMENT", True), details
            counted += kept
            assert learner.metric("samples_received_total") == counted
        supply(learner.port)
    check_epochs(plugged)


@pytest.mark.parametrize("cache", ["stream", "device"])
def test_samples_after_their_grant_went_to_another_are_not_kept(
    tmp_path: Path, plugged: Path, cache: str
) -> None:
    """A session is silent until it is given up, and answers then, and comes back."""
    settings = config(plugged, cache, session_timeout_s=0.05)
    with running_learner(tmp_path / "run", settings) as learner:
        late = Supplier(learner.port).welcomed()
        grants = [late.grant() for _ in range(2)]
        wait_until(lambda: learner.metric("samples_reassigned_total") == 8, "8 samples come back")
        other = threading.Thread(target=supply, args=(learner.port,))
        other.start()
        for grant in grants:
            late.answer(grant)
        assert late.refused()[0] == "DEADLINE_EXCEEDED"
        with late:
            supply(learner.port)
        other.join(60)
    check_epochs(plugged)


def misbehave(learner: RunningLearner, rng: np.random.Generator, ended: list[str]) -> None:
    """Sessions that do something wrong in their last message or end in the middle."""
    while True:
        try:
            with Supplier(learner.port).welcomed() as supplier:
                open_grants = [supplier.grant()]
                for _ in range(rng.integers(4)):
                    supplier.answer(open_grants.pop(0))
                    open_grants.append(supplier.grant())
                wrong = rng.integers(5)
                if wrong == 0:
                    ended.append("gone")
                    continue  # with what it owes
                sequence = open_grants[0].sequence + int(wrong) - 2
                supplier.answer(open_grants[0]._replace(sequence=max(0, sequence)))
                if wrong == 2:
                    supplier.answer(open_grants[0])
                ended.append(supplier.refused()[0])
        except (grpc.RpcError, StopIteration, AssertionError):
            return  # the run is over


@pytest.mark.parametrize("cache", ["stream", "device"])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_many_disorderly_sessions_cost_no_sample(
    tmp_path: Path, plugged: Path, cache: str, seed: int
) -> None:
    with running_learner(tmp_path / "run", config(plugged, cache)) as learner:
        ended: list[str] = []
        threads = [
            threading.Thread(
                target=misbehave, args=(learner, np.random.default_rng([seed, number]), ended)
            )
            for number in range(2)
        ]
        for thread in threads:
            thread.start()
        supply(learner.port)
        for thread in threads:
            thread.join(60)
    check_epochs(plugged)
    if cache == "stream":  # else each sample is asked for once, and they have few to answer
        assert len(ended) > 4
        assert "INVALID_ARGUMENT" in ended


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"sizes": (TRAIN + 1, 4)}, "sizes: (24, 4) here, (25, 4) there"),
        ({"digest": "f" * 64}, "are not the same on all servers, or not those the run began with"),
        pytest.param(
            {"classes": ("none", "two", "one")},
            "classes: ('none', 'one', 'two') here",
            marks=pytest.mark.long,
        ),
        pytest.param(
            {"ignore_index": 254}, "ignore_index: 255 here, 254 there", marks=pytest.mark.long
        ),
    ],
    ids=["length", "files", "classes", "ignored"],
)
def test_a_source_that_changed_before_a_resume_is_refused(
    tmp_path: Path, plugged: Path, changed: dict[str, Any], words: str
) -> None:
    settings = config(plugged, "stream")
    with (
        running_learner(tmp_path / "run", settings) as learner,
        Supplier(learner.port).welcomed() as supplier,
    ):
        while not plugged.exists() or plugged.read_text().count("\n") < 3:
            supplier.answer(supplier.grant())
        learner.stop()
    with running_learner(tmp_path / "run", settings, resume=True) as learner:
        for _ in range(2):  # the first refusal changes nothing
            other = replace(SOURCE.spec, **changed)
            with Supplier(learner.port, source=other) as supplier:
                code, details = supplier.refused()
            assert code == "FAILED_PRECONDITION"
            assert words in details
            assert "begin a new one, with run.start_from for its weights" in details
        supply(learner.port)
    check_epochs(plugged)

"""Captured functions: the same numbers as eager calls, one graph per signature, eager fallback."""

import itertools
import logging
import threading
from collections.abc import Iterator, Mapping

import pytest
import torch
from torch import Tensor

from murmur.learner_service.device import cuda_graph
from murmur.learner_service.device.cuda_graph import (
    CALLS_TO_CAPTURE,
    WARM_UP_CALLS,
    Captured,
    Graphs,
)
from tests.learner_service.toys import CPU
from tests.pretend_cuda import pretend_cuda

GPU = torch.device("cuda", 0)


@pytest.fixture
def cuda() -> Iterator[None]:
    """A pretended GPU; its graphs execute what was recorded."""
    with pretend_cuda():
        yield


class Walk:
    """A random walk of weights; counts how often Python runs."""

    def __init__(self, device: torch.device = GPU) -> None:
        self.weights = torch.ones(3, device=device)
        self.generator = torch.Generator(device).manual_seed(1)
        self.python_calls = 0

    def step(self, rows: Mapping[str, Tensor], scale: float = 1.0) -> dict[str, Tensor]:
        self.python_calls += 1
        noise = torch.empty_like(self.weights).normal_(generator=self.generator)
        self.weights.add_(noise * rows["x"].sum(0) * scale)
        return {"sum": self.weights.sum(), "weights": self.weights * 2}


def rows(size: int, seed: int, device: torch.device = GPU) -> dict[str, Tensor]:
    x = torch.arange(3.0 * size, device=device).view(size, 3)
    return {"x": x * (seed + 1), "id": torch.arange(size, device=device)}


def test_on_a_cpu_every_call_is_eager() -> None:
    graphs, walk = Graphs(CPU), Walk(CPU)
    captured = Captured("walk", walk.step, graphs, [walk.generator])
    for seed in range(6):
        captured(rows(4, seed, CPU))
    assert not graphs.enabled
    assert walk.python_calls == 6
    assert graphs.eager_calls == {"walk": 6}
    assert not graphs.replays


def test_disabled_graphs_stay_eager_on_cuda() -> None:
    assert Graphs(torch.device("cuda")).enabled
    assert not Graphs(torch.device("cuda"), enabled=False).enabled


@pytest.mark.usefixtures("cuda")
def test_replays_equal_eager_calls_to_the_bit() -> None:
    graphs, walk, eager = Graphs(GPU), Walk(), Walk()
    captured = Captured("walk", walk.step, graphs, [walk.generator])
    for seed in range(12):
        size = 4 if seed % 3 else 7  # two signatures in turns
        got, expected = captured(rows(size, seed)), eager.step(rows(size, seed))
        assert all(torch.equal(got[name], expected[name]) for name in expected)
        assert torch.equal(walk.weights, eager.weights)
        assert torch.equal(walk.generator.get_state(), eager.generator.get_state())
    assert graphs.eager_calls["walk"] == 2 * WARM_UP_CALLS
    assert graphs.replays["walk"] == 12 - 2 * WARM_UP_CALLS
    assert walk.python_calls == 2 * WARM_UP_CALLS + 2  # each captured once


@pytest.mark.usefixtures("cuda")
def test_options_are_part_of_the_signature() -> None:
    graphs, walk, eager = Graphs(GPU), Walk(), Walk()
    captured = Captured("walk", walk.step, graphs, [walk.generator], warm_up_calls=1)
    for seed in range(8):
        scale = float(1 + seed % 2)
        captured(rows(4, seed), scale=scale)
        eager.step(rows(4, seed), scale=scale)
    assert torch.equal(walk.weights, eager.weights)
    assert graphs.replays["walk"] == 6


@pytest.mark.usefixtures("cuda")
def test_the_least_recently_used_graph_leaves() -> None:
    graphs, walk = Graphs(GPU), Walk()
    captured = Captured("walk", walk.step, graphs, [walk.generator], warm_up_calls=1, max_graphs=2)
    for size in (1, 1, 2, 2, 1, 3, 3):  # 2 leaves for 3
        captured(rows(size, 0))
    before = walk.python_calls
    captured(rows(1, 0))
    assert walk.python_calls == before
    captured(rows(2, 0))
    assert walk.python_calls == before + 1
    assert graphs.signatures == {"walk": 3}  # 2, which has left, is seen once
    assert graphs.captures["walk"] == 4
    assert graphs.counts()["graph_signatures"] == {("walk",): 3}
    assert graphs.counts()["graph_capture_seconds"]["walk",] > 0


@pytest.mark.usefixtures("cuda")
def test_in_place_captures_read_the_callers_tensors() -> None:
    graphs, walk, eager = Graphs(GPU), Walk(), Walk()
    captured = Captured("walk", walk.step, graphs, [walk.generator], warm_up_calls=1, in_place=True)
    buffer = rows(4, 0)
    for seed in range(5):
        for name, value in rows(4, seed).items():
            buffer[name].copy_(value)
        captured(buffer)
        eager.step(rows(4, seed))
    assert graphs.replays["walk"] == 4
    elsewhere = rows(4, 9)
    captured(elsewhere)  # other addresses: another signature
    eager.step(rows(4, 9))
    assert graphs.eager_calls["walk"] == 2
    assert torch.equal(walk.weights, eager.weights)


@pytest.mark.usefixtures("cuda")
def test_reset_captures_replaced_tensors_again() -> None:
    graphs, walk = Graphs(GPU), Walk()
    captured = Captured("walk", walk.step, graphs, [walk.generator], warm_up_calls=1)
    for seed in range(3):
        captured(rows(4, seed))
    walk.weights = torch.zeros(3, device=GPU)
    graphs.reset()
    for seed in range(3):
        out = captured(rows(4, seed))
    assert torch.equal(out["weights"], walk.weights * 2)
    assert graphs.eager_calls["walk"] == 2
    assert graphs.replays["walk"] == 4


class Failing(Walk):
    """Cannot be captured, which shows after it has drawn and written."""

    error: RuntimeError | None = None

    def step(self, rows: Mapping[str, Tensor], scale: float = 1.0) -> dict[str, Tensor]:
        out = super().step(rows, scale)
        if self.error is not None and self.python_calls > WARM_UP_CALLS:
            failure, self.error = self.error, None
            raise failure
        return out


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("operation not permitted when stream is capturing"), "capture"),
        (torch.OutOfMemoryError("CUDA out of memory"), "memory"),
    ],
)
def test_a_failed_capture_leaves_what_eager_calls_leave(
    error: RuntimeError, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    graphs, walk, eager = Graphs(GPU), Failing(), Walk()
    walk.error = error
    recovered: list[int] = []
    captured = Captured(
        "walk",
        walk.step,
        graphs,
        [walk.generator],
        recover=lambda: recovered.append(walk.python_calls),
    )
    with caplog.at_level(logging.WARNING):
        for seed in range(8):
            got, expected = captured(rows(4, seed)), eager.step(rows(4, seed))
            assert torch.equal(got["weights"], expected["weights"])
    assert torch.equal(walk.generator.get_state(), eager.generator.get_state())
    assert graphs.fallbacks == {("walk", reason): 1}
    assert graphs.eager_calls["walk"] == 8
    left = cuda_graph._RETRY_CALLS - 2  # a failure drops graphs: three of the calls warm up again
    assert graphs.counts()["graph_retry_calls"] == {("walk",): left}
    assert graphs.eager_s["walk"] > 0
    assert graphs.capture_s["walk"] > 0
    assert not graphs.replays
    assert recovered == [WARM_UP_CALLS + 1]
    [record] = caplog.records
    assert f"'walk' cannot be captured ({reason})" in record.message
    assert str(error) in record.message
    assert "cuda_graph=false" in record.message


@pytest.mark.usefixtures("cuda")
def test_a_failed_capture_is_tried_again_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graph, "_RETRY_CALLS", 5)
    monkeypatch.setattr(cuda_graph, "_RETRY_LATER", 2)

    class FailsTwice(Walk):
        failures = 2

        def step(self, rows: Mapping[str, Tensor], scale: float = 1.0) -> dict[str, Tensor]:
            out = super().step(rows, scale)
            if torch.cuda.is_current_stream_capturing() and self.failures:
                self.failures -= 1
                raise RuntimeError("not permitted")
            return out

    graphs, walk, eager = Graphs(GPU), FailsTwice(), Walk()
    captured = Captured("walk", walk.step, graphs, [walk.generator])
    for seed in range(60):
        got, expected = captured(rows(4, seed)), eager.step(rows(4, seed))
        assert torch.equal(got["weights"], expected["weights"])
    assert graphs.fallbacks == {("walk", "capture"): 2}
    assert graphs.captures == {"walk": 1}
    assert graphs.retry_calls == {"walk": 0}  # it was captured since
    assert graphs.replays["walk"] > 20
    assert torch.equal(walk.generator.get_state(), eager.generator.get_state())


@pytest.mark.usefixtures("cuda")
def test_a_capture_that_always_fails_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graph, "_RETRY_CALLS", 2)

    def step(given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("not permitted")
        return {"sum": given["x"].sum()}

    graphs = Graphs(GPU)
    captured = Captured("sum", step, graphs)
    for seed in range(400):
        captured(rows(4, seed))
    assert graphs.fallbacks == {("sum", "capture"): 3}
    assert graphs.retry_calls == {"sum": cuda_graph.NEVER}
    assert graphs.eager_calls["sum"] == 400


@pytest.mark.usefixtures("cuda")
def test_an_error_of_an_eager_call_is_the_callers() -> None:
    def out_of_memory(rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    graphs = Graphs(GPU)
    captured = Captured("big", out_of_memory, graphs)
    with pytest.raises(torch.OutOfMemoryError):
        captured(rows(4, 0))
    assert not graphs.fallbacks


@pytest.mark.usefixtures("cuda")
def test_eager_work_of_another_thread_waits_for_a_capture() -> None:
    graphs, begun, seen = Graphs(GPU), threading.Event(), list[bool]()
    calls = itertools.count(1)

    def work() -> None:
        with Graphs(GPU).eager(), Graphs(GPU).eager():  # nested, as of another team
            begun.set()

    thread = threading.Thread(target=work)

    def step(rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if next(calls) == CALLS_TO_CAPTURE:
            thread.start()
            seen.append(begun.wait(0.1))
        return {"sum": rows["x"].sum()}

    captured = Captured("sum", step, graphs)
    for seed in range(CALLS_TO_CAPTURE):
        captured(rows(4, seed))
    thread.join(5)
    assert seen == [False]
    assert begun.is_set()
    assert graphs.replays["sum"] == 1


def test_calls_of_a_known_shape_wait_for_no_capture() -> None:
    graphs = Graphs(GPU)

    def call(size: int) -> None:
        with graphs.eager("act", size):
            pass

    def waits(size: int) -> bool:
        thread = threading.Thread(target=call, args=(size,))
        with Graphs(GPU).eager():
            thread.start()
            thread.join(0.2)
            waited = thread.is_alive()
        thread.join(5)
        return waited

    assert [waits(size) for size in (3, 4, 3, 4, 5)] == [True, True, False, False, True]


@pytest.mark.usefixtures("cuda")
def test_a_capture_waits_for_eager_work_of_another_thread() -> None:
    graphs, begun, leave = Graphs(GPU), threading.Event(), threading.Event()

    def work() -> None:
        with Graphs(GPU).eager():
            begun.set()
            leave.wait(5)

    walk, thread = Walk(), threading.Thread(target=work)
    captured = Captured("walk", walk.step, graphs, [walk.generator], warm_up_calls=1)
    captured(rows(4, 0))
    thread.start()
    assert begun.wait(5)
    threading.Timer(0.1, leave.set).start()
    captured(rows(4, 1))
    assert leave.is_set()
    assert graphs.replays["walk"] == 1
    thread.join(5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_a_gpu_new_shapes_beside_a_capture_harm_neither() -> None:
    stop, failed = threading.Event(), list[Exception]()
    graphs, others = Graphs(GPU), Graphs(GPU)
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU()).to(GPU)

    def work() -> None:  # a library's first call for a shape does what no capture allows
        size = 5
        with torch.cuda.stream(torch.cuda.Stream(GPU)):
            while not stop.is_set():
                try:
                    with others.eager():
                        net(torch.randn(2, 3, size, size, device=GPU)).sum().backward()
                except RuntimeError as error:
                    failed.append(error)
                    return
                size += 1 + size % 7

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for i in range(20):
            captured = Captured(
                "many", lambda x: {"y": sum(x["x"] * i for i in range(200))}, graphs
            )
            for seed in range(WARM_UP_CALLS + 2):
                captured(rows(4 + i, seed))
    finally:
        stop.set()
        thread.join(30)
    assert not failed
    assert not graphs.fallbacks
    assert graphs.replays["many"] == 40


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_a_gpu_a_wait_in_a_capture_falls_back() -> None:
    class Waiting(Walk):
        def step(self, rows: Mapping[str, Tensor], scale: float = 1.0) -> dict[str, Tensor]:
            out = super().step(rows, scale)
            float(out["sum"])  # illegal while a stream is captured
            return out

    graphs, walk, waiting, eager = Graphs(GPU), Walk(), Waiting(), Walk()
    waiting.generator = walk.generator  # one generator, as of one algorithm
    waits = Captured("waits", waiting.step, graphs, [walk.generator])
    captured = Captured("walk", walk.step, graphs, [walk.generator])
    other = Walk()
    other.generator = eager.generator
    for seed in range(12):
        waits(rows(4, seed))
        captured(rows(4, seed))
        other.step(rows(4, seed))
        eager.step(rows(4, seed))
    assert graphs.fallbacks == {("waits", "capture"): 1}
    assert graphs.replays["walk"] > 0
    assert torch.equal(walk.generator.get_state(), eager.generator.get_state())
    torch.testing.assert_close(waiting.weights, other.weights)
    torch.testing.assert_close(walk.weights, eager.weights)

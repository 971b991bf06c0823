"""Every second is in one state, and all of them add up."""

import threading
import time

import pytest

from murmur.shared.process import ledger
from murmur.shared.process.ledger import Ledger, ThreadClock


def test_states_follow_each_other_and_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 12.0, 15.0, 19.0, 20.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    book = Ledger("learner")
    assert book.enter("sample") == "start"  # at 12
    assert book.enter("update") == "sample"  # at 15
    assert book.enter("sample") == "update"  # at 19
    assert book.seconds() == {"start": 2.0, "sample": 3.0 + 1.0, "update": 4.0}  # at 20


def test_code_finds_the_ledger_of_its_thread() -> None:
    assert ledger.enter("anything") is None  # this thread keeps none
    with ledger.state("anything"):
        pass
    seen: list[dict[str, float]] = []

    def work() -> None:
        book = Ledger("worker")
        book.adopt()
        ledger.enter("outer")
        with ledger.state("inner"):
            pass
        assert ledger.enter("end") == "outer"
        seen.append(book.seconds())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert set(seen[0]) == {"start", "outer", "inner", "end"}


def test_a_reader_never_sees_time_twice_or_not_at_all() -> None:
    earliest = time.perf_counter()
    book = Ledger("busy")
    latest = time.perf_counter()
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            book.enter("a")
            book.enter("b")

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(2000):
            least = time.perf_counter() - latest
            total = sum(book.seconds().values())
            most = time.perf_counter() - earliest
            assert least - 1e-6 <= total <= most + 1e-6  # rounding of sums
    finally:
        stop.set()
        thread.join()


def test_a_thread_clock_tells_working_from_waiting() -> None:
    go, stop = threading.Event(), threading.Event()

    def work() -> None:
        go.wait()
        while not stop.is_set():
            sum(range(1000))

    thread = threading.Thread(target=work, name="loop")
    thread.start()
    clock = ThreadClock(thread)
    idle = clock.seconds()
    go.set()
    while clock.seconds()["serve"] < 0.05:
        pass
    both = clock.seconds()
    stop.set()
    thread.join()
    assert clock.thread == "loop"
    assert idle["serve"] < 0.05 <= both["serve"]
    assert both["wait"] >= 0


def test_processor_time_outlives_its_thread() -> None:
    book = Ledger("worker")
    assert book.cpu_seconds() == 0.0
    seen: list[float] = []

    def work() -> None:
        book.adopt()
        until = time.thread_time() + 0.01
        while time.thread_time() < until:
            pass
        seen.append(book.cpu_seconds())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen[0] >= 0.01
    assert book.cpu_seconds() >= 0.01

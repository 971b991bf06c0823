"""Busy time of the device: overlaps count once, and nothing waits for it."""

import time

import pytest
import torch

from murmur.learner_service.telemetry.device_clock import DeviceClock

CPU = torch.device("cpu")


def test_overlapping_work_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    clock = DeviceClock(CPU)
    update = clock.working("update")
    update.__enter__()  # from 0 to 5
    now = 101.0
    with clock.working("act"):  # from 1 to 2
        now = 102.0
    now = 105.0
    update.__exit__(None, None, None)
    now = 109.0
    with clock.working("act"):  # from 9 to 10
        now = 110.0
    total, by_kind = clock.seconds()
    assert by_kind == {"update": 5.0, "act": 2.0}
    assert total == 5.0 + 1.0
    assert clock.beside() == 1.0


def test_work_under_way_counts_once_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 10.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    clock = DeviceClock(CPU)
    with clock.working("act"):  # from 10 to 11
        now = 11.0
    now = 12.0
    update = clock.working("update")
    update.__enter__()  # from 12 to 16
    now = 13.0
    with clock.working("act"):  # from 13 to 14: beside the update, however long that will last
        now = 14.0
    assert clock.seconds() == (1.0, {"act": 1.0})
    now = 16.0
    update.__exit__(None, None, None)
    assert clock.seconds() == (5.0, {"act": 2.0, "update": 4.0})
    assert clock.beside() == 1.0


def test_pieces_that_nobody_asks_for_are_counted_now_and_then() -> None:
    clock = DeviceClock(CPU)
    for _ in range(5000):
        with clock.working("act"):
            pass
    assert len(clock._pieces) <= 1025
    assert clock.seconds()[0] > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_work_is_counted_without_waiting_for_it() -> None:
    device = torch.device("cuda")
    x = torch.randn(4096, 4096, device=device)
    torch.cuda.synchronize()
    clock = DeviceClock(device)
    started = time.perf_counter()
    with clock.working("update"):
        for _ in range(50):
            x = x @ x / 4096
    queued = time.perf_counter() - started
    assert clock.seconds()[0] < queued
    torch.cuda.synchronize()
    took = time.perf_counter() - started
    total, by_kind = clock.seconds()
    assert by_kind == {"update": total}
    assert queued < total <= took * 1.05

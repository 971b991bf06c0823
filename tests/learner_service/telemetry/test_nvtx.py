"""NVTX ranges: one for each state of the ledger, when asked, and nothing otherwise."""

import pytest
import torch

from murmur.learner_service.telemetry.profile_files import NVTX_VARIABLE
from murmur.learner_service.telemetry.profiling import nvtx_ranges
from murmur.shared.process.ledger import Ledger


def test_nothing_is_drawn_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NVTX_VARIABLE, raising=False)
    assert nvtx_ranges() is None


def test_each_state_is_a_range_that_ends_with_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []
    monkeypatch.setenv(NVTX_VARIABLE, "1")
    monkeypatch.setattr(torch.cuda.nvtx, "mark", lambda text: None)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda text: drawn.append(text))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: drawn.append("end"))
    ledger = Ledger("learner")
    ledger.watcher = nvtx_ranges()
    ledger.enter("forward")
    ledger.enter("backward")
    assert drawn == ["forward", "end", "backward"]


@pytest.mark.skipif(torch.version.cuda is not None, reason="this build of torch has NVTX")
def test_a_torch_without_nvtx_costs_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(NVTX_VARIABLE, "1")
    assert nvtx_ranges() is None
    assert "MURMUR_NVTX=1 has no effect: NVTX functions not installed" in caplog.text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_ranges_are_drawn_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NVTX_VARIABLE, "1")
    ranges = nvtx_ranges()
    assert ranges is not None
    for state in ("forward", "backward"):
        ranges(state)
    torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]

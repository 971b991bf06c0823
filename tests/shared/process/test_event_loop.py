"""The event loop of a process with and without uvloop."""

import asyncio
import logging
import sys

import pytest

from murmur.shared.process.process import new_event_loop


def test_pythons_loop_serves_without_uvloop(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loop = new_event_loop()
    loop.close()
    assert type(loop).__module__ == "uvloop"
    monkeypatch.setitem(sys.modules, "uvloop", None)
    with caplog.at_level(logging.INFO, "murmur"):
        loop = new_event_loop()
    assert loop.run_until_complete(asyncio.sleep(0, "slept")) == "slept"
    loop.close()
    assert "uvloop is not installed" in caplog.text

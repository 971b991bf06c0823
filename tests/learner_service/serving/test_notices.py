"""Notices of sessions over a real socket: logged, counted and kept once, and refused if wrong."""

import re
from pathlib import Path

import pytest

from murmur.learner_service.telemetry.metrics import NoticeLog
from murmur.shared.process.errors import WireError
from murmur.shared.wire.notices import (
    FILE,
    Notice,
    Notices,
    pack_notices,
    read_notices,
    unpack_notices,
)
from tests.learner_service.images.test_supply import Supplier, config
from tests.learner_service.running import experiment, running_learner
from tests.learner_service.toys import FIRST, row, vector_spec
from tests.waiting import wait_until
from tests.wire import Client, Refused

SPEC = vector_spec()
CAST = Notice("cast", "observation", "'observation' 1700000001 arrives as 1700000000")


def test_notices_of_environments_are_kept_once(tmp_path: Path) -> None:
    with running_learner(tmp_path, experiment()) as learner:
        for first in ("1", "2"):
            with Client(learner.port, SPEC, 1) as client:
                client.hello()
                client.send(pack_notices([CAST, Notice("mask", f"agent_{first}", first)]))
                client.exchange(row(SPEC, 1, FIRST))
                client.send(pack_notices([Notice("cast", "observation", "another value")]))
            with Client(learner.port, SPEC, 1) as client:
                client.hello()
                client.send(pack_notices([CAST] * 65))
                with pytest.raises(Refused, match="65 notices came"):
                    client.read()
        counted = learner.metric
        wait_until(lambda: counted("notices_total", kind="mask") == 2)
        assert counted("notices_total", kind="cast") == 1
    texts = [notice.text for notice in read_notices(tmp_path / FILE)]
    assert texts == [CAST.text, "1", "2"]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (Notice("CAST", "x", "text"), "kind 'CAST' of a notice"),
        (Notice("cast", "x", "two\nlines"), "text 'two\\nlines' of a notice"),
        (Notice("cast", "x" * 300, "text"), "subject 'xxx"),
    ],
)
def test_a_wrong_notice_is_refused(wrong: Notice, said: str) -> None:
    with pytest.raises(WireError, match=re.escape(said)):
        unpack_notices(pack_notices([wrong]))


def test_notices_of_sources_arrive_between_samples(tmp_path: Path) -> None:
    with running_learner(tmp_path, config()) as learner, Supplier(learner.port) as supplier:
        supplier.welcomed()
        grant = supplier.grant()
        supplier.send(pack_notices([Notice("image", "masks", "palette read as indices")]))
        supplier.answer(grant)
        wait_until(lambda: learner.metric("samples_received_total") >= len(grant.indices))
        assert learner.metric("notices_total", kind="image") == 1


def test_a_resumed_run_says_nothing_twice(tmp_path: Path) -> None:
    counted: list[str] = []
    for _ in range(2):
        log = NoticeLog(counted.append)
        log.keep_in(tmp_path)
        log.add([CAST])
    assert counted == ["cast"]
    assert read_notices(tmp_path / FILE) == [CAST]


def test_a_run_keeps_few_notices_if_a_session_left_some_out(tmp_path: Path) -> None:
    counted: list[str] = []
    session, log = Notices(), NoticeLog(counted.append)
    log.keep_in(tmp_path)
    for number in range(100):
        session.say("cast", f"of the session {number}", "text")
    log.add(session.take())
    log.add(Notice("cast", str(number), "text") for number in range(400))
    kept = read_notices(tmp_path / FILE)
    assert len(kept) == len(counted) == NoticeLog.most
    assert kept[-1].text.startswith("255 notices were given; further ones are left out")

"""Faults of plug-ins and handshakes, each with real processes."""

from pathlib import Path

import pytest

from tests.chaos.cases_plugins import HELLOS, impossible_hellos, plugins_that_fail

pytestmark = pytest.mark.system


def test_the_first_hello_of_a_run_cannot_end_the_learner(tmp_path: Path) -> None:
    assert impossible_hellos(tmp_path)["refused"] == len(HELLOS)


@pytest.mark.parametrize("short", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_plugin_that_fails_ends_the_run_with_its_message(short: bool, tmp_path: Path) -> None:
    plugins_that_fail(tmp_path, short=short)

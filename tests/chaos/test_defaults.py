"""Runs on defaults, as real processes."""

from pathlib import Path

import pytest

from tests.chaos.cases_defaults import defaults_drop_nothing

# The smoke form of the benchmark `defaults` is the quick form.
pytestmark = [pytest.mark.system, pytest.mark.long]


def test_run_on_defaults_drops_no_row_and_keeps_its_settings(tmp_path: Path) -> None:
    assert defaults_drop_nothing(tmp_path)["dropped"] < 0.02

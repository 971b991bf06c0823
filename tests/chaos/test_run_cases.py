"""The faults of run folders, with real processes."""

from pathlib import Path

import pytest

from tests.chaos.cases_runs import hostile_configuration, odd_names, run_folder_faults

pytestmark = pytest.mark.system


def test_a_run_folder_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    run_folder_faults(tmp_path, short=True)


@pytest.mark.long
def test_names_like_markup_end_no_training(tmp_path: Path) -> None:
    odd_names(tmp_path)


def test_a_hostile_configuration_is_refused_at_once(tmp_path: Path) -> None:
    assert hostile_configuration(tmp_path)["refused s"] < 20

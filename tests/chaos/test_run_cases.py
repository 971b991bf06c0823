"""The faults of run folders, each with real processes."""

from pathlib import Path

import pytest

from tests.chaos.cases_runs import CASES, Case

pytestmark = pytest.mark.system


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_fault_of_a_run_folder_costs_what_is_promised(case: Case, tmp_path: Path) -> None:
    case.act(tmp_path)

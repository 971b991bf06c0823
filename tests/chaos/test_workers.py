"""The cases of workers whose environments end, hang or multiply their process."""

from pathlib import Path

import pytest

from tests.chaos.cases import Case
from tests.chaos.cases_workers import CASES

pytestmark = pytest.mark.system


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.name))
def test_worker_case_holds(case: Case, tmp_path: Path) -> None:
    case.act(tmp_path)

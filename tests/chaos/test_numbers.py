"""The cases of environments that fail to start or return absurd numbers."""

from pathlib import Path

import pytest

from tests.chaos.cases import Case
from tests.chaos.cases_numbers import CASES

pytestmark = pytest.mark.system


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.name))
def test_case_of_numbers_holds(case: Case, tmp_path: Path) -> None:
    case.act(tmp_path)

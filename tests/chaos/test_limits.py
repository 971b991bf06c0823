"""The cases of cases_limits, one by one."""

from pathlib import Path

import pytest

from tests.chaos.cases import Case
from tests.chaos.cases_limits import CASES

pytestmark = pytest.mark.system


SLOW = {"storm of refused streams", "evaluators of huge sessions"}


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=[pytest.mark.long] * (c.name in SLOW), id=c.name) for c in CASES],
)
def test_no_peer_takes_more_than_its_share(case: Case, tmp_path: Path) -> None:
    case.act(tmp_path)

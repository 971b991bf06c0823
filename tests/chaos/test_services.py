"""The faults of services as a cluster sees them, each with real processes."""

from pathlib import Path

import pytest

from tests.chaos.cases_services import learner_hangs

pytestmark = pytest.mark.system


def test_a_learner_that_hangs_is_unhealthy_one_that_waits_is_not(tmp_path: Path) -> None:
    assert learner_hangs(tmp_path)["noticed_s"] < 20

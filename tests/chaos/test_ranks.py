"""Ranks without sessions: `murmur bench faults` shows the same."""

from pathlib import Path

import pytest

from tests.chaos import cases_ranks

pytestmark = [pytest.mark.long, pytest.mark.system]


def test_sessions_go_back_to_a_rank_that_has_none(tmp_path: Path) -> None:
    cases_ranks.all_sessions_at_one_rank(tmp_path)


def test_ranks_say_that_there_are_too_few_sessions(tmp_path: Path) -> None:
    cases_ranks.fewer_sessions_than_ranks(tmp_path)

"""The fuzz targets, briefly: their seeds, the committed corpus, and what hypothesis thinks of."""

from collections.abc import Callable
from importlib import import_module

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz import TARGETS
from tests.fuzz.__main__ import CORPUS


def _one(target: str) -> Callable[[bytes], str]:
    one: Callable[[bytes], str] = import_module(f"tests.fuzz.{target}").one
    return one


@pytest.mark.parametrize("target", TARGETS)
def test_the_corpus_finds_nothing_any_more(target: str) -> None:
    one = _one(target)
    inputs = [*import_module(f"tests.fuzz.{target}").SEEDS]
    inputs += [path.read_bytes() for path in sorted((CORPUS / target).glob("*"))]
    outcomes = {one(data) for data in inputs}
    assert len(outcomes) > 1, "all cases end alike: the target does not get far"


@pytest.mark.parametrize("target", TARGETS)
def test_hypothesis_finds_nothing(target: str) -> None:
    one = _one(target)

    @given(st.binary(max_size=200))
    @settings(
        max_examples=300,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    def check(data: bytes) -> None:
        one(data)

    check()

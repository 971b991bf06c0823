"""Two ranks for the tests of this folder."""

from collections.abc import Iterator

import pytest

from tests.ranks.processes import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Two processes that form a group."""
    with Ranks() as two:
        yield two

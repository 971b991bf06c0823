"""`murmur bench supply` starts two learners: too much for every run of the tests."""

import pytest

from benchmarks import supply
from murmur.benchmarks.effort import Effort


@pytest.mark.long
@pytest.mark.system
def test_the_benchmark_finds_the_servers_slow_and_the_cache_full() -> None:
    result = supply.run(Effort.SMOKE)
    assert result["two servers over one"] > 1
    assert result["the doctor"]["waits for"] == "servers"
    assert result["the doctor"]["forecast for two servers"] > 0
    assert result["with a full cache"]["samples received a second"] == 0

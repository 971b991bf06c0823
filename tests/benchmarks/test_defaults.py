"""What `murmur bench defaults` makes of records, by hand."""

from benchmarks.defaults import compare


def record(trained: int, dropped: int, value: float | None) -> dict[str, object]:
    received = trained + dropped
    return {
        "rows_trained": trained,
        "rows_received": received,
        "rows_dropped": {"lag": dropped},
        "return": value,
    }


def test_runs_are_compared_at_equal_steps_learned_from() -> None:
    here = [record(100, 0, 1.0), record(200, 0, 2.0), record(400, 0, 9.0)]
    there = [record(60, 60, 0.5), record(110, 110, 0.7), record(200, 200, 1.5)]
    found = compare(here, there)
    assert found["dropped here, %"] == 0
    assert found["dropped there, %"] == 50
    # 200 steps are common: half of them are 100, where the other one's record of 110 is next.
    assert (found["return here at 50%"], found["return there at 50%"]) == (1.0, 0.7)
    assert (found["return here at 100%"], found["return there at 100%"]) == (2.0, 1.5)

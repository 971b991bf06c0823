"""The soak: what counts as growth."""

from benchmarks.soak import Sample, compare, problems, table


def sample(minute: float, own_mb: float, descriptors: int, threads: int) -> Sample:
    return Sample(
        minute,
        {"learner": own_mb},
        {"learner": own_mb + 100},
        {"learner": descriptors},
        {"learner": threads},
        200,
    )


def result(early: list[Sample], late: list[Sample]) -> dict[str, object]:
    return {
        "visits": {"OK": 5},
        "metric_series": [200, 200],
        "processes": compare(early, late),
    }


def test_medians_are_compared() -> None:
    early = [sample(1, 100, 20, 9), sample(2, 400, 90, 9), sample(3, 100, 20, 9)]
    late = [sample(8, 101, 20, 9), sample(9, 103, 20, 9), sample(10, 101, 19, 9)]
    row = compare(early, late)["learner"]
    assert row["own_mb"] == [100, 101]
    assert row["drift"] == 1.01 - 1
    assert row["descriptors"] == [20, 20]
    assert problems(result(early, late)) == []


def test_growth_is_named() -> None:
    found = problems(result([sample(1, 100, 20, 9)], [sample(2, 102.5, 21, 10)]))
    assert found == [
        "learner: own memory grew by 2.5%",
        "learner: descriptors grew from 20 to 21",
        "learner: threads grew from 9 to 10",
    ]


def test_unexpected_session_end_and_new_metrics_are_problems() -> None:
    whole = {
        **result([sample(1, 100, 20, 9)], [sample(2, 100, 20, 9)]),
        "visits": {"OK": 3, "UNAVAILABLE instead of OK (leaves)": 2},
        "metric_series": [200, 230],
    }
    assert problems(whole) == [
        "2 visits ended with UNAVAILABLE instead of OK (leaves)",
        "learner: metric series grew from 200 to 230",
    ]


def test_the_table_says_what_was_found() -> None:
    counts = ("updates", "rows_received", "rows_trained", "rows_dropped", "episodes", "checkpoints")
    record = {
        "command": "python -m benchmarks.soak",
        "date": "2026-01-01T00:00:00",
        "commit": "abc",
        "machine": {"cores": 2, "cpu": "a processor", "gpu": None},
        "result": {
            **result([sample(1, 100, 20, 9)], [sample(2, 101, 20, 9)]),
            **dict.fromkeys(counts, 7),
            "minutes": 60.0,
            "warm_up_minutes": 10.0,
            "cores_used": 0.06,
        },
    }
    text = table(record)
    assert "| learner | 100.0 → 101.0 | +1.0% | 200.0 → 201.0 | 20 → 20 | 9 → 9 |" in text
    assert "Nothing grew." in text

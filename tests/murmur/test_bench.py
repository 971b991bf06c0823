"""Benchmarks are listed if they can be run, and their results can be read by people."""

from murmur.bench import _readable, benchmark_names


def test_only_what_can_be_run_is_a_benchmark() -> None:
    names = benchmark_names()
    assert {"transport", "training_rate", "coma_update", "terrain", "memory"} <= set(names)
    assert "learning" not in names  # a command of its own, with its own arguments


def test_a_saved_result_is_readable() -> None:
    page = _readable(
        {
            "benchmark": "toy",
            "command": "murmur bench toy --save",
            "date": "2030-01-02T03:04:05+00:00",
            "commit": "abc",
            "machine": {"cores": 2, "cpu": "CPU", "gpu": None},
            "result": {"rate": 12.5, "by size": {"small": {"ms": 1.0}, "large": {"ms": 2.0}}},
        }
    )
    assert page.startswith("# toy\n")
    assert "`murmur bench toy --save`, 2030-01-02, commit abc, 2 cores (CPU), GPU: none." in page
    for part in ("rate", "12.5", "small", "large"):
        assert part in page

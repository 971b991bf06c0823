"""The table beside other systems: verdicts by intervals, every lower score with its reason."""

from benchmarks.peers import REASONS, RESULTS, Row, Score, alone, page, rows


def _row(low: float, high: float, reason: str = "") -> Row:
    theirs = Score(2.0, 1.5, 2.5, 100, 5)
    return Row("A task", "mappo", Score((low + high) / 2, low, high, 50, 3), "peer", theirs, reason)


def test_only_intervals_that_do_not_overlap_differ() -> None:
    assert _row(2.6, 3).verdict() == "higher"
    assert _row(2.4, 3).verdict() == _row(1, 1.5).verdict() == "intervals overlap"
    assert _row(1, 1.4, "fewer steps").verdict() == "lower: fewer steps"


def test_a_task_of_other_dynamics_says_so() -> None:
    row = _row(1, 1.4, "fewer steps")._replace(other_dynamics=True)
    assert row.verdict() == "lower: fewer steps (dynamics differ)"


def test_a_score_measured_as_the_peer_does_decides() -> None:
    alike = Score(2.7, 2.6, 2.8, 50, 3)
    row = _row(1, 1.4, "fewer steps")._replace(other_dynamics=True, alike=alike)
    assert row.verdict() == "higher"
    assert "As theirs: " in page([row])
    assert "| 1.2 [1, 1.4] | 50, 3 | 2.7 [2.6, 2.8] | peer | 2 [1.5, 2.5] |" in page([row])


def test_a_score_is_shown_with_its_interval_and_budget() -> None:
    shown = page([_row(2.6, 3)])
    assert "| 2.8 [2.6, 3] | 50, 3 | peer | 2 [1.5, 2.5] | 100, 5 | higher |" in shown
    assert "as theirs" not in shown.lower()


def test_a_score_that_lacks_seeds_is_not_compared() -> None:
    assert _row(2.6, 3)._replace(wanted=5).verdict() == "not complete: 3 of 5 seeds"


def test_every_committed_lower_score_has_its_reason() -> None:
    found = rows(RESULTS)
    assert {row.title.split()[0] for row in found} >= {"A1", "A2", "A4", "A5", "A8"}
    for row in found:
        assert row.verdict().partition(" (")[0] != "lower", (
            row.title,
            row.algorithm,
            "needs an entry in REASONS",
        )
    assert {test for test, _ in REASONS} <= {row.title.split()[0] for row in found}


def test_the_committed_table_is_what_the_results_say() -> None:
    assert (RESULTS / "peers.md").read_text() == page(rows(RESULTS)) + alone(RESULTS)

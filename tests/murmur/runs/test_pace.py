"""The end of a run that is foretold from its pace."""

import io

from rich.console import Console

from murmur.runs.live_view import TrainingView
from murmur.runs.scores import Pace
from murmur.shared.config.experiment import RunConfig
from murmur.text import rough_time


def test_a_resumed_run_counts_its_own_pace() -> None:
    """45 updates before; then one in 10 s: 53 of 100 are left, 530 s. Share by time says 36 s."""
    pace = Pace(RunConfig(max_updates=100))
    pace.note({"updates": 45, "seconds": 300.0})
    assert pace.left_s() is None
    pace.note({"updates": 47, "seconds": 320.0})
    assert round(pace.left_s() or 0) == 530


def test_a_record_that_is_read_again_takes_no_memory() -> None:
    """The live page reads the newest record each time that a browser asks."""
    pace = Pace(RunConfig(max_updates=100))
    for updates in (1, 2):
        for _ in range(1000):
            pace.note(
                {"updates": updates, "seconds": 10.0 * updates, "rows_received": 64 * updates}
            )
    assert len(pace._seen) == 2
    assert round(pace.left_s() or 0) == 980


def test_the_start_of_environments_is_no_pace() -> None:
    """They compile for 50 s; then an update in 5 s, also in a run that is resumed."""
    for rows, before in ((0, 0), (10_000, 20)):
        pace = Pace(RunConfig(max_updates=100))
        for second in range(51):
            pace.note({"updates": before, "seconds": float(second), "rows_received": rows})
            assert pace.left_s() is None
        for second in range(51, 71):
            done = {"updates": before + (second - 50) // 5, "rows_received": rows + 64 * second}
            pace.note({"seconds": float(second), **done})
        assert round(pace.left_s() or 0) == 5 * (96 - before)


def test_updates_of_a_dataset_alone_are_a_pace_and_shown() -> None:
    """No row ever comes: ten updates in 10 s of 100."""
    run = RunConfig(max_updates=100, offline=True)
    screen = io.StringIO()
    view = TrainingView(run, Console(file=screen, width=120))
    view.line_every_s = 0.0  # type: ignore[misc]
    with view:
        for second in range(11):
            record = {"updates": second, "seconds": float(second), "rows_received": 0}
            view.update(record | {"env_steps": 50 * second, "losses": {"imitation_loss": 0.5}})
    last = " ".join(screen.getvalue().splitlines()[-2:])
    for part in ("10 %, 1:30 left", "updates 10", "rows 500", "imitation_loss 0.500"):
        assert part in last
    assert "environments start" not in screen.getvalue()


def test_a_run_that_clones_first_shows_environment_steps() -> None:
    screen = io.StringIO()
    with TrainingView(RunConfig(), Console(file=screen, width=120, force_terminal=True)) as view:
        view.update({"updates": 3, "seconds": 1.0, "rows_received": 0, "env_steps": 0})
    assert "env steps" in screen.getvalue()
    assert "rows" not in screen.getvalue()


def test_the_nearest_end_counts() -> None:
    """100 updates at 1/s would take 90 s more, the minutes are over in 50 s."""
    pace = Pace(RunConfig(max_updates=100, max_minutes=1))
    pace.note({"updates": 0, "seconds": 0.0})
    pace.note({"updates": 10, "seconds": 10.0})
    assert round(pace.left_s() or 0) == 50
    assert Pace(RunConfig()).left_s() is None


def test_a_learner_that_goes_back_begins_a_new_pace() -> None:
    pace = Pace(RunConfig(max_episodes=10))
    pace.note({"episodes": 8, "seconds": 80.0})
    pace.note({"episodes": 5, "seconds": 50.0})  # its last checkpoint
    assert pace.left_s() is None
    pace.note({"episodes": 6, "seconds": 60.0})
    assert round(pace.left_s() or 0) == 40


def shown(records: list[dict[str, float]]) -> str:
    screen = io.StringIO()
    with TrainingView(RunConfig(name="demo", max_updates=1000), Console(file=screen)) as view:
        for record in records:
            view.update(record)
    return screen.getvalue()


def test_after_the_first_updates_it_says_how_long_the_run_takes() -> None:
    first = [{"updates": i, "seconds": 10.0 * i} for i in range(1, 6)]
    assert shown(first).splitlines() == ["this run takes about 2.8 hours"]
    slow_start = [{"updates": 100 * i, "seconds": 100.0 + 30 * i} for i in range(1, 6)]
    assert shown(slow_start).splitlines() == ["this run takes about 7 minutes"]
    resumed = [{"updates": 500 + i, "seconds": 5000.0 + 10 * i} for i in range(5)]
    assert shown(resumed).splitlines() == ["the rest of this run takes about 83 minutes"]
    assert shown([{"updates": 200 * i, "seconds": 25.0 * i} for i in range(1, 4)]) == ""


def test_long_times_are_said_roughly() -> None:
    assert [rough_time(s) for s in (20, 3000, 7200, 200_000)] == [
        "1 minute",
        "50 minutes",
        "2 hours",
        "2.3 days",
    ]

"""Dropped rows are reported, with the remedy, on the screen, in the report and by the doctor."""

import io
from typing import Any

import pytest
from rich.console import Console

from murmur.runs.drops import dropped_message, rollout_message
from murmur.runs.live_view import TrainingView
from murmur.shared.config.experiment import RunConfig


def record(**changes: Any) -> dict[str, Any]:
    """A line of progress.jsonl, as far as it is of interest here."""
    return {"kind": "progress", "rows_received": 10_000, "rows_dropped": {}, **changes}


@pytest.mark.parametrize(
    ("received", "dropped", "says"),
    [
        (10_000, {"lag": 200}, ""),
        (10_000, {"lag": 201}, "2 % of the rows received were dropped"),
        (10_000, {"lag": 150, "session": 300}, "logs of the environment servers"),
        (10_000, {"restart": 5000}, "learner.checkpoint_every_updates"),
        (100, {"session": 32}, ""),  # a run's first rows
    ],
)
def test_more_than_two_percent_are_told_of(
    received: int, dropped: dict[str, int], says: str
) -> None:
    words = dropped_message(record(rows_received=received, rows_dropped=dropped))
    assert says in words
    assert bool(words) == bool(says)


def test_screen_shows_choice_and_drops_once_and_uncut() -> None:
    out = io.StringIO()
    view = TrainingView(RunConfig(name="trial"), Console(file=out, width=40))
    chosen = {"environments": 32, "unroll_steps": 128, "unrolls_per_update": 32}
    with view:
        for share in (0.4, 0.5):
            dropped = {"lag": int(share * 10_000)}
            view.update(record(rollout=chosen, rows_dropped=dropped))
    lines = out.getvalue().splitlines()
    words = rollout_message(record(rollout=chosen))
    assert words == "an update takes 32 unrolls of 128 steps from 32 environments"
    assert lines.count(words) == 1
    assert [line for line in lines if "dropped" in line] == [
        dropped_message(record(rows_dropped={"lag": 4000}))
    ]
    assert lines[-1].endswith("or let an update take more rows")

"""What of a run is kept beside its evaluations."""

import json
from pathlib import Path

from benchmarks.learning import curve, table
from murmur.doctor.machine import RESULTS
from murmur.runs.run_folder import RunFolder


def test_a_curve_has_evaluations_and_returns_in_training(tmp_path: Path) -> None:
    def evaluation(updates: int, mean: float) -> dict[str, object]:
        steps = {"seconds": 30.0 * updates, "updates": updates, "env_steps": 100 * updates}
        return {"kind": "evaluation", **steps, "metrics": {"return": {"mean": mean}}}

    lines = [
        evaluation(0, -2.0),
        {"kind": "progress", "return": None},
        {"kind": "progress", "return": -1.5},
        {"kind": "progress", "return": -1.0},
        evaluation(4, 3.0),
    ]
    (tmp_path / "progress.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    assert curve(RunFolder(tmp_path)) == [
        {"minutes": 0.0, "env_steps": 0, "updates": 0, "return": -2.0},
        {
            "minutes": 2.0,
            "env_steps": 400,
            "updates": 4,
            "training_return": -1.25,
            "return": 3.0,
        },
    ]


def test_table_names_the_checkpoint_that_was_evaluated() -> None:
    record = json.loads((RESULTS / "terrain-imitation-1200-learning.json").read_text())
    assert "of the best checkpoint" in table(record)
    assert "of the last checkpoint" in table(record | {"checkpoint": "last"})

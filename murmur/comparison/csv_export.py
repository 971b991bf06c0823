"""Progress and evaluations of runs as CSV."""

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from learner_service.telemetry.scalars import scalars_of
from murmur.runs.run_folder import ProgressTail, RunFolder
from shared.process.errors import ConfigError
from shared.process.files import replacing

_COUNTS = ("time", "seconds", "updates", "env_steps", "agent_steps", "episodes")
_EVALUATION = (
    *("run", "time", "seconds", "updates", "env_steps", "metric"),
    *("mean", "std", "low", "high", "episodes"),
)


def write_csv(runs: Sequence[RunFolder], folder: Path) -> dict[Path, int]:
    """Write progress.csv and evaluations.csv.

    progress.csv has a row for each line of progress and a column for each figure that any of the
    runs has; evaluations.csv a row for each metric of each evaluation, with the mean's 95 %
    interval as low and high.

    Args:
        runs: runs to export; none of them is read into memory.
        folder: folder of the files; it is made if it does not exist.

    Returns:
        number of rows by file.

    Raises:
        ConfigError: if a file cannot be written.
    """
    figures: dict[str, None] = {}
    for line in _lines(runs, "progress"):
        figures |= dict.fromkeys(scalars_of(line))
    columns = ["run", *_COUNTS, *figures]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return {
            file: _write(file, names, rows)
            for file, names, rows in (
                (folder / "progress.csv", columns, map(_progress, _lines(runs, "progress"))),
                (folder / "evaluations.csv", _EVALUATION, _evaluations(runs)),
            )
        }
    except OSError as error:
        raise ConfigError(f"cannot write to '{folder}': {error.strerror}") from None


def _lines(runs: Iterable[RunFolder], kind: str) -> Iterator[dict[str, Any]]:
    """Yield lines of progress.jsonl of one kind, run after run, with the run's name."""
    for run in runs:
        for line in ProgressTail(run.progress_file):
            if line.get("kind") == kind:
                yield {**line, "run": run.path.resolve().name}


def _progress(line: Mapping[str, Any]) -> dict[str, Any]:
    return {"run": line["run"], **{k: line[k] for k in _COUNTS}, **scalars_of(line)}


def _evaluations(runs: Iterable[RunFolder]) -> Iterator[dict[str, Any]]:
    for line in _lines(runs, "evaluation"):
        for metric, of in line["metrics"].items():
            low, high = of.get("ci95", (None, None))
            row = {key: line[key] for key in _EVALUATION[:5]}
            row |= {"metric": metric, "mean": of["mean"], "std": of.get("std")}
            yield row | {"low": low, "high": high, "episodes": of.get("episodes")}


def _write(file: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> int:
    """Write a file; return the number of rows, without the header."""
    count = 0
    with replacing(file) as beside, beside.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, columns, restval="")
        writer.writeheader()
        for count, row in enumerate(rows, 1):  # noqa: B007 - the number is what is wanted
            writer.writerow(row)
    return count

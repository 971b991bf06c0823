"""Trained snakes against scripts and other runs, on both sides, with likeliest and drawn moves.

    python -m benchmarks.snakes_matches runs/snakes-greedy-seed1 --topic snakes-greedy
    python -m benchmarks.snakes_matches A --against B/checkpoints/best.pt --topic A-B

plays the best checkpoint of a run and writes benchmarks/results/<topic>-matches.json with a table
(.md) beside it. Opponents may be of the view before, 482 numbers: they play as they did.
"""

import argparse
import json
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import torch

from murmur.doctor.machine import RESULTS
from murmur.env_service.envs.snakes.egocentric import SIZE
from murmur.results import provenance, require_clean_source, run_command
from murmur.runs.evaluation import evaluate_run
from murmur.runs.run_folder import RunFolder

_MOVES, _SIDES = ("likeliest", "drawn"), ("first", "second")
_METRICS = ("score", "opponent_score", "win", "draw", "loss", "deaths", "opponent_deaths")
# Numbers of the view that were not in the one before: of each of three moves the last three.
_NEW = [460 + 8 * move + i for move in range(3) for i in (5, 6, 7)]
_BEFORE = SIZE - len(_NEW)


def widened(part: dict[str, Any]) -> dict[str, Any]:
    """Widen a part of a checkpoint of the former view: its new inputs have no effect."""
    found = {}
    known = torch.tensor([i for i in range(SIZE) if i not in _NEW])
    for key, value in part.items():
        if isinstance(value, dict):
            value = widened(value)
        elif isinstance(value, torch.Tensor) and _BEFORE in value.shape:
            axis = value.shape.index(_BEFORE)
            shape = [*value.shape[:axis], SIZE, *value.shape[axis + 1 :]]
            value = torch.zeros(shape, dtype=value.dtype).index_copy(axis, known, value)
        found[key] = value
    return found


def todays(checkpoint: Path, run: RunFolder, folder: Path) -> Path:
    """Return a checkpoint that can play a run's: itself, or one widened in a folder."""
    contents = torch.load(checkpoint, map_location="cpu", weights_only=True)
    if not any(_BEFORE in x.shape for x in contents["algorithm"]["parts"]["actor"].values()):
        return checkpoint
    spec = torch.load(run.checkpoint("best"), map_location="cpu", weights_only=True)["spec"]
    path = folder / f"{len(list(folder.iterdir()))}.pt"
    torch.save({**widened(contents), "spec": spec}, path)
    return path


def opponents(checkpoints: dict[str, Path]) -> dict[str, list[str]]:
    """Return changes of a run's configuration by opponent, for evaluations against it."""
    scripts = {
        name: [
            "evaluation.environment.control=team",
            f"evaluation.environment.opponent={name}",
        ]
        for name in ("random", "greedy")
    }
    return scripts | {
        name: [
            "evaluation.environment.control=both",
            f"league.checkpoints=[{path.resolve()}]",
            "league.latest=0",
        ]
        for name, path in checkpoints.items()
    }


def match(
    run: RunFolder, overrides: list[str], side: str, sample: bool, episodes: int, first_seed: int
) -> dict[str, float]:
    """Play games on one side and return their means."""
    result = evaluate_run(
        run,
        run.checkpoint("best"),
        episodes,
        first_seed,
        say=print,
        overrides=[
            *overrides,
            f"evaluation.environment.side={side}",
            f"evaluation.sample={str(sample).lower()}",
        ],
    )
    return {name: float(result.metrics[name].mean()) for name in _METRICS}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("run", type=Path)
    parser.add_argument("--against", type=Path, nargs="*", default=[], help="checkpoint files")
    parser.add_argument("--episodes", type=int, default=200, help="of each row of the table")
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--rows", type=int, help="of the table, the first ones; default: all")
    parser.add_argument("--topic", required=True, help="name of the result")
    parser.add_argument("--dirty", action="store_true", help="save from source not committed")
    arguments = parser.parse_args()
    require_clean_source(arguments.dirty)
    origin = provenance("benchmarks.snakes_matches")
    run = RunFolder.open(arguments.run)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        against = opponents(
            {str(path): todays(path, run, Path(folder)) for path in arguments.against}
        )
        for opponent, moves, side in list(product(against, _MOVES, _SIDES))[: arguments.rows]:
            means = match(
                run,
                against[opponent],
                side,
                moves == "drawn",
                arguments.episodes,
                arguments.first_seed,
            )
            rows.append({"opponent": opponent, "moves": moves, "side": side, **means})
            print(rows[-1], flush=True)
    record = {
        "benchmark": "snakes_matches",
        **origin,
        "episodes": arguments.episodes,
        "rows": rows,
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    file = RESULTS / f"{arguments.topic}-matches.json"
    file.write_text(json.dumps(record, indent=1) + "\n")
    file.with_suffix(".md").write_text(table(record))
    print(f"written: {file}, .md")


def table(record: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    n = record["episodes"]
    lines = [
        f"`{record['command']}`",
        "",
        f"{record['date'][:10]}, commit {record['commit']}. {n} games a row; scores and deaths are "
        "means. On the first side the team is players 0-2.",
        "",
        "| opponent | moves | side | score | won / drawn / lost | deaths |",
        "|---|---|---|---|---|---|",
    ]
    for row in record["rows"]:
        counts = " / ".join(f"{n * row[name]:.0f}" for name in ("win", "draw", "loss"))
        lines.append(
            f"| {row['opponent']} | {row['moves']} | {row['side']} "
            f"| {row['score']:.1f} / {row['opponent_score']:.1f} | {counts} "
            f"| {row['deaths']:.1f} / {row['opponent_deaths']:.1f} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    run_command(main)

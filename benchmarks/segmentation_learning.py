"""Train a configuration with several augmentation presets and seeds, and compare the scores.

    python -m benchmarks.segmentation_learning faces --seeds 1 2 3

trains one run after another with `murmur train` (one that was interrupted is resumed, one that is
complete is not repeated), measures best.pt on the validation split, and writes
benchmarks/results/<configuration>-learning.json with a table (.md) and the curves (.svg) beside it.

F-scores are means over the classes. Their 95 % intervals come from resampling seeds, then the
validation images; those of a difference resample both presets' runs alike, since all are measured
on the same images.
"""

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.figures import Panel, draw, mean_and_range
from benchmarks.learning import curve, last_progress, train
from murmur.comparison.segmentation import load_trained, measure, open_source
from murmur.doctor.machine import RESULTS
from murmur.learner_service.learning.confusion import Counts, scores
from murmur.results import origin_text, provenance, require_clean_source, run_command

DESCRIPTION = "train segmentation with several augmentations and seeds, compare the F-scores"
PRESETS = ("none", "minimal", "standard")
_DRAWS = 1000  # of a bootstrap


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=DESCRIPTION)
    parser.add_argument("config")
    parser.add_argument("--presets", nargs="+", default=list(PRESETS), help="of augment.preset")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--dirty", action="store_true", help="save from source not committed")
    arguments = parser.parse_args()
    require_clean_source(arguments.dirty)
    origin = provenance("benchmarks.segmentation_learning")
    runs: dict[str, dict[str, Any]] = {preset: {} for preset in arguments.presets}
    found_of: dict[str, list[Counts]] = {preset: [] for preset in arguments.presets}
    for seed in arguments.seeds:  # all presets of a seed first: every one has been tried early
        for preset in arguments.presets:
            overrides = [f"augment.preset={preset}", *arguments.overrides]
            found, counts = trained(arguments.config, preset, seed, overrides)
            runs[preset][str(seed)] = found
            found_of[preset].append(counts)
    whole = {preset: over_seeds(np.stack(found)) for preset, found in found_of.items()}
    record = {
        "benchmark": "segmentation_learning",
        **origin,
        "runs": runs,
        "presets": {preset: joint(scored) for preset, scored in whole.items()},
        "gains": gains(whole),
    }
    write(record, RESULTS / f"{arguments.config}-learning.json")


def trained(
    name: str, preset: str, seed: int, overrides: list[str]
) -> tuple[dict[str, Any], Counts]:
    """Train one run to its end and measure its best checkpoint.

    Returns:
        its figures, and the confusion matrix of each validation image, [N, K, K].
    """
    run = train(name, f"{name}-{preset}", seed, overrides)
    best, file = load_trained(run, "best")
    measured = measure(best, open_source(best))
    progress = last_progress(run)
    cpu_s = json.loads((run.path / "cpu_s.json").read_text())
    figures = {
        "minutes": progress["seconds"] / 60,
        "cpu_minutes": None if cpu_s is None else cpu_s / 60,
        "updates": progress["updates"],
        "measured": measured.record(file.name),
        "curve": curve(run),
    }
    return figures, measured.matrices


class Scored(NamedTuple):
    """F-scores of a preset, means over its seeds.

    Attributes:
        f_score: mean F-score over the preset's seeds and images.
        drawn: [draws] mean F-scores of resampled seeds and images; presets share the resamples.
    """

    f_score: float
    drawn: NDArray[np.float64]


def over_seeds(matrices: NDArray[np.int64]) -> Scored:
    """Return F-scores of confusion matrices [S, N, K, K] of each seed's N validation images."""
    whole = [scores(matrix)["f_score"] for matrix in matrices.sum(1)]
    return Scored(float(np.mean(whole)), _drawn(matrices))


def joint(scored: Scored) -> dict[str, float]:
    """Return the F-score with its interval."""
    low, high = np.quantile(scored.drawn, (0.025, 0.975))
    return {"f_score": scored.f_score, "low": float(low), "high": float(high)}


def gains(presets: dict[str, Scored]) -> dict[str, dict[str, float]]:
    """Return each preset's gain in F-score over every preset named before it, with intervals."""
    names, found = list(presets), {}
    for i, better in enumerate(names):
        for worse in names[:i]:
            a, b = presets[better], presets[worse]
            low, high = np.quantile(a.drawn - b.drawn, (0.025, 0.975))
            gain = {"gain": a.f_score - b.f_score, "low": float(low), "high": float(high)}
            found[f"{better} over {worse}"] = gain
    return found


def _drawn(matrices: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return mean F-scores of resampled seeds and images, [draws]."""
    random = np.random.default_rng(0)
    seeds, images = matrices.shape[:2]
    values = []
    for _ in range(_DRAWS):
        chosen = random.integers(seeds, size=seeds)
        counts = random.multinomial(images, np.full(images, 1 / images))
        of_seeds = np.einsum("n,snij->sij", counts, matrices)[chosen]
        values.append(np.mean([scores(matrix)["f_score"] for matrix in of_seeds]))
    return np.array(values)


def write(record: dict[str, Any], file: Path) -> None:
    """Write the JSON file, the table and the picture."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(record, indent=1) + "\n")
    file.with_suffix(".md").write_text(table(record))
    picture(record, file.with_suffix(".svg"))
    print(f"written: {file}, .md, .svg")


def table(record: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    lines = [
        f"`{record['command']}`",
        "",
        f"{origin_text(record)}.",
        "best.pt on the validation split; 95 % intervals over images (a run), seeds and images "
        "(a preset, a gain). Majority: every pixel the commonest class.",
        "",
        "| preset | seed | minutes | CPU-minutes | F-score | mIoU | accuracy | majority F |",
        "|---" * 8 + "|",
    ]
    for preset, runs in record["runs"].items():
        for seed, run in runs.items():
            m = run["measured"]
            low, high = m["f_score_ci95"]
            cells = [
                *(preset, seed, f"{run['minutes']:.1f}"),
                "" if run["cpu_minutes"] is None else f"{run['cpu_minutes']:.1f}",
                f"{m['f_score']:.3f} [{low:.3f}, {high:.3f}]",
                *(f"{m[name]:.3f}" for name in ("miou", "accuracy", "majority_f_score")),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| over all seeds | F-score |", "|---|---|"]
    for preset, m in record["presets"].items():
        lines.append(f"| {preset} | {m['f_score']:.3f} [{m['low']:.3f}, {m['high']:.3f}] |")
    for name, m in record["gains"].items():
        lines.append(f"| {name} | {m['gain']:+.3f} [{m['low']:+.3f}, {m['high']:+.3f}] |")
    return "\n".join(lines) + "\n"


def picture(record: dict[str, Any], file: Path) -> None:
    """Plot the F-score over updates: mean and range of each preset's seeds."""
    lines = {
        preset: mean_and_range([run["curve"] for run in runs.values()], "updates", "f_score")
        for preset, runs in record["runs"].items()
    }
    draw([Panel("validation F-score, mean over classes", "updates", lines)], file)


if __name__ == "__main__":
    run_command(main)

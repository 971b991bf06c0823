"""`murmur report` and `murmur render` for a run of segmentation."""

import base64
from pathlib import Path
from typing import Any

import torch

from murmur.comparison.charts import Chart
from murmur.comparison.report import page_parts, render_template
from murmur.comparison.report_charts import curve_chart, loss_charts
from murmur.comparison.segmentation import (
    Say,
    load_trained,
    measure,
    open_source,
    predict,
    read_samples,
)
from murmur.learner_service.export.segmentation import Trained
from murmur.learner_service.preprocess.augment.building import build_augment
from murmur.learner_service.telemetry.figures import (
    Picture,
    compared,
    confusion_matrix,
    painted,
    png,
    sheet,
    upright,
)
from murmur.runs.run_folder import RunFolder
from murmur.shared.process.errors import CheckpointError, ConfigError
from murmur.shared.process.files import write_output
from murmur.shared.wire.samples import IMAGE, MASK
from murmur.text import number

_SHOWN = 6  # images of a page
_AUGMENTED = 7
_END = 1 << 40  # an epoch and an update after any that changes the preset
_READINGS = {
    "f_score": "Mean over the classes present of 2 TP / (2 TP + FP + FN), on the validation split. "
    "Higher is better.",
    "miou": "Mean over the classes present of TP / (TP + FP + FN), on the validation split. Higher "
    "is better.",
    "accuracy": "Share of the validation split's pixels that are right. Higher is better.",
    "majority_f_score": "What calling every pixel the commonest class would score.",
}


def render_segmentation_page(run: RunFolder, checkpoint: str, say: Say) -> str:
    """Measure the run's network, and render the page as HTML.

    Raises:
        MurmurError: if the user can fix the cause.
    """
    config, results = run.config(), dict[str, Any]()
    try:
        trained, file = load_trained(run, checkpoint)
    except CheckpointError as error:
        say(f"no network to measure: {error}")
    else:
        source = open_source(trained)
        say(f"measuring {file.name} on {source.spec.size('valid')} images")
        measured = measure(trained, source)
        images, truth = _samples(source, "valid", _SHOWN)
        image, mask = (some[0] for some in _samples(source, "train", 1))
        pictures = {
            "compared": compared(images, truth, predict(trained, images), len(measured.classes)),
            "augmented": _augmented(trained, image, mask, _AUGMENTED),
            "confusion": confusion_matrix(measured.matrix, measured.classes),
        }
        results = {name: base64.b64encode(png(p)).decode() for name, p in pictures.items()}
        results |= {"measured": measured.record(file.name), "absent": measured.absent}
    progress, evaluations = run.records("progress"), run.records("evaluation")
    last = progress[-1] if progress else {}
    facts = {
        "source": config.source.name,
        "algorithm": config.algorithm.name,
        "network": config.network.name,
        "updates": number(last.get("updates", 0)),
        "images trained": number(last.get("rows_trained", 0)),
    }
    return render_template(
        "segmentation.html.j2",
        **page_parts(run, facts, progress),
        **results,
        summary="A training run of murmur: servers that supply learners with images.",
        preset=config.augment.preset,
        learning=_learning_charts(progress, evaluations),
    )


def draw_samples(run: RunFolder, out: Path, checkpoint: str) -> None:
    """Write a PNG: validation images, their masks, and the predicted masks.

    Raises:
        MurmurError: if the user can fix the cause.
    """
    if out.suffix != ".png":
        raise ConfigError(f"'{out}': pictures of a run with a source are written as .png")
    trained, _ = load_trained(run, checkpoint)
    images, truth = _samples(open_source(trained), "valid", _SHOWN)
    predicted = predict(trained, images)
    write_output(out, png(compared(images, truth, predicted, len(trained.spec.classes))))


def _samples(source: Any, split: str, count: int) -> tuple[list[Any], list[Any]]:  # noqa: ANN401
    """Return the first images and masks of a split that can be read.

    Raises:
        ConfigError: if there is none.
    """
    found = [s for s in read_samples(source, split, 4 * count) if s is not None][:count]
    if not found:
        raise ConfigError(f"no sample of split '{split}' of source '{source.spec.name}' is whole")
    return [s[IMAGE] for s in found], [s[MASK] for s in found]


def _augmented(trained: Trained, image: Picture, mask: Picture, count: int) -> Picture:
    """Draw an image and its mask as the last epochs may see them; the first column is as they are.

    Args:
        trained: trained run with the augmentation.
        image: [3, H, W] image.
        mask: [H, W] mask.
        count: number of augmented examples.
    """
    spec = trained.spec
    augment = build_augment(trained.config.augment, spec, torch.device("cpu"))
    augment.advance(_END, _END)
    batch = {
        IMAGE: torch.from_numpy(image).expand(count, -1, -1, -1),
        MASK: torch.from_numpy(mask).expand(count, -1, -1),
    }
    seen = augment(batch, torch.Generator().manual_seed(0))
    images = (seen[IMAGE].clamp(0, 1) * 255).round().numpy()
    k = len(spec.classes)
    return sheet(
        [
            [upright(image), *(upright(each) for each in images)],
            [painted(mask, k), *(painted(each, k) for each in seen[MASK].numpy())],
        ]
    )


def _learning_charts(
    progress: list[dict[str, Any]], evaluations: list[dict[str, Any]]
) -> list[Chart]:
    """Draw scores of evaluations, then losses; the x axis is updates throughout."""
    charts, x = [], [e["updates"] for e in evaluations]
    for name in evaluations[-1]["metrics"] if evaluations else ():
        values = [e["metrics"].get(name, {}).get("mean") for e in evaluations]
        title, reading = f"Validation: {name.replace('_', ' ')}", _READINGS.get(name, "")
        charts.append(curve_chart(title, x, values, "updates", name, reading, markers=True))
    return [*charts, *loss_charts(progress, [p["updates"] for p in progress], "updates")]

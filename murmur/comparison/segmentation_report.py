"""`murmur report` and `murmur render` for a run of segmentation."""

import base64
from pathlib import Path
from typing import Any

from murmur.comparison.charts import Chart, Series, line_chart
from murmur.comparison.report import page_environment, page_parts
from murmur.comparison.report_charts import loss_charts
from murmur.comparison.segmentation import (
    Measured,
    Say,
    load_trained,
    measure,
    open_source,
    predict,
    read_samples,
)
from murmur.comparison.segmentation_pictures import augmented
from murmur.doctor.device_report import run_busy_text
from murmur.learner_service.telemetry.figures import compared, confusion_matrix, png
from murmur.runs.run_folder import RunFolder
from murmur.shared.process.errors import CheckpointError, ConfigError
from murmur.shared.process.files import write_output
from murmur.shared.wire.samples import IMAGE, MASK
from murmur.text import number

SHOWN = 6  # images of a page
_AUGMENTED = 7
_READINGS = {
    "f_score": "Mean over the classes present of 2 TP / (2 TP + FP + FN), on the validation split. "
    "Higher is better.",
    "miou": "Mean over the classes present of TP / (TP + FP + FN), on the validation split. Higher "
    "is better.",
    "accuracy": "Share of the validation split's pixels that are right. Higher is better.",
    "majority_f_score": "What calling every pixel the commonest class would score.",
}


def write_segmentation_report(run: RunFolder, out: Path, *, checkpoint: str, say: Say) -> None:
    """Measure the run's network, then write the page.

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
        results = _results(measured, file.name)
        images, truth = _samples(source, "valid", SHOWN)
        predicted = predict(trained, images)
        k = len(trained.spec.classes)
        results["compared"] = _embedded(png(compared(images, truth, predicted, k)))
        image, mask = (some[0] for some in _samples(source, "train", 1))
        results["augmented"] = _embedded(png(augmented(trained, image, mask, _AUGMENTED)))
    progress, evaluations = run.records("progress"), run.records("evaluation")
    last = progress[-1] if progress else {}
    facts = {
        "source": config.source.name,
        "algorithm": config.algorithm.name,
        "network": config.network.name,
        "updates": number(last.get("updates", 0)),
        "images trained": number(last.get("rows_trained", 0)),
    }
    if busy := run_busy_text(progress):
        facts["device"] = busy
    parts = page_parts(run, facts, last)
    template = page_environment().get_template("segmentation.html.j2")
    page = template.render(
        **parts,
        **results,
        summary="A training run of murmur: servers that supply learners with images.",
        preset=config.augment.preset,
        learning=_learning_charts(progress, evaluations),
    )
    write_output(out, page)


def draw_samples(run: RunFolder, out: Path, *, checkpoint: str, count: int) -> None:
    """Write a PNG: validation images, their masks, and the predicted masks.

    Raises:
        MurmurError: if the user can fix the cause.
    """
    if out.suffix != ".png":
        raise ConfigError(f"'{out}': pictures of a run with a source are written as .png")
    trained, _ = load_trained(run, checkpoint)
    images, truth = _samples(open_source(trained), "valid", count)
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


def _embedded(file: bytes) -> str:
    return base64.b64encode(file).decode()


def _results(measured: Measured, checkpoint: str) -> dict[str, Any]:
    """Return the template's values of the scores."""
    return {
        "measured": measured.record(checkpoint),
        "checkpoint": checkpoint,
        "absent": measured.absent,
        "confusion": _embedded(png(confusion_matrix(measured.matrix, measured.classes))),
    }


def _learning_charts(
    progress: list[dict[str, Any]], evaluations: list[dict[str, Any]]
) -> list[Chart]:
    """Draw scores of evaluations, then losses; the x axis is updates throughout."""
    charts = []
    if evaluations:
        x = [e["updates"] for e in evaluations]
        for name in evaluations[-1]["metrics"]:
            values = [e["metrics"].get(name, {}).get("mean") for e in evaluations]
            svg = line_chart([Series("", x, values)], "updates", name, markers=True)
            title = f"Validation: {name.replace('_', ' ')}"
            charts.append(Chart(title, svg, _READINGS.get(name, "")))
    return [*charts, *loss_charts(progress, [p["updates"] for p in progress], "updates")]

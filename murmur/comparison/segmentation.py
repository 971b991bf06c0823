"""Results of a run of segmentation: scores on the validation split, masks of pictures."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.table import Table

from murmur.env_service.sources.source import BrokenSample, Source, make_source, read_sample
from murmur.learner_service.checkpoint.folder import CheckpointFolder
from murmur.learner_service.export.segmentation import Trained, load_segmentation
from murmur.learner_service.learning.confusion import Counts, f_scores, overlaps, scores
from murmur.learner_service.telemetry.figures import Picture
from murmur.runs.run_folder import RunFolder
from murmur.shared.process.errors import ConfigError, ResourceError
from murmur.shared.wire.notices import Notices
from murmur.shared.wire.samples import IMAGE, MASK, sample_difference
from murmur.text import number, plain, screen_table

Say = Callable[[str], None]
_BATCH = 16
_DRAWS = 1000  # of a bootstrap
_SUFFIXES = (".jpg", ".jpeg", ".png")


@dataclass(frozen=True)
class Measured:
    """Quality of the predicted masks of a validation split.

    Attributes:
        classes: names of the classes.
        matrices: [N, K, K] matrices of the images: pixels of class row taken for class column.
        broken: number of samples that could not be read.
    """

    classes: tuple[str, ...]
    matrices: Counts
    broken: int

    @property
    def matrix(self) -> Counts:
        """Return the matrix [K, K] of all images."""
        return np.asarray(self.matrices.sum(0))

    @property
    def absent(self) -> list[str]:
        """Classes that do not occur in the masks; scores are means over the others."""
        held = self.matrix.sum(1) > 0
        return [name for name, there in zip(self.classes, held, strict=True) if not there]

    def interval(self) -> tuple[float, float]:
        """Return the F-score's 95 % interval for another draw of as many images (bootstrap)."""
        random, n = np.random.default_rng(0), len(self.matrices)
        counts = random.multinomial(n, np.full(n, 1 / n), _DRAWS)
        drawn = np.einsum("dn,nij->dij", counts, self.matrices)
        values = [scores(matrix)["f_score"] for matrix in drawn]
        low, high = np.quantile(values, (0.025, 0.975))
        return float(low), float(high)

    def record(self, title: str) -> dict[str, Any]:
        """Return all scores as JSON values."""
        matrix = self.matrix
        f, iou = f_scores(matrix), overlaps(matrix)
        return {
            "title": title,
            "images": len(self.matrices),
            "broken": self.broken,
            **scores(matrix),
            "f_score_ci95": list(self.interval()),
            "classes": {
                name: {"f_score": _known(f[k]), "iou": _known(iou[k])}
                for k, name in enumerate(self.classes)
            },
            "confusion": matrix.tolist(),
        }


def _known(value: float) -> float | None:
    """Return a number; None for NaN, which JSON has not."""
    return None if np.isnan(value) else float(value)


def load_trained(run: RunFolder, checkpoint: str) -> tuple[Trained, Path]:
    """Return the content of a run's checkpoint, and its file.

    Raises:
        MurmurError: if there is none, or it cannot be used.
    """
    file = run.checkpoint(checkpoint)
    return load_segmentation(CheckpointFolder(run.path, 1).load(file), file.name), file


def open_source(trained: Trained) -> Source:
    """Open the source that the run learned from.

    Raises:
        ConfigError: if it cannot be opened, or is not the same any more.
    """
    source = make_source(trained.config.source)
    difference = sample_difference(trained.spec, source.spec)
    if difference:
        raise ConfigError(
            f"source '{source.spec.name}' is not what the run learned from ({difference})"
        )
    return source


def read_samples(source: Source, split: str, limit: int = 0) -> Iterator[dict[str, Any] | None]:
    """Yield the samples of a split in order; None for one that is broken.

    Args:
        source: source to read.
        split: "train" or "valid".
        limit: largest number of samples; 0: all.
    """
    size = source.spec.size(split)
    for index in range(min(size, limit) if limit else size):
        try:
            yield read_sample(source, split, index)
        except BrokenSample:
            yield None


@torch.inference_mode()
def predict(trained: Trained, images: list[Picture]) -> NDArray[np.uint8]:
    """Predict classes [N, H, W] of images [3, H, W] of the size that was trained on."""
    policy = trained.algorithm.make_policy()
    found = []
    for at in range(0, len(images), _BATCH):
        batch = torch.from_numpy(np.stack(images[at : at + _BATCH]))
        found.append(policy.act({IMAGE: batch}, None)[MASK].numpy())
    return np.concatenate(found)


def measure(trained: Trained, source: Source) -> Measured:
    """Predict the validation split.

    Raises:
        ConfigError: if it has no sample.
    """
    matrices: list[Counts] = []
    broken = 0
    for sample in read_samples(source, "valid"):
        if sample is None:
            broken += 1
            continue
        image, mask = (torch.from_numpy(sample[name]).unsqueeze(0) for name in (IMAGE, MASK))
        matrices.append(trained.algorithm.confusion([(image, mask)]))
    if not matrices:
        raise ConfigError(f"source '{source.spec.name}' has no validation sample to measure with")
    return Measured(trained.spec.classes, np.stack(matrices), broken)


def measured_table(title: str, measured: Measured) -> Table:
    """Return a table of the scores, then of each class."""
    whole, (low, high) = scores(measured.matrix), measured.interval()
    message = (
        f"{title}: {len(measured.matrices)} images; F-score {number(whole['f_score'])} "
        f"({number(low)} … {number(high)}), mIoU {number(whole['miou'])}, pixels right "
        f"{number(whole['accuracy'])}; the commonest class alone: F-score "
        f"{number(whole['majority_f_score'])}"
    )
    if absent := measured.absent:
        message += f"; the masks hold no {', '.join(absent)}"
    table = screen_table("class", "F-score", "IoU", "share of pixels", title=message)
    matrix = measured.matrix
    f, iou, share = f_scores(matrix), overlaps(matrix), matrix.sum(1) / matrix.sum()
    for k, name in enumerate(measured.classes):
        table.add_row(plain(name), *(number(_known(x[k])) for x in (f, iou, share)))
    return table


@torch.inference_mode()
def segment_folder(trained: Trained, folder: Path, out: Path, say: Say) -> int:
    """Write a PNG of class indices for each picture of a folder, in the picture's size.

    Args:
        trained: trained model that predicts.
        folder: folder with .jpg, .jpeg and .png files.
        out: folder to write NAME.png to; made if it does not exist.
        say: function called with a line for each picture that cannot be read.

    Returns:
        number of masks written.

    Raises:
        MurmurError: if there is no picture, or a mask cannot be written.
    """
    import cv2

    from murmur.env_service.sources.changes import say_image_changes
    from murmur.env_service.sources.decode import decode_image, planes, read_file

    if not folder.is_dir():
        raise ConfigError(f"--folder {folder}: there is no such folder")
    files = sorted(f for f in folder.iterdir() if f.suffix.lower() in _SUFFIXES)
    names = [file.stem for file in files]
    twice = next((name for name in names if names.count(name) > 1), None)
    if not files or twice:
        why = f"two pictures are called '{twice}'" if twice else "it has no .jpg or .png file"
        raise ConfigError(f"--folder {folder}: {why}")
    if out.resolve() == folder.resolve():
        raise ConfigError(f"--out {out} is the folder of the pictures; name another")
    written, notices = 0, Notices()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ResourceError(f"cannot make folder '{out}': {error.strerror}") from None
    for file in files:
        try:
            pixels, header = decode_image(read_file(file), str(file))
        except BrokenSample as error:
            say(f"left out ({error.reason}): {error.detail}")
            continue
        say_image_changes(notices, header, file)  # in the log
        image = torch.from_numpy(planes(pixels)).unsqueeze(0)
        mask = trained.segmenter({IMAGE: image})[MASK][0].numpy()
        target = out / f"{file.stem}.png"
        if not cv2.imwrite(str(target), mask):
            raise ResourceError(f"cannot write '{target}'")
        written += 1
    return written

"""A trained segmentation network as one file that runs without murmur, with resizing in it.

Its input is "image", uint8 [rows, 3, height, width] of any size; its outputs are "mask", uint8
[rows, height, width], and "logits". The file says so of itself, in JSON, with the classes' names.
"""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from learner_service.export.policy import (
    FORMAT_VERSION,
    Exported,
    Format,
    load_exported,
    trace,
    write_program,
)
from learner_service.export.segmenter import Segmenter, Trained, load_segmentation
from shared.process.errors import ResourceError
from shared.wire.samples import IMAGE, MASK

_EXAMPLE = (2, 3, 70, 90)  # no side that tracing would take for a constant
_CHECKED = ((1, 3, 61, 47), (3, 3, 150, 170))
_TOLERANCE = 1e-3  # relative and absolute, between logits of PyTorch and ONNX Runtime in fp32
_LOGITS = "logits"


def export_segmentation(
    state: Mapping[str, Any], kind: Format, path: Path, source: str
) -> Exported:
    """Write a checkpoint's network, read the file back, and compare what both do.

    Args:
        state: the checkpoint.
        kind: the format.
        path: the file to write.
        source: name of the checkpoint, for the file's description.

    Raises:
        MurmurError: if the checkpoint cannot be used, the file cannot be written, or does not do
            what the network does.
    """
    trained = load_segmentation(state, source)
    example = {IMAGE: _picture(_EXAMPLE, 0)}
    sides = {0: torch.export.Dim("rows", min=1), 2: _side("height"), 3: _side("width")}
    program = trace(trained.segmenter, example, {IMAGE: sides})
    about = _description(trained, source, state["progress"]["updates"])
    write_program(program, example, kind, path, about)
    return Exported(path, about, _compare(trained.segmenter, path))


def _side(name: str) -> Any:  # noqa: ANN401 - torch's own
    return torch.export.Dim(name, min=2, max=8192)


def _picture(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    return torch.from_numpy(pixels)


def _description(trained: Trained, source: str, updates: int) -> dict[str, Any]:
    """Return the file's description of itself."""
    return {
        "format": FORMAT_VERSION,
        "algorithm": trained.config.algorithm.name,
        "checkpoint": source,
        "updates": updates,
        "spec": asdict(trained.spec),
        "inputs": [{"name": IMAGE, "dtype": "uint8", "shape": [3, "height", "width"]}],
        "outputs": [MASK, _LOGITS],
        "classes": list(trained.spec.classes),
    }


def _compare(segmenter: Segmenter, path: Path) -> float:
    """Largest difference of logits between the file and the network, for pictures of two sizes.

    Raises:
        ResourceError: if they differ by more than rounding.
    """
    run, difference = load_exported(path), 0.0
    for seed, shape in enumerate(_CHECKED):
        image = _picture(shape, seed)
        with torch.inference_mode():
            ours = segmenter({IMAGE: image})[_LOGITS].numpy()
        theirs = run({IMAGE: image.numpy()})[_LOGITS]
        if not np.allclose(ours, theirs, rtol=_TOLERANCE, atol=_TOLERANCE):
            raise ResourceError(
                f"{path} gives other logits than the network: PyTorch {torch.__version__} and the "
                "format's tools do not fit each other; see docs/export.md for versions"
            )
        difference = max(difference, float(np.abs(ours - theirs).max()))
    return difference

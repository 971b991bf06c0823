"""A trained segmentation network as one file that runs without murmur, with resizing in it.

Its input is "image", uint8 [rows, 3, height, width] of any size; its outputs are "mask", uint8
[rows, height, width], and "logits". The file says so of itself, in JSON, with the classes' names.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from murmur.learner_service.algorithms.segmentation import Segmentation, network_input
from murmur.learner_service.checkpoint.contents import (
    buildable_config,
    load_saved_algorithm,
    saved_source,
)
from murmur.learner_service.device.precision import Precision
from murmur.learner_service.export.policy import (
    FORMAT_VERSION,
    Check,
    Exported,
    Format,
    write_exported,
)
from murmur.learner_service.layers.resizing import picture_weights, resize
from murmur.learner_service.learning.supervised import build_supervised, image_size
from murmur.learner_service.learning.supervised_network import NetworkPolicy
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.process.errors import CheckpointError
from murmur.shared.wire.samples import IMAGE, MASK, SampleSpec

_CPU = torch.device("cpu")
_BYTE = 255.0
_EXAMPLE = (2, 3, 70, 90)  # no side that tracing would take for a constant
_CHECKED = ((1, 3, 61, 47), (3, 3, 150, 170))
_TOLERANCE = 1e-3  # of logits
_LOGITS = "logits"


class Segmenter(nn.Module):
    """Pictures of any size -> a class for each of their pixels.

    Pictures are resized to the size that was trained on as sample sources do, and logits back.
    """

    side_0: Tensor
    side_1: Tensor

    def __init__(self, policy: NetworkPolicy, size: tuple[int, int]) -> None:
        """Take over the policy's network.

        Args:
            policy: policy on the CPU, in fp32.
            size: height and width of the images that it was trained on.
        """
        super().__init__()
        self.network = policy.network
        self.register_buffer("side_0", torch.zeros(size[0]), persistent=False)
        self.register_buffer("side_1", torch.zeros(size[1]), persistent=False)

    def forward(self, pictures: dict[str, Tensor]) -> dict[str, Tensor]:
        """Classes of pictures.

        Args:
            pictures: "image": [B, 3, H, W] uint8, red, green, blue.

        Returns:
            "mask": [B, H, W] uint8, the likeliest class; "logits": [B, K, H, W] float32.
        """
        image = pictures[IMAGE]
        # Two lines of the picture, whose lengths are its sides.
        high, wide = image[0, 0, :, 0], image[0, 0, 0, :]
        small = resize(
            image.float(), picture_weights(high, self.side_0), picture_weights(wide, self.side_1)
        )
        logits = self.network(network_input(small.round() / _BYTE))
        logits = resize(
            logits, picture_weights(self.side_0, high), picture_weights(self.side_1, wide)
        )
        return {MASK: logits.argmax(1).to(torch.uint8), "logits": logits}


@dataclass(frozen=True)
class Trained:
    """Contents of a segmentation checkpoint, on the CPU in fp32.

    Attributes:
        algorithm: evaluates batches of the size that was trained on.
        segmenter: takes pictures of any size.
        spec: spec of the data set.
        config: configuration of the run.
    """

    algorithm: Segmentation
    segmenter: Segmenter
    spec: SampleSpec
    config: ExperimentConfig


def load_segmentation(state: Mapping[str, Any], name: str) -> Trained:
    """Rebuild what was trained.

    Args:
        state: a checkpoint.
        name: its name, for messages.

    Raises:
        MurmurError: if it is no checkpoint of this version's segmentation.
    """
    config = buildable_config(state, name)
    spec = saved_source(state)
    algorithm = build_supervised(config, spec, Precision("fp32", _CPU), _CPU)
    if not isinstance(algorithm, Segmentation):
        raise CheckpointError(
            f"checkpoint {name} is of algorithm '{config.algorithm.name}'; masks come from "
            "'segmentation' alone"
        )
    load_saved_algorithm(algorithm, state, name, config)
    return Trained(algorithm, Segmenter(algorithm.make_policy(), image_size(spec)), spec, config)


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
    height, width = (torch.export.Dim(side, min=2, max=8192) for side in ("height", "width"))
    sides = {0: torch.export.Dim("rows", min=1), 2: height, 3: width}
    about = {
        "format": FORMAT_VERSION,
        "algorithm": trained.config.algorithm.name,
        "checkpoint": source,
        "updates": state["progress"]["updates"],
        "spec": asdict(trained.spec),
        "inputs": [{"name": IMAGE, "dtype": "uint8", "shape": [3, "height", "width"]}],
        "outputs": [MASK, _LOGITS],
        "classes": list(trained.spec.classes),
    }
    samples = ({IMAGE: _picture(shape, seed)} for seed, shape in enumerate(_CHECKED))
    check = Check(samples, lambda o, t: {_LOGITS: (o[_LOGITS], t[_LOGITS])}, _TOLERANCE)
    return write_exported(trained.segmenter, example, {IMAGE: sides}, kind, path, about, check)


def _picture(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    return torch.from_numpy(pixels)

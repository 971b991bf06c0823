"""A trained segmentation network as one module for pictures of any size."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from learner_service.algorithms.segmentation import Segmentation, network_input
from learner_service.checkpoint import buildable_config, saved_source
from learner_service.device.precision import Precision
from learner_service.layers.resizing import picture_weights, resize
from learner_service.learning.labelled_images import image_size
from learner_service.learning.supervised import build_supervised
from learner_service.learning.supervised_network import NetworkPolicy
from shared.config.experiment import ExperimentConfig
from shared.process.errors import CheckpointError
from shared.wire.samples import IMAGE, MASK, SampleSpec

_CPU = torch.device("cpu")
_BYTE = 255.0


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
    try:
        algorithm.load_state_dict(state["algorithm"])
    except (KeyError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(
            f"checkpoint {name} does not fit this release's 'segmentation': {reason}; use the "
            "release it was saved by"
        ) from None
    return Trained(algorithm, Segmenter(algorithm.make_policy(), image_size(spec)), spec, config)

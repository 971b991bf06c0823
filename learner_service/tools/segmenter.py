"""A trained segmentation network as one module for pictures of any size."""

import torch
from torch import Tensor, nn

from learner_service.algorithms.segmentation import SegmentationPolicy, network_input
from learner_service.networks.resizing import picture_weights, resize

_BYTE = 255.0


class Segmenter(nn.Module):
    """Pictures of any size -> a class for each of their pixels.

    Pictures are resized to the size that was trained on as sample sources do, and logits back.
    """

    side_0: Tensor
    side_1: Tensor

    def __init__(self, policy: SegmentationPolicy, size: tuple[int, int]) -> None:
        """Take over the policy's network.

        Args:
            policy: on the CPU, in fp32.
            size: height and width of the images that it was trained on.
        """
        super().__init__()
        self.network = policy.network
        self.register_buffer("side_0", torch.zeros(size[0]), persistent=False)
        self.register_buffer("side_1", torch.zeros(size[1]), persistent=False)

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        """Classes of pictures.

        Args:
            image: [B, 3, H, W] uint8, red, green, blue.

        Returns:
            "mask": [B, H, W] uint8, the likeliest class; "logits": [B, K, H, W] float32.
        """
        # Two lines of the picture, whose lengths are its sides.
        high, wide = image[0, 0, :, 0], image[0, 0, 0, :]
        small = resize(
            image.float(), picture_weights(high, self.side_0), picture_weights(wide, self.side_1)
        )
        logits = self.network(network_input(small.round() / _BYTE))
        logits = resize(
            logits, picture_weights(self.side_0, high), picture_weights(self.side_1, wide)
        )
        return {"mask": logits.argmax(1).to(torch.uint8), "logits": logits}

"""U-Net: convolutions at halving sizes and back, joined at each size; for images and masks.

Ronneberger, Fischer, Brox 2015, "U-Net: Convolutional Networks for Biomedical Image Segmentation"
(arXiv:1505.04597). Here convolutions are padded, so the logits have the image's size, each is
normalised in groups of channels, and maps are enlarged bilinearly.
"""

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from murmur.learner_service.layers.dense import require_size
from murmur.learner_service.layers.dropout import Dropout
from murmur.learner_service.layers.resizing import Resize
from murmur.shared.config import Section

DENSE = True


class Config(Section):
    """Options of the `unet` network; 1 383 411 weights with 19 classes."""

    channels: tuple[int, ...] = Field(
        (16, 32, 64, 128, 160),
        min_length=2,
        description="channels at each size, from the image's own to the smallest; each size is "
        "half of the one before",
    )
    groups: int = Field(8, ge=1, description="groups of channels that are normalised together")
    dropout: float = Field(0.1, ge=0, lt=1, description="share of the smallest map that is zeroed")

    @model_validator(mode="after")
    def _groups_fit(self) -> "Config":
        wrong = [c for c in self.channels if c < 1 or c % self.groups]
        if wrong:
            raise ValueError(f"channels {wrong[0]} is no multiple of groups {self.groups}")
        return self


class Pair(nn.Sequential):
    """Two 3 x 3 convolutions, each normalised and rectified: [B, I, h, w] -> [B, O, h, w]."""

    def __init__(self, inputs: int, outputs: int, groups: int) -> None:
        layers: list[nn.Module] = []
        for channels in (inputs, outputs):
            layers += [
                nn.Conv2d(channels, outputs, 3, padding=1, bias=False),
                nn.GroupNorm(groups, outputs),
                nn.ReLU(inplace=True),
            ]
        super().__init__(*layers)


class UNet(nn.Module):
    """U-Net for images of one size; the module describes it."""

    def __init__(self, config: Config, size: tuple[int, int], num_classes: int) -> None:
        super().__init__()
        c, sizes = config.channels, [size]
        for _ in c[1:]:
            sizes.append((sizes[-1][0] // 2, sizes[-1][1] // 2))
        inputs = (3, *c[:-1])
        self.down = nn.ModuleList(Pair(i, o, config.groups) for i, o in zip(inputs, c, strict=True))
        self.halve = nn.MaxPool2d(2)
        self.dropout = Dropout(config.dropout)
        steps = range(len(c) - 2, -1, -1)  # back up, from the second smallest size
        self.enlarge = nn.ModuleList(Resize(sizes[i + 1], sizes[i]) for i in steps)
        self.up = nn.ModuleList(Pair(c[i + 1] + c[i], c[i], config.groups) for i in steps)
        self.classify = nn.Conv2d(c[0], num_classes, 1)

    def forward(self, image: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, K, H, W]."""
        kept: list[Tensor] = []
        x = image
        for i, layer in enumerate(self.down):
            x = layer(self.halve(x) if i else x)
            kept.append(x)
        x = self.dropout(kept.pop())
        for enlarge, layer in zip(self.enlarge, self.up, strict=True):
            x = layer(torch.cat([enlarge(x), kept.pop()], 1))
        out: Tensor = self.classify(x)
        return out


def build(config: Config, size: tuple[int, int], num_classes: int) -> UNet:
    """Build the network.

    Raises:
        ConfigError: if the images are too small to be halved that often.
    """
    halvings = len(config.channels) - 1
    require_size("unet", size, 2**halvings, f"network.channels halves them {halvings} times")
    return UNet(config, size, num_classes)

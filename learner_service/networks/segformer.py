"""A SegFormer-type network: attention at four sizes, joined by linear layers; for images and masks.

Xie, Wang, Yu, Anandkumar, Alvarez, Luo 2021, "SegFormer: Simple and Efficient Design for Semantic
Segmentation with Transformers" (arXiv:2105.15203): overlapping patches, attention over a reduced
map, convolutions instead of positions, and a light decoder. At a quarter of the image's size a
block with a depthwise convolution and squeeze-excitation (Hu et al. 2018, arXiv:1709.01507) refines
what the decoder joined. The defaults are those of a face parser of at most 1 821 085 weights.
"""

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from murmur.learner_service.layers.dense import require_size
from murmur.learner_service.layers.dropout import Dropout
from murmur.learner_service.layers.resizing import Resize
from murmur.shared.config import Section

DENSE = True
_FIRST_STRIDE = 4  # of the first patches; further sizes are half of the one before


class Config(Section):
    """Options of the `segformer` network; 1 743 587 weights with 19 classes."""

    widths: tuple[int, ...] = Field(
        (32, 64, 128, 192),
        min_length=1,
        description="channels of each stage; the first one works at a quarter of the image's "
        "size, each further one at half the size before",
    )
    depths: tuple[int, ...] = Field((1, 2, 2, 2), description="blocks of each stage")
    heads: tuple[int, ...] = Field((1, 1, 1, 1), description="attention heads of each stage")
    reductions: tuple[int, ...] = Field(
        (8, 4, 2, 1),
        description="by how much keys and values are shrunk on each side, in each stage",
    )
    mlp_ratio: int = Field(2, ge=1, description="width of a block's linear layers over its own")
    decoder: int = Field(128, ge=1, description="channels of the decoder")
    refine: bool = Field(
        True, description="a depthwise convolution with squeeze-excitation after the decoder"
    )
    dropout: float = Field(
        0.15,
        ge=0,
        lt=0.8,
        description="share that is zeroed, times 0.5 in the first stage rising to 1.25 in the last",
    )

    @model_validator(mode="after")
    def _stages_fit(self) -> "Config":
        if not len(self.widths) == len(self.depths) == len(self.heads) == len(self.reductions):
            raise ValueError(
                f"widths {self.widths}, depths {self.depths}, heads {self.heads} and reductions "
                f"{self.reductions} must be equally long"
            )
        if min(*self.widths, *self.depths, *self.heads, *self.reductions) < 1:
            raise ValueError("widths, depths, heads and reductions must be at least 1")
        for width, heads in zip(self.widths, self.heads, strict=True):
            if width % heads:
                raise ValueError(f"width {width} is no multiple of its {heads} heads")
        return self


class Attention(nn.Module):
    """Self-attention whose keys and values come from a map shrunk by `reduction`."""

    def __init__(self, width: int, heads: int, reduction: int) -> None:
        super().__init__()
        self._heads = heads
        self.query, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.reduce: nn.Module | None = None
        if reduction > 1:
            self.reduce = nn.Conv2d(width, width, reduction, stride=reduction)
            self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        """[B, h * w, C] -> [B, h * w, C]; `size` is (h, w)."""
        b, n, c = x.shape
        seen = x
        if self.reduce is not None:
            shrunk = self.reduce(x.transpose(1, 2).reshape(b, c, *size))
            seen = self.norm(shrunk.flatten(2).transpose(1, 2))  # [B, m, C]
        query = self.query(x).view(b, n, self._heads, -1).transpose(1, 2)
        both = self.key_value(seen).view(b, seen.shape[1], 2, self._heads, -1)
        key, value = both.permute(2, 0, 3, 1, 4).unbind(0)  # [B, heads, m, C / heads]
        mixed = F.scaled_dot_product_attention(query, key, value)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(b, n, c))
        return out


class Block(nn.Module):
    """Attention, then linear layers with a depthwise convolution between them; both residual."""

    def __init__(
        self, width: int, heads: int, reduction: int, mlp_ratio: int, dropout: float
    ) -> None:
        super().__init__()
        self.attention = Attention(width, heads, reduction)
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        hidden = mlp_ratio * width
        self.widen, self.narrow = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.local = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        """[B, h * w, C] -> [B, h * w, C]."""
        x = x + self.dropout(self.attention(self.norm_1(x), size))
        wide = self.widen(self.norm_2(x)).transpose(1, 2)  # [B, hidden, h * w]
        wide = self.local(wide.reshape(*wide.shape[:2], *size)).flatten(2).transpose(1, 2)
        out: Tensor = x + self.dropout(self.narrow(F.gelu(wide)))
        return out


class Stage(nn.Module):
    """Overlapping patches, then blocks: [B, I, h, w] -> [B, C, h / stride, w / stride]."""

    def __init__(self, inputs: int, config: Config, number: int) -> None:
        super().__init__()
        width, stages = config.widths[number], len(config.widths)
        kernel, stride = (7, _FIRST_STRIDE) if number == 0 else (3, 2)
        share = 0.5 + 0.75 * number / max(1, stages - 1)
        self.patches = nn.Conv2d(inputs, width, kernel, stride, kernel // 2)
        self.norm_in, self.norm_out = nn.LayerNorm(width), nn.LayerNorm(width)
        heads, reduction = config.heads[number], config.reductions[number]
        self.blocks = nn.ModuleList(
            Block(width, heads, reduction, config.mlp_ratio, config.dropout * share)
            for _ in range(config.depths[number])
        )

    def forward(self, x: Tensor) -> Tensor:
        """Run the stage: patches, then its blocks, to a map."""
        x = self.patches(x)
        size = (x.shape[2], x.shape[3])
        x = self.norm_in(x.flatten(2).transpose(1, 2))
        for block in self.blocks:
            x = block(x, size)
        out: Tensor = self.norm_out(x).transpose(1, 2).reshape(x.shape[0], -1, *size)
        return out


class Refine(nn.Module):
    """Depthwise and pointwise convolution, squeeze-excitation, residual; keeps the shape."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.local = nn.Conv2d(width, width, 3, padding=1, groups=width, bias=False)
        self.mix = nn.Conv2d(width, width, 1, bias=False)
        self.norm = nn.GroupNorm(1, width)
        squeezed = max(1, width // 8)
        self.squeeze, self.excite = nn.Linear(width, squeezed), nn.Linear(squeezed, width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, h, w] -> [B, C, h, w]."""
        y = F.gelu(self.norm(self.mix(self.local(x))))
        gate = torch.sigmoid(self.excite(F.relu(self.squeeze(y.mean((2, 3))))))
        return x + y * gate[:, :, None, None]


class SegFormer(nn.Module):
    """SegFormer network for images of one size; the module describes it."""

    def __init__(self, config: Config, size: tuple[int, int], num_classes: int) -> None:
        super().__init__()
        inputs = (3, *config.widths[:-1])
        self.stages = nn.ModuleList(Stage(n, config, i) for i, n in enumerate(inputs))
        sizes = map_sizes(size, len(inputs))
        self.enlarge = nn.ModuleList(Resize(each, sizes[0]) for each in sizes)
        self.project = nn.ModuleList(nn.Conv2d(n, config.decoder, 1) for n in config.widths)
        self.fuse = nn.Conv2d(len(inputs) * config.decoder, config.decoder, 1, bias=False)
        self.norm = nn.GroupNorm(1, config.decoder)
        self.dropout = Dropout(config.dropout)
        self.refine = Refine(config.decoder) if config.refine else nn.Identity()
        self.classify = nn.Conv2d(config.decoder, num_classes, 1)
        self.to_image = Resize(sizes[0], size)

    def forward(self, image: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, K, H, W]."""
        x, maps = image, []
        for stage, project, enlarge in zip(self.stages, self.project, self.enlarge, strict=True):
            x = stage(x)
            maps.append(enlarge(project(x)))
        x = F.relu(self.norm(self.fuse(torch.cat(maps, 1))))
        out: Tensor = self.to_image(self.classify(self.dropout(self.refine(x))))
        return out


def map_sizes(size: tuple[int, int], stages: int) -> list[tuple[int, int]]:
    """Height and width of each stage's map; a stride that does not divide rounds up."""
    sizes = []
    for number in range(stages):
        stride = _FIRST_STRIDE if number == 0 else 2
        size = (-(-size[0] // stride), -(-size[1] // stride))
        sizes.append(size)
    return sizes


def build(config: Config, size: tuple[int, int], num_classes: int) -> SegFormer:
    """Build the network.

    Raises:
        ConfigError: if a stage's map is smaller than what its attention reduces it by.
    """
    strides = [_FIRST_STRIDE * 2**i for i in range(len(config.widths))]
    least = max(s * r for s, r in zip(strides, config.reductions, strict=True))
    require_size("segformer", size, least, f"network.reductions {list(config.reductions)}")
    return SegFormer(config, size, num_classes)

"""Networks that map an image to logits for each pixel."""

from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from murmur.learner_service.layers.building import build_network, resolve_network
from murmur.learner_service.layers.dense import build_dense
from murmur.learner_service.layers.dropout import Dropout, draw_from
from murmur.learner_service.layers.inputs import InputShape
from murmur.learner_service.layers.resizing import Resize, picture_weights, resize
from murmur.shared.config import PluginConfig, Section
from murmur.shared.process.errors import ConfigError

NAMES = ("unet", "segformer")
MOST_WEIGHTS = 1_821_085  # the face parsing challenge's limit


@pytest.mark.parametrize("name", [*NAMES, "auto"])
def test_default_networks_keep_the_limit_of_weights(name: str) -> None:
    network = build_dense(PluginConfig(name=name), (64, 64), 19)
    assert sum(p.numel() for p in network.parameters()) <= MOST_WEIGHTS


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [(64, 64), (37, 50)])
def test_logits_have_the_images_size(name: str, size: tuple[int, int]) -> None:
    network = build_dense(PluginConfig(name=name), size, 5)
    logits = network(torch.rand(2, 3, *size))
    assert logits.shape == (2, 5, *size)
    logits.sum().backward()
    assert all(p.grad is not None for p in network.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_an_image_is_predicted_alike_alone_and_among_others(name: str) -> None:
    network = build_dense(PluginConfig(name=name), (32, 32), 3).train()
    for layer in network.modules():
        if isinstance(layer, Dropout):
            layer.p = 0.0
    images = torch.rand(3, 3, 32, 32)
    torch.testing.assert_close(network(images)[:1], network(images[:1]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "size", "words"),
    [
        ("unet", (64, 12), r"at least 16 x 16 pixels.*halves them 4 times.*64 x 12.*source.size"),
        ("segformer", (24, 64), r"at least 32 x 32 pixels.*reductions \[8, 4, 2, 1\].*24 x 64"),
    ],
)
def test_images_too_small_are_refused(name: str, size: tuple[int, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_dense(PluginConfig(name=name), size, 3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"name": "unet", "channels": (8, 12)}, "channels 12 is no multiple of groups 8"),
        ({"name": "segformer", "heads": (1, 1, 1, 5)}, "width 192 is no multiple of its 5 heads"),
        ({"name": "segformer", "depths": (1, 1)}, "must be equally long"),
        ({"name": "segformer", "depths": (1, 1, 1, 0)}, "must be at least 1"),
    ],
)
def test_options_that_contradict_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_dense(PluginConfig(**options), (64, 64), 3)


def test_policies_and_segmentation_refuse_each_others_networks() -> None:
    with pytest.raises(ConfigError, match=r"'unet' maps an image to logits.*'segmentation'"):
        build_network(PluginConfig(name="unet"), InputShape((3, 64, 64), 0), 4)
    with pytest.raises(ConfigError, match=r"'mlp' maps observations to actions.*'segformer'"):
        build_dense(PluginConfig(name="mlp"), (64, 64), 4)
    with pytest.raises(ConfigError, match="'segformer' maps an image"):
        resolve_network(PluginConfig(name="segformer"), None)


class Wrong(nn.Module):
    """Logits of another size than the image."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 2, 3)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(image)
        return out


def test_a_foreign_network_that_breaks_the_contract_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plugin = SimpleNamespace(
        __name__="foreign", DENSE=True, Config=Section, build=lambda config, size, classes: Wrong()
    )
    monkeypatch.setattr("murmur.shared.config.plugins.load_plugin", lambda *_: plugin)
    with pytest.raises(ConfigError, match=r"gives \(2, 2, 6, 6\).*must give \(2, 2, 8, 8\)"):
        build_dense(PluginConfig(name="foreign"), (8, 8), 2)


@pytest.mark.parametrize(("source", "target"), [((5, 7), (12, 9)), ((16, 13), (6, 13))])
def test_resize_equals_torchs_interpolation(
    source: tuple[int, int], target: tuple[int, int]
) -> None:
    x = torch.rand(2, 3, *source, generator=torch.Generator().manual_seed(1))
    wanted = F.interpolate(x, target, mode="bilinear", align_corners=False, antialias=True)
    torch.testing.assert_close(Resize(source, target)(x), wanted)


@pytest.mark.parametrize("size", [(20, 30), (13, 61), (64, 80), (40, 61), (80, 122)])
def test_pictures_are_resized_as_opencv_does(size: tuple[int, int]) -> None:
    picture = torch.randint(0, 256, (1, 3, 40, 61), generator=torch.Generator().manual_seed(2))
    rows, columns = (
        picture_weights(torch.zeros(source), torch.zeros(target))
        for source, target in zip((40, 61), size, strict=True)
    )
    ours = resize(picture.float(), rows, columns)[0].permute(1, 2, 0)
    how = cv2.INTER_AREA if size[0] <= 40 and size[1] <= 61 else cv2.INTER_LINEAR
    pixels = picture[0].permute(1, 2, 0).numpy().astype(np.uint8)
    theirs = cv2.resize(pixels, size[::-1], interpolation=how)
    assert np.abs(ours.numpy() - theirs).max() <= 1  # OpenCV rounds


def test_dropout_repeats_with_its_generator_and_keeps_the_mean() -> None:
    layers = nn.Sequential(nn.Identity(), Dropout(0.25))
    x = torch.ones(10_000)
    draws = []
    for _ in range(2):
        draw_from(layers, torch.Generator().manual_seed(3))
        draws.append(layers(x))
    assert torch.equal(*draws)
    assert draws[0].unique().tolist() == pytest.approx([0, 4 / 3])
    assert draws[0].mean() == pytest.approx(1, abs=0.02)
    assert torch.equal(layers.eval()(x), x)

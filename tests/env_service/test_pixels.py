"""Images of other libraries' environments, made smaller before they travel."""

import sys
from typing import Any

import cv2
import numpy as np
import pytest
from gymnasium.spaces import Box

from murmur.env_service.adapters.factory import AdapterConfig
from murmur.env_service.adapters.observations import ObservationLayout, state_layout
from murmur.env_service.adapters.pixels import Resize, reduced_shape, reducing_writer
from murmur.env_service.environment import make_environment
from murmur.shared.config import PluginConfig
from murmur.shared.config.section import validate
from murmur.shared.process.errors import ConfigError
from murmur.shared.wire.timestep import Array


def smooth(*shape: int) -> Array:
    noise = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    return np.asarray(cv2.GaussianBlur(noise, (5, 5), 0), np.uint8)


def reduced(image: Array, resize: Resize = "none", *, gray: bool = False) -> Array:
    """What travels of an image that comes as H x W x C, or H x W."""
    last = image.ndim == 3
    chw = (image.shape[2], *image.shape[:2]) if last else (1, *image.shape)
    place = np.zeros(reduced_shape(chw, resize, gray), np.uint8)
    write = reducing_writer(image.shape, place.shape, channels_last=last)
    write(place, image)
    return place


def test_blocks_of_one_colour_become_pixels() -> None:
    small = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3) * 10
    large = small.repeat(4, 0).repeat(6, 1)  # 8 x 18
    np.testing.assert_array_equal(reduced(large, (2, 3)), small.transpose(2, 0, 1))


@pytest.mark.parametrize("size", [(280, 480), (457, 120), (210, 160), (100, 90)])
def test_within_two_levels_of_the_mean_of_what_is_reduced(size: tuple[int, int]) -> None:
    image = smooth(*size, 3)
    exact = cv2.resize(image, (84, 84), interpolation=cv2.INTER_AREA).transpose(2, 0, 1)
    difference = reduced(image, 84).astype(int) - exact
    assert np.abs(difference).mean() < 2


def test_no_pixel_is_left_out() -> None:
    black = np.zeros((280, 480), np.uint8)
    for at in np.random.default_rng(1).integers(0, (280, 480), (40, 2)):
        image = black.copy()
        image[at[0] : at[0] + 2, at[1] : at[1] + 2] = 255
        assert reduced(image, 84).max() > 10


def test_grey_is_the_eyes_weighted_mean_of_colours() -> None:
    image = np.zeros((5, 6, 3), np.uint8)
    image[0, 0], image[0, 1], image[0, 2] = (255, 0, 0), (0, 255, 0), (0, 0, 255)
    # 0.299 R + 0.587 G + 0.114 B
    assert reduced(image, gray=True)[0, 0, :4].tolist() == [76, 150, 29, 0]


def test_channels_may_come_first() -> None:
    image = smooth(40, 60, 3)
    write = reducing_writer((3, 40, 60), (1, 20, 20), channels_last=False)
    place = np.zeros((1, 20, 20), np.uint8)
    write(place, image.transpose(2, 0, 1))
    np.testing.assert_array_equal(place, reduced(image, 20, gray=True))


def test_auto_reduces_large_images_alone() -> None:
    assert reduced_shape((3, 457, 120), "auto", False) == (3, 84, 84)
    assert reduced_shape((3, 96, 96), "auto", False) == (3, 96, 96)
    assert reduced_shape((3, 457, 120), "none", False) == (3, 457, 120)


def test_what_is_no_such_image_is_a_fault() -> None:
    write = reducing_writer((40, 60, 3), (3, 20, 20), channels_last=True)
    place = np.zeros((3, 20, 20), np.uint8)
    with pytest.raises(ValueError, match="has dtype float64, its space says uint8"):
        write(place, np.zeros((40, 60, 3)))
    with pytest.raises(ValueError, match=r"has shape \(60, 40, 3\), its space says \(40, 60, 3\)"):
        write(place, np.zeros((60, 40, 3), np.uint8))


def test_four_channels_have_no_grey() -> None:
    with pytest.raises(ConfigError, match="image of 4 channels is not red, green and blue"):
        reduced_shape((4, 90, 90), "none", True)


def test_without_opencv_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cv2", None)
    with pytest.raises(ConfigError, match=r"made 84 x 84.*needs 'cv2'.*images.*resize: none"):
        reducing_writer((280, 480, 3), (3, 84, 84), channels_last=True)


def test_layouts_hold_the_reduced_image() -> None:
    space = Box(0, 255, (40, 60, 3), np.uint8)
    config = AdapterConfig(factory="some:factory", resize=(10, 20), gray=True)
    layout = ObservationLayout({"a": space, "b": space}, config)
    (array,) = layout.arrays
    assert (array.name, array.dtype, array.shape) == ("image", "uint8", (1, 10, 20))
    assert layout.reduced == ["image [40, 60, 3] travels as uint8 [1, 10, 20]"]
    arrays = {"image": np.zeros((2, 2, 1, 10, 20), np.uint8)}
    image = smooth(40, 60, 3)
    for path, write, place in layout.parts(arrays, 1, 0):
        assert path == ()
        write(place, image)
    np.testing.assert_array_equal(arrays["image"][1, 0], reduced(image, (10, 20), gray=True))
    spec, write, view, _ = state_layout(space, config)
    assert spec.shape == (1, 10, 20)
    write(view(arrays["image"][0, 0]), image)
    np.testing.assert_array_equal(arrays["image"][0, 0], arrays["image"][1, 0])


def test_floating_point_images_stay_as_they_are() -> None:
    space = Box(0, 1, (200, 200, 3), np.float32)
    config = AdapterConfig(factory="some:factory", images="all")
    (array,) = ObservationLayout({"a": space}, config).arrays
    assert (array.dtype, array.shape) == ("float32", (3, 200, 200))


def test_sizes_out_of_range_are_refused() -> None:
    from murmur.env_service.envs.gymnasium import Config

    for wrong in (2, [84], "large", [84, 5000]):
        with pytest.raises(ConfigError, match="resize"):
            validate(Config, {"factory": "a:b", "resize": wrong}, "environment")
    allowed = validate(Config, {"factory": "a:b", "resize": [60, 80]}, "environment")
    assert allowed.resize == (60, 80)


@pytest.mark.filterwarnings("ignore")  # what these libraries warn of is theirs
@pytest.mark.parametrize(("factory", "agents"), [("cooperative_pong_v6", 2), ("pistonball_v6", 20)])
def test_butterfly_travels_reduced(factory: str, agents: int) -> None:
    if factory.startswith("pistonball"):
        pytest.importorskip("pymunk")
    options: dict[str, Any] = {
        "factory": f"pettingzoo.butterfly.{factory}:parallel_env",
        "arguments": {"render_mode": "rgb_array"},
    }
    environment = make_environment(PluginConfig(name="pettingzoo", **options), 1)
    image = environment.spec.observation("image")
    assert image is not None
    assert (environment.spec.num_agents, image.shape) == (agents, (3, 84, 84))
    timestep = environment.reset(np.zeros(1, np.uint64))
    assert timestep.observation["image"].std() > 1
    environment.close()

"""Source `faces`: what a sample is follows from seed, split and index; all classes occur."""

import numpy as np
import pytest

from murmur.env_service.sources.faces import Config, build
from murmur.env_service.sources.faces.camera import middle
from murmur.env_service.sources.faces.classes import CLASSES, FLIP_PAIRS, Part
from murmur.env_service.sources.faces.person import Head, rotation
from murmur.env_service.sources.source import make_source, read_sample
from murmur.shared.config import PluginConfig
from murmur.shared.process.errors import ConfigError
from murmur.shared.wire.timestep import Array


def test_sample_is_a_function_of_seed_split_and_index() -> None:
    first, second = build(Config(size=48)), build(Config(size=48))
    assert first.spec == second.spec
    second.read("valid", 7)  # the order of reading does not matter
    wanted = first.read("train", 3)
    for name, array in second.read("train", 3).items():
        np.testing.assert_array_equal(array, wanted[name])
    others = [
        first.read("train", 4),
        first.read("valid", 3),
        build(Config(size=48, seed=1)).read("train", 3),
    ]
    for other in others:
        assert (other["mask"] != wanted["mask"]).any()


def test_digest_follows_the_options() -> None:
    digests = {
        build(config).spec.digest
        for config in (Config(), Config(seed=1), Config(size=64), Config(train=9), Config(valid=9))
    }
    assert len(digests) == 5


@pytest.mark.parametrize("size", [(40, 24), (16, 16)])
def test_arrays_have_the_configured_size(size: tuple[int, int]) -> None:
    source = make_source(PluginConfig(name="faces", size=list(size)))
    for index in range(5):
        sample = read_sample(source, "train", index)
        assert sample["image"].shape == (3, *size)
        assert sample["mask"].shape == size


@pytest.mark.parametrize(("size", "part"), [((48, 80), np.s_[16:64]), ((80, 48), np.s_[:, 16:64])])
def test_oblong_picture_is_the_middle_of_a_square_one(
    size: tuple[int, int], part: tuple[slice, ...]
) -> None:
    square, cut = build(Config(size=80)), build(Config(size=size))
    assert cut.spec.digest != square.spec.digest
    for index in range(3):
        whole, middle = square.read("train", index), cut.read("train", index)
        np.testing.assert_array_equal(middle["mask"], whole["mask"][part])


def test_the_middle_keeps_proportions() -> None:
    square = np.arange(10 * 10, dtype=np.uint8).reshape(10, 10)
    np.testing.assert_array_equal(middle(square, (3, 6)), square[2:7])  # 5 x 10
    np.testing.assert_array_equal(middle(square, (8, 4)), square[:, 2:7])
    np.testing.assert_array_equal(middle(square, (7, 7)), square)
    assert middle(square, (1, 100)).shape == (1, 10)


@pytest.fixture(scope="module")
def samples() -> list[dict[str, Array]]:
    source = build(Config(size=80))
    return [source.read("train", index) for index in range(50)]


def test_every_class_occurs_and_pictures_vary(samples: list[dict[str, Array]]) -> None:
    with_class = np.array([np.bincount(s["mask"].ravel(), minlength=19) > 0 for s in samples])
    assert (with_class.sum(0) > 2).all(), dict(zip(CLASSES, with_class.sum(0), strict=True))
    means = np.array([s["image"].mean() for s in samples])
    assert means.std() > 10
    assert 40 < means.mean() < 200


def test_parts_of_the_left_are_on_the_left(samples: list[dict[str, Array]]) -> None:
    apart: dict[tuple[int, int], list[float]] = {pair: [] for pair in FLIP_PAIRS}
    for mask in (sample["mask"] for sample in samples):
        for left, right in FLIP_PAIRS:
            if min(np.sum(mask == left), np.sum(mask == right)) > 8:
                middles = [np.argwhere(mask == part)[:, 1].mean() for part in (left, right)]
                apart[left, right].append(middles[1] - middles[0])
    assert set(apart) == {
        (Part.l_eye, Part.r_eye),
        (Part.l_brow, Part.r_brow),
        (Part.l_ear, Part.r_ear),
    }
    for found in apart.values():
        assert len(found) >= 5
        assert min(found) > 0


def test_head_turns_as_its_angles_say() -> None:
    nose = np.array([0.0, 0.0, 1.0])
    assert (rotation(0.3, 0, 0) @ nose)[0] == pytest.approx(np.sin(0.3))  # to the right
    assert (rotation(0, 0.3, 0) @ nose)[1] == pytest.approx(-np.sin(0.3))  # up
    ear = np.array([1.0, 0.0, 0.0])
    assert (rotation(0, 0, 0.3) @ ear)[1] == pytest.approx(np.sin(0.3))  # clockwise


def test_face_is_as_wide_as_the_head() -> None:
    head = Head(np.random.default_rng(0))
    width = float(head.half_width(0.2))
    rim = head.face(np.array([(width, 0.2), (-width, 0.2)]))
    np.testing.assert_allclose(rim, [(width, 0.2, 0), (-width, 0.2, 0)], atol=1e-12)


def test_portraits_larger_than_drawn_are_refused() -> None:
    with pytest.raises(ConfigError, match="portraits are drawn at up to 512"):
        make_source(PluginConfig(name="faces", size=513))

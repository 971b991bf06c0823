"""Ground truths: generated and cut out of files."""

from pathlib import Path

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from murmur.env_service.envs.terrain import Config, make
from murmur.env_service.envs.terrain.world import (
    GaussianField,
    RasterWorld,
    half_plane,
    load_raster,
    resample,
    world,
)
from murmur.shared.process.errors import RasterError

SHAPE = (100, 120)


def draws(config: Config, count: int) -> np.ndarray:
    draw = world(config, SHAPE)
    return np.stack([draw(np.random.default_rng(seed)) for seed in range(count)])


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("half-plane", 0.30, 0.60),
        ("corner", 0.55**2, 0.74**2),
        ("band", 0.31, 0.69),  # 31 to 59 %, or the rest
        ("corners-2", 2 * 0.39**2, 2 * 0.54**2 - 0.08**2 + 0.01),
        ("corners-4", 4 * 0.28**2, 1 - 4 * 0.31**2),
    ],
)
def test_shares_of_interest(name: str, low: float, high: float) -> None:
    worlds = draws(Config(world=name), 200)
    assert worlds.dtype == np.uint8
    assert set(np.unique(worlds)) == {0, 1}
    shares = worlds.mean(axis=(1, 2))
    assert low - 0.02 <= shares.min()
    assert shares.max() <= high + 0.02
    assert shares.max() - shares.min() > 0.4 * (high - low)
    again = draws(Config(world=name), 3)
    np.testing.assert_array_equal(worlds[:3], again)


def test_half_plane_has_124_maps() -> None:
    drawn = {half_plane((493, 493), np.random.default_rng(s)).tobytes() for s in range(1500)}
    assert len(drawn) == 124


@pytest.mark.parametrize("shape", [(64, 64), (63, 50)])
def test_gaussian_field_has_the_spectrum(shape: tuple[int, int]) -> None:
    draw = GaussianField(shape, 3.0)
    power = np.zeros(shape)
    for seed in range(300):
        power += np.abs(np.fft.fft2(draw.field(np.random.default_rng(seed)))) ** 2
    k = np.hypot(*np.meshgrid(*(np.fft.fftfreq(n, 1 / n) for n in shape), indexing="ij"))
    k[0, 0] = 1
    scaled = power / k**-3.0
    scaled[0, 0] = np.nan
    # the mean of 300 exponential variables at every frequency, also where conjugates meet
    relative = scaled / np.nanmean(scaled)
    assert np.nanstd(relative) < 0.1
    assert np.nanmean(relative[:, 0]) == pytest.approx(1, abs=0.05)
    assert np.nanmean(relative[:, 1]) == pytest.approx(1, abs=0.05)


def test_gaussian_is_cut_at_half_its_range() -> None:
    draw = GaussianField((50, 50), 5.0)
    field = draw.field(np.random.default_rng(1))
    wanted = (field - field.min()) / (field.max() - field.min()) >= 0.5
    assert (draw(np.random.default_rng(1)) == wanted).mean() > 0.999


def test_bundled_raster() -> None:
    values = load_raster("jacksboro")
    assert values.shape == (344, 403)
    assert values.min() == 236
    worlds = draws(Config(world="raster"), 20)
    shares = worlds.mean(axis=(1, 2))
    assert ((shares >= 0.1) & (shares <= 0.9)).all()
    assert len({w.tobytes() for w in worlds}) == 20
    fixed = draws(Config(world="raster", raster_quantile_of="raster"), 5)
    assert fixed.mean(axis=(1, 2)).std() > shares.std()


def test_crop_is_the_raster_itself(tmp_path: Path) -> None:
    values = np.arange(100 * 120, dtype=np.float32).reshape(SHAPE)
    np.save(tmp_path / "ramp.npy", values)
    config = Config(
        world="raster",
        raster=str(tmp_path / "ramp.npy"),
        raster_crop=1.0,
        raster_augment=False,
        raster_threshold=5999.0,
    )
    truth = RasterWorld(config, SHAPE).draw(np.random.default_rng(0))
    np.testing.assert_array_equal(truth, values > 5999)


def test_file_formats_agree(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 60000, (40, 50)).astype(np.uint16)
    np.save(tmp_path / "a.npy", values)
    cv2.imwrite(str(tmp_path / "a.png"), values)
    for name in ("a.npy", "a.png"):
        np.testing.assert_array_equal(load_raster(str(tmp_path / name)), values)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint16, np.int32, np.float32])
@pytest.mark.parametrize("compression", [1, 5, 8], ids=["none", "LZW", "deflate"])
def test_kinds_of_tiff(tmp_path: Path, dtype: type, compression: int) -> None:
    low = 0 if np.issubdtype(dtype, np.unsignedinteger) else -9998
    values = np.random.default_rng(0).integers(low, 250, (40, 50)).astype(dtype)
    file = str(tmp_path / "a.tif")
    assert cv2.imwrite(file, values, [cv2.IMWRITE_TIFF_COMPRESSION, compression])
    np.testing.assert_array_equal(load_raster(file), values)


def test_colours_are_no_values(tmp_path: Path) -> None:
    image = Image.fromarray(np.arange(100, dtype=np.uint8).reshape(10, 10))
    for mode in ("P", "RGB"):
        image.convert(mode).save(tmp_path / "a.png")
        with pytest.raises(RasterError, match=r"shape \(10, 10, 3\); save a single band"):
            load_raster(str(tmp_path / "a.png"))


def test_resampling_by_hand() -> None:
    """Three cells to two: the first covers cell 0 and half of cell 1. And to six, and none lost."""
    column = np.array([[1.0], [2.0], [6.0]], np.float32)
    means = resample(column, (2, 1), nearest=False)
    np.testing.assert_allclose(means, [[(1 + 0.5 * 2) / 1.5], [(0.5 * 2 + 6) / 1.5]])
    np.testing.assert_array_equal(resample(column, (6, 1), nearest=False)[:, 0], [1, 1, 2, 2, 6, 6])
    np.testing.assert_array_equal(resample(column, (2, 1), nearest=True)[:, 0], [1, 2])
    np.testing.assert_array_equal(resample(column.T, (1, 4), nearest=True), [[1, 1, 2, 6]])


@pytest.mark.parametrize("shape", [(120, 100), (493, 493), (50, 61), (245, 300)])
def test_means_equal_opencv(shape: tuple[int, int]) -> None:
    values = load_raster("jacksboro")[:245, :300]
    theirs = cv2.resize(np.ascontiguousarray(values), shape[::-1], interpolation=cv2.INTER_AREA)
    np.testing.assert_allclose(resample(values, shape, nearest=False), theirs, rtol=1e-6)


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        (np.full((10, 10), 1e300), "100 of 100 cells that are not finite"),
        (np.zeros((0, 10)), r"shape \(0, 10\): there is nothing in it"),
        (np.zeros((10, 10), "m8[s]"), r"holds timedelta64\[s\]; save real numbers"),
        (np.zeros((10, 10), "f4,f4"), "holds .*; save real numbers"),
    ],
)
def test_values_that_are_no_heights(
    tmp_path: Path, values: NDArray[np.generic], wanted: str
) -> None:
    np.save(tmp_path / "a.npy", values)
    with pytest.raises(RasterError, match=wanted):
        load_raster(str(tmp_path / "a.npy"))


def test_a_header_that_is_no_python(tmp_path: Path) -> None:
    """Found by fuzzing: NumPy raises what Python's tokenizer does."""
    header = b"{'descr': '<f4', 'shape': (8, 8"
    header += b" " * (118 - len(header))
    content = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(256)
    (tmp_path / "a.npy").write_bytes(content)
    with pytest.raises(RasterError, match="cannot be read"):
        load_raster(str(tmp_path / "a.npy"))


def test_unusable_files(tmp_path: Path) -> None:
    good = np.random.default_rng(0).random((40, 50)).astype(np.float32)
    hole = good.copy()
    hole[3, 4] = np.nan
    missing = good.copy()
    missing[0, :2] = -9999
    np.save(tmp_path / "hole.npy", hole)
    np.save(tmp_path / "flat.npy", np.full((40, 50), 7.0))
    np.save(tmp_path / "cube.npy", np.zeros((3, 40, 50)))
    np.save(tmp_path / "text.npy", np.array([["a", "b"], ["c", "d"]]))
    np.save(tmp_path / "small.npy", good[:9, :9])
    np.save(tmp_path / "good.npy", good)
    (tmp_path / "torn.npy").write_bytes(b"\x93NUMPY\x01\x00")
    (tmp_path / "torn.png").write_bytes(b"no picture")
    (tmp_path / "torn.tif").write_bytes(b"no picture")
    (tmp_path / "a.jpg").write_bytes(b"")
    Image.fromarray(missing).save(tmp_path / "gaps.tif", tiffinfo={42113: "-9999"})

    def message(name: str, **options: object) -> str:
        path = str(tmp_path / name)
        with pytest.raises(RasterError) as caught:
            make(Config(world="raster", raster=path, **options), 1)  # type: ignore[arg-type]
        text = str(caught.value)
        assert path in text
        assert "\n" not in text
        return text

    assert "does not exist" in message("none.tif")
    assert "1 of 2000 cells" in message("hole.npy")
    assert "2 of 2000 cells" in message("gaps.tif")
    assert "-9999" in message("gaps.tif")
    assert "is 7 everywhere" in message("flat.npy")
    assert "shape (3, 40, 50)" in message("cube.npy")
    assert "holds <U1" in message("text.npy")
    assert "crops of 4 cells" in message("small.npy")
    assert "one class at threshold 2" in message("good.npy", raster_threshold=2.0)
    for torn in ("torn.npy", "torn.png", "torn.tif"):
        assert "cannot be" in message(torn)
    assert "is a '.jpg' file" in message("a.jpg")


def test_crops_of_one_class_only(tmp_path: Path) -> None:
    spot = np.zeros((400, 400))
    spot[0, 0] = 1
    np.save(tmp_path / "spot.npy", spot)
    config = Config(
        world="raster",
        raster=str(tmp_path / "spot.npy"),
        raster_threshold=0.5,
        raster_crop=0.05,
    )
    with pytest.raises(RasterError, match="20 crops in a row"):
        RasterWorld(config, (100, 100)).draw(np.random.default_rng(0))

"""Warps of tiny images by hand, and of larger ones beside kornia's."""

import math

import kornia.geometry.transform as kornia_geometry
import pytest
import torch
from torch import Tensor

from murmur.learner_service.preprocess.augment.presets import STRENGTHS, SampleAugment, parameters
from murmur.learner_service.preprocess.augment.warp import (
    coordinates,
    sources,
    warp_image,
    warp_mask,
)

CPU = torch.device("cpu")
LEFT, RIGHT = 4, 5


def grid_of(
    size: tuple[int, int],
    *,
    flip: float = 1,
    angle: float = 0,
    scale: float = 1,
    right: float = 0,
    down: float = 0,
) -> Tensor:
    one = [torch.tensor([x]) for x in (flip, angle, scale, right, down)]
    return sources(coordinates(CPU, size), one[0], one[1], one[2], (one[3], one[4]))


def warped(rows: list[list[float]], **how: float) -> list[list[float]]:
    image = torch.tensor(rows)[None, None]
    found = warp_image(image, grid_of((len(rows), len(rows[0])), **how))
    return [[round(x, 4) for x in row] for row in found[0, 0].tolist()]


SQUARE = [[1.0, 2.0], [3.0, 4.0]]


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({}, [[1, 2], [3, 4]]),
        ({"flip": -1.0}, [[2, 1], [4, 3]]),
        ({"angle": math.pi / 2}, [[2, 4], [1, 3]]),  # counter-clockwise: right column is on top
        ({"flip": -1.0, "angle": math.pi / 2}, [[1, 3], [2, 4]]),  # the flip comes first
        ({"right": 1.0}, [[0, 1], [0, 3]]),  # by half the width, one pixel
        ({"down": 0.5}, [[0.5, 1], [2, 3]]),  # by half a pixel: means with the outside's 0
        ({"scale": 0.5}, [[2.5 / 4 * 1.6, 0], [0, 0]]),  # see below
    ],
)
def test_warp_of_four_pixels(how: dict[str, float], expected: list[list[float]]) -> None:
    if "scale" in how:
        # Half the size: pixel centres ±0.5 look at ±1, the outer corners, where one pixel and
        # three zeros meet: a quarter of each corner.
        expected = [[0.25, 0.5], [0.75, 1.0]]
    assert warped(SQUARE, **how) == expected


def test_rotation_of_an_oblong_image_keeps_its_proportions() -> None:
    # A quarter turn of 2 x 4 pixels about the centre: the middle 2 x 2 turn, the rest is outside.
    rows = [[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]]
    assert warped(rows, angle=math.pi / 2) == [[0, 3, 7, 0], [0, 2, 6, 0]]


def test_warp_equals_kornias_affine_of_the_inverse_matrix() -> None:
    image, (h, w) = torch.rand(4, 3, 18, 26), (18, 26)
    flip = torch.tensor([1.0, -1.0, 1.0, -1.0])
    angle, scale = torch.tensor([0.0, 0.3, -0.4, 0.1]), torch.tensor([1.0, 0.9, 1.2, 1.05])
    right, down = torch.tensor([0.0, 0.1, -0.2, 0.05]), torch.tensor([0.1, 0.0, 0.15, -0.1])
    ours = warp_image(image, sources(coordinates(CPU, (h, w)), flip, angle, scale, (right, down)))
    # The same in pixels, forward: shift after rotation about the centre after the flip.
    centre = torch.tensor([[(w - 1) / 2, (h - 1) / 2]]).expand(4, 2)
    turn = kornia_geometry.get_rotation_matrix2d(
        centre, angle.rad2deg(), scale.unsqueeze(1).expand(4, 2)
    )
    last = torch.tensor([0.0, 0.0, 1.0]).expand(4, 1, 3)
    mirror = torch.eye(3).repeat(4, 1, 1)
    mirror[:, 0, 0], mirror[:, 0, 2] = flip, torch.where(flip < 0, w - 1.0, 0.0)
    matrix = torch.cat((turn, last), 1) @ mirror
    matrix[:, 0, 2] += right * w / 2
    matrix[:, 1, 2] += down * h / 2
    theirs = kornia_geometry.warp_affine(image, matrix[:, :2], (h, w), align_corners=True)
    # kornia's coordinates align corners, ours pixels: the same but for where the border fades.
    torch.testing.assert_close(ours[..., 2:-2, 2:-2], theirs[..., 2:-2, 2:-2], atol=2e-4, rtol=0)


def test_mask_is_nearest_and_ignored_outside() -> None:
    mask = torch.tensor([[[7, 8], [9, 10]]], dtype=torch.uint8)
    grid, one = grid_of((2, 2), right=0.9), torch.ones(1)
    found = warp_mask(mask, grid, one, 255)
    # 0.9 pixels to the right: the nearest of column 0 is outside, of column 1 is column 0.
    assert found.tolist() == [[[255, 7], [255, 9]]]
    assert found.dtype == torch.uint8
    assert warp_mask(mask, grid, one, 0).tolist() == [[[0, 7], [0, 9]]]


@pytest.mark.parametrize("strength", ["minimal", "standard"])
def test_flip_swaps_paired_classes_of_mirrored_samples_only(strength: str) -> None:
    mask = torch.tensor([[LEFT, 0, RIGHT], [1, 255, LEFT]], dtype=torch.uint8).expand(2, 2, 3)
    image = torch.arange(6.0).view(1, 1, 2, 3).expand(2, 3, 2, 3) / 10
    found, _ = parameters(STRENGTHS[strength])
    drawn = {name: torch.full((2,), float(p.neutral)) for name, p in found.items()}
    drawn["flip"] = torch.tensor([1.0, -1.0])
    augment = SampleAugment(STRENGTHS[strength], CPU, [(LEFT, RIGHT)])
    out = augment.apply({"image": image, "mask": mask}, drawn)
    assert out["mask"].tolist() == [
        [[LEFT, 0, RIGHT], [1, 255, LEFT]],
        [[LEFT, 0, RIGHT], [RIGHT, 255, 1]],  # mirrored: RIGHT 0 LEFT, then names swapped
    ]
    expected = torch.stack((image[0], image[1].flip(-1)))
    torch.testing.assert_close(out["image"], expected, atol=1e-5, rtol=0)


def test_warp_moves_image_and_mask_alike() -> None:
    torch.manual_seed(1)
    blocks = torch.randint(0, 4, (8, 6, 6), dtype=torch.uint8)
    mask = blocks.repeat_interleave(8, 1).repeat_interleave(8, 2)
    image = (mask.float() / 10).unsqueeze(1).expand(-1, 3, -1, -1)
    found, _ = parameters(STRENGTHS["strong"])
    drawn = {name: torch.full((8,), float(p.neutral)) for name, p in found.items()}
    u = torch.rand(4, 8) * 2 - 1
    drawn |= {"angle": 0.3 * u[0], "scale": 1 + 0.1 * u[1], "right": 0.1 * u[2], "down": 0.1 * u[3]}
    drawn["flip"] = u[0].sign()
    out = SampleAugment(STRENGTHS["strong"], CPU).apply({"image": image, "mask": mask}, drawn)
    inside = out["mask"] != 255
    same = (out["image"][:, 0] * 10 - out["mask"]).abs() < 0.5
    # They differ at the edges between blocks alone, where bilinear and nearest do.
    assert (same & inside).sum() > 0.9 * inside.sum()
    assert 0.7 < inside.float().mean() < 1

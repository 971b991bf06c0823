"""Random shifts beside DrQ-v2's way: replicate, then sample bilinearly."""

import torch
import torch.nn.functional as F
from torch import Tensor

from murmur.learner_service.preprocess.augment.shift import Colour, RandomShift

CPU = torch.device("cpu")


def by_grid_sample(image: Tensor, by: Tensor, pad: int) -> Tensor:
    """Windows of the padded image as bilinear samples at their pixels' centres."""
    n, _, h, w = image.shape
    padded = F.pad(image, (pad,) * 4, "replicate")
    rows = torch.arange(h)[None, :, None] + by[0, :, None, None]
    columns = torch.arange(w)[None, None, :] + by[1, :, None, None]
    x = (2 * columns + 1) / (w + 2 * pad) - 1
    y = (2 * rows + 1) / (h + 2 * pad) - 1
    grid = torch.stack((x.expand(n, h, w), y.expand(n, h, w)), -1)
    return F.grid_sample(padded, grid, padding_mode="zeros", align_corners=False)


def test_shift_of_a_row_by_hand() -> None:
    image = torch.tensor([[1, 2, 3]], dtype=torch.uint8).expand(3, 1, 1, 3)
    by = torch.tensor([[1, 1, 1], [0, 1, 2]])  # columns: one to the right, none, one to the left
    found = RandomShift(["image"], 1, CPU).apply(image, by)
    assert found[:, 0, 0].tolist() == [[1, 1, 2], [1, 2, 3], [2, 3, 3]]


def test_shift_equals_bilinear_samples_of_the_padded_image() -> None:
    image, pad = torch.rand(16, 4, 9, 7), 3
    by = torch.randint(2 * pad + 1, (2, 16))
    ours = RandomShift(["image"], pad, CPU).apply(image, by)
    torch.testing.assert_close(ours, by_grid_sample(image, by, pad), atol=1e-5, rtol=0)


def test_every_row_and_agent_has_a_shift_and_all_frames_share_it() -> None:
    ramp = torch.arange(12).view(1, 1, 1, 1, 12) * 16 + torch.arange(12).view(1, 1, 1, 12, 1)
    image = ramp.expand(128, 2, 3, 12, 12).to(torch.uint8)
    other = torch.zeros(128, 5)
    generator = torch.Generator().manual_seed(0)
    out = RandomShift(["image"], 4, CPU)({"image": image, "other": other}, generator)
    assert out["image"].dtype == torch.uint8
    assert out["image"].shape == image.shape
    assert out["other"] is other
    assert torch.equal(out["image"][:, :, 0], out["image"][:, :, 2])
    centres = out["image"][:, :, 0, 6, 6].flatten().long()
    assert len(centres.unique()) > 60  # of 256 draws of 81 shifts
    assert set((centres // 16 - 6).tolist()) == set(range(-4, 5))


def test_colour_keeps_bytes_and_their_type() -> None:
    image = torch.randint(0, 256, (64, 2, 6, 4, 4), dtype=torch.uint8)
    out = Colour(["image"], CPU)({"image": image}, torch.Generator().manual_seed(0))["image"]
    assert out.dtype == torch.uint8
    same = (out == image).flatten(2).all(2)
    assert 0.3 < same.float().mean() < 0.7  # half of them keep their colours

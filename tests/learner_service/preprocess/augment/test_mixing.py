"""MixUp and CutMix by hand."""

import torch
import torch.nn.functional as F

from murmur.learner_service.preprocess.augment.mixing import MASK_B, MIX, Mixing
from murmur.shared.config.experiment import AugmentConfig

CPU = torch.device("cpu")


def batch() -> dict[str, torch.Tensor]:
    """Two samples of 4 x 4: zeros of class 1, ones of class 2."""
    image = torch.stack((torch.zeros(3, 4, 4), torch.ones(3, 4, 4)))
    mask = torch.stack((torch.full((4, 4), 1), torch.full((4, 4), 2))).to(torch.uint8)
    return {"image": image, "mask": mask}


def test_mixup_blends_images_and_returns_both_masks() -> None:
    mixing, stays = Mixing(AugmentConfig(mixup=1.0), CPU), torch.ones(2)
    out = mixing.apply(batch(), torch.tensor([0.75, 1.0]), stays, torch.zeros(2, 2))
    assert out["image"][0].unique().tolist() == [0.25]  # 0.75 * 0 + 0.25 * 1
    assert out["image"][1].unique().tolist() == [1.0]  # not mixed
    assert out["mask"][:, 0, 0].tolist() == [1, 2]
    assert out[MASK_B][:, 0, 0].tolist() == [2, 1]
    assert out[MIX].tolist() == [0.75, 1.0]


def test_weighted_losses_equal_the_loss_of_the_mixed_target() -> None:
    out = Mixing(AugmentConfig(mixup=1.0), CPU).apply(
        batch(), torch.tensor([0.75, 1.0]), torch.ones(2), torch.zeros(2, 2)
    )
    logits = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    parts = [
        F.cross_entropy(logits, out[name].long(), reduction="none").mean((1, 2))
        for name in ("mask", MASK_B)
    ]
    loss = out[MIX] * parts[0] + (1 - out[MIX]) * parts[1]
    soft = torch.tensor([[0.0, 0.75, 0.25], [0.0, 0.0, 1.0]]).view(2, 3, 1, 1).expand(2, 3, 4, 4)
    expected = F.cross_entropy(logits, soft, reduction="none").mean((1, 2))
    torch.testing.assert_close(loss, expected)


def test_cutmix_pastes_the_same_rectangle_into_image_and_mask() -> None:
    # Three quarters stay: a rectangle of half the width and height, in the middle.
    out = Mixing(AugmentConfig(cutmix=1.0), CPU).apply(
        batch(), torch.ones(2), torch.tensor([0.75, 1.0]), torch.full((2, 2), 0.5)
    )
    assert out["mask"][0].tolist() == [[1, 1, 1, 1], [1, 2, 2, 1], [1, 2, 2, 1], [1, 1, 1, 1]]
    assert torch.equal(out["image"][0, 0], (out["mask"][0] == 2).float())
    assert out["mask"][1].unique().tolist() == [2]
    assert MASK_B not in out


def test_rectangle_beyond_the_image_is_cut_off() -> None:
    out = Mixing(AugmentConfig(cutmix=1.0), CPU).apply(
        batch(), torch.ones(2), torch.tensor([0.75, 1.0]), torch.zeros(2, 2)
    )
    assert (out["mask"][0] == 2).nonzero().tolist() == [[0, 0]]


def test_each_way_has_its_share_and_none_has_both() -> None:
    count = 4000
    image = torch.arange(count).view(-1, 1, 1, 1).expand(-1, 3, 2, 2) / count
    mask = torch.zeros(count, 2, 2, dtype=torch.uint8)
    mixing = Mixing(AugmentConfig(mixup=0.3, cutmix=0.2), CPU)
    seen = {}
    real = mixing.apply

    def kept(
        found: dict[str, torch.Tensor],
        weight: torch.Tensor,
        area: torch.Tensor,
        centre: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        seen.update(weight=weight, area=area)
        return real(found, weight, area, centre)

    mixing.apply = kept  # type: ignore[method-assign,assignment]
    mixing({"image": image, "mask": mask}, torch.Generator().manual_seed(0))
    blended, cut = seen["weight"] < 1, seen["area"] < 1
    # Beta(0.2, 0.2) rounds to 1 now and then; four standard deviations of a share are 3 %.
    assert abs(blended.float().mean() - 0.3) < 0.05
    assert abs(cut.float().mean() - 0.2) < 0.03
    assert not (blended & cut).any()
    assert abs(seen["area"][cut].mean() - 0.5) < 0.05  # uniform
    assert seen["weight"].isfinite().all()

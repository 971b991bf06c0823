"""Colours beside kornia's, sample by sample."""

import kornia.enhance as kornia_enhance
import kornia.filters as kornia_filters
import pytest
import torch

from murmur.learner_service.preprocess.augment.photometry import NO_BLUR, blur, jitter

N = 5


def test_jitter_equals_kornias_with_the_same_factors() -> None:
    image = torch.rand(N, 3, 7, 9)
    brightness, contrast, saturation = torch.rand(3, N) * 0.8 + 0.6
    ours = jitter(image.clone(), brightness, contrast, saturation)
    for i in range(N):
        one = image[i : i + 1]
        one = kornia_enhance.adjust_brightness_accumulative(one, brightness[i : i + 1])
        one = kornia_enhance.adjust_contrast_with_mean_subtraction(one, contrast[i : i + 1])
        one = kornia_enhance.adjust_saturation_with_gray_subtraction(one, saturation[i : i + 1])
        torch.testing.assert_close(ours[i : i + 1], one, atol=2e-6, rtol=0)


def test_jitter_of_two_pixels_by_hand() -> None:
    # Grey pixels 0.2 and 0.6, twice as bright: 0.4 and 1.2, limited to 1. Mean 0.7; half of the
    # contrast: 0.55 and 0.85. Grey has no saturation to lose.
    image = torch.tensor([0.2, 0.6]).expand(1, 3, 1, 2).clone()
    found = jitter(image, torch.tensor([2.0]), torch.tensor([0.5]), torch.tensor([0.0]))
    torch.testing.assert_close(found, torch.tensor([0.55, 0.85]).expand(1, 3, 1, 2))


def test_frames_of_a_stack_share_their_factors() -> None:
    frame, factors = torch.rand(N, 3, 4, 4), torch.rand(3, N) + 0.5
    stacked = jitter(frame.repeat(1, 2, 1, 1), *factors)
    torch.testing.assert_close(stacked, jitter(frame.clone(), *factors).repeat(1, 2, 1, 1))


@pytest.mark.parametrize("channels", [1, 2, 3])
def test_neutral_factors_change_nothing(channels: int) -> None:
    image, one = torch.rand(N, channels, 4, 4), torch.ones(N)
    assert torch.equal(jitter(image.clone(), one, one, one), image)


def test_blur_equals_kornias_with_a_sigma_of_each_sample() -> None:
    image, sigma = torch.rand(N, 3, 8, 6), torch.linspace(0.3, 2.0, N)
    theirs = kornia_filters.gaussian_blur2d(image, 3, sigma.unsqueeze(1).expand(N, 2))
    torch.testing.assert_close(blur(image, sigma), theirs, atol=1e-6, rtol=0)
    assert torch.equal(blur(image, torch.full((N,), NO_BLUR)), image)

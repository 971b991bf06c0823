"""Colours: brightness, contrast, saturation and blur, a factor for each sample."""

import torch
from torch import Tensor

_GREY = (0.299, 0.587, 0.114)  # weights of red, green and blue: ITU-R BT.601
NO_BLUR = 0.01  # a sigma whose neighbours weigh exp(-5000) = 0


def jitter(x: Tensor, brightness: Tensor, contrast: Tensor, saturation: Tensor) -> Tensor:
    """Images with brightness, contrast, then saturation changed, as PIL and torchvision do.

    Brightness multiplies; contrast blends with the mean of the grey image; saturation blends with
    the grey image. Each result is limited to [0, 1].

    Args:
        x: [N, C, H, W] float in [0, 1]; it is overwritten. Channels that are no multiple of three
            are not colours: each is its own grey image, the mean is that of all.
        brightness: [N]; 1 changes nothing.
        contrast: [N]; 1 changes nothing.
        saturation: [N]; 1 changes nothing.
    """
    x.mul_(_each(brightness, 4)).clamp_(0, 1)
    coloured = x.shape[1] % 3 == 0
    if not coloured:
        mean = x.mean((1, 2, 3), keepdim=True)
        return torch.lerp(mean, x, _each(contrast, 4)).clamp_(0, 1)
    rgb = x.reshape(len(x), -1, 3, *x.shape[2:])  # [N, frames, 3, H, W]
    mean = _grey(rgb.mean((1, 3, 4), keepdim=True))  # [N, 1, 1, 1, 1]
    rgb = torch.lerp(mean, rgb, _each(contrast, 5)).clamp_(0, 1)
    rgb = torch.lerp(_grey(rgb), rgb, _each(saturation, 5)).clamp_(0, 1)
    return rgb.flatten(1, 2)


def blur(x: Tensor, sigma: Tensor) -> Tensor:
    """Images [N, C, H, W] blurred by a Gaussian of 3 x 3 pixels, sigma [N] in pixels."""
    from kornia.filters import filter2d_separable

    beside = torch.exp(-0.5 / sigma.square())
    kernel = torch.stack((beside, torch.ones_like(beside), beside), 1)
    kernel = kernel / kernel.sum(1, keepdim=True)
    blurred: Tensor = filter2d_separable(x, kernel, kernel)
    return blurred


def _grey(rgb: Tensor) -> Tensor:
    """Luminance [..., 1, H, W] of [..., 3, H, W]."""
    red, green, blue = torch.split(rgb, 1, -3)
    return (red * _GREY[0]).add_(green, alpha=_GREY[1]).add_(blue, alpha=_GREY[2])


def _each(factor: Tensor, dimensions: int) -> Tensor:
    """[N] as [N, 1, ...]."""
    return factor.view(-1, *(1,) * (dimensions - 1))

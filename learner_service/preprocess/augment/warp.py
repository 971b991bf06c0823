"""Geometry: flip, rotation, scale and shift as one warp of images and masks."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def inverse_affine(
    flip: Tensor, angle: Tensor, scale: Tensor, aspect: Tensor
) -> tuple[Tensor, Tensor]:
    """The linear part of the map from output to input coordinates.

    An image is flipped, then rotated counter-clockwise and scaled about its centre, then shifted:
    out = s R F in + t, so in = F R^-1 (out - t) / s. In units of half the width and half the
    height, with r = H / W, that is

        x_in = f/s (cos a (x - tx) - r sin a (y - ty))
        y_in = 1/s (sin a / r (x - tx) + cos a (y - ty))

    Args:
        flip: [N] f, -1 for a mirrored image, else 1.
        angle: [N] a, radians.
        scale: [N] s.
        aspect: [4, 1] the factors (1, -r, 1/r, 1).

    Returns:
        what x and what y contribute to (x_in, y_in), each [N, 2].
    """
    cos, sin = angle.cos(), angle.sin()
    m = torch.stack((cos, sin, sin, cos)).mul_(aspect).div_(scale)  # rows xx, xy, yx, yy
    m[:2].mul_(flip)
    return m[0::2].t(), m[1::2].t()


Coordinates = tuple[Tensor, Tensor, Tensor]


def coordinates(device: torch.device, size: tuple[int, int]) -> Coordinates:
    """Make coordinates of pixels without a copy from the host.

    Args:
        device: device of all batches.
        size: (H, W).

    Returns:
        x [1, 1, W, 1] and y [1, H, 1, 1], and the aspect factors [4, 1].
    """
    h, w = size
    x, y = (torch.linspace(1 / n - 1, 1 - 1 / n, n, device=device) for n in (w, h))
    aspect = torch.ones(4, 1, device=device)
    aspect[1].fill_(-h / w)
    aspect[2].fill_(w / h)
    return x.view(1, 1, -1, 1), y.view(1, -1, 1, 1), aspect


def sources(
    pixels: Coordinates, flip: Tensor, angle: Tensor, scale: Tensor, shift: tuple[Tensor, Tensor]
) -> Tensor:
    """Return each output pixel's source, as `grid_sample` takes it with align_corners=False.

    Args:
        pixels: result of `coordinates`.
        flip: [N] -1 or 1.
        angle: [N] radians, counter-clockwise as seen.
        scale: [N] size of what is seen, as a factor.
        shift: [N] each: right and down, in halves of the width and of the height.

    Returns:
        [N, H, W, 2] float32.
    """
    x, y, aspect = pixels
    of_x, of_y = inverse_affine(flip, angle, scale, aspect)
    x = x - shift[0].view(-1, 1, 1, 1)  # [N, 1, W, 1]
    y = y - shift[1].view(-1, 1, 1, 1)  # [N, H, 1, 1]
    return torch.addcmul(x * of_x[:, None, None], y, of_y[:, None, None])


def warp_image(image: Tensor, grid: Tensor) -> Tensor:
    """Bilinear samples of images [N, C, H, W] float at grid; 0 outside."""
    return F.grid_sample(image, grid, "bilinear", "zeros", align_corners=False)


def swap_table(flip_pairs: Sequence[tuple[int, int]], device: torch.device) -> Tensor | None:
    """Return the class [256] uint8 that each class is in a mirrored mask; None: itself.

    Args:
        flip_pairs: classes that a horizontal flip swaps, such as left and right eyes.
        device: device of all masks.
    """
    if not flip_pairs:
        return None
    table = torch.arange(256, dtype=torch.uint8)
    for a, b in flip_pairs:
        table[a], table[b] = b, a
    return table.to(device)


def swapped(mask: Tensor, flip: Tensor, table: Tensor | None) -> Tensor:
    """Swap the classes of masks [N, H, W] uint8 that were mirrored, those with flip -1."""
    if table is None:
        return mask
    other = table.index_select(0, mask.view(-1).int()).view(mask.shape)
    return torch.where(flip.view(-1, 1, 1) < 0, other, mask)


def warp_mask(
    mask: Tensor, grid: Tensor, flip: Tensor, outside: int, table: Tensor | None = None
) -> Tensor:
    """The nearest class of masks [N, H, W] uint8 at grid, with classes of mirrored ones swapped.

    Args:
        mask: [N, H, W] uint8.
        grid: [N, H, W, 2].
        flip: [N] -1 for mirrored masks, else 1.
        outside: the class outside.
        table: result of `swap_table`.
    """
    shifted = (mask - float(outside)).unsqueeze(1)  # grid_sample fills with zeros
    found = F.grid_sample(shifted, grid, "nearest", "zeros", align_corners=False).squeeze(1)
    return swapped(found.add_(outside).to(torch.uint8), flip, table)


def flip_mask(mask: Tensor, flip: Tensor, table: Tensor | None = None) -> Tensor:
    """Masks [N, H, W] uint8, mirrored where flip is -1."""
    return swapped(torch.where(flip.view(-1, 1, 1) < 0, mask.flip(-1), mask), flip, table)


def flip_image(image: Tensor, flip: Tensor) -> Tensor:
    """Images [N, C, H, W], mirrored where flip is -1."""
    from kornia.geometry.transform import hflip

    return torch.where(flip.view(-1, 1, 1, 1) < 0, hflip(image), image)

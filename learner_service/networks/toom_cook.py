"""Convolutions over small maps by Toom and Cook's method: fewer multiplications, the same sums.

A map of n x n and a kernel are polynomials in two variables; products of polynomials are products
of their values at n x n points. To get there and back are fixed matrices. Every point is then one
matrix product over channels, n^2 of them where the direct sum takes (o k)^2, o = n - k + 1: 49
against 256 for n = 7 and k = 4. Toom 1963, Cook 1966; for convolutional networks Lavin and Gray
2016, "Fast Algorithms for Convolutional Neural Networks" (arXiv:1509.09308). Here one tile is the
whole map, so each change of basis is one matrix product too, and autograd's backward pass of these
products is the method for the gradients.
"""

import functools

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

# The last point is infinity. Small powers of small numbers keep rounding errors small: 2.5e-6 of
# the result for n = 7 in float32, root mean square.
_POINTS = (0.0, 1.0, -1.0, 2.0, -0.5, -2.0)
LARGEST_MAP = len(_POINTS) + 1
# Below these, changing basis costs more than it saves.
_FEWEST_ROWS, _SMALLEST_KERNEL, _FEWEST_CHANNELS = 32, 3, 32


def is_faster(x: Tensor, weight: Tensor, stride: tuple[int, ...]) -> bool:
    """Whether `conv2d` is the better way for these, and may be taken: float32 on a CPU."""
    n, k = x.shape[-1], weight.shape[-1]
    return (
        x.device.type == "cpu"
        and x.dtype == torch.float32
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()  # a program for any number of rows
        and x.shape[-2:] == (n, n)
        and weight.shape[-2:] == (k, k)
        and stride == (1, 1)
        and _SMALLEST_KERNEL <= k < n <= LARGEST_MAP
        and min(weight.shape[:2]) >= _FEWEST_CHANNELS
        and len(x) >= _FEWEST_ROWS
    )


def conv2d(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """What torch.conv2d gives for a square map and kernel, without padding, stride 1.

    Args:
        x: [R, C, n, n], n at most LARGEST_MAP; in any layout.
        weight: [O, C, k, k].
        bias: [O].

    Returns:
        [R, O, o, o] with o = n - k + 1; in memory [o, o, O, R].
    """
    (rows, channels, n, _), (outputs, _, k, _) = x.shape, weight.shape
    points_of_map, points_of_kernel, back = _matrices(n, k)
    # Rows innermost, and kernels as they are stored: then neither pass turns a large matrix round.
    maps = x.permute(2, 3, 1, 0).reshape(n * n, channels * rows)
    values = (points_of_map @ maps).view(n * n, channels, rows)
    kernels = weight.reshape(outputs * channels, k * k)
    factors = F.linear(points_of_kernel, kernels).view(n * n, outputs, channels)
    products = torch.bmm(factors, values).view(n * n, outputs * rows)
    o = n - k + 1
    out = (back @ products).view(o, o, outputs, rows) + bias.unsqueeze(1)
    return out.permute(3, 2, 0, 1)


@functools.cache
def _matrices(n: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """[n^2, n^2] of the map, [n^2, k^2] of the kernel, [o^2, n^2] back, float32.

    A full product of polynomials of o and k coefficients is V^-1 (E_o a * E_k b), with E the values
    at the points. The convolution of networks is its transpose in a: E_o^T (E_k b * V^-T x). Both
    axes at once are Kronecker products.
    """

    def values(coefficients: int) -> NDArray[np.float64]:
        at = np.vander(np.array(_POINTS[: n - 1]), coefficients, increasing=True)
        infinity = np.zeros((1, coefficients))
        infinity[0, -1] = 1
        return np.concatenate([at, infinity])

    def both_axes(matrix: NDArray[np.floating]) -> Tensor:
        return torch.from_numpy(np.kron(matrix, matrix)).float()

    transposed = np.linalg.inv(values(n)).T
    return both_axes(transposed), both_axes(values(k)), both_axes(values(n - k + 1).T)

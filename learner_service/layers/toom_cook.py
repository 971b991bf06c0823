"""Convolutions over small maps by Toom and Cook's method: fewer multiplications, the same sums.

A map of n x n and a kernel are polynomials in two variables; products of polynomials are products
of their values at points. To get there and back are fixed matrices. Every point is then one matrix
product over channels, n^2 of them where the direct sum takes (o k)^2, o = n - k + 1: 49 against 256
for n = 7 and k = 4. Toom 1963, Cook 1966; for convolutional networks Lavin and Gray 2016, "Fast
Algorithms for Convolutional Neural Networks" (arXiv:1509.09308). Changes of basis are matrix
products too, and autograd's backward pass of these products is the method for the gradients.

The more points, the larger the rounding errors. So in bfloat16 kernels and outputs are cut into
pieces of two along both axes, each piece with the points 0, 1 and infinity (Karatsuba's), and sums
over the kernel's pieces are made within the products: 144 multiplications for those 256.
"""

import functools
import math

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
_FEWEST_ROWS, _SMALLEST_KERNEL = 32, 3
_FEWEST_CHANNELS = {torch.float32: 32, torch.bfloat16: 128}


def pieces(x: Tensor, weight: Tensor, stride: tuple[int, ...]) -> int | None:
    """With how many pieces `conv2d` is the better way for these, on a CPU; None: it is not."""
    n, k = x.shape[-1], weight.shape[-1]
    if (
        x.device.type != "cpu"
        or torch.compiler.is_compiling()  # a program for any number of rows
        or x.shape[-2:] != (n, n)
        or weight.shape[-2:] != (k, k)
        or stride != (1, 1)
        or not _SMALLEST_KERNEL <= k < n <= LARGEST_MAP
        or len(x) < _FEWEST_ROWS
    ):
        return None
    dtype = _dtype(x)
    if min(weight.shape[:2]) < _FEWEST_CHANNELS.get(dtype, math.inf):
        return None
    if dtype == torch.float32:
        return 1
    return k // 2 if k % 2 == 0 and n == 2 * k - 1 else None


def conv2d(x: Tensor, weight: Tensor, bias: Tensor, pieces: int = 1) -> Tensor:
    """Compute torch.conv2d of a square map and kernel, without padding, stride 1.

    Args:
        x: maps [R, C, n, n], in any layout.
        weight: [O, C, k, k].
        bias: [O].
        pieces: number of pieces that outputs and kernel are cut into along each axis; divides k and
            o = n - k + 1. A piece has o / pieces + k / pieces - 1 points, LARGEST_MAP at most.

    Returns:
        [R, O, o, o] with o = n - k + 1; in memory [o, o, O, R].
    """
    (rows, channels, n, _), (outputs, _, k, _) = x.shape, weight.shape
    dtype = _dtype(x)
    points_of_map, points_of_kernel, back = _matrices(n, k, pieces, dtype)
    squared = pieces**2
    points = len(points_of_kernel) // squared
    # Rows innermost, and kernels as they are stored: then neither pass turns a large matrix round.
    maps = x.to(dtype).permute(2, 3, 1, 0).reshape(n * n, channels * rows)
    values = (points_of_map @ maps).view(points, squared, squared, channels, rows)
    kernels = weight.to(dtype).reshape(outputs * channels, k * k)
    factors = F.linear(points_of_kernel, kernels).view(points, squared, outputs, channels)
    # Pieces of the kernel beside channels, pieces of the output beside rows.
    values = values.transpose(2, 3).reshape(points, squared * channels, squared * rows)
    factors = factors.transpose(1, 2).reshape(points, outputs, squared * channels)
    products = torch.bmm(factors, values).view(points, outputs, squared, rows)
    products = products.transpose(1, 2).reshape(points * squared, outputs * rows)
    o = n - k + 1
    out = (back @ products).view(o, o, outputs, rows) + bias.to(dtype).unsqueeze(1)
    return out.permute(3, 2, 0, 1)


def _dtype(x: Tensor) -> torch.dtype:
    """Return the dtype that a convolution of x computes in on a CPU."""
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype


@functools.cache
@torch.inference_mode(mode=False)  # acting comes first; learning needs them, too
def _matrices(n: int, k: int, pieces: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """[p^2 u^2 q^2, n^2] of the map, [p^2 u^2, k^2] of the kernel, [o^2, p^2 q^2] back.

    p are points, u the kernel's pieces, q the output's. For one piece: a full product of
    polynomials of o and k coefficients is V^-1 (E_o a * E_k b), with E the values at the points.
    The convolution of networks is its transpose in a: E_o^T (E_k b * V^-T x). Piece q of the output
    is the sum over u of that of the kernel's piece u and the map from o q + k u on (o and k those
    of a piece). Both axes at once are Kronecker products.
    """
    o, k_piece = (n - k + 1) // pieces, k // pieces
    points = o + k_piece - 1

    def values(coefficients: int) -> NDArray[np.float64]:
        at = np.vander(np.array(_POINTS[: points - 1]), coefficients, increasing=True)
        infinity = np.zeros((1, coefficients))
        infinity[0, -1] = 1
        return np.concatenate([at, infinity])

    transposed = np.linalg.inv(values(points)).T
    of_map = np.zeros((points, pieces, pieces, n))  # [p, u, q, n]
    for u, q in np.ndindex(pieces, pieces):
        start = k_piece * u + o * q
        of_map[:, u, q, start : start + points] = transposed
    whole = np.eye(pieces)
    of_kernel = np.einsum("pk,uv->puvk", values(k_piece), whole).reshape(points, pieces, k)
    back = np.einsum("po,qr->qopr", values(o), whole).reshape(pieces * o, points, pieces)

    def both_axes(subscripts: str, matrix: NDArray[np.float64]) -> Tensor:
        return torch.from_numpy(np.einsum(subscripts, matrix, matrix)).to(dtype)

    return (
        both_axes("puqn,PUQN->pPuUqQnN", of_map).reshape(-1, n * n),
        both_axes("puk,PUK->pPuUkK", of_kernel).reshape(-1, k * k),
        both_axes("opq,OPQ->oOpPqQ", back).reshape((n - k + 1) ** 2, -1),
    )

"""A tiny product for each kernel's text before it is trusted: MLX compiles it only when it runs, too late to choose."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import mlx.core as mx
import numpy as np

from lut4tool.formats import Lookup4Weight, QmmWeight
from lut4tool.kernels.metal.weights import is_aligned

Weight = Lookup4Weight | QmmWeight
Product = Callable[[mx.array, Weight, str | None], mx.array]

#: Rows of x: of the GEMV that serves one, and of the first tile.
ROWS = {"gemv": 1, "tile": 16}


def check(weight: Weight, dtype: mx.Dtype, product: Product) -> None:
    """Raise RuntimeError where the kernels for products of an x of this type with such a weight do not work here.

    A weight of the same facts and few elements, all of them 1, is multiplied by ones: every output is K.
    """
    scales, block = weight.scales.dtype, weight.block_size
    tiny: Weight
    if isinstance(weight, QmmWeight):
        aligned, fours = is_aligned(weight.scales.shape[1] * block, weight.K, block), weight.K % 4 == 0
        tiny = _qmm(weight.zero_points.dtype, weight.zero_points.size == 1, aligned, fours, scales, block)
    else:
        aligned, fours = is_aligned(weight.cols, weight.cols, block), weight.shape[0] % 4 == 0
        perm = (0, 1) if tuple(weight.perm) == (0, 1) else (1, 0)
        tiny = _lookup4(perm, weight.high_nibble_first, aligned, fours, scales, block, weight.weight_dtype)
    if failure := _failure(tiny, dtype, product):
        raise RuntimeError(failure)


@cache
def _failure(tiny: Weight, dtype: mx.Dtype, product: Product) -> str | None:
    K, N = tiny.shape if isinstance(tiny, Lookup4Weight) else (tiny.K, tiny.N)
    for kernel, rows in ROWS.items():
        try:
            y = np.array(product(mx.ones((rows, K), dtype), tiny, kernel).astype(mx.float32))
        except (RuntimeError, ValueError) as error:
            return f"its {kernel} kernel does not run here: {error}"
        right = np.array(mx.full((rows, N), K, dtype).astype(mx.float32))
        if not np.array_equal(y, right):
            wrong = y[y != right].flat[0]
            return f"its {kernel} kernel gives {wrong} here where {right.flat[0]} is right"
    return None


# K of a tiny weight has the same remainders as the weight's, as far as the texts know them.


@cache
def _lookup4(
    perm: tuple[int, int],
    high_nibble_first: bool,
    aligned: bool,
    fours: bool,
    scales: np.dtype,
    block_size: int,
    weight_dtype: str,
) -> Lookup4Weight:
    K, cols = 36 if fours else 33, 32 if aligned else 33
    rows, cols = (K, cols) if perm == (0, 1) else (32, 32 if aligned else K)
    return Lookup4Weight(
        packed=np.full((rows * cols + 1) // 2, 0xFF, np.uint8),
        scales=np.ones(-(-rows * cols // block_size), scales),
        codebook=np.ones(16, np.float32),
        rows=rows,
        cols=cols,
        block_size=block_size,
        perm=perm,
        high_nibble_first=high_nibble_first,
        weight_dtype=weight_dtype,
    )


@cache
def _qmm(points: np.dtype, one: bool, aligned: bool, fours: bool, scales: np.dtype, block: int) -> QmmWeight:
    K = math.lcm(block, 32) if aligned else 36 if fours else 33
    grid = (4, -(-K // block))
    return QmmWeight(
        packed=np.full((*grid, block // 2), 0xFF, np.uint8),
        scales=np.ones(grid, scales),
        zero_points=np.full((1, 1) if one else grid, 14, points),
        K=K,
        N=4,
        block_size=block,
    )


def forget() -> None:
    """Try again at the next product (for tests)."""
    for made in (_failure, _lookup4, _qmm):
        made.cache_clear()

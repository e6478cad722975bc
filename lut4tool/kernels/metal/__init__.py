"""Apple GPUs' products, by kernels that are compiled on their first use through mx.fast.metal_kernel.

float32 is within 2^-21 * sum |x||w| of exact (compensated sums, everywhere but in a forced "decode"); halves multiply
weights rounded as proved, sum in float32 and round once. Checked by simulation on a CPU (tests/metal_sim).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from functools import cache

import mlx.core as mx
import numpy as np

from lut4tool.formats import NF4, Lookup4Weight, QmmWeight
from lut4tool.kernels.metal.decode import decode
from lut4tool.kernels.metal.gemv_columns import gemv_columns
from lut4tool.kernels.metal.gemv_rows import gemv_rows
from lut4tool.kernels.metal.tile import tile
from lut4tool.kernels.metal.weights import LEAST_ELEMENTS, MLX_FLOAT, DeviceWeight, on_device

KERNELS = ("gemv", "tile", "decode")

#: The largest M that a kernel serves, by x's type; not measured yet (no Mac was at hand). In float32 a dense product
#: of MLX is not within the bound, so that it is only made where it is asked for.
LARGEST_M: Mapping[str, Mapping[mx.Dtype, int | None]] = {
    "gemv": {mx.float32: 8, mx.float16: 8, mx.bfloat16: 8},
    "tile": {mx.float32: None, mx.float16: 256, mx.bfloat16: 256},
}

#: Weights' elements and the sides of a product that the kernels' indices hold.
MOST_ELEMENTS, MOST_SIDE = 2**35, 2**31 - 1

QMM_HALF = "LUT4TOOL_QMM_HALF"
#: float16's smallest normal number and its largest.
_HALF_NORMAL, _HALF_LARGEST = 2.0**-14, 65504.0


@cache
def available() -> bool:
    """Whether this machine has Metal and a tiny product comes out right; a warning says where it does not."""
    if not mx.metal.is_available():
        return False
    weight = Lookup4Weight(np.full(64, 0xFF, np.uint8), np.ones(2, np.float32), NF4, 4, 32, 64, (1, 0))
    try:
        y = np.array(lookup4_matmul(mx.ones((1, 32), mx.float32), weight))
    except (RuntimeError, ValueError) as error:
        warnings.warn(f"lut4tool's Metal kernels do not work here, so slower ones serve: {error}", stacklevel=2)
        return False
    if not np.array_equal(y, np.full((1, 4), 32, np.float32)):
        warnings.warn(f"lut4tool's Metal kernels give {y} for 32, so slower ones serve", stacklevel=2)
        return False
    return True


def refuses(x: mx.array, weight: Lookup4Weight | QmmWeight) -> str | None:
    """Say why a product is not served: types that do not go together, or sizes out of reach."""
    if x.dtype not in MLX_FLOAT.values():
        return f"x is {x.dtype}; float32, float16 and bfloat16 are served"
    if x.dtype != mx.float32 and MLX_FLOAT[weight.weight_dtype] != x.dtype:
        return f"x is {x.dtype} and the weight {weight.weight_dtype}; halves take a weight of their own type"
    K, N = weight.shape if isinstance(weight, Lookup4Weight) else (weight.K, weight.N)
    if K < LEAST_ELEMENTS:
        return f"K is {K}; {LEAST_ELEMENTS} and more are served"
    if max(K, N) > MOST_SIDE or K * N > MOST_ELEMENTS:
        return f"a weight of {K} x {N} is out of reach of its indices"
    return None


def lookup4_matmul(x: mx.array, weight: Lookup4Weight, kernel: str | None = None) -> mx.array:
    """Multiply x [M, K] by W, transposed by weight.perm -> [M, N] of x's type; the weight is rounded as it says."""
    return _product(x, on_device(weight), kernel)


def qmm(x: mx.array, weight: QmmWeight, kernel: str | None = None) -> mx.array:
    """Multiply x [M, K] by W [N, K] transposed -> [M, N] of x's type.

    With LUT4TOOL_QMM_HALF=1 bfloat16 products of more than one row are made in float16 where `refuses_half` allows:
    x rounds to float16 (over 65504 it becomes Inf, under 2^-14 it loses bits), weights are exact, sums are float32.
    """
    if os.environ.get(QMM_HALF) == "1" and kernel in (None, "tile") and refuses_half(x, weight) is None:
        return tile(x, on_device(weight), multiply_in=mx.float16)
    return _product(x, on_device(weight), kernel)


def lookup4_decode(weight: Lookup4Weight) -> mx.array:
    """Decode W [rows, cols] to its weight_dtype, exactly."""
    return decode(on_device(weight))


def refuses_half(x: mx.array, weight: QmmWeight) -> str | None:
    """Say why a bfloat16 product may not be made in float16."""
    if x.dtype != mx.bfloat16 or weight.weight_dtype != "bfloat16":
        return f"x is {x.dtype} and the weight {weight.weight_dtype}, not both bfloat16"
    if x.shape[0] <= 1:
        return "x has one row"
    if weight.block_size != 32 or weight.K % 32 or weight.N % 32:
        return f"block {weight.block_size}, K {weight.K}, N {weight.N}: block 32 and multiples of 32 are served"
    return _refuses_half_scales(weight)


def _refuses_half_scales(weight: QmmWeight) -> str | None:
    """Every weight, a whole number of steps times a scale, must be zero or normal in float16, and so exact."""
    points = weight.zero_points.astype(np.float32)
    if not np.array_equal(points, np.round(points)):
        return "a zero point is not a whole number"
    sizes = np.abs(weight.scales.astype(np.float32))
    steps = np.maximum(np.abs(points), np.abs(15 - points))
    if not np.all((sizes >= _HALF_NORMAL) & (sizes * steps * (1 + 2.0**-8) <= _HALF_LARGEST)):
        return "a scale is not normal in float16, or a weight is over its range"
    return None


def _product(x: mx.array, weight: DeviceWeight, kernel: str | None) -> mx.array:
    M = x.shape[0]
    if M == 0:
        return mx.zeros((0, weight.N), x.dtype)
    name = kernel or _pick(M, x.dtype)
    if name == "gemv":
        return gemv_columns(x, weight) if weight.along_k else gemv_rows(x, weight)
    if name == "tile":
        return tile(x, weight)
    matrix = decode(weight).astype(x.dtype)
    return x @ (matrix if weight.along_k else matrix[:, : weight.K].T)


def _pick(M: int, dtype: mx.Dtype) -> str:
    for name, largest in LARGEST_M.items():
        limit = largest[dtype]
        if limit is None or limit >= M:
            return name
    return "decode"

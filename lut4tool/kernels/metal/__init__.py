"""Apple GPUs' products, by kernels that are compiled on their first use through mx.fast.metal_kernel.

float32 is within 2^-21 * sum |x||w| of exact (compensated sums, everywhere but in a forced "decode"); halves multiply
weights rounded as proved, sum in float32 and round once. Checked by simulation on a CPU (tests/metal_sim).
"""

from __future__ import annotations

import os
from weakref import WeakKeyDictionary

import mlx.core as mx
import numpy as np

from lut4tool.formats import Lookup4Weight, QmmWeight
from lut4tool.kernels import thresholds
from lut4tool.kernels.decoded import dense_of
from lut4tool.kernels.metal import trial
from lut4tool.kernels.metal.decode import decode
from lut4tool.kernels.metal.gemv_columns import gemv_columns
from lut4tool.kernels.metal.gemv_rows import gemv_rows
from lut4tool.kernels.metal.tile import tile
from lut4tool.kernels.metal.weights import LEAST_ELEMENTS, MLX_FLOAT, on_device

KERNELS = ("gemv", "tile", "decode")

#: Codes of a weight and sides of a product that the kernels' indices hold.
MOST_ELEMENTS, MOST_SIDE = 2**35, 2**31 - 1

QMM_HALF = "LUT4TOOL_QMM_HALF"
#: float16's smallest normal number and its largest.
_HALF_NORMAL, _HALF_LARGEST = 2.0**-14, 65504.0


def available() -> bool:
    """Whether this machine has Metal and MLX computes with it."""
    return bool(mx.metal.is_available()) and mx.default_device().type == mx.DeviceType.gpu


def refuses(x: mx.array, weight: Lookup4Weight | QmmWeight) -> str | None:
    """Say why a product is not served: types that do not go together, sizes out of reach."""
    if x.dtype not in MLX_FLOAT.values():
        return f"x is {x.dtype}; float32, float16 and bfloat16 are served"
    if x.dtype != mx.float32 and MLX_FLOAT[weight.weight_dtype] != x.dtype:
        return f"x is {x.dtype} and the weight {weight.weight_dtype}; halves take a weight of their own type"
    K, N = weight.shape if isinstance(weight, Lookup4Weight) else (weight.K, weight.N)
    if K < LEAST_ELEMENTS:
        return f"K is {K}; {LEAST_ELEMENTS} and more are served"
    if max(K, N) > MOST_SIDE or 2 * weight.packed.size > MOST_ELEMENTS:
        return f"a weight of {K} x {N} is out of reach of its indices"
    return None


def probe(weight: Lookup4Weight | QmmWeight, dtype: str) -> None:
    """Make tiny products of the same facts: RuntimeError where a kernel does not compile or computes something else."""
    trial.check(weight, MLX_FLOAT[dtype], _product)


def lookup4_matmul(x: mx.array, weight: Lookup4Weight, kernel: str | None = None) -> mx.array:
    """Multiply x [M, K] by W, transposed by weight.perm -> [M, N] of x's type; the weight is rounded as it says."""
    return _product(x, weight, kernel)


def qmm(x: mx.array, weight: QmmWeight, kernel: str | None = None) -> mx.array:
    """Multiply x [M, K] by W [N, K] transposed -> [M, N] of x's type.

    With LUT4TOOL_QMM_HALF=1 bfloat16 products of more than one row are made in float16 where `refuses_half` allows:
    x rounds to float16 (over 65504 it becomes Inf, under 2^-14 it loses bits), weights are exact, sums are float32.
    """
    if os.environ.get(QMM_HALF) == "1" and kernel in (None, "tile") and refuses_half(x, weight) is None:
        return tile(x, on_device(weight), multiply_in=mx.float16)
    return _product(x, weight, kernel)


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
    if weight not in _HALF_SCALES:
        _HALF_SCALES[weight] = _refuses_half_scales(weight)
    return _HALF_SCALES[weight]


#: What was said of a weight's scales, which are not looked at twice.
_HALF_SCALES: WeakKeyDictionary[QmmWeight, str | None] = WeakKeyDictionary()


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


def _product(x: mx.array, weight: Lookup4Weight | QmmWeight, kernel: str | None) -> mx.array:
    rows, on_gpu = x.shape[0], on_device(weight)
    if rows == 0:
        return mx.zeros((0, on_gpu.N), x.dtype)
    name = kernel or pick(rows, x.dtype)
    if name == "gemv":
        return gemv_columns(x, on_gpu) if on_gpu.along_k else gemv_rows(x, on_gpu)
    if name == "tile":
        return tile(x, on_gpu)
    matrix = dense_of(weight, lambda: decode(on_gpu)).astype(x.dtype)
    return x @ (matrix if on_gpu.along_k else matrix[:, : on_gpu.K].T)


def pick(rows: int, dtype: mx.Dtype) -> str:
    """Name the kernel for a number of rows of x of a type."""
    return thresholds.pick("metal", "float32" if dtype == mx.float32 else "half", rows)

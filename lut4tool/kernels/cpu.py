"""The CPU's products: lut4tool.native on NumPy arrays, packed weights read where they lie.

A dense weight never exists: one row of x is multiplied by weights that live in registers (gemv), more rows by panels
that are decoded into cache, as floats (tile) or, where the machine has a matrix unit for bytes, as digits of 8 bits
(digits). float32 is within 2^-21 * sum |x||w| of exact, whatever the data; halves are computed in float32 from weights
rounded as proved, and rounded once: bfloat16 by a matrix unit where the machine has one (bf16).
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import mlx.core as mx
import numpy as np

from lut4tool import native
from lut4tool.formats import FLOAT_DTYPES, Lookup4Weight, QmmWeight, decode
from lut4tool.kernels import KernelError, thresholds

KERNELS = ("gemv", "tile")

_MLX_FLOAT = {mx.float32: "float32", mx.float16: "float16", mx.bfloat16: "bfloat16"}

#: The native form of a weight: its arrays checked once, gone with the weight.
_MATRICES: WeakKeyDictionary[Lookup4Weight | QmmWeight, native.Matrix] = WeakKeyDictionary()


def describe() -> str:
    """The instruction set that serves: "amx", "avx512", "avx2", "neon" or "portable"."""
    return native.product_instruction_set()


@cache
def available() -> bool:
    """Whether the compiled library is there and tiny products come out right; a warning says where they do not."""
    if not native.compiled():
        return False
    packed, scales = np.arange(512, dtype=np.uint8), np.full(32, 0.5, np.float32)
    for kernel, rows, perm in (
        ("gemv", 1, (0, 1)),
        ("tile", 2, (0, 1)),
        ("digits", 17, (0, 1)),
        ("digits", 17, (1, 0)),
    ):
        probe = Lookup4Weight(packed, scales, np.arange(16, dtype=np.float32), 32, 32, 32, perm)
        x, y = np.ones((rows, 32), np.float32), np.empty((rows, 32), np.float32)
        native.Matrix(probe).multiply(x, y, kernel)
        if not np.array_equal(y, x @ decode(probe).transpose(perm)):  # sums of small halves: exact in any order
            return _found_wrong(kernel)
    for perm in ((0, 1), (1, 0)):
        probe = Lookup4Weight(
            packed, scales, np.arange(16, dtype=np.float32), 32, 32, 32, perm, weight_dtype="bfloat16"
        )
        half = np.empty((17, 32), FLOAT_DTYPES["bfloat16"])
        exact = np.ones((17, 32), np.float32) @ decode(probe).astype(np.float32).transpose(perm)
        if native.Matrix(probe).multiply_bf16(np.ones_like(half), half) and np.any(half != exact.astype(half.dtype)):
            return _found_wrong("bf16")
    return True


def _found_wrong(kernel: str) -> bool:
    warnings.warn(
        f"lut4tool's {kernel} kernel for {describe()} gives wrong products here, so slower ones serve", stacklevel=3
    )
    return False


def missing() -> str:
    """Why it is not available."""
    if native.compiled():
        return "it gives wrong products on this machine"
    return "its native part was not built: install a C++ compiler, then lut4tool again"


def refuses(x: mx.array, weight: Lookup4Weight | QmmWeight) -> str | None:
    """Say why a product is not served: an x of no float type, or a half whose weight is rounded to another half."""
    dtype = _MLX_FLOAT.get(x.dtype)
    if dtype is None:
        return f"x is {x.dtype}; float32, float16 and bfloat16 are served"
    if dtype != "float32" and weight.weight_dtype != dtype:
        return f"x is {dtype} and the weight {weight.weight_dtype}; a {dtype} x takes a {dtype} weight"
    return None


def lookup4_matmul(x: Any, weight: Lookup4Weight, kernel: str | None = None) -> Any:
    """Multiply x [M, K] by W, transposed by weight.perm -> [M, N] of x's type, an array of x's library."""
    return _product(x, weight, weight.shape[1], kernel)


def qmm(x: Any, weight: QmmWeight, kernel: str | None = None) -> Any:
    """Multiply x [M, K] by W [N, K] transposed -> [M, N] of x's type, an array of x's library."""
    return _product(x, weight, weight.N, kernel)


def lookup4_decode(weight: Lookup4Weight) -> mx.array:
    """Decode W [rows, cols] to its weight_dtype, exactly; the one place where a dense weight is made, because asked."""
    elements = native.decode_elements(weight, 0, weight.rows * weight.cols)
    return mx.array(elements).reshape(weight.rows, weight.cols)


def matrix_of(weight: Lookup4Weight | QmmWeight) -> native.Matrix:
    """The native form of a weight, made once."""
    matrix = _MATRICES.get(weight)
    if matrix is None:
        matrix = _MATRICES[weight] = native.Matrix(weight)
    return matrix


def pick(rows: int, weight: Lookup4Weight | QmmWeight, dtype: str = "float32") -> str:
    """Name the kernel for a number of rows of x; "digits" are floats where the weight's layout is nothing for them."""
    along_n = isinstance(weight, Lookup4Weight) and tuple(weight.perm) == (0, 1)
    half = ", bfloat16" if dtype == "bfloat16" and matrix_of(weight).serves_bf16 else ""
    timed = describe() if describe() in ("amx", "avx512") else "avx2"  # other sets have vectors as short, or shorter
    name = thresholds.pick("cpu", f"W {'[K, N]' if along_n else '[N, K]'}{half}, {timed}", rows)
    return "tile" if name == "gemv" and not matrix_of(weight).serves_gemv else name


def _product(x: Any, weight: Lookup4Weight | QmmWeight, columns: int, kernel: str | None) -> Any:
    if isinstance(x, mx.array):
        wide = np.array(x.astype(mx.float32), copy=False)
        y = _product(wide.astype(FLOAT_DTYPES[_MLX_FLOAT[x.dtype]], copy=False), weight, columns, kernel)
        return mx.array(y.astype(np.float32, copy=False)).astype(x.dtype)
    if x.dtype == np.float32:
        return _float32_product(x, weight, columns, kernel)
    kernel = kernel or pick(len(x), weight, x.dtype.name)
    if kernel == "bf16":
        y = np.empty((len(x), columns), x.dtype)
        if matrix_of(weight).multiply_bf16(x, y):
            return y
        kernel = None
    y = _float32_product(x.astype(np.float32), weight, columns, kernel)
    with np.errstate(over="ignore"):
        return y.astype(x.dtype)


def _float32_product(x: np.ndarray, weight: Lookup4Weight | QmmWeight, columns: int, kernel: str | None) -> np.ndarray:
    y, matrix = np.empty((len(x), columns), np.float32), matrix_of(weight)
    if kernel == "gemv" and not matrix.serves_gemv:
        raise KernelError("gemv needs blocks and rows that begin at multiples of 32 elements, which this weight lacks")
    matrix.multiply(x, y, kernel or pick(len(x), weight))
    return y

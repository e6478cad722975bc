"""The CUDA kernels: products with 4-bit weights on an NVIDIA GPU, through mx.fast.cuda_kernel.

A weight is put into the kernels' own order once (weights.py). A few rows of x go to a GEMV, more to a tile that decodes
into registers, many halves, but on Hopper, to a decode of the whole weight and MLX's product; shapes that the order
does not hold go to `general`. float32 is within 2^-21 * sum |x||w| of exact; halves are multiplied as rounded by the
weight's own rule, summed in float32 and rounded once.
"""

from __future__ import annotations

import mlx.core as mx

from lut4tool.formats import Lookup4Weight, QmmWeight
from lut4tool.kernels import reference
from lut4tool.kernels.cuda import decode, gemv_float, gemv_half, general, tile_float, tile_half
from lut4tool.kernels.cuda.program import hopper, multiprocessors
from lut4tool.kernels.cuda.thresholds import MOST_ROWS
from lut4tool.kernels.cuda.weights import CHUNK, Weight, arranged, drop, irregular
from lut4tool.kernels.decoded import dense_of

KERNELS = ("gemv", "tile", "decode")

#: Kinds of product that a probe has made.
_WORKED: set[tuple[object, ...]] = set()

_NAMES = {mx.float32: "float32", mx.float16: "float16", mx.bfloat16: "bfloat16"}


def available() -> bool:
    """Whether MLX computes with CUDA here."""
    return bool(mx.cuda.is_available()) and mx.default_device().type == mx.DeviceType.gpu


def refuses(x: mx.array, weight: Weight) -> str | None:
    """Say why a product is not served: a type that is no float, or a weight rounded to another half."""
    dtype = _NAMES.get(x.dtype)
    if dtype is None:
        return f"x is {x.dtype}; float32, float16 and bfloat16 are served"
    if dtype != "float32" and weight.weight_dtype != dtype:
        return f"x is {dtype} and the weight {weight.weight_dtype}; a {dtype} x takes a {dtype} weight"
    return None


def probe(weight: Weight, dtype: str) -> None:
    """Make a product of one row of x and of more: RuntimeError where a kernel does not compile or run."""
    facts = (type(weight), dtype, weight.weight_dtype, weight.block_size, getattr(weight, "perm", None))
    shape = weight.shape if isinstance(weight, Lookup4Weight) else (weight.K, weight.N)
    if (*facts, shape) in _WORKED:
        return
    try:
        half = dtype != "float32"
        most = MOST_ROWS["half" if half else "float32"]
        for m in (1, most["gemv"] + 1, *([most["narrow_qmm"] + 1] if half and hopper() else [])):
            mx.eval(_product(mx.zeros((m, shape[0]), getattr(mx, dtype)), weight, shape[1], None))
    except RuntimeError:
        drop(weight)  # what serves instead has its own form of it
        raise
    _WORKED.add((*facts, shape))


def lookup4_matmul(x: mx.array, weight: Lookup4Weight, kernel: str | None = None) -> mx.array:
    """Multiply x [M, K] by W, transposed by weight.perm -> [M, N] of x's type; the weight is rounded as it says."""
    return _product(x, weight, weight.shape[1], kernel)


def qmm(x: mx.array, weight: QmmWeight, kernel: str | None = None) -> mx.array:
    """Multiply x [M, K] by W [N, K] transposed -> [M, N] of x's type."""
    return _product(x, weight, weight.N, kernel)


def lookup4_decode(weight: Lookup4Weight) -> mx.array:
    """Decode W [rows, cols] to its weight_dtype, exactly."""
    return reference.lookup4_decode(weight) if irregular(weight) else _decoded(weight, half=False)


def _decoded(weight: Weight, half: bool) -> mx.array:
    """W [rows, cols], of a QMM weight [N, K], in its weight_dtype: the same matrix for every perm."""
    dense = decode.dense(arranged(weight, half), weight.weight_dtype)  # [N, K]
    return dense.T if _along_k(weight) else dense


def _along_k(weight: Weight) -> bool:
    """Whether W is [K, N]."""
    return isinstance(weight, Lookup4Weight) and tuple(weight.perm) == (0, 1)


def _product(x: mx.array, weight: Weight, columns: int, kernel: str | None) -> mx.array:
    dtype = _NAMES[x.dtype]
    if not x.shape[0]:
        return mx.zeros((0, columns), x.dtype)
    if irregular(weight):
        return general.product(x, weight, dtype)
    kernel = kernel or pick(dtype, x.shape[0], columns)
    if kernel == "decode":
        return _dense_product(x, weight, dtype)
    half = dtype != "float32"
    on_device = arranged(weight, half)
    if kernel == "tile" and not half and not on_device.finite:  # Inf and NaN are no sums of parts
        return general.product(x, weight, dtype)
    depth = x.shape[1]
    if depth % CHUNK:
        x = mx.pad(x, [(0, 0), (0, -depth % CHUNK)])
    if half:
        product, step = (gemv_half.product, gemv_half.MOST_ROWS) if kernel == "gemv" else (tile_half.product, len(x))
    else:
        product, step = (gemv_float.product, gemv_float.MOST_ROWS) if kernel == "gemv" else (tile_float.product, len(x))
    parts = [product(x[at : at + step], on_device, weight.weight_dtype) for at in range(0, len(x), step)]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)


def pick(dtype: str, m: int, n: int) -> str:
    """Name the kernel that serves m rows of x of a type and n outputs.

    No decode where MLX's product could not give every multiprocessor a tile: it then splits K, and rounds the parts.
    """
    most = MOST_ROWS["float32" if dtype == "float32" else "half"]
    if m <= most["gemv"]:
        return "gemv"
    many = -(-m // 128) * -(-n // 128) >= multiprocessors()
    tile = most["tile"] if dtype == "float32" or hopper() else most["older"]
    return "decode" if m > tile and many else "tile"


def _dense_product(x: mx.array, weight: Weight, dtype: str) -> mx.array:
    half = dtype != "float32"
    matrix = dense_of(weight, lambda: _decoded(weight, half))
    dense = matrix.T if _along_k(weight) else matrix  # [N, K]
    if half:
        return mx.matmul(x, dense.T)
    step = max(1, reference.PANEL // dense.shape[1])
    panels = (
        (start, min(start + step, len(dense)), dense[start : start + step]) for start in range(0, len(dense), step)
    )
    return reference.compensated_product(x, len(dense), panels, along_k=False)

"""Matrix products of every ONNX type (onnx/defs/math): MLX multiplies floats only."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from lut4tool.runtime import dense, int8, panels
from lut4tool.runtime.backend import mx
from lut4tool.runtime.dtypes import on_host, to_device, to_numpy
from lut4tool.runtime.ops.compute import finish, working
from lut4tool.runtime.plan import Node
from lut4tool.runtime.registry import op

#: Integers below 256 in magnitude: float32 holds a sum of this many products exactly.
EXACT_DEPTH = 256


def product(a: Any, b: Any) -> Any:
    """np.matmul's a @ b in the operands' type, halves accumulated in float32; integers wrap on the host."""
    xp, wide_a, wide_b = working(a, b)
    if xp is mx and not mx.issubdtype(wide_a.dtype, mx.inexact):
        xp, wide_a, wide_b = np, to_numpy(a), to_numpy(b)
    matmul = dense.matmul if xp is np else mx.matmul
    if wide_a.ndim > 2 and wide_b.ndim == 2:  # one tall product instead of one a batch
        rows = wide_a.reshape(-1, wide_a.shape[-1]) if wide_a.size else wide_a
        return finish(matmul(rows, wide_b).reshape(*wide_a.shape[:-1], wide_b.shape[-1]), a)
    return finish(matmul(wide_a, wide_b), a)


def _prepare_matmul(node: Node, general: Callable[..., Any]) -> Callable[..., Any] | None:
    """A constant B of float32 is laid out once."""
    if node.types[0] != "tensor(float)":
        return None
    return panels.product(_weight(node))


def _weight(node: Node, transposed: bool = False) -> Any:
    """A constant B, as the bytes that it is made of where these serve."""
    quantized = node.quantized[1]
    served = quantized is not None and panels.product(quantized, None, transposed) is not None
    return quantized if served else node.constants[1]


op("MatMul", prepare=_prepare_matmul)(product)


def _prepare_gemm(node: Node, general: Callable[..., Any]) -> Callable[..., Any] | None:
    """The same where C is a constant row, or missing."""
    options, c = node.attributes, node.constants[2] if len(node.constants) > 2 else None
    given = len(node.given) > 2 and node.given[2]
    scaled = options.get("alpha", 1.0) != 1 or (given and options.get("beta", 1.0) != 1)
    transposed = bool(options.get("transB", 0))
    if scaled or options.get("transA", 0) or node.types[0] != "tensor(float)":
        return None
    b = _weight(node, transposed)
    if b is None or len(b.shape) != 2:
        return None
    width = b.shape[0] if transposed else b.shape[1]
    row = given and c is not None and c.shape in ((width,), (1, width))
    return panels.product(b, c.reshape(-1) if row and c is not None else None, transposed) if row or not given else None


@op("Gemm", since=7, prepare=_prepare_gemm)
def gemm(
    a: Any, b: Any, c: Any = None, *, alpha: float = 1.0, beta: float = 1.0, transA: int = 0, transB: int = 0
) -> Any:
    """Return alpha * A' @ B' + beta * C in one type, integers included; C broadcasts to the product."""
    dtype = a.dtype
    y = product(a.T if transA else a, b.T if transB else b)
    if alpha != 1:
        y = (alpha * y).astype(dtype)
    if c is None or beta == 0:
        return y
    return y + (c if beta == 1 else (beta * c).astype(dtype))


def _integers(value: Any, zero_point: Any, row: bool) -> tuple[Any, Any]:
    """Return (xp, value - zero_point) as float32 integers; a rank-1 zero point is one a row of A, one a column of B."""
    xp, x, zero = working(value, zero_point)
    x = x.astype(xp.float32)
    if zero is None:
        return xp, x
    return xp, x - (zero[:, None] if row and zero.ndim == 1 and zero.size > 1 else zero).astype(xp.float32)


def integer_product(a: Any, b: Any, a_zero_point: Any = None, b_zero_point: Any = None) -> Any:
    """(a - a_zero_point) @ (b - b_zero_point) of 8-bit integers, exact in int32: float32 products of short pieces."""
    (xp, a), (_, b) = _integers(a, a_zero_point, True), _integers(b, b_zero_point, False)
    total: Any = 0
    for start in range(0, max(a.shape[-1], 1), EXACT_DEPTH):
        piece = slice(start, start + EXACT_DEPTH)
        total = total + (a[..., piece] @ (b[piece] if b.ndim == 1 else b[..., piece, :])).astype(xp.int32)
    return total


@op("MatMulInteger", planned=True, on_host=True)
def matmul_integer(node: Node) -> Callable[..., Any]:
    """int8 or uint8 operands less their zero points, accumulated exactly in int32; on a CPU a constant B is packed."""
    _, b, _, zero = (*node.constants, None, None)[:4]
    fixed = zero is not None or len(node.given) < 4 or not node.given[3]
    packed = int8.pack(b, zero) if b is not None and fixed and on_host() else None

    def run(a: Any, b: Any, a_zero_point: Any = None, b_zero_point: Any = None) -> Any:
        return to_device(np.asarray(integer_product(a, b, a_zero_point, b_zero_point)))

    return run if packed is None else int8.Product(packed, run)


@op("QLinearMatMul", on_host=True)
def qlinear_matmul(
    a: Any, a_scale: Any, a_zero_point: Any, b: Any, b_scale: Any, b_zero_point: Any, y_scale: Any, y_zero_point: Any
) -> Any:
    """Product of quantized operands, requantized: half to even, saturated in y_zero_point's type (float8 since 21)."""
    scales = [to_numpy(scale).astype(np.float32) for scale in (a_scale, b_scale, y_scale)]
    if scales[0].ndim == 1 and scales[0].size > 1:
        scales[0] = scales[0][:, None]
    zero = to_numpy(y_zero_point)
    if zero.dtype.kind in "iu":
        total = to_numpy(integer_product(a, b, a_zero_point, b_zero_point))
        limits = np.iinfo(zero.dtype)
        steps = np.rint(total * (scales[0] * scales[1] / scales[2])) + zero.astype(np.float32)
        return to_device(np.clip(steps, limits.min, limits.max).astype(zero.dtype))
    left = (to_numpy(a).astype(np.float32) - to_numpy(a_zero_point).astype(np.float32)) * scales[0]
    right = (to_numpy(b).astype(np.float32) - to_numpy(b_zero_point).astype(np.float32)) * scales[1]
    return (left @ right / scales[2] + zero.astype(np.float32)).astype(zero.dtype)


@op("Einsum")
def einsum(*inputs: Any, equation: str) -> Any:
    """np.einsum of any type; MLX refuses integers, spaces and a subscript repeated in one term."""
    equation = equation.replace(" ", "")
    terms = equation.split("->")[0].split(",")
    repeated = any(len(set(letters)) < len(letters) for letters in (re.sub(r"\.", "", term) for term in terms))
    xp, *values = working(*inputs)
    if xp is mx and (repeated or not mx.issubdtype(values[0].dtype, mx.inexact)):
        xp, values = np, [to_numpy(value) for value in values]
    if xp is np:
        return finish(np.einsum(equation, *values, optimize=True), inputs[0])
    return finish(mx.einsum(equation, *values), inputs[0])


@op("Det", on_host=True)
def det(x: Any) -> Any:
    """The determinant of each matrix; MLX has none."""
    return finish(np.linalg.det(to_numpy(x)), x)

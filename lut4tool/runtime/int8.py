"""Products of 8-bit integers on a CPU in the native library, with weights packed once, and rounding to them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from lut4tool import native

_NATIVE: Any = importlib.import_module("lut4tool.native._native") if native.compiled() else None
_THREADS = native.thread_count()
_FLOAT32 = np.dtype(np.float32)
#: Columns of a panel, and elements of the depth that lie together in it.
_PANEL, _TOGETHER = 16, 4


def instruction_set() -> str:
    """What multiplies bytes here: "avx512 amx", "avx512 vnni", "avx2" or "portable"; "" without the native library."""
    return str(_NATIVE.byte_instruction_set()) if _NATIVE is not None else ""


def use_instruction_set(name: str) -> None:
    """Multiply bytes with that set from now on. Raises ValueError where this machine lacks it."""
    _NATIVE.use_byte_instruction_set(name)


def quantize_linear(x: np.ndarray, scale: Any, zero: Any, dtype: np.dtype) -> np.ndarray | None:
    """round(x / scale) + zero, saturated to int8 or uint8, for one scale and zero point; None where NumPy must."""
    if _NATIVE is None or x.dtype != _FLOAT32 or scale.dtype != _FLOAT32 or scale.size != 1 or not x.size:
        return None
    if dtype.itemsize != 1 or dtype.kind not in "iu":
        return None
    limits, values = np.iinfo(dtype), np.empty(x.shape, dtype)
    flat = np.ascontiguousarray(x).reshape(-1)
    point = 0.0 if zero is None else float(zero.reshape(()))
    _NATIVE.quantize_linear(flat, scale.item(), point, limits.min, limits.max, values.reshape(-1).view(np.uint8))
    return values


def quantized(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """DynamicQuantizeLinear's uint8 values, float32 scale and zero point; None where NumPy must, for NaN too."""
    if _NATIVE is None or x.dtype != _FLOAT32 or not x.size:
        return None
    steps, scale, zero = np.empty(x.shape, np.uint8), np.empty((), np.float32), np.empty((), np.uint8)
    if not _NATIVE.quantize(np.ascontiguousarray(x).reshape(-1), steps.reshape(-1), scale.reshape(1), zero.reshape(1)):
        return None
    return steps, scale, zero


@dataclass(frozen=True)
class Bytes:
    """A matrix [K, N] of 8-bit integers less its zero points, packed; `native` is it as the native library reads it."""

    depth: int
    width: int
    native: Any


def pack(b: np.ndarray, zero: Any) -> Bytes | None:
    """Pack b [K, N], int8 or uint8, with a zero point (one, one a column, or None); None where NumPy must multiply."""
    if _NATIVE is None or b.ndim != 2 or not b.size:
        return None
    depth, width = b.shape
    signed = b.view(np.int8) if b.dtype == np.int8 else (b ^ np.uint8(128)).view(np.int8)
    zeros = np.zeros(width, np.int32)
    zeros += 0 if zero is None else np.asarray(zero, np.int32).reshape(-1)
    zeros -= 0 if b.dtype == np.int8 else 128
    whole = np.zeros((_NATIVE.packed_depth(depth), -(-width // _PANEL) * _PANEL), np.int8)
    whole[:depth, :width] = signed
    panels = whole.reshape(-1, _TOGETHER, whole.shape[1] // _PANEL, _PANEL).transpose(2, 0, 3, 1)
    sums = signed.sum(axis=0, dtype=np.int32)
    return Bytes(depth, width, _NATIVE.Bytes(native.aligned(panels).reshape(-1), zeros, sums, depth, width))


def _rows(a: np.ndarray, zero: Any, b: Bytes) -> tuple[np.ndarray, np.ndarray]:
    """The rows of `a` as the native library reads them, and a zero point for each."""
    if a.shape[1] != b.depth:
        raise ValueError(f"rows of {a.shape[1]} bytes and a matrix of {b.depth} rows have no product")
    padded = _NATIVE.packed_depth(b.depth)
    if a.dtype == np.uint8 and padded == b.depth:
        rows = np.ascontiguousarray(a)
    else:
        rows = np.zeros((a.shape[0], padded), np.uint8)
        rows[:, : b.depth] = a if a.dtype == np.uint8 else a.view(np.uint8) ^ np.uint8(128)
    zeros = np.empty(a.shape[0], np.int32)
    zeros[:] = 0 if zero is None else zero.reshape(-1)
    if a.dtype != np.uint8:
        zeros += 128
    return rows, zeros


def matmul(a: np.ndarray, zero: Any, b: Bytes) -> np.ndarray:
    """(a - zero) @ b in int32, a [M, K] int8 or uint8, zero one, one a row, or None."""
    out = np.empty((a.shape[0], b.width), np.int32)
    b.native.multiply(*_rows(a, zero, b), out, _THREADS)
    return out


def scaled_matmul(a: np.ndarray, zero: Any, b: Bytes, step: float, factors: np.ndarray) -> np.ndarray:
    """The same as float32, times step * factors [N], which are multiplied first."""
    out = np.empty((a.shape[0], b.width), np.float32)
    b.native.multiply_scaled(*_rows(a, zero, b), factors, step, out, _THREADS)
    return out


@dataclass(frozen=True, eq=False)
class Product:
    """MatMulInteger with its B packed; general: what runs it for operands of no elements."""

    matrix: Bytes
    general: Callable[..., Any]

    def __call__(self, a: Any, b: Any, a_zero_point: Any = None, b_zero_point: Any = None) -> Any:
        """Return the int32 product [..., N]."""
        if not a.size:
            return self.general(a, b, a_zero_point, b_zero_point)
        y = matmul(a.reshape(-1, a.shape[-1]), _each(a, a_zero_point), self.matrix)
        return y.reshape(*a.shape[:-1], -1)

    @cached_property
    def ones(self) -> np.ndarray:
        """The factors [N] of a product that is times one number."""
        return np.ones(self.matrix.width, np.float32)

    def times(self, factor: Any, a: Any, b: Any, a_zero_point: Any = None, b_zero_point: Any = None) -> Any:
        """The same as float32 times a factor, as Cast and Mul make it: one number, or one a column."""
        one = factor.size == 1 and factor.ndim <= a.ndim
        if not a.size or not (one or factor.shape == (self.matrix.width,)):
            return self(a, b, a_zero_point, b_zero_point).astype(np.float32) * factor
        step, factors = (factor.item(), self.ones) if one else (1.0, np.ascontiguousarray(factor))
        y = scaled_matmul(a.reshape(-1, a.shape[-1]), _each(a, a_zero_point), self.matrix, step, factors)
        return y.reshape(*a.shape[:-1], -1)


def _each(a: Any, zero: Any) -> Any:
    """A zero point of all rows, or one a row of each matrix."""
    return zero if zero is None or zero.size == 1 else np.broadcast_to(zero, a.shape[:-1])

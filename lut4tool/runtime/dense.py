"""Dense products and convolutions of NumPy arrays on a CPU: the native library over the BLAS in front of MLX, or NumPy.

The BLAS gets one thread: native code hands it pieces that its own threads take in turn. Two pools would fight for the
cores, and OpenBLAS's own waits for a thread that the system does not run: ten times slower on a busy machine, measured.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import lut4tool.runtime.backend  # noqa: F401 - it loads the BLAS
from lut4tool import native

#: Multiplications that NumPy's own BLAS makes on one thread; one row of them: a 32nd.
_ONE_THREAD = 1 << 18
_FLOAT32 = np.dtype(np.float32)


def _start() -> Any:
    """The native module with a BLAS to call, None where either is missing."""
    functions = [_found(f"cblas_{name}") for name in ("sgemm", "sgemv")]
    if not native.compiled() or None in functions:
        return None
    for name in ("openblas_set_num_threads", "MKL_Set_Num_Threads"):
        if (limit := _found(name)) is not None:
            limit(1)
    module: Any = importlib.import_module("lut4tool.native._native")
    module.use_blas(*(ctypes.cast(function, ctypes.c_void_p).value for function in functions))
    return module


def _found(name: str) -> Any:
    """A function of the BLAS that the backend has loaded globally, scipy-openblas32's under its own prefix."""
    process = ctypes.CDLL(None)
    return getattr(process, f"scipy_{name}", None) or getattr(process, name, None)


_NATIVE = _start()
_THREADS = native.thread_count()


def available() -> bool:
    """Whether the native library serves; NumPy does what this module does else."""
    return _NATIVE is not None


def matmul(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """np.matmul's a @ b; float32 matrices in the native library, more axes and other types in NumPy."""
    if _NATIVE is None or a.ndim != 2 or b.ndim != 2 or not _serves(a, b):
        return np.matmul(a, b)
    rows, size = a.shape[0], b.size
    if rows * size <= _ONE_THREAD and (rows > 1 or size <= _ONE_THREAD >> 5):
        return np.matmul(a, b)
    out = np.empty((a.shape[0], b.shape[1]), np.float32)
    _NATIVE.matmul(_blasable(a), _blasable(b), out, _THREADS)
    return out


def _serves(*arrays: np.ndarray) -> bool:
    return all(array.dtype == _FLOAT32 and array.size for array in arrays)


def _blasable(matrix: np.ndarray) -> np.ndarray:
    """The matrix with contiguous rows or columns: itself where it has them."""
    (rows, columns), (down, right) = matrix.shape, matrix.strides
    if (right == 4 and down >= 4 * columns) or (down == 4 and right >= 4 * rows):
        return matrix
    return np.ascontiguousarray(matrix)


def conv(
    x: np.ndarray, w: np.ndarray, bias: np.ndarray | None, geometry: tuple[int, ...], out: tuple[int, ...], group: int
) -> np.ndarray | None:
    """Convolve x [N, C, H, W] with w [M, C / group, *kernel], plus bias [M] -> [N, M, *out]; None where NumPy must.

    geometry: strides, dilations and the zeros before, two of each.
    """
    if _NATIVE is None or not _serves(x, w) or not all(out):
        return None
    y = np.empty((x.shape[0], w.shape[0], *out), np.float32)
    offset = None if bias is None else np.ascontiguousarray(bias, np.float32)
    _NATIVE.conv(np.ascontiguousarray(x), np.ascontiguousarray(w), offset, geometry, group, y, _THREADS)
    return y


def curve(name: str, x: np.ndarray) -> np.ndarray | None:
    """The curve "sigmoid" or "tanh" of x, within 4 units in the last place; None where NumPy must."""
    if _NATIVE is None or not _serves(x):
        return None
    out = np.empty(x.shape, np.float32)
    _NATIVE.curve(name, np.ascontiguousarray(x).reshape(-1), out.reshape(-1), _THREADS)
    return out


def quantize_linear(x: np.ndarray, scale: Any, zero: Any, dtype: np.dtype) -> np.ndarray | None:
    """round(x / scale) + zero, saturated to int8 or uint8, for one scale and zero point; None where NumPy must."""
    if _NATIVE is None or not _serves(x, scale) or scale.size != 1 or dtype.itemsize != 1 or dtype.kind not in "iu":
        return None
    limits, values = np.iinfo(dtype), np.empty(x.shape, dtype)
    flat = np.ascontiguousarray(x).reshape(-1)
    point = 0.0 if zero is None else float(zero.reshape(()))
    _NATIVE.quantize_linear(flat, scale.item(), point, limits.min, limits.max, values.reshape(-1).view(np.uint8))
    return values


def quantized(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """DynamicQuantizeLinear's uint8 values, float32 scale and zero point; None where NumPy must, for NaN too."""
    if _NATIVE is None or not _serves(x):
        return None
    steps, scale, zero = np.empty(x.shape, np.uint8), np.empty((), np.float32), np.empty((), np.uint8)
    if not _NATIVE.quantize(np.ascontiguousarray(x).reshape(-1), steps.reshape(-1), scale.reshape(1), zero.reshape(1)):
        return None
    return steps, scale, zero


@dataclass(frozen=True)
class Bytes:
    """A matrix [K, N] of 8-bit integers less its zero points, as the native product reads it: as many bytes, by column.

    columns: int8 [N, packed depth]; zero: int32 [N], 128 less where the integers were unsigned; sums: of each column.
    """

    depth: int
    columns: np.ndarray
    zero: np.ndarray
    sums: np.ndarray


def pack_bytes(b: np.ndarray, zero: Any) -> Bytes | None:
    """Pack b [K, N], int8 or uint8, with a zero point (one, one a column, or None); None where NumPy must multiply."""
    if _NATIVE is None or b.ndim != 2 or not b.size:
        return None
    depth, width = b.shape
    columns = np.zeros((width, _NATIVE.packed_depth(depth)), np.int8)
    columns[:, :depth] = b.T.view(np.int8) if b.dtype == np.int8 else (b.T ^ np.uint8(128)).view(np.int8)
    zeros = np.zeros(width, np.int32)
    zeros += 0 if zero is None else np.asarray(zero, np.int32).reshape(-1)
    zeros -= 0 if b.dtype == np.int8 else 128
    return Bytes(depth, columns, zeros, columns.sum(axis=1, dtype=np.int32))


def matmul_bytes(a: np.ndarray, zero: Any, b: Bytes) -> np.ndarray:
    """(a - zero) @ b in int32, a [M, K] int8 or uint8, zero one, one a row, or None."""
    rows = np.zeros((a.shape[0], b.columns.shape[1]), np.uint8)
    rows[:, : b.depth] = a if a.dtype == np.uint8 else a.view(np.uint8) ^ np.uint8(128)
    zeros = np.zeros(a.shape[0], np.int32)
    zeros += 0 if zero is None else np.asarray(zero, np.int32).reshape(-1)
    zeros += 0 if a.dtype == np.uint8 else 128
    out = np.empty((a.shape[0], b.zero.size), np.int32)
    _NATIVE.matmul_bytes(rows, b.columns, zeros, b.zero, b.sums, b.depth, out, _THREADS)
    return out


@dataclass(frozen=True)
class RoundedProduct:
    """The product of what `rounding`, DynamicQuantizeLinear, keeps of x [..., K] with bytes [K, N], times a factor.

    factor: float32 [1] or [N].
    """

    matrix: Bytes
    factor: np.ndarray
    rounding: Callable[[Any], tuple[Any, Any, Any]]

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Return the product [..., N]."""
        steps, scale, zero = self.rounding(x)
        total = matmul_bytes(steps.reshape(-1, x.shape[-1]), zero, self.matrix).reshape(*x.shape[:-1], -1)
        return np.multiply(total, scale * self.factor, dtype=np.float32)


def lstm(
    x: np.ndarray, r: np.ndarray | RoundedProduct, h: np.ndarray, c: np.ndarray, lengths: Any, backward: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Run an LSTM with sigmoid and tanh -> y [T, B, H] and the last h and c [B, H]; None where NumPy must.

    x: [T, B, 4 * H], the inputs' product and the biases of i, o, f, c. r: [4 * H, H], or what multiplies a state.
    lengths: [B] or None.
    """
    if _NATIVE is None or not _serves(x, h, c) or not (isinstance(r, RoundedProduct) or _serves(r)):
        return None
    y = np.empty((*x.shape[:2], h.shape[1]), np.float32)
    h, c = np.array(h, order="C"), np.array(c, order="C")  # written in place
    rest = y, h, c, _lengths(lengths), backward, _THREADS
    if isinstance(r, RoundedProduct):
        factors = np.ascontiguousarray(np.broadcast_to(r.factor, r.matrix.zero.shape), np.float32)
        matrix = r.matrix
        _NATIVE.lstm_bytes(np.ascontiguousarray(x), matrix.columns, matrix.zero, matrix.sums, factors, *rest)
    else:
        _NATIVE.lstm(np.ascontiguousarray(x), np.ascontiguousarray(r), *rest)
    return y, h, c


def gru(
    x: np.ndarray, r: np.ndarray, bias: np.ndarray, reset_after: bool, h: np.ndarray, lengths: Any, backward: bool
) -> tuple[np.ndarray, np.ndarray] | None:
    """Run a GRU with sigmoid and tanh -> y [T, B, H] and the last h [B, H]; None where NumPy must.

    x: [T, B, 3 * H], the inputs' product and all biases of z, r, h but the recurrent one of h, bias [H]; r: [3 * H, H];
    reset_after: the reset gate multiplies the state's product, not the state.
    """
    if _NATIVE is None or not _serves(x, r, bias, h):
        return None
    y, h = np.empty((*x.shape[:2], h.shape[1]), np.float32), np.array(h, order="C")
    given = (np.ascontiguousarray(array) for array in (x, r, bias))
    _NATIVE.gru(*given, reset_after, y, h, _lengths(lengths), backward, _THREADS)
    return y, h


def _lengths(lengths: Any) -> np.ndarray | None:
    return None if lengths is None else np.ascontiguousarray(lengths, np.int64)

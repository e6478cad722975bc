"""Dense products of NumPy arrays on a CPU: the native library over the BLAS in front of MLX, or NumPy.

The BLAS gets one thread: native code hands it pieces that its own threads take in turn. Two pools would fight for the
cores, and OpenBLAS's own waits for a thread that the system does not run: ten times slower on a busy machine, measured.
"""

from __future__ import annotations

import ctypes
import importlib
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

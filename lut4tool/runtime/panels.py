"""Products on a CPU with float32 weights that are constant: laid out once in panels of 16 columns, no BLAS called."""

from __future__ import annotations

import importlib
import weakref
from functools import cached_property
from typing import Any

import numpy as np

from lut4tool import native

_NATIVE: Any = importlib.import_module("lut4tool.native._native") if native.compiled() else None
_THREADS = native.thread_count()
_COLUMNS = 16
#: Bytes of the largest weight that is laid out anew: the product with a larger one is as fast where it lies.
_MOST = 1 << 24


class Weight:
    """A weight [K, N], or [N, K] transposed, whose panels [ceil(N / 16), K, 16] are made when they are first wanted.

    Then the array is let go.
    """

    def __init__(self, array: np.ndarray, transposed: bool) -> None:
        self.array: np.ndarray | None = array
        self.transposed = transposed
        self.depth, self.width = array.shape[::-1] if transposed else array.shape

    @cached_property
    def panels(self) -> np.ndarray:
        """The panels, flat."""
        array, self.array = self.array, None
        columns: Any = array.T if self.transposed and array is not None else array
        whole = np.zeros((self.depth, -(-self.width // _COLUMNS) * _COLUMNS), np.float32)
        whole[:, : self.width] = columns
        return native.aligned(whole.reshape(self.depth, -1, _COLUMNS).transpose(1, 0, 2)).reshape(-1)


#: The weights that wait for their panels, by their arrays: nodes that share an array share its panels.
_WAITING: weakref.WeakValueDictionary[tuple[int, bool], Weight] = weakref.WeakValueDictionary()


def _weight(array: np.ndarray, transposed: bool) -> Weight:
    key = id(array), transposed
    known = _WAITING.get(key)
    if known is None or known.array is not array:
        known = _WAITING[key] = Weight(array, transposed)
    return known


class Product:
    """x [..., K] times a weight [K, N], plus a bias [N] where there is one.

    reads: of the operator's inputs only the first is read when it runs. quantized: what the weight was dequantized from
    (see Constant), None where it is no such.
    """

    reads = (0,)

    def __init__(
        self, array: np.ndarray, bias: np.ndarray | None = None, transposed: bool = False, quantized: Any = None
    ) -> None:
        self.weight, self.bias, self.quantized = _weight(array, transposed), None, quantized
        self.depth, self.width = self.weight.depth, self.weight.width
        if bias is not None:
            self.bias = np.zeros(-(-self.width // _COLUMNS) * _COLUMNS, np.float32)
            self.bias[: self.width] = bias

    def __call__(self, x: np.ndarray, *_: Any) -> np.ndarray:
        """Return the product [..., N]."""
        *rest, depth = x.shape
        if depth != self.depth:
            raise ValueError(f"a of shape {list(x.shape)} and b of shape {[self.depth, self.width]} have no product")
        out = np.empty((*rest, self.width), np.float32)
        if not x.size:
            out[...] = 0 if self.bias is None else self.bias[: self.width]
        else:
            rows = np.ascontiguousarray(x).reshape(-1, depth)
            _NATIVE.multiply_panels(rows, self.weight.panels, self.bias, out.reshape(-1, self.width), _THREADS)
        return out


def product(
    array: np.ndarray | None, bias: np.ndarray | None = None, transposed: bool = False, quantized: Any = None
) -> Product | None:
    """The product with a constant float32 matrix [K, N], or [N, K] transposed; None for another, or too large a one."""
    if _NATIVE is None or array is None or array.ndim != 2 or array.dtype != np.float32:
        return None
    return Product(array, bias, transposed, quantized) if 0 < array.nbytes <= _MOST else None

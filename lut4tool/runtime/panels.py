"""Products on a CPU with float32 weights that are constant: laid out once in panels of 16 columns, no BLAS called."""

from __future__ import annotations

import importlib
import weakref
from functools import cached_property, partial
from typing import Any

import numpy as np

from lut4tool import native
from lut4tool.runtime.quantized import Quantized

_NATIVE: Any = importlib.import_module("lut4tool.native._native") if native.compiled() else None
_THREADS = native.thread_count()
_COLUMNS = 16
#: Bytes of the largest weight that is laid out anew: the product with a larger one is as fast where it lies.
_MOST = 1 << 24


class Weight:
    """A weight [K, N], or [N, K] transposed, whose panels [ceil(N / 16), K, 16] are made when they are first wanted.

    Then the array is let go. One that is Quantized has panels of bytes, with a zero and a factor a column.
    """

    def __init__(self, source: np.ndarray | Quantized, transposed: bool) -> None:
        self.source: np.ndarray | Quantized | None = source
        self.transposed = transposed
        rows, columns = source.shape
        self.depth, self.width = (columns, rows) if transposed else (rows, columns)

    @cached_property
    def multiply(self) -> Any:
        """The native product that takes rows, a bias, the result and how many threads."""
        source, self.source = self.source, None
        columns: Any = source.T if self.transposed and source is not None else source
        if not isinstance(columns, Quantized):
            return partial(_multiply, self._laid_out(columns))
        found = columns.columns()
        assert found is not None  # product() saw to it
        factors, zeros = found
        matrix = columns.matrix
        if matrix.dtype == np.uint8:  # the same differences
            matrix, zeros = (matrix ^ np.uint8(128)).view(np.int8), zeros - np.float32(128)
        padded = [_padded(part, -(-self.width // _COLUMNS) * _COLUMNS) for part in (zeros, factors)]
        return partial(_multiply_bytes, self._laid_out(matrix), *padded)

    def _laid_out(self, columns: np.ndarray) -> np.ndarray:
        """The panels of a matrix, flat."""
        whole = _padded(columns, -(-self.width // _COLUMNS) * _COLUMNS)
        return native.aligned(whole.reshape(self.depth, -1, _COLUMNS).transpose(1, 0, 2)).reshape(-1)


def _padded(values: np.ndarray, width: int) -> np.ndarray:
    """[..., N] with zeros up to a width."""
    whole = np.zeros((*values.shape[:-1], width), values.dtype)
    whole[..., : values.shape[-1]] = values
    return whole


def _multiply(panels: np.ndarray, rows: np.ndarray, bias: np.ndarray | None, out: np.ndarray) -> None:
    _NATIVE.multiply_panels(rows, panels, bias, out, _THREADS)


def _multiply_bytes(
    panels: np.ndarray, zeros: np.ndarray, factors: np.ndarray, rows: np.ndarray, bias: np.ndarray | None,
    out: np.ndarray,
) -> None:  # fmt: skip
    _NATIVE.multiply_byte_panels(rows, panels, zeros, factors, bias, out, _THREADS)


#: The weights that wait for their panels, by what they are made of: nodes that share that share the panels.
_WAITING: weakref.WeakValueDictionary[tuple[int, bool], Weight] = weakref.WeakValueDictionary()


def _weight(source: np.ndarray | Quantized, transposed: bool) -> Weight:
    key = id(source), transposed
    known = _WAITING.get(key)
    if known is None or known.source is not source:
        known = _WAITING[key] = Weight(source, transposed)
    return known


class Product:
    """x [..., K] times a weight [K, N], plus a bias [N] where there is one.

    reads: of the operator's inputs only the first is read when it runs. quantized: the bytes [K, N] that the weight is
    made of, None where it is not.
    """

    reads = (0,)

    def __init__(
        self, source: np.ndarray | Quantized, bias: np.ndarray | None = None, transposed: bool = False
    ) -> None:
        self.weight, self.bias, self.quantized = _weight(source, transposed), None, None
        self.depth, self.width = self.weight.depth, self.weight.width
        if isinstance(source, Quantized):
            self.quantized = source.T if transposed else source
        if bias is not None:
            self.bias = _padded(bias.astype(np.float32), -(-self.width // _COLUMNS) * _COLUMNS)

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
            self.weight.multiply(rows, self.bias, out.reshape(-1, self.width))
        return out


def product(
    source: np.ndarray | Quantized | None, bias: np.ndarray | None = None, transposed: bool = False
) -> Product | None:
    """The product with a constant float32 matrix [K, N], or [N, K] transposed; None for another, or too large a one."""
    if isinstance(source, Quantized) and _NATIVE is not None and source.matrix.size:
        return Product(source, bias, transposed) if (source.T if transposed else source).columns() is not None else None
    if _NATIVE is None or not isinstance(source, np.ndarray) or source.ndim != 2 or source.dtype != np.float32:
        return None
    return Product(source, bias, transposed) if 0 < source.nbytes <= _MOST else None

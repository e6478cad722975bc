"""Float matrices that a model makes of bytes: kept as the bytes until somebody wants the floats."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True, eq=False)
class Quantized:
    """The float32 matrix [K, N] that is (bytes - zero) * scale.

    matrix: int8 or uint8; scale float32 and zero of the matrix's type, or None: one, [1, N] for each column, or [K, 1].
    """

    matrix: np.ndarray
    scale: np.ndarray | None = None
    zero: np.ndarray | None = None

    def array(self) -> np.ndarray:
        """The floats, a new array."""
        return _widened(self.matrix, self.scale, self.zero)

    def rows(self, indices: np.ndarray) -> np.ndarray:
        """The floats [*indices, N] of some rows. Raises IndexError for an index that there is not."""
        parts = [None if part is None else part.take(indices, 0) if len(part) > 1 else part[0] for part in self.both]
        return _widened(self.matrix.take(indices, 0), *parts)

    @property
    def shape(self) -> tuple[int, ...]:
        """[K, N]."""
        return self.matrix.shape

    @property
    def both(self) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Scale and zero point, each with two axes."""
        scale, zero = (None if part is None else part.reshape(part.shape or (1, 1)) for part in (self.scale, self.zero))
        return scale, zero

    @cached_property
    def T(self) -> Quantized:  # noqa: N802 - as NumPy calls it
        """The matrix [N, K]."""
        scale, zero = (None if part is None else part.T for part in self.both)
        return Quantized(self.matrix.T, scale, zero)

    def columns(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Scale and zero of each column, [N] in float32; None where rows have their own."""
        if any(part is not None and len(part) > 1 for part in self.both):
            return None
        values = [np.full((1, 1), d) if part is None else part for d, part in zip((1, 0), self.both, strict=True)]
        scale, zero = (np.broadcast_to(part, (1, self.matrix.shape[1])).astype(np.float32)[0] for part in values)
        return scale, zero


def _widened(matrix: np.ndarray, scale: np.ndarray | None, zero: np.ndarray | None) -> np.ndarray:
    """In the order that DequantizeLinear computes, as Cast, Sub and Mul do."""
    y = matrix.astype(np.float32)
    if zero is not None:
        y -= zero.astype(np.float32)
    if scale is not None:
        y *= scale
    return y

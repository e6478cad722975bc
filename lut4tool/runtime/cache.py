"""A key-value cache that a decoding loop owns: written in place, with room for more steps."""

from __future__ import annotations

from typing import Any

import numpy as np

from lut4tool.runtime.backend import mx
from lut4tool.runtime.dtypes import to_mx, to_numpy


class Cache:
    """Keys or values [B, G, length, H] of the steps so far, in a buffer that grows by whole chunks of steps.

    It stands for an array in the feeds and results of the one operator that reads and writes it: GroupQueryAttention,
    whose own inputs say how many steps each sequence has. The buffer is a NumPy array where that operator computes in
    NumPy, else an MLX array, which MLX updates in place as nothing else refers to it.
    """

    def __init__(self, value: Any, chunk: int) -> None:
        self.chunk, self.length = chunk, value.shape[2]
        self._value = value  # what it starts from, until the first write makes the buffer
        self.buffer: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the filled part."""
        batch, heads, _, size = (self._value if self.buffer is None else self.buffer).shape
        return batch, heads, self.length, size

    @property
    def capacity(self) -> int:
        """Steps that the buffer has room for."""
        return 0 if self.buffer is None else int(self.buffer.shape[2])

    def array(self) -> Any:
        """A copy of the filled part, as an MLX array where MLX has the type."""
        if self.buffer is None:
            return to_mx(self._value)
        filled = self.buffer[:, :, : self.length]
        return to_mx(filled) if isinstance(filled, np.ndarray) else mx.contiguous(filled)

    def write(self, xp: Any, new: Any, starts: np.ndarray, length: int) -> Any:
        """Write the steps new [B, G, S, H] at each sequence's start; return the filled part, from now `length` steps.

        What a sequence has after its new steps becomes 0. xp: numpy or mlx.core, the module of `new`.
        """
        self._reserve(xp, length)
        end = max(length, self.length)
        if (starts == starts[0]).all():
            self._set(slice(None), int(starts[0]), end, new)
        else:
            for row, start in enumerate(starts):
                self._set(slice(row, row + 1), int(start), end, new[row : row + 1])
        self.length = length
        return self.buffer[:, :, :length]

    def _set(self, rows: slice, start: int, end: int, new: Any) -> None:
        stop = start + new.shape[2]
        self.buffer[rows, :, start:stop] = new
        if stop < end:
            self.buffer[rows, :, stop:end] = 0

    def _reserve(self, xp: Any, length: int) -> None:
        """Make room for `length` steps: a buffer of whole chunks, the old one copied into it once."""
        if length <= self.capacity:
            return
        old = self.array() if self.buffer is None else self.buffer[:, :, : self.length]
        old = to_numpy(old) if xp is np else to_mx(old)
        batch, heads, filled, size = old.shape
        capacity = -(-length // self.chunk) * self.chunk
        self.buffer = xp.zeros((batch, heads, capacity, size), dtype=old.dtype)
        self.buffer[:, :, :filled] = old
        self._value = None

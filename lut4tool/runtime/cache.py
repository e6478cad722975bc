"""A cache that a decoding loop owns: written in place, with room for more steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lut4tool.runtime.backend import mx
from lut4tool.runtime.dtypes import to_mx, to_numpy


class Cache:
    """Keys or values of the steps so far, along one axis, in a buffer that grows by whole chunks of steps.

    It stands for an array in the feed of the one operator that reads it: Concat, which appends, or GroupQueryAttention,
    whose own inputs say how many steps each sequence has. The buffer is a NumPy array where that operator computes in
    NumPy, else an MLX array, which MLX updates in place while nothing else refers to it.
    """

    def __init__(self, value: Any, chunk: int) -> None:
        self.chunk, self.axis, self.length = chunk, 2, 0
        self._value = value  # what it starts from, until the first write makes the buffer
        self.buffer: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the filled part."""
        shape = (self._value if self.buffer is None else self.buffer).shape
        return tuple(shape) if self.buffer is None else (*shape[: self.axis], self.length, *shape[self.axis + 1 :])

    @property
    def capacity(self) -> int:
        """Steps that the buffer has room for."""
        return 0 if self.buffer is None else int(self.buffer.shape[self.axis])

    def array(self) -> Any:
        """A copy of the filled part."""
        if self.buffer is None:
            return self._value
        filled = self.buffer[self._span(0, self.length)]
        return filled.copy() if isinstance(filled, np.ndarray) else mx.contiguous(filled)

    def append(self, xp: Any, parts: Sequence[Any], axis: int) -> Any:
        """Write arrays of xp's after the filled part along an axis, and return a view of the whole; as Concat does."""
        new = parts[0] if len(parts) == 1 else xp.concatenate(parts, axis=axis)
        self._start(axis)
        stop = self.length + new.shape[self.axis]
        if self.buffer is None or stop > self.capacity:
            self._grow(xp, stop)
        wanted, found = list(self.shape), list(new.shape)
        wanted[self.axis] = found[self.axis]
        if wanted != found or new.dtype != self.buffer.dtype:
            raise ValueError(f"{new.dtype} {found} cannot follow a cache of {self.buffer.dtype} {list(self.shape)}")
        self.buffer[self._span(self.length, stop)] = new
        self.length = stop
        return self.buffer[self._span(0, stop)]

    def write(self, xp: Any, new: Any, starts: np.ndarray, length: int) -> Any:
        """Write the steps new [B, G, S, H] at each sequence's start; return the filled part, from now `length` steps.

        What a sequence has after its new steps becomes 0. xp: numpy or mlx.core, the module of `new`.
        """
        self._start(2)
        if self.buffer is None or length > self.capacity:
            self._grow(xp, length)
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

    def _span(self, start: int, stop: int) -> tuple[slice, ...]:
        return (*[slice(None)] * self.axis, slice(start, stop))

    def _start(self, axis: int) -> None:
        """Take the axis from the operator at the first write."""
        if self.buffer is None:
            self.axis = axis % len(self._value.shape)
            self.length = self._value.shape[self.axis]

    def _grow(self, xp: Any, length: int) -> None:
        """Make a buffer of whole chunks with room for `length` steps, and copy what there is into it."""
        old = self._value if self.buffer is None else self.buffer[self._span(0, self.length)]
        old = to_numpy(old) if xp is np else to_mx(old)
        capacity = -(-length // self.chunk) * self.chunk
        shape = (*old.shape[: self.axis], capacity, *old.shape[self.axis + 1 :])
        self.buffer = xp.zeros(shape, dtype=old.dtype)
        self.buffer[self._span(0, self.length)] = old
        self._value = None

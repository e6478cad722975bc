"""What goes from the host to a GPU goes in pieces: no second copy of a large array exists on either side."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

#: Bytes that are copied at a time.
PIECE = 64 << 20
#: Values that the host looks at at a time.
FLOATS = 1 << 20

_MLX = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16, "uint8": mx.uint8}


def copied(values: np.ndarray, dtype: mx.Dtype) -> mx.array:
    """Copy a contiguous array to the device as `dtype`, evaluated.

    A large one is copied some lines of its last axis at a time, and its file's map leaves the memory.
    """
    if values.nbytes <= PIECE:
        whole = mx.array(values, dtype)
        mx.eval(whole)
        return whole
    lines = values.reshape(-1, values.shape[-1]) if values.ndim > 1 else values
    whole, step = mx.zeros(lines.shape, dtype), max(1, PIECE * len(lines) // values.nbytes)
    for start in range(0, len(lines), step):
        piece = lines[start : start + step]
        whole[start : start + step] = mx.array(piece, dtype)  # in place: nothing else refers to it
        settle([whole])
        forget(piece)
    return whole.reshape(values.shape)


def settle(arrays: Sequence[mx.array]) -> None:
    """Evaluate arrays that are to be written in place: on CUDA, work that has ended holds them for a moment more."""
    mx.eval(*arrays)
    mx.synchronize()


def copied_floats(values: np.ndarray) -> mx.array:
    """Copy numbers of any type that a weight's scales have to the device, as float32."""
    return copied(values, _MLX[values.dtype.name]).astype(mx.float32)


def floats(values: np.ndarray) -> Iterator[np.ndarray]:
    """Values as float32, flat, a few at a time."""
    flat = values.reshape(-1)
    for start in range(0, flat.size, FLOATS):
        yield flat[start : start + FLOATS].astype(np.float32)


def forget(view: np.ndarray) -> None:
    """Drop the pages of a file's map under a view: they were read once and are in the file."""
    base: Any = view.base
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        origin = np.frombuffer(base, np.uint8).ctypes.data
        start = (view.ctypes.data - origin) // mmap.PAGESIZE * mmap.PAGESIZE
        base.madvise(mmap.MADV_DONTNEED, start, view.ctypes.data - origin + view.nbytes - start)

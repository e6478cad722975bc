"""Gather and scatter (onnx/defs/tensor). MLX checks no bounds: indices are checked on the host first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lut4tool.runtime.dtypes import to_numpy
from lut4tool.runtime.ops import prepared
from lut4tool.runtime.registry import op


def checked(indices: Any, size: int) -> np.ndarray:
    """Return indices as int64 on the host, negative ones counted from `size`; raise IndexError for one out of range."""
    found = to_numpy(indices).astype(np.int64, copy=False)
    if found.size:
        low, high = int(found.min()), int(found.max())
        if low < -size or high >= size:
            wrong = low if low < -size else high
            raise IndexError(f"index {wrong} is out of range for an axis of {size}: it takes {-size} to {size - 1}")
        if low < 0:
            return np.where(found < 0, found + size, found)
    return found


def positive(axis: int, rank: int) -> int:
    """An axis counted from the front; raise IndexError where a tensor of this rank has none such."""
    if not -rank <= axis < rank:
        raise IndexError(f"axis {axis} is out of range for rank {rank}: it takes {-rank} to {rank - 1}")
    return axis % rank


@op("Gather", prepare=prepared.gather)
def gather(xp: Any, x: Any, indices: Any, *, axis: int = 0) -> Any:
    """np.take; an index out of range is an error."""
    return xp.take(x, xp.array(checked(indices, x.shape[axis])), axis=axis)


def _grid(indices: np.ndarray, axis: int) -> list[np.ndarray]:
    """One index array an axis, for the element of each place of `indices`."""
    places = list(np.meshgrid(*(np.arange(size) for size in indices.shape), indexing="ij", sparse=True))
    places[axis] = indices
    return places


@op("GatherElements")
def gather_elements(xp: Any, x: Any, indices: Any, *, axis: int = 0) -> Any:
    """take_along_axis, with indices that may be shorter than x on the other axes."""
    axis += x.ndim if axis < 0 else 0
    index = checked(indices, x.shape[axis])
    cut = tuple(slice(None) if place == axis else slice(size) for place, size in enumerate(index.shape))
    return xp.take_along_axis(x[cut], xp.array(index), axis=axis)


def _tuples(xp: Any, x: Any, indices: Any, batch_dims: int = 0) -> tuple[Any, ...]:
    """The last axis of `indices` as one index array an axis of x, after those of the batch."""
    host = to_numpy(indices)
    columns = [checked(host[..., place], x.shape[batch_dims + place]) for place in range(host.shape[-1])]
    rank = host.ndim - 1
    batch = [
        np.arange(size).reshape([-1] + [1] * (rank - 1 - place)) for place, size in enumerate(host.shape[:batch_dims])
    ]
    return tuple(xp.array(part) for part in (*batch, *columns))


@op("GatherND", until=11)
def gather_nd_whole(xp: Any, x: Any, indices: Any) -> Any:
    """The last axis of indices holds index tuples."""
    return x[_tuples(xp, x, indices)]


@op("GatherND", since=12)
def gather_nd(xp: Any, x: Any, indices: Any, *, batch_dims: int = 0) -> Any:
    """The last axis of indices holds index tuples; the first batch_dims axes are shared."""
    return x[_tuples(xp, x, indices, batch_dims)]


_UFUNC = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}
_MLX = {"add": "add", "mul": "multiply", "max": "maximum", "min": "minimum"}


def _scattered(xp: Any, x: Any, places: Sequence[Any], updates: Any, reduction: str) -> Any:
    """Return x with updates at places; equal places accumulate where there is a reduction."""
    if xp is np:
        result = x.copy()
        if reduction == "none":
            result[tuple(places)] = updates
        else:
            _UFUNC[reduction].at(result, tuple(places), updates)
        return result
    if not updates.size:
        return x
    if reduction == "none":
        result = xp.array(x)
        result[tuple(places)] = updates
        return result
    return getattr(x.at[tuple(places)], _MLX[reduction])(updates)


def _scatter_elements(xp: Any, x: Any, indices: Any, updates: Any, axis: int, reduction: str) -> Any:
    axis += x.ndim if axis < 0 else 0
    places = _grid(checked(indices, x.shape[axis]), axis)
    return _scattered(xp, x, [xp.array(place) for place in places], updates, reduction)


@op("Scatter", since=9)
def scatter(xp: Any, x: Any, indices: Any, updates: Any, *, axis: int = 0) -> Any:
    """ScatterElements under its first name."""
    return _scatter_elements(xp, x, indices, updates, axis, "none")


@op("ScatterElements", until=15)
def scatter_elements_set(xp: Any, x: Any, indices: Any, updates: Any, *, axis: int = 0) -> Any:
    """x[i][indices[i][j]] = updates[i][j] and so on; an index out of range is an error."""
    return _scatter_elements(xp, x, indices, updates, axis, "none")


@op("ScatterElements", since=16)
def scatter_elements(xp: Any, x: Any, indices: Any, updates: Any, *, axis: int = 0, reduction: str = "none") -> Any:
    """With a reduction, equal indices accumulate."""
    return _scatter_elements(xp, x, indices, updates, axis, reduction)


@op("ScatterND", until=15)
def scatter_nd_set(xp: Any, x: Any, indices: Any, updates: Any) -> Any:
    """The last axis of indices holds index tuples."""
    return _scattered(xp, x, _tuples(xp, x, indices), updates, "none")


@op("ScatterND", since=16)
def scatter_nd(xp: Any, x: Any, indices: Any, updates: Any, *, reduction: str = "none") -> Any:
    """With a reduction, equal index tuples accumulate."""
    return _scattered(xp, x, _tuples(xp, x, indices), updates, reduction)


@op("TensorScatter", host=(2,))
def tensor_scatter(
    xp: Any, past: Any, update: Any, write_indices: Any = None, *, axis: int = -2, mode: str = "linear"
) -> Any:
    """A cache updated from write_indices[batch] on; circular wraps around the end."""
    axis += past.ndim if axis < 0 else 0
    length, new = past.shape[axis], update.shape[axis]
    first = np.zeros(past.shape[0], np.int64) if write_indices is None else write_indices
    steps = first[:, None] + np.arange(new)  # [batch, new]
    index = steps % length if mode == "circular" else checked(steps, length)
    shape = [past.shape[0] if place == 0 else new if place == axis else 1 for place in range(past.ndim)]
    places = _grid(np.broadcast_to(index.reshape(shape), update.shape), axis)
    return _scattered(xp, past, [xp.array(place) for place in places], update, "none")

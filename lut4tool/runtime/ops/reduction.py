"""Reductions (onnx/defs/reduction): axes as an attribute, or as an input since 13 (ReduceSum) and 18."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from lut4tool.runtime.ops import prepared
from lut4tool.runtime.ops.compute import is_float, on_device
from lut4tool.runtime.ops.indexing import positive
from lut4tool.runtime.registry import op

#: f(xp, x, axes, keepdims); where there is nothing along the axes, the reduction's identity.
Reduction = Callable[[Any, Any, tuple[int, ...], bool], Any]


def _sum(xp: Any, x: Any, axes: tuple[int, ...], keepdims: bool) -> Any:
    # MLX's sum over an axis of no elements may never end on a CPU.
    return xp.sum(x, axis=axes, keepdims=keepdims) if _count(x, axes) else _identity(0, xp, x, axes, keepdims)


def _mean(xp: Any, x: Any, axes: tuple[int, ...], keepdims: bool) -> Any:
    total = _sum(xp, x, axes, keepdims)
    count = _count(x, axes)
    if is_float(x):
        return total / count if count else total * float("nan")
    return xp.where(total < 0, -(-total // count), total // count)


def _prod(xp: Any, x: Any, axes: tuple[int, ...], keepdims: bool) -> Any:
    return xp.prod(x, axis=axes, keepdims=keepdims) if _count(x, axes) else _identity(1, xp, x, axes, keepdims)


def _log_sum_exp(xp: Any, x: Any, axes: tuple[int, ...], keepdims: bool) -> Any:
    if not is_float(x):
        x = x.astype(xp.float32)
    if not _count(x, axes):
        return xp.log(_sum(xp, x, axes, keepdims))
    top = xp.max(x, axis=axes, keepdims=True)
    shift = xp.where(xp.isinf(top), xp.zeros_like(top), top)
    total = xp.log(xp.sum(xp.exp(x - shift), axis=axes, keepdims=True)) + shift
    return total if keepdims else total.reshape(_without(total.shape, axes))


def _extreme(function: str, xp: Any, x: Any, axes: tuple[int, ...], keepdims: bool) -> Any:
    if _count(x, axes):
        return getattr(xp, function)(x, axis=axes, keepdims=keepdims)
    low = function == "max"
    if is_float(x):
        nothing: Any = -float("inf") if low else float("inf")
    elif xp.issubdtype(x.dtype, xp.integer):
        nothing = xp.iinfo(x.dtype).min if low else xp.iinfo(x.dtype).max
    else:
        nothing = not low
    return _identity(nothing, xp, x, axes, keepdims)


def _identity(value: Any, xp: Any, x: Any, axes: tuple[int, ...], keepdims: bool) -> Any:
    shape = [1 if axis in axes else size for axis, size in enumerate(x.shape)]
    return xp.full(shape if keepdims else _without(shape, axes), xp.array(value, dtype=x.dtype))


def _count(x: Any, axes: tuple[int, ...]) -> int:
    count = 1
    for axis in axes:
        count *= x.shape[axis]
    return count


def _without(shape: Sequence[int], axes: tuple[int, ...]) -> list[int]:
    return [size for axis, size in enumerate(shape) if axis not in axes]


_REDUCTIONS: dict[str, Reduction] = {
    "ReduceSum": _sum,
    "ReduceMean": _mean,
    "ReduceProd": _prod,
    "ReduceMax": partial(_extreme, "max"),
    "ReduceMin": partial(_extreme, "min"),
    "ReduceL1": lambda xp, x, axes, keepdims: _sum(xp, xp.abs(x), axes, keepdims),
    "ReduceL2": lambda xp, x, axes, keepdims: xp.sqrt(_sum(xp, x * x, axes, keepdims)),
    "ReduceSumSquare": lambda xp, x, axes, keepdims: _sum(xp, x * x, axes, keepdims),
    "ReduceLogSum": lambda xp, x, axes, keepdims: xp.log(_sum(xp, x, axes, keepdims)),
    "ReduceLogSumExp": _log_sum_exp,
}


_PREPARED = {
    "ReduceMean": prepared.mean,
    "ReduceSum": prepared.total,
    "ReduceMax": prepared.extreme(np.maximum),
    "ReduceMin": prepared.extreme(np.minimum),
}


def reduce(reduction: Reduction, xp: Any, x: Any, axes: Sequence[int] | None, keepdims: int) -> Any:
    """Reduce over `axes` (None: all of them) in x's own type, where NumPy and MLX would widen small integers."""
    chosen = range(x.ndim) if axes is None else axes
    places = tuple(positive(int(axis), x.ndim) for axis in chosen)
    return on_device(xp, lambda xp, x: reduction(xp, x, places, bool(keepdims)), x)


def _axes_attribute(
    reduction: Reduction, xp: Any, x: Any, *, axes: Sequence[int] | None = None, keepdims: int = 1
) -> Any:
    return reduce(reduction, xp, x, axes or None, keepdims)


def _axes_input(
    reduction: Reduction, xp: Any, x: Any, axes: Any = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0
) -> Any:
    if axes is None or not axes.size:
        axes = () if noop_with_empty_axes else None
    return reduce(reduction, xp, x, axes, keepdims)


for _name, _reduction in _REDUCTIONS.items():
    _last = 12 if _name == "ReduceSum" else 17
    _prepare = _PREPARED.get(_name)
    op(_name, until=_last, prepare=_prepare)(partial(_axes_attribute, _reduction))
    op(_name, since=_last + 1, host=(1,), prepare=_prepare)(partial(_axes_input, _reduction))


def _first(function: str, xp: Any, x: Any, *, axis: int = 0, keepdims: int = 1) -> Any:
    return _select(function, xp, x, axis=axis, keepdims=keepdims)


def _select(function: str, xp: Any, x: Any, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Any:
    """int64, where MLX gives uint32; the last of equal values on demand."""
    axis = positive(axis, x.ndim)
    if select_last_index:
        backward = tuple(slice(None, None, -1) if place == axis else slice(None) for place in range(x.ndim))
        index = x.shape[axis] - 1 - getattr(xp, function)(x[backward], axis=axis).astype(xp.int64)
    else:
        index = getattr(xp, function)(x, axis=axis).astype(xp.int64)
    return xp.expand_dims(index, axis) if keepdims else index


for _name, _function in (("ArgMax", "argmax"), ("ArgMin", "argmin")):
    op(_name, until=11)(partial(_first, _function))
    op(_name, since=12)(partial(_select, _function))

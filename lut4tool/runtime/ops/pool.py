"""Pooling: a window's reduction is one reduction an axis, each over the slices of its kernel positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from lut4tool.runtime.convolution import pool
from lut4tool.runtime.dtypes import to_device, to_numpy
from lut4tool.runtime.ops.compute import finish, numpy_type, working
from lut4tool.runtime.ops.sizes import check_size
from lut4tool.runtime.ops.window import Ints, Window, pad, views, window
from lut4tool.runtime.registry import op

if TYPE_CHECKING:
    from lut4tool.runtime.plan import Node

#: Shapes of x that a node remembers.
REMEMBERED = 32


def _native(xp: Any, x: Any, grid: Window, maximum: bool) -> Any:
    """The maximum or the sum of x [N, C, *size] in each window, in the native library; None where it does not serve."""
    if xp is not np or grid.rank > 2:
        return None
    wide, out = (x, grid.out) if grid.rank == 2 else (x[:, :, None], (1, *grid.out))
    one, none = (1,) * (2 - grid.rank), (0,) * (2 - grid.rank)
    geometry = (*one, *grid.kernel, *one, *grid.strides, *one, *grid.dilations, *none, *grid.before)
    y = pool(wide, geometry, out, maximum)
    return None if y is None else y.reshape(*x.shape[:2], *grid.out)


class PreparedPool:
    """A MaxPool or AveragePool of float32 on a CPU: the window over an x of some shape is worked out once."""

    def __init__(self, general: Callable[..., Any], attributes: Mapping[str, Any], maximum: bool) -> None:
        self.general, self.attributes, self.maximum = general, attributes, maximum
        self._known: dict[tuple[int, ...], tuple[Window, np.ndarray | None]] = {}

    def __call__(self, x: np.ndarray) -> Any:
        """The node's own input."""
        found = self._known.get(x.shape)
        if found is None:
            a = self.attributes
            strides, dilations, pads = (a.get(name) for name in ("strides", "dilations", "pads"))
            rounding = a.get("auto_pad", "NOTSET"), a.get("ceil_mode", 0)
            grid = window(x.shape[2:], a["kernel_shape"], strides, dilations, pads, *rounding)
            found = grid, None if self.maximum else _count(grid, self.attributes.get("count_include_pad", 0))
            if len(self._known) >= REMEMBERED:
                self._known.clear()
            self._known[x.shape] = found
        grid, count = found
        y = _native(np, x, grid, self.maximum)
        if y is None:
            return self.general(x)
        if count is not None:
            y /= count
        return y


def _prepare(maximum: bool) -> Callable[[Node, Callable[..., Any]], PreparedPool | None]:
    def prepare(node: Node, general: Callable[..., Any]) -> PreparedPool | None:
        fits = node.types[:1] == ("tensor(float)",) and node.outputs == 1
        return PreparedPool(general, node.attributes, maximum) if fits else None

    return prepare


def _reduce(x: Any, grid: Window, combine: Callable[[Any, Any], Any]) -> Any:
    """Reduce a padded x [N, C, *size] to [N, C, *out] with an associative function."""
    for axis in range(grid.rank):
        around = (slice(None),) * (2 + axis)
        places = range(grid.kernel[axis] if x.size else 1)  # of nothing one is as good as all
        x = reduce(combine, [x[(*around, grid.axis_slice(axis, at))] for at in places])
    return x


@op("MaxPool", on_host=2, prepare=_prepare(maximum=True))
def max_pool(
    x: Any, *, auto_pad: str = "NOTSET", ceil_mode: int = 0, dilations: Ints = None,
    kernel_shape: Sequence[int], pads: Ints = None, storage_order: int = 0,
    strides: Ints = None, outputs: int = 1,
) -> Any:  # fmt: skip
    """Padding never wins; Indices count in the flattened x without padding (storage_order 1: column by column)."""
    grid = window(x.shape[2:], kernel_shape, strides, dilations, pads, auto_pad, ceil_mode)
    xp, data = working(x)
    dtype = numpy_type(data)
    lowest = -np.inf if dtype.kind == "f" else int(np.iinfo(dtype).min)
    y = _native(xp, data, grid, True) if outputs == 1 else None
    if y is not None:
        return finish(y, x)
    padded = pad(xp, data, grid, lowest)
    if outputs == 1:
        return finish(_reduce(padded, grid, xp.maximum), x)
    flat = views(np.ascontiguousarray(to_numpy(padded)), grid)
    flat = flat.reshape(*flat.shape[:2], prod(grid.kernel), *grid.out)
    return finish(flat.max(2), x), to_device(_indices(flat.argmax(2), grid, storage_order))


def _indices(best: np.ndarray, grid: Window, storage_order: int) -> np.ndarray:
    """Index in the flattened input of kernel position best [N, C, *out] of each window."""
    places = []
    for axis, at in enumerate(np.unravel_index(best, grid.kernel)):
        first = np.arange(grid.out[axis]) * grid.strides[axis] - grid.before[axis]
        places.append(at * grid.dilations[axis] + first.reshape(-1, *[1] * (grid.rank - 1 - axis)))
    planes = np.arange(prod(best.shape[:2])).reshape(*best.shape[:2], *[1] * grid.rank) * prod(grid.size)
    flat: Any = 0
    axes = range(grid.rank)
    for axis in reversed(axes) if storage_order else axes:
        flat = flat * grid.size[axis] + np.clip(places[axis], 0, grid.size[axis] - 1)
    return (planes + flat).astype(np.int64)


@op("AveragePool", since=7, prepare=_prepare(maximum=False))
def average_pool(
    x: Any, *, auto_pad: str = "NOTSET", ceil_mode: int = 0, count_include_pad: int = 0,
    dilations: Ints = None, kernel_shape: Sequence[int], pads: Ints = None,
    strides: Ints = None,
) -> Any:  # fmt: skip
    """Divide by what a window covers of x, with count_include_pad also of the padding asked for."""
    grid = window(x.shape[2:], kernel_shape, strides, dilations, pads, auto_pad, ceil_mode)
    xp, data = working(x)
    total = _native(xp, data, grid, False)
    if total is None:
        total = _reduce(pad(xp, data, grid), grid, xp.add)
    total /= xp.array(_count(grid, count_include_pad).astype(numpy_type(data)))
    return finish(total, x)


def _count(grid: Window, include_pad: int) -> np.ndarray:
    """How many elements each window covers, [*out] in float32."""
    counts = [_covered(grid, axis, include_pad) for axis in range(grid.rank)]
    return reduce(np.multiply.outer, counts).astype(np.float32)


def _covered(grid: Window, axis: int, include_pad: int) -> np.ndarray:
    """How many kernel positions of each window along one axis lie on the input (or on its padding)."""
    at = np.arange(grid.out[axis])[:, None] * grid.strides[axis] + np.arange(grid.kernel[axis]) * grid.dilations[axis]
    first = 0 if include_pad else grid.before[axis]
    last = grid.before[axis] + grid.size[axis] + (grid.asked[axis] if include_pad else 0)
    return ((at >= first) & (at < last)).sum(1)


@op("LpPool", since=2)
def lp_pool(
    x: Any, *, auto_pad: str = "NOTSET", ceil_mode: int = 0, dilations: Ints = None,
    kernel_shape: Sequence[int], p: int = 2, pads: Ints = None, strides: Ints = None,
) -> Any:  # fmt: skip
    """The p-norm of each window."""
    grid = window(x.shape[2:], kernel_shape, strides, dilations, pads, auto_pad, ceil_mode)
    xp, data = working(x)
    return finish(_reduce(pad(xp, abs(data) ** p, grid), grid, xp.add) ** (1 / p), x)


def _spatial(x: Any) -> tuple[int, ...]:
    return tuple(range(2, x.ndim))


@op("GlobalMaxPool")
def global_max_pool(x: Any) -> Any:
    """The largest of each channel, its spatial axes kept as 1."""
    xp, data = working(x)
    return finish(xp.max(data, axis=_spatial(x), keepdims=True), x)


def _prepare_mean(node: Node, general: Callable[..., Any]) -> Callable[..., Any] | None:
    """Products with the same factor: a quarter of the time of np.mean."""
    factors: dict[int, np.ndarray] = {}

    def run(x: Any) -> Any:
        points = prod(x.shape[2:])
        if x.ndim < 3 or not x.size:
            return general(x)
        if points not in factors:
            factors.clear()
            factors[points] = np.full(points, 1 / points, np.float32)
        return (x.reshape(-1, points) @ factors[points]).reshape(*x.shape[:2], *[1] * (x.ndim - 2))

    return run if node.types[:1] == ("tensor(float)",) else None


@op("GlobalAveragePool", prepare=_prepare_mean)
def global_average_pool(x: Any) -> Any:
    """The mean of each channel, its spatial axes kept as 1."""
    xp, data = working(x)
    return finish(xp.mean(data, axis=_spatial(x), keepdims=True), x)


@op("GlobalLpPool", since=2)
def global_lp_pool(x: Any, *, p: int = 2) -> Any:
    """The p-norm of each channel, its spatial axes kept as 1."""
    xp, data = working(x)
    return finish(xp.sum(abs(data) ** p, axis=_spatial(x), keepdims=True) ** (1 / p), x)


@op("MaxUnpool", since=9, host=(1, 2), on_host=True)
def max_unpool(
    x: Any, indices: Any, output_shape: Any = None, *, kernel_shape: Sequence[int], pads: Ints = None,
    strides: Ints = None,
) -> Any:  # fmt: skip
    """Put each element at its flat index in the pool's own input; `output_shape` only adds zeros after that."""
    rank = x.ndim - 2
    strides, pads = strides or (1,) * rank, pads or (0,) * (2 * rank)
    size = [
        (n - 1) * s + k - pads[axis] - pads[axis + rank]
        for axis, (n, s, k) in enumerate(zip(x.shape[2:], strides, kernel_shape, strict=True))
    ]
    natural = (*x.shape[:2], *size)
    if (indices < 0).any() or (indices >= prod(natural)).any():
        raise ValueError(f"MaxUnpool's indices lie outside the pool's input {list(natural)}")
    check_size(natural, 8)
    image = np.zeros(natural, numpy_type(x))
    image.reshape(-1)[indices.reshape(-1)] = to_numpy(x).reshape(-1)
    if output_shape is not None:
        image = np.pad(image, [(0, int(wide) - own) for wide, own in zip(output_shape, natural, strict=True)])
    return to_device(image)

"""Reading an image between its pixels: GridSample, AffineGrid, DeformConv, and Col2Im, which writes windows back."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from lut4tool.runtime.ops.compute import finish, numpy_type, working
from lut4tool.runtime.ops.resize import cubic
from lut4tool.runtime.ops.sizes import check_size
from lut4tool.runtime.ops.window import Ints, Window, fold, window
from lut4tool.runtime.registry import op

_CUBIC_A = -0.75


def _index(xp: Any, index: Any, length: int, padding: str, align: int) -> tuple[Any, Any]:
    """Pixel indices brought into range, and which count (None: all): outside is 0, the border, or a reflection."""
    if padding == "reflection":
        period = max(2 * (length - 1), 1) if align else 2 * length
        index = xp.remainder(index, period)
        return xp.where(index >= length, period - index if align else period - 1 - index, index), None
    inside = None if padding == "border" else (index >= 0) & (index < length)
    return xp.clip(index, 0, length - 1), inside


def sample(
    xp: Any, x: Any, coordinates: Sequence[Any], mode: str = "linear", padding: str = "zeros", align: int = 0
) -> Any:
    """Read x [N, C, *size] at pixel coordinates, an array [N, points] a spatial axis: [N, C, points] in x's type."""
    taps: list[list[tuple[Any, Any]]] = []
    place: Any
    weight: Any
    for at, length in zip(coordinates, x.shape[2:], strict=True):
        base = xp.round(at) if mode == "nearest" else xp.floor(at)
        offsets = {"nearest": (0,), "linear": (0, 1), "cubic": (-1, 0, 1, 2)}[mode]
        rows = []
        for offset in offsets:
            distance = at - (base + offset)
            weight = {"nearest": None, "linear": 1 - abs(distance), "cubic": cubic(xp, distance, _CUBIC_A)}[mode]
            index, inside = _index(xp, base + offset, length, padding, align)
            if inside is not None:
                weight = inside.astype(at.dtype) if weight is None else xp.where(inside, weight, xp.zeros_like(at))
            rows.append((xp.where(xp.isfinite(at), index, xp.zeros_like(index)).astype(xp.int32), weight))
        taps.append(rows)
    flat = x.reshape(*x.shape[:2], -1)
    total: Any = 0
    for corner in itertools.product(*taps):
        place, weight = 0, None
        for (index, factor), length in zip(corner, x.shape[2:], strict=True):
            place = place * length + index
            weight = factor if weight is None else weight if factor is None else weight * factor
        values = xp.take_along_axis(flat, xp.broadcast_to(place[:, None], (*flat.shape[:2], place.shape[-1])), axis=2)
        total = total + (values if weight is None else values * weight[:, None].astype(flat.dtype))
    return total


@op("GridSample", since=20)
def grid_sample(x: Any, grid: Any, *, align_corners: int = 0, mode: str = "linear", padding_mode: str = "zeros") -> Any:
    """Sample x [N, C, *size] at grid [N, *out, rank], which is -1 to 1 over the image, its last axis first."""
    xp, data, at = working(x, grid)
    points = at.reshape(at.shape[0], -1, at.shape[-1])
    coordinates = []
    for axis, length in enumerate(x.shape[2:]):
        unit = points[..., x.ndim - 3 - axis]
        coordinates.append((unit + 1) / 2 * (length - 1) if align_corners else ((unit + 1) * length - 1) / 2)
    return finish(
        sample(xp, data, coordinates, mode, padding_mode, align_corners).reshape(*x.shape[:2], *grid.shape[1:-1]), x
    )


@op("GridSample", since=16, until=19)
def grid_sample_before_20(
    x: Any, grid: Any, *, align_corners: int = 0, mode: str = "bilinear", padding_mode: str = "zeros"
) -> Any:
    """The same, its modes named after two axes."""
    return grid_sample(x, grid, align_corners=align_corners, mode=mode.removeprefix("bi"), padding_mode=padding_mode)


@op("AffineGrid", since=20, host=(1,))
def affine_grid(theta: Any, size: Any, *, align_corners: int = 0) -> Any:
    """Multiply theta [N, rank, rank + 1] and each point of an image [N, C, *size], x first: [N, *size, rank]."""
    xp, matrix = working(theta)
    check_size([*size.tolist(), size.size], 8)
    axes = []
    for length in size[2:].tolist():
        at = np.arange(length)
        axes.append(at * 2 / max(length - 1, 1) - 1 if align_corners else (2 * at + 1) / length - 1)
    points = np.stack([*np.meshgrid(*axes, indexing="ij")[::-1], np.ones(size[2:].tolist())], axis=-1)
    flat = xp.array(points.reshape(-1, points.shape[-1]).astype(numpy_type(matrix)))
    return finish(xp.matmul(flat, xp.swapaxes(matrix, 1, 2)).reshape(-1, *size[2:].tolist(), len(axes)), theta)


@op("DeformConv", since=19)
def deform_conv(
    x: Any, w: Any, offset: Any, b: Any = None, mask: Any = None, *, dilations: Ints = None, group: int = 1,
    kernel_shape: Ints = None, offset_group: int = 1, pads: Ints = None,
    strides: Ints = None,
) -> Any:  # fmt: skip
    """A convolution that reads kernel position k of window o at its place plus offset[k, o], weighed by mask[k, o]."""
    xp, data, weight, shift, bias, factor = working(x, w, offset, b, mask)
    grid = window(x.shape[2:], w.shape[2:], strides, dilations, pads)
    batch, points = x.shape[0] * offset_group, prod(grid.kernel) * prod(grid.out)
    shift = shift.reshape(batch, prod(grid.kernel), grid.rank, prod(grid.out))
    places = _window_places(grid).astype(numpy_type(shift))
    coordinates = [(shift[:, :, axis] + xp.array(places[axis])).reshape(batch, points) for axis in range(grid.rank)]
    columns = sample(xp, data.reshape(batch, -1, *x.shape[2:]), coordinates)
    if factor is not None:
        columns = columns * factor.reshape(batch, 1, points)
    columns = columns.reshape(x.shape[0], group, x.shape[1] // group * prod(grid.kernel), prod(grid.out))
    y = xp.matmul(weight.reshape(group, w.shape[0] // group, -1), columns).reshape(x.shape[0], -1, *grid.out)
    return finish(y if bias is None else y + bias.reshape(-1, *[1] * grid.rank), x)


def _window_places(grid: Window) -> np.ndarray:
    """Where kernel position k of window o lies without offsets: [rank, prod(kernel), prod(out)]."""
    kernel = np.stack(np.meshgrid(*map(np.arange, grid.kernel), indexing="ij")).reshape(grid.rank, -1, 1)
    out = np.stack(np.meshgrid(*map(np.arange, grid.out), indexing="ij")).reshape(grid.rank, 1, -1)
    turn = (-1, 1, 1)
    steps, gaps, first = (np.reshape(part, turn) for part in (grid.strides, grid.dilations, grid.before))
    return out * steps + kernel * gaps - first


@op("Col2Im", since=18, host=(1, 2))
def col2im(
    x: Any, image_shape: Any, block_shape: Any, *, dilations: Ints = None, pads: Ints = None,
    strides: Ints = None,
) -> Any:  # fmt: skip
    """Add x [N, C * prod(block), windows] up where each window was read from an image [N, C, *image_shape]."""
    xp, data = working(x)
    block = block_shape.tolist()
    grid = window(image_shape.tolist(), block, strides, dilations, pads)
    return finish(fold(xp, data.reshape(x.shape[0], -1, *block, *grid.out), grid), x)

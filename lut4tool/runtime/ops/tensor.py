"""Shapes, layout and selection of tensors (onnx/defs/tensor). Shape arithmetic on host values stays on the host."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from lut4tool.runtime.cache import Cache
from lut4tool.runtime.dtypes import to_device
from lut4tool.runtime.ops import prepared
from lut4tool.runtime.ops.indexing import checked, positive
from lut4tool.runtime.ops.sizes import check_size
from lut4tool.runtime.registry import op


@op("Shape", until=14, shape=True)
def shape(xp: Any, x: Any) -> Any:
    """A host int64 array."""
    return np.array(x.shape, np.int64)


@op("Shape", since=15, shape=True)
def shape_slice(xp: Any, x: Any, *, start: int = 0, end: int | None = None) -> Any:
    """A host int64 array; start and end count and clamp as Python's do."""
    return np.array(x.shape[start:end], np.int64)


@op("Size", shape=True)
def size(xp: Any, x: Any) -> Any:
    """A host int64 scalar."""
    return np.array(x.size, np.int64)


def resolved(shape: Sequence[int], wanted: Any, allowzero: int = 0) -> list[int]:
    """The shape that Reshape means: 0 copies the input's dimension unless allowzero, one -1 is inferred."""
    sizes = [int(size) for size in wanted]
    if not allowzero:
        sizes = [shape[axis] if size == 0 and axis < len(shape) else size for axis, size in enumerate(sizes)]
    if sizes.count(-1) == 1:
        known = prod(size for size in sizes if size != -1)
        sizes[sizes.index(-1)] = prod(shape) // known if known else 0
    if prod(sizes) != prod(shape) or min(sizes, default=0) < 0:
        raise ValueError(f"a tensor of shape {list(shape)} cannot be reshaped to {[int(size) for size in wanted]}")
    return sizes


@op("Reshape", since=5, until=13, host=(1,), prepare=prepared.reshape)
def reshape_copying(xp: Any, x: Any, shape: Any) -> Any:
    """0 copies the input's dimension."""
    return x.reshape(resolved(x.shape, shape))


@op("Reshape", since=14, host=(1,), prepare=prepared.reshape)
def reshape(xp: Any, x: Any, shape: Any, *, allowzero: int = 0) -> Any:
    """0 copies the input's dimension unless allowzero."""
    return x.reshape(resolved(x.shape, shape, allowzero))


@op("Transpose", prepare=prepared.transpose)
def transpose(xp: Any, x: Any, *, perm: Sequence[int] | None = None) -> Any:
    """All axes reversed by default."""
    return xp.transpose(x, range(x.ndim)[::-1] if perm is None else perm)


@op("Concat", since=4, prepare=prepared.concat)
def concat(xp: Any, *inputs: Any, axis: int) -> Any:
    """At least one tensor, of one type; a decoding loop's cache takes the others in place."""
    if isinstance(inputs[0], Cache):
        return inputs[0].append(xp, inputs[1:], axis)
    return xp.concatenate(inputs, axis=axis)


def _pieces(xp: Any, x: Any, sizes: Sequence[int], axis: int) -> tuple[Any, ...]:
    if sum(sizes) != x.shape[axis] or min(sizes, default=0) < 0:
        raise ValueError(f"pieces of {list(sizes)} do not add up to the {x.shape[axis]} of axis {axis}")
    return tuple(xp.split(x, np.cumsum(sizes)[:-1].tolist(), axis=axis))


def _equal(length: int, parts: int, outputs: int) -> list[int]:
    """Equal pieces, the last one smaller where they do not divide the length; those past the outputs are one."""
    step = -(-length // parts)
    sizes = [max(0, min(step, length - index * step)) for index in range(min(parts, outputs))]
    return [*sizes, length - sum(sizes)] if parts > outputs else sizes


@op("Split", since=2, until=12, prepare=prepared.split)
def split_attribute(xp: Any, x: Any, *, axis: int = 0, split: Sequence[int] | None = None, outputs: int) -> Any:
    """Sizes as an attribute; equal parts by default."""
    return _pieces(xp, x, split or _equal(x.shape[axis], outputs, outputs), axis)


@op("Split", since=13, until=17, host=(1,), prepare=prepared.split)
def split_input(xp: Any, x: Any, split: Any = None, *, axis: int = 0, outputs: int) -> Any:
    """Sizes as an input; equal parts by default."""
    return _pieces(xp, x, _equal(x.shape[axis], outputs, outputs) if split is None else split.tolist(), axis)


@op("Split", since=18, host=(1,), prepare=prepared.split)
def split_parts(
    xp: Any, x: Any, split: Any = None, *, axis: int = 0, num_outputs: int | None = None, outputs: int
) -> Any:
    """Sizes as an input or a number of parts, the last of which may be smaller."""
    sizes = _equal(x.shape[axis], num_outputs or outputs, outputs) if split is None else split.tolist()
    return _pieces(xp, x, sizes, axis)


def _slices(x: Any, starts: Any, ends: Any, axes: Any, steps: Any) -> tuple[slice, ...]:
    """Clamped Python slices; an end before the first element is None, a start there of a negative step the first."""
    found = [slice(None)] * x.ndim
    axes = range(len(starts)) if axes is None else axes
    steps = [1] * len(starts) if steps is None else steps
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        place = positive(int(axis), x.ndim)
        first, last, stride = slice(int(start), int(end), int(step)).indices(x.shape[place])
        first = max(first, 0)
        whole = len(range(first, last, stride)) > 0
        found[place] = slice(first, None if last < 0 else last, stride) if whole else slice(0, 0)
    return tuple(found)


@op("Slice", until=9, prepare=prepared.slices)
def slice_attributes(
    xp: Any, x: Any, *, starts: Sequence[int], ends: Sequence[int], axes: Sequence[int] | None = None
) -> Any:
    """Bounds as attributes; out of range ones clamp."""
    return x[_slices(x, starts, ends, axes, None)]


@op("Slice", since=10, host=(1, 2, 3, 4), prepare=prepared.slices)
def slice_inputs(xp: Any, x: Any, starts: Any, ends: Any, axes: Any = None, steps: Any = None) -> Any:
    """Bounds as inputs; out of range ones clamp, negative steps go backward."""
    return x[_slices(x, starts, ends, axes, steps)]


def _squeezed(x: Any, axes: Any) -> Any:
    if axes is None:
        return x.reshape([size for size in x.shape if size != 1])
    gone = {positive(int(axis), x.ndim) for axis in axes}
    for axis in gone:
        if x.shape[axis] != 1:
            raise ValueError(f"axis {axis} of shape {list(x.shape)} is not 1 and cannot be squeezed")
    return x.reshape([size for axis, size in enumerate(x.shape) if axis not in gone])


def _unsqueezed(x: Any, axes: Any) -> Any:
    rank = x.ndim + len(axes)
    new = {positive(int(axis), rank) for axis in axes}
    if len(new) != len(axes):
        raise ValueError(f"axes {[int(axis) for axis in axes]} name one axis twice")
    sizes = iter(x.shape)
    return x.reshape([1 if axis in new else next(sizes) for axis in range(rank)])


@op("Squeeze", until=12, prepare=prepared.squeeze)
def squeeze_attribute(xp: Any, x: Any, *, axes: Sequence[int] | None = None) -> Any:
    """Every dimension of 1 by default."""
    return _squeezed(x, axes)


@op("Squeeze", since=13, host=(1,), prepare=prepared.squeeze)
def squeeze(xp: Any, x: Any, axes: Any = None) -> Any:
    """Every dimension of 1 by default."""
    return _squeezed(x, axes)


@op("Unsqueeze", until=12, prepare=prepared.unsqueeze)
def unsqueeze_attribute(xp: Any, x: Any, *, axes: Sequence[int]) -> Any:
    """Axes count in the result's rank."""
    return _unsqueezed(x, axes)


@op("Unsqueeze", since=13, host=(1,), prepare=prepared.unsqueeze)
def unsqueeze(xp: Any, x: Any, axes: Any) -> Any:
    """Axes count in the result's rank."""
    return _unsqueezed(x, axes.reshape(-1))


def _itemsize(xp: Any, x: Any) -> int:
    return x.dtype.itemsize if xp is np else x.dtype.size


@op("Expand", host=(1,), prepare=prepared.expand)
def expand(xp: Any, x: Any, shape: Any) -> Any:
    """Broadcasts both ways: a 1 in `shape` keeps the input's dimension."""
    wanted = shape.tolist()
    check_size(wanted, 0)
    wanted = np.broadcast_shapes(tuple(x.shape), tuple(wanted))
    check_size(wanted, _itemsize(xp, x))
    return xp.broadcast_to(x, wanted)


@op("Tile", since=6, host=(1,))
def tile(xp: Any, x: Any, repeats: Any) -> Any:
    """One repeat an axis."""
    if repeats.size and repeats.min() < 0:
        raise ValueError(f"repeats {repeats.tolist()} must not be negative")
    check_size([n * size for n, size in zip(repeats.tolist(), x.shape, strict=True)], _itemsize(xp, x))
    return xp.tile(x, repeats.tolist())


@op("Where")
def where(xp: Any, condition: Any, x: Any, y: Any) -> Any:
    """Broadcast of three; strings on the host."""
    return xp.where(condition, x, y)


def _pad(xp: Any, x: Any, pads: Sequence[int], value: Any, axes: Any, mode: str) -> Any:
    """MLX pads with a constant or the edge only: other modes are a gather an axis; negative pads cut first."""
    places = range(x.ndim) if axes is None else [positive(int(axis), x.ndim) for axis in axes]
    around = {axis: (int(pads[i]), int(pads[i + len(places)])) for i, axis in enumerate(places)}
    cuts = [around.get(axis, (0, 0)) for axis in range(x.ndim)]
    for size, (low, high) in zip(x.shape, cuts, strict=True):
        if max(0, -low) + max(0, -high) > size:
            raise ValueError(f"pads {low} and {high} cut more than the {size} of an axis")
    inside = [slice(max(0, -low), size - max(0, -high)) for (low, high), size in zip(cuts, x.shape, strict=True)]
    x = x[tuple(inside)]
    widths = [(max(0, low), max(0, high)) for low, high in cuts]
    check_size([low + n + high for n, (low, high) in zip(x.shape, widths, strict=True)], _itemsize(xp, x))
    if mode == "constant":
        fill = xp.zeros((), dtype=x.dtype) if value is None else value.reshape(())
        return xp.pad(x, widths, constant_values=fill) if widths else x
    for axis, (before, after) in enumerate(widths):
        if before or after:
            index = prepared.source(np.arange(-before, x.shape[axis] + after), x.shape[axis], mode)
            x = xp.take(x, xp.array(index), axis=axis)
    return x


@op("Pad", since=2, until=10, prepare=prepared.pad)
def pad_attributes(xp: Any, x: Any, *, pads: Sequence[int], value: float = 0.0, mode: str = "constant") -> Any:
    """Pads and value as attributes."""
    return _pad(xp, x, pads, xp.array(value, dtype=x.dtype), None, mode)


@op("Pad", since=11, until=17, host=(1,), prepare=prepared.pad)
def pad_inputs(xp: Any, x: Any, pads: Any, constant_value: Any = None, *, mode: str = "constant") -> Any:
    """Pads and value as inputs."""
    return _pad(xp, x, pads, constant_value, None, mode)


@op("Pad", since=18, host=(1, 3), prepare=prepared.pad)
def pad(xp: Any, x: Any, pads: Any, constant_value: Any = None, axes: Any = None, *, mode: str = "constant") -> Any:
    """Pads of the axes given; mode wrap since 19."""
    return _pad(xp, x, pads, constant_value, axes, mode)


def _blocks(x: Any, sizes: Sequence[int], perm: Sequence[int], result: Sequence[int]) -> Any:
    return x.reshape(sizes).transpose(perm).reshape(result)


@op("DepthToSpace", until=10)
def depth_to_space_dcr(xp: Any, x: Any, *, blocksize: int) -> Any:
    """Depth, column, row."""
    return depth_to_space(xp, x, blocksize=blocksize)


@op("DepthToSpace", since=11)
def depth_to_space(xp: Any, x: Any, *, blocksize: int, mode: str = "DCR") -> Any:
    """Blocks ordered depth-column-row or column-row-depth."""
    n, c, h, w = x.shape
    b, depth = blocksize, c // blocksize**2
    if mode == "DCR":
        return _blocks(x, (n, b, b, depth, h, w), (0, 3, 4, 1, 5, 2), (n, depth, h * b, w * b))
    return _blocks(x, (n, depth, b, b, h, w), (0, 1, 4, 2, 5, 3), (n, depth, h * b, w * b))


@op("SpaceToDepth", until=27)
def space_to_depth_dcr(xp: Any, x: Any, *, blocksize: int) -> Any:
    """Depth, column, row."""
    return space_to_depth(xp, x, blocksize=blocksize)


@op("SpaceToDepth", since=28)
def space_to_depth(xp: Any, x: Any, *, blocksize: int, mode: str = "DCR") -> Any:
    """The inverse of DepthToSpace."""
    n, c, h, w = x.shape
    b = blocksize
    perm = (0, 3, 5, 1, 2, 4) if mode == "DCR" else (0, 1, 3, 5, 2, 4)
    return _blocks(x, (n, c, h // b, b, w // b, b), perm, (n, c * b * b, h // b, w // b))


@op("Trilu", host=(1,))
def trilu(xp: Any, x: Any, k: Any = None, *, upper: int = 1) -> Any:
    """Zeros outside the triangle of each matrix; MLX multiplies, which keeps NaN."""
    diagonal = 0 if k is None else int(k.reshape(-1)[0])
    rows, cols = np.arange(x.shape[-2])[:, None], np.arange(x.shape[-1])
    kept = cols - rows >= diagonal if upper else cols - rows <= diagonal
    return xp.where(xp.array(kept), x, xp.zeros_like(x))


@op("IsNaN")
def is_nan(xp: Any, x: Any) -> Any:
    """NaN of any float type, float8 on the host."""
    return xp.isnan(x)


@op("IsInf")
def is_inf(xp: Any, x: Any, *, detect_negative: int = 1, detect_positive: int = 1) -> Any:
    """Infinity of the signs asked for."""
    found = xp.isinf(x)
    if not detect_negative:
        found = found & (x > 0)
    return found if detect_positive else found & (x < 0)


@op("ReverseSequence", host=(1,))
def reverse_sequence(xp: Any, x: Any, sequence_lens: Any, *, batch_axis: int = 1, time_axis: int = 0) -> Any:
    """The first sequence_lens[b] steps backward, the rest as they are."""
    checked(sequence_lens - 1, x.shape[time_axis])
    steps, lengths = np.arange(x.shape[time_axis])[:, None], sequence_lens[None, :]
    times = np.where(steps < lengths, lengths - 1 - steps, steps)  # [time, batch]
    batches = np.arange(x.shape[batch_axis])[None, :]
    if time_axis == 0:
        return x[xp.array(times), xp.array(batches)]
    return x[xp.array(batches.T), xp.array(times.T)]


@op("OneHot", host=(1,))
def one_hot(xp: Any, indices: Any, depth: Any, values: Any, *, axis: int = -1) -> Any:
    """With values [off, on]; negative indices count from depth, those out of range are all off."""
    count = int(depth.reshape(-1)[0])
    check_size([*indices.shape, count], _itemsize(xp, values))
    place = axis + indices.ndim + 1 if axis < 0 else axis
    found = xp.expand_dims(indices.astype(xp.int64), place)
    found = xp.where(found < 0, found + count, found)
    shape = [count if axis == place else 1 for axis in range(found.ndim)]
    return xp.where(found == xp.arange(count, dtype=xp.int64).reshape(shape), values[1], values[0])


@op("NonZero", host=(0,), on_host=True)
def non_zero(x: Any) -> Any:
    """int64 [rank, found], in row order; how many is known on the host only."""
    return np.array(np.nonzero(x), np.int64).reshape(x.ndim, -1) if x.ndim else np.zeros((0, int(bool(x))), np.int64)


@op("Compress", host=(1,), on_host=True)
def compress(xp: Any, x: Any, condition: Any, *, axis: int | None = None) -> Any:
    """Slices where the condition holds; of the flat tensor without an axis."""
    length = x.size if axis is None else x.shape[axis]
    chosen = xp.array(checked(np.nonzero(condition)[0], length))
    return xp.take(x.reshape(-1), chosen, axis=0) if axis is None else xp.take(x, chosen, axis=axis)


@op("Unique", host=(0,), on_host=True)
def unique(x: Any, *, axis: int | None = None, sorted: int = 1) -> Any:
    """Values, first indices, inverse and counts, sorted or in order of appearance; on the host."""
    values, first, inverse, counts = np.unique(x, return_index=True, return_inverse=True, return_counts=True, axis=axis)
    if not sorted:
        order = np.argsort(first)
        rank = np.argsort(order)
        values = np.take(values, order, axis=axis or 0)
        first, counts, inverse = first[order], counts[order], rank[inverse]
    integers = (part.reshape(-1).astype(np.int64) for part in (first, inverse, counts))
    return (to_device(values), *integers)

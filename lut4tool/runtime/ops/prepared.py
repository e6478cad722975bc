"""Operators on a CPU as they run in models: what constants and types say is decided once, so that a call costs little.

Each function is the `prepare` of an operator's row: `general` is the row's function. What it returns does the same; for
a node that is not of the usual kind it returns None, and for a value that is not, `general` serves.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from math import prod
from typing import Any

import numpy as np
from onnx import TensorProto

from lut4tool.runtime import curves
from lut4tool.runtime.cache import Cache
from lut4tool.runtime.dtypes import BY_NUMBER, TYPES
from lut4tool.runtime.plan import Node
from lut4tool.runtime.quantized import Quantized

Run = Callable[..., Any]
Prepare = Callable[[Node, Run], Run | None]

#: Types that NumPy itself has: it casts and computes them as ONNX says.
_PLAIN = {f"tensor({row.name})": row.numpy for row in TYPES if row.numpy.kind in "biuf" and row.numpy.isbuiltin == 1}
#: Slices of an axis of at most so many elements are reduced one after the other.
_FEW = 8
#: Indices of a mode's padding that a node keeps, one a length of an axis.
_KEPT = 16
#: Elements of a result that no machine lacks the memory for.
_SURE = 1 << 20


def constant(node: Node, place: int) -> np.ndarray | None:
    """The value of an input, where it is constant."""
    return node.constants[place] if place < len(node.constants) else None


def given(node: Node, place: int) -> bool:
    """Whether an input is there."""
    return place < len(node.given) and node.given[place]


def plain(node: Node, place: int = 0) -> np.dtype | None:
    """The type of an input where NumPy itself has it."""
    return _PLAIN.get(node.types[place] or "") if place < len(node.types) else None


def is_float(node: Node, place: int = 0) -> bool:
    """Whether an input is float32 or float64."""
    dtype = plain(node, place)
    return dtype is not None and dtype.kind == "f" and dtype.itemsize >= 4


def listed(node: Node, name: str, place: int) -> tuple[int, ...] | None:
    """Whole numbers that are an attribute, or since some version an input; None where they are not constant."""
    attribute, value = node.attributes.get(name), constant(node, place)
    if attribute is not None:
        return tuple(attribute)
    return None if value is None else tuple(map(int, value.reshape(-1)))


# -- shapes


def reshape(node: Node, general: Run) -> Run | None:
    """np.reshape does all but 0, and its own errors are not ours."""
    fixed, value = None, constant(node, 1)
    if value is not None:
        fixed = tuple(value.tolist()) if 0 not in value and value.min(initial=0) >= -1 else ()

    def run(x: Any, shape: Any) -> Any:
        wanted = shape.tolist() if fixed is None else fixed
        if fixed == () or (fixed is None and (0 in wanted or min(wanted, default=0) < -1)):
            return general(x, shape)
        try:
            return x.reshape(wanted)
        except ValueError:
            return general(x, shape)

    return run


def unsqueeze(node: Node, general: Run) -> Run | None:
    """A reshape with a 1 at a constant axis, or with several."""
    axes = listed(node, "axes", 1)
    if axes is None or len(axes) != 1 or axes[0] < 0:
        return None
    (at,) = axes

    def run(x: Any, *rest: Any) -> Any:
        shape = x.shape
        return x.reshape((*shape[:at], 1, *shape[at:])) if at <= len(shape) else general(x, *rest)

    return run


def squeeze(node: Node, general: Run) -> Run | None:
    """np.squeeze of constant axes."""
    axes = listed(node, "axes", 1)
    if axes is None:
        return None

    def run(x: Any, *rest: Any) -> Any:
        try:
            return x.squeeze(axes)
        except ValueError:
            return general(x, *rest)

    return run


def transpose(node: Node, general: Run) -> Run | None:
    """A view."""
    perm = node.attributes.get("perm")
    if perm is None:
        return lambda x: x.T
    axes = tuple(perm)
    return lambda x: x.transpose(axes)


#: NumPy has no array of more; a malformed axis must not become a list of that length.
_MOST_AXES = 64


def slices(node: Node, general: Run) -> Run | None:
    """A view by bounds of constant axes with constant steps; what Python's slices mean otherwise is the row's."""
    parts = [listed(node, name, place) for place, name in enumerate(("starts", "ends", "axes", "steps"), 1)]
    starts, ends, axes, steps = parts
    if any(part is None and given(node, place) for place, part in enumerate(parts[2:], 3)):
        return None
    if starts is None or ends is None:
        return _slice_by_values(axes, steps, general)
    axes, steps = axes or tuple(range(len(starts))), steps or (1,) * len(starts)
    if not len(axes) == len(starts) == len(ends) == len(steps) or min(axes, default=0) < 0 or min(steps, default=1) < 1:
        return None
    if max(axes, default=0) >= _MOST_AXES:
        return None
    found = [slice(None)] * (max(axes, default=-1) + 1)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        found[axis] = slice(start, end, step)
    key, rank = tuple(found), len(found)

    def run(x: Any, *rest: Any) -> Any:
        return x[key] if x.ndim >= rank else general(x, *rest)

    return run


def _slice_by_values(axes: tuple[int, ...] | None, steps: tuple[int, ...] | None, general: Run) -> Run | None:
    """One axis, its bounds known when it runs."""
    if axes is None or len(axes) != 1 or axes[0] < 0 or steps not in (None, (1,)):
        return None
    before, rank = (slice(None),) * axes[0], axes[0] + 1

    def run(x: Any, starts: Any, ends: Any, *rest: Any) -> Any:
        if x.ndim < rank or starts.size != 1 or ends.size != 1:
            return general(x, starts, ends, *rest)
        return x[(*before, slice(starts.item(), ends.item()))]

    return run


def split(node: Node, general: Run) -> Run | None:
    """Views by constant sizes, or of equal parts."""
    sizes, axis, outputs = listed(node, "split", 1), node.attributes.get("axis", 0), node.outputs
    if sizes is None and (given(node, 1) or node.attributes.get("num_outputs", outputs) != outputs):
        return None

    def run(x: Any, *rest: Any) -> Any:
        length = x.shape[axis]
        parts = sizes if sizes is not None else (length // outputs,) * outputs
        if sum(parts) != length or len(parts) != outputs or min(parts) < 0:
            return general(x, *rest)
        before, found, start = (slice(None),) * (axis % x.ndim), [], 0
        for size in parts:
            found.append(x[(*before, slice(start, start + size))])
            start += size
        return tuple(found)

    return run


def expand(node: Node, general: Run) -> Run | None:
    """A view that nobody may write to, where the shape is the result's; what has that shape already is it."""
    if plain(node) is None:
        return None

    def run(x: Any, shape: Any) -> Any:
        wanted, old = tuple(shape.tolist()), x.shape
        if wanted == old:
            return x
        apart = len(wanted) - len(old)
        fits = apart >= 0 and all(a in (1, b) for a, b in zip(old, wanted[apart:], strict=True))
        if not fits or not 0 < prod(wanted) <= _SURE or min(wanted, default=1) < 0 or not x.flags.c_contiguous:
            return general(x, shape)
        strides = [0] * apart + [0 if size == 1 else step for size, step in zip(old, x.strides, strict=True)]
        y: Any = np.ndarray(wanted, x.dtype, x, 0, tuple(strides))  # what np.broadcast_to makes, in a tenth of its time
        y.flags.writeable = False
        return y

    return run


def constant_of_shape(node: Node, general: Run) -> Run | None:
    """np.full for shapes that no machine lacks the memory for."""
    value = node.attributes.get("value")
    fill = np.zeros(1, np.float32) if value is None else np.asarray(value).reshape(-1)

    def run(shape: Any) -> Any:
        wanted = shape.tolist()
        if min(wanted, default=0) < 0 or prod(wanted) > _SURE:
            return general(shape)
        return np.full(wanted, fill[0], fill.dtype)

    return run if fill.size == 1 else None


def sequence(node: Node, general: Run) -> Run | None:
    """A Range of whole numbers."""
    dtype = plain(node)
    if dtype is None or dtype.kind != "i":
        return None
    arange: Any = np.arange

    def run(start: Any, limit: Any, delta: Any) -> Any:
        first, last, step = start.item(), limit.item(), delta.item()
        if step == 0 or abs(last - first) > _SURE:
            return general(start, limit, delta)
        return arange(first, last, step, dtype)

    return run


def source(positions: np.ndarray, length: int, mode: str) -> np.ndarray:
    """Where the value at each position, possibly outside 0..length-1, comes from."""
    if not length:
        raise ValueError(f"an empty axis cannot be padded in mode {mode}")
    if mode == "edge":
        return np.clip(positions, 0, length - 1)
    if mode == "wrap":
        return positions % length
    if mode != "reflect":
        raise ValueError(f"Pad takes the modes constant, reflect, edge and wrap, not {mode}")
    period = max(1, 2 * (length - 1))
    return np.minimum(positions % period, -positions % period)


def pad(node: Node, general: Run) -> Run | None:
    """Constant padding by one fill and one copy, another mode by one np.take an axis: np.pad costs 20 times as much."""
    pads, mode = listed(node, "pads", 1), node.attributes.get("mode", "constant")
    if given(node, 3) or plain(node) is None or not pads or min(pads) < 0 or max(pads) > _SURE:
        return None
    attribute, rank = node.attributes.get("value", 0.0), len(pads) // 2
    before, after = pads[:rank], pads[rank:]
    places: dict[tuple[int, int], np.ndarray] = {}

    def place(axis: int, length: int) -> np.ndarray:
        if (axis, length) not in places:
            if len(places) == _KEPT:
                places.clear()
            places[axis, length] = source(np.arange(-before[axis], length + after[axis]), length, mode)
        return places[axis, length]

    def moved(x: Any, *rest: Any) -> Any:
        if x.ndim != rank:
            return general(x, *rest)
        for axis, length in enumerate(x.shape):
            if before[axis] or after[axis]:
                x = x.take(place(axis, length), axis)
        return x

    def filled(x: Any, *rest: Any) -> Any:
        if x.ndim != rank:
            return general(x, *rest)
        fill = rest[1].reshape(()) if len(rest) > 1 and rest[1] is not None else attribute
        shape = [low + size + high for low, size, high in zip(before, x.shape, after, strict=True)]
        y = np.full(shape, fill, x.dtype)
        y[tuple([slice(low, low + size) for low, size in zip(before, x.shape, strict=True)])] = x
        return y

    return filled if mode == "constant" else moved


# -- selection


def gather(node: Node, general: Run) -> Run | None:
    """np.take checks the indices itself; the row's function says what is wrong with them."""
    if plain(node) is None:
        return None
    axis, index = node.attributes.get("axis", 0), constant(node, 1)
    if axis == 0 and node.quantized[0] is not None:
        return QuantizedRows(node.quantized[0], general)

    def take(x: Any, indices: Any) -> Any:
        try:
            return x.take(indices, axis)
        except IndexError:
            return general(x, indices)

    if index is None or index.ndim or axis < 0:
        return take
    if axis >= _MOST_AXES:
        return None
    key = (*[slice(None)] * axis, int(index))

    def one(x: Any, indices: Any) -> Any:
        try:
            return x[key]
        except IndexError:
            return general(x, indices)

    return one


class QuantizedRows:
    """Rows of a matrix of floats that stays the bytes which it is made of; reads: the indices alone."""

    reads = (1,)

    def __init__(self, matrix: Quantized, general: Run) -> None:
        self.matrix, self.general = matrix, general

    def __call__(self, indices: np.ndarray) -> Any:
        """The rows [*indices, N]."""
        try:
            return self.matrix.rows(indices)
        except IndexError:
            return self.general(self.matrix.matrix, indices)


def concat(node: Node, general: Run) -> Run | None:
    """np.concatenate, but for what a decoding loop's cache takes."""
    axis, concatenate = node.attributes["axis"], np.concatenate

    def run(*inputs: Any) -> Any:
        return general(*inputs) if type(inputs[0]) is Cache else concatenate(inputs, axis)

    return run


# -- types and arithmetic


def cast(node: Node, general: Run) -> Run | None:
    """Between NumPy's own types; to its own type nothing is done."""
    source, target = plain(node), BY_NUMBER[node.attributes["to"]].numpy
    if source is None or f"tensor({BY_NUMBER[node.attributes['to']].name})" not in _PLAIN:
        return None
    return (lambda x: x) if source == target else (lambda x: x.astype(target))


def function(ufunc: Any) -> Prepare:
    """A function of NumPy's on inputs of one type that NumPy has."""

    def prepare(node: Node, general: Run) -> Run | None:
        kinds = {plain(node, place) for place in range(len(node.types))}
        return ufunc if len(kinds) == 1 and None not in kinds and len(node.types) == ufunc.nin else None

    return prepare


def float_function(call: Run) -> Prepare:
    """A function of one array of float32 or float64."""
    return lambda node, general: call if is_float(node) else None


def curve(name: str) -> Prepare:
    """A curve of the native library's on float32."""

    def prepare(node: Node, general: Run) -> Run | None:
        return partial(curves.curve, name) if curves.available() and node.types[0] == "tensor(float)" else None

    return prepare


def gelu(node: Node, general: Run) -> Run | None:
    """The exact one on float32."""
    return curve("gelu")(node, general) if node.attributes.get("approximate", "none") == "none" else None


def softmax(logarithm: bool) -> Prepare:
    """Along the last axis of float32."""

    def prepare(node: Node, general: Run) -> Run | None:
        axis = node.attributes.get("axis", -1)
        if not curves.available() or node.types[0] != "tensor(float)":
            return None

        def run(x: Any) -> Any:
            return curves.softmax(x, logarithm) if axis in (-1, x.ndim - 1) and x.size else general(x)

        return run

    return prepare


def divide(node: Node, general: Run) -> Run | None:
    """Floats by np.divide; single integers, as shapes are divided, by Python's."""
    if is_float(node):
        return np.divide
    dtype = plain(node)
    if dtype is None or dtype.kind not in "iu":
        return None

    def run(a: Any, b: Any) -> Any:
        if a.size != 1 or b.size != 1:
            return general(a, b)
        x, y = a.item(), b.item()
        if y == 0 or y == -1:
            return general(a, b)
        quotient = abs(x) // abs(y)
        shape = a.shape if a.ndim >= b.ndim else b.shape
        return np.full(shape, quotient if (x < 0) == (y < 0) else -quotient, dtype)

    return run


def power(node: Node, general: Run) -> Run | None:
    """A constant square or cube of floats."""
    exponent = constant(node, 1)
    if exponent is None or exponent.size != 1 or exponent.item() not in (2, 3) or not is_float(node):
        return None
    rank = exponent.ndim
    if exponent.item() == 3:
        return lambda x, y: np.square(x) * x if x.ndim >= rank else general(x, y)
    return lambda x, y: np.square(x) if x.ndim >= rank else general(x, y)


def relu(node: Node, general: Run) -> Run | None:
    """The larger of x and 0."""
    dtype = plain(node)
    if dtype is None:
        return None
    zero = np.zeros((), dtype)
    return lambda x: np.maximum(x, zero)


def dequantize(node: Node, general: Run) -> Run | None:
    """Bytes by one scale: their differences are exact in float32 too."""
    if node.types[0] not in ("tensor(int8)", "tensor(uint8)") or node.types[1] != "tensor(float)":
        return None
    if node.attributes.get("block_size", 0) or node.attributes.get("output_dtype", 0) not in (0, TensorProto.FLOAT):
        return None

    def run(x: Any, scale: Any, zero: Any = None) -> Any:
        if scale.size != 1 or scale.ndim > 1:
            return general(x, scale, zero)
        y = x.astype(np.float32)
        if zero is not None:
            y -= np.float32(zero.reshape(()))
        y *= scale.reshape(())
        return y

    return run


# -- reductions


def total(node: Node, general: Run) -> Run | None:
    """The sum of floats over constant axes; NumPy would widen integers."""
    axes, keepdims = listed(node, "axes", 1), bool(node.attributes.get("keepdims", 1))
    add: Any = np.add.reduce
    return (lambda x, *rest: add(x, axes, None, None, keepdims)) if axes and is_float(node) else None


def mean(node: Node, general: Run) -> Run | None:
    """The sum of floats over constant axes, divided by how many there are."""
    axes, keepdims = listed(node, "axes", 1), bool(node.attributes.get("keepdims", 1))
    if not axes or not is_float(node):
        return None
    add: Any = np.add.reduce

    def run(x: Any, *rest: Any) -> Any:
        if not x.size:
            return general(x, *rest)
        total = add(x, axes, None, None, keepdims)
        return np.divide(total, x.dtype.type(x.size // total.size))

    return run


def extreme(ufunc: Any) -> Prepare:
    """The largest or smallest over constant axes; a short last axis by its slices."""

    def prepare(node: Node, general: Run) -> Run | None:
        axes, keepdims = listed(node, "axes", 1), bool(node.attributes.get("keepdims", 1))
        if not axes or plain(node) is None:
            return None

        def run(x: Any, *rest: Any) -> Any:
            if not x.size:
                return general(x, *rest)
            if len(axes) == 1 and axes[0] in (-1, x.ndim - 1) and x.shape[-1] <= _FEW:
                y = reduce(ufunc, [x[..., place] for place in range(x.shape[-1])])
                return y[..., None] if keepdims else y
            return ufunc.reduce(x, axes, None, None, keepdims)

        return run

    return prepare


def layer_normalization(node: Node, general: Run) -> Run | None:
    """Rows of float32 by the native library, where scale and bias are as long as a row."""
    axis, epsilon = node.attributes.get("axis", -1), node.attributes.get("epsilon", 1e-5)
    if not curves.available() or node.types[0] != "tensor(float)" or node.attributes.get("stash_type", 1) != 1:
        return None

    def run(x: Any, scale: Any, bias: Any = None) -> Any:
        shape = x.shape[axis:]
        if scale.shape != shape or (bias is not None and bias.shape != shape) or not x.size:
            return general(x, scale, bias)
        factors = np.ascontiguousarray(scale).reshape(-1)
        offsets = None if bias is None else np.ascontiguousarray(bias).reshape(-1)
        y, *statistics = curves.normalized(x, scale.size, factors, offsets, epsilon)
        kept = (*x.shape[: x.ndim - len(shape)], *[1] * len(shape))
        return (y, *[part.reshape(kept) for part in statistics])

    return run

"""Forms of an affine weight beside build_affine's: as PyTorch exports them, node by node, with the weight in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from forms import F16, F32, INT32, INT64, Model, Writer, assemble, matmul
from onnx import TensorProto

FLOAT, FLOAT16 = TensorProto.FLOAT, TensorProto.FLOAT16
Form = Callable[[Writer], str]
AFFINE_FORMS: dict[str, Form] = {}


def form(function: Form) -> Form:
    """Enter a form under its function's name."""
    AFFINE_FORMS[function.__name__.replace("_", " ")] = function
    return function


def bytes_of(codes: np.ndarray) -> np.ndarray:
    """Two codes a byte along the last axis, the low nibble first."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def shifted(w: Writer, whole: str) -> str:
    """PyTorch's x >> 4 of INT32: negative numbers would be filled with ones."""
    negative = w.node("Less", whole, np.int32(0))
    moved = w.node("BitShift", w.node("Cast", whole, to=TensorProto.UINT32), np.uint32(4), direction="RIGHT")
    filled = w.node("Cast", w.node("BitwiseOr", moved, np.uint32(0xF0000000)), to=INT32)
    return w.node("Where", negative, filled, w.node("Cast", moved, to=INT32))


def floored(w: Writer, whole: str, rest: str) -> str:
    """PyTorch's x // 16 of INT64: one less where a negative number leaves a rest."""
    negative = w.node("Equal", w.node("Less", whole, np.int64(0)), np.array(True))
    less = w.node("Cast", w.node("And", negative, w.node("Cast", rest, to=TensorProto.BOOL)), to=INT64)
    return w.node("Sub", w.node("Div", whole, np.int64(16)), less)


def stacked(w: Writer, packed: np.ndarray, axis: int = -1, name: str = "dec/packed") -> str:
    """PyTorch's stack([x & 15, x >> 4], axis)."""
    whole = w.node("Cast", w.constant(packed, name), to=INT32)
    low = w.node("Unsqueeze", w.node("BitwiseAnd", whole, np.int32(15)), [axis])
    return w.node("Concat", low, w.node("Unsqueeze", shifted(w, whole), [axis]), axis=axis)


def drawn(w: Writer, dtype: np.dtype = F32) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes [N, blocks, block], scales and zero points [N, blocks, 1]."""
    blocks = w.cols // w.block
    points = w.rng.uniform(0, 15, (w.rows, blocks, 1)).astype(dtype)
    return w.codes(w.rows, blocks, w.block), w.floats(w.rows, blocks, 1, dtype=dtype), points


def means(w: Writer, codes: np.ndarray, scales: np.ndarray, points: Any) -> None:
    """The weight [K, N] that (codes - points) * scales is, each step in the scales' type."""
    steps = codes.astype(scales.dtype) - np.asarray(points).astype(scales.dtype)
    w.weight = np.ascontiguousarray((steps * scales).reshape(w.rows, w.cols).T)


def end(w: Writer, value: str) -> str:
    """[N, K], turned."""
    return w.node("Transpose", w.node("Reshape", value, [w.rows, w.cols]), perm=[1, 0])


def blocked(w: Writer, codes: str) -> str:
    return w.node("Reshape", codes, [w.rows, w.cols // w.block, w.block])


@form
def shift_of_signed_integers(w: Writer) -> str:
    codes, scales, points = drawn(w)
    means(w, codes, scales, points)
    value = w.node("Cast", blocked(w, stacked(w, bytes_of(codes.reshape(w.rows, -1)))), to=FLOAT)
    value = w.node("Mul", w.node("Sub", value, w.constant(points, "dec/points")), w.constant(scales, "dec/scales"))
    return end(w, value)


@form
def floor_division(w: Writer) -> str:
    codes, scales, points = drawn(w)
    means(w, codes, scales, points)
    whole = w.node("Cast", w.constant(bytes_of(codes.reshape(w.rows, -1)), "dec/packed"), to=INT64)
    rest = w.node("Mod", whole, np.int64(16))
    high = w.node("Unsqueeze", floored(w, whole, rest), [2])
    pairs = w.node("Concat", w.node("Unsqueeze", rest, [2]), high, axis=2)
    value = w.node("Sub", w.node("Cast", blocked(w, pairs), to=FLOAT), w.constant(points, "dec/points"))
    return end(w, w.node("Mul", value, w.constant(scales, "dec/scales")))


def rows_of_groups(w: Writer, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """HQQ: groups [R, block] whose first half of rows lies in the high nibbles: (bytes, scales, zero points)."""
    codes, scales, points = drawn(w, dtype)
    means(w, codes, scales, points)
    groups = codes.reshape(-1, w.block)
    half = len(groups) // 2
    return groups[:half] << 4 | groups[half:], scales.reshape(-1, 1), points.reshape(-1, 1)


def scattered(w: Writer, dtype: np.dtype) -> str:
    """tmp[:n] = (x & 240) >> 4; tmp[n:] = x & 15."""
    packed, scales, points = rows_of_groups(w, dtype)
    kind = FLOAT if dtype == F32 else FLOAT16
    name, half = w.constant(packed, "dec/packed"), len(packed)
    upper = w.node("BitwiseAnd", name, np.uint8(240))
    moved = w.node("BitShift", upper, np.uint8(4), direction="RIGHT")
    filled = w.node("Cast", w.node("BitwiseOr", moved, np.uint8(240)), to=TensorProto.INT8)
    moved = w.node("Where", w.node("Less", upper, np.uint8(0)), filled, w.node("Cast", moved, to=TensorProto.INT8))
    value = w.node("Expand", dtype.type(0), [2 * half, w.block])
    value = w.node("ScatterND", value, np.arange(half)[:, None], w.node("Cast", moved, to=kind))
    low = w.node("Cast", w.node("BitwiseAnd", name, np.uint8(15)), to=kind)
    value = w.node("ScatterND", value, np.arange(half, 2 * half)[:, None], low)
    value = w.node("Sub", value, w.constant(points, "dec/points"))
    return end(w, w.node("Mul", value, w.constant(scales, "dec/scales")))


@form
def scattered_halves(w: Writer) -> str:
    return scattered(w, F32)


@form
def scattered_halves_in_float16(w: Writer) -> str:
    return scattered(w, F16)


@form
def halves_one_after_the_other(w: Writer) -> str:
    packed, scales, points = rows_of_groups(w, F32)
    whole = w.node("Cast", w.constant(packed, "dec/packed"), to=INT32)
    rows = w.node("Concat", shifted(w, whole), w.node("BitwiseAnd", whole, np.int32(15)), axis=0)
    value = w.node("Sub", w.node("Cast", rows, to=FLOAT), w.constant(points, "dec/points"))
    return end(w, w.node("Mul", value, w.constant(scales, "dec/scales")))


@form
def columns_of_bytes_without_unsqueeze(w: Writer) -> str:
    """Bytes [n, 1], as bitsandbytes keeps them."""
    codes, scales, points = drawn(w)
    means(w, codes, scales, points)
    whole = w.node("Cast", w.constant(bytes_of(codes.reshape(-1))[:, None], "dec/packed"), to=INT32)
    pairs = w.node("Concat", w.node("BitwiseAnd", whole, np.int32(15)), shifted(w, whole), axis=1)
    value = w.node("Sub", w.node("Cast", blocked(w, pairs), to=FLOAT), w.constant(points, "dec/points"))
    return end(w, w.node("Mul", value, w.constant(scales, "dec/scales")))


def repeated(w: Writer, op: str) -> str:
    """Scales and zero points repeated to a number an element: repeat_interleave."""
    codes, scales, points = drawn(w)
    means(w, codes, scales, points)
    value = w.node("Reshape", stacked(w, bytes_of(codes.reshape(w.rows, -1))), [w.rows, w.cols])
    spread = []
    for name, array in (("dec/points", points), ("dec/scales", scales)):
        wide = w.node(op, w.constant(array, name), [1, 1, w.block])
        spread.append(w.node("Reshape", wide, [w.rows, -1]))
    value = w.node("Sub", w.node("Cast", value, to=FLOAT), spread[0])
    return w.node("Transpose", w.node("Mul", spread[1], value), perm=[1, 0])


@form
def expanded_scales(w: Writer) -> str:
    return repeated(w, "Expand")


@form
def tiled_scales(w: Writer) -> str:
    return repeated(w, "Tile")


def whole_points(w: Writer, dtype: Any, points: Any) -> str:
    """Zero points taken off in integers."""
    codes, scales, _ = drawn(w)
    means(w, codes, scales, points)
    value = blocked(w, stacked(w, bytes_of(codes.reshape(w.rows, -1))))
    value = w.node("Cast", value, to=TensorProto.DataType.Value(np.dtype(dtype).name.upper()))
    value = w.node("Cast", w.node("Sub", value, w.constant(np.asarray(points, dtype), "dec/points")), to=FLOAT)
    return end(w, w.node("Mul", value, w.constant(scales, "dec/scales")))


@form
def integer_zero_points(w: Writer) -> str:
    return whole_points(w, np.int32, w.codes(w.rows, w.cols // w.block, 1))


@form
def a_zero_point_for_all_in_int8(w: Writer) -> str:
    return whole_points(w, np.int8, 8)


@form
def a_zero_point_a_row(w: Writer) -> str:
    return whole_points(w, np.int64, w.codes(w.rows, 1, 1))


@form
def zero_points_in_nibbles(w: Writer) -> str:
    codes, scales, _ = drawn(w)
    points = w.codes(w.rows, w.cols // w.block)
    means(w, codes, scales, points[..., None])
    value = blocked(w, stacked(w, bytes_of(codes.reshape(w.rows, -1))))
    zero = w.node("Reshape", stacked(w, bytes_of(points), name="dec/points"), [w.rows, -1, 1])
    value = w.node("Cast", w.node("Sub", value, zero), to=FLOAT)
    return end(w, w.node("Mul", value, w.constant(scales, "dec/scales")))


@form
def a_number_for_all(w: Writer) -> str:
    codes, scales, _ = drawn(w)
    means(w, codes, scales, np.float32(7.5))
    value = w.node("Cast", blocked(w, stacked(w, bytes_of(codes.reshape(w.rows, -1)))), to=FLOAT)
    value = w.node("Sub", value, w.constant(np.float32(7.5), "dec/points"))
    return end(w, w.node("Mul", value, w.constant(scales, "dec/scales")))


@form
def no_zero_point(w: Writer) -> str:
    codes, scales, _ = drawn(w)
    means(w, codes, scales, 0)
    value = w.node("Cast", blocked(w, stacked(w, bytes_of(codes.reshape(w.rows, -1)))), to=INT64)
    return end(w, w.node("Mul", w.node("Cast", value, to=FLOAT), w.constant(scales, "dec/scales")))


@form
def codes_by_columns(w: Writer) -> str:
    """[K / b, b, N] less [K / b, 1, N], times the same."""
    codes, scales, points = drawn(w)
    means(w, codes, scales, points)
    packed = bytes_of(np.ascontiguousarray(codes.reshape(w.rows, -1).T))
    value = w.node("Reshape", stacked(w, packed), [w.cols // w.block, w.block, w.rows])
    lies = (np.ascontiguousarray(array.transpose(1, 2, 0)) for array in (points, scales))
    zero, factor = (w.constant(array, name) for array, name in zip(lies, ("dec/points", "dec/scales"), strict=True))
    value = w.node("Mul", w.node("Sub", w.node("Cast", value, to=FLOAT), zero), factor)
    return w.node("Reshape", value, [w.cols, w.rows])


@form
def in_float16(w: Writer) -> str:
    codes, scales, points = drawn(w, F16)
    means(w, codes, scales, points)
    value = w.node("Cast", blocked(w, stacked(w, bytes_of(codes.reshape(w.rows, -1)))), to=FLOAT16)
    value = w.node("Sub", value, w.constant(points, "dec/points"))
    return end(w, w.node("Mul", value, w.constant(scales, "dec/scales")))


@form
def halves_widened(w: Writer) -> str:
    """Scales and zero points float16, cast to float32."""
    codes, scales, points = drawn(w, F16)
    means(w, codes, scales.astype(F32), points.astype(F32))
    value = w.node("Cast", blocked(w, stacked(w, bytes_of(codes.reshape(w.rows, -1)))), to=FLOAT)
    value = w.node("Sub", value, w.node("Cast", w.constant(points, "dec/points"), to=FLOAT))
    return end(w, w.node("Mul", value, w.node("Cast", w.constant(scales, "dec/scales"), to=FLOAT)))


@form
def scales_rounded_by_casts(w: Writer) -> str:
    """Scales float32, cast to float16 and back."""
    codes, scales, points = drawn(w)
    means(w, codes, scales.astype(F16).astype(F32), points)
    value = w.node("Cast", blocked(w, stacked(w, bytes_of(codes.reshape(w.rows, -1)))), to=FLOAT)
    value = w.node("Sub", value, w.constant(points, "dec/points"))
    half = w.node("Cast", w.constant(scales[..., 0], "dec/scales"), to=FLOAT16)
    factor = w.node("Unsqueeze", w.node("Cast", half, to=FLOAT), [2])
    return end(w, w.node("Mul", value, factor))


def typed(w: Writer, dtype: Any, least: int, points: Any) -> str:
    """Codes of a 4-bit type, in arithmetic."""
    codes, scales, _ = drawn(w)
    means(w, codes.astype(np.int16) + least, scales, points)
    name = w.constant((codes.astype(np.int16) + least).reshape(w.rows, w.cols).astype(dtype), "dec/packed")
    value = blocked(w, w.node("Cast", name, to=INT32))
    value = (
        w.node("Sub", value, w.constant(np.asarray(points, np.int32), "dec/points")) if points is not None else value
    )
    return end(w, w.node("Mul", w.node("Cast", value, to=FLOAT), w.constant(scales, "dec/scales")))


@form
def codes_of_uint4(w: Writer) -> str:
    return typed(w, ml_dtypes.uint4, 0, w.codes(w.rows, w.cols // w.block, 1))


@form
def codes_of_int4(w: Writer) -> str:
    return typed(w, ml_dtypes.int4, -8, w.codes(w.rows, w.cols // w.block, 1).astype(np.int16) - 8)


@form
def dequantized_by_rows_of_groups(w: Writer) -> str:
    """A scale for each row of [N * K / b, b]."""
    codes, scales, _ = drawn(w)
    means(w, codes, scales, 0)
    name = w.constant(codes.reshape(-1, w.block).astype(ml_dtypes.uint4), "dec/packed")
    return end(w, w.node("DequantizeLinear", name, w.constant(scales.reshape(-1), "dec/scales"), axis=0))


@form
def dequantized_in_three_axes(w: Writer) -> str:
    codes, scales, _ = drawn(w)
    means(w, codes.astype(np.int16) - 8, scales, 0)
    name = w.constant((codes.astype(np.int16) - 8).astype(ml_dtypes.int4), "dec/packed")
    scale = w.constant(scales, "dec/scales")
    return end(w, w.node("DequantizeLinear", name, scale, axis=-1, block_size=w.block))


def make_affine(name: str, *, large: bool = False, seed: int = 0, opset: int = 21) -> Model:
    """A model of the form: y = x @ weight, x the identity, so that y is the weight."""
    writer = Writer(*((1088, 1024, 64) if large else (6, 24, 4)), np.random.default_rng(seed))
    value = AFFINE_FORMS[name](writer)
    x = np.eye(writer.cols, dtype=writer.weight.dtype)
    feeds = {"x": x[:3] if large else x}
    model = assemble(writer, [matmul("x", value)], feeds, writer.weight.dtype, opset)
    return Model(model, feeds, writer.weight)

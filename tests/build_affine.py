"""Models with affine 4-bit weights for all tests: every spelling is an option, every weight has a NumPy oracle."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper

from build import ONNX_TYPE, Body, _function, _if, _loop, _scan, assemble, make_tensor, value_of

TYPES = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
FOUR_BITS = {"int4": (np.dtype(ml_dtypes.int4), -8), "uint4": (np.dtype(ml_dtypes.uint4), 0)}


@dataclass(frozen=True, eq=False)
class Affine:
    """What an affine weight means (the first fields) and how it is spelled (the others)."""

    k: int = 10
    n: int = 6
    block: int = 4
    kind: str = "uint4"  # or int4
    points: bool = True  # zero points are given
    by: str = "block"  # scales are one a block, one a column, or one for all
    scales: str = "float32"  # their type, which the weight is rounded to
    cast: str = ""  # the weight is cast to this type
    seed: int = 0

    first: str = "n"  # codes are [N, K], or with "k" [K, N]
    turned: str = "Transpose"  # how codes [N, K] become [K, N]: Transpose, absent (its perm), transB of Gemm, both
    chain: str = (
        "dequantize"  # codes are elements; "nibbles": of bytes, cast to UINT4; "arithmetic": no DequantizeLinear
    )
    nibbles: tuple[str, str] = ("BitwiseAnd", "BitShift")  # or Mod and Div
    wide: int = 0  # the type that bytes are cast to first
    high_first: bool = False
    bytes: str = "rows"  # shape of the bytes: rows [N, bytes], blocks [N, blocks, bytes], flat [bytes]
    axis: int = -1  # of Concat and Unsqueeze
    cast_last: bool = True  # Cast UINT4 stands after Reshape and Slice
    cast_first: bool = False  # the weight is cast before it is transposed
    swap: bool = False  # Mul(scales, steps)
    float_points: bool = False  # zero points of the scales' type (arithmetic)
    one_point: bool = False  # [1, 1] (arithmetic)

    product: str = "MatMul"  # or Gemm
    gemm: tuple[tuple[str, float], ...] = ()  # its alpha and beta
    bias: bool = False
    prefix: str = "dec/"
    literals: str = "initializer"  # or constant
    leaves: str = "initializer"
    identities: bool = False
    opset: int = 21
    domain: str = ""
    named: bool = True

    @property
    def dtype(self) -> str:
        """The product's type."""
        return self.cast or self.scales

    @property
    def blocks(self) -> int:
        """Blocks of a column."""
        return -(-self.k // self.block) if self.by == "block" else 1

    @property
    def padded(self) -> int:
        """Codes in a row of bytes."""
        whole = self.bytes == "blocks" or self.chain == "arithmetic"
        row = self.blocks * self.block if whole else self.k
        return row + row % 2 if self.first == "n" else row


@dataclass(eq=False)
class BuiltAffine:
    """A model, feeds for it, and its weight [K, N] in the product's type."""

    model: onnx.ModelProto
    feeds: dict[str, np.ndarray]
    oracle: np.ndarray
    affine: Affine

    @property
    def expected(self) -> np.ndarray:
        """The product in float64, with Gemm's alpha, beta and bias."""
        gemm = dict(self.affine.gemm)
        product = self.feeds["x"].astype(np.float64) @ self.oracle.astype(np.float64)
        bias = self.feeds["bias"].astype(np.float64) if self.affine.bias else 0.0
        return gemm.get("alpha", 1.0) * product + gemm.get("beta", 1.0) * bias


@dataclass(eq=False)
class _Speller:
    """Writes one weight's nodes and tensors."""

    affine: Affine
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    tensors: list[TensorProto] = field(default_factory=list)

    def node(self, op: str, role: str, inputs: Sequence[str], **attributes: Any) -> str:
        name = f"{self.affine.prefix}{role}"
        if self.affine.identities:
            same = [f"{name}_same{index}" for index in range(len(inputs))]
            self.nodes += [helper.make_node("Identity", [a], [b], b) for a, b in zip(inputs, same, strict=True)]
            inputs = same
        self.nodes.append(helper.make_node(op, inputs, [f"{name}_out"], name, **attributes))
        return f"{name}_out"

    def constant(self, role: str, array: np.ndarray, spelling: str) -> str:
        name = f"{self.affine.prefix}{role}"
        if spelling == "constant":
            self.nodes.append(helper.make_node("Constant", [], [name], name, value=make_tensor("", array)))
        else:
            self.tensors.append(make_tensor(name, array, typed=spelling == "typed"))
        return name

    def ints(self, role: str, values: Any, dtype: Any = np.int64) -> str:
        return self.constant(role, np.array(values, dtype), self.affine.literals)

    def leaf(self, role: str, array: np.ndarray) -> str:
        return self.constant(role, array, self.affine.leaves)


def draw(affine: Affine) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Codes [N, K] from 0 to 15, scales [N, blocks], and zero points of the same or none, as int4 moved up by 8."""
    rng = np.random.default_rng(affine.seed)
    codes = rng.integers(0, 16, (affine.n, affine.k)).astype(np.uint8)
    grid = {"block": (affine.n, affine.blocks), "column": (affine.n, 1), "all": (1, 1)}[affine.by]
    scales = rng.uniform(0.02, 0.5, grid).astype(TYPES[affine.scales])
    points = rng.integers(0, 16, (1, 1) if affine.one_point else grid).astype(np.float64)
    if affine.float_points:
        points = (points + rng.uniform(-0.5, 0.5, points.shape)).astype(TYPES[affine.scales]).astype(np.float64)
    return codes, scales, points if affine.points else None


def decode(affine: Affine) -> np.ndarray:
    """The weight [K, N] in plain NumPy: (code - zero point) * scale, rounded once to the scales' type, then cast."""
    codes, scales, points = draw(affine)
    zero = np.array([[8.0 if affine.kind == "int4" else 0.0]]) if points is None else points
    spread = [np.repeat(np.broadcast_to(part.astype(np.float64), (affine.n, part.shape[1])), affine.k // part.shape[1]
                        if affine.by != "block" or part.shape[1] == 1 else affine.block, axis=1)[:, : affine.k]
              for part in (scales, zero)]  # fmt: skip
    steps = (codes.astype(np.float32) - spread[1].astype(np.float32)).astype(TYPES[affine.scales])
    weight = (steps.astype(np.float64) * spread[0]).astype(TYPES[affine.scales])
    return np.ascontiguousarray(weight.astype(TYPES[affine.dtype]).T)


def _four_bits(writer: _Speller, role: str, codes: np.ndarray) -> str:
    """A tensor of INT4 or UINT4."""
    dtype, least = FOUR_BITS[writer.affine.kind]
    return writer.leaf(role, (codes.astype(np.int16) + least).astype(dtype))


def pack(codes: np.ndarray, high_first: bool = False) -> np.ndarray:
    """Two codes a byte along the last axis, whose length is even."""
    first, second = codes[..., 0::2].astype(np.uint8), codes[..., 1::2].astype(np.uint8)
    return first << 4 | second if high_first else second << 4 | first


def _pairs(writer: _Speller, packed: str, rank: int, what: str = "") -> str:
    """Both nibbles of bytes, side by side on a last axis."""
    affine = writer.affine
    axis = affine.axis if affine.axis == -1 else rank
    kind = np.uint8
    if affine.wide:
        packed = writer.node("Cast", f"{what}Wide", [packed], to=affine.wide)
        kind = helper.tensor_dtype_to_np_dtype(affine.wide)
    low_op, high_op = affine.nibbles
    low_by = writer.ints(f"{what}low_by", [15 if low_op == "BitwiseAnd" else 16], kind)
    high_by = writer.ints(f"{what}high_by", [4 if high_op == "BitShift" else 16], kind)
    direction = {"direction": "RIGHT"} if high_op == "BitShift" else {}
    low = writer.node(low_op, f"{what}Low", [packed, low_by])
    high = writer.node(high_op, f"{what}High", [packed, high_by], **direction)
    axes = [writer.ints(f"{what}{name}_axis", [axis]) for name in ("low", "high")]
    low = writer.node("Unsqueeze", f"{what}UnsqueezeLow", [low, axes[0]])
    high = writer.node("Unsqueeze", f"{what}UnsqueezeHigh", [high, axes[1]])
    return writer.node("Concat", f"{what}Concat", [high, low] if affine.high_first else [low, high], axis=axis)


def _nibble_codes(writer: _Speller, role: str, codes: np.ndarray, row: int) -> str:
    """Codes [rows, cols] of bytes: padded to `row`, packed, taken apart, cut and cast to UINT4."""
    affine, what = writer.affine, "" if role == "packed" else role
    rows, cols = codes.shape
    padded = np.zeros((rows, row), np.uint8)
    padded[:, :cols] = codes
    flat = pack(padded.reshape(-1), affine.high_first)
    shapes = {"rows": (rows, -1), "blocks": (rows, affine.blocks, -1), "flat": (-1,)}
    shape = shapes["rows" if what else affine.bytes]
    if row % 2:
        shape = (-1,)
    packed = flat.reshape(shape)
    value = _pairs(writer, writer.leaf(role, packed), packed.ndim, what)

    def cast(value: str) -> str:
        return writer.node("Cast", f"{what}Four", [value], to=TensorProto.UINT4)

    value = value if affine.cast_last else cast(value)
    value = writer.node("Reshape", f"{what}ToCodes", [value, writer.ints(f"{what}codes_shape", [rows, row])])
    if row != cols:
        cut = [writer.ints(f"{what}{name}", [number]) for name, number in (("start", 0), ("end", cols), ("cut", 1))]
        value = writer.node("Slice", f"{what}Cut", [value, *cut])
    return cast(value) if affine.cast_last else value


def _dequantize(writer: _Speller) -> str:
    affine = writer.affine
    codes, scales, points = draw(affine)
    lies = (lambda array: array.T) if affine.first == "k" else (lambda array: array)
    nibbles = affine.chain == "nibbles"
    inputs = [
        _nibble_codes(writer, "packed", lies(codes), affine.padded if affine.first == "n" else affine.n)
        if nibbles
        else _four_bits(writer, "packed", lies(codes))
    ]
    shape: Any = {"block": lies(scales).shape, "column": (affine.n,), "all": ()}[affine.by]
    inputs.append(writer.leaf("scales", lies(scales).reshape(shape)))
    if points is not None and nibbles and affine.by == "block":
        row = lies(points).shape[1]
        inputs.append(_nibble_codes(writer, "points", lies(points), row + row % 2))
    elif points is not None:
        inputs.append(_four_bits(writer, "points", lies(points).reshape(shape)))
    along = 1 if affine.first == "n" else 0
    attributes = {"axis": along, "block_size": affine.block} if affine.by == "block" else {"axis": 1 - along}
    return writer.node("DequantizeLinear", "Dequantize", inputs, **attributes)


def _arithmetic(writer: _Speller) -> str:
    affine = writer.affine
    codes, scales, points = draw(affine)
    kind = ONNX_TYPE[affine.scales]
    padded = np.zeros((affine.n, affine.padded), np.uint8)
    padded[:, : affine.k] = codes
    packed = pack(padded.reshape(affine.n, affine.blocks, affine.block), affine.high_first)
    value = _pairs(writer, writer.leaf("packed", packed), 3)
    shape = [affine.n, affine.blocks, affine.block]
    value = writer.node("Reshape", "ToBlocks", [value, writer.ints("block_shape", shape)])
    value = writer.node("Cast", "Widen", [value], to=TensorProto.FLOAT)
    zeros = points.astype(TYPES[affine.scales] if affine.float_points else np.uint8)
    zero = writer.leaf("points", zeros)
    if zeros.dtype != np.float32:
        zero = writer.node("Cast", "WidenPoints", [zero], to=TensorProto.FLOAT)
    zero = writer.node("Unsqueeze", "UnsqueezePoints", [zero, writer.ints("points_axis", [2])])
    value = writer.node("Sub", "Sub", [value, zero])
    if affine.scales != "float32":
        value = writer.node("Cast", "Narrow", [value], to=kind)
    column = writer.node(
        "Unsqueeze", "UnsqueezeScales", [writer.leaf("scales", scales), writer.ints("scales_axis", [2])]
    )
    value = writer.node("Mul", "Mul", [column, value] if affine.swap else [value, column])
    value = writer.node("Reshape", "ToMatrix", [value, writer.ints("shape", [affine.n, affine.padded])])
    if affine.padded != affine.k:
        cut = [writer.ints(name, [number]) for name, number in (("start", 0), ("end", affine.k), ("cut", 1))]
        value = writer.node("Slice", "Cut", [value, *cut])
    return value


def spell(affine: Affine) -> Body:
    """The weight's nodes and tensors, and as output its last value, which the product reads."""
    writer = _Speller(affine)
    value = _arithmetic(writer) if affine.chain == "arithmetic" else _dequantize(writer)
    turns = (affine.first == "n" and affine.turned in ("Transpose", "absent")) or (
        affine.first == "k" and affine.turned in ("transB", "both")
    )
    if affine.cast and affine.cast_first:
        value = writer.node("Cast", "Cast", [value], to=ONNX_TYPE[affine.cast])
    if turns:
        perm = {} if affine.turned == "absent" else {"perm": [1, 0]}
        value = writer.node("Transpose", "Transpose", [value], **perm)
    if affine.cast and not affine.cast_first:
        value = writer.node("Cast", "Cast", [value], to=ONNX_TYPE[affine.cast])
    return Body(writer.nodes, writer.tensors, value)


def build_affine(
    affine: Affine | None = None,
    *,
    place: Sequence[str] = (),
    ir: int = 10,
    products: int = 1,
    calls: int = 1,
    hold: str = "inside",
    **spelling: Any,
) -> BuiltAffine:
    """A model with one affine weight and `products` products by it; `place` as in build.build.

    hold: "inside" or, with "leaves", tensors stay outside of what is innermost; calls: of the outermost function, each
    with tensors of its own.
    """
    affine = replace(affine or Affine(), **spelling)
    rng = np.random.default_rng(affine.seed + 7)
    feeds = {"x": rng.standard_normal((3, affine.k)).astype(TYPES[affine.dtype])}
    if affine.bias:
        feeds["bias"] = rng.standard_normal(affine.n).astype(TYPES[affine.dtype])
    body = spell(affine)
    flip = affine.product == "Gemm" and affine.turned in ("transB", "both")
    attributes: dict[str, Any] = dict(affine.gemm) | ({"transB": 1} if flip else {})
    for number in ["", *range(1, products)]:
        inputs = ["x", body.output, *(["bias"] if affine.bias else [])]
        name = f"{affine.prefix}{affine.product}{number}"
        body.nodes.append(helper.make_node(affine.product, inputs, [f"y{number}"], name, **attributes))
    tensors = body.tensors if hold == "leaves" else []
    body = Body(body.nodes, [] if hold == "leaves" else body.tensors, "y")
    for kind in reversed(place):
        if kind == "If":
            body, feeds["cond"] = _if(body, body, affine), np.array(True)
        else:
            body = {"Loop": _loop, "Scan": _scan, "function": _function}[kind](body, affine)
    names = [body.output] if place else [f"y{number}" for number in ["", *range(1, products)]]
    for call in range(1, calls):
        again, own = copy.deepcopy(body.nodes[-1]), {t.name: t for t in spell(replace(affine, seed=call)).tensors}
        again.name, again.output[0] = f"Call{call}", f"y_call{call}"
        again.input[:] = [f"call{call}/{name}" if name in own else name for name in again.input]
        for name, tensor in own.items():
            tensor.name = f"call{call}/{name}"
        body.nodes.append(again)
        tensors += own.values()
        names.append(again.output[0])
    inputs = [value_of(name, array) for name, array in feeds.items()]
    rank = 2 + sum(kind in ("Loop", "Scan") for kind in place)
    outputs = [helper.make_tensor_value_info(name, ONNX_TYPE[affine.dtype], [None] * rank) for name in names]
    graph = helper.make_graph(body.nodes, "g", inputs, outputs, body.tensors + tensors)
    model = assemble(graph, affine.opset, ir, body.functions)
    return BuiltAffine(model, feeds, decode(affine), affine)

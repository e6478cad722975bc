"""Chains that scale codes less a zero point, by blocks along K: they become QMM."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
from onnx import NodeProto, TensorProto

from lut4tool.formats import DTYPE_NAME, ONNX_DTYPE
from lut4tool.recognize import qmm
from lut4tool.recognize.layout import Axis, Laid
from lut4tool.recognize.proof import Product, Proof
from lut4tool.recognize.qmm import Found, Grid, Types
from lut4tool.recognize.trail import Trail
from lut4tool.recognize.walk import Constant, Place, Value, Walk, attribute, type_name

Chain = Callable[[Walk, Place, Value, bool], Proof]

#: The types of codes, and what a missing zero point is once a code is 0 to 15.
_MIDDLE: Mapping[int, int] = {TensorProto.INT4: 8, TensorProto.UINT4: 0}
#: The first opset with 4-bit types.
_FOUR_BITS = 21
#: What takes the low and the high nibble of a byte: the literal, and whether the operands must be unsigned.
_NIBBLES = {"Mod": 16, "BitwiseAnd": 15, "Div": 16, "BitShift": 4}
_LOW, _HIGH = ("Mod", "BitwiseAnd"), ("Div", "BitShift")
#: What bytes may be cast to: integers that hold them all.
_WIDE = frozenset({
    TensorProto.UINT8, TensorProto.INT16, TensorProto.UINT16, TensorProto.INT32, TensorProto.UINT32,
    TensorProto.INT64, TensorProto.UINT64,
})  # fmt: skip


def chain_of(walk: Walk, weight: Value) -> Chain | None:
    """The function that proves what a weight is, by the operator that makes its values; None: none of this file."""
    maker = _maker(walk, weight, ("Transpose", "Cast", "Reshape", "Slice"))
    if maker is None:
        return None
    if maker.node.op_type == "DequantizeLinear":
        return dequantized
    if maker.node.op_type == "Mul":
        operands = (walk.lookup(maker.scope, name) for name in maker.node.input)
        makers = [_maker(walk, operand, ("Cast",)) for operand in operands if operand is not None]
        if any(made is not None and made.node.op_type == "Sub" for made in makers):
            return arithmetic
    return None


def _maker(walk: Walk, value: Value | None, through: tuple[str, ...]) -> Place | None:
    """The first node before a value that is none of these operators and no Identity."""
    met: set[Value] = set()
    while value is not None and value not in met:
        met.add(value)
        node = value.definition
        if not isinstance(node, NodeProto) or not node.input:
            return None
        if node.op_type not in (*through, "Identity"):
            return Place(value.scope, node)
        value = walk.lookup(value.scope, node.input[0])
    return None


# -- DequantizeLinear


def dequantized(walk: Walk, site: Place, weight: Value, flipped: bool) -> Proof:
    """DequantizeLinear of INT4 or UINT4 codes [K, N] or [N, K]; a Cast and a Transpose or none. Raises Refuse.

    Blocks run along K; one scale for each of the N, or one for all, is a block of the whole K. Codes and zero points
    are 4-bit tensors, or the nibbles of bytes, cast to UINT4.
    """
    trail = Trail(walk)
    transposed, cast, value, at = _turned(trail, weight, site)
    node = trail.node(value, "DequantizeLinear", at, "axis", "block_size")
    codes = _codes(trail, trail.input(node, 0), node)
    scales = walk.constant(trail.input(node, 1), node)
    has_points = len(node.node.input) > 2 and bool(node.node.input[2])
    points = _codes(trail, trail.input(node, 2), node) if has_points else None

    node.require(codes.kind in _MIDDLE, f"codes {codes} is not INT4 or UINT4")
    opset = site.scope.opset
    node.require(opset >= _FOUR_BITS, f"opset {opset}, not {_FOUR_BITS} or later, which have 4-bit types")
    node.require(len(codes.shape) == 2 and min(codes.shape) > 0, f"codes {codes} is not [K, N] or [N, K]")
    weight_dtype = qmm.float_type(node, scales)
    qmm.require_one(node, scales)
    grid = _grid(node, codes.shape, int(transposed != flipped), scales)
    (shape,) = scales.shapes
    if points is not None:
        node.require(points.kind == codes.kind, f"zero points {points} is not of the codes' type")
        node.require(points.shape == shape, f"zero points {points} is not of the scales' shape")

    types = Types(weight_dtype, cast or weight_dtype)
    by_block, by_column = shape == grid.scales, shape == (grid.columns,)
    roles: dict[str, str | Laid] = {
        "packed": codes.packed(grid),
        "scales": scales.name if by_block and grid.axis == 1 else qmm.scales(scales, grid, weight_dtype),
        "zero_points": qmm.one_point(_MIDDLE[codes.kind])
        if points is None
        else points.laid(qmm.lay_points, (grid.columns, grid.blocks) if by_block or by_column else (1, 1), grid.axis),
    }
    axes = {codes.constant.name: codes.unit(grid)}
    if by_block or by_column:
        axes[scales.name] = Axis(1 - grid.axis if by_block else 0, grid.depth)
    if points is not None and (by_block or by_column):
        axes[points.constant.name] = points.unit(grid)
    read = [codes] if points is None else [codes, points]
    shapes = {made.reshape: (-1, made.row) for made in read if made.reshape}
    constants = [scales, *(made.constant for made in read)]
    found = Found("dequantized", grid, types, roles, constants, axes, shapes)
    return qmm.proof(site, Product(site.node.input[0]), weight.name, flipped, trail.nodes(), trail.literals, found)


def _grid(node: Place, shape: tuple[int, ...], axis: int, scales: Constant) -> Grid:
    """The grid that DequantizeLinear's axis, block_size and the shape of its scales say. Raises Refuse."""
    depth, columns = shape[axis], shape[1 - axis]
    (found,) = scales.shapes
    block, along = attribute(node, "block_size", 0), attribute(node, "axis", 1)
    node.require(-2 <= along < 2, f"DequantizeLinear with axis {along}, not one of two")
    grid = Grid(depth, columns, depth + depth % 2 if not block or block >= depth else block, axis)
    if not block:
        if found not in ((), (1,)):
            node.require(along % 2 != axis, f"DequantizeLinear with a scale a row along axis {along}, K, not along N")
            node.require(found == (columns,), f"scales {scales} is not [{columns}], one for each of N")
        return grid
    node.require(along % 2 == axis, f"DequantizeLinear with blocks along axis {along}, N, not along K")
    even = grid.block > 0 and grid.block % 2 == 0
    node.require(even, f"DequantizeLinear with block_size {block}, not positive and even")
    node.require(found == grid.scales, f"scales {scales} is not {list(grid.scales)}, one a block")
    return grid


@dataclass(frozen=True, eq=False)
class _Codes:
    """4-bit codes: elements of a constant, or the nibbles of its bytes."""

    constant: Constant
    kind: int  # INT4 or UINT4
    shape: tuple[int, ...]
    reshape: str = ""  # of nibbles: the value in which they are rows
    row: int = 0  # and how many make a row there, of which `shape` has the first ones
    low_first: bool = True

    def __str__(self) -> str:
        return str(self.constant)

    def packed(self, grid: Grid) -> str | Laid:
        """What QMM holds of these codes: the bytes themselves where they lie as it wants them."""
        shape = qmm.packed_shape(grid)
        row = self.row or self.shape[-1]
        same = grid.axis == 1 and row == grid.blocks * grid.block and self.kind == TensorProto.UINT4 and self.low_first
        if self.reshape and same:
            name, whole = self.constant.name, self.constant.shapes == {shape}
            return name if whole else Laid(qmm.lay_flat, (name,), shape[1:], TensorProto.UINT8, shape, view=True)
        return self.laid(qmm.pack, shape, grid.block, grid.axis, grid.depth, view=same)

    def laid(self, make: Callable[..., np.ndarray], shape: tuple[int, ...], *settings: int, view: bool = False) -> Laid:
        """What a function of qmm.py makes of these codes."""
        how = (self.row, self.shape[-1] if self.row else 0, self.low_first)
        return Laid(make, (self.constant.name,), (*settings, *how), TensorProto.UINT8, shape, view)

    def unit(self, grid: Grid) -> Axis | None:
        """Where one of N lies in the constant; None where that is not whole bytes."""
        if not self.reshape:
            return Axis(1 - grid.axis if len(self.shape) == 2 else 0, grid.depth)
        (dims,) = self.constant.shapes
        entries, rest = divmod(dims[0], grid.columns)
        apart = grid.axis == 0 or self.row % 2 or rest or grid.depth % entries
        return None if apart else Axis(0, grid.depth // entries)


def _codes(trail: Trail, value: Value, at: Place) -> _Codes:
    """A constant of 4-bit elements; or Cast UINT4, Slice or none, and Reshape [rows, codes] of the nibbles of bytes."""
    if trail.op_type(value) not in ("Cast", "Slice", "Reshape"):
        constant = trail.walk.constant(value, at)
        qmm.require_one(at, constant)
        (tensor,) = constant.tensors
        return _Codes(constant, tensor.data_type, tuple(tensor.dims))
    passed: dict[str, Place] = {}
    while (op := trail.op_type(value)) in ("Cast", "Slice", "Reshape") and op not in passed:
        at = passed[op] = trail.node(value, op, at, *{"Cast": ("to",), "Reshape": ("allowzero",)}.get(op, ()))
        value = trail.input(at, 0)
    for wanted in ("Cast", "Reshape"):
        at.require(
            wanted in passed, f"nibbles of bytes with no {wanted}; Cast UINT4 of Reshape [rows, codes] is expected"
        )
    to = attribute(passed["Cast"], "to")
    passed["Cast"].require(to == TensorProto.UINT4, f"Cast of the codes to {type_name(to)}, not UINT4")
    reshape = passed["Reshape"]
    target = trail.literal(reshape, 1)
    two = len(target.values) == 2 and target.dims == (2,) and min(target.values) > 0
    reshape.require(two, f"Reshape to {target}, not to [rows, codes], both positive")
    rows, row = target.values
    width = _cut(trail, passed["Slice"], row) if "Slice" in passed else row
    constant, low_first = _bytes(trail, value, at)
    qmm.require_one(at, constant)
    (dims,) = constant.shapes
    reshape.require(2 * prod(dims) == rows * row, f"Reshape to {target} of {2 * prod(dims)} codes")
    return _Codes(constant, TensorProto.UINT4, (rows, width), reshape.node.output[0], row, low_first)


def _cut(trail: Trail, cut: Place, row: int) -> int:
    """Slice [0 : end] on axis 1: the end."""
    start, end = trail.literal(cut, 1), trail.literal(cut, 2)
    axes, steps = trail.literal(cut, 3, absent=(0, 1)), trail.literal(cut, 4, absent=(1,))
    cut.require(start.is_list(0), f"Slice from {start}, not from [0]")
    cut.require(end.dims == (1,), f"Slice to {end}, not to one end")
    cut.require((axes.values, axes.dims) in (((1,), (1,)), ((-1,), (1,))), f"Slice on axes {axes}, not [1]")
    cut.require(steps.is_list(1), f"Slice with steps {steps}, not [1]")
    cut.require(0 < end.values[0] <= row, f"Slice to {end} of {row}")
    return end.values[0]


def _bytes(trail: Trail, value: Value, at: Place) -> tuple[Constant, bool]:
    """Both nibbles of each byte, side by side on a last axis of their own: (the bytes, whether the low is first)."""
    pairs = trail.node(value, "Concat", at, "axis")
    count = len(pairs.node.input)
    pairs.require(count == 2, f"Concat of {count} values, not of the two nibbles")
    columns = [trail.node(trail.input(pairs, index), "Unsqueeze", pairs) for index in (0, 1)]
    halves = [(trail.input(column, 0), column) for column in columns]
    low_first = trail.op_type(halves[0][0]) in _LOW
    low, high = halves if low_first else halves[::-1]
    source, reader = _nibble(trail, *low, _LOW)
    other, _ = _nibble(trail, *high, _HIGH)
    pairs.require(source == other, "Concat of nibbles of two values, not of one")
    constant = trail.walk.constant(source, reader)
    reader.require(constant.types == {TensorProto.UINT8}, f"packed {constant} is not UINT8")
    ranks = {len(dims) for dims in constant.shapes}
    last = min(ranks)
    reader.require(len(ranks) == 1 and last > 0, f"packed {constant} is not of one rank from 1 on")
    axis = attribute(pairs, "axis")
    pairs.require(axis in (last, -1), f"Concat with axis {axis}, not {last}")
    for column in columns:
        axes = trail.literal(column, 1)
        column.require(axes.is_one(last, -1), f"Unsqueeze on axes {axes.one}, not {last}")
    return constant, low_first


def _nibble(trail: Trail, value: Value, at: Place, ops: tuple[str, str]) -> tuple[Value, Place]:
    """One nibble of each byte, which may be cast before: (the bytes, what reads them)."""
    op = trail.op_type(value)
    node = trail.node(value, op if op in ops else ops[0], at, *(("direction",) if op == "BitShift" else ()))
    source, reader, kind = trail.input(node, 0), node, int(TensorProto.UINT8)
    if trail.op_type(source) == "Cast":
        reader = trail.node(source, "Cast", node, "to")
        kind = attribute(reader, "to")
        reader.require(kind in _WIDE, f"Cast of the bytes to {type_name(kind)}, not to an integer type that holds them")
        source = trail.input(reader, 0)
    if op == "BitShift":
        direction = attribute(node, "direction", b"").decode()
        node.require(direction == "RIGHT", f"BitShift {direction}, not RIGHT")
    literal = trail.literal(node, 1, kind=kind)
    node.require(literal.is_one(_NIBBLES[op]), f"{op} by {literal.one}, not {_NIBBLES[op]}")
    return source, reader


# -- Arithmetic


def arithmetic(walk: Walk, site: Place, weight: Value, flipped: bool) -> Proof:
    """Codes less zero points, times scales, in operators of every opset (qmm.spell writes this chain). Raises Refuse.

    Low nibble first; Reshape [N, blocks, block]; Cast FLOAT; Sub(Unsqueeze(zero points, FLOAT)); where the scales are
    of a half type a Cast to it; Mul(Unsqueeze(scales)); Reshape [N, blocks * block]; Slice [0 : K] of axis 1 or none;
    a Cast or none; a Transpose. Blocks run along K.
    """
    trail = Trail(walk)
    transposed, cast, value, at = _turned(trail, weight, site)
    at.require(transposed != flipped, "no Transpose of a weight [N, K] before the product, which QMM has")
    sliced = None
    if trail.op_type(value) == "Slice":
        at = sliced = trail.node(value, "Slice", at)
        value = trail.input(at, 0)
    matrix = trail.node(value, "Reshape", at, "allowzero")
    product = trail.node(trail.input(matrix, 0), "Mul", matrix)
    steps, column = trail.input(product, 0), trail.input(product, 1)
    if trail.op_type(steps) == "Unsqueeze":
        steps, column = column, steps
    scales = walk.constant(*_column(trail, column, product))
    weight_dtype = qmm.float_type(product, scales)
    at = product
    if weight_dtype != "float32":
        at = trail.node(steps, "Cast", product, "to")
        to = attribute(at, "to")
        at.require(to == ONNX_DTYPE[weight_dtype], f"Cast of the steps to {type_name(to)}, not the scales' type")
        steps = trail.input(at, 0)
    sub = trail.node(steps, "Sub", at)
    widened = trail.node(trail.input(sub, 0), "Cast", sub, "to")
    to = attribute(widened, "to")
    widened.require(to == TensorProto.FLOAT, f"Cast of the codes to {type_name(to)}, not FLOAT")
    points = _float_points(trail, *_column(trail, trail.input(sub, 1), sub), weight_dtype)
    blocked = trail.node(trail.input(widened, 0), "Reshape", widened, "allowzero")
    packed, low_first = _bytes(trail, trail.input(blocked, 0), blocked)
    blocked.require(low_first, "Concat of the high nibble first, not of the low nibble first")

    target, flat = trail.literal(blocked, 1), trail.literal(matrix, 1)
    three = len(target.values) == 3 and target.dims == (3,) and min(target.values) > 0
    blocked.require(three, f"Reshape to {target}, not to [N, blocks, block], all positive")
    columns, blocks, block = target.values
    blocked.require(block % 2 == 0, f"Reshape to {target}, whose block is not even")
    whole = (columns, blocks * block)
    matrix.require(flat.values == whole and flat.dims == (2,), f"Reshape to {flat}, not to {list(whole)}")
    depth = whole[1] if sliced is None else _cut(trail, sliced, whole[1])
    if sliced is not None:
        sliced.require(depth > whole[1] - block, f"Slice to [{depth}], which leaves a block of {block} out")
    grid = Grid(depth, columns, block, 1)
    shape = qmm.packed_shape(grid)
    blocked.require(packed.shapes == {shape}, f"packed {packed} is not {list(shape)}, [N, blocks, block / 2]")
    product.require(scales.shapes == {grid.scales}, f"scales {scales} is not {list(grid.scales)}, one a block")
    fits = points.shapes in ({grid.scales}, {(1, 1)})
    sub.require(fits, f"zero points {points} is not {list(grid.scales)}, one a block, or [1, 1]")

    constants = [packed, scales, points]
    axes: dict[str, Axis | None] = {
        constant.name: Axis(0, depth) for constant in constants if constant.shapes != {(1, 1)} or columns == 1
    }
    roles: dict[str, str | Laid] = {"packed": packed.name, "scales": scales.name, "zero_points": points.name}
    shapes = {blocked.node.output[0]: (-1, blocks, block), matrix.node.output[0]: (-1, whole[1])}
    found = Found("arithmetic", grid, Types(weight_dtype, cast or weight_dtype), roles, constants, axes, shapes)
    return qmm.proof(site, Product(site.node.input[0]), weight.name, flipped, trail.nodes(), trail.literals, found)


def _column(trail: Trail, value: Value, at: Place) -> tuple[Value, Place]:
    """What is one a block, with an axis for the block's elements put in: (the value before, the node reached)."""
    node = trail.node(value, "Unsqueeze", at)
    axes = trail.literal(node, 1)
    node.require(axes.is_one(2, -1), f"Unsqueeze on axes {axes.one}, not 2")
    return trail.input(node, 0), node


def _float_points(trail: Trail, value: Value, at: Place, weight_dtype: str) -> Constant:
    """Zero points in FLOAT, as they are or cast from UINT8 or the scales' type."""
    kinds: set[int] = {TensorProto.UINT8, ONNX_DTYPE[weight_dtype]}
    if trail.op_type(value) == "Cast":
        at = trail.node(value, "Cast", at, "to")
        to = attribute(at, "to")
        at.require(to == TensorProto.FLOAT, f"Cast of the zero points to {type_name(to)}, not FLOAT")
        value = trail.input(at, 0)
    else:
        kinds &= {TensorProto.FLOAT}
    points = trail.walk.constant(value, at)
    one = len(points.types) == 1 and points.types <= kinds
    at.require(one, f"zero points {points} is not UINT8, cast to FLOAT, or of the scales' type")
    return points


# -- What both have


def _turned(trail: Trail, value: Value, at: Place) -> tuple[bool, str, Value, Place]:
    """A Cast and a Transpose, or one or none of them: (transposed, type or "", the value before, the node reached)."""
    transposed, dtype = False, ""
    while True:
        if trail.op_type(value) == "Transpose" and not transposed:
            at = trail.node(value, "Transpose", at, "perm")
            perm = attribute(at, "perm", [1, 0])
            at.require(perm == [1, 0], f"Transpose with perm {perm}, not [1, 0]")
            transposed = True
        elif trail.op_type(value) == "Cast" and not dtype:
            at = trail.node(value, "Cast", at, "to")
            to = attribute(at, "to")
            at.require(to in DTYPE_NAME, f"Cast of the weight to {type_name(to)}, not FLOAT, FLOAT16 or BFLOAT16")
            dtype = DTYPE_NAME[to]
        else:
            return transposed, dtype, value, at
        value = trail.input(at, 0)

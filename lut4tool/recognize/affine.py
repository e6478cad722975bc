"""Chains that scale codes less a zero point, by blocks along K: they become QMM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
from onnx import NodeProto, TensorProto

from lut4tool.formats import DTYPE_NAME, ONNX_DTYPE, QMM
from lut4tool.recognize.layout import Cut, Laid
from lut4tool.recognize.proof import Product, Proof
from lut4tool.recognize.walk import Constant, Place, Trail, Value, Walk, attribute, type_name

#: The types of codes, and what a missing zero point is once a code is 0 to 15.
_MIDDLE: Mapping[int, int] = {TensorProto.INT4: 8, TensorProto.UINT4: 0}
#: The first opset with 4-bit types.
_FOUR_BITS = 21


class Grid(NamedTuple):
    """How the codes of a weight lie: W is [K, N], cut along K into blocks."""

    depth: int  # K
    columns: int  # N
    block: int
    axis: int  # which axis of the codes K is: 0 in codes [K, N], 1 in [N, K]

    @property
    def blocks(self) -> int:
        """Blocks of a column, the last one possibly cut."""
        return -(-self.depth // self.block)

    @property
    def scales(self) -> tuple[int, int]:
        """Shape of what holds one value a block and lies as the codes do."""
        return (self.blocks, self.columns) if self.axis == 0 else (self.columns, self.blocks)


class Types(NamedTuple):
    """What a weight is rounded to, and the type that the product reads."""

    weight_dtype: str
    dtype: str


class Writer(Protocol):
    """What makes nodes, one at a time."""

    def node(self, op: str, *inputs: str, **attributes: Any) -> str:
        """The output of a standard operator on these values."""

    def ints(self, values: list[int]) -> str:
        """An INT64 literal of rank 1."""


def spell(writer: Writer, grid: Grid, types: Types, packed: str, scales: str, points: str) -> str:
    """Write the chain that `arithmetic` proves; its last value, [K, N].

    packed: uint8 [N, blocks, block / 2], low nibble first; scales: [N, blocks] of the weight's type; points: FLOAT,
    [N, blocks] or [1, 1].
    """
    low, high = spell_nibbles(writer, packed, 3)
    pairs = writer.node("Concat", low, high, axis=3)
    codes = writer.node("Reshape", pairs, writer.ints([grid.columns, grid.blocks, grid.block]))
    steps = writer.node("Cast", codes, to=TensorProto.FLOAT)
    steps = writer.node("Sub", steps, writer.node("Unsqueeze", points, writer.ints([2])))
    if types.weight_dtype != "float32":
        steps = writer.node("Cast", steps, to=ONNX_DTYPE[types.weight_dtype])
    product = writer.node("Mul", steps, writer.node("Unsqueeze", scales, writer.ints([2])))
    matrix = writer.node("Reshape", product, writer.ints([grid.columns, grid.blocks * grid.block]))
    if grid.blocks * grid.block != grid.depth:
        matrix = writer.node("Slice", matrix, writer.ints([0]), writer.ints([grid.depth]), writer.ints([1]))
    if types.dtype != types.weight_dtype:
        matrix = writer.node("Cast", matrix, to=ONNX_DTYPE[types.dtype])
    return writer.node("Transpose", matrix, perm=[1, 0])


def spell_nibbles(writer: Writer, packed: str, axis: int) -> tuple[str, str]:
    """The low and the high nibble of each byte, INT64, with an axis of 1 put in at `axis`."""
    whole = writer.node("Cast", packed, to=TensorProto.INT64)
    low, high = writer.node("Mod", whole, writer.ints([16])), writer.node("Div", whole, writer.ints([16]))
    return writer.node("Unsqueeze", low, writer.ints([axis])), writer.node("Unsqueeze", high, writer.ints([axis]))


def is_dequantized(walk: Walk, weight: Value) -> bool:
    """Whether a DequantizeLinear makes the weight, but for what moves or casts its values."""
    met: set[Value] = set()
    value: Value | None = weight
    while value is not None and value not in met:
        met.add(value)
        node = value.definition
        if not isinstance(node, NodeProto) or not node.input:
            return False
        if node.op_type == "DequantizeLinear":
            return True
        moves = node.op_type in ("Identity", "Transpose", "Cast", "Reshape", "Slice")
        value = walk.lookup(value.scope, node.input[0]) if moves else None
    return False


def dequantized(walk: Walk, site: Place, weight: Value, flipped: bool) -> Proof:
    """DequantizeLinear of INT4 or UINT4 codes [K, N] or [N, K]; a Cast and a Transpose or none. Raises Refuse.

    Blocks run along K; one scale for each of the N, or one for all, is a block of the whole K.
    """
    trail = Trail(walk)
    transposed, cast, value, at = _turned(trail, weight, site)
    node = trail.node(value, "DequantizeLinear", at, "axis", "block_size")
    codes, scales = (walk.constant(trail.input(node, index), node) for index in (0, 1))
    held = [codes, scales]
    if len(node.node.input) > 2 and node.node.input[2]:
        held.append(walk.constant(trail.input(node, 2), node))
    for constant in held:
        require_one(node, constant)

    (kind,), (shape,) = codes.types, codes.shapes
    node.require(kind in _MIDDLE, f"codes {codes} is not INT4 or UINT4")
    opset = site.scope.opset
    node.require(opset >= _FOUR_BITS, f"opset {opset}, not {_FOUR_BITS} or later, which have 4-bit types")
    node.require(len(shape) == 2 and min(shape) > 0, f"codes {codes} is not [K, N] or [N, K]")
    weight_dtype = float_type(node, scales)
    grid = _grid(node, shape, int(transposed != flipped), scales)
    for points in held[2:]:
        node.require(points.types == codes.types, f"zero points {points} is not of the codes' type")
        node.require(points.shapes == scales.shapes, f"zero points {points} is not of the scales' shape")

    (shape,), columns = scales.shapes, grid.columns
    by_block, by_column = shape == grid.scales, shape == (columns,)
    new_scales = Laid(lay_rows, (scales.name,), (grid.axis,), ONNX_DTYPE[weight_dtype], (columns, grid.blocks))
    if not by_block and not by_column:
        new_scales = Laid(fill_rows, (scales.name,), (columns,), ONNX_DTYPE[weight_dtype], (columns, 1))
    roles: dict[str, str | Laid] = {
        "packed": Laid(pack, (codes.name,), (grid.block, grid.axis, grid.depth), TensorProto.UINT8, packed_shape(grid)),
        "scales": scales.name if by_block and grid.axis == 1 else new_scales,
        "zero_points": one_point(_MIDDLE[kind]),
    }
    for points in held[2:]:
        size = (columns, grid.blocks) if by_block or by_column else (1, 1)
        roles["zero_points"] = Laid(lay_points, (points.name,), (grid.axis,), TensorProto.UINT8, size)
    axes = {constant.name: (1 - grid.axis, grid.depth) for constant in held if constant is codes or by_block}
    axes |= {constant.name: (0, grid.depth) for constant in held[1:] if by_column}
    found = Found("dequantized", grid, Types(weight_dtype, cast or weight_dtype), roles, held, axes)
    product = Product(site.node.input[0])
    return proof(site, product, weight.name, flipped, trail.nodes(), trail.literals, found)


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
    node.require(
        grid.block > 0 and grid.block % 2 == 0, f"DequantizeLinear with block_size {block}, not positive and even"
    )
    node.require(found == grid.scales, f"scales {scales} is not {list(grid.scales)}, one a block")
    return grid


def require_one(node: Place, constant: Constant) -> None:
    """Refuse what is laid out anew where a function's calls give several tensors."""
    one = len(constant.tensors) == 1
    node.require(one, f"{constant} is another tensor at each call; one is expected where bytes are laid out anew")


def float_type(node: Place, scales: Constant) -> str:
    """The type of the scales, which the weight is rounded to."""
    is_float = len(scales.types) == 1 and scales.types <= DTYPE_NAME.keys()
    node.require(is_float, f"scales {scales} is not FLOAT, FLOAT16 or BFLOAT16")
    return DTYPE_NAME[next(iter(scales.types))]


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


class Found(NamedTuple):
    """What a chain of this file says of a weight, besides where it stands."""

    name: str
    grid: Grid
    types: Types
    roles: Mapping[str, str | Laid]
    constants: Sequence[Constant]
    axes: Mapping[str, tuple[int, int] | None]  # by constant, as in layout.Cut; one None: it is run whole
    shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({})


def proof(
    site: Place,
    product: Product,
    weight: str,
    flipped: bool,
    nodes: tuple[NodeProto, ...],
    literals: Mapping[str, TensorProto],
    found: Found,
) -> Proof:
    """The proof of a QMM, whose units are the N."""
    grid, types = found.grid, found.types
    axes = {name: axis for name, axis in found.axes.items() if axis is not None}
    whole = len(axes) < len(found.axes)
    return Proof(
        site=site.site,
        op=QMM,
        chain_name=found.name,
        rows=grid.columns,
        cols=grid.depth,
        block_size=grid.block,
        weight_dtype=types.weight_dtype,
        dtype=types.dtype,
        product=product,
        attributes={
            "K": grid.depth,
            "N": grid.columns,
            "bits": 4,
            "block_size": grid.block,
            "weight_dtype": ONNX_DTYPE[types.weight_dtype],
            "dtype": ONNX_DTYPE[types.dtype],
        },
        roles=found.roles,
        sources={constant.name: constant.tensors[0] for constant in found.constants},
        literals=literals,
        weight=weight,
        chain=nodes,
        cut=None if whole else Cut(grid.columns, grid.depth, weight, types.dtype, axes, found.shapes),
        opset=site.scope.opset,
        flipped=flipped,
    )


# -- Layout: pure functions of arrays, whole or cut to some of N


def packed_shape(grid: Grid) -> tuple[int, int, int]:
    """Shape of QMM's packed."""
    return (grid.columns, grid.blocks, grid.block // 2)


def one_point(value: int) -> Laid:
    """One zero point for all."""
    return Laid(_one_point, (), (value,), TensorProto.UINT8, (1, 1))


def _one_point(value: int) -> np.ndarray:
    return np.full((1, 1), value, np.uint8)


def pack(array: np.ndarray, block: int, axis: int, depth: int) -> np.ndarray:
    """uint8 [N, blocks, block / 2], low nibble first, of codes [K, N] (axis 0) or [N, K] (axis 1)."""
    rows = _levels(array).T if axis == 0 else _levels(array)
    codes = np.zeros((rows.shape[0], -(-depth // block), block), np.uint8)
    codes.reshape(rows.shape[0], -1)[:, :depth] = rows
    return codes[..., 0::2] | codes[..., 1::2] << 4


def lay_nibbles(array: np.ndarray, blocks: int) -> np.ndarray:
    """uint8 [N, blocks] of two zero points to a byte, low nibble first, a row ending in a whole byte."""
    rows = array.reshape(-1, -(-blocks // 2))
    return np.stack((rows & 15, rows >> 4), axis=-1).reshape(len(rows), -1)[:, :blocks]


def lay_points(array: np.ndarray, axis: int) -> np.ndarray:
    """uint8 [N, blocks] or [1, 1] of zero points in any of DequantizeLinear's shapes."""
    return lay_rows(_levels(array).reshape(-1), axis) if array.ndim < 2 else lay_rows(_levels(array), axis)


def lay_rows(array: np.ndarray, axis: int) -> np.ndarray:
    """[N, blocks] of what is one a block as the codes lie, or one for each of N."""
    if array.ndim < 2:
        return array.reshape(-1, 1)
    return np.ascontiguousarray(array.T if axis == 0 else array)


def lay_flat(array: np.ndarray, *shape: int) -> np.ndarray:
    """[N, *shape] of what runs its last axes together."""
    return array.reshape(-1, *shape)


def fill_rows(array: np.ndarray, columns: int) -> np.ndarray:
    """[N, 1] of what is one for all."""
    return np.full((columns, 1), array.reshape(-1)[0], array.dtype)


def _levels(array: np.ndarray) -> np.ndarray:
    """Codes 0 to 15, uint8: int4 moved up by 8, uint4 as they are."""
    if array.dtype.name == "int4":
        return (array.astype(np.int8) + 8).astype(np.uint8)
    return array.astype(np.uint8)
